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
import scipy

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
    error: np.ndarray | float,
    *,
    whole: bool = False,
    keeps_sign: bool = True,
) -> Abstract:
    """The value of an operation with these gains.

    A relative error never changes a sign, nor does a flush to 0. None here exceeds 2^-10.
    """
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
    low, high = rounding.widened(*interval, rounding.up(np.asarray(error, float) + flush))
    if keeps_sign:
        positive = interval[0], -interval[1]
        least = [np.maximum(end * (1 - 2.0**-10) - rounding.up(flush), 0.0) for end in positive]
        low = np.where(interval[0] >= 0, np.maximum(low, least[0]), low)
        high = np.where(interval[1] <= 0, np.minimum(high, -least[1]), high)
    return make(shape, dtype, low, high, axis, changed, others, whole=whole)


def _ranked(array: np.ndarray | float, rank: int) -> np.ndarray:
    array = np.asarray(array, float)
    return array.reshape((1,) * rank) if array.ndim == 0 else array


def _norms(each: np.ndarray, shape: Sequence[int], axis: int | None) -> tuple[float, float]:
    counted = math.prod(size for k, size in enumerate(shape) if k != axis)
    copies = counted / max(1, each.size)
    return float(each.sum() * copies), rounding.norm2(each, copies)


def _rounded(units: float, low: np.ndarray, high: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return units * rounding.unit(dtype) * np.maximum(np.abs(low), np.abs(high))


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
    error = 0.0 if whole else _rounded(rounding.UNITS["add"], low, high, dtype) + at_once
    if not whole and (a.pending.shift or b.pending.shift) and (a.is_public or b.is_public):
        combined = 8 * rounding.unit(dtype) * pending.shift
        low, high = low - combined, high + combined
    found = lipschitz(
        (a, b), shape, axis, dtype, (low, high), (1.0, 1.0), error, whole=whole,
        keeps_sign=at_once == 0,
    )  # fmt: skip
    return dataclasses.replace(found, pending=pending)


def vanishing(x: Abstract, bits: float) -> Abstract:
    """A product of which a part may be flushed to 0 before factors of so many bits multiply it."""
    if x.whole or not bits:
        return x
    error = 4 * rounding.tiny(x.dtype) * 2.0**bits
    found = lipschitz(
        (x,), x.shape, x.axis, x.dtype, (x.low, x.high), (1.0,), error, keeps_sign=False
    )
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
    error = 0.0 if whole else _rounded(rounding.UNITS["mul"], low, high, dtype)
    gains = (b.magnitude, a.magnitude)
    return lipschitz((a, b), shape, axis, dtype, (low, high), gains, error, whole=whole)


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
        return lipschitz((x,), x.shape, x.axis, dtype, _ones(x), (0.0,), 0.0, whole=True)
    top = x.magnitude
    bottom = np.where((x.low <= 0) & (x.high >= 0), 0.0, np.minimum(np.abs(x.low), np.abs(x.high)))
    with np.errstate(over="ignore"):
        ends = (bottom**power, top**power) if power % 2 == 0 else (x.low**power, x.high**power)
        gain = rounding.up(power * top ** (power - 1))
    if not all(np.isfinite(array).all() for array in (*ends, gain)):
        raise RefusalError("the power may overflow")
    whole = x.whole and _exact(*ends, dtype)
    error = 0.0 if whole else _rounded(2 * power, *ends, dtype)
    error = error * (1 + 2.0**-10) if power * rounding.unit(dtype) < 2.0**-12 else math.inf
    return lipschitz((x,), x.shape, x.axis, dtype, ends, (gain,), error, whole=whole)


def _ones(x: Abstract) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((1,) * len(x.shape)), np.ones((1,) * len(x.shape))


def quotient(first: Abstract, second: Abstract, *, dtype: np.dtype) -> Abstract:
    """|a/b - a'/b'| <= |a - a'| / |b| + |a'| |b - b'| / |b b'|, where no b is near 0."""
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
    error = _rounded(rounding.UNITS["div"], low, high, dtype)
    gains = (rounding.up(1 / least), rounding.up(a.magnitude / least**2))
    return lipschitz((a, b), shape, axis, dtype, (low, high), gains, error)


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
    return lipschitz(inputs, shape, axis, dtype, interval, gains, 0.0, **more)


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
    found = exact((a, b), shape, axis, dtype, ends, (1.0, 1.0), whole=a.whole and b.whole)
    flush = 0.0 if found.whole else 4 * rounding.tiny(dtype)

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
        shape, dtype, found.low, found.high, axis, larger(a.changed, b.changed),
        larger(a.others, b.others), whole=found.whole,
    )  # fmt: skip


