"""The standard deviation of Gaussian noise divided by the sensitivity, computed in log space.

Let sigma be the standard deviation, Delta the sensitivity, and mu = Delta / sigma. By Balle and
Wang (2018), Theorem 8, the Gaussian mechanism is (epsilon, delta)-DP if and only if

    delta >= Phi(x) - exp(epsilon) Phi(x - mu),   x = mu / 2 - epsilon / mu.

If this difference is computed by `erf`, it suffers from cancellation: at epsilon 20 and delta 1e-8
its relative error is 26%. But the derivative of the difference in mu is the normal density phi(x).
Substitute x = sqrt(2 epsilon) sinh(y) and mu = sqrt(2 epsilon) exp(y). Then

    delta = sqrt(2 epsilon) integral_{-inf}^{y} phi(sqrt(2 epsilon) sinh(s)) exp(s) ds.

The integrand is smooth and positive. So Gauss-Legendre quadrature in log space has no cancellation.
The host computes it in float64. For traced parameters, it is computed in their dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Scalar
from dpjax._exact._numerics import bisect, compute_dtype, legendre_rule
from dpjax.random._grid_fit import largest_epsilon
from dpjax.random._noise import GAUSSIAN

_NODES = 100
# Bisection searches for x in this interval. For smaller x, delta underflows in float64. For larger
# x, delta rounds to 1.
_LOWEST_X, _HIGHEST_X = -40.0, 12.0
# The probability that the noise tables omit may be at most this fraction of delta; see
# `random._grid_fit`.
_TABLE_MARGIN = 2.0**-24
# Limits of `epsilon_of_multiplier`. A release of more numbers would not fit into memory. For a
# larger delta, `Calibration.covers` has a further condition, which is not implemented here.
_MOST_NUMBERS, _LARGEST_DELTA = 2**40, 0.9
# Relative margins that are added to sigma. They cover the error of the numerical root in float64
# and in float32.
_HOST_MARGIN = 1e-7
_TRACED_MARGIN = 1e-3


def analytic_multiplier(epsilon: Scalar, delta: Scalar) -> Scalar:
    """Returns sigma / Delta of the analytic Gaussian mechanism, rounded up; see `gaussian`."""
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        epsilon, delta = jnp.asarray(epsilon), jnp.asarray(delta)
        dtype = max(compute_dtype(x.dtype) for x in (epsilon, delta))
        return _traced_multiplier(epsilon.astype(dtype), delta.astype(dtype))
    # If delta is near 1, the margin is relative to 1 - delta instead of delta.
    log_delta = math.log(delta) + math.log1p(-_TABLE_MARGIN * min(1.0, (1 - delta) / delta))
    x, _ = bisect(lambda x: _log_delta(x, epsilon, np) <= log_delta, _LOWEST_X, _HIGHEST_X)
    return _multiplier(x, epsilon, np).item() * (1 + _HOST_MARGIN)


@functools.lru_cache(maxsize=1024)
def epsilon_of_multiplier(multiplier: float, delta: float, dims: int | None) -> float | None:
    """Returns the least epsilon of a Gaussian mechanism with this multiplier, rounded up.

    The result is None if delta does not cover the probability that the noise tables omit.

    The noise is drawn at a larger scale, with margins for rounding and for the errors of tables.
    Relative to the scale, the margins are smaller if sensitivity or epsilon is larger. So the
    result is valid for the drawn noise, even if the margins were computed for a smaller sensitivity
    and epsilon (docs/proofs/exact-noise.md, "The scale that covers everything").
    """
    lattice = GAUSSIAN.lattice
    if lattice is None or delta > _LARGEST_DELTA:
        return None
    numbers = _MOST_NUMBERS if dims is None else dims
    largest = float(largest_epsilon(numbers * lattice.certificate.delta, delta))
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
    """Returns sigma / Delta = sqrt(2 log(1.25 / delta)) / epsilon; only for epsilon <= 1."""
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        multiplier = jnp.sqrt(2 * jnp.log(1.25 / delta)) / epsilon
        return jnp.where(epsilon <= 1, multiplier * (1 + _TRACED_MARGIN), jnp.nan)
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon * (1 + _HOST_MARGIN + _TABLE_MARGIN)


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
    # If delta is above .999, then 1 - delta has too few significant digits in float32.
    usable = (epsilon > 0) & (delta >= 1e-30) & (delta <= 0.999)
    return jnp.where(usable, multiplier, jnp.nan)


def _multiplier(x: Scalar, epsilon: Scalar, numpy: Any) -> Any:
    """Returns the multiplier 1 / mu such that mu / 2 - epsilon / mu = x."""
    root = numpy.sqrt(2 * epsilon)
    return numpy.exp(-numpy.arcsinh(x / root)) / root


def _log_delta(x: Any, epsilon: Scalar, numpy: Any) -> Any:
    """Returns log delta at x. Delta is an integral, computed by quadrature."""
    root = numpy.sqrt(2 * epsilon)
    upper = numpy.arcsinh(x / root)
    # Below `lower`, the integrand is at most exp(-depth) times its largest value, because one of
    # its two factors, the normal density or exp(s), is this small.
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
