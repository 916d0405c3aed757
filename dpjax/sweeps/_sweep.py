"""`sweep`: evaluates a function on a grid of parameters in one call."""

import contextlib
import functools
import os
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree
from dpjax._files._durable import Json
from dpjax._running._devices import (
    Device,
    Layout,
    compilation,
    devices_of,
    outside_any_mesh,
    placed,
    row_of,
    within,
)
from dpjax._running._progress import counting, run_in_flight, saying_what_is_kept, wait_for
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._host_calls import host_errors
from dpjax._tracing._programs import Program, kept_jit
from dpjax.random._chacha20 import CHACHA20, SEEDED_CHACHA20
from dpjax.random._keys import check_sampling_key, is_seeded
from dpjax.sensitivity._chunks import SHARED, SPREAD, on_every
from dpjax.sweeps._axes import MOST_REPEATS, REPEAT, Axis, Output, axes_of, cell_keys
from dpjax.sweeps._parts import Cut, Part, parts_of
from dpjax.sweeps._store import Store

if TYPE_CHECKING:
    from xarray import Dataset, Variable

_PAUSE = 0.2  # The number of seconds between two checks for chunks of other processes.
RELATION = "relation"


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
        self._runs: list[Json] = []
        with contextlib.nullcontext() if store is None else store.agreement():
            for part in self._parts:
                known = None if store is None else store.chunk_size(part.fingerprint)
                size = chunk_size or known or part.default_chunk_size(self._devices[0])
                self._runs.append(
                    {**shared, "function": part.program.fingerprint, "chunk size": size}
                )
            if store is not None:
                self._read(store)
        # Chunks consist of consecutive missing cells, so processes that start together make equal
        # chunks.
        self._chunks: list[list[np.ndarray]] = []
        for run, there in zip(self._runs, self.there, strict=True):
            size, missing = run["chunk size"], np.flatnonzero(~there)
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
        part, size, store = self._parts[i], self._runs[i]["chunk size"], self._store
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
            # A chunk that is too short is padded by repeating its cells. A device without a chunk
            # computes the first chunk of `chunks` again.
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
        sizes = " or ".join(f"{x:,}" for x in sorted({run["chunk size"] for run in self._runs}))
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


def _check_names(axes: Sequence[Axis], outputs: Sequence[Output], units: Mapping[str, str]) -> None:
    """Refuses names that would collide in a dataset, and units for unknown names."""
    coordinates = {REPEAT, *(name for axis in axes for name in axis.coordinates)}
    named = {output.name for output in outputs}
    if both := sorted(coordinates & named):
        raise ValueError(f"outputs must not have names of parameters: {', '.join(both)}")
    own = {name for output in outputs for name in output.dimensions}
    if both := sorted(own & (coordinates | named)):
        raise ValueError(
            "parameters and outputs must not have names of the outputs' axes, got"
            f" {', '.join(both)}: rename the parameter or the output"
        )
    if unknown := sorted(set(units) - coordinates - named):
        raise ValueError(
            f"units must contain only the names {', '.join(sorted(coordinates | named))}, got"
            f" {_checks.shown(unknown)}"
        )


