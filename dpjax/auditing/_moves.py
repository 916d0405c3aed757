"""Values near a value: each coordinate moved alone as far as a norm allows, and two at once."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.base import Norm
from dpjax.norms import distance

# Relative rounding error of a distance between floats.
_ROUNDING = 1e-6
# Pairs of coordinates; of more, some are chosen at random.
_MOST_PAIRS = 64

Moved = tuple[str, Any]
_Place = tuple[int, int]  # A leaf, and an index in it, flattened.
_distance = jax.jit(distance, static_argnums=0)


def single_moves(norm: Norm, reach: float, value: Any, neighbor: Any) -> list[Moved]:
    """Values within reach in which one coordinate moved, each up and down, with a description.

    Args:
        norm: that reach is measured in.
        reach: the largest distance.
        value: a pytree of arrays.
        neighbor: another one; where the norm counts coordinates, it shows how far they move.
    """
    steps = _steps(norm, reach, value, neighbor)
    found = []
    for (place, step), sign in itertools.product(steps, (1, -1)):
        moved = _moved(value, {place: sign * step})
        if 0 < float(_distance(norm, value, moved)) <= reach * (1 + _ROUNDING):
            found.append((f"{_name(value, place)} moved by {sign * step:g}", moved))
    return found


def double_moves(norm: Norm, reach: float, value: Any, neighbor: Any, seed: int) -> list[Moved]:
    """Values in which two coordinates moved, floats by half of what one alone may move."""
    steps = _steps(norm, reach, value, neighbor)
    pairs = list(itertools.combinations(steps, 2))
    if len(pairs) > _MOST_PAIRS:
        chosen = np.random.default_rng(seed).choice(len(pairs), _MOST_PAIRS, replace=False)
        pairs = [pairs[i] for i in chosen]
    return [
        (
            f"{_name(value, one)} and {_name(value, other)} moved",
            _moved(value, {one: _part(value, one, first), other: _part(value, other, second)}),
        )
        for (one, first), (other, second) in pairs
    ]


def _steps(norm: Norm, reach: float, value: Any, neighbor: Any) -> list[tuple[_Place, float]]:
    """How far each coordinate may move alone; integers that may not move are left out."""
    zeros = jax.tree.map(lambda x: np.zeros(np.shape(x), "float32"), value)
    spreads = [
        float(np.ptp(np.concatenate([np.ravel(x), np.ravel(y)]).astype(float)))
        for x, y in zip(jax.tree.leaves(value), jax.tree.leaves(neighbor), strict=True)
    ]
    found = []
    for place in _places(value):
        unit = float(_distance(norm, _moved(zeros, {place: 1.0}), zeros))
        step = reach / unit * (1 - _ROUNDING / 4)
        if norm == "hamming":
            step = spreads[place[0]] or 1.0
        if not _is_float(jax.tree.leaves(value)[place[0]]):
            step = math.floor(step * (1 + _ROUNDING))
        if step:
            found.append((place, step))
    return found


def _places(value: Any) -> Iterator[_Place]:
    for leaf, array in enumerate(jax.tree.leaves(value)):
        yield from ((leaf, index) for index in range(np.size(array)))


def _part(value: Any, place: _Place, step: float) -> float:
    return step / 2 if _is_float(jax.tree.leaves(value)[place[0]]) else step


def _moved(value: Any, steps: dict[_Place, float]) -> Any:
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


def _name(value: Any, place: _Place) -> str:
    path, leaf = jax.tree_util.tree_leaves_with_path(value)[place[0]]
    inside = np.unravel_index(place[1], np.shape(leaf))
    return f"value{jax.tree_util.keystr(path)}" + "".join(f"[{i}]" for i in inside)


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))
