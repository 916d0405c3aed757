"""Averages of records: as they are, clamped to public bounds, and of their powers."""

import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, repeat
from operator import mul
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._fixed_point import rounding_of_average
from dpjax._numerics import compute_dtype
from dpjax.targets._bounds import VectorNorm, norm_up, running_dtype, unit
from dpjax.targets._interval import check_interval, clamp
from dpjax.targets._summable import Summable, bounded_average, summable

_LARGEST = Fraction(sys.float_info.max)


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
        The global sensitivity under replace-one is that of `bounded_mean_bound`, in floats too:
        records are added up in fixed point, exactly, so their order does not matter either.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> float(targets.bounded_mean(lower=0, upper=10)(jnp.array([-5.0, 4.0, 99.0, jnp.nan])))
        3.5
    """
    low, high = check_interval(lower, upper)
    largest = max(abs(low), abs(high))
    return bounded_average(_of_every_leaf(lambda x: clamp(x, low, high)), largest=largest)


def bounded_mean_bound(
    *,
    lower: float,
    upper: float,
    n: int,
    d: int,
    norm: VectorNorm = "l1",
    dtype: jax.typing.DTypeLike = "float32",
) -> float:
    """The global sensitivity of `bounded_mean`: (upper - lower) / n in every coordinate.

    That is d (upper - lower) / n in the norm l1, sqrt(d) (upper - lower) / n in l2, and
    (upper - lower) / n in linf; all are attained. To each coordinate rounding adds at most
    5 eps max(|lower|, |upper|), which is little while n is well below 1 / eps.

    Args:
        lower: of the mean.
        upper: of the mean.
        n: number of records, at least 1.
        d: coordinates of a record, over all its arrays, at least 1.
        norm: "l1", "l2" or "linf".
        dtype: float dtype of the records; what holds for float32 holds for float64 as well.

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with the same norm.

    Raises:
        TypeError: if a parameter is not a number, or dtype is not one of floats.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Holds for any records under replace-one, for what `bounded_mean` computes in floats of this
        dtype: the rounding of its average is in the bound.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> from dpjax import targets
        >>> bound = targets.bounded_mean_bound(lower=0, upper=10, n=100, d=4, norm="l2")
        >>> round(bound, 4)
        0.2
    """
    low, high = map(Fraction, check_interval(lower, upper))
    rounding = rounding_of_average(max(abs(low), abs(high)), running_dtype(dtype))
    width = (high - low) / _checks.integer("n", n, least=1) + rounding
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
            database, if it does not have shape (n,), no number of its dtype lies between the
            bounds, or a power of a bound is too large for it.

    Formal guarantees:
        The global sensitivity under replace-one is at most `moments_bound`, in floats too: powers
        are added up in fixed point, exactly, so the order of the records does not matter either.

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
    farthest = Fraction(max(abs(low), abs(high)))
    # A power that no float64 holds, no dtype does.
    largest = [float(min(farthest**j, _LARGEST)) for j in range(1, count + 1)]

    def powers(record: Any) -> jax.Array:
        if jnp.shape(record) != ():
            raise ValueError(f"records must be numbers, got shape {jnp.shape(record)}")
        x = clamp(record, low, high)
        _check_powers(count, farthest, x.dtype)
        return jnp.stack(list(accumulate(repeat(x, count), mul)))

    return bounded_average(powers, largest=largest)


def moments_bound(
    *,
    order: int,
    lower: float,
    upper: float,
    n: int,
    norm: VectorNorm = "l1",
    dtype: jax.typing.DTypeLike = "float32",
) -> float:
    """A bound on the global sensitivity of `moments`: the norm of the ranges of the powers, over n.

    A record moves moment j by at most 1/n times the length of {x^j : lower <= x <= upper}. Attained
    where 0 is not inside the interval, and in the norm linf wherever the widest range is. To moment
    j rounding adds at most (5 + 2 j / n) eps max(|lower|, |upper|)^j.

    Args:
        order: of the moments.
        lower: of the moments.
        upper: of the moments.
        n: number of records, at least 1.
        norm: "l1", "l2" or "linf".
        dtype: float dtype of the records; what holds for float32 holds for float64 as well.

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with the same norm.

    Raises:
        TypeError: if a parameter is not a number, or dtype is not one of floats.
        ValueError: if a parameter is out of range, or a power of a bound too large for the dtype.

    Formal guarantees:
        Holds for any records under replace-one, for what `moments` computes in floats of this
        dtype: the rounding of its powers and averages is in the bound.

    Source:
        The two lines above.

    Example:
        >>> from dpjax import targets
        >>> round(targets.moments_bound(order=2, lower=-1, upper=3, n=2), 4)
        6.5
    """
    count = _checks.integer("order", order, least=1)
    low, high = map(Fraction, check_interval(lower, upper))
    n = _checks.integer("n", n, least=1)
    running, farthest = running_dtype(dtype), max(abs(low), abs(high))
    _check_powers(count, farthest, running)
    ranges = []
    for j in range(1, count + 1):
        rounding = 2 * j * unit(running) * farthest**j / n
        rounding += rounding_of_average(farthest**j, running)
        ranges.append(_range_of_power(low, high, j) / n + rounding)
    return norm_up(ranges, norm)


def _check_powers(order: int, farthest: Fraction, dtype: Any) -> None:
    """Refuses powers that overflow: the moments of neighbors would differ without limit."""
    rounded_up = farthest**order * (1 + 2 * order * unit(dtype))
    if rounded_up > Fraction(float(jnp.finfo(dtype).max)):
        raise ValueError(
            f"order must be lower, the bounds nearer to 0, or the dtype wider: {dtype} does not"
            f" hold {float(farthest):g}^{order}; rescale the records, or take float64"
        )


def _range_of_power(low: Fraction, high: Fraction, j: int) -> Fraction:
    """The length of {x^j : low <= x <= high}: extremes are at the ends, or at 0 between them."""
    values = [low**j, high**j, *([Fraction(0)] if low < 0 < high else [])]
    return max(values) - min(values)


def _of_every_leaf(function: Callable[[jax.Array], jax.Array]) -> Callable[[Any], Any]:
    return lambda record: jax.tree.map(function, record)
