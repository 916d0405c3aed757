"""`Work`: computes the missing cells of a sweep in chunks, shared with other processes."""

import contextlib
import functools
import random
import time
from collections.abc import Hashable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core._types import Key, PyTree
from dpjax._files._durable import Json
from dpjax._running._devices import Device, Layout, placed, row_of, within
from dpjax._running._progress import counting, run_in_flight, saying_what_is_kept, wait_for
from dpjax._tracing._host_calls import host_errors
from dpjax._tracing._programs import Program, kept_jit
from dpjax.sensitivity._chunks import SHARED, SPREAD, on_every
from dpjax.sweeps._axes import Axis, cell_keys
from dpjax.sweeps._parts import Cut, Part
from dpjax.sweeps._store import Store

_PAUSE = 0.2  # The number of seconds between two checks for chunks of other processes.


class Work:
    """The cells of all parts, and the values that were computed so far.

    Attributes:
        values: for each output, the values of all cells.
        there: for each cell of each part, whether its values are known.
        computed: the number of cells that this process has computed.
    """

    def __init__(
        self,
        key: Key,
        parts: Sequence[Part],
        axes: Sequence[Axis],
        repeats: int,
        devices: tuple[Device | None, ...],
        store: Store | None,
    ) -> None:
        # Every part has the same cells: all combinations of the traced parameters and the repeats.
        shape = len(parts), len(parts[0])
        self.values = [np.empty((*shape, *x.shape), x.dtype) for x in parts[0].outputs]
        self.there = np.zeros(shape, bool)
        self.computed = 0
        self._key, self._parts, self._axes, self._repeats = key, parts, axes, repeats
        self._devices, self._store = devices, store

    def begin(self, shared: Json, chunk_size: int | None) -> None:
        """Divides the missing cells into chunks.

        `shared` describes what the runs of all parts share.
        """
        store = self._store
        self._sizes: list[int] = []
        self._runs: list[Json] = []
        with contextlib.nullcontext() if store is None else store.agreement():
            for part in self._parts:
                known = None if store is None else store.chunk_size(part.fingerprint)
                size = chunk_size or known or part.default_chunk_size(self._devices[0])
                run = {**shared, "function": part.program.fingerprint, "chunk size": size}
                self._sizes.append(size)
                self._runs.append(run)
            if store is not None:
                self._read(store)
        # Chunks consist of consecutive missing cells, so processes that start together make equal
        # chunks.
        self._chunks: list[list[np.ndarray]] = []
        for size, there in zip(self._sizes, self.there, strict=True):
            missing = np.flatnonzero(~there)
            self._chunks.append([missing[x : x + size] for x in range(0, len(missing), size)])
        self._order = list(range(len(self._parts)))
        if store is not None:
            # The order is random, so that processes start in different places and rarely repeat
            # each other's work.
            for ordered in (self._order, *self._chunks):
                random.Random().shuffle(ordered)

    def _read(self, store: Store) -> None:
        """Reads the cells on disk, and writes a description of what this process will compute."""
        runs = {part.fingerprint: run for part, run in zip(self._parts, self._runs, strict=True)}
        store.check(runs, {part.fingerprint: part.name for part in self._parts})
        for i, part in enumerate(self._parts):
            store.say(part.fingerprint, self._runs[i])
            values = [array[i] for array in self.values]
            self.there[i] = store.found(part.fingerprint, part.words, values)

    def finish(self, *, progress: bool) -> None:
        """Computes the chunks that no other process computes, and waits for the other processes."""
        done, plan = int(self.there.sum()), self._plan()
        with (
            saying_what_is_kept(self._what_is_kept),
            counting("cells", self.there.size, done=done, shown=progress, plan=plan) as self._count,
        ):
            while not self.there.all():
                for i in self._order:
                    if chunks := self._missing(i):
                        self._compute(i, chunks)
                if self._store is not None and not self.there.all():
                    self._gather(self._store)

    def _compute(self, i: int, chunks: list[np.ndarray]) -> None:
        """Computes those chunks of part i that no other process has claimed.

        Each device computes one chunk at a time. A chunk is padded to full size with copies of its
        own cells. So all chunks run the same program, and the bits of a chunk do not depend on
        other chunks.
        """
        part, size, store = self._parts[i], self._sizes[i], self._store
        layout = Layout(self._devices, len(chunks) * size, size)
        key = placed(self._key, layout)
        shape = [len(axis) for axis in self._axes]
        nothing = chunks[0][:0]

        def claimed() -> Iterator[list[np.ndarray]]:
            """Yields one chunk per device. It is empty if another process computes the chunk."""
            for step in layout.steps():
                mine = [nothing if c is None else chunks[c] for c in step]
                if store is not None:
                    mine = [
                        x if len(x) and store.claim(part.fingerprint, part.words[x]) else nothing
                        for x in mine
                    ]
                if any(map(len, mine)):
                    yield mine

        def start(step: list[np.ndarray]) -> tuple[list[np.ndarray], list[jax.Array]]:
            # Chunks are padded by repeating cells. A device without a chunk repeats the first chunk
            # of the part.
            padded = np.concatenate([np.resize(x if len(x) else chunks[0], size) for x in step])
            places = np.unravel_index(padded // self._repeats, shape) if shape else ()
            values = {a.name: a.values_at(x) for a, x in zip(self._axes, places, strict=True)}
            mesh = row_of(layout.local.values())
            with within(mesh):
                return step, _run_chunk(key, part.words[padded], values, cut=part.cut, mesh=mesh)

        def finish(started: tuple[list[np.ndarray], list[jax.Array]]) -> None:
            step, out = started
            for array in out:
                wait_for(array, (part.program,), self._devices[0])
            values = [np.asarray(x).reshape(len(step), size, *x.shape[1:]) for x in out]
            for place, cells in enumerate(step):
                if len(cells):
                    of_chunk = [array[place, : len(cells)] for array in values]
                    # The chunk is written to disk first, so that an interruption loses nothing.
                    if store is not None:
                        store.add(part.fingerprint, self._runs[i], part.words[cells], of_chunk)
                    self.computed += len(cells)
                    self._keep(i, cells, of_chunk)

        device = self._devices[0]
        with host_errors():
            run_in_flight(claimed(), start, finish, programs=(part.program,), device=device)

    def _gather(self, store: Store) -> None:
        """Reads chunks that other processes have computed. Waits a moment if there are none."""
        before = self.there.sum()
        for i, part in enumerate(self._parts):
            for cells in self._missing(i):
                values = store.read(part.fingerprint, self._runs[i], part.words[cells])
                if values is not None:
                    self._keep(i, cells, values)
        if self.there.sum() == before:
            time.sleep(_PAUSE)

    def _missing(self, i: int) -> list[np.ndarray]:
        return [cells for cells in self._chunks[i] if not self.there[i, cells].all()]

    def _keep(self, i: int, cells: np.ndarray, values: Sequence[np.ndarray]) -> None:
        for array, of_chunk in zip(self.values, values, strict=True):
            array[i, cells] = of_chunk
        self.there[i, cells] = True
        self._count(len(cells))

    def _plan(self) -> str:
        """Returns a line of text about the cells that will be computed."""
        cells, known = f"{self.there.size:,} cells", f"{self.there.sum():,}"
        kept = "" if self._store is None else f" ({known} of them found in {self._store.path})"
        sizes = " or ".join(f"{size:,}" for size in sorted(set(self._sizes)))
        choices = f"{len(self._parts):,} choice" + "s" * (len(self._parts) > 1)
        return f"sweep: {choices} of static parameters, {cells}{kept}, {sizes} at a time"

    def _what_is_kept(self) -> str:
        if self._store is None:
            return "no cells are saved: with path=PATH, the same call would continue from here"
        kept = f"{self.there.sum()} of {self.there.size} cells are saved in {self._store.path}"
        return f"{kept}: the same call continues from there"


def _run_chunk(
    key: Key, words: np.ndarray, values: PyTree, *, cut: Cut, mesh: Mesh | None
) -> list[jax.Array]:
    """Computes the outputs of a chunk: the keys of its cells, then the draws, then the rest."""
    keys, kind = _compiled_keys(key, words, mesh=mesh), jax.random.key_impl(key)
    drawn = [_compiled_draw(keys, program=draw, kind=kind, mesh=mesh) for draw in cut.draws]
    return _compiled_rest(keys, values, drawn, program=cut.rest, kind=kind, mesh=mesh)


# Keys are passed to the program as words, because otherwise `jax.debug_key_reuse` would count each
# program as another use of the key.
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
