"""The axes of a grid: the values of each parameter."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax.sweeps._canonical import as_held, fingerprint_of_value, name_of
from dpjax.sweeps._outputs import name_of_path

REPEAT = "repeat"


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """The values of one parameter.

    Attributes:
        name: of the parameter, and of the dimension.
        values: a tree of arrays with a leading axis if traced, a list if static.
        coordinates: arrays along the axis, by name.
        fingerprints: of every value.
    """

    name: str
    values: PyTree
    coordinates: dict[str, np.ndarray]
    fingerprints: list[bytes]

    def __len__(self) -> int:
        return len(self.fingerprints)

    def values_at(self, places: np.ndarray) -> PyTree:
        """The values at some places of a traced axis."""
        leaves, structure = jax.tree.flatten(self.values)
        return jax.tree.unflatten(structure, [leaf[places] for leaf in leaves])

    def spec_of_value(self) -> PyTree:
        """Shapes and dtypes of one value of a traced axis."""
        return jax.tree.map(_spec_of_row, self.values)


def axes_of(
    traced: Mapping[str, PyTree], static: Mapping[str, object]
) -> tuple[list[Axis], list[Axis]]:
    """The traced and the static axes, in the given order."""
    names: list[object] = [*traced, *static]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in ("key", REPEAT):
            raise ValueError(
                f"parameters must have names of the function's parameters, other than key and"
                f" {REPEAT}, got {_checks.shown(name)}"
            )
    if both := sorted(set(traced) & set(static)):
        raise ValueError(f"parameters must be traced or static, not both: {', '.join(both)}")
    traced_axes = [_traced(name, values) for name, values in traced.items()]
    static_axes = [_static(name, values) for name, values in static.items()]
    labels = [label for axis in (*traced_axes, *static_axes) for label in axis.coordinates]
    if len(set(labels)) < len(labels):
        raise ValueError(f"coordinates must have distinct names, got {', '.join(sorted(labels))}")
    return traced_axes, static_axes


def _spec_of_row(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def _traced(name: str, values: PyTree) -> Axis:
    if _is_list_of_numbers(values):
        values = np.array(values)
    leaves, structure = jax.tree.flatten(values)
    if any(_checks.is_traced(leaf) for leaf in leaves):
        raise TypeError(f"{name} is traced, but sweep runs on the host")
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError(
            f"{name} must be a list of numbers, or arrays whose first axis is that of values, got"
            f" {_checks.shown(values)}; give other choices as static"
        )
    sizes = {np.shape(leaf)[0] for leaf in leaves}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"{name} must have the same number of values in all arrays, at least 1, got"
            f" {_checks.described(values)}"
        )
    (size,) = sizes
    held = [_without_sign_of_zero(name, leaf) for leaf in leaves]
    fingerprints = [
        fingerprint_of_value(name, jax.tree.unflatten(structure, [leaf[i] for leaf in held]))
        for i in range(size)
    ]
    _refuse_equals(name, fingerprints, list(range(size)))
    tree = jax.tree.unflatten(structure, held)
    return Axis(name, tree, _coordinates(name, values, size), fingerprints)


def _without_sign_of_zero(name: str, leaf: ArrayLike) -> np.ndarray:
    """Numbers as JAX holds them. -0.0 becomes 0.0: a folder that holds one serves the other."""
    held = as_held(name, leaf)
    return held + held.dtype.type(0) if held.ndim == 1 else held


def _is_list_of_numbers(values: PyTree) -> bool:
    return isinstance(values, (list, tuple, range)) and all(
        np.ndim(value) == 0 and not isinstance(value, str) and jax.tree.leaves(value) == [value]
        for value in values
    )


def _coordinates(name: str, values: PyTree, size: int) -> dict[str, np.ndarray]:
    """The given numbers; for trees an index, and the numbers in each tree."""
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


def _indexable(leaf: ArrayLike | list[object]) -> np.ndarray:
    """An array of a dtype that tables can look up and files can hold."""
    array = np.asarray(leaf)
    if array.dtype.kind in "biuf" and array.dtype != np.float16:
        return array
    return array.astype(float)


def _static(name: str, values: PyTree) -> Axis:
    labels: list[object]
    if isinstance(values, Mapping):
        labels, values = list(values), list(values.values())
    elif isinstance(values, Sequence) and not isinstance(values, str):
        labels = [_label(name, value) for value in values]
    else:
        raise TypeError(
            f"{name} must be a list of values, or a dict from names to values, got"
            f" {_checks.shown(values)}"
        )
    if not labels:
        raise ValueError(f"{name} must have at least one value")
    fingerprints = [fingerprint_of_value(name, label) for label in labels]
    _refuse_equals(name, fingerprints, labels)
    _refuse_equals(name, list(map(str, labels)), labels)
    return Axis(name, list(values), {name: _array_of_labels(labels)}, fingerprints)


def _label(name: str, value: PyTree) -> object:
    """A value itself if it can be a coordinate, or its name."""
    if value is None or isinstance(value, (str, np.generic)):
        return value
    if (label := name_of(value)) is not None and label != "<lambda>":
        return label
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, tuple):
        return tuple(_label(name, item) for item in value)
    raise TypeError(
        f"{name} must have values that can be labels (numbers, strings, None, named functions,"
        f" tuples of them), got {_checks.shown(value)}: give a dict from names to values"
    )


def _array_of_labels(labels: list[object]) -> np.ndarray:
    numbers = all(isinstance(label, (int, float, np.number)) for label in labels)
    booleans = [isinstance(label, bool) for label in labels]
    if numbers and all(booleans) == any(booleans):
        return _indexable(labels)
    return np.array(list(map(str, labels)), dtype=object)


def _refuse_equals(name: str, identities: Sequence[bytes | str], labels: Sequence[object]) -> None:
    first: dict[bytes | str, object] = {}
    for identity, label in zip(identities, labels, strict=True):
        if identity in first:
            raise ValueError(
                f"{name} must have distinct values, got {_checks.shown(first[identity])} and"
                f" {_checks.shown(label)}, which count as one"
            )
        first[identity] = label
