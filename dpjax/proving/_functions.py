"""Rules of powers, exponentials and other elementary functions."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy

from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import (
    ALL,
    LARGEST_EXPONENT,
    Array,
    Modulus,
    capped,
    corners,
    lipschitz,
    nearest_to_zero,
)
from dpjax.proving._rows import aligned, stretched
from dpjax.proving._value import Abstract, RangeRefusalError, RefusalError, changing_with, over


def power(x: Abstract, exponent: Abstract, **_: Any) -> Abstract:
    """Returns the value of x^y for x > 0 and a public y.

    The slope of the power is largest at an endpoint of the range of x.

    A device may compute exp(y log x). Then each of a few operations changes the operand of exp by
    at most u |y log x|, where u is the unit roundoff.
    """
    dtype = x.dtype
    if x.is_known and x.low.size == 1 and exponent.dtype == dtype:
        return _exponential(float(x.low.flat[0]), stretched(exponent, x.shape or exponent.shape))
    if not exponent.is_known or dtype.kind != "f" or exponent.dtype != dtype:
        raise RefusalError(
            "proofs support a power only if its exponent or its base is a single public float"
        )
    y = float(exponent.low.flat[0])
    if exponent.shape or exponent.low.size != 1 or not abs(y) <= LARGEST_EXPONENT:
        raise RefusalError(
            f"proofs support a power only if its exponent is a scalar in [-{LARGEST_EXPONENT}, "
            f"{LARGEST_EXPONENT}], got {y:.3g} of shape {exponent.shape}"
        )
    least = float(x.low.min())
    if y > 0 and 0 <= least < rounding.SMALLEST_DENOMINATOR:
        return _power_from_zero(x, y)
    if least < rounding.SMALLEST_DENOMINATOR:
        raise RangeRefusalError(
            f"the base of the power may be 0 or negative, because it is in [{least:.3g}, "
            f"{x.high.max():.3g}]. Clamp it from below, for example with jnp.maximum"
        )
    ends = x.low**y, x.high**y
    low, high = np.minimum(*ends), np.maximum(*ends)
    gain = abs(y) * np.maximum(x.low ** (y - 1), x.high ** (y - 1)) * (1 + 2.0**-30)
    logs = np.maximum(np.abs(np.log(x.low)), np.abs(np.log(x.high)))
    # Bounds the errors of log and exp, and the rounding errors of y log x, as a multiple of the
    # unit roundoff.
    units = 2 * rounding.elementary(dtype) + 16 * abs(y) * (logs + 1)
    if not np.isfinite(high).all():
        raise RefusalError("the power may overflow. Rescale its base")
    # An error t of y log x multiplies the power by e^t, so its relative error is at most e^t - 1.
    # The term 2^-40 covers the rounding errors of the host.
    theta = np.expm1(units * rounding.unit(dtype)) + 2.0**-40
    return lipschitz((x,), (low, high), (rounding.up(gain) + 2.0**-500,), relative=theta)


def _power_from_zero(x: Abstract, y: float) -> Abstract:
    """Returns the value of x^y for x >= 0 and y > 0.

    Let |a - b| <= d. If y < 1, the power is concave, so it changes by at most (low + d)^y - low^y.
    If y >= 1, it is convex, so it changes by at most high^y - (high - d)^y. If a number is flushed
    to 0, its power was at most tiny^y, where tiny is the smallest normal number.
    """
    tiny = rounding.tiny(x.dtype)
    low, high = x.low**y, x.high**y
    logs = max(abs(math.log(tiny)), abs(math.log(float(x.high.max()) + tiny)))
    units = 2 * rounding.elementary(x.dtype) + 16 * y * (logs + 1)
    theta = np.expm1(units * rounding.unit(x.dtype)) + 2.0**-40
    if not np.isfinite(high).all() or theta > 2.0**-4:
        raise RefusalError("the power may overflow. Rescale its base")
    error = theta * high + (2 * tiny) ** y + 4 * tiny
    lowest, highest = -over(-x.low, x.axis), over(x.high, x.axis)

    def apart(d: Array | float) -> Array:
        if y < 1:
            moved = (lowest + d) ** y - lowest**y
            # This covers the rounding errors of the two powers on the host.
            moved = moved + 2.0**-50 * (lowest + d) ** y
        else:
            moved = highest**y - np.maximum(highest - d, 0.0) ** y + 2.0**-50 * highest**y
        return rounding.up(rounding.up(moved + 2 * over(error, x.axis)))

    return _from_zero(x, low, high, error, apart)


def _from_zero(
    x: Abstract, low: Array, high: Array, error: Array, apart: Callable[[Array | float], Array]
) -> Abstract:
    """Returns the value of a nonnegative function of x.

    If x changes by d, the function changes by at most apart(d).
    """
    low, high = rounding.widened(low, high, error)
    return changing_with(x, np.maximum(low, 0.0), high, apart, apart=float(apart(x.apart).max()))


def _exponential(base: float, x: Abstract) -> Abstract:
    """Returns the value of b^x for a public b > 0, computed as exp(x log b)."""
    if not (2.0**-30 <= base <= 2.0**30 and x.dtype.kind == "f"):
        raise RefusalError(
            f"proofs do not support powers of the base {base:.3g}. Use a base in [1e-9, 1e9]"
        )
    slope = abs(math.log(base))
    if slope * float(x.magnitude.max()) > 40:
        raise RefusalError("the power may overflow. Rescale the exponent")
    ends = base**x.low, base**x.high
    low, high = np.minimum(*ends), np.maximum(*ends)
    units = 2 * rounding.elementary(x.dtype) + 16 * (slope * x.magnitude + 1)
    theta = np.expm1(units * rounding.unit(x.dtype)) + 2.0**-40
    gain = rounding.up(slope * high * (1 + 2.0**-30)) + 2.0**-500
    found = lipschitz((x,), (low, high), (gain,), relative=theta)
    slip = 2 * rounding.up(over(theta * high + 4 * rounding.tiny(x.dtype) * (1 + gain), x.axis))
    top = over(high, x.axis)
    return _curved(found, x, lambda d: -top * np.expm1(-slope * d), slip)


def _curved(
    found: Abstract, x: Abstract, modulus: Callable[[Array], Array], slip: Array
) -> Abstract:
    """Tightens `found`, the value of a function of x, by a second bound on its change.

    If x changes by d, the exact function changes by at most modulus(d). `slip` bounds the rounding
    errors.
    """
    return capped(found, (x,), lambda d: modulus(d) * (1 + 2.0**-30) + 2.0**-500 + slip)


def exp2(x: Abstract, *, accuracy: object = None, **_: Any) -> Abstract:
    """Returns the value of 2^x."""
    _check(x, accuracy)
    return _exponential(2.0, x)


def _check(x: Abstract, accuracy: object) -> None:
    if accuracy is not None:
        raise RefusalError("proofs do not support accuracy=. Call the function without it")
    if x.dtype.kind != "f":
        raise RefusalError(
            f"proofs support this operation only for floats, got {x.dtype}. Convert the operand to "
            "float first"
        )


def _monotone(
    function: Callable[[Array], Array],
    slope: Callable[[Array, Array], Array],
    domain: tuple[float, float] = (-ALL, ALL),
    *,
    modulus: Modulus,
    least: float = -math.inf,
    absolute_error: bool = True,
    rounded_operand: float = 0.0,
) -> Callable[..., Abstract]:
    """Returns the rule of a monotone function.

    Args:
        function: the function on the host, in float64.
        slope: slope(low, high) is the largest |slope| on [low, high].
        domain: the interval of allowed operands; others are refused.
        modulus: bounds |f(a) - f(b)| for |a - b| <= d. It is tighter than slope times d. If f is
            convex or concave, the largest difference is at the steeper end of the interval. If f is
            odd and its slope decreases with |x|, it is the difference of f(d/2) and f(-d/2).
        least: a lower bound on every computed result.
        absolute_error: whether small values have the same absolute error as the value 1. Otherwise
            the error is relative to the value.
        rounded_operand: the error of the operand, in units of u times its magnitude. A compiler may
            rewrite exp(a) exp(b) as exp(a + b), and that sum is rounded.
    """

    def rule(x: Abstract, *, accuracy: object = None, **_: Any) -> Abstract:
        _check(x, accuracy)
        if x.low.min() < domain[0] or x.high.max() > domain[1]:
            raise RangeRefusalError(
                f"the operand may be in [{x.low.min():.3g}, {x.high.max():.3g}], but a proof needs "
                f"it to be in [{domain[0]:.3g}, {domain[1]:.3g}]. Clip it with jnp.clip"
            )
        # A device may flush a subnormal operand to 0. This needs no margin: an interval that
        # contains subnormal numbers also contains 0.
        ends = function(x.low), function(x.high)
        low, high = np.minimum(*ends), np.maximum(*ends)
        size = np.maximum(np.abs(low), np.abs(high))
        size = np.maximum(size, 1.0) if absolute_error else size
        counted = rounding.elementary(x.dtype) + rounded_operand * np.abs(x.high)
        error = counted * rounding.unit(x.dtype) * size + 2.0**-40 * size * 2.0**-4
        # The slope may underflow to 0 on the host. Adding a tiny number keeps the gain above 0.
        gain = rounding.up(slope(x.low, x.high)) * (1 + 2.0**-30) + 2.0**-500
        found = lipschitz((x,), (low, high), (gain,), absolute=error)
        slip = rounding.up(2 * over(error + 2 * rounding.tiny(x.dtype) * (1 + gain), x.axis))
        lowest, highest = -over(-x.low, x.axis), over(x.high, x.axis)
        below, off = np.asarray(least), found.off
        if not absolute_error:
            # The error is relative, so small values have smaller errors. For operands below -64,
            # the value is below 2^-90, and `flush` covers its error.
            operand = np.minimum(x.magnitude, 64.0)
            counted = rounding.elementary(x.dtype) + rounded_operand * operand
            relative = counted * rounding.unit(x.dtype) + 2.0**-44
            flush = 2 * rounding.tiny(x.dtype) * (1 + gain) + 2.0**-80
            below = np.maximum(below, rounding.widened(low * (1 - relative), high, flush)[0])
            off = float(relative.max()), float(flush.max())
        found = dataclasses.replace(found, low=np.maximum(found.low, below), off=off)
        return _curved(found, x, functools.partial(modulus, lowest, highest), slip)

    return rule


# SciPy imports `scipy.special` when it is first used, which takes a tenth of a second.
def _expit(x: Array) -> Array:
    return scipy.special.expit(x)


def _erf(x: Array) -> Array:
    return scipy.special.erf(x)


def _exp_modulus(low: Array, high: Array, d: Array) -> Array:
    """Returns exp(high) - exp(high - d)."""
    return -np.exp(high) * np.expm1(-d)


def _centered(function: Callable[[Array], Array]) -> Modulus:
    """Returns the modulus f(d/2) - f(-d/2) of an odd function f."""
    return lambda low, high, d: 2 * function(d / 2)


def _steepest_at_zero(slope: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Returns the largest slope on an interval, for a slope that decreases with |x|."""
    return lambda low, high: slope(nearest_to_zero(low, high))


