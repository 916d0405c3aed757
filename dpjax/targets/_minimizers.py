"""Gradient descent to a proven distance from the minimizer of an average loss plus a ridge.

An objective with the term (lambda / 2) ||w||^2 is lambda-strongly convex, so ||w - w*|| is at most
||gradient(w)|| / lambda. The norm of a gradient thus bounds the distance of w to the minimizer w*.

Fast solvers usually make the gradient short enough, but this is not proven in floats. Raising an
error for a longer gradient would leak private data. Instead, gradient descent follows, with at most
K steps and usually none. This descent is proven to end near the minimizer from any point
(docs/proofs/learners.md).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._values import Scalar
from dpjax._exact._grid import average
from dpjax.targets._clamping import check_known
from dpjax.targets._known_sensitivity import unit

# Lambda must be large compared with the rounding errors of a Hessian and its factorization. It must
# not be huge, because weights are about 1 / lambda, which must be far above the least positive
# float.
_LEAST_IN_UNITS, _LARGEST = 16, 2.0**64
# Descent ends when the computed gradient is at most this many times as long as its rounding error.
# Solvers reach about three times this error, because of the rounding of weights, step and gradient.
GRADIENTS_IN_ERRORS = 4
Number = TypeVar("Number", float, Fraction)


def check_strength(regularization: float) -> float:
    """Checks that lambda is positive and known when the target is made, and returns it."""
    check_known("regularization", regularization)
    return _checks.positive("regularization", regularization)


def check_carried(strength: float, d: int, dtype: np.dtype) -> None:
    """Raises an error if lambda is enormous, or so small that rounding errors may exceed it."""
    least = _LEAST_IN_UNITS * (d + 8) * unit(dtype)
    if not least <= Fraction(strength) <= _LARGEST:
        raise ValueError(
            f"regularization must be from {float(least):.2g} to {_LARGEST:.2g} for {d} features in"
            f" {dtype}, got {strength:g}: choose another, or use float64"
        )


def into_ball(w: jax.Array, radius: Scalar) -> jax.Array:
    """Projects w onto a ball around 0. If w is not finite, returns 0.

    The projection does not increase the distance of w to any point of the ball.
    """
    w = jnp.where(jnp.all(jnp.isfinite(w)), w, 0)
    length = jnp.sqrt(jnp.sum(jnp.square(w)))
    return w * jnp.minimum(radius / jnp.maximum(length, np.finfo(w.dtype).tiny), 1)


class WalkPlan(NamedTuple):
    """The parameters of gradient descent that are valid for any records.

    Attributes:
        radius: the radius of a ball around 0 that contains the minimizer.
        enough: the length of a gradient at which descent stops.
        most_steps: K, the largest number of steps.
    """

    radius: Scalar
    enough: Scalar
    most_steps: Scalar


def walk_plan(
    strength: float, *, curvature: float, radius: float, gradient_error: float
) -> WalkPlan:
    """Returns the plan of the descent for an objective.

    Args:
        strength: lambda.
        curvature: the largest curvature of the loss without the ridge, along a unit vector.
        radius: the radius of a ball around 0 that contains the minimizer.
        gradient_error: e, a bound on the rounding of a gradient in the ball.
    """
    rate = math.log1p(strength / curvature)
    most = math.ceil(math.log(max(2 * radius * strength / gradient_error, 2)) / rate)
    return WalkPlan(radius, GRADIENTS_IN_ERRORS * gradient_error, float(most))


def walk_error(
    strength: Number, *, curvature: Number, gradient_error: Number, rounding: Number
) -> Number:
    """Bounds the distance between the point where descent ends and the minimizer.

    Args:
        strength: lambda.
        curvature: as for `walk_plan`.
        gradient_error: e, as for `walk_plan`.
        rounding: u, the rounding error of a step, which consists of a quotient, a sum and a
            projection.
    """
    certified = (1 + GRADIENTS_IN_ERRORS) * gradient_error
    walked = 2 * gradient_error + (strength + curvature) * rounding
    return max(certified, walked) / strength + rounding


# The weights, the gradient at these weights, and the number of steps so far.
_State = tuple[jax.Array, jax.Array, jax.Array]


def walk_to_minimizer(
    gradient_of: Callable[[jax.Array], jax.Array],
    start: jax.Array,
    *,
    step_size: Scalar,
    plan: WalkPlan,
) -> jax.Array:
    """Descends from any point to a point within `walk_error` of the minimizer.

    Args:
        gradient_of: the gradient of the objective, in floats.
        start: shape (d,), any numbers.
        step_size: 1 / (lambda + curvature).
        plan: the plan for this objective.
    """

    def unsolved(state: _State) -> jax.Array:
        _, gradient, steps = state
        return (jnp.sqrt(jnp.sum(gradient**2)) > plan.enough) & (steps < plan.most_steps)

    def walk(state: _State) -> _State:
        w, gradient, steps = state
        nearer = into_ball(w - step_size * gradient, plan.radius)
        return nearer, gradient_of(nearer), steps + 1

    inside = into_ball(start, plan.radius)
    state = inside, gradient_of(inside), jnp.zeros((), start.dtype)
    return lax.while_loop(unsolved, walk, state)[0]


def logistic_gradient(
    rows: jax.Array, w: jax.Array, strength: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Returns the model's probability of the other label for each record, and the gradient at w.

    A row is a record in the unit ball times its label.
    """
    wrong = jax.nn.sigmoid(-(rows @ w))
    return wrong, strength * w - average(wrong[:, None] * rows, 1.0)


