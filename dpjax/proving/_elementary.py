"""Rules of elementary functions: exp, log, tanh and others, roots, sin and cos."""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import scipy

from dpjax.proving import _moduli as moduli
from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import Rule, at_least_zero, capped, lipschitz
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, Difference, make, over


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
        counted = rounding.elementary(dtype) + rounded_operand * np.abs(x.high)
        error = counted * rounding.unit(dtype) * size + 2.0**-40 * size * 2.0**-4
        # Rounding may move a value whose slope is 0 on the host.
        gain = rounding.up(slope(x.low, x.high)) * (1 + 2.0**-30) + 2.0**-500
        found = lipschitz((x,), x.shape, x.axis, dtype, (low, high), (gain,), absolute=error)
        flush = 2 * rounding.tiny(dtype) * (1 + gain)
        slip = rounding.up(2 * over(error + flush, x.axis))
        lowest, highest = over(-x.low, x.axis) * -1, over(x.high, x.axis)

        def curved(d: Difference) -> np.ndarray:
            moved = modulus(lowest, highest, d.each) * (1 + 2.0**-30) + 2.0**-500
            return np.where(d.each > 0, moved + slip, 0.0)

        ends = np.maximum(found.low, reach[0]), np.minimum(found.high, reach[1])
        found = dataclasses.replace(found, low=ends[0], high=ends[1])
        return capped(found, curved(x.changed), curved(x.others))

    return rule


def square_root(x: Abstract, *, dtype: np.dtype) -> Abstract:
    """|sqrt a - sqrt b| <= sqrt(low + d) - sqrt(low) where |a - b| <= d: the root is concave."""
    if dtype.kind != "f":
        raise RefusalError(f"{dtype} has no rule here: convert to float first")
    if x.low.min() < 0:
        raise RefusalError(
            f"the operand of sqrt lies in [{x.low.min():.3g}, {x.high.max():.3g}] and may be"
            " negative: clamp it from below, as by jnp.maximum(x, 0)"
        )
    ends = np.sqrt(x.low), np.sqrt(x.high)
    # Two subnormal numbers may be taken for 0, and the roots of them are larger than they are.
    flush = math.sqrt(4 * rounding.tiny(dtype))
    error = rounding.UNITS["sqrt"] * rounding.unit(dtype) * ends[1] + flush
    lowest = -over(-x.low, x.axis)

    def curved(d: np.ndarray | float) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            root = moduli.SQRT(lowest, lowest, np.asarray(d))
        return rounding.up(rounding.up(np.where(d > 0, root, 0.0) + 2 * over(error, x.axis)))

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        return np.where(d.each > 0, curved(d.each), 0.0), math.inf, math.inf

    low, high = rounding.widened(*ends, error)
    return make(
        x.shape, dtype, np.maximum(low, 0.0), high, x.axis, moved(x.changed), moved(x.others),
        apart=float(curved(x.apart).max()),
    )  # fmt: skip


def wave(x: Abstract, *, peak: float, dtype: np.dtype) -> Abstract:
    """Sin and cos, which has a peak at 0: gain 1, and 1 or -1 only where a peak or trough is."""
    if dtype.kind != "f":
        raise RefusalError(f"{dtype} has no rule here: convert to float first")
    if x.magnitude.max() > 2.0**12:
        raise RefusalError(
            "the operand of sin or cos may exceed 4096, where its error is not documented"
        )
    sides = np.cos(x.low - peak), np.cos(x.high - peak)
    highest = np.where(_meets(x, peak), 1.0, np.maximum(*sides))
    lowest = np.where(_meets(x, peak + np.pi), -1.0, np.minimum(*sides))
    ends = lowest - 2.0**-30, highest + 2.0**-30
    error = rounding.elementary(dtype) * rounding.unit(dtype)
    return lipschitz((x,), x.shape, x.axis, dtype, ends, (1.0,), absolute=error)


def _meets(x: Abstract, place: float) -> np.ndarray:
    """Whether the interval may hold a number that is a multiple of 2 pi away from a place."""
    turn = 2 * np.pi
    return place + turn * np.ceil((x.low - 2.0**-30 - place) / turn) <= x.high + 2.0**-30


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
        modulus=moduli.RSQRT, absolute_error=False,
    ),
    "sqrt": square_root, "sin": functools.partial(wave, peak=np.pi / 2),
    "cos": functools.partial(wave, peak=0.0),
}  # fmt: skip
