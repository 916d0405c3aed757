"""Regularized logistic regression, solved until a certificate shows a bound on the error."""

import decimal
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Database
from dpjax._exact._fixed_point import average
from dpjax._exact._numerics import round_up
from dpjax.targets._bounds import VectorNorm, sqrt_up, unit
from dpjax.targets._known_sensitivity import BoundedTarget, check_dims, dims_or_none, known_dims
from dpjax.targets._spd_solve import solve
from dpjax.targets._strong_convexity import (
    check_carried,
    check_strength,
    walk_error,
    walk_plan,
    walk_to_minimizer,
)
from dpjax.targets._unit_ball import into_unit_ball

# Above the largest value of m / (1 + exp(m)).
_LARGEST_PULL = Fraction(2785, 10_000)
# The largest curvature of the logistic loss along a unit vector.
_CURVATURE = Fraction(1, 4)
# The loop goes on to a gradient shorter by this factor, while steps still help. Most problems get
# there, and the sampler then sees a smaller error. Beyond it nothing is gained.
_FAR_BELOW = 1024


class _Point(NamedTuple):
    w: jax.Array
    wrong: jax.Array  # The model's probability of the other label, for each record.
    gradient: jax.Array
    length: jax.Array  # The length of the gradient.
    before: jax.Array  # The length of the gradient one step ago.
    steps: jax.Array  # A float of the dtype of the features, which counts high enough.


