"""Evaluating operations on known numbers immediately, inside `jit`, `vmap` and `shard_map`."""

import contextlib
from collections.abc import Generator

import jax
import jax.core


@contextlib.contextmanager
def computing_now() -> Generator[None]:
    """A context in which JAX executes operations on known numbers instead of tracing them.

    `jax.ensure_compile_time_eval` alone is not enough: inside an eager `shard_map`, the result of
    any operation would be an array of shards. No operation in the context may have a traced
    operand.
    """
    with jax.ensure_compile_time_eval(), jax.core.eval_context():
        yield
