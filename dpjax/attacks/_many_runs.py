"""Many runs of one function as one program: `vmap` inside chunks, which bound its memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._values import Release
from dpjax._running._memory import fitting
from dpjax._tracing._programs import Program

_MOST_RUNS = 2**32 - 1


def many_runs(
    name: str,
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    count: int,
    chunk_size: int | None,
) -> Any:
    """`run(index, *arguments)` for index = 0, ..., count - 1, stacked.

    Every chunk is the same program, the last one too; a function that traces to a known program is
    not compiled again. Works under `jit` and `vmap`.
    """
    _checks.integer(name, count, least=1, most=_MOST_RUNS)
    specs = TreeSpec.of(arguments).tree()
    program = Program.trace("run", run, jax.ShapeDtypeStruct((), jnp.uint32), *specs)
    size = fitting(program.largest_array())
    if chunk_size is not None:
        size = _checks.integer("chunk_size", chunk_size, least=1)
    chunks = -(-count // size)
    mapped = _compiled if program.is_concrete else _mapped
    found = mapped(arguments, program=program, chunks=chunks, size=min(size, count))
    return jax.tree.map(lambda leaf: leaf[:count], found)


def _mapped(arguments: tuple[Any, ...], *, program: Program, chunks: int, size: int) -> Any:
    def chunk(start: jax.Array) -> Any:
        indices = start + jnp.arange(size, dtype=jnp.uint32)
        return jax.vmap(lambda index: program(index, *arguments))(indices)

    starts = jnp.arange(chunks, dtype=jnp.uint32) * jnp.uint32(size)
    found = lax.map(chunk, starts)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)


_compiled = functools.partial(jax.jit, static_argnames=("program", "chunks", "size"))(_mapped)


def released_value(released: Any) -> Any:
    """What an attacker sees of what a function returned: the value of a `Release`."""
    return released.value if isinstance(released, Release) else released
