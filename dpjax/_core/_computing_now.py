"""Computing with known numbers inside of `jit`, `vmap` and `shard_map`."""

import contextlib
from collections.abc import Generator

import jax
import jax.core


@contextlib.contextmanager
def computing_now() -> Generator[None]:
    """Carries out operations on known numbers, so that their results are known too.

    `jax.ensure_compile_time_eval` alone is not enough: in an eager `shard_map`, the result of any
    operation is an array of shards. No operation may have a traced operand.
    """
    with jax.ensure_compile_time_eval(), jax.core.eval_context():
        yield
