"""Rules of operations that act on each element alone.

For f with partial derivatives at most g_i on the box of its inputs,
|f(a, b) - f(a', b')| <= g_1 |a - a'| + g_2 |b - b'|: change one input after the other; the point
between lies in the box as well. Norms follow with the largest g_i. Rounding adds `error` to each of
the two values, where the inputs differ at all.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dpjax.proving import _moduli as moduli
from dpjax.proving import _rounding as rounding
from dpjax.proving._pending import added
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, Difference, aligned, constant, make, over

Rule = Callable[..., Abstract]


def lipschitz(
    inputs: Sequence[Abstract],
    shape: Sequence[int],
    axis: int | None,
    dtype: np.dtype,
    interval: tuple[np.ndarray, np.ndarray],
    gains: Sequence[np.ndarray | float],
    *,
    relative: np.ndarray | float = 0.0,
    absolute: np.ndarray | float = 0.0,
    whole: bool = False,
) -> Abstract:
    """The value of an operation with these gains, computed as v (1 + theta) + eta.

    |theta| is at most `relative` < 1 and |eta| at most `absolute`, besides what is flushed to 0.
    Then v (1 + theta) lies between (1 - relative) v and (1 + relative) v, which grow with v. So
    each end of the interval is off by its own error. Where eta is 0, no sign changes.
    """
    if not np.max(relative) < 1:
        raise RefusalError("rounding may take all digits: compute in float32 or float64")
    size = np.maximum(*map(np.abs, interval))
    error = relative * size + absolute
    rank = len(shape)
    per_row = [over(_ranked(g, rank), axis) for g in gains]
    flush = 0.0
    if not whole:
        flush = 2 * rounding.tiny(dtype) * (1 + sum(per_row))
    slip = rounding.up(over(_ranked(error, rank), axis) + flush)

    def moved(d: Sequence[Difference]) -> tuple[np.ndarray, float, float]:
        each = sum(rounding.times(g, x.each) for g, x in zip(per_row, d, strict=True))
        each = rounding.up(np.asarray(each))
        slips = np.where(each > 0, 2 * slip, 0.0)
        from_slips = _norms(slips, shape, axis)
        tops = [float(g.max()) for g in per_row]
        plain1 = sum(float(rounding.times(g, x.l1)) for g, x in zip(tops, d, strict=True))
        plain2 = sum(float(rounding.times(g, x.l2)) for g, x in zip(tops, d, strict=True))
        return (
            rounding.up(each + slips),
            float(rounding.up(plain1 + from_slips[0])),
            float(rounding.up(plain2 + from_slips[1])),
        )

    changed = moved([x.changed for x in inputs])
    others = moved([x.others for x in inputs])
    off = [rounding.up(relative * np.abs(end) + absolute + flush) for end in interval]
    low, high = rounding.widened(*interval, *off)
    if not np.any(absolute):
        low = np.where(interval[0] >= 0, np.maximum(low, 0.0), low)
        high = np.where(interval[1] <= 0, np.minimum(high, 0.0), high)
    apart = sum(
        float(rounding.times(g.max(), x.apart)) for g, x in zip(per_row, inputs, strict=True)
    )
    return make(
        shape, dtype, low, high, axis, changed, others, whole=whole,
        apart=float(rounding.up(apart + 2 * slip.max())),
    )  # fmt: skip


def _ranked(array: np.ndarray | float, rank: int) -> np.ndarray:
    array = np.asarray(array, float)
    return array.reshape((1,) * rank) if array.ndim == 0 else array


def _norms(each: np.ndarray, shape: Sequence[int], axis: int | None) -> tuple[float, float]:
    counted = math.prod(size for k, size in enumerate(shape) if k != axis)
    copies = counted / max(1, each.size)
    return float(each.sum() * copies), rounding.norm2(each, copies)


def _theta(operation: str, dtype: np.dtype, *, whole: bool = False) -> float:
    """The relative error of an operation; whole numbers are exact."""
    return 0.0 if whole else rounding.UNITS[operation] * rounding.unit(dtype)


def add(first: Abstract, second: Abstract, *, sign: int = 1, dtype: np.dtype) -> Abstract:
    """The gains are 1; exact for integers that the dtype holds.

    A compiler takes (x + c) + d to x + (c + d). The rounding of c + d shifts D and D' alike, so it
    widens the range alone, by units of what the constants add up to. It also lets a sum start at
    what is added to it, and so all additions round numbers of that size.
    """
    (a, b), shape, axis = aligned(first, second)
    low, high = (a.low + b.low, a.high + b.high) if sign > 0 else (a.low - b.high, a.high - b.low)
    whole = a.whole and b.whole and _exact(low, high, dtype)
    pending, at_once = added(a, b, dtype)
    most = max(pending.shift, pending.load)
    whole = whole and (dtype.kind != "f" or most <= rounding.exact_integers(dtype))
    if not whole and (a.pending.shift or b.pending.shift) and (a.is_public or b.is_public):
        combined = 8 * rounding.unit(dtype) * pending.shift
        low, high = low - combined, high + combined
    found = lipschitz(
        (a, b), shape, axis, dtype, (low, high), (1.0, 1.0), whole=whole,
        relative=_theta("add", dtype, whole=whole), absolute=0.0 if whole else at_once,
    )  # fmt: skip
    return dataclasses.replace(found, pending=pending)


def vanishing(x: Abstract, bits: float) -> Abstract:
    """A product of which a part may be flushed to 0 before factors of so many bits multiply it."""
    if x.whole or not bits:
        return x
    error = 4 * rounding.tiny(x.dtype) * 2.0**bits
    ends = x.low, x.high
    found = lipschitz((x,), x.shape, x.axis, x.dtype, ends, (1.0,), absolute=error)
    low = np.where(x.low >= 0, np.maximum(found.low, 0.0), found.low)
    high = np.where(x.high <= 0, np.minimum(found.high, 0.0), found.high)
    return dataclasses.replace(found, low=low, high=high)


def _exact(low: np.ndarray, high: np.ndarray, dtype: np.dtype) -> bool:
    largest = max(float(np.abs(low).max()), float(np.abs(high).max()))
    if dtype.kind != "f":
        return True
    return largest <= rounding.exact_integers(dtype)


def multiply(first: Abstract, second: Abstract, *, dtype: np.dtype) -> Abstract:
    """|ab - a'b'| <= |b| |a - a'| + |a'| |b - b'|, and a product of one array is its square."""
    if first is second:
        return square(first, dtype=dtype)
    (a, b), shape, axis = aligned(first, second)
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners)
    whole = (a.whole and b.whole and _exact(low, high, dtype)) or _makes_integer(a, b, low)
    theta, gains = _theta("mul", dtype, whole=whole), (b.magnitude, a.magnitude)
    return lipschitz(
        (a, b), shape, axis, dtype, (low, high), gains, relative=theta, whole=whole
    )  # fmt: skip


