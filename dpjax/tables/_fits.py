"""Correlations and regression lines in the columns' units, from noisy moments in a ball."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import PyTree, Scalar
from dpjax.queries._intervals import CLEAR, STATISTICS, Statistic
from dpjax.queries._linear_regression import _WEIGHT, _least_reach, _solution
from dpjax.queries._query import IntegerQuery, compiled, in_units_of
from dpjax.queries._second_moments import Moments, averages
from dpjax.tables._box import Box

LINE = "line of a table"
CORRELATION = "correlation"


def facts_of_line(x: Box, y: Box, regularization: float) -> dict[str, Any]:
    """The public facts about a regression line through the rows of a table."""
    radii = {"x_radius": 1.0, "y_radius": 1.0, "regularization": regularization}
    how = {"statistic": LINE, "weight": float(_WEIGHT), "left_out": 1, "simulated": True}
    return {**radii, **how, "x": x.facts, "y": y.facts}


def line(
    query: IntegerQuery,
    value: jax.Array,
    n: jax.Array | None,
    scale: Scalar,
    facts: dict[str, Any],
) -> PyTree:
    """The regression line, from noisy sums of products in units of the query."""
    return _line_of_sums(json.dumps(facts))(value, n, scale, query.unit)


@functools.lru_cache
def _line_of_sums(text: str) -> Callable[..., PyTree]:
    """The line from noisy sums, as one program, which compiles faster than single operations."""
    facts = json.loads(text)

    def of_sums(value: jax.Array, n: jax.Array | None, scale: Scalar, unit: float) -> PyTree:
        # The mean square of y is the last entry. It is neither released nor used, so it is 0 here.
        triangle = jnp.append(in_units_of(unit, value), jnp.zeros(1))
        moments = averages(triangle, n, scale * unit, weight=float(_WEIGHT))
        return _line_of_moments(moments, facts)[0]

    return compiled(of_sums)


def _line_of_moments(moments: Moments, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Weights and intercept in the columns' units, and the matrix of the normal equations."""
    found, matrix = _solution(moments, facts)
    (y_size,), (y_middle,) = facts["y"]["size"], facts["y"]["middle"]
    ratio = y_size / np.asarray(facts["x"]["size"])
    middle = np.asarray(facts["x"]["middle"])
    weights = found["weights"] * jnp.asarray(ratio, found["weights"].dtype)
    # Converts the intercept at the middle of x's bounds to the intercept at x = 0.
    far = jnp.sum(found["weights"] * jnp.asarray(ratio * middle, found["weights"].dtype))
    return {"weights": weights, "intercept": y_middle + y_size * found["intercept"] - far}, matrix


STATISTICS[LINE] = Statistic(
    _line_of_moments, _least_reach, {"weights": np.inf, "intercept": np.inf}
)


@compiled
def correlation(moments: Moments) -> jax.Array:
    """The correlation of two coordinates. Variances get a lower limit, as noise may make them 0."""
    return _of_two(moments, {})[0]


def _of_two(moments: Moments, facts: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The correlation, and a diagonal matrix of the two variances."""
    del facts
    covariance = moments.second - jnp.outer(moments.mean, moments.mean)
    variances = jnp.diagonal(covariance)
    least = jnp.maximum(variances, moments.noise)
    product = jnp.sqrt(least[0]) * jnp.sqrt(least[1])
    return jnp.clip(covariance[0, 1] / product, -1, 1), jnp.diag(variances)


def _unknown_if_flat(values: np.ndarray, error: np.ndarray, facts: dict[str, Any]) -> np.ndarray:
    """Makes the error of a correlation unknown if a variance may be 0."""
    del facts
    return np.where(values[..., 0] < CLEAR * error, 2.0, 0.0)


STATISTICS[CORRELATION] = Statistic(_of_two, _unknown_if_flat, 1.0)
