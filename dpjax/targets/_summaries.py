"""Statistics of records that are clamped to public bounds, or cut to a public width, as targets."""

import functools
import math
import sys
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate, repeat
from operator import mul

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import ALPHABET, codes_of
from dpjax._core._types import Database, PyTree, Value
from dpjax._exact._grid import rounding_of_average
from dpjax.sensitivity._order_statistics import order_statistic
from dpjax.targets._clamping import check_interval, check_known, clamp
from dpjax.targets._known_sensitivity import BoundedSum, BoundedTarget, check_dims, unit

_LARGEST_FLOAT = Fraction(sys.float_info.max)


def bounded_mean(*, lower: float, upper: float, dims: int = 1) -> BoundedSum:
    """The average of records clamped to public bounds, as a target.

    f(D) = (1/n) sum_i min(max(x_i, lower), upper), coordinate by coordinate. NaN counts as lower.

    Args:
        lower: a finite number, public, in the units of the records.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.
        dims: coordinates of a record, over all its arrays.

    Returns:
        A target with a known `sensitivity`: maps a pytree of arrays with leading axis n to the
        pytree without this axis, in float32 or a wider dtype.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a bound is not finite, or the bounds are out of order; on a database, if
            records have other dims, or no number of its dtype is between the bounds.

    Formal guarantees:
        Replacing a record changes every coordinate by at most (upper - lower) / n. So it changes
        the average by at most dims (upper - lower) / n in l1, and sqrt(dims) (upper - lower) / n in
        l2. Each of these bounds is attained. Records are added up in fixed point, exactly, so their
        order does not matter. Rounding adds at most 5 eps max(|lower|, |upper|) to a coordinate,
        which is small in comparison if n is well below 1 / eps.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> target = targets.bounded_mean(lower=0, upper=10)
        >>> float(target(jnp.array([-5.0, 4.0, 99.0, jnp.nan])))
        3.5
        >>> round(target.sensitivity("l1", n=100).value, 4)
        0.1
    """
    low, high = check_interval(lower, upper)
    dims, largest = _checks.integer("dims", dims, least=1), max(abs(low), abs(high))

    def clamped(record: PyTree) -> PyTree:
        check_dims(dims, sum(map(jnp.size, jax.tree.leaves(record))))
        return jax.tree.map(functools.partial(clamp, lower=low, upper=high), record)

    def bound(n: int | None, dtype: np.dtype) -> list[Fraction]:
        width = (Fraction(high) - Fraction(low)) / _checks.integer("n", n, least=1)
        return [width + rounding_of_average(Fraction(largest), dtype)] * dims

    return BoundedSum(clamped, lambda average: average, True, largest, bound=bound)


def moments(*, order: int, lower: float, upper: float) -> BoundedSum:
    """The raw moments of numbers clamped to public bounds, as a target.

    f(D)_j = (1/n) sum_i min(max(x_i, lower), upper)^j for j = 1, ..., order. NaN counts as lower.
    Central moments are functions of the raw moments, so they can be computed from the released ones
    at no cost in privacy.

    Args:
        order: the highest moment, at least 1.
        lower: a finite number, public, in the units of the records.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.

    Returns:
        A target with a known `sensitivity`: maps numbers of shape (n,) to moments of shape
        (order,). Moment j has the units of the records to the power j.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if the order is below 1, a bound is not finite, or the bounds are out of order;
            on a database, if it does not have shape (n,), no number of its dtype is between the
            bounds, or a power of a bound is too large for its dtype.

    Formal guarantees:
        Replacing a record changes moment j by at most 1/n times the length of the interval {x^j :
        lower <= x <= upper}. The bound is the norm of the vector of these lengths over n. It is
        attained in linf, and in all norms if 0 is not inside [lower, upper]. Powers are added up in
        fixed point, exactly, so the order of the records does not matter. Rounding adds at most (5
        + 2 j / n) eps max(|lower|, |upper|)^j to moment j.

    Source:
        Dwork, McSherry, Nissim and Smith (2006), for sums of clamped statistics.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> target = targets.moments(order=2, lower=0, upper=4)
        >>> target(jnp.array([1.0, 3.0, 9.0, -7.0])).tolist()
        [2.0, 6.5]
        >>> round(targets.moments(order=2, lower=-1, upper=3).sensitivity("l1", n=2).value, 4)
        6.5
    """
    count = _checks.integer("order", order, least=1)
    low, high = check_interval(lower, upper)
    farthest = Fraction(max(abs(low), abs(high)))
    # `largest` is a tuple, which cannot change, so a release traces the target only once. Powers
    # that are out of the dtype's range are refused by `_check_powers`, when the dtype is known.
    largest = tuple(float(min(farthest**j, _LARGEST_FLOAT)) for j in range(1, count + 1))

    def powers(record: PyTree) -> jax.Array:
        if jnp.shape(record) != ():
            raise ValueError(f"records must be numbers, got shape {jnp.shape(record)}")
        x = clamp(record, low, high)
        _check_powers(count, farthest, x.dtype)
        return jnp.stack(list(accumulate(repeat(x, count), mul)))

    def bound(n: int | None, dtype: np.dtype) -> list[Fraction]:
        size = _checks.integer("n", n, least=1)
        _check_powers(count, farthest, dtype)
        return [
            (_range_of_power(Fraction(low), Fraction(high), j) + 2 * j * unit(dtype) * farthest**j)
            / size
            + rounding_of_average(farthest**j, dtype)
            for j in range(1, count + 1)
        ]

    return BoundedSum(powers, lambda average: average, True, largest, bound=bound)


