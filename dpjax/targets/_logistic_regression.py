"""Regularized logistic regression, solved until a certificate says so."""

import decimal
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._exact._fixed_point import average
from dpjax._exact._numerics import round_up
from dpjax.targets._bounds import VectorNorm, sqrt_up, unit
from dpjax.targets._known_sensitivity import (
    BoundedTarget,
    check_dims,
    dims_or_none,
    known_dims,
)
from dpjax.targets._spd_solve import solve
from dpjax.targets._strong_convexity import check_carried, check_strength, into_ball
from dpjax.targets._unit_ball import into_unit_ball

# Above the largest value of m / (1 + exp(m)).
_LARGEST_PULL = Fraction(2785, 10_000)
# Where a gradient that is computed is enough, in bounds on its rounding. Newton's steps reach less:
# rounding w, the step and the gradient leave three.
_GRADIENTS_IN_ERRORS = 4
# Most do by far, which the sampler sees; there is nothing to gain beyond.
_FAR_BELOW = 1024


class _Point(NamedTuple):
    w: jax.Array
    wrong: jax.Array  # The probability of the other label.
    gradient: jax.Array
    length: jax.Array  # Of the gradient.
    before: jax.Array  # What that was a step ago.
    steps: jax.Array  # In the dtype of the features, which counts far enough for each lambda.


def logistic_regression(*, regularization: float, dims: int | None = None) -> BoundedTarget:
    """The weights of L2-regularized logistic regression, as a target.

    Minimizes (1/n) sum_i log(1 + exp(-y_i w'x_i)) + (lambda / 2) ||w||^2 by damped Newton steps
    from 0, with x_i scaled into the unit ball where it lies outside, and NaN counted as 0. It stops
    where the gradient is down to rounding error, which certifies that w is near the minimizer, and
    far below, or a step no longer halves it.

    A step p is shortened to log(1 + b) / b of it, b the largest |x_i'p|, which always lowers the
    objective: along p its second derivative grows by a factor of exp(b t) at most, so that the
    objective falls by s^2 ((1 + b) log(1 + b) - b) / b^2 or more, s the Newton decrement. As b is
    at most s / sqrt(lambda), that is .38 sqrt(lambda) s or more while s > sqrt(lambda). By the same
    argument the objective is above its minimum by at most h s^2, h = (1.71 / sqrt(lambda) + 2) / 4.
    The root of what it is above thus falls by .19 sqrt(lambda / h) in a step, from sqrt(log 2), so
    that s <= sqrt(lambda) after 5 lambda^(-3/4) steps. From there s shrinks by 13% or more in each,
    and soon quadratically. The loop ends after 100 steps more in any case; twelve are usual.

    Args:
        regularization: lambda, above 0.
        dims: d, the number of features; None for any, then no sensitivity is known.

    Returns:
        A target with a known `sensitivity`, in l2: takes {"x": (n, d) features, "y": (n,) labels,
        positive or not} to w, shape (d,). Append a constant feature for an intercept.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; on a database, if it has other dims, or rounding
            in its dtype is not small against lambda: below 16 (d + 8) eps, 2.1e-5 for 3 features in
            float32.

    Formal guarantees:
        The l2 sensitivity under replace-one is at most min(2 W, 2 s(W) / (n lambda) + 2 E),
        rounding included; that of the exact minimizer even without E.

        At the minimizer lambda ||w||^2 is the average of m_i / (1 + exp(m_i)), m_i = y_i w'x_i, and
        lambda ||w|| at most 1, so ||w|| <= W = min(1, sqrt(.2785 lambda)) / lambda. There no record
        pulls at w by more than s(W) / n, s(m) = 1 / (1 + exp(-m)), for its margin is -W at least.
        Where one objective has its minimizer w', the gradient of the other, which has another
        record, is thus at most 2 s(W) / n long, and it is lambda-strongly convex. That is below
        2 / (n lambda), and below 2 R / n with lambda R = s(R), where R is as long as weights can be
        by the pulls alone.

        E = 5 e / lambda bounds the error of a solution, by strong convexity: e = eps ((d + 1) W / 4
        + 8 + d / 8) bounds the rounding of a gradient, and the target stops where one that is
        computed is no longer than 4 e. It stays below 1% of the bound while n is well below
        1 / (500 e). Gradients are added up in fixed point, but products of matrices are not, so the
        order of the records shows in rounding.

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

    def fit(database: Any) -> jax.Array:
        x = into_unit_ball(database["x"])
        n, d = x.shape
        check_dims(dims, d)
        check_carried(strength, d, x.dtype)
        # Records times their labels.
        rows = jnp.where((database["y"].astype(x.dtype) > 0)[:, None], x, -x)
        enough = _GRADIENTS_IN_ERRORS * float(_gradient_error(Fraction(strength), d, x.dtype))

        def point(w: jax.Array, steps: jax.Array, before: jax.Array) -> _Point:
            wrong = jax.nn.sigmoid(-(rows @ w))
            gradient = strength * w - average(wrong[:, None] * rows, 1.0)
            return _Point(w, wrong, gradient, jnp.sqrt(jnp.sum(gradient**2)), before, steps)

        def unsolved(at: _Point) -> jax.Array:
            improving = (at.length < at.before / 2) & (at.length > enough / _FAR_BELOW)
            return (at.steps < most_steps) & ((at.length > enough) | improving)

        def newton_step(at: _Point) -> _Point:
            curvature = at.wrong * (1 - at.wrong) / n
            hessian = (rows.T * curvature[None, :]) @ rows + strength * jnp.eye(d, dtype=x.dtype)
            step = solve(hessian, at.gradient)
            reach = jnp.maximum(jnp.max(jnp.abs(rows @ step)), jnp.finfo(x.dtype).tiny)
            return point(at.w - jnp.log1p(reach) / reach * step, at.steps + 1, at.length)

        with jax.default_matmul_precision("highest"):
            start = point(jnp.zeros(d, x.dtype), jnp.zeros((), x.dtype), jnp.asarray(2, x.dtype))
            w = lax.while_loop(unsolved, newton_step, start).w
        return into_ball(w, float(_longest(Fraction(strength))))

    def bound(norm: VectorNorm, n: int | None, dtype: np.dtype) -> float:
        del norm  # l2.
        d, exactly = known_dims(dims), Fraction(strength)
        check_carried(strength, d, dtype)
        longest = _longest(exactly)
        error = (1 + _GRADIENTS_IN_ERRORS) * _gradient_error(exactly, d, dtype) / exactly
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

    A product w'x is off by (d + 1) eps / 2 times the length of w, and the slope of the sigmoid is
    at most 1/4; the sigmoid, its product with a record, their average, lambda w and the difference
    are off by 8 eps together, and the grid of an average by eps / 8 in each coordinate.
    """
    return unit(dtype) * ((d + 1) * _longest(strength) / 4 + 8 + Fraction(d, 8))
