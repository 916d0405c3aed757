"""Grids of settings in one call."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._running._compiler import compilation
from dpjax._running._layout import devices_of, outside_any_mesh
from dpjax._running._progress import counting, saying_what_is_kept
from dpjax._tracing._fingerprints import digest
from dpjax.random._facade import CHACHA20, SEEDED_CHACHA20, check_sampling_key, is_seeded
from dpjax.sweeps._axes import Axis, axes_of
from dpjax.sweeps._cell_keys import MOST_REPEATS
from dpjax.sweeps._compute import compute
from dpjax.sweeps._dataset import check_names, dataset
from dpjax.sweeps._parts import Part, parts_of
from dpjax.sweeps._store import Store


@outside_any_mesh
def sweep(
    key: jax.Array,
    function: Callable[..., Any],
    *,
    traced: Mapping[str, Any] = {},
    static: Mapping[str, Any] = {},
    repeats: int = 1,
    path: str | os.PathLike[str] | None = None,
    progress: bool = False,
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
    units: Mapping[str, str] = {},
) -> Any:
    """Evaluates a function on a grid of parameters, several times at each place.

    Every cell of the grid, a value of each parameter and the number of a repeat, has a key of its
    own (`dpjax.cell_key`): a function of the key given and of the names and values of its
    coordinates, whatever their order, and whatever else is on the grid. So more values, parts of
    the grid and more repeats keep what was there.

    Traced parameters and repeats are mapped over by `jax.vmap`, a padded chunk of cells at a time;
    for each choice of the static ones the function is traced once, and compiled once, whatever
    the values of the others are.

    Args:
        key: a typed key: of `dpjax.random.seeded_key`, where the function releases something, or
            threefry2x32.
        function: `function(key, **parameters)`, in JAX, to a tree of arrays.
        traced: by name the values of parameters that are arrays to the function: a list of
            numbers, or a tree of arrays with a leading axis, such as databases, or the batch of
            sensitivities that `jax.vmap` returns.
        static: by name the values of parameters that are Python to the function: a list of
            numbers, strings, named functions or tuples, or a dict of anything by names of its own.
        repeats: how many times, at least 1.
        path: a folder that keeps finished chunks. The same call, interrupted, goes on from there; a
            call with more values, repeats or choices computes those alone. One process at a time.
        progress: shows a bar with rate and time left (needs tqdm).
        chunk_size: cells in a chunk; by default by what fits the cache or the device and by how
            many cells there are, and that of the folder, where it holds some.
        mesh: devices of this process to spread chunks over; by default the default device.
        units: of parameters and outputs, by name.

    Returns:
        An `xarray.Dataset` (needs the extra "sweep"). Its dimensions are the static and the traced
        parameters and "repeat", then those of an output: NAME_dim_0 and so on. Outputs are named by
        the keys and attributes of the tree that the function returns, joined by "_", a single array
        is "value". Trees of arrays have a number as coordinate, and the numbers that each one
        has; functions their names. Attributes say versions, device, seconds, and the kind and a
        digest of the key. `to_netcdf` saves it, and, where zarr is installed, `to_zarr`.

    Raises:
        ModuleNotFoundError: if xarray is not installed.
        TypeError: if the key is not a typed key, the function does not return real arrays, or a
            parameter has values of a kind that is not described above.
        ValueError: if a parameter has no values, equal ones, NaN, or numbers that JAX does not
            hold; if outputs have other names, shapes or dtypes at other static parameters, or a
            name means two things; if the function calls code outside of JAX, or writes to an array
            that it closes over; if the folder is in use, damaged, or of another key, function,
            version, processor or batch size, which the message names.

    Formal guarantees:
        None for what it returns, which is as private as the function makes it: a sweep is an
        experiment on public or drawn records, and its folder and attributes hold unkeyed hashes of
        its parameters. Of the key a hash is stored, never its words. For one batch size, device and
        version a chunk has the same bits in any run and on any number of devices, and a resumed
        sweep has those of an uninterrupted one. What is added to a grid lies in other chunks than
        it would in one call: keys are the same, what is drawn from them in integers (releases) too,
        and the last bits of floats where they do not depend on the place in a chunk.

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
    axes = [*static_axes, *traced_axes]
    parts = parts_of(function, key, traced_axes, static_axes, repeats)
    outputs = parts[0].outputs
    check_names(axes, outputs, units)
    devices = _devices(mesh, parts)
    compiled = compilation(devices)
    shape = len(parts), len(parts[0])
    values = [np.empty((*shape, *output.shape), output.dtype) for output in outputs]
    there = np.zeros(shape, bool)
    with contextlib.nullcontext() if path is None else Store(path).opened() as store:
        sizes = [chunk_size or _chunk_size(part, store) for part in parts]
        shared = {"key": digest(key), "traced": _described(traced_axes), **compiled}
        runs = {
            part.fingerprint: _run_of(part, size, shared)
            for part, size in zip(parts, sizes, strict=True)
        }
        if store is not None:
            store.check(runs, {part.fingerprint: part.name for part in parts})
            for i, part in enumerate(parts):
                there[i] = store.found(part.fingerprint, part.words, [x[i] for x in values])
        found = int(there.sum())
        with (
            saying_what_is_kept(functools.partial(_what_is_kept, there, store)),
            counting("cells", there.size, done=found, shown=progress) as count,
        ):
            for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                compute(
                    key,
                    part,
                    np.flatnonzero(~there[i]),
                    axes=traced_axes,
                    repeats=repeats,
                    size=size,
                    fingerprint=runs[part.fingerprint]["function"],
                    devices=devices,
                    keep=functools.partial(
                        _keep, store, runs, count, part, [x[i] for x in values], there[i]
                    ),
                )
    attributes = {
        **{name.replace(" ", "_"): text for name, text in compiled.items()},
        "key": f"{_kind(key)}, digest {digest(key)}",
        "seconds": time.monotonic() - start,
        "cells_computed": there.size - found,
        "cells_found": found,
    }
    return dataset(axes, repeats, outputs, values, units=units, attributes=attributes)


