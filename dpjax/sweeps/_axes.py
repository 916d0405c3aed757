"""The axes of a grid of parameters, and the random key of each cell."""

import dataclasses
import enum
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree
from dpjax._tracing._fingerprints import digest
from dpjax.random._keys import check_sampling_key


def fingerprint_of_value(name: str, value: PyTree) -> bytes:
    """Returns a 128-bit hash of a parameter's name and value. Equal values have equal hashes.

    Numbers are converted to JAX's dtypes, and then compared without regard to the dtype: 1, 1.0 and
    float32's 1 are equal, and 0.0 equals -0.0. Functions and enum members are equal if their names
    are.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is None)
    parts = tuple((jax.tree_util.keystr(path), _canonical(name, leaf)) for path, leaf in leaves)
    return bytes.fromhex(digest(name, parts))


def as_held(name: str, value: ArrayLike) -> np.ndarray:
    """Converts numbers to JAX's dtype. Raises an error if a number is out of its range."""
    if jnp.issubdtype(getattr(value, "dtype", object), jax.dtypes.prng_key):
        raise TypeError(
            f"{name} must be numbers, got keys: derive keys from the key that is passed to the "
            "function"
        )
    array = _checks.host_numbers(name, value)
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    with np.errstate(all="ignore"):
        held = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    # Rounding of floats is accepted, but not overflow to infinity. Integers must not change.
    overflow = np.isfinite(array) != np.isfinite(held) if floats else held != array
    if np.any(overflow):
        raise ValueError(f"{name} must fit {held.dtype}, got {_checks.shown(value)}: enable x64")
    return held


def name_of(value: object) -> str | None:
    """Returns the name of a function or of a member of an enumeration; None for other values."""
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__name__", None) if callable(value) else None


def _canonical(name: str, leaf: PyTree) -> tuple[str, str | np.ndarray]:
    if leaf is None or isinstance(leaf, (bool, np.bool_)):
        return "constant", str(leaf)
    if isinstance(leaf, str):
        return "text", leaf
    if (text := name_of(leaf)) is not None:
        return "text", text
    if isinstance(leaf, int):
        return "number", str(leaf)  # A static integer may be beyond the range of JAX's integers.
    array = as_held(name, leaf)
    if array.ndim:
        return "array", array
    if array.dtype == bool:
        return "constant", str(bool(array))
    if np.isnan(array):
        raise ValueError(f"{name} must not contain NaN, because NaN cannot be a coordinate")
    number = float(array) if jnp.issubdtype(array.dtype, jnp.floating) else int(array)
    return "number", str(number if np.isinf(array) else Fraction(number))


@dataclasses.dataclass(frozen=True)
class Output:
    """One array that the function returns for each cell."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Returns the names of the dimensions of one cell's array."""
        return tuple(f"{self.name}_dim_{i}" for i in range(len(self.shape)))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


def outputs_of(spec: TreeSpec) -> tuple[Output, ...]:
    """Returns the arrays of a value, named by their keys and attributes, or "value"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(spec.tree())
    outputs = tuple(Output(name_of_path(path), leaf.shape, leaf.dtype) for path, leaf in leaves)
    names = [output.name for output in outputs]
    if len(set(names)) < len(names):
        raise ValueError(f"function must give its outputs distinct names, got {', '.join(names)}")
    return outputs


def name_of_path(path: tuple[object, ...]) -> str:
    """Joins keys and attributes by "_". An array without a name is called "value"."""
    named = (jax.tree_util.DictKey, jax.tree_util.GetAttrKey)
    start = () if path and isinstance(path[0], named) else ("value",)
    parts = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return "_".join((*start, *parts))


REPEAT = "repeat"


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """The values of one parameter.

    Attributes:
        name: the name of the parameter, and of the dimension.
        values: a tree of arrays with a leading axis if traced, a list if static.
        coordinates: arrays along the axis, by name.
        fingerprints: the fingerprints of every value.
    """

    name: str
    values: PyTree
    coordinates: dict[str, np.ndarray]
    fingerprints: list[bytes]

    def __len__(self) -> int:
        return len(self.fingerprints)

    def values_at(self, places: np.ndarray) -> PyTree:
        """Returns the values at some indices of a traced axis."""
        return jax.tree.map(operator.itemgetter(places), self.values)

    def spec_of_value(self) -> PyTree:
        """Returns the shapes and dtypes of a single value of a traced axis."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.values)


