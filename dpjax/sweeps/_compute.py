"""Computes chunks of cells of a part, over devices."""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core._types import Key, PyTree
from dpjax._running._in_flight import run_in_flight
from dpjax._running._layout import Device, Layout, placed, row_of, within
from dpjax._running._waiting import wait_for
from dpjax._tracing._kept_jit import kept_jit
from dpjax._tracing._origins import host_errors
from dpjax._tracing._programs import Program
from dpjax.sensitivity._blocks import SHARED, SPREAD, on_every
from dpjax.sweeps._axes import Axis
from dpjax.sweeps._cell_keys import cell_keys
from dpjax.sweeps._cut import Cut
from dpjax.sweeps._parts import Part

# Takes the cells of a chunk, and their values.
Keep = Callable[[np.ndarray, list[np.ndarray]], None]
# Takes the cells of a chunk, and says whether this process shall compute them.
Claim = Callable[[np.ndarray], bool]


def compute(
    key: Key,
    part: Part,
    chunks: Sequence[np.ndarray],
    *,
    axes: Sequence[Axis],
    repeats: int,
    size: int,
    devices: tuple[Device | None, ...],
    claim: Claim,
    keep: Keep,
) -> None:
    """Computes the chunks of a part that it can claim, one on every device at a time.

    A chunk is padded to full size with its own cells, so all chunks run the same program, and the
    bits of one do not depend on the others.
    """
    if not chunks:
        return
    layout = Layout(devices, len(chunks) * size, size)
    key = placed(key, layout)
    shape = [len(axis) for axis in axes]

    def claimed() -> Iterator[list[int | None]]:
        for step in layout.steps():
            mine = [c if c is not None and claim(chunks[c]) else None for c in step]
            if any(c is not None for c in mine):
                yield mine

    def start(step: list[int | None]) -> tuple[list[np.ndarray], list[jax.Array]]:
        of_chunks = [chunks[0][:0] if c is None else chunks[c] for c in step]
        padded = np.concatenate([np.resize(x if len(x) else chunks[0], size) for x in of_chunks])
        places = np.unravel_index(padded // repeats, shape) if shape else ()
        values = {a.name: a.values_at(place) for a, place in zip(axes, places, strict=True)}
        mesh = row_of(layout.local.values())
        with within(mesh):
            words = part.words[padded]
            out = _run_chunk(key, words, values, cut=part.cut, mesh=mesh)
        return of_chunks, out

    def finish(started: tuple[list[np.ndarray], list[jax.Array]]) -> None:
        of_chunks, out = started
        for array in out:
            wait_for(array, (part.program,), devices[0])
        values = [
            np.asarray(array).reshape(len(of_chunks), size, *array.shape[1:]) for array in out
        ]
        for i, of_chunk in enumerate(of_chunks):
            if len(of_chunk):
                keep(of_chunk, [array[i, : len(of_chunk)] for array in values])

    with host_errors():
        run_in_flight(claimed(), start, finish, programs=(part.program,), device=devices[0])


def _run_chunk(
    key: Key, words: np.ndarray, values: PyTree, *, cut: Cut, mesh: Mesh | None
) -> list[jax.Array]:
    """The outputs of the cells of a chunk: its keys, then its draws, then the rest."""
    keys, kind = _compiled_keys(key, words, mesh=mesh), jax.random.key_impl(key)
    drawn = [_compiled_draw(keys, program=draw, kind=kind, mesh=mesh) for draw in cut.draws]
    return _compiled_rest(keys, values, drawn, program=cut.rest, kind=kind, mesh=mesh)


# Keys travel as words: `jax.debug_key_reuse` would take each program for another use of a key.
@functools.partial(jax.jit, static_argnames="mesh")
def _compiled_keys(key: Key, words: jax.Array, *, mesh: Mesh | None) -> jax.Array:
    def chunk(key: Key, words: jax.Array) -> jax.Array:
        return jax.random.key_data(cell_keys(key, words))

    return on_every(mesh, chunk, (SHARED, SPREAD))(key, words)


@kept_jit("program", "kind", "mesh")
def _compiled_draw(
    keys: jax.Array, *, program: Program, kind: Hashable, mesh: Mesh | None
) -> PyTree:
    def chunk(keys: jax.Array) -> PyTree:
        return jax.vmap(program)(jax.random.wrap_key_data(keys, impl=kind))

    return on_every(mesh, chunk, (SPREAD,))(keys)


@kept_jit("program", "kind", "mesh")
def _compiled_rest(
    keys: jax.Array,
    values: PyTree,
    drawn: PyTree,
    *,
    program: Program,
    kind: Hashable,
    mesh: Mesh | None,
) -> list[jax.Array]:
    def chunk(keys: jax.Array, values: PyTree, drawn: PyTree) -> list[jax.Array]:
        keys = jax.random.wrap_key_data(keys, impl=kind)
        return jax.tree.leaves(jax.vmap(program)(keys, values, *drawn))

    return on_every(mesh, chunk, (SPREAD, SPREAD, SPREAD))(keys, values, drawn)