def _check_powers(order: int, farthest: Fraction, dtype: np.dtype) -> None:
    """Refuses powers that may overflow, because moments of neighbors could differ by any amount."""
    rounded_up = farthest**order * (1 + 2 * order * unit(dtype))
    if rounded_up > Fraction(float(np.finfo(dtype).max)):
        raise ValueError(
            f"order must be lower for these bounds, because {float(farthest):g}^{order} is too"
            f" large for {dtype}. Or rescale the records to bounds nearer to 0, or use float64"
        )


def _range_of_power(low: Fraction, high: Fraction, j: int) -> Fraction:
    """Returns the length of {x^j : low <= x <= high}. The extremes are at low, high or 0."""
    values = [low**j, high**j, *([Fraction(0)] if low < 0 < high else [])]
    return max(values) - min(values)


def quantile(*, probability: float | Fraction, lower: float, upper: float) -> BoundedTarget:
    """An empirical quantile of numbers clamped to public bounds, as a target.

    f(D) = x_(k), the k-th smallest of min(max(x_i, lower), upper), with k = ceil(p n). At least a
    fraction p of the records is at most x_(k), and no smaller number has this property. There is no
    interpolation. NaN counts as lower.

    Args:
        probability: p, in (0, 1). At 0.5 it is the median, the lower one if n is even. A float is
            read as the decimal that Python prints for it, so 0.1 is exactly 1/10. A
            `fractions.Fraction` is exact.
        lower: a finite number, public, in the units of the records.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.

    Returns:
        A target with a known `sensitivity`: maps numbers of shape (n,) to one of them, clamped,
        shape (). It takes linear time, without sorting.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range or the bounds are out of order; on a database, if
            it does not have shape (n,), or no number of its dtype is between the bounds.

    Formal guarantees:
        The global sensitivity under replace-one is upper - lower in any norm. It is attained for
        every p and n: take k records at lower and the others at upper, and replace one of the k by
        upper. Random databases are rarely like this. If records have density g at the quantile,
        replacing one record typically changes it by about 1/(n g), and `dpjax.sample_sensitivity`
        finds this smaller number. A quantile is one of the clamped records, so it has no rounding
        error, and the order of the records does not matter.

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
    numerator, denominator = exact_probability(probability).as_integer_ratio()
    low, high = check_interval(lower, upper)

    def select(database: jax.Array) -> jax.Array:
        if jnp.ndim(database) != 1 or jnp.size(database) == 0:
            raise ValueError(f"database must have shape (n,), n >= 1, got {jnp.shape(database)}")
        rank = math.ceil(Fraction(numerator, denominator) * database.shape[0])
        return _signed_order_statistic(clamp(database, low, high), rank)

    width = [Fraction(high) - Fraction(low)]
    return BoundedTarget(select, bound=lambda n, dtype: width)


def exact_probability(probability: float | Fraction) -> Fraction:
    """Converts a number in (0, 1) to a rational: 0.1 becomes 1/10, not the nearest float64."""
    check_known("probability", probability)
    if isinstance(probability, Fraction) and 0 < probability < 1:
        return probability
    return Fraction(str(_checks.fraction("probability", probability)))  # type: ignore[type-var]


def _signed_order_statistic(x: jax.Array, k: int) -> jax.Array:
    """Returns the k-th smallest of finite numbers of any sign, by `order_statistic`."""
    negative = x < 0
    negatives = jnp.sum(negative, dtype=int)
    is_negative = k <= negatives
    magnitudes = jnp.where(negative == is_negative, jnp.abs(x), jnp.inf)
    rank = jnp.where(is_negative, negatives - k + 1, k - negatives)
    magnitude = order_statistic(magnitudes, rank)
    return jnp.where(is_negative, -magnitude, magnitude)


def encode_text(texts: Iterable[str], *, width: int) -> np.ndarray:
    """Encodes texts as the records of a database: the codes of their first letters.

    Upper case counts as lower case. Characters other than the letters a to z are ignored. Letters
    after the first `width` letters are dropped, which bounds the influence of a text.

    Args:
        texts: n strings. Anything else, such as a missing value, counts as an empty text.
        width: the number of letters of a text that are used, at least 1, public.

    Returns:
        Shape (n, width), uint8: 1 for a to 26 for z, and 0 after the end of a text.

    Raises:
        TypeError: if `texts` is a single string, or the width is not an integer.
        ValueError: if the width is below 1.

    Formal guarantees:
        Every text becomes one record, whatever it contains. So databases that differ in one text
        differ in one record.

    Source:
        Rubinstein and Aldà, "diffpriv: An R package for easy differential privacy" (2017), the
        example of the exponential mechanism.

    Example:
        >>> from dpjax import targets
        >>> targets.encode_text(["Ada", "Bo!"], width=3).tolist()
        [[1, 4, 1], [2, 15, 0]]
    """
    width = _checks.integer("width", width, least=1)
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"texts must be a sequence of strings, got {type(texts).__name__}")
    return codes_of(texts, width)


def letter_counts(*, width: int) -> BoundedSum:
    """A target that counts how often each letter occurs in all texts together.

    f(D)_j is how many entries of the database equal j + 1, for j = 0, ..., 25. With these counts as
    scores, `dpjax.exponential` selects a frequent letter: index 0 means a, and index 25 means z.

    Args:
        width: the number of letters of a text that are used, at least 1.

    Returns:
        A target with a known `sensitivity`, by default in linf. It maps integer codes of shape
        (n, width), from `encode_text`, to integer counts of shape (26,). Codes outside of 1 to 26
        are ignored.

    Raises:
        TypeError: if the width is not an integer; on a database, if it does not contain integers.
        ValueError: if the width is below 1; on a database, if it does not have shape (n, width), or
            n times the width exceeds the range of JAX's integers: 2^31 without x64.

    Formal guarantees:
        Replacing a text changes the counts by at most width in linf, 2 width in l1 and sqrt(2)
        width in l2, because the counts of a text are at least 0 and add up to at most width. Two
        texts that each repeat a single letter attain these bounds. The counts are integers, so
        there is no rounding error, and the order of the records does not matter.

    Source:
        Rubinstein and Aldà, "diffpriv: An R package for easy differential privacy" (2017), the
        example of the exponential mechanism.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> codes = targets.encode_text(["Ada", "Bo"], width=10)
        >>> target = targets.letter_counts(width=10)
        >>> target(jnp.asarray(codes))[:5].tolist()
        [2, 1, 0, 1, 0]
        >>> target.sensitivity("linf").value
        10.0
    """
    width = _checks.integer("width", width, least=1)

    def count(record: PyTree) -> jax.Array:
        if jnp.shape(record) != (width,):
            raise ValueError(f"records must have width {width}, got shape {jnp.shape(record)}")
        if not jnp.issubdtype(record.dtype, jnp.integer):
            raise TypeError(f"records must be integer codes, got dtype {record.dtype}")
        # A narrow dtype might not hold the codes of all letters, so they would wrap around.
        codes = record if record.dtype.itemsize >= 4 else record.astype(jnp.int32)
        letters = jnp.arange(1, len(ALPHABET) + 1, dtype=codes.dtype)
        return jnp.sum(codes[None, :] == letters[:, None], axis=1, dtype=int)

    # In every norm, a replaced text changes the counts most if one count falls by `width` and
    # another rises by `width`. This change does not depend on the number of texts.
    each = [Fraction(width)] * 2
    norms = "linf", "l1", "l2"
    return _Counts(count, lambda x: x, False, bound=lambda n, dtype: each, norms=norms)


class _Counts(BoundedSum):
    reads = "integers"  # Clamping 64-bit integers to int32 does not produce new codes of letters.

    def __call__(self, database: Database) -> Value:
        most = jnp.iinfo(jnp.result_type(int)).max
        if database.size > most:
            raise ValueError(f"n times the width must be at most {most}, got {database.size}")
        return super().__call__(database)