def axes_of(
    traced: Mapping[str, PyTree], static: Mapping[str, object]
) -> tuple[list[Axis], list[Axis]]:
    """Returns the traced and the static axes, in the given order."""
    names: list[object] = [*traced, *static]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in ("key", REPEAT):
            raise ValueError(
                "traced and static must be dicts from names of parameters to values. No name may be"
                f" 'key' or {REPEAT!r}, got {_checks.shown(name)}"
            )
    if both := sorted(set(traced) & set(static)):
        raise ValueError(f"parameters must be traced or static, not both: {', '.join(both)}")
    traced_axes = [_traced(name, values) for name, values in traced.items()]
    static_axes = [_static(name, values) for name, values in static.items()]
    labels = [label for axis in (*traced_axes, *static_axes) for label in axis.coordinates]
    if len(set(labels)) < len(labels):
        raise ValueError(f"coordinates must have distinct names, got {', '.join(sorted(labels))}")
    return traced_axes, static_axes


def _traced(name: str, values: PyTree) -> Axis:
    if _is_list_of_numbers(values):
        values = np.array(values)
    leaves, structure = jax.tree.flatten(values)
    if any(_checks.is_traced(leaf) for leaf in leaves):
        raise TypeError(
            f"{name} must not be traced, because sweep runs on the host: call sweep outside of "
            "jit and vmap"
        )
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError(
            f"{name} must be a list of numbers, or arrays with a leading axis of values, got"
            f" {_checks.shown(values)}; pass other values in static instead of traced"
        )
    size, *others = {np.shape(leaf)[0] for leaf in leaves}
    if others or size == 0:
        raise ValueError(
            f"{name} must have the same number of values in all arrays, at least 1, got"
            f" {_checks.described(values)}"
        )
    # The function receives exactly the numbers from which fingerprints and keys of cells are
    # computed.
    tree = jax.tree.unflatten(structure, [_without_sign_of_zero(name, leaf) for leaf in leaves])
    fingerprints = [
        fingerprint_of_value(name, jax.tree.map(operator.itemgetter(i), tree)) for i in range(size)
    ]
    _refuse_equals(name, fingerprints, list(range(size)))
    return Axis(name, tree, _coordinates(name, values, size), fingerprints)


def _without_sign_of_zero(name: str, leaf: ArrayLike) -> np.ndarray:
    """Converts numbers to JAX's dtype, and -0.0 to 0.0.

    The two zeros have the same fingerprint, but a function could tell them apart.
    """
    held = as_held(name, leaf)
    return held + held.dtype.type(0) if held.ndim == 1 else held


def _is_list_of_numbers(values: PyTree) -> bool:
    return isinstance(values, (list, tuple, range)) and all(
        np.ndim(value) == 0 and not isinstance(value, str) and jax.tree.leaves(value) == [value]
        for value in values
    )


def _coordinates(name: str, values: PyTree, size: int) -> dict[str, np.ndarray]:
    """Returns the coordinates of an axis: arrays with one entry for each point, by name.

    If `values` is a vector, it is the only coordinate. If not, one coordinate contains the indices
    of the points, and each leaf that is a vector is another coordinate.
    """
    paths = [x for x in jax.tree_util.tree_leaves_with_path(values) if np.ndim(x[1]) == 1]
    names = [f"{name}_{name_of_path(path)}" if path else name for path, _ in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"{name} must give its numbers distinct names, got {', '.join(names)}")
    numbers = (_indexable(leaf) for _, leaf in paths)
    return {name: np.arange(size), **dict(zip(names, numbers, strict=True))}