EXP = _monotone(
    np.exp, lambda low, high: np.exp(high), (-ALL, 40.0), modulus=_exp_modulus,
    least=0.0, absolute_error=False, rounded_operand=16.0,
)  # fmt: skip


EXPM1 = _monotone(np.expm1, lambda low, high: np.exp(high), (-ALL, 40.0), modulus=_exp_modulus)


# The modulus is log(low + d) - log(low) = log1p(d / low).
LOG = _monotone(
    np.log, lambda low, high: 1 / low, (2.0**-60, ALL),
    modulus=lambda low, high, d: np.log1p(d / low),
)  # fmt: skip


LOG1P = _monotone(
    np.log1p, lambda low, high: 1 / (1 + low), (-1 + 2.0**-10, ALL),
    modulus=lambda low, high, d: np.log1p(d / (1 + low)),
)  # fmt: skip


TANH = _monotone(
    np.tanh, _steepest_at_zero(lambda x: 1 - np.tanh(x) ** 2 + 2.0**-40), modulus=_centered(np.tanh)
)


ATAN = _monotone(
    np.arctan, _steepest_at_zero(lambda x: 1 / (1 + x**2)), modulus=_centered(np.arctan)
)


# The logistic function equals 1/2 + tanh(x/2) / 2.
LOGISTIC = _monotone(
    _expit, _steepest_at_zero(lambda x: _expit(x) * _expit(-x)),
    modulus=lambda low, high, d: np.tanh(d / 4), least=0.0,
)  # fmt: skip


