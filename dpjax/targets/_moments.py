"""Averages of records: as they are, clamped to public bounds, and of their powers."""

from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, repeat
from operator import mul
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._numerics import compute_dtype
from dpjax.targets._bounds import VectorNorm, norm_up
from dpjax.targets._interval import check_interval, clamp
from dpjax.targets._summable import Summable, summable


def mean() -> Summable:
    """The average record, as a target.

    f(D) = (1/n) sum_i x_i, coordinate by coordinate.

    Returns:
        A target: takes a pytree of arrays with leading axis n to the pytree without it, in floats
        of at least float32.

    Raises:
        ValueError: on a database, if its arrays have no common leading axis.

    Formal guarantees:
        No global bound: one record moves the average without limit, and a NaN makes it NaN. The
        target sums over records, so it ignores their order. `bounded_mean` has a bound.

    Source:
        Rubinstein and Aldà (2017), Section 7.1, samples its sensitivity.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> float(targets.mean()(jnp.array([1.0, 2.0, 6.0])))
        3.0
    """
    return summable(_of_every_leaf(lambda x: x.astype(compute_dtype(x.dtype))), average=True)


def bounded_mean(*, lower: float, upper: float) -> Summable:
    """The average of records clamped to public bounds, as a target.

    f(D) = (1/n) sum_i min(max(x_i, lower), upper), coordinate by coordinate. NaN counts as lower.

    Args:
        lower: a finite number, public, in the units of the records.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.

    Returns:
        A target: takes a pytree of arrays with leading axis n to the pytree without it, in floats
        of at least float32.

    Raises:
        TypeError: if a bound is not a number.
        ValueError: if a bound is not finite or they are out of order; on a database, if no number
            of its dtype lies between them.

    Formal guarantees:
        The global sensitivity under replace-one is that of `bounded_mean_bound`; the target sums
        over records, so it ignores their order.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> float(targets.bounded_mean(lower=0, upper=10)(jnp.array([-5.0, 4.0, 99.0, jnp.nan])))
        3.5
    """
    low, high = check_interval(lower, upper)
    return summable(_of_every_leaf(lambda x: clamp(x, low, high)), average=True)


def bounded_mean_bound(
    *, lower: float, upper: float, n: int, d: int = 1, norm: VectorNorm = "l1"
) -> float:
    """The global sensitivity of `bounded_mean`: (upper - lower) / n in every coordinate.

    That is d (upper - lower) / n in the norm l1, sqrt(d) (upper - lower) / n in l2, and
    (upper - lower) / n in linf; all are attained.

    Args:
        lower: of the mean.
        upper: of the mean.
        n: number of records, at least 1.
        d: coordinates of a record, over all its arrays, at least 1.
        norm: "l1", "l2" or "linf".

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with the same norm.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Holds for any records under replace-one, for the exact average: a sum of floats also has a
        rounding error, which a bound leaves out and the sampler measures. `dpjax.exact_sum` has
        none.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> from dpjax import targets
        >>> targets.bounded_mean_bound(lower=0, upper=10, n=100, d=4, norm="l2")
        0.2
    """
    low, high = check_interval(lower, upper)
    width = (Fraction(high) - Fraction(low)) / _checks.integer("n", n, least=1)
    return norm_up([width] * _checks.integer("d", d, least=1), norm)


def moments(*, order: int, lower: float, upper: float) -> Summable:
    """The raw moments of numbers clamped to public bounds, as a target.

    f(D)_j = (1/n) sum_i min(max(x_i, lower), upper)^j for j = 1, ..., order. NaN counts as lower.
    Central moments are a function of them, hence post-processing of their release.

    Args:
        order: the highest moment, at least 1.
        lower: a finite number, public, in the units of the records.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.

    Returns:
        A target: takes numbers of shape (n,) to moments of shape (order,), moment j in the units of
        the records to the power j.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if the order is below 1, a bound is not finite or they are out of order; on a
            database, if it does not have shape (n,), or no number of its dtype lies between the
            bounds.

    Formal guarantees:
        The global sensitivity under replace-one is at most `moments_bound`; the target sums over
        records, so it ignores their order.

    Source:
        Dwork, McSherry, Nissim and Smith (2006), for sums of clamped statistics.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> target = targets.moments(order=2, lower=0, upper=4)
        >>> target(jnp.array([1.0, 3.0, 9.0, -7.0])).tolist()
        [2.0, 6.5]
    """
    count = _checks.integer("order", order, least=1)
    low, high = check_interval(lower, upper)

    def powers(record: Any) -> jax.Array:
        if jnp.shape(record) != ():
            raise ValueError(f"records must be numbers, got shape {jnp.shape(record)}")
        return jnp.stack(list(accumulate(repeat(clamp(record, low, high), count), mul)))

    return summable(powers, average=True)


def moments_bound(
    *, order: int, lower: float, upper: float, n: int, norm: VectorNorm = "l1"
) -> float:
    """A bound on the global sensitivity of `moments`: the norm of the ranges of the powers, over n.

    A record moves moment j by at most 1/n times the length of {x^j : lower <= x <= upper}. Attained
    where 0 is not inside the interval, and in the norm linf wherever the widest range is.

    Args:
        order: of the moments.
        lower: of the moments.
        upper: of the moments.
        n: number of records, at least 1.
        norm: "l1", "l2" or "linf".

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with the same norm.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Holds for any records under replace-one, for exact powers and averages: floats also have a
        rounding error, which a bound leaves out and the sampler measures.

    Source:
        The two lines above.

    Example:
        >>> from dpjax import targets
        >>> targets.moments_bound(order=2, lower=-1, upper=3, n=2)
        6.5
    """
    count = _checks.integer("order", order, least=1)
    low, high = map(Fraction, check_interval(lower, upper))
    n = _checks.integer("n", n, least=1)
    return norm_up([_range_of_power(low, high, j) / n for j in range(1, count + 1)], norm)


def _range_of_power(low: Fraction, high: Fraction, j: int) -> Fraction:
    """The length of {x^j : low <= x <= high}: extremes are at the ends, or at 0 between them."""
    values = [low**j, high**j, *([Fraction(0)] if low < 0 < high else [])]
    return max(values) - min(values)


def _of_every_leaf(function: Callable[[jax.Array], jax.Array]) -> Callable[[Any], Any]:
    return lambda record: jax.tree.map(function, record)
