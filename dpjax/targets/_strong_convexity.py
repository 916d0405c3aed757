"""What is common to minimizers of an average loss and a ridge: how long they are, how exact.

An objective with the term (lambda / 2) ||w||^2 is lambda-strongly convex, so that ||w - w*|| is at
most ||gradient(w)|| / lambda: the norm of a gradient certifies how near w is to the minimizer w*.
"""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax.targets._bounds import unit

# A factorization of the Hessian must be a small perturbation of it.
_LEAST_IN_UNITS = 64


def check_strength(regularization: Any) -> float:
    """A lambda above 0 that is known when the target is made."""
    strength = _checks.positive("regularization", regularization)
    if _checks.is_traced(strength):
        raise TypeError(f"regularization must be known when the target is made, got {strength!r}")
    return strength


def check_carried(strength: float, d: int, dtype: np.dtype) -> None:
    """Refuses a lambda against which the rounding of a Hessian of d features is not small."""
    least = _LEAST_IN_UNITS * (d + 2) * unit(dtype)
    if not least <= Fraction(strength) <= 1 / least:
        raise ValueError(
            f"regularization must be from {float(least):.2g} to {float(1 / least):.2g} for {d}"
            f" features in {dtype}, got {strength:g}: take another, or float64"
        )


def into_ball(w: jax.Array, radius: float) -> jax.Array:
    """The nearest point in the ball around 0, no farther from any point of it; 0 for NaN."""
    w = jnp.where(jnp.all(jnp.isfinite(w)), w, 0)
    length = jnp.sqrt(jnp.sum(jnp.square(w)))
    return w * jnp.minimum(radius / jnp.maximum(length, jnp.finfo(w.dtype).tiny), 1)