def _indexable(leaf: ArrayLike | list[object]) -> np.ndarray:
    """Converts to an array of a dtype that xarray can index and files can store."""
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
    # Values with the same text are refused, too, because their coordinates would be equal.
    _refuse_equals(name, list(map(str, labels)), labels)
    return Axis(name, list(values), {name: _array_of_labels(labels)}, fingerprints)


def _label(name: str, value: PyTree) -> object:
    """Returns the value itself if it can be a coordinate, or else its name."""
    if (label := name_of(value)) is not None and label != "<lambda>":
        return label
    if value is None or isinstance(value, (str, np.generic, bool, int, float)):
        return value
    if isinstance(value, tuple):
        return tuple(_label(name, item) for item in value)
    raise TypeError(
        f"{name} must have values that can be labels (numbers, strings, None, named functions, or"
        f" tuples of them), got {_checks.shown(value)}: for other values, give a dict from names to"
        " values"
    )


def _array_of_labels(labels: list[object]) -> np.ndarray:
    # Labels that are all numbers, or all booleans, become a numeric coordinate. A mixture does not,
    # although Python counts booleans as integers.
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
                f" {_checks.shown(label)}: a sweep treats them as the same value"
            )
        first[identity] = label


MOST_REPEATS = 2**32 - 1


def cell_key(key: Key, coordinates: Mapping[str, object], *, repeat: int = 0) -> Key:
    """The key of one cell of a `dpjax.sweep`, to run the cell alone.

    Args:
        key: the key of the sweep.
        coordinates: the value of every parameter, traced and static, by name. For a static
            parameter that was given as a dict, use the name of the value.
        repeat: the number of the repeat, from 0.

    Returns:
        A key of the same implementation.

    Raises:
        TypeError: if the key is not a typed key, or a value has a type that sweeps do not accept.
        ValueError: if the repeat is out of range, or a value is NaN.

    Formal guarantees:
        First a 128-bit hash of names and values is folded into the key, then the repeat. Distinct
        cells have distinct keys, except for random collisions of 128 bits, or of the 64 bits of a
        threefry2x32 key.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
        >>> one = dpjax.cell_key(key, {"epsilon": 1, "n": 100})
        >>> bool(one == dpjax.cell_key(key, {"n": 100, "epsilon": 1.0}))
        True
    """
    check_sampling_key(key)
    repeat = _checks.integer("repeat", repeat, least=0, most=MOST_REPEATS)
    cell = fingerprint_of_cell(fingerprint_of_value(*item) for item in sorted(coordinates.items()))
    return cell_keys(key, words_of_cells([cell], np.array([repeat])))[0]


def fingerprint_of_cell(fingerprints: Iterable[bytes]) -> bytes:
    """Hashes the fingerprints of a cell's parameters to 128 bits, in the order of their names."""
    return hashlib.sha256(b"".join(fingerprints)).digest()[:16]


def words_of_cells(cells: list[bytes], repeats: np.ndarray) -> np.ndarray:
    """Returns the words to fold into the key, uint32 of shape (cells * repeats, 5)."""
    of_cells = np.frombuffer(b"".join(cells), ">u4").astype(np.uint32).reshape(len(cells), -1)
    words = np.repeat(of_cells, len(repeats), axis=0)
    return np.column_stack([words, np.tile(repeats.astype(np.uint32), len(cells))])


@jax.jit
def cell_keys(key: Key, words: jax.Array) -> Key:
    """Returns the keys of cells, from words of shape (cells, 5)."""
    words = jnp.asarray(words)

    def fold(keys: Key, data: jax.Array) -> tuple[Key, None]:
        return jax.vmap(jax.random.fold_in)(keys, data), None

    # With a scan, the fold is compiled once instead of once for each of the five words.
    keys, _ = lax.scan(fold, jnp.broadcast_to(key, words.shape[:1]), words.T)
    return keys
