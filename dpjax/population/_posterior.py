"""`Posterior`: the posterior of a population's parameters given a release, as weighted draws."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._release import _with_ends
from dpjax._core._types import Key, PyTree
from dpjax.random._keys import sampling_key
from dpjax.sweeps._axes import name_of_path

if TYPE_CHECKING:
    from pandas import DataFrame
    from xarray import Dataset

_CONFIDENCE = 0.95
LEAST_SIZE = 100


@dataclasses.dataclass(frozen=True, eq=False)
class Draws:
    """Draws of parameters without weights. Each column is sorted only once, for all posteriors.

    Attributes:
        tree: NumPy arrays with a leading axis of draws.
    """

    tree: PyTree

    @functools.cached_property
    def columns(self) -> list[np.ndarray]:
        """Returns, for each number in theta, an array of its values in all draws."""
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
        return jax.tree.map(
            lambda leaf: np.tensordot(weights, np.asarray(leaf, np.float64), 1), self.tree
        )

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
        one = jax.tree.map(lambda leaf: leaf[0], self.tree)
        return [tree_of(row, one) for row in found]


def tree_of(row: Any, like: PyTree) -> PyTree:
    """Converts a vector of numbers to a pytree of arrays with the shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    places = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    parts = (jnp if isinstance(row, jax.Array) else np).split(row, places)
    shaped = [part.reshape(np.shape(x)) for part, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The posterior of a population's parameters given a release, as weighted draws.

    Made by `dpjax.posterior` and `SimulationBank.posterior`. It prints the mean of every number
    with its 95% interval.

    Attributes:
        weights: the weights of the draws; their sum is 1.
        effective_size: the number of equally weighted draws that would be as accurate.

    Formal guarantees:
        Post-processing of the release: it reads no private database and costs no budget.
    """

    weights: np.ndarray
    effective_size: float
    _draws: Draws

    @classmethod
    def of(
        cls, draws: Draws, weights: np.ndarray, effective_size: float, *, is_tempered: bool = False
    ) -> "Posterior":
        """Makes a posterior.

        Refuses draws that are NaN, and weights concentrated on too few draws.
        """
        count = len(weights)
        if draws.with_nan:
            raise ValueError(
                f"prior must draw parameters without NaN, got NaN for {draws.with_nan}"
            )
        if not effective_size > 0:
            raise ValueError(
                f"none of the {count:,} simulated databases could have given this release: the"
                " prior or the model excludes it, or another private function made it"
            )
        if effective_size < LEAST_SIZE:
            wanted = f"about {count * 2 * LEAST_SIZE / effective_size:.1g} draws"
            advice = (
                f"the results of independent runs disagree. Ask for {wanted}"
                if is_tempered
                else "few simulated databases have values near the release. Ask dpjax.posterior for"
                ' method="tempered", which moves databases toward the release, or for'
                f" {wanted}; or take a narrower prior from public knowledge"
            )
            raise ValueError(
                f"effective size must be at least {LEAST_SIZE}, got {effective_size:.1f} of"
                f" {count:,} draws: {advice}, or use a release with fewer numbers"
            )
        return cls(weights, effective_size, draws)

    @property
    def theta(self) -> PyTree:
        """The draws: parameters with a leading axis, in the order of `weights`."""
        return self._draws.tree

    @property
    def mean(self) -> PyTree:
        """The posterior mean of every number, float64."""
        return self._draws.mean(self.weights)

    def interval(self, confidence: float = _CONFIDENCE) -> tuple[PyTree, PyTree]:
        """An interval for every number, with the same probability below and above it.

        Args:
            confidence: the posterior probability of the interval, in (0, 1).

        Returns:
            The lower ends and the upper ends, float64, each with the structure of theta.

        Raises:
            TypeError: if the confidence is not a number.
            ValueError: if the confidence is out of range.

        Formal guarantees:
            If theta is drawn from the prior and the database from the model, the interval contains
            theta with probability `confidence`, up to the error of the simulation, which is at most
            about 1 / (2 sqrt(effective_size)) in each probability. This is not true if the prior or
            the model is wrong. `dpjax.confidence_set` needs no prior.
        """
        left = (1 - _checks.fraction("confidence", confidence)) / 2
        low, high = self._draws.quantiles(self.weights, (left, 1 - left))
        return low, high

    def predict(self, function: Callable[[PyTree], PyTree]) -> "Posterior":
        """The posterior of a function of theta.

        Args:
            function: maps one theta to a pytree of real arrays, in JAX.

        Returns:
            A `Posterior` of the function's results, on the same draws.

        Raises:
            TypeError: if it is not a function, or does not return real arrays.
        """
        _checks.function("function", function)

        def checked(theta: PyTree) -> PyTree:
            return _checks.real_arrays("the value of the function", function(theta))

        found = jax.jit(jax.vmap(checked))(self.theta)
        return Posterior(self.weights, self.effective_size, Draws(jax.tree.map(np.asarray, found)))

    def to_frame(self) -> "DataFrame":
        """The draws as a pandas table, with a column for every number and one for the weights.

        Returns:
            A `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: if pandas is not installed.
        """
        pandas = _checks.extra("pandas", "sweep")
        columns: dict[str, Any] = dict(zip(self._draws.names, self._draws.columns, strict=True))
        return pandas.DataFrame({**columns, "weight": self.weights})

    def to_xarray(self, key: Key, *, draws: int = 1000) -> "Dataset":
        """Equally weighted draws, for ArviZ: `arviz.convert_to_inference_data(dataset)`.

        Args:
            key: a typed key, which chooses draws in proportion to their weights.
            draws: how many to choose. A draw may be chosen several times.

        Returns:
            An `xarray.Dataset` over `chain`, of length 1, and `draw`, with a variable for every
            array of theta.

        Raises:
            ModuleNotFoundError: if xarray is not installed.
            TypeError: if the key is not a typed key.
            ValueError: if there are fewer than 1 draws.
        """
        xarray = _checks.extra("xarray", "sweep")
        draws = _checks.integer("draws", draws, least=1)
        of_start, of_order = jax.random.split(sampling_key(key))
        start = float(jax.random.uniform(of_start))
        below = np.cumsum(self.weights)
        levels = (np.arange(draws) + start) / draws * below[-1]
        places = np.minimum(np.searchsorted(below, levels), len(below) - 1)
        # The draws are put into random order, so that consecutive draws of the chain are
        # independent.
        chosen = places[np.asarray(jax.random.permutation(of_order, draws))]
        variables: dict[str, Any] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.theta):
            name = name_of_path(path) if path else "theta"
            axes = [f"{name}_dim_{i}" for i in range(np.ndim(leaf) - 1)]
            variables[name] = (("chain", "draw", *axes), np.asarray(leaf)[chosen][None])
        return xarray.Dataset(variables, {"chain": [0], "draw": np.arange(draws)})

    def __repr__(self) -> str:
        low, high = map(jax.tree.leaves, self.interval())
        means, _ = jax.tree_util.tree_flatten_with_path(self.mean)
        named = [
            (f"{jax.tree_util.keystr(path, simple=True, separator='.')}: " if path else "")
            + _with_ends("", np.asarray(mean), np.asarray(a), np.asarray(b))
            for (path, mean), a, b in zip(means, low, high, strict=True)
        ]
        size = f"effective size {self.effective_size:,.0f} of {len(self.weights):,}"
        return f"Posterior({', '.join(named)} ({_CONFIDENCE:.0%}), {size})"
