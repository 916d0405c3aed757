"""Empirical quantiles of clamped numbers."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._exact._numerics import round_up
from dpjax.sensitivity._order_statistics import order_statistic
from dpjax.targets._interval import check_interval, check_known, clamp
from dpjax.targets._known_sensitivity import BoundedTarget


def quantile(*, probability: float | Fraction, lower: float, upper: float) -> BoundedTarget:
    """An empirical quantile of numbers clamped to public bounds, as a target.

    f(D) = x_(k), the k-th smallest of min(max(x_i, lower), upper), with k = ceil(p n). At least a
    share p of the records is at most x_(k), and no smaller number has this property. There is no
    interpolation. NaN counts as lower.

    Args:
        probability: p, in (0, 1). At 0.5 it is the median, the lower one if n is even. A float
            stands for the decimal number that it prints as, so 0.1 is 1/10; or a
            `fractions.Fraction`.
        lower: a finite number, public, in the units of the records.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.

    Returns:
        A target with a known `sensitivity`: takes numbers of shape (n,) to one of them, clamped,
        shape (). Selection takes linear time, without sorting.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range or the bounds are out of order; on a database, if
            it does not have shape (n,), or no number of its dtype lies between the bounds.

    Formal guarantees:
        The global sensitivity under replace-one is upper - lower in any norm. It is attained for
        every p and n: with k records at lower and the others at upper, move one of the k to upper.
        Such databases are rare. If records have density g at the quantile, one record moves it by
        about 1/(n g), and `dpjax.sample_sensitivity` finds this smaller number. A quantile is one
        of the clamped records, so it has no rounding error, and ignores the order of the records.

    Source:
        Hyndman and Fan (1996), Definition 1; Nissim, Raskhodnikova and Smith (2007), on the median.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> median = targets.quantile(probability=0.5, lower=0, upper=100)
        >>> float(median(jnp.array([40.0, 7.0, 1000.0, -3.0, 30.0])))
        30.0
        >>> median.sensitivity("l1").value
        100.0
    """
    share = exact_probability(probability)
    low, high = check_interval(lower, upper)

    def select(database: jax.Array) -> jax.Array:
        if jnp.ndim(database) != 1 or jnp.size(database) == 0:
            raise ValueError(f"database must have shape (n,), n >= 1, got {jnp.shape(database)}")
        rank = math.ceil(share * database.shape[0])
        return _signed_order_statistic(clamp(database, low, high), rank)

    width = round_up(Fraction(high) - Fraction(low))
    return BoundedTarget(select, bound=lambda norm, n, dtype: width)


def exact_probability(probability: float | Fraction) -> Fraction:
    """A number in (0, 1) as a rational: 0.1 is 1/10, not the nearest float64."""
    check_known("probability", probability)
    if isinstance(probability, Fraction) and 0 < probability < 1:
        return probability
    return Fraction(str(_checks.fraction("probability", probability)))  # type: ignore[type-var]


def _signed_order_statistic(x: jax.Array, k: int) -> jax.Array:
    """The k-th smallest of finite numbers: by magnitude, because `order_statistic` needs it."""
    negative = x < 0
    negatives = jnp.sum(negative, dtype=int)
    is_negative = k <= negatives
    magnitudes = jnp.where(negative == is_negative, jnp.abs(x), jnp.inf)
    rank = jnp.where(is_negative, negatives - k + 1, k - negatives)
    magnitude = order_statistic(magnitudes, rank)
    return jnp.where(is_negative, -magnitude, magnitude)
