"""`sweep`: evaluates a function on a grid of parameters in one call."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree
from dpjax._running._devices import compilation, devices_of, outside_any_mesh
from dpjax._tracing._fingerprints import digest
from dpjax.random._chacha20 import CHACHA20, SEEDED_CHACHA20
from dpjax.random._keys import check_sampling_key, is_seeded
from dpjax.sweeps._axes import MOST_REPEATS, REPEAT, Axis, Output, axes_of
from dpjax.sweeps._parts import parts_of
from dpjax.sweeps._store import Store
from dpjax.sweeps._work import Work

if TYPE_CHECKING:
    from xarray import Dataset, Variable


RELATION = "relation"


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
