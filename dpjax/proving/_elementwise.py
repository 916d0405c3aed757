"""Rules of elementwise operations: arithmetic, powers, and elementary functions.

For an operation f(a, b), let |df/da| <= g_1 and |df/db| <= g_2 for all operands in their ranges.
Then |f(a, b) - f(a', b')| <= g_1 |a - a'| + g_2 |b - b'|. Proof: change a first and then b. The
intermediate operands (a', b) are also in these ranges. The numbers g_1 and g_2 are called gains.
Norms of the difference grow by at most the largest gain. In entries where the operands differ, the
rounding errors of both values are added.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax import lax

from dpjax.proving import _rounding as rounding
from dpjax.proving._pending import added
from dpjax.proving._rows import aligned
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    RangeRefusalError,
    RefusalError,
    changing_with,
    constant,
    erring,
    flushed,
    meet,
    over,
    result_of,
)

LARGEST_EXPONENT = 64
ALL = 2.0**60
Array = np.ndarray
# A function modulus(low, high, d) that bounds |f(a) - f(b)| for |a - b| <= d and a, b in [low,
# high].
Modulus = Callable[[Array, Array, Array], Array]


def lipschitz(
    inputs: Sequence[Abstract],
    interval: tuple[Array, Array],
    gains: Sequence[Array | float],
    *,
    dtype: np.dtype | None = None,
    relative: Array | float = 0.0,
    absolute: Array | float = 0.0,
    whole: bool = False,
    rows: tuple[float, float] = (math.inf, math.inf),
) -> Abstract:
    """Returns the value of an operation with bounded derivatives.

    Let v be the exact result. The device computes v (1 + theta) + eta, and may flush this number to
    0. Each endpoint of the interval is widened by the error at this endpoint. This covers all v
    between them, because (1 - relative) v and (1 + relative) v increase with v. If eta is 0, the
    computed number does not have the opposite sign of v.

    Args:
        inputs: the operands, which have the same shape and the same axis of records.
        interval: the range of v.
        gains: for each operand, a bound on the magnitude of the derivative.
        dtype: the dtype of the result; by default that of the first operand.
        relative: a bound on |theta|, below 1.
        absolute: a bound on |eta|.
        whole: whether the results are integers.
        rows: bounds on the l1 and l2 norm of a row of v, if eta is 0 except for flushing.
    """
    if not np.max(relative) < 1:
        raise RefusalError(
            "rounding may lose all digits of the result. Compute in float32 or float64 instead"
        )
    shape, axis, dtype = inputs[0].shape, inputs[0].axis, dtype or inputs[0].dtype
    error = relative * np.maximum(*map(np.abs, interval)) + absolute
    per_row = [over(np.asarray(gain, float), axis) for gain in gains]
    tops = [float(gain.max()) for gain in per_row]
    # A device may flush each operand and the result to 0. The gain of an operand multiplies its
    # error.
    flush = 0.0 if whole else 2 * rounding.tiny(dtype) * (1 + sum(per_row))
    slip = rounding.up(over(np.asarray(error, float), axis) + flush)

    def total(numbers: Iterable[float]) -> float:
        return sum(float(rounding.times(g, x)) for g, x in zip(tops, numbers, strict=True))

    def moved(*ds: Difference) -> Moves:
        each = sum(rounding.times(g, d.each) for g, d in zip(per_row, ds, strict=True))
        l1, l2 = total(d.l1 for d in ds), total(d.l2 for d in ds)
        return erring((rounding.up(np.asarray(each)), l1, l2), slip, shape, axis)

    off = [rounding.up(relative * np.abs(end) + absolute + flush) for end in interval]
    low, high = rounding.widened(*interval, *off)
    if not np.any(absolute):
        low, high = _of_one_sign(interval, low, high)
    apart = float(rounding.up(total(x.apart for x in inputs) + 2 * slip.max()))
    l1, l2 = (float(rounding.up(norm * (1 + np.max(relative)))) for norm in rows)
    kept: Any = {"dtype": dtype, "whole": whole, "apart": apart}
    found = result_of(inputs, low, high, moved, l1_of_row=l1, l2_of_row=l2, **kept)
    most = float(rounding.up(np.max(absolute + flush)))
    return dataclasses.replace(found, off=(float(np.max(relative)), most))


def _of_one_sign(interval: tuple[Array, Array], low: Array, high: Array) -> tuple[Array, Array]:
    """Returns the interval (low, high), cut at 0 if the narrower `interval` is on one side of 0."""
    low = np.where(interval[0] >= 0, np.maximum(low, 0.0), low)
    return low, np.where(interval[1] <= 0, np.minimum(high, 0.0), high)


def nearest_to_zero(low: Array, high: Array) -> Array:
    """Returns the smallest |v| for v in an interval."""
    return np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))


def add(first: Abstract, second: Abstract, *, sign: int = 1, **_: Any) -> Abstract:
    """Returns the value of a sum (`sign` 1) or of a difference (`sign` -1).

    The derivatives have magnitude 1. A sum of integers is exact if the dtype can represent it.

    A compiler may rewrite (x + c) + d as x + (c + d). The rounding error of c + d is the same for
    f(D) and f(D'). So it widens the range of the result, but not the bound on its change.

    If the first operand is a sum, a compiler may also use the second operand as the initial value
    of this sum. Then each addition of the sum may have the rounding error of a number as large as
    the second operand.
    """
    a, b = aligned(first, second)
    dtype = a.dtype
    low, high = (a.low + b.low, a.high + b.high) if sign > 0 else (a.low - b.high, a.high - b.low)
    pending, at_once = added(a, b, dtype)
    most = max(pending.shift, pending.load)
    whole = a.whole and b.whole and rounding.holds(low, high, dtype)
    whole = whole and (dtype.kind != "f" or most <= rounding.exact_integers(dtype))
    # Adding a constant 0 changes nothing.
    constant_ = any(x.is_public and x.magnitude.any() for x in (a, b))
    if not whole and (a.pending.shift or b.pending.shift) and constant_:
        combined = 8 * rounding.unit(dtype) * pending.shift
        low, high = low - combined, high + combined
    rows = (a.l1_of_row + b.l1_of_row, a.l2_of_row + b.l2_of_row)
    found = lipschitz(
        (a, b), (low, high), (1.0, 1.0), whole=whole, absolute=0.0 if whole else at_once,
        relative=0.0 if whole else rounding.ARITHMETIC * rounding.unit(dtype),
        rows=(math.inf, math.inf) if at_once and not whole else rows,
    )  # fmt: skip
    return dataclasses.replace(found, pending=pending)


def vanishing(x: Abstract, bits: float) -> Abstract:
    """Widens the bounds on a product x, because a device may flush a factor to 0.

    The device may replace a tiny factor by 0 before the multiplication. The product of the other
    factors is at most 2^bits.
    """
    if x.whole or not bits:
        return x
    error = 4 * rounding.tiny(x.dtype) * 2.0**bits
    found = lipschitz((x,), (x.low, x.high), (1.0,), absolute=error)
    count = math.prod(size for k, size in enumerate(x.shape) if k != x.axis)
    rows = (float(rounding.up(norm + 2 * error * count)) for norm in (x.l1_of_row, x.l2_of_row))
    l1, l2 = map(min, rows, (found.l1_of_row, found.l2_of_row))
    low, high = _of_one_sign((x.low, x.high), found.low, found.high)
    off = None if x.off is None or found.off is None else (x.off[0], x.off[1] + found.off[1])
    return dataclasses.replace(found, low=low, high=high, off=off, l1_of_row=l1, l2_of_row=l2)


def corners(a: Abstract, b: Abstract, of: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """Returns the range of an operation that is monotone in each operand."""
    corners = [of(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners)


def multiply(
    first: Abstract, second: Abstract, *, dtype: np.dtype | None = None, **_: Any
) -> Abstract:
    """Returns the value of a product a b, whose derivatives have magnitudes |b| and |a|.

    If both operands are the same array, the product is a square.
    """
    if first is second:  # The range of a square is tighter, because a square is never negative.
        return integer_power(first, 2, dtype=dtype)
    a, b = aligned(first, second)
    dtype = dtype or a.dtype
    low, high = corners(a, b, np.multiply)
    whole = (a.whole and b.whole and rounding.holds(low, high, dtype)) or _makes_integer(a, b, low)
    relative = 0.0 if whole else rounding.ARITHMETIC * rounding.unit(dtype)
    gains = b.magnitude, a.magnitude
    tops = float(gains[0].max()), float(gains[1].max())
    l1, l2 = (
        min(float(rounding.times(x, tops[0])), float(rounding.times(y, tops[1])))
        for x, y in ((a.l1_of_row, b.l1_of_row), (a.l2_of_row, b.l2_of_row))
    )
    kept: Any = {"dtype": dtype, "relative": relative, "whole": whole, "rows": (l1, l2)}
    return lipschitz((a, b), (low, high), gains, **kept)


def _makes_integer(a: Abstract, b: Abstract, product: Array) -> bool:
    """Whether the exact product of two known numbers is a small integer, such as 0.5 times 4."""
    if not (a.is_known and b.is_known) or a.low.size * b.low.size > 1:
        return False
    x, y, found = float(a.low.flat[0]), float(b.low.flat[0]), float(product.flat[0])
    small = found.is_integer() and abs(found) < 2**20
    return small and Fraction(x) * Fraction(y) == Fraction(found)


def integer_power(x: Abstract, y: int, *, dtype: np.dtype | None = None, **_: Any) -> Abstract:
    """Returns the value of x^y for a public integer y; for y < 0, it is 1 / x^-y."""
    if y < 0:
        found = quotient(constant(np.ones((), x.dtype)), integer_power(x, -y))
        # `off` would bound only the rounding error of the quotient, so it is removed: the power
        # x^-y is rounded, too.
        return dataclasses.replace(found, off=None)
    if y == 0:
        ones = np.ones((1,) * len(x.shape))
        return lipschitz((x,), (ones, ones), (0.0,), whole=True)
    top = x.magnitude
    with np.errstate(over="ignore"):
        even = nearest_to_zero(x.low, x.high) ** y, top**y
        ends = even if y % 2 == 0 else (x.low**y, x.high**y)
        gain = rounding.up(y * top ** (y - 1))
    if not all(np.isfinite(array).all() for array in (*ends, gain)):
        raise RefusalError("the power may overflow. Clip its base to a smaller interval")
    whole = x.whole and rounding.holds(*ends, dtype or x.dtype)
    # A power is computed by at most y products, each with a relative error of at most 2 u. So the
    # total relative error is at most e^(2 y u) - 1.
    theta = 0.0 if whole else math.expm1(y * rounding.ARITHMETIC * rounding.unit(dtype or x.dtype))
    squares = float(rounding.up(x.l2_of_row**2)) if y == 2 else math.inf
    kept: Any = {"dtype": dtype, "relative": theta, "whole": whole, "rows": (squares, squares)}
    return lipschitz((x,), ends, (gain,), **kept)


SQUARE = functools.partial(integer_power, y=2)


def quotient(first: Abstract, second: Abstract, **_: Any) -> Abstract:
    """Returns the value of a quotient a / b, if b is bounded away from 0.

    It uses |a/b - a'/b'| <= |a - a'| / |b| + |a'| |1/b - 1/b'|. Let l be the smallest |b|. If |b -
    b'| <= d, then |1/b - 1/b'| <= 1/l - 1/(l + d).
    """
    a, b = aligned(first, second)
    if first.dtype.kind != "f":
        _check_divisor(b)
        ends = np.trunc(a.low / b.low), np.trunc(a.high / b.low)
        # Records may have different divisors. The smallest one gives the largest change.
        least = -over(-b.low, a.axis)
        return _of_whole_numbers((a, b), ends, lambda d: np.ceil(d / least))
    least = nearest_to_zero(b.low, b.high)
    if (least < rounding.SMALLEST_DENOMINATOR).any():
        raise RangeRefusalError(
            f"the denominator may be 0, because it is in [{b.low.min():.3g}, {b.high.max():.3g}]. "
            "Bound it away from 0, for example with jnp.maximum"
        )
    low, high = corners(a, b, np.divide)
    theta = rounding.DIVISION * rounding.unit(a.dtype)
    gains = rounding.up(1 / least), rounding.up(a.magnitude / least**2)
    top = float(gains[0].max())
    rows = (a.l1_of_row * top, a.l2_of_row * top)
    found = lipschitz((a, b), (low, high), gains, relative=theta, rows=rows)
    # The gain of b is the largest slope of a / b over all values of b. If b changes a lot, the
    # average slope over this change is smaller. So the bound in the docstring is tighter.
    error = theta * np.maximum(np.abs(low), np.abs(high))
    flush = 2 * rounding.tiny(a.dtype) * (1 + gains[0] + gains[1])
    slip = 2 * rounding.up(over(error + flush, a.axis))
    lowest, size = -over(-least, a.axis), over(a.magnitude, a.axis)

    def curved(x: Array, y: Array) -> Array:
        moved = rounding.up(x / lowest + size * (y / lowest / (lowest + y)))
        return moved * (1 + 2.0**-30) + 2.0**-500 + slip

    return capped(found, (a, b), curved)


def remainder(first: Abstract, second: Abstract, **_: Any) -> Abstract:
    """Returns the value of the remainder of an integer and a public divisor.

    The remainder has the sign of the integer, and a smaller magnitude than the divisor. An integer
    of smaller magnitude than the divisor is its own remainder. For other integers, the range of the
    remainder bounds its change.
    """
    a, b = aligned(first, second)
    if first.dtype.kind == "f":
        raise RefusalError(
            "proofs do not support remainders of floats. Subtract a multiple of the divisor with "
            "jnp.floor instead"
        )
    _check_divisor(b)
    most, still = b.low - 1, a.magnitude < b.low
    low = np.where(still, a.low, np.where(a.low < 0, np.maximum(a.low, -most), 0.0))
    high = np.where(still, a.high, np.where(a.high > 0, np.minimum(a.high, most), 0.0))
    width, still = over(high - low, a.axis), -over(-1.0 * still, a.axis) > 0
    return _of_whole_numbers((a, b), (low, high), lambda d: np.where(still, d, width))


def _check_divisor(b: Abstract) -> None:
    """Refuses integer divisors that are private, or not above 0."""
    if not b.is_known or not (b.low > 0).all():
        raise RefusalError(
            "proofs support integer division and remainders only for public divisors above 0. "
            "Convert the integers to floats instead"
        )


def _of_whole_numbers(
    operands: tuple[Abstract, Abstract], ends: tuple[Array, Array], moved: Callable[[Array], Array]
) -> Abstract:
    """Returns the value of an integer quotient or remainder, which is exact.

    The divisor is public. If the dividend changes by d, the result changes by at most moved(d).
    """
    apart = math.inf if operands[0].apart else 0.0
    low, high = np.broadcast_arrays(*ends)
    return changing_with(operands, low, high, lambda d, _: moved(d), whole=True, apart=apart)


def capped(found: Abstract, operands: Sequence[Abstract], bound: Callable[..., Array]) -> Abstract:
    """Tightens bounds on how entries change; `bound` is a function of the operands' changes."""
    second = changing_with(operands, found.low, found.high, bound, dtype=found.dtype)
    return meet(found, changed=second.changed.moves, others=second.others.moves)


def negative(x: Abstract, **_: Any) -> Abstract:
    """Returns the value of -x, which is exact and keeps distances."""
    rows = x.l1_of_row, x.l2_of_row
    return lipschitz((x,), (-x.high, -x.low), (1.0,), whole=x.whole, rows=rows)


def absolute(x: Abstract, **_: Any) -> Abstract:
    """Returns the value of |x|, which is exact and does not increase distances."""
    ends, rows = (nearest_to_zero(x.low, x.high), x.magnitude), (x.l1_of_row, x.l2_of_row)
    return lipschitz((x,), ends, (1.0,), whole=x.whole, rows=rows)


def extremum(first: Abstract, second: Abstract, *, largest: bool, **_: Any) -> Abstract:
    """Returns the value of a maximum or minimum of two arrays.

    It uses |max(a, b) - max(a', b')| <= max(|a - a'|, |b - b'|).
    """
    # JAX starts a maximum at -inf, which has no effect, because max(-inf, x) is x.
    idle = -math.inf if largest else math.inf
    for one, other in ((first, second), (second, first)):
        shape = np.broadcast_shapes(one.shape, other.shape)
        if one.is_known and (one.low == idle).all() and shape == other.shape:
            return other
    a, b = aligned(first, second)
    pick = np.maximum if largest else np.minimum
    whole = a.whole and b.whole
    flush = 0.0 if whole else 4 * rounding.tiny(a.dtype)

    def larger(x: Difference, y: Difference) -> Moves:
        moves = np.maximum(x.each, y.each), x.l1 + y.l1, math.hypot(x.l2, y.l2)
        return flushed(moves, flush, a.shape)

    apart = float(rounding.up(max(a.apart, b.apart) + flush))
    ends = pick(a.low, b.low), pick(a.high, b.high)
    return result_of((a, b), *ends, larger, whole=whole, apart=apart)


def clamp(low: Abstract, x: Abstract, high: Abstract, **_: Any) -> Abstract:
    """Returns the value of min(max(x, low), high), for low <= high.

    XLA may rewrite max(low, clamp(low, x, high)) as the clamp, which would be wrong for low > high.
    """
    a, b = aligned(low, high)
    if (a.high > b.low).any():
        raise RefusalError(
            "the lower bound of the clamp may exceed its upper bound. Use jnp.clip instead"
        )
    return extremum(extremum(low, x, largest=True), high, largest=False)


def steps(
    function: Callable[..., Array], x: Abstract, *, dtype: np.dtype | None = None,
    rounding_method: Any = lax.RoundingMethod.TO_NEAREST_EVEN, **_: Any,
) -> Abstract:  # fmt: skip
    """Returns the value of floor, ceil, round, trunc or sign.

    These functions are nondecreasing, and their results are integers.
    """
    # The interval below is computed by np.round, which rounds halves to even. With another method,
    # results might be outside of this interval.
    if rounding_method != lax.RoundingMethod.TO_NEAREST_EVEN:
        raise RefusalError(
            "proofs do not support rounding halves away from 0. Use jnp.round instead"
        )
    dtype = dtype or x.dtype
    ends = function(x.low), function(x.high)
    if x.whole:
        return lipschitz((x,), ends, (1.0,), dtype=dtype, whole=True)
    if not rounding.holds(*ends, dtype):
        raise RefusalError(
            "the result may be an integer that is too large for its dtype. Clip the operand first"
        )

    apart = math.ceil(x.apart) + 1.0 if x.apart else 0.0
    # Between two numbers at distance d, the function has at most ceil(d) + 1 jumps, each of size 1.
    return changing_with(x, *ends, lambda d: np.ceil(d) + 1, dtype=dtype, whole=True, apart=apart)
