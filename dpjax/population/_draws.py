"""Weighted draws of parameters: their averages and quantiles."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from dpjax._core._types import PyTree
from dpjax.sweeps._axes import name_of_path


@dataclasses.dataclass(frozen=True, eq=False)
class Draws:
    """Draws of parameters without weights. Each column is sorted only once, for all posteriors.

    Attributes:
        tree: NumPy arrays with a leading axis of draws.
    """

    tree: PyTree

    @functools.cached_property
    def columns(self) -> list[np.ndarray]:
        """Returns an array over the draws for each number of theta."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.tree)]
        return [column for leaf in leaves for column in leaf.reshape(len(leaf), -1).T]

    @functools.cached_property
    def names(self) -> list[str]:
        """Returns a name for each number of theta."""
        found: list[str] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.tree):
            name = name_of_path(path) if path else "theta"
            places = np.ndindex(np.shape(leaf)[1:])
            found += ["_".join([name, *map(str, place)]) for place in places]
        return found

    @functools.cached_property
    def with_nan(self) -> list[str]:
        """Returns the names of numbers that are NaN in some draw, and so have no quantiles."""
        columns = zip(self.names, self.columns, strict=True)
        return [name for name, column in columns if np.isnan(column).any()]

    @functools.cached_property
    def _sorted(self) -> list[tuple[np.ndarray, np.ndarray]]:
        orders = [np.argsort(column, kind="stable") for column in self.columns]
        return [(order, x[order]) for order, x in zip(orders, self.columns, strict=True)]

    def mean(self, weights: np.ndarray) -> PyTree:
        """Returns the weighted average of every number, in float64."""

        def average(leaf: Any) -> np.ndarray:
            return np.tensordot(weights, np.asarray(leaf, np.float64), 1)

        return jax.tree.map(average, self.tree)

    def quantiles(self, weights: np.ndarray, levels: tuple[float, ...]) -> list[PyTree]:
        """Returns weighted quantiles: a pytree like theta for each level.

        A quantile is the least value such that the draws up to this value, itself included, have at
        least the weight `level`.
        """
        found = np.empty((len(levels), len(self.columns)))
        for i, (order, numbers) in enumerate(self._sorted):
            below = np.cumsum(weights[order])
            places = np.searchsorted(below, np.asarray(levels) * below[-1])
            found[:, i] = numbers[np.minimum(places, len(numbers) - 1)]
        return [self._shaped(row) for row in found]

    def _shaped(self, row: np.ndarray) -> PyTree:
        """Converts the numbers of one draw to a pytree like theta."""
        leaves, structure = jax.tree.flatten(self.tree)
        ends = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
        parts = [
            x.reshape(leaf.shape[1:]) for x, leaf in zip(np.split(row, ends), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, parts)
