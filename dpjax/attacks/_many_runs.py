"""Many runs of one function as one program: `vmap` inside chunks, which bound the memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import PyTree, Value
from dpjax._core._values import Release
from dpjax._running._memory import fitting
from dpjax._tracing._kept_jit import kept_jit
from dpjax._tracing._programs import Program

_MOST_RUNS = 2**32 - 1


def many_runs(
    name: str,
    run: Callable[..., PyTree],
    arguments: tuple[PyTree, ...],
    *,
    count: int,
    chunk_size: int | None,
) -> PyTree:
    """`run(index, *arguments)` for index = 0, ..., count - 1, stacked.

    All chunks run the same program, even the last. A function that traces to a known program is not
    compiled again. Works under `jit` and `vmap`.
    """
    _checks.integer(name, count, least=1, most=_MOST_RUNS)
    specs = TreeSpec.of(arguments).tree()
    program = Program.trace("run", run, jax.ShapeDtypeStruct((), jnp.uint32), *specs)
    size = fitting(program.largest_array, None)
    if chunk_size is not None:
        size = _checks.integer("chunk_size", chunk_size, least=1)
    chunks = -(-count // size)
    mapped = _compiled if program.is_concrete else _mapped
    found = mapped(arguments, program=program, chunks=chunks, size=min(size, count))

    def without_padding(leaf: jax.Array) -> jax.Array:
        return leaf[:count]

    return jax.tree.map(without_padding, found)


def _mapped(arguments: tuple[PyTree, ...], *, program: Program, chunks: int, size: int) -> PyTree:
    def one(index: jax.Array) -> PyTree:
        return program(index, *arguments)

    def chunk(start: jax.Array) -> PyTree:
        return jax.vmap(one)(start + jnp.arange(size, dtype=jnp.uint32))

    starts = jnp.arange(chunks, dtype=jnp.uint32) * jnp.uint32(size)
    return jax.tree.map(_joined, lax.map(chunk, starts))


def _joined(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(-1, *leaf.shape[2:])


_compiled = kept_jit("program", "chunks", "size")(_mapped)


def released_value(released: Release | Value) -> Value:
    """The part of a function's result that an attacker sees: the value of a `Release`."""
    return released.value if isinstance(released, Release) else released
