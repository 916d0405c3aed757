"""Margins for the rounding errors of multipliers: users' formulas for scale over sensitivity.

The rounding error of the formula is measured, and eight times the largest error is added to the
scale. Concrete parameters are evaluated in float64 on the host, and the formula is compared with
its own values at nearby parameters. Traced parameters are evaluated in the float dtype of the
program, and the formula in float32 is compared with float64 at many parameters. A formula with
catastrophic cancellation is refused.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._types import Scalar, Value
from dpjax._exact._numerics import compute_dtype

Multiplier = Callable[[Scalar, Scalar], Scalar]

# A relative error below this needs no margin, because the scale that is drawn exceeds the nominal
# scale by more.
_COVERED = 2.0**-40
_FACTOR = 8  # The margin is this many times the largest measured error.
_MOST_LOST, _MOST_LOST_TRACED = 2.0**-20, 2.0**-10
# Relative steps from 2^-8 to 2^-48. A step up is longer than a step down by an irrational factor,
# because equal steps could miss errors that are symmetric about the center.
_STEPS, _LONGER = [0.618034**power for power in range(12, 70, 2)], 1.618034
# A formula may subtract logarithms, whose magnitudes reach 745 in float64. For smaller epsilon, it
# could lose all digits at every nearby parameter, and then the comparison would find no error.
_LEAST_EPSILON = 1e-9
# Traced parameters are tested in these ranges. Parameters outside of them give NaN.
_EPSILONS, _DELTAS = (2.0**-14, 2.0**6), (2.0**-60, 2.0**-2)
_TRIED = 256


def multiple_of(multiplier: Multiplier, epsilon: Scalar, delta: Scalar) -> Scalar:
    """The scale over the sensitivity, with a margin for the rounding error of the formula."""
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        return _traced(multiplier, epsilon, delta)
    if epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {_LEAST_EPSILON:g} for a multiplier of your own, got"
            f" {epsilon}: below this limit, rounding errors of the multiplier cannot be measured"
        )
    numbers = np.float64(epsilon), np.float64(delta)
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        unit = _in_float64(multiplier(*numbers))
        # `additive` refuses an infinite scale.
        around = _lost_around(lambda *moved: _in_float64(multiplier(*moved)), numbers, unit)
        lost = float(around) if math.isfinite(unit) else 0.0
    if lost > _MOST_LOST:
        raise ValueError(_cancels(f"{lost:.2g} of its value at epsilon={epsilon:g}"))
    return unit * (1 + (0 if lost <= _COVERED else _FACTOR * lost))


def _in_float64(unit: object) -> float:
    dtype = getattr(unit, "dtype", np.dtype(np.float64))
    if _checks.is_traced(unit):
        raise TypeError("multiplier closes over a traced value: make the mechanism outside of jit")
    if dtype != np.float64:
        raise TypeError(
            f"multiplier must return float64 for float64 parameters, got {dtype}: remove the cast,"
            " or the array of another dtype, that rounds its result"
        )
    return float(unit)  # pyright: ignore[reportArgumentType]


def _lost_around(
    formula: Callable[..., Value], numbers: tuple[Value, ...], unit: Value
) -> np.ndarray:
    """Estimates the relative rounding error of a formula by its deviation from a straight line.

    Three values at nearby parameters of a smooth formula are nearly on a straight line: the
    deviation is a multiple of the squared step. The multiple is 56 for x^-7, and x^2 for e^x. A
    larger deviation is rounding error, which looks random over steps about as large as the error.
    """
    worst = np.zeros(np.shape(unit))
    for place, number in enumerate(numbers):
        if np.all(number == 0):
            continue
        for step in _STEPS:
            down, up = (
                formula(*numbers[:place], number * factor, *numbers[place + 1 :])
                for factor in (1 - step, 1 + _LONGER * step)
            )
            between = (_LONGER * np.asarray(down) + np.asarray(up)) / (1 + _LONGER)
            with np.errstate(all="ignore"):
                bent = 2 * np.abs(between / np.asarray(unit) - 1)
            lost = bent - _LONGER * (64 + number**2) * step**2
            worst = np.maximum(worst, np.where(np.isnan(lost), np.inf, lost))
    return worst


def _traced(multiplier: Multiplier, epsilon: Scalar, delta: Scalar) -> jax.Array:
    """The scale over the sensitivity in the dtype of a program; NaN for untested parameters."""
    epsilon, delta = jnp.asarray(epsilon), jnp.asarray(delta)
    dtype = max(compute_dtype(epsilon.dtype), compute_dtype(delta.dtype))
    known = None if _checks.is_traced(delta) else float(delta)
    lost, at = _lost_in(multiplier, dtype, known)
    if not lost <= _MOST_LOST_TRACED:
        raise ValueError(_cancels(f"{lost:.2g} of its value in {dtype} at epsilon={at:g}"))
    tried = (epsilon >= _EPSILONS[0]) & (epsilon <= _EPSILONS[1])
    if known is None:
        tried &= (delta == 0) | ((delta >= _DELTAS[0]) & (delta <= _DELTAS[1]))
    unit = multiplier(epsilon.astype(dtype), delta.astype(dtype))
    return jnp.where(tried, unit * (1 + _FACTOR * lost + 2.0**-20), jnp.nan)


def _lost_in(multiplier: Multiplier, dtype: DTypeLike, delta: float | None) -> tuple[float, float]:
    """The largest relative error that was found, and the epsilon at which it occurs."""
    generator = np.random.default_rng(0)
    epsilons = _between(generator, *_EPSILONS)
    deltas = _between(generator, *_DELTAS) if delta is None else np.full(_TRIED, delta)
    around = None
    # Both dtypes get the same parameters, which the shorter dtype represents exactly.
    epsilons, deltas = (np.asarray(x, dtype).astype(np.float64) for x in (epsilons, deltas))
    try:
        with jax.ensure_compile_time_eval():
            short = jax.vmap(multiplier)(jnp.asarray(epsilons, dtype), jnp.asarray(deltas, dtype))
            short = np.asarray(short, np.float64)
            with jax.enable_x64(True):
                formula = jax.jit(jax.vmap(multiplier))
                exact = np.asarray(formula(epsilons, deltas))
                if dtype == np.float64:
                    around = _lost_around(formula, (epsilons, deltas), exact)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            "multiplier must be written in jax.numpy if its parameters are traced, but it needs the"
            " values of the parameters: rewrite it, or make the mechanism outside of jit"
        ) from error
    errors = around if around is not None else np.abs(short / exact - 1)
    worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    found = np.broadcast_to(errors, (_TRIED,))[worst]
    return (math.inf if np.isnan(found) else float(found)), float(epsilons[worst])


def _between(generator: np.random.Generator, low: float, high: float) -> np.ndarray:
    return np.exp(generator.uniform(math.log(low), math.log(high), _TRIED))


def _cancels(loss: str) -> str:
    return (
        f"multiplier loses {loss}, because it subtracts nearly equal numbers: rewrite the formula,"
        " for example 1 / (sqrt(a) - sqrt(b)) as (sqrt(a) + sqrt(b)) / (a - b)"
    )
