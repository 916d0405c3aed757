"""Checks for minimizers of an average loss plus a ridge.

An objective with the term (lambda / 2) ||w||^2 is lambda-strongly convex, so ||w - w*|| is at most
||gradient(w)|| / lambda. The norm of a gradient thus certifies how near w is to the minimizer w*.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._values import Scalar
from dpjax.targets._bounds import unit
from dpjax.targets._interval import check_known

# Lambda must be large against the rounding of a Hessian and its factorization. And weights of about
# 1 / lambda must be far above the least float.
_LEAST_IN_UNITS, _LARGEST = 16, 2.0**64


def check_strength(regularization: float) -> float:
    """A lambda above 0 that is known when the target is made."""
    check_known("regularization", regularization)
    return _checks.positive("regularization", regularization)


def check_carried(strength: float, d: int, dtype: np.dtype) -> None:
    """Refuses a lambda that is too near to rounding, for d features, or enormous."""
    least = _LEAST_IN_UNITS * (d + 8) * unit(dtype)
    if not least <= Fraction(strength) <= _LARGEST:
        raise ValueError(
            f"regularization must be from {float(least):.2g} to {_LARGEST:.2g} for {d} features in"
            f" {dtype}, got {strength:g}: choose another, or use float64"
        )


def into_ball(w: jax.Array, radius: Scalar) -> jax.Array:
    """The nearest point of the ball around 0, no farther from its points than w; 0 for NaN."""
    w = jnp.where(jnp.all(jnp.isfinite(w)), w, 0)
    length = jnp.sqrt(jnp.sum(jnp.square(w)))
    return w * jnp.minimum(radius / jnp.maximum(length, np.finfo(w.dtype).tiny), 1)