def _run_of(part: Part, size: int, shared: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides the bits of a part: what its chunks on disk must agree on."""
    return {**shared, "function": part.fingerprint_of_chunks(size), "batch size": size}


def _keep(
    store: Store | None,
    runs: dict[str, dict[str, Any]],
    count: Callable[[int], Any],
    part: Part,
    values: Sequence[np.ndarray],
    there: np.ndarray,
    cells: np.ndarray,
    computed: Sequence[np.ndarray],
) -> None:
    """Keeps a finished chunk, first of all on disk."""
    if store is not None:
        run = runs[part.fingerprint]
        store.add(part.fingerprint, run, part.words[cells], computed)
    for array, new in zip(values, computed, strict=True):
        array[cells] = new
    there[cells] = True
    count(len(cells))


def _chunk_size(part: Part, store: Store | None) -> int:
    known = None if store is None else store.batch_size(part.fingerprint)
    return known or part.default_chunk_size()


def _kind(key: jax.Array) -> str:
    implementation = jax.random.key_impl(key)
    if implementation in (CHACHA20, SEEDED_CHACHA20):
        return "seeded key" if is_seeded(key) else "secure key"
    return f"{implementation} key"


def _described(axes: Sequence[Axis]) -> str:
    """Names and types of the traced parameters."""
    one = {
        axis.name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), axis.values)
        for axis in axes
    }
    return _checks.described(dict(sorted(one.items())))


def _what_is_kept(there: np.ndarray, store: Store | None) -> str:
    if store is None:
        return "no cell is kept: given path=PATH, the same call goes on where it was"
    return (
        f"{there.sum()} of {there.size} cells are kept in {store.path}: the same call goes on there"
    )


def _devices(mesh: Mesh | None, parts: Sequence[Part]) -> tuple[Any, ...]:
    devices = devices_of(mesh, calls_host=any(part.program.calls_host for part in parts))
    if any(x is not None and x.process_index != jax.process_index() for x in devices):
        raise ValueError("mesh must have devices of this process only: give each its own part")
    return devices