def logistic_step(
    rows: jax.Array, wrong: jax.Array, gradient: jax.Array, strength: Scalar
) -> jax.Array:
    """Returns the Newton step of logistic regression, to be subtracted from the weights."""
    curvature = wrong * (1 - wrong) / len(rows)
    ridge = strength * jnp.eye(rows.shape[1], dtype=rows.dtype)
    return solve((rows.T * curvature[None, :]) @ rows + ridge, gradient)


def damping(moved: jax.Array) -> jax.Array:
    """Returns the fraction of a step at which the objective always falls.

    `moved` is how far the whole step moves each margin.
    """
    reach = jnp.maximum(jnp.max(jnp.abs(moved)), np.finfo(moved.dtype).tiny)
    return jnp.log1p(reach) / reach


# For matrices of up to this size, `_eliminate` is faster than `_split`.
_ELIMINATED = 16


def solve(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """Solves a symmetric positive definite system of a matrix (p, p) and a vector (p,)."""
    whitening = inverse_factor(matrix)
    return (whitening @ vector) @ whitening


def inverse_factor(matrix: jax.Array) -> jax.Array:
    """Returns the inverse W of the lower Cholesky factor. W'W is the inverse of the matrix."""
    if len(matrix) <= _ELIMINATED:
        return _eliminate(matrix)
    # For a matrix of 65 rows on a TPU, XLA compiles `_split` in 84 seconds and `_eliminate` in one
    # second.
    return lax.platform_dependent(matrix, tpu=_eliminate, default=_split)


def _split(matrix: jax.Array) -> jax.Array:
    """Inverts the lower Cholesky factor of a matrix, by recursion to matrices of half the size."""
    if len(matrix) <= _ELIMINATED:
        return _eliminate(matrix)
    half = len(matrix) // 2
    first = _split(matrix[:half, :half])
    coupling = matrix[half:, :half] @ first.T
    last = _split(matrix[half:, half:] - coupling @ coupling.T)
    corner = -(last @ coupling) @ first
    return jnp.block([[first, jnp.zeros_like(corner.T)], [corner, last]])


def _eliminate(matrix: jax.Array) -> jax.Array:
    """Inverts the lower Cholesky factor of a matrix, by elimination on [matrix, identity].

    A positive definite matrix needs no pivoting.
    """
    size = len(matrix)
    index = jnp.arange(size)

    def eliminate(both: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        factor = jnp.where(index > k, both[:, k] / both[k, k], 0)
        return both - factor[:, None] * both[k][None, :], None

    both = jnp.concatenate([matrix, jnp.eye(size, dtype=matrix.dtype)], axis=1)
    both, _ = lax.scan(eliminate, both, index)
    return both[:, size:] * lax.rsqrt(jnp.diag(both[:, :size]))[:, None]