ERF = _monotone(
    _erf, _steepest_at_zero(lambda x: 2 / math.sqrt(math.pi) * np.exp(-(x**2))),
    modulus=_centered(_erf),
)  # fmt: skip


# The modulus is low^-1/2 - (low + d)^-1/2.
RSQRT = _monotone(
    lambda x: 1 / np.sqrt(x), lambda low, high: 0.5 * low**-1.5, (2.0**-60, ALL),
    modulus=lambda low, high, d: -np.expm1(-np.log1p(d / low) / 2) / np.sqrt(low),
    absolute_error=False,
)  # fmt: skip


def arctangent(first: Abstract, second: Abstract, **_: Any) -> Abstract:
    """Returns the value of atan2(y, x) for x > 0, which is atan(y / x).

    The derivative in y is x / (x^2 + y^2), which is at most 1 / x. The derivative in x is -y / (x^2
    + y^2). Its magnitude is at most 1 / (2 x), and also at most |y| / x^2. The function is monotone
    in each operand if the sign of the other one is fixed.
    """
    y, x = aligned(first, second)
    _check(x, None)
    if x.low.min() < rounding.SMALLEST_DENOMINATOR:
        raise RangeRefusalError(
            f"the second operand of atan2 must be above 0, but it may be in [{x.low.min():.3g}, "
            f"{x.high.max():.3g}]. Clamp it from below, for example with jnp.maximum"
        )
    low, high = corners(y, x, np.arctan2)
    gains = rounding.up(1 / x.low), rounding.up(np.minimum(0.5 / x.low, y.magnitude / x.low**2))
    error = 2 * rounding.elementary(x.dtype) * rounding.unit(x.dtype) + 2.0**-44
    return lipschitz((y, x), (low, high), gains, absolute=error)