def logistic_regression(*, regularization: float, dims: int | None = None) -> BoundedTarget:
    """The weights of L2-regularized logistic regression, as a target.

    Minimizes (1/n) sum_i log(1 + exp(-y_i w'x_i)) + (lambda / 2) ||w||^2 by damped Newton steps
    from 0. Each x_i outside of the unit ball is scaled into it, and NaN counts as 0. The loop goes
    on until the gradient is down to rounding error, which certifies that w is near the minimizer.
    Then it goes on further, until the gradient is far below that, or a step no longer halves it. It
    ends after 5 lambda^(-3/4) + 100 steps in any case; twelve are usual. Whatever it has found, at
    most K steps along the gradient follow, while it is longer; usually none. They take any point
    to the minimizer. docs/proofs/learners.md has the proofs of this and of the bound.

    Args:
        regularization: lambda, above 0.
        dims: d, the number of features. With None, no sensitivity is known.

    Returns:
        A target with a known `sensitivity`, in l2: takes {"x": (n, d) features, "y": (n,) labels,
        positive or not} to w, shape (d,). Append a constant feature for an intercept.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; on a database, if it has other dims, or lambda
            is below 16 (d + 8) eps, too near to rounding: 2.1e-5 for 3 features in float32.

    Formal guarantees:
        The l2 sensitivity under replace-one is at most min(2 W, 2 s(W) / (n lambda) + 2 E),
        rounding included. For the exact minimizer E is 0.

        W = min(1, sqrt(.2785 lambda)) / lambda bounds ||w||, and s(m) = 1 / (1 + exp(-m)). So a
        record's share of the gradient is at most s(W) / n. E bounds the error of a solution, for
        any result of Newton's steps: max(5 e, 2 e + (lambda + 1/4) u) / lambda + u, where
        e = eps ((d + 1) W / 4 + 8 + d / 8) bounds the rounding of a gradient, and
        u = eps (W (d / 2 + 8) + 16) that of a step. E stays below 1% of the bound while n is well
        below 1 / (500 e). Gradients are added up in fixed point, but products of matrices are not,
        so the order of the records shows in rounding.

    Source:
        Chaudhuri, Monteleoni and Sarwate (2011), Corollary 8; Sun and Tran-Dinh, "Generalized
        self-concordant functions" (2019), for the damping.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> fit = targets.logistic_regression(regularization=0.1)
        >>> fit({"x": jnp.array([[0.5], [-0.5]]), "y": jnp.array([1, 0])}).shape
        (1,)
        >>> fit = targets.logistic_regression(regularization=0.1, dims=2)
        >>> round(fit.sensitivity("l2", n=100).value, 2)
        0.17
    """
    strength, dims = check_strength(regularization), dims_or_none(dims)
    most_steps = 5 * strength**-0.75 + 100

    def fit(database: Database) -> jax.Array:
        x = into_unit_ball(database["x"])
        n, d = x.shape
        check_dims(dims, d)
        check_carried(strength, d, x.dtype)
        # Records times their labels.
        rows = jnp.where((database["y"].astype(x.dtype) > 0)[:, None], x, -x)
        plan = walk_plan(
            strength,
            curvature=float(_CURVATURE),
            radius=round_up(_longest(Fraction(strength))),
            gradient_error=float(_gradient_error(Fraction(strength), d, x.dtype)),
        )

        def point(w: jax.Array, steps: jax.Array, before: jax.Array) -> _Point:
            wrong = jax.nn.sigmoid(-(rows @ w))
            gradient = strength * w - average(wrong[:, None] * rows, 1.0)
            return _Point(w, wrong, gradient, jnp.sqrt(jnp.sum(gradient**2)), before, steps)

        def unsolved(at: _Point) -> jax.Array:
            improving = (at.length < at.before / 2) & (at.length > plan.enough / _FAR_BELOW)
            return (at.steps < most_steps) & ((at.length > plan.enough) | improving)

        def newton_step(at: _Point) -> _Point:
            curvature = at.wrong * (1 - at.wrong) / n
            hessian = (rows.T * curvature[None, :]) @ rows + strength * jnp.eye(d, dtype=x.dtype)
            step = solve(hessian, at.gradient)
            reach = jnp.maximum(jnp.max(jnp.abs(rows @ step)), np.finfo(x.dtype).tiny)
            return point(at.w - jnp.log1p(reach) / reach * step, at.steps + 1, at.length)

        with jax.default_matmul_precision("highest"):
            start = point(jnp.zeros(d, x.dtype), jnp.zeros((), x.dtype), jnp.asarray(2, x.dtype))
            found = lax.while_loop(unsolved, newton_step, start)
            return walk_to_minimizer(
                lambda w: point(w, found.steps, found.before).gradient,
                found.w,
                step_size=1 / (strength + float(_CURVATURE)),
                plan=plan,
            )

    def bound(norm: VectorNorm, n: int | None, dtype: np.dtype) -> float:
        del norm  # l2.
        d, exactly = known_dims(dims), Fraction(strength)
        check_carried(strength, d, dtype)
        longest = _longest(exactly)
        error = walk_error(
            exactly,
            curvature=_CURVATURE,
            gradient_error=_gradient_error(exactly, d, dtype),
            rounding=unit(dtype) * (longest * (Fraction(d, 2) + 8) + 16),
        )
        exact = 2 * _strongest_pull(longest) / (_checks.integer("n", n, least=1) * exactly)
        return round_up(min(2 * longest * (1 + (d + 8) * unit(dtype)), exact + 2 * error))

    return BoundedTarget(fit, bound=bound, norms=("l2",))


def _longest(strength: Fraction) -> Fraction:
    """A bound on the length of the exact minimizer."""
    return min(1 / strength, Fraction(sqrt_up(_LARGEST_PULL / strength)))


def _strongest_pull(longest: Fraction) -> Fraction:
    """A bound on 1 / (1 + exp(-W)): the slope of the loss of a record at weights of length W."""
    context = decimal.Context(prec=50)
    length = context.divide(
        decimal.Decimal(longest.numerator), decimal.Decimal(longest.denominator)
    )
    return 1 / (1 + Fraction(context.exp(-length)) * (1 - Fraction(1, 10**30)))


def _gradient_error(strength: Fraction, d: int, dtype: np.dtype) -> Fraction:
    """A bound on the rounding of a gradient at weights up to twice as long as the longest.

    A product w'x is wrong by (d + 1) eps / 2 times the length of w, and the slope of the sigmoid is
    at most 1/4. The sigmoid, its product with a record, their average, lambda w and the difference
    add 8 eps together. The grid of an average adds eps / 8 in each coordinate.
    """
    return unit(dtype) * ((d + 1) * _longest(strength) / 4 + 8 + Fraction(d, 8))
