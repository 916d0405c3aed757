"""The result of a sweep as an `xarray.Dataset`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax._core import _checks
from dpjax.sweeps._axes import REPEAT, Axis
from dpjax.sweeps._outputs import Output


def check_names(axes: Sequence[Axis], outputs: Sequence[Output], units: Mapping[str, str]) -> None:
    """Refuses names that no dataset could tell apart, and units of what is not there."""
    coordinates = {REPEAT, *(name for axis in axes for name in axis.coordinates)}
    named = {output.name for output in outputs}
    if both := sorted(coordinates & named):
        raise ValueError(f"function must not name outputs like parameters: {', '.join(both)}")
    own = {name for output in outputs for name in output.dimensions}
    if both := sorted(own & (coordinates | named)):
        raise ValueError(
            f"parameters and outputs must not be named like a dimension of an output:"
            f" {', '.join(both)}"
        )
    if unknown := sorted(set(units) - coordinates - named):
        raise ValueError(
            f"units must be of {', '.join(sorted(coordinates | named))}, got"
            f" {_checks.shown(unknown)}"
        )


def dataset(
    axes: Sequence[Axis],
    repeats: int,
    outputs: Sequence[Output],
    values: Sequence[np.ndarray],
    *,
    units: Mapping[str, str],
    attributes: dict[str, Any],
) -> Any:
    """Labels the values of all cells, which lie in the order of the axes."""
    xarray = _checks.extra("xarray", "sweep")
    dimensions = (*(axis.name for axis in axes), REPEAT)
    shape = (*map(len, axes), repeats)

    def with_unit(name: str, dims: tuple[str, ...], array: np.ndarray) -> Any:
        return xarray.Variable(dims, array, {"units": units[name]} if name in units else {})

    coordinates = {
        name: with_unit(name, (axis.name,), array)
        for axis in axes
        for name, array in axis.coordinates.items()
    }
    coordinates[REPEAT] = with_unit(REPEAT, (REPEAT,), np.arange(repeats))
    variables = {}
    for output, array in zip(outputs, values, strict=True):
        whole = array.reshape(*shape, *output.shape)
        variables[output.name] = with_unit(output.name, dimensions + output.dimensions, whole)
    return xarray.Dataset(variables, coordinates, attributes)
