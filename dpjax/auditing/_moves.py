"""Values that check a mechanism: neighbors in one or two coordinates, and special numbers."""

import itertools
import math
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import Value
from dpjax._core._values import Norm
from dpjax._exact._numerics import is_float
from dpjax.auditing._audit import ROUNDING_OF_DISTANCE
from dpjax.sensitivity._norms import distance

# If there are more pairs of coordinates than this number, this many of them are chosen at random.
_MOST_PAIRS = 64
# Special floats by their names in messages. For integers, infinities are replaced by the extremes
# of the dtype.
_STRANGE: dict[str, tuple[float, ...]] = {
    "nan": (math.nan,),
    "inf": (math.inf,),
    "-inf": (-math.inf,),
    "the largest float": (sys.float_info.max,),
    "minus the largest float": (-sys.float_info.max,),
    "-0.0": (-0.0,),
    "both infinities and nan": (math.inf, -math.inf, math.nan),
}
_STRANGE_INTEGERS = ("inf", "-inf")

_Place = tuple[int, int]  # The index of a leaf, and an index in the flattened leaf.
_distance = jax.jit(distance, static_argnums=0)


def single_moves(norm: Norm, most: float, value: Value, neighbor: Value) -> list[tuple[str, Value]]:
    """Returns values in which one coordinate is increased or decreased, each with a description.

    Args:
        norm: the norm of distances.
        most: the largest distance from the value.
        value: a pytree of arrays.
        neighbor: another value. If the norm only counts coordinates, `neighbor` shows how far to
            move them.
    """
    found: list[tuple[str, Value]] = []
    for (place, step), sign in itertools.product(_steps(norm, most, value, neighbor), (1, -1)):
        moved = _moved(value, {place: sign * step})
        if 0 < float(_distance(norm, value, moved)) <= most * (1 + ROUNDING_OF_DISTANCE):
            found.append((f"{_name(value, place)} moved by {sign * step:g}", moved))
    return found


def double_moves(
    norm: Norm, most: float, value: Value, neighbor: Value, seed: int
) -> list[tuple[str, Value]]:
    """Returns values in which two coordinates changed, each with a description.

    Each float changes by half of the largest change that is allowed for it alone.
    """
    pairs = list(itertools.combinations(_steps(norm, most, value, neighbor), 2))
    if len(pairs) > _MOST_PAIRS:
        chosen = np.random.default_rng(seed).choice(len(pairs), _MOST_PAIRS, replace=False)
        pairs = [pairs[i] for i in chosen.tolist()]
    floats = [is_float(leaf) for leaf in jax.tree.leaves(value)]
    return [
        (
            f"{_name(value, pair[0][0])} and {_name(value, pair[1][0])} moved",
            _moved(value, {place: step / 2 if floats[place[0]] else step for place, step in pair}),
        )
        for pair in pairs
    ]


def _steps(norm: Norm, most: float, value: Value, neighbor: Value) -> list[tuple[_Place, float]]:
    """Returns, for each coordinate, how far it may change if no other coordinate changes.

    Integers that cannot change are left out.
    """
    leaves, structure = jax.tree.flatten(value)
    zeros = jax.tree.unflatten(structure, [np.zeros(np.shape(x), "float32") for x in leaves])
    spreads = [
        float(np.ptp(np.concatenate([np.ravel(x), np.ravel(y)]).astype(float)))
        for x, y in zip(leaves, jax.tree.leaves(neighbor), strict=True)
    ]
    found: list[tuple[_Place, float]] = []
    for place in ((i, index) for i, leaf in enumerate(leaves) for index in range(np.size(leaf))):
        unit = float(_distance(norm, _moved(zeros, {place: 1.0}), zeros))
        step = most / unit * (1 - ROUNDING_OF_DISTANCE / 4)
        if norm == "hamming":
            step = spreads[place[0]] or 1.0
        if not is_float(leaves[place[0]]):
            step = math.floor(step * (1 + ROUNDING_OF_DISTANCE))
        if step:
            found.append((place, step))
    return found


def _moved(value: Value, steps: dict[_Place, float]) -> Value:
    leaves, structure = jax.tree.flatten(value)
    leaves = [np.array(leaf) for leaf in leaves]
    for (leaf, index), step in steps.items():
        flat = leaves[leaf].reshape(-1)
        if is_float(flat):
            flat[index] += np.asarray(step, flat.dtype)
        elif flat.dtype == bool:
            flat[index] ^= True
        else:
            limits = np.iinfo(flat.dtype)
            flat[index] = min(max(int(flat[index]) + int(step), limits.min), limits.max)
    return jax.tree.unflatten(structure, leaves)


def _name(value: Value, place: _Place) -> str:
    path, leaf = jax.tree_util.tree_leaves_with_path(value)[place[0]]
    inside = np.unravel_index(place[1], np.shape(leaf))
    return f"value{jax.tree_util.keystr(path)}" + "".join(f"[{i}]" for i in inside)


def strange_values(value: Value, count: int) -> Iterator[tuple[str, Value]]:
    """Yields batches of values with special numbers, one batch for each kind of special number.

    In the first value of a batch, all numbers are special. Every other value has one special
    coordinate, which is different in each value. A batch covers all coordinates if there are fewer
    than `count`.

    Args:
        value: a pytree of arrays.
        count: the size of a batch.

    Yields:
        The name of the kind, and a pytree with a leading axis.
    """
    leaves, structure = jax.tree.flatten(value)
    for name in _STRANGE if any(map(is_float, leaves)) else _STRANGE_INTEGERS:
        yield name, jax.tree.unflatten(structure, _batches(leaves, _STRANGE[name], count))


def _batches(leaves: list[jax.Array], strange: tuple[float, ...], count: int) -> list[np.ndarray]:
    sizes = [np.size(leaf) for leaf in leaves]
    # The index -1 means that all coordinates are special.
    places = np.resize(np.arange(-1, sum(sizes)), count)[:, None]
    batches: list[np.ndarray] = []
    for leaf, end, size in zip(leaves, np.cumsum(sizes), sizes, strict=True):
        numbers = np.array([_as_number(x, np.dtype(leaf.dtype)) for x in strange], leaf.dtype)
        chosen = (places == -1) | (places == np.arange(end - size, end))
        filled = np.where(chosen, np.resize(numbers, size), np.ravel(leaf))
        batches.append(filled.astype(leaf.dtype).reshape(count, *np.shape(leaf)))
    return batches


def _as_number(strange: float, dtype: np.dtype) -> float:
    floating = jnp.issubdtype(dtype, jnp.floating)
    if (not math.isfinite(strange) and floating) or strange == 0:
        return strange if floating else 0
    limits = jnp.finfo(dtype) if floating else jnp.iinfo("uint1" if dtype.kind == "b" else dtype)
    return (float if floating else int)(limits.min if strange < 0 else limits.max)
