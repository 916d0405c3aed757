"""The result of a sweep as an `xarray.Dataset`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpjax._core import _checks
from dpjax.sweeps._axes import REPEAT, Axis
from dpjax.sweeps._outputs import Output

if TYPE_CHECKING:
    from xarray import Dataset, Variable

RELATION = "relation"


def check_names(axes: Sequence[Axis], outputs: Sequence[Output], units: Mapping[str, str]) -> None:
    """Refuses names that collide in a dataset, and units of unknown names."""
    coordinates = {REPEAT, *(name for axis in axes for name in axis.coordinates)}
    named = {output.name for output in outputs}
    if both := sorted(coordinates & named):
        raise ValueError(f"outputs must not have names of parameters: {', '.join(both)}")
    own = {name for output in outputs for name in output.dimensions}
    if both := sorted(own & (coordinates | named)):
        raise ValueError(
            f"parameters and outputs must not have the name of an output's dimension:"
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
    relations: tuple[Sequence[str], np.ndarray],
    units: Mapping[str, str],
    attributes: dict[str, object],
) -> "Dataset":
    """Labels the values of all cells, which are in the order of the axes.

    `relations` are the dimensions and the values of a coordinate, where guarantees have relations.
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
    if None not in relations[1] and RELATION not in (*dimensions, *variables, *coordinates):
        coordinates[RELATION] = xarray.Variable(*relations)
    return xarray.Dataset(variables, coordinates, attributes)