def clamp(low: Abstract, x: Abstract, high: Abstract, *, dtype: np.dtype) -> Abstract:
    """min(max(x, low), high)."""
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
    return make(x.shape, dtype, *ends, x.axis, changed, others, whole=True)


def at_least_zero(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The point of an interval that is nearest to 0."""
    return np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))


def _logistic(x: np.ndarray) -> np.ndarray:
    return scipy.special.expit(x)


def _elementary(
    function: Callable[[np.ndarray], np.ndarray],
    slope: Callable[[np.ndarray, np.ndarray], np.ndarray],
    domain: tuple[float, float],
    *,
    modulus: moduli.Modulus,
    reach: tuple[float, float] = (-math.inf, math.inf),
    absolute_error: bool = True,
    units: float = rounding.ELEMENTARY,
    rounded_operand: float = 0.0,
) -> Rule:
    """The rule of a monotone function on its domain.

    A compiler takes exp(a) exp(b) to exp(a + b): `rounded_operand` counts that sum's rounding.
    """

    def rule(x: Abstract, *, dtype: np.dtype) -> Abstract:
        if dtype.kind != "f":
            raise RefusalError(f"{dtype} has no rule here: convert to float first")
        if x.low.min() < domain[0] or x.high.max() > domain[1]:
            raise RefusalError(
                f"the operand lies in [{x.low.min():.3g}, {x.high.max():.3g}], and the rule needs"
                f" [{domain[0]:.3g}, {domain[1]:.3g}]"
            )
        # Subnormal operands may be taken for 0, which lies in the interval.
        first, second = function(x.low), function(x.high)
        low, high = np.minimum(first, second), np.maximum(first, second)
        size = np.maximum(np.abs(low), np.abs(high))
        size = np.maximum(size, 1.0) if absolute_error else size
        counted = units * rounding.coarseness(dtype) + rounded_operand * np.abs(x.high)
        error = counted * rounding.unit(dtype) * size + 2.0**-40 * size * 2.0**-4
        # Rounding may move a value whose slope is 0 on the host.
        gain = rounding.up(slope(x.low, x.high)) * (1 + 2.0**-30) + 2.0**-500
        found = lipschitz(
            (x,), x.shape, x.axis, dtype, (low, high), (gain,), error, keeps_sign=False
        )
        flush = 2 * rounding.tiny(dtype) * (1 + gain)
        slip = rounding.up(2 * over(error + flush, x.axis))
        lowest, highest = over(-x.low, x.axis) * -1, over(x.high, x.axis)

        def capped(before: Difference, after: Difference) -> tuple[np.ndarray, float, float]:
            curved = modulus(lowest, highest, before.each) * (1 + 2.0**-30) + 2.0**-500
            each = np.where(before.each > 0, curved + slip, 0.0)
            return np.minimum(after.each, each), after.l1, after.l2

        return make(
            found.shape, dtype, np.maximum(found.low, reach[0]), np.minimum(found.high, reach[1]),
            found.axis, capped(x.changed, found.changed), capped(x.others, found.others),
        )  # fmt: skip

    return rule


def square_root(x: Abstract, *, dtype: np.dtype) -> Abstract:
    """|sqrt a - sqrt b| <= min(|a - b| / (2 sqrt low), sqrt |a - b|)."""
    if dtype.kind != "f":
        raise RefusalError(f"{dtype} has no rule here: convert to float first")
    if x.low.min() < 0:
        raise RefusalError(
            f"the operand of sqrt lies in [{x.low.min():.3g}, {x.high.max():.3g}] and may be"
            " negative: clamp it from below, as by jnp.maximum(x, 0)"
        )
    ends = np.sqrt(x.low), np.sqrt(x.high)
    with np.errstate(divide="ignore"):
        gain = np.where(x.low > 0, 0.5 / np.sqrt(x.low), math.inf)
    # Two subnormal numbers may be taken for 0, and the roots of them are larger than they are.
    flush = math.sqrt(4 * rounding.tiny(dtype))
    error = _rounded(rounding.UNITS["sqrt"], *ends, dtype) + flush
    slope = over(gain, x.axis)

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        with np.errstate(invalid="ignore"):
            straight = np.where(d.each > 0, slope * d.each, 0.0)
        each = np.where(d.each > 0, np.minimum(straight, np.sqrt(d.each)), 0.0)
        slip = np.where(each > 0, 2 * over(error, x.axis), 0.0)
        return rounding.up(each) + rounding.up(slip), math.inf, math.inf

    low, high = rounding.widened(*ends, error)
    return make(
        x.shape, dtype, np.maximum(low, 0.0), high, x.axis, moved(x.changed), moved(x.others),
    )  # fmt: skip


def sine(x: Abstract, *, dtype: np.dtype) -> Abstract:
    """Sin and cos: gain 1, and values in [-1, 1]."""
    if dtype.kind != "f":
        raise RefusalError(f"{dtype} has no rule here: convert to float first")
    if x.magnitude.max() > 2.0**12:
        raise RefusalError(
            "the operand of sin or cos may exceed 4096, where its error is not documented"
        )
    ends = -np.ones((1,) * len(x.shape)), np.ones((1,) * len(x.shape))
    error = rounding.ELEMENTARY * rounding.unit(dtype)
    return lipschitz((x,), x.shape, x.axis, dtype, ends, (1.0,), error, keeps_sign=False)


def _logistic_slope(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    steepest = at_least_zero(low, high)
    return _logistic(steepest) * _logistic(-steepest)


def _exp_slope(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    del low
    return np.exp(high)


ELEMENTARY: dict[str, Rule] = {
    "exp": _elementary(
        np.exp, _exp_slope, (-(2.0**60), 40.0), modulus=moduli.EXP, reach=(0.0, math.inf),
        absolute_error=False, rounded_operand=16.0,
    ),
    "log": _elementary(
        np.log, lambda low, high: 1 / low, (2.0**-60, 2.0**60), modulus=moduli.LOG,
    ),
    "log1p": _elementary(
        np.log1p, lambda low, high: 1 / (1 + low), (-1 + 2.0**-10, 2.0**60),
        modulus=moduli.LOG1P,
    ),
    "expm1": _elementary(
        np.expm1, lambda low, high: np.exp(high), (-(2.0**60), 40.0), modulus=moduli.EXP,
    ),
    "tanh": _elementary(
        np.tanh, lambda low, high: 1 - np.tanh(at_least_zero(low, high)) ** 2 + 2.0**-40,
        (-(2.0**60), 2.0**60), modulus=moduli.TANH,
    ),
    "logistic": _elementary(
        _logistic, _logistic_slope, (-(2.0**60), 2.0**60),
        modulus=moduli.LOGISTIC, reach=(0.0, math.inf),
    ),
    "erf": _elementary(
        lambda x: scipy.special.erf(x),
        lambda low, high: 2 / math.sqrt(math.pi) * np.exp(-(at_least_zero(low, high) ** 2)),
        (-(2.0**60), 2.0**60), modulus=moduli.ERF,
    ),
    "rsqrt": _elementary(
        lambda x: 1 / np.sqrt(x), lambda low, high: 0.5 * low**-1.5, (2.0**-60, 2.0**60),
        modulus=moduli.UNKNOWN, absolute_error=False,
    ),
    "sqrt": square_root, "sin": sine, "cos": sine,
}  # fmt: skip