def square_root(x: Abstract, *, accuracy: object = None, **_: Any) -> Abstract:
    """Returns the value of sqrt(x), which is concave.

    If |a - b| <= d, then |sqrt a - sqrt b| <= sqrt(low + d) - sqrt(low).
    """
    _check(x, accuracy)
    if x.low.min() < 0:
        raise RangeRefusalError(
            f"the operand of sqrt may be negative, because it is in [{x.low.min():.3g}, "
            f"{x.high.max():.3g}]. Clamp it from below, for example with jnp.maximum(x, 0)"
        )
    ends = np.sqrt(x.low), np.sqrt(x.high)
    # Subnormal numbers may be flushed to 0, which changes their roots by at most the root of such a
    # number.
    flush = math.sqrt(4 * rounding.tiny(x.dtype))
    error = rounding.DIVISION * rounding.unit(x.dtype) * ends[1] + flush
    lowest = -over(-x.low, x.axis)

    def curved(d: Array | float) -> Array:
        with np.errstate(invalid="ignore"):
            root = np.asarray(d) / (np.sqrt(lowest + d) + np.sqrt(lowest))
        return rounding.up(rounding.up(np.where(d > 0, root, 0.0) + 2 * over(error, x.axis)))

    return _from_zero(x, *ends, error, curved)


def wave(x: Abstract, *, peak: float, accuracy: object = None, **_: Any) -> Abstract:
    """Returns the value of sin (with a peak at pi/2) or cos (at 0). Its slopes are within [-1, 1].

    The range contains 1 only if an operand may be at a peak, and -1 only if one may be at a trough.
    """
    _check(x, accuracy)
    if x.magnitude.max() > 2.0**12:
        raise RefusalError(
            "the magnitude of the operand of sin or cos may exceed 4096, and proofs have no bound "
            "on the rounding error there. Clip or rescale the operand"
        )
    sides = np.cos(x.low - peak), np.cos(x.high - peak)
    highest = np.where(_meets(x, peak), 1.0, np.maximum(*sides))
    lowest = np.where(_meets(x, peak + np.pi), -1.0, np.minimum(*sides))
    error = rounding.elementary(x.dtype) * rounding.unit(x.dtype)
    return lipschitz((x,), (lowest - 2.0**-30, highest + 2.0**-30), (1.0,), absolute=error)


def _meets(x: Abstract, place: float) -> Array:
    """Whether the interval of an operand may contain `place` plus a multiple of 2 pi."""
    turn = 2 * np.pi
    return place + turn * np.ceil((x.low - 2.0**-30 - place) / turn) <= x.high + 2.0**-30
