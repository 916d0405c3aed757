"""The minimizer of a regularized logistic loss with a linear term, to a precision known in advance.

Thirty Newton steps, each as long as the objective falls along it, reduce the gradient to its
rounding error. (Damped steps do not: noise may pull weights hundreds of units along features that
few records have.) The walk of `targets/_strong_convexity.py` follows.
docs/proofs/objective-perturbation.md bounds the error for any result of the Newton steps.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._values import Scalar
from dpjax._exact._fixed_point import average
from dpjax.targets._spd_solve import solve
from dpjax.targets._strong_convexity import WalkPlan, walk_error, walk_plan, walk_to_minimizer

_NEWTON_STEPS = 30
# The search for a Newton step's length halves an interval so many times, in logarithms.
_HALVINGS = 8
# The largest curvature of the logistic loss along a unit vector.
_CURVATURE = 1 / 4
# Above the largest value of m / (1 + exp(m)).
_LARGEST_PULL = 0.2785


def solver_plan(regularization: float, *, pull: float, d: int, eps: float) -> WalkPlan:
    """The plan for linear terms that are no longer than `pull`."""
    root = (pull + math.sqrt(pull**2 + 4 * regularization * _LARGEST_PULL)) / (2 * regularization)
    radius = min((1 + pull) / regularization, root) * (1 + 1e-12)
    error = _gradient_error(radius, pull=pull, d=d, eps=eps)
    return walk_plan(regularization, curvature=_CURVATURE, radius=radius, gradient_error=error)


def solver_error(
    regularization: float, plan: WalkPlan, *, pull: float, d: int, eps: float
) -> float:
    """A bound on the distance between the result and the minimizer of the same linear term."""
    radius = float(plan.radius)
    gradient = _gradient_error(radius, pull=pull, d=d, eps=eps)
    # The length, the quotient, the product; and of a step along the gradient, its product and sum.
    rounding = eps * radius * (d / 2 + 8) + eps * (1 + pull) / regularization
    return walk_error(
        regularization, curvature=_CURVATURE, gradient_error=gradient, rounding=rounding
    )


def _gradient_error(radius: float, *, pull: float, d: int, eps: float) -> float:
    """A bound on the rounding of a gradient in the ball.

    A product r'w is off by d eps times the length of w, and the slope of the sigmoid is at most
    1/4; sigmoid, its product with a row and the average are off by 6 eps together, the grid of the
    average by eps / 8 in each coordinate, and lambda w, the pull and the two sums, none above 2 + 2
    pull, by 6 eps (1 + pull).
    """
    return eps * ((d + 1) * radius / 4 + 6 + d / 8 + 6 * (1 + pull))


def perturbed_minimizer(
    rows: jax.Array, pull: jax.Array, regularization: Scalar, plan: WalkPlan
) -> jax.Array:
    """The weights w that minimize mean(log(1 + exp(-rows w))) + lambda ||w||^2 / 2 + pull'w.

    Args:
        rows: shape (n, d), none longer than 1.
        pull: shape (d,), no longer than the plan's.
        regularization: lambda, a number of the dtype of the rows.
        plan: made for these parameters.

    Returns:
        The weights, shape (d,), as near to the minimizer as `solver_error` says.
    """
    n, d = rows.shape

    def length_of(step: jax.Array, w: jax.Array) -> jax.Array:
        """The part of a step to take: all, or about as far as the objective falls along it."""
        margins, moved = rows @ w, rows @ step
        pulled = regularization * (w @ step) + pull @ step

        def falls_at(t: jax.Array) -> jax.Array:
            pushed = jnp.mean(jax.nn.sigmoid(t * moved - margins) * moved)
            return pulled - t * regularization * (step @ step) >= pushed

        def halve(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = jnp.sqrt(low * high)
            falls = falls_at(middle)
            return jnp.where(falls, middle, low), jnp.where(falls, high, middle)

        # A step of this length always lowers the objective, as in `targets.logistic_regression`.
        reach = jnp.maximum(jnp.max(jnp.abs(moved)), np.finfo(rows.dtype).tiny)
        whole = jnp.ones((), rows.dtype)
        ends = jnp.log1p(reach) / reach, whole
        low = lax.fori_loop(0, _HALVINGS, halve, ends)[0]
        return jnp.where(falls_at(whole), whole, low)

    def wrong_and_gradient(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        wrong = jax.nn.sigmoid(-(rows @ w))
        return wrong, regularization * w - average(wrong[:, None] * rows, 1.0) + pull

    def newton_step(_: jax.Array, w: jax.Array) -> jax.Array:
        wrong, gradient = wrong_and_gradient(w)
        curvature = wrong * (1 - wrong) / n
        hessian = (rows.T * curvature[None, :]) @ rows + regularization * jnp.eye(
            d, dtype=rows.dtype
        )
        step = solve(hessian, gradient)
        return w - length_of(step, w) * step

    with jax.default_matmul_precision("highest"):
        found = lax.fori_loop(0, _NEWTON_STEPS, newton_step, jnp.zeros(d, rows.dtype))
        return walk_to_minimizer(
            lambda w: wrong_and_gradient(w)[1],
            found,
            step_size=1 / (regularization + _CURVATURE),
            plan=plan,
        )