def _dataset(
    axes: Sequence[Axis],
    repeats: int,
    outputs: Sequence[Output],
    values: Sequence[np.ndarray],
    *,
    relations: tuple[Sequence[str], np.ndarray],
    units: Mapping[str, str],
    attributes: dict[str, object],
) -> "Dataset":
    """Makes the dataset from the values of all cells. The cells are in the order of the axes.

    `relations` describes one coordinate of the dataset: the names of its dimensions, and its
    values. Each value is the neighboring relation of the guarantees that the function returns, or
    None.
    """
    xarray = _checks.extra("xarray", "sweep")
    dimensions = (*(axis.name for axis in axes), REPEAT)
    shape = (*map(len, axes), repeats)

    def with_unit(name: str, dims: tuple[str, ...], array: np.ndarray) -> "Variable":
        return xarray.Variable(dims, array, {"units": units[name]} if name in units else {})

    coordinates = {
        name: with_unit(name, (axis.name,), array)
        for axis in axes
        for name, array in axis.coordinates.items()
    }
    coordinates[REPEAT] = with_unit(REPEAT, (REPEAT,), np.arange(repeats))
    variables: dict[str, Variable] = {}
    for output, array in zip(outputs, values, strict=True):
        whole = array.reshape(*shape, *output.shape)
        variables[output.name] = with_unit(output.name, dimensions + output.dimensions, whole)
    # This coordinate is added only if all parts return guarantees, and no parameter or output has
    # its name.
    if None not in relations[1] and RELATION not in (*dimensions, *variables, *coordinates):
        coordinates[RELATION] = xarray.Variable(*relations)
    return xarray.Dataset(variables, coordinates, attributes)


