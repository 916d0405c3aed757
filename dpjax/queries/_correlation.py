"""The correlation of two coordinates, and its confidence interval."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._types import PyTree, Value
from dpjax.queries._intervals import (
    CLEAR_OF_ITSELF,
    STATISTICS,
    Statistic,
    check_simulated,
    draws_of,
)
from dpjax.queries._second_moments import Moments

CORRELATION = "correlation"


def _of_two(moments: Moments, facts: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Returns the correlation and the covariance matrix of two coordinates.

    In the correlation, variances are raised to a floor, because noise may make them 0 or less.
    """
    del facts
    covariance = moments.second - jnp.outer(moments.mean, moments.mean)
    least = jnp.maximum(jnp.diagonal(covariance), moments.noise)
    product = jnp.sqrt(least[0]) * jnp.sqrt(least[1])
    return jnp.clip(covariance[0, 1] / product, -1, 1), covariance


STATISTICS[CORRELATION] = Statistic(_of_two)


@intervals_of(CORRELATION)
def _of_correlation(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns the interval of the correlations that a simulated test does not reject.

    Let v and w be the released variances, c the covariance and q = c / sqrt(v w). If the true
    correlation were r, a release with simulated noise would have the covariance
    r sqrt(v w) + c' - c, and the variances v' and w'. Its correlation is at least q if and only if
    r >= (q sqrt(v' w') - c' + c) / sqrt(v w). So r is kept if it is between two quantiles of the
    right side. The interval is [-1, 1] if noise could hide that a variance is 0.
    """
    check_simulated(confidence)
    matrices = np.asarray(draws_of(measured, facts)[1], np.float64)
    variances, covariances = np.diagonal(matrices, axis1=-2, axis2=-1), matrices[..., 0, 1]
    known = np.min(variances[0], axis=-1) > 0
    released = np.where(known[..., None], variances[0], 1)
    errors = np.max(np.abs(variances[1:] - released) / released, axis=-1)
    known &= CLEAR_OF_ITSELF * np.quantile(errors, confidence, axis=0) < 1
    roots = np.prod(np.sqrt(np.maximum(variances[1:], 0)), axis=-1)
    root = np.prod(np.sqrt(released), axis=-1)
    center = covariances[0] / root
    turning = (center * roots - covariances[1:] + covariances[0]) / root
    low, high = np.quantile(turning, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    if simultaneous:
        # The ends move away from the center by one factor, which fits all groups in a draw at once.
        parts = (turning - center) / np.where(turning > center, high - center, low - center)
        factor = np.quantile(parts.reshape(len(parts), -1).max(axis=1), confidence)
        low, high = center + factor * (low - center), center + factor * (high - center)
    low, high = (np.where(known, np.clip(end, -1, 1), side) for end, side in ((low, -1), (high, 1)))
    return low.reshape(np.shape(value)), high.reshape(np.shape(value))
