"""The scale of noise by a formula that a user wrote, with what it loses in rounding.

With concrete parameters it runs in float64 on the host. With traced ones it runs in the float dtype
of the program, and is compared with float64 at many parameters when it is traced. Both measure how
much a formula loses, add several times that to the scale, and refuse formulas that cancel.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._types import Scalar
from dpjax._exact._numerics import compute_dtype

Multiplier = Callable[[Scalar, Scalar], Scalar]

# The scale that is drawn covers this part of it anyway.
_COVERED = 2.0**-40
_FACTOR = 8  # The largest loss of all parameters over that of those that were tried.
_MOST_LOST, _MOST_LOST_TRACED = 2.0**-20, 2.0**-10
# Where losses are seen: a formula that subtracts numbers up to 745, the logarithm of any float.
_LEAST_EPSILON = 1e-9
# Traced parameters that are tried; others give NaN.
_EPSILONS, _DELTAS = (2.0**-14, 2.0**6), (2.0**-60, 2.0**-2)
_TRIED = 256


def multiple_of(multiplier: Multiplier, epsilon: Scalar, delta: Scalar) -> Scalar:
    """The scale over the sensitivity, rounded up by what the formula may lose."""
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        return _traced(multiplier, epsilon, delta)
    if epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {_LEAST_EPSILON:g} for a multiplier of your own, got"
            f" {epsilon}: below, nobody sees what it loses in rounding"
        )
    numbers = np.float64(epsilon), np.float64(delta)
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        unit = _in_float64(multiplier(*numbers))
        lost = _lost_around(multiplier, numbers, unit)
    if lost > _MOST_LOST:
        raise ValueError(_cancels(f"{lost:.2g} of its value at epsilon={epsilon:g}"))
    return unit * (1 + (0 if lost <= _COVERED else _FACTOR * lost))


def _in_float64(unit: object) -> float:
    dtype = getattr(unit, "dtype", np.dtype(np.float64))
    if _checks.is_traced(unit):
        raise TypeError("multiplier closes over a traced value: make the mechanism outside of jit")
    if dtype != np.float64:
        raise TypeError(
            f"multiplier must compute in float64, got {dtype}: its parameters are float64, so a"
            " cast in it, or an array of another dtype, rounds the scale"
        )
    return float(unit)  # pyright: ignore[reportArgumentType]


def _lost_around(multiplier: Multiplier, numbers: tuple[np.float64, ...], unit: float) -> float:
    """The largest second difference of the formula, less that of a smooth one.

    What is lost in rounding changes without a pattern, over a width that is about as large as the
    loss. A width of 2^-10 or less is among those that are tried, and no smooth formula bends so.
    """
    if not math.isfinite(unit):
        return 0.0  # `additive` refuses it.
    worst = 0.0
    for place, number in enumerate(numbers):
        if number == 0:
            continue
        for exponent in range(8, 50, 2):
            step = 2.0**-exponent
            sides = 0.0
            for factor in (1 + step, 1 - step):
                moved = (*numbers[:place], number * factor, *numbers[place + 1 :])
                sides += _in_float64(multiplier(*moved))
            bent = abs(sides / unit - 2) - 64 * step**2
            worst = max(worst, math.inf if math.isnan(bent) else bent)
    return worst


def _traced(multiplier: Multiplier, epsilon: Scalar, delta: Scalar) -> jax.Array:
    """The scale over the sensitivity in the dtype of a program; NaN beyond what was tried."""
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
    """The largest relative error that was found, and the epsilon of it."""
    generator = np.random.default_rng(0)
    epsilons = _between(generator, *_EPSILONS)
    deltas = _between(generator, *_DELTAS) if delta is None else np.full(_TRIED, delta)
    # Both get the same parameters.
    epsilons, deltas = (np.asarray(x, dtype).astype(np.float64) for x in (epsilons, deltas))
    try:
        with jax.ensure_compile_time_eval():
            short = jax.vmap(multiplier)(jnp.asarray(epsilons, dtype), jnp.asarray(deltas, dtype))
            short = np.asarray(short, np.float64)
            with jax.enable_x64(True):
                exact = np.asarray(jax.vmap(multiplier)(jnp.asarray(epsilons), jnp.asarray(deltas)))
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            "multiplier must be written in jax.numpy if its parameters are traced, got one that"
            " needs their values: or make the mechanism outside of jit"
        ) from error
    errors = np.abs(np.broadcast_to(short, exact.shape) / exact - 1)
    worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    found = np.broadcast_to(errors, (_TRIED,))[worst]
    return (math.inf if np.isnan(found) else float(found)), float(epsilons[worst])


def _between(generator: np.random.Generator, low: float, high: float) -> np.ndarray:
    return np.exp(generator.uniform(math.log(low), math.log(high), _TRIED))


def _cancels(loss: str) -> str:
    return (
        f"multiplier loses {loss}, because numbers near each other are subtracted in it: write the"
        " formula without that, as 1 / (sqrt(a) - sqrt(b)) is (sqrt(a) + sqrt(b)) / (a - b)"
    )
