"""The axes of a grid: what was given for each parameter."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dpjax import _checks
from dpjax.sweeps._canonical import as_seen, fingerprint_of_value, name_of
from dpjax.sweeps._outputs import name_of_path

REPEAT = "repeat"


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """The values of one parameter.

    Attributes:
        name: of the parameter, and of the dimension.
        values: of a traced one a tree of arrays with a leading axis, of a static one a list.
        coordinates: arrays along the axis, by name.
        fingerprints: of every value.
    """

    name: str
    values: Any
    coordinates: dict[str, np.ndarray]
    fingerprints: list[bytes]

    def __len__(self) -> int:
        return len(self.fingerprints)


def axes_of(traced: Mapping[str, Any], static: Mapping[str, Any]) -> tuple[list[Axis], list[Axis]]:
    """The traced and the static axes, in the order given."""
    for name in [*traced, *static]:
        if not isinstance(name, str) or not name.isidentifier() or name in ("key", REPEAT):
            raise ValueError(
                f"parameters must have names that the function knows them by, other than key and"
                f" {REPEAT}, got {_checks.shown(name)}"
            )
    if both := sorted(set(traced) & set(static)):
        raise ValueError(f"parameters must be traced or static, not both: {', '.join(both)}")
    traced_axes = [_traced(name, values) for name, values in traced.items()]
    static_axes = [_static(name, values) for name, values in static.items()]
    names = [name for axis in (*traced_axes, *static_axes) for name in axis.coordinates]
    if len(set(names)) < len(names):
        raise ValueError(f"two parameters name one coordinate, got {', '.join(sorted(names))}")
    return traced_axes, static_axes


def _traced(name: str, values: Any) -> Axis:
    if _is_list_of_numbers(values):
        values = np.array(values)
    leaves, structure = jax.tree.flatten(values)
    if any(_checks.is_traced(leaf) for leaf in leaves):
        raise TypeError(f"{name} is traced, but sweep runs on the host")
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError(
            f"{name} must be a list of numbers, or arrays with an axis of values in front, got"
            f" {_checks.shown(values)}; choices of anything else go into static"
        )
    sizes = {np.shape(leaf)[0] for leaf in leaves}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"{name} must have as many values in all arrays, at least 1, got"
            f" {_checks.described(values)}"
        )
    (size,) = sizes
    seen = jax.tree.unflatten(structure, [_without_a_sign_of_zero(name, leaf) for leaf in leaves])
    fingerprints = [
        fingerprint_of_value(name, jax.tree.map(lambda x, i=i: x[i], seen)) for i in range(size)
    ]
    _refuse_equals(name, fingerprints, list(range(size)))
    return Axis(name, seen, _coordinates(name, values, size), fingerprints)


def _without_a_sign_of_zero(name: str, leaf: Any) -> np.ndarray:
    """As JAX holds it; -0.0 becomes 0.0, which it counts as: a folder may hold either."""
    seen = as_seen(name, leaf)
    return seen + seen.dtype.type(0) if seen.ndim == 1 else seen


def _is_list_of_numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple, range)) and all(
        np.ndim(value) == 0 and not isinstance(value, str) and jax.tree.leaves(value) == [value]
        for value in values
    )


def _coordinates(name: str, values: Any, size: int) -> dict[str, np.ndarray]:
    """The numbers as they were given; of trees an index, and the numbers that each one has."""
    paths, _ = jax.tree_util.tree_flatten_with_path(values)
    numbers = [
        (f"{name}_{name_of_path(path)}" if path else name, _indexable(leaf))
        for path, leaf in paths
        if np.ndim(leaf) == 1
    ]
    coordinates = dict(numbers)
    if len(coordinates) < len(numbers):
        raise ValueError(
            f"{name} must give its numbers distinct names, got"
            f" {', '.join(coordinate for coordinate, _ in numbers)}"
        )
    return {name: np.arange(size), **coordinates}


def _indexable(leaf: Any) -> np.ndarray:
    """Of a dtype that tables can look up and files can hold."""
    array = np.asarray(leaf)
    if array.dtype.kind in "biuf" and array.dtype != np.float16:
        return array
    return array.astype(float)


def _static(name: str, values: Any) -> Axis:
    if isinstance(values, Mapping):
        labels, values = list(values), list(values.values())
    elif isinstance(values, Sequence) and not isinstance(values, str):
        values = list(values)
        labels = [_label(name, value) for value in values]
    else:
        raise TypeError(
            f"{name} must be a list of values, or a dict of names and values, got"
            f" {_checks.shown(values)}"
        )
    if not labels:
        raise ValueError(f"{name} must have at least one value")
    fingerprints = [fingerprint_of_value(name, label) for label in labels]
    _refuse_equals(name, fingerprints, labels)
    _refuse_equals(name, list(map(str, labels)), labels)
    return Axis(name, values, {name: _array_of_labels(labels)}, fingerprints)


def _label(name: str, value: Any) -> Any:
    """A value itself if it can stand on an axis, or its name."""
    if value is None or isinstance(value, (str, np.generic)):
        return value
    if (label := name_of(value)) is not None and label != "<lambda>":
        return label
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, tuple):
        return tuple(_label(name, item) for item in value)
    raise TypeError(
        f"{name} must have values that name themselves (numbers, strings, None, named functions,"
        f" tuples of them), got {_checks.shown(value)}: give a dict of names and values"
    )


def _array_of_labels(labels: list[Any]) -> np.ndarray:
    numbers = all(isinstance(label, (int, float, np.number)) for label in labels)
    booleans = [isinstance(label, bool) for label in labels]
    if numbers and all(booleans) == any(booleans):
        return _indexable(labels)
    return np.array(list(map(str, labels)), dtype=object)


def _refuse_equals(name: str, known_by: list[Any], labels: list[Any]) -> None:
    first: dict[Any, Any] = {}
    for mark, label in zip(known_by, labels, strict=True):
        if mark in first:
            raise ValueError(
                f"{name} must have distinct values, got {_checks.shown(first[mark])} and"
                f" {_checks.shown(label)}, which count as one"
            )
        first[mark] = label
