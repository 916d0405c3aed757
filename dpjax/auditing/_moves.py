"""Values near a value: one or two coordinates move as far as a norm allows."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import Value
from dpjax._core._values import Norm
from dpjax.sensitivity._norms import distance

# Relative rounding error of a distance between floats.
_ROUNDING = 1e-6
# If there are more pairs of coordinates, this many are chosen at random.
_MOST_PAIRS = 64

Moved = tuple[str, Value]
_Place = tuple[int, int]  # A leaf, and an index in it, flattened.
_distance = jax.jit(distance, static_argnums=0)


def single_moves(norm: Norm, most: float, value: Value, neighbor: Value) -> list[Moved]:
    """Values in which one coordinate moved up or down, each with a description.

    Args:
        norm: of distances.
        most: the largest distance from the value.
        value: a pytree of arrays.
        neighbor: another one. If the norm counts coordinates, it shows how far they may move.
    """
    found: list[Moved] = []
    for (place, step), sign in itertools.product(_steps(norm, most, value, neighbor), (1, -1)):
        moved = _moved(value, {place: sign * step})
        if 0 < float(_distance(norm, value, moved)) <= most * (1 + _ROUNDING):
            found.append((f"{_name(value, place)} moved by {sign * step:g}", moved))
    return found


def double_moves(norm: Norm, most: float, value: Value, neighbor: Value, seed: int) -> list[Moved]:
    """Values in which two coordinates moved; floats move by half of their step alone."""
    pairs = list(itertools.combinations(_steps(norm, most, value, neighbor), 2))
    if len(pairs) > _MOST_PAIRS:
        chosen = np.random.default_rng(seed).choice(len(pairs), _MOST_PAIRS, replace=False)
        pairs = [pairs[i] for i in chosen.tolist()]
    return [
        (
            f"{_name(value, one)} and {_name(value, other)} moved",
            _moved(value, {one: _part(value, one, first), other: _part(value, other, second)}),
        )
        for (one, first), (other, second) in pairs
    ]


def _steps(norm: Norm, most: float, value: Value, neighbor: Value) -> list[tuple[_Place, float]]:
    """The steps that each coordinate may move alone, without integers that may not move."""
    leaves, structure = jax.tree.flatten(value)
    zeros = jax.tree.unflatten(structure, [np.zeros(np.shape(x), "float32") for x in leaves])
    spreads = [
        float(np.ptp(np.concatenate([np.ravel(x), np.ravel(y)]).astype(float)))
        for x, y in zip(leaves, jax.tree.leaves(neighbor), strict=True)
    ]
    found: list[tuple[_Place, float]] = []
    for place in ((i, index) for i, leaf in enumerate(leaves) for index in range(np.size(leaf))):
        unit = float(_distance(norm, _moved(zeros, {place: 1.0}), zeros))
        step = most / unit * (1 - _ROUNDING / 4)
        if norm == "hamming":
            step = spreads[place[0]] or 1.0
        if not _is_float(leaves[place[0]]):
            step = math.floor(step * (1 + _ROUNDING))
        if step:
            found.append((place, step))
    return found


def _part(value: Value, place: _Place, step: float) -> float:
    return step / 2 if _is_float(jax.tree.leaves(value)[place[0]]) else step


def _moved(value: Value, steps: dict[_Place, float]) -> Value:
    leaves, structure = jax.tree.flatten(value)
    leaves = [np.array(leaf) for leaf in leaves]
    for (leaf, index), step in steps.items():
        array = leaves[leaf]
        if _is_float(array):
            array.reshape(-1)[index] += np.asarray(step, array.dtype)
        elif array.dtype == bool:
            array.reshape(-1)[index] ^= True
        else:
            limits = np.iinfo(array.dtype)
            moved = int(array.reshape(-1)[index]) + int(step)
            array.reshape(-1)[index] = min(max(moved, limits.min), limits.max)
    return jax.tree.unflatten(structure, leaves)


def _name(value: Value, place: _Place) -> str:
    path, leaf = jax.tree_util.tree_leaves_with_path(value)[place[0]]
    inside = np.unravel_index(place[1], np.shape(leaf))
    return f"value{jax.tree_util.keystr(path)}" + "".join(f"[{i}]" for i in inside)


def _is_float(leaf: np.ndarray) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))