def _makes_integer(a: Abstract, b: Abstract, product: np.ndarray) -> bool:
    """Whether two known numbers have a small integer as their exact product, as .5 and 4 do."""
    if not (a.is_known and b.is_known) or a.low.size * b.low.size > 1:
        return False
    x, y, found = float(a.low.flat[0]), float(b.low.flat[0]), float(product.flat[0])
    small = found.is_integer() and abs(found) < 2**20
    return small and Fraction(x) * Fraction(y) == Fraction(found)


def square(x: Abstract, *, dtype: np.dtype) -> Abstract:
    """|a^2 - a'^2| <= 2 max|a| |a - a'|."""
    return integer_power(x, 2, dtype=dtype)


def integer_power(x: Abstract, power: int, *, dtype: np.dtype) -> Abstract:
    """x^y for an integer y >= 0: monotone, or even; a negative power is a quotient."""
    if power < 0:
        return quotient(
            constant(np.ones((), dtype)), integer_power(x, -power, dtype=dtype), dtype=dtype
        )
    if power == 0:
        return lipschitz((x,), x.shape, x.axis, dtype, _ones(x), (0.0,), whole=True)
    top = x.magnitude
    bottom = np.where((x.low <= 0) & (x.high >= 0), 0.0, np.minimum(np.abs(x.low), np.abs(x.high)))
    with np.errstate(over="ignore"):
        ends = (bottom**power, top**power) if power % 2 == 0 else (x.low**power, x.high**power)
        gain = rounding.up(power * top ** (power - 1))
    if not all(np.isfinite(array).all() for array in (*ends, gain)):
        raise RefusalError("the power may overflow")
    whole = x.whole and _exact(*ends, dtype)
    # The products are those of at most so many factors 1 + theta.
    theta = math.expm1(power * _theta("mul", dtype, whole=whole))
    return lipschitz((x,), x.shape, x.axis, dtype, ends, (gain,), relative=theta, whole=whole)


def _ones(x: Abstract) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((1,) * len(x.shape)), np.ones((1,) * len(x.shape))


def quotient(first: Abstract, second: Abstract, *, dtype: np.dtype) -> Abstract:
    """|a/b - a'/b'| <= |a - a'| / |b| + |a'| |1/b - 1/b'|, where no b is near 0.

    Where |b - b'| <= d, the last factor is at most 1/l - 1/(l + d), with l the least |b|.
    """
    if dtype.kind != "f":
        raise RefusalError("a quotient of integers has no rule: convert to float first")
    (a, b), shape, axis = aligned(first, second)
    least = np.minimum(np.abs(b.low), np.abs(b.high))
    if ((b.low <= 0) & (b.high >= 0)).any() or (least < rounding.SMALLEST_DENOMINATOR).any():
        raise RefusalError(
            f"the denominator lies in [{b.low.min():.3g}, {b.high.max():.3g}] and may be 0:"
            " bound it away from 0, as by jnp.maximum"
        )
    corners = [x / y for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners)
    theta = _theta("div", dtype)
    error = theta * np.maximum(np.abs(low), np.abs(high))
    gains = (rounding.up(1 / least), rounding.up(a.magnitude / least**2))
    found = lipschitz((a, b), shape, axis, dtype, (low, high), gains, relative=theta)
    flush = 2 * rounding.tiny(dtype) * (1 + gains[0] + gains[1])
    slip = 2 * rounding.up(over(error + flush, axis))
    lowest, size = -over(-least, axis), over(a.magnitude, axis)

    def curved(x: Difference, y: Difference) -> np.ndarray:
        moved = rounding.up(x.each / lowest + size * moduli.RECIPROCAL(lowest, lowest, y.each))
        moved = moved * (1 + 2.0**-30) + 2.0**-500 + slip
        return np.where((x.each > 0) | (y.each > 0), moved, 0.0)

    return capped(found, curved(a.changed, b.changed), curved(a.others, b.others))