@outside_any_mesh
def sweep(
    key: Key,
    function: Callable[..., PyTree],
    *,
    traced: Mapping[str, PyTree] = {},
    static: Mapping[str, object] = {},
    repeats: int = 1,
    path: str | os.PathLike[str] | None = None,
    progress: bool = False,
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
    units: Mapping[str, str] = {},
) -> "Dataset":
    """Evaluates a function on a grid of parameters, with repeats.

    A cell of the grid has a value of each parameter, and the number of a repeat. Every cell has its
    own key (`dpjax.cell_key`): a function of the given key and of the names and values of its
    coordinates. It depends neither on their order nor on the rest of the grid. So earlier results
    stay valid when you add values or repeats, or compute a part of the grid.

    `jax.vmap` maps over traced parameters and repeats, a padded chunk of cells at a time. The
    function is traced and compiled once for each choice of the static parameters.

    Args:
        key: a typed key. If the function makes releases, the key must come from
            `dpjax.random.seeded_key`. Otherwise it may also be a threefry2x32 key.
        function: `function(key, **parameters)`, in JAX, returns a tree of arrays.
        traced: maps parameter names to values that the function gets as arrays: a list of numbers,
            or a tree of arrays with a leading axis, such as databases, or a batch of sensitivities
            from `jax.vmap`.
        static: maps parameter names to values that the function gets as Python objects: a list of
            numbers, strings, named functions or tuples, or a dict from names to any objects.
        repeats: the number of repeats, at least 1.
        path: a folder for finished chunks. After an interruption, the same call continues from
            there. A call with more values, repeats or choices computes only the new cells. Several
            processes that make the same call share the work: each chunk is computed by one of them.
        progress: shows a bar with rate and time left (needs tqdm). A terminal shows one by default
            if tqdm is installed and the environment does not have TQDM_DISABLE=1.
        chunk_size: cells in a chunk. The default depends on cache or device memory, and on the
            number of cells. If the folder has chunks, the default is their size.
        mesh: devices of this process that share the chunks; by default the default device.
        units: maps names of parameters and outputs to their units.

    Returns:
        An `xarray.Dataset` (needs the extra "sweep"). Its dimensions are the static and the traced
        parameters and "repeat", then the axes of an output: NAME_dim_0 and so on. The name of an
        output joins the keys and attributes in the returned tree by "_"; a single array is "value".
        The coordinates of trees of arrays are an index, and the numbers in each tree; those of
        functions are their names. If the function returns guarantees, the coordinate "relation" is
        their neighboring relation at each choice of static parameters. Attributes are versions,
        device, seconds, and the kind and a digest of the key. `to_netcdf` saves it, and so does
        `to_zarr` if zarr is installed.

    Raises:
        ModuleNotFoundError: if xarray is not installed.
        TypeError: if the key is not a typed key, the function does not return real arrays, or a
            parameter has values of another kind than above.
        ValueError: if a parameter has no values, equal values, NaN, or numbers out of JAX's range;
            if outputs have different names, shapes or dtypes at different static parameters, or two
            things share a name; if the function calls code outside of JAX, or writes to an array
            that it closes over; if the folder is damaged, or of another key, function, version,
            processor or chunk size, which the message names.

    Formal guarantees:
        A sweep adds no privacy to the function. Use it on public or simulated records: its folder
        and attributes contain unkeyed hashes of its parameters. The folder contains a hash of the
        key, never its words. For one chunk size, device and version, a chunk has the same bits in
        every run, on any number of devices and processes. A resumed sweep has the bits of an
        uninterrupted one. If a later call adds cells, their chunks are not those of one call for
        all cells. Keys are the same, and so are integer draws, such as releases. Floats may differ
        in their last bits if these depend on the place in a chunk.

    Source:
        None.

    Example:
        >>> import jax
        >>> import dpjax
        >>> def error(key, epsilon, n):
        ...     key_data, key_release = jax.random.split(key)
        ...     mean = jax.random.uniform(key_data, (n,)).mean()
        ...     return abs(dpjax.laplace(1 / n, epsilon)(key_release, mean).value - 0.5)
        >>> result = dpjax.sweep(
        ...     dpjax.random.seeded_key(0),
        ...     error,
        ...     traced={"epsilon": [0.1, 1.0]},
        ...     static={"n": [10, 1000]},
        ...     repeats=50,
        ... )
        >>> dict(result.sizes)
        {'n': 2, 'epsilon': 2, 'repeat': 50}
        >>> average = result.value.mean("repeat")
        >>> bool(average.sel(n=10, epsilon=0.1) > average.sel(n=1000, epsilon=0.1))
        True
    """
    start = time.monotonic()
    _checks.extra("xarray", "sweep")
    check_sampling_key(key)
    _checks.host_only("sweep", key, "jax.vmap")
    _checks.function("function", function)
    repeats = _checks.integer("repeats", repeats, least=1, most=MOST_REPEATS)
    if chunk_size is not None:
        chunk_size = _checks.integer("chunk_size", chunk_size, least=1)
    traced_axes, static_axes = axes_of(traced, static)
    # Static parameters are the first axes, so that the cells of each part are contiguous in memory.
    axes = [*static_axes, *traced_axes]
    parts = parts_of(function, key, traced_axes, static_axes, repeats)
    outputs = parts[0].outputs
    _check_names(axes, outputs, units)
    devices = devices_of(mesh, calls_host=any(part.program.calls_host for part in parts))
    if any(x is not None and x.process_index != jax.process_index() for x in devices):
        raise ValueError(
            "mesh must have devices of this process only: give each process its own part"
        )
    compiled = compilation(devices)
    # Parameters are sorted by name, because their order affects neither keys nor results.
    one = {axis.name: axis.spec_of_value() for axis in sorted(traced_axes, key=lambda x: x.name)}
    shared = {"key": digest(key), "traced": _checks.described(one), **compiled}
    with contextlib.nullcontext() if path is None else Store(path).in_use() as store:
        work = Work(key, parts, traced_axes, repeats, devices, store)
        work.begin(shared, chunk_size)
        work.finish(progress=progress)
    attributes = {
        **{name.replace(" ", "_"): text for name, text in compiled.items()},
        "key": f"{_kind(key)}, digest {digest(key)}",
        "seconds": time.monotonic() - start,
        "cells_computed": work.computed,
        "cells_found": work.there.size - work.computed,
    }
    choices = np.array([part.relation for part in parts], object)
    relations = [axis.name for axis in static_axes], choices.reshape([*map(len, static_axes)])
    labels = {"relations": relations, "units": units, "attributes": attributes}
    return _dataset(axes, repeats, outputs, work.values, **labels)


def _kind(key: Key) -> str:
    implementation = jax.random.key_impl(key)
    if implementation in (CHACHA20, SEEDED_CHACHA20):
        return "seeded key" if is_seeded(key) else "secure key"
    return f"{implementation} key"
