"""Multipliers: the scale of noise divided by the sensitivity.

The first half is for Gaussian noise. It finds the least noise that makes the Gaussian mechanism
(epsilon, delta)-DP, in log space.

Let the noise be sigma at sensitivity Delta, and mu = Delta / sigma. By Balle and Wang (2018),
Theorem 8, it is (epsilon, delta)-DP if and only if

    delta >= Phi(x) - exp(epsilon) Phi(x - mu),   x = mu / 2 - epsilon / mu.

Evaluated by `erf`, this difference cancels: it is off by 26% at epsilon 20, delta 1e-8. But its
derivative in mu is the normal density phi(x). Substitute x = sqrt(2 epsilon) sinh(y) and
mu = sqrt(2 epsilon) exp(y). Then

    delta = sqrt(2 epsilon) integral_{-inf}^{y} phi(sqrt(2 epsilon) sinh(s)) exp(s) ds.

The integrand is smooth and positive. So Gauss-Legendre quadrature in log space does not cancel. The
host computes it in float64, and a program in the dtype of its traced epsilon.

The second half is for formulas of users. It evaluates a formula, measures its rounding error, and
adds several times that error to the scale. Concrete parameters are evaluated in float64 on the
host, and the formula is compared with itself at nearby parameters. Traced parameters are evaluated
in the float dtype of the program, and float32 is compared with float64 at many parameters. A
formula that cancels is refused.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._types import Scalar, Value
from dpjax._exact._numerics import bisect, compute_dtype, legendre_rule
from dpjax.random._noise import GAUSSIAN

_NODES = 100
# The bracket of x. Below it delta underflows float64, and above it delta is 1 up to rounding.
_LOWEST_X, _HIGHEST_X = -40.0, 12.0
# The tables of the noise may miss this part of delta, see `random._grid_fit`.
_TABLE_MARGIN = 2.0**-24
# A release of more numbers would not fit into memory. `epsilon_of_multiplier` handles no larger
# delta, for which `Calibration.covers` has another condition.
_MOST_NUMBERS, _LARGEST_DELTA = 2**40, 0.9
# Outward margins on sigma. They cover the error of the root that is found in float64, or float32.
_HOST_MARGIN = 1e-7
_TRACED_MARGIN = 1e-3


def analytic_multiplier(epsilon: Scalar, delta: Scalar) -> Scalar:
    """Sigma / Delta of the analytic Gaussian mechanism, rounded up as `gaussian` says."""
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        epsilon, delta = jnp.asarray(epsilon), jnp.asarray(delta)
        dtype = max(compute_dtype(x.dtype) for x in (epsilon, delta))
        return _traced_multiplier(epsilon.astype(dtype), delta.astype(dtype))
    # If delta is near 1, the margin must be small against 1 - delta.
    log_delta = math.log(delta) + math.log1p(-_TABLE_MARGIN * min(1.0, (1 - delta) / delta))
    x, _ = bisect(lambda x: _log_delta(x, epsilon, np) <= log_delta, _LOWEST_X, _HIGHEST_X)
    return _multiplier(x, epsilon, np).item() * (1 + _HOST_MARGIN)


@functools.lru_cache(maxsize=1024)
def epsilon_of_multiplier(multiplier: float, delta: float, dims: int | None) -> float | None:
    """The epsilon that a Gaussian mechanism with this multiplier promises, rounded up.

    None if the margin for the tables of the noise does not cover it. The scale that is really drawn
    covers it too, by "The scale that covers everything" in docs/proofs/exact-noise.md: the charges
    for rounding and for tables shrink as sensitivity and epsilon grow.
    """
    lattice = GAUSSIAN.lattice
    if lattice is None or delta > _LARGEST_DELTA:
        return None
    numbers = _MOST_NUMBERS if dims is None else dims
    missed = numbers * lattice.certificate.delta
    # As `Calibration.largest_epsilon` has it.
    largest = math.log(min(delta, 1 - delta)) - math.log(missed) - 26 * math.log(2)
    if not largest > 0 or analytic_multiplier(largest, delta) > multiplier:
        return None
    low, high = 0.0, largest
    while high - low > 1e-4 * high:
        middle = (low + high) / 2 if low else high / 4
        if middle < 1e-9 or analytic_multiplier(middle, delta) > multiplier:
            low = middle
        else:
            high = middle
    return high


def classical_multiplier(epsilon: Scalar, delta: Scalar) -> Scalar:
    """Sigma / Delta = sqrt(2 log(1.25 / delta)) / epsilon; only for epsilon <= 1."""
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        multiplier = jnp.sqrt(2 * jnp.log(1.25 / delta)) / epsilon
        return jnp.where(epsilon <= 1, multiplier * (1 + _TRACED_MARGIN), jnp.nan)
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon * (1 + _HOST_MARGIN + _TABLE_MARGIN)


# Multipliers that round outward already, so `additive` adds nothing.
HAVE_MARGINS = frozenset((analytic_multiplier, classical_multiplier))


def _traced_multiplier(epsilon: jax.Array, delta: jax.Array) -> jax.Array:
    log_delta = jnp.log(delta)

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = (low + high) / 2
        below = _log_delta(middle, epsilon, jnp) <= log_delta
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    start = (jnp.full_like(epsilon, _LOWEST_X), jnp.full_like(epsilon, _HIGHEST_X))
    low, _ = lax.fori_loop(0, 60, halve, start)
    multiplier = _multiplier(low, epsilon, jnp) * (1 + _TRACED_MARGIN)
    # In float32, a delta closer to 1 cannot be told from 1.
    usable = (epsilon > 0) & (delta >= 1e-30) & (delta <= 0.999)
    return jnp.where(usable, multiplier, jnp.nan)


def _multiplier(x: Scalar, epsilon: Scalar, numpy: Any) -> Any:
    """The multiplier 1 / mu at x."""
    root = numpy.sqrt(2 * epsilon)
    return numpy.exp(-numpy.arcsinh(x / root)) / root


def _log_delta(x: Any, epsilon: Scalar, numpy: Any) -> Any:
    """Log of the exact delta at x, by quadrature where the integrand is not negligible."""
    root = numpy.sqrt(2 * epsilon)
    upper = numpy.arcsinh(x / root)
    # Below `lower`, the integrand is at most exp(-depth) of its largest value, by the normal
    # density or by exp(s).
    depth = 45.0
    tail = numpy.sqrt(numpy.minimum(x, 0.0) ** 2 + 2 * depth)
    lower = numpy.maximum(-numpy.arcsinh(tail / root), upper - depth)
    nodes, log_weights = legendre_rule(_NODES)
    if numpy is jnp:
        nodes, log_weights = nodes.astype(x.dtype), log_weights.astype(x.dtype)
    half = (upper - lower) / 2
    s = lower + half * (nodes + 1)
    terms = log_weights + s - (root * numpy.sinh(s)) ** 2 / 2
    largest = numpy.max(terms)
    total = numpy.sum(numpy.exp(terms - largest))
    return numpy.log(root * half / math.sqrt(2 * math.pi)) + largest + numpy.log(total)


Multiplier = Callable[[Scalar, Scalar], Scalar]

# A smaller relative error needs no margin: the scale that is really drawn covers it.
_COVERED = 2.0**-40
_FACTOR = 8  # The margin is so many times the largest error that was measured.
_MOST_LOST, _MOST_LOST_TRACED = 2.0**-20, 2.0**-10
# Steps from 2^-8 to 2^-48. The step up is longer than the step down by an irrational factor. Equal
# steps could miss errors that are symmetric about the center.
_STEPS, _LONGER = [0.618034**power for power in range(12, 70, 2)], 1.618034
# For smaller epsilon, a formula might subtract numbers up to 745, the largest |log| of a float, and
# lose all digits at every parameter nearby.
_LEAST_EPSILON = 1e-9
# Traced parameters that are tried; others give NaN.
_EPSILONS, _DELTAS = (2.0**-14, 2.0**6), (2.0**-60, 2.0**-2)
_TRIED = 256


def multiple_of(multiplier: Multiplier, epsilon: Scalar, delta: Scalar) -> Scalar:
    """The scale over the sensitivity, with a margin for the rounding error of the formula."""
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
            f"multiplier must compute in float64, got {dtype}: its parameters are float64, so a"
            " cast in it, or an array of another dtype, rounds the scale"
        )
    return float(unit)  # pyright: ignore[reportArgumentType]


def _lost_around(
    formula: Callable[..., Value], numbers: tuple[Value, ...], unit: Value
) -> np.ndarray:
    """The largest deviation of a formula from a straight line, minus that of a smooth formula.

    Rounding errors look random over steps about as large as the error. Steps of 2^-8 and less are
    tried. A smooth formula is nearly straight there: its deviation is a multiple of the squared
    step. The multiple is 56 for x^-7, and x^2 for e^x.
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
    # Both dtypes get parameters that the shorter one holds exactly.
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
            "multiplier must be written in jax.numpy if its parameters are traced, got one that"
            " needs their values: or make the mechanism outside of jit"
        ) from error
    errors = around if around is not None else np.abs(short / exact - 1)
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