def capped(found: Abstract, changed: np.ndarray, others: np.ndarray) -> Abstract:
    """The same value, whose entries move by at most as much as a second bound says, too."""

    def both(each: np.ndarray, after: Difference) -> tuple[np.ndarray, float, float]:
        return np.minimum(after.each, each), after.l1, after.l2

    return make(
        found.shape, found.dtype, found.low, found.high, found.axis,
        both(changed, found.changed), both(others, found.others), apart=found.apart,
    )  # fmt: skip


def negative(x: Abstract, *, dtype: np.dtype) -> Abstract:
    """Exact, with gain 1."""
    ends = (-x.high, -x.low)
    return exact((x,), x.shape, x.axis, dtype, ends, (1.0,), whole=x.whole)


def exact(
    inputs: Sequence[Abstract],
    shape: Sequence[int],
    axis: int | None,
    dtype: np.dtype,
    interval: tuple[np.ndarray, np.ndarray],
    gains: Sequence[np.ndarray | float],
    **more: Any,
) -> Abstract:
    """An operation without rounding; subnormal numbers may be flushed."""
    return lipschitz(inputs, shape, axis, dtype, interval, gains, **more)


def absolute(x: Abstract, *, dtype: np.dtype) -> Abstract:
    """Exact, with gain 1."""
    bottom = np.where((x.low <= 0) & (x.high >= 0), 0.0, np.minimum(np.abs(x.low), np.abs(x.high)))
    return exact((x,), x.shape, x.axis, dtype, (bottom, x.magnitude), (1.0,), whole=x.whole)


def extremum(first: Abstract, second: Abstract, *, largest: bool, dtype: np.dtype) -> Abstract:
    """Max and min: |max(a, b) - max(a', b')| <= max(|a - a'|, |b - b'|)."""
    for one, other in ((first, second), (second, first)):
        idle = -math.inf if largest else math.inf
        if (
            one.is_known
            and (one.low == idle).all()
            and np.broadcast_shapes(one.shape, other.shape) == other.shape
        ):
            return other
    (a, b), shape, axis = aligned(first, second)
    pick = np.maximum if largest else np.minimum
    ends = pick(a.low, b.low), pick(a.high, b.high)
    whole = a.whole and b.whole
    flush = 0.0 if whole else 4 * rounding.tiny(dtype)

    def larger(x: Difference, y: Difference) -> tuple[np.ndarray, float, float]:
        each = np.maximum(x.each, y.each)
        each = each + np.where(each > 0, flush, 0.0)
        count = math.prod(shape) * flush
        return (
            each,
            float(rounding.up(x.l1 + y.l1 + count)),
            float(rounding.up(math.hypot(x.l2, y.l2) + count)),
        )

    return make(
        shape, dtype, *ends, axis, larger(a.changed, b.changed), larger(a.others, b.others),
        whole=whole, apart=float(rounding.up(max(a.apart, b.apart) + flush)),
    )  # fmt: skip


def clamp(low: Abstract, x: Abstract, high: Abstract, *, dtype: np.dtype) -> Abstract:
    """min(max(x, low), high). XLA takes its maximum with `low` for itself, also if low > high."""
    if low.high.max() > high.low.min():
        (a, b), _, _ = aligned(low, high)
        if (a.high > b.low).any():
            raise RefusalError("the bounds of a clamp may cross: use jnp.clip")
    return extremum(extremum(low, x, largest=True, dtype=dtype), high, largest=False, dtype=dtype)


def steps(x: Abstract, function: Callable[..., np.ndarray], *, dtype: np.dtype) -> Abstract:
    """floor, ceil, round, trunc, sign: monotone and whole. They jump, so a move may be 1 more."""
    ends = function(x.low), function(x.high)
    if x.whole:
        return exact((x,), x.shape, x.axis, dtype, ends, (1.0,), whole=True)

    def jumped(d: Difference) -> tuple[np.ndarray, float, float]:
        return np.where(d.each > 0, np.ceil(d.each) + 1, 0.0), math.inf, math.inf

    changed, others = jumped(x.changed), jumped(x.others)
    if not _exact(*ends, dtype):
        raise RefusalError("the integer may be too large for its dtype")
    apart = math.ceil(x.apart) + 1.0 if x.apart else 0.0
    return make(x.shape, dtype, *ends, x.axis, changed, others, whole=True, apart=apart)


def at_least_zero(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The point of an interval that is nearest to 0."""
    return np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
