"""Evaluates a function on a grid of settings in one call."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree
from dpjax._running._compiler import compilation
from dpjax._running._layout import Device, devices_of, outside_any_mesh
from dpjax._running._progress import counting, saying_what_is_kept
from dpjax._tracing._fingerprints import digest
from dpjax.random._facade import CHACHA20, SEEDED_CHACHA20, check_sampling_key, is_seeded
from dpjax.sweeps._axes import Axis, axes_of
from dpjax.sweeps._cell_keys import MOST_REPEATS
from dpjax.sweeps._compute import compute
from dpjax.sweeps._dataset import check_names, dataset
from dpjax.sweeps._parts import Part, parts_of
from dpjax.sweeps._store import Store

if TYPE_CHECKING:
    from xarray import Dataset


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

    A cell of the grid is a value of each parameter, and the number of a repeat. Every cell has its
    own key (`dpjax.cell_key`): a function of the given key and of the names and values of its
    coordinates. It depends neither on their order nor on the rest of the grid. So earlier results
    stay valid when you add values or repeats, or compute a part of the grid.

    `jax.vmap` maps over traced parameters and repeats, a padded chunk of cells at a time. For each
    choice of the static parameters the function is traced and compiled once.

    Args:
        key: a typed key: of `dpjax.random.seeded_key` if the function makes releases, or
            threefry2x32.
        function: `function(key, **parameters)`, in JAX, returns a tree of arrays.
        traced: by name the values of parameters that are arrays to the function: a list of numbers,
            or a tree of arrays with a leading axis, such as databases, or the batch of
            sensitivities that `jax.vmap` returns.
        static: by name the values of parameters that are Python objects to the function: a list of
            numbers, strings, named functions or tuples, or a dict from names to any objects.
        repeats: the number of repeats, at least 1.
        path: a folder that keeps finished chunks. After an interruption, the same call continues
            there. A call with more values, repeats or choices computes only the new cells. Only one
            process at a time may use a folder.
        progress: shows a bar with rate and time left (needs tqdm).
        chunk_size: cells in a chunk. The default depends on cache or device memory, and on the
            number of cells. A folder with chunks keeps its chunk size.
        mesh: devices of this process that share the chunks; by default the default device.
        units: of parameters and outputs, by name.

    Returns:
        An `xarray.Dataset` (needs the extra "sweep"). Its dimensions are the static and the traced
        parameters and "repeat", then those of an output: NAME_dim_0 and so on. The name of an
        output joins the keys and attributes in the returned tree by "_"; a single array is "value".
        The coordinates of trees of arrays are an index, and the numbers in each tree; those of
        functions are their names. Attributes hold versions, device, seconds, and the kind and a
        digest of the key. `to_netcdf` saves it, and so does `to_zarr` if zarr is installed.

    Raises:
        ModuleNotFoundError: if xarray is not installed.
        TypeError: if the key is not a typed key, the function does not return real arrays, or a
            parameter has values of another kind than above.
        ValueError: if a parameter has no values, equal values, NaN, or numbers out of JAX's range;
            if outputs have other names, shapes or dtypes at other static parameters, or two things
            share a name; if the function calls code outside of JAX, or writes to an array that it
            closes over; if the folder is in use, damaged, or of another key, function, version,
            processor or chunk size, which the message names.

    Formal guarantees:
        Results are as private as the function makes them. A sweep is an experiment on public or
        drawn records: its folder and attributes hold unkeyed hashes of its parameters. The folder
        holds a hash of the key, never its words. For one chunk size, device and version, a chunk
        has the same bits in every run and on any number of devices. A resumed sweep has the bits of
        an uninterrupted one. Added cells lie in other chunks than in one call. Their keys are the
        same, and so are draws in integers, such as releases. The last bits of floats are the same
        if they do not depend on the place in a chunk.

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
                    fingerprint=str(runs[part.fingerprint]["function"]),
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


def _run_of(part: Part, size: int, shared: dict[str, str]) -> dict[str, str | int]:
    """Everything that decides the bits of a part. Its chunks on disk must agree on it."""
    return {**shared, "function": part.fingerprint_of_chunks(size), "chunk size": size}


def _keep(
    store: Store | None,
    runs: dict[str, dict[str, str | int]],
    count: Callable[[int], object],
    part: Part,
    values: Sequence[np.ndarray],
    there: np.ndarray,
    cells: np.ndarray,
    computed: Sequence[np.ndarray],
) -> None:
    """Keeps a finished chunk, on disk before anything else."""
    if store is not None:
        run = runs[part.fingerprint]
        store.add(part.fingerprint, run, part.words[cells], computed)
    for array, new in zip(values, computed, strict=True):
        array[cells] = new
    there[cells] = True
    count(len(cells))


def _chunk_size(part: Part, store: Store | None) -> int:
    known = None if store is None else store.chunk_size(part.fingerprint)
    return known or part.default_chunk_size()


def _kind(key: Key) -> str:
    implementation = jax.random.key_impl(key)
    if implementation in (CHACHA20, SEEDED_CHACHA20):
        return "seeded key" if is_seeded(key) else "secure key"
    return f"{implementation} key"


def _described(axes: Sequence[Axis]) -> str:
    """Names and types of the traced parameters."""
    one = {axis.name: axis.spec_of_value() for axis in axes}
    return _checks.described(dict(sorted(one.items())))


def _what_is_kept(there: np.ndarray, store: Store | None) -> str:
    if store is None:
        return "no cell is kept: given path=PATH, the same call goes on where it was"
    return (
        f"{there.sum()} of {there.size} cells are kept in {store.path}: the same call goes on there"
    )


def _devices(mesh: Mesh | None, parts: Sequence[Part]) -> tuple[Device | None, ...]:
    devices = devices_of(mesh, calls_host=any(part.program.calls_host for part in parts))
    if any(x is not None and x.process_index != jax.process_index() for x in devices):
        raise ValueError(
            "mesh must have devices of this process only: give each process its own part"
        )
    return devices
