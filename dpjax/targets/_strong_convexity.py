"""What is common to minimizers of an average loss and a ridge: how long they are, how exact.

An objective with the term (lambda / 2) ||w||^2 is lambda-strongly convex, so that ||w - w*|| is at
most ||gradient(w)|| / lambda: the norm of a gradient certifies how near w is to the minimizer w*.
"""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._values import Scalar
from dpjax.targets._bounds import unit

# The rounding of a Hessian and its factorization must be small against lambda, and weights of about
# 1 / lambda far above the least float.
_LEAST_IN_UNITS, _LARGEST = 16, 2.0**64


def check_strength(regularization: Any) -> float:
    """A lambda above 0 that is known when the target is made."""
    strength = _checks.positive("regularization", regularization)
    if _checks.is_traced(strength):
        raise TypeError(f"regularization must be known when the target is made, got {strength!r}")
    return strength


def check_carried(strength: float, d: int, dtype: np.dtype) -> None:
    """Refuses a lambda that is next to the rounding of a Hessian of d features, or enormous."""
    least = _LEAST_IN_UNITS * (d + 8) * unit(dtype)
    if not least <= Fraction(strength) <= _LARGEST:
        raise ValueError(
            f"regularization must be from {float(least):.2g} to {_LARGEST:.2g} for {d} features in"
            f" {dtype}, got {strength:g}: take another, or float64"
        )


def into_ball(w: jax.Array, radius: Scalar) -> jax.Array:
    """The nearest point in the ball around 0, no farther from any point of it; 0 for NaN."""
    w = jnp.where(jnp.all(jnp.isfinite(w)), w, 0)
    length = jnp.sqrt(jnp.sum(jnp.square(w)))
    return w * jnp.minimum(radius / jnp.maximum(length, jnp.finfo(w.dtype).tiny), 1)
