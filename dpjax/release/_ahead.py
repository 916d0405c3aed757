"""The programs of a first release, compiled at the same time, before anything is paid."""

import functools
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._open_ledgers import untold_programs
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key
from dpjax._tracing._programs import Program, evaluate_alone
from dpjax.release._prepared import compiling


@runtime_checkable
class CompilesAhead(Protocol):
    """A mechanism whose draw can be compiled before there is a value."""

    def _compile(self, key: Key, value: TreeSpec) -> None: ...


def known_ahead(
    mechanism: object, program: Program, key: Key, records: Database
) -> CompilesAhead | None:
    """The mechanism, if both programs are known before the release; none may call the host."""
    if not isinstance(mechanism, CompilesAhead) or not program.is_concrete or program.calls_host:
        return None
    leaves = jax.tree.leaves(records)
    if any(map(_checks.is_traced, (key, *leaves, *jax.tree.leaves(mechanism)))):
        return None
    # A device that was chosen is a part of a program.
    return None if any(leaf.committed for leaf in leaves) else mechanism


def compile_ahead(mechanism: CompilesAhead, program: Program, key: Key, records: TreeSpec) -> None:
    """Compiles target and draw: while XLA compiles one, Python traces the other.

    What the draw refuses, this refuses. Of the key, only the kind counts.
    """
    # The settings of a release, so that it finds these programs.
    with jax.debug_nans(False), jax.debug_infs(False), untold_programs():
        target = _compiling(program, records)
        try:
            mechanism._compile(_key_of_zeros(key), program.outputs)
        finally:
            target.exception()  # The release meets the same one.


@functools.lru_cache(maxsize=256)
def _compiling(program: Program, records: TreeSpec) -> Future[None]:
    """A target that XLA compiles, or has compiled."""
    return compiling(evaluate_alone.lower(records.tree(), program=program))


def _key_of_zeros(key: Key) -> Key:
    """A public key of the same kind."""
    words = jax.eval_shape(jax.random.key_data, key)
    zeros = jax.device_put(np.zeros(words.shape, words.dtype))
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(key))
