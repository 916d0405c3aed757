"""The least noise that makes the Gaussian mechanism (epsilon, delta)-DP, in log space.

Balle and Wang (2018), Theorem 8: noise sigma at sensitivity Delta, with mu = Delta / sigma, is
(epsilon, delta)-DP if and only if

    delta >= Phi(x) - exp(epsilon) Phi(x - mu),   x = mu / 2 - epsilon / mu.

The difference cancels: through `erf` it is off by 26% at epsilon 20, delta 1e-8. Its derivative in
mu is phi(x), and with x = sqrt(2 epsilon) sinh(y), mu = sqrt(2 epsilon) exp(y) it becomes

    delta = sqrt(2 epsilon) integral_{-inf}^{y} phi(sqrt(2 epsilon) sinh(s)) exp(s) ds,

a smooth integral of positive terms, which Gauss-Legendre quadrature takes in log space without any
cancellation. The host evaluates it in float64, a traced epsilon in the dtype at hand.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Scalar
from dpjax._exact._numerics import compute_dtype, legendre_rule

_NODES = 100
# The bracket of x: delta underflows float64 below, and is 1 to within rounding above.
_LOWEST_X, _HIGHEST_X = -40.0, 12.0
# What the tables of the noise may miss of delta, see `random._grid_fit`.
_TABLE_MARGIN = 2.0**-24
# Outward margins on sigma: above the error of the root in float64, and in float32.
_HOST_MARGIN = 1e-7
_TRACED_MARGIN = 1e-3


def analytic_multiplier(epsilon: Scalar, delta: Scalar) -> Scalar:
    """Sigma / Delta of the analytic Gaussian mechanism, rounded outward.

    At most 1e-6 above the exact value for concrete parameters, at most 0.2% for traced ones.
    """
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        epsilon, delta = jnp.asarray(epsilon), jnp.asarray(delta)
        dtype = max(compute_dtype(x.dtype) for x in (epsilon, delta))
        return _traced_multiplier(epsilon.astype(dtype), delta.astype(dtype))
    # For delta near 1 it is 1 - delta that must not suffer.
    log_delta = math.log(delta) + math.log1p(-_TABLE_MARGIN * min(1.0, (1 - delta) / delta))
    low, high = _LOWEST_X, _HIGHEST_X
    for _ in range(100):
        middle = (low + high) / 2
        if _log_delta(middle, epsilon, np) <= log_delta:
            low = middle
        else:
            high = middle
    return _multiplier(low, epsilon, np).item() * (1 + _HOST_MARGIN)


def classical_multiplier(epsilon: Scalar, delta: Scalar) -> Scalar:
    """Sigma / Delta = sqrt(2 log(1.25 / delta)) / epsilon; valid for epsilon <= 1 only."""
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
    # Closer to 1, float32 cannot tell delta from 1.
    usable = (epsilon > 0) & (delta >= 1e-30) & (delta <= 0.999)
    return jnp.where(usable, multiplier, jnp.nan)


def _multiplier(x: Scalar, epsilon: Scalar, numpy: Any) -> Any:
    """1 / mu at x."""
    root = numpy.sqrt(2 * epsilon)
    return numpy.exp(-numpy.arcsinh(x / root)) / root


def _log_delta(x: Any, epsilon: Scalar, numpy: Any) -> Any:
    """Log of the exact delta at x, by quadrature over the interval that carries the integral."""
    root = numpy.sqrt(2 * epsilon)
    upper = numpy.arcsinh(x / root)
    # Below, the integrand has fallen by exp(-depth) from its largest value, either through the
    # normal density or through exp(s).
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
