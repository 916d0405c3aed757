"""Logistic and ridge regression, with a proven bound on the error of the solution.

A fast solver is followed by the gradient steps of `_minimizers.py`, for which the bound is proven
in docs/proofs/learners.md.
"""

import decimal
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Database, PyTree
from dpjax._exact._numerics import round_up
from dpjax.targets._clamping import clip_and_replace_nan, into_unit_ball
from dpjax.targets._known_sensitivity import (
    BoundedSum,
    BoundedTarget,
    check_dims,
    dims_or_none,
    known_dims,
    sqrt_up,
    unit,
)
from dpjax.targets._minimizers import (
    WalkPlan,
    check_carried,
    check_strength,
    damping,
    inverse_factor,
    logistic_gradient,
    logistic_step,
    walk_error,
    walk_plan,
    walk_to_minimizer,
)

# An upper bound on m / (1 + exp(m)) for all margins m.
_LARGEST_PULL = Fraction(2785, 10_000)
# The proof needs a gradient that is shorter than some length. A shorter gradient also makes sampled
# distances more accurate. So the loop goes on below this length as long as each step halves the
# gradient. It stops when the gradient is shorter than this length divided by `_FAR_BELOW`, because
# sampled distances would not improve further. Most problems get this far.
_FAR_BELOW = 1024
# Each iterative refinement divides the residual by 16 or more, until rounding errors dominate.
_REFINEMENTS = 6


class _Objective(NamedTuple):
    """An objective: the average loss of records in the unit ball, plus (lambda / 2) ||w||^2.

    Attributes:
        strength: lambda.
        curvature: the largest curvature of the loss of a record along a unit vector.
        longest: W, a bound on the length of the exact minimizer.
        pull: a bound on the gradient of the loss of a record, at weights no longer than W.
        gradient_error: a bound on the rounding error of a gradient, in units of eps.
        d: the number of weights.
        eps: the distance from 1 to the next float.
    """

    strength: Fraction
    curvature: Fraction
    longest: Fraction
    pull: Fraction
    gradient_error: Fraction
    d: int
    eps: Fraction

    @property
    def plan(self) -> WalkPlan:
        """The plan of the gradient steps."""
        return walk_plan(
            float(self.strength),
            curvature=float(self.curvature),
            radius=round_up(self.longest),
            gradient_error=float(self.eps * self.gradient_error),
        )

    def walk(self, gradient_of: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        """Returns the weights after the gradient steps from `start`."""
        step_size = 1 / (float(self.strength) + float(self.curvature))
        return walk_to_minimizer(gradient_of, start, step_size=step_size, plan=self.plan)

    def bound(self, n: int | None) -> list[Fraction]:
        """Bounds the l2 distance by which replacing one record changes the weights."""
        error = walk_error(
            self.strength,
            curvature=self.curvature,
            gradient_error=self.eps * self.gradient_error,
            rounding=self.eps * (self.longest * (Fraction(self.d, 2) + 8) + 16),
        )
        exact = 2 * self.pull / (_checks.integer("n", n, least=1) * self.strength)
        diameter = 2 * self.longest * (1 + (self.d + 8) * self.eps)
        return [min(diameter, exact + 2 * error)]


class _Point(NamedTuple):
    w: jax.Array
    wrong: jax.Array  # The model's probability of the other label, for each record.
    gradient: jax.Array
    length: jax.Array  # The length of the gradient.
    before: jax.Array  # The length of the gradient one step earlier.
    # The number of steps so far, in the features' dtype, which represents every possible count
    # exactly.
    steps: jax.Array


def logistic_regression(*, regularization: float, dims: int | None = None) -> BoundedTarget:
    """The weights of L2-regularized logistic regression, as a target.

    Minimizes (1/n) sum_i log(1 + exp(-y_i w'x_i)) + (lambda / 2) ||w||^2 by damped Newton steps
    from 0. Each x_i outside of the unit ball is scaled into it, and NaN counts as 0. The loop runs
    until the gradient is as small as its rounding error, which proves that w is near the minimizer.
    Then it continues while each step halves the gradient, until the gradient is 1024 times shorter.
    The loop takes at most 5 lambda^(-3/4) + 100 steps, and about twelve on most databases. If the
    gradient is still too long after the loop, a bounded number of gradient steps follows, which end
    near the minimizer from any point. They are rarely needed. Proofs are in
    docs/proofs/learners.md.

    Args:
        regularization: lambda, above 0.
        dims: d, the number of features. With None, no sensitivity is known.

    Returns:
        A target with a known `sensitivity`, in l2: maps {"x": (n, d) features, "y": (n,) labels,
        positive or not} to w, shape (d,). Append a constant feature for an intercept.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; on a database, if it has other dims, or lambda
            is below 16 (d + 8) eps, too near to rounding: 2.1e-5 for 3 features in float32.

    Formal guarantees:
        The l2 sensitivity under replace-one is at most min(2 W, 2 s(W) / (n lambda) + 2 E),
        rounding included. For the exact minimizer E is 0.

        W = min(1, sqrt(.2785 lambda)) / lambda bounds ||w||, and s(m) = 1 / (1 + exp(-m)). So
        one record adds at most s(W) / n to the gradient. E bounds the error of a solution, whatever
        the Newton steps returned: max(5 e, 2 e + (lambda + 1/4) u) / lambda + u, where e = eps ((d
        + 1) W / 4 + 8 + d / 8) bounds the rounding of a gradient, and u = eps (W (d / 2 + 8) + 16)
        the rounding of a step. E is below 1% of the bound if n is well below 1 / (500 e). Gradients
        are added up in fixed point, but matrix products are not, so the order of the records
        affects rounding.

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
        d = x.shape[1]
        check_dims(dims, d)
        objective = _logistic_objective(strength, d, x.dtype)
        enough = objective.plan.enough
        # Each row is a record times its label.
        rows = jnp.where((database["y"].astype(x.dtype) > 0)[:, None], x, -x)

        def point(w: jax.Array, steps: jax.Array, before: jax.Array) -> _Point:
            wrong, gradient = logistic_gradient(rows, w, strength)
            return _Point(w, wrong, gradient, jnp.sqrt(jnp.sum(gradient**2)), before, steps)

        def unsolved(at: _Point) -> jax.Array:
            improving = (at.length < at.before / 2) & (at.length > enough / _FAR_BELOW)
            return (at.steps < most_steps) & ((at.length > enough) | improving)

        def newton_step(at: _Point) -> _Point:
            step = logistic_step(rows, at.wrong, at.gradient, strength)
            return point(at.w - damping(rows @ step) * step, at.steps + 1, at.length)

        with jax.default_matmul_precision("highest"):
            start = point(jnp.zeros(d, x.dtype), jnp.zeros((), x.dtype), jnp.asarray(2, x.dtype))
            found = lax.while_loop(unsolved, newton_step, start)
            return objective.walk(lambda w: logistic_gradient(rows, w, strength)[1], found.w)

    def bound(n: int | None, dtype: np.dtype) -> list[Fraction]:
        return _logistic_objective(strength, known_dims(dims), dtype).bound(n)

    # The functions above close over nothing but numbers, and numbers cannot change. A release can
    # check that, and then it traces the target only once.
    return BoundedTarget(fit, bound=bound, norms=("l2",))


def _logistic_objective(regularization: float, d: int, dtype: np.dtype) -> _Objective:
    """Returns the objective. Refuses a lambda that is too small for the dtype."""
    check_carried(regularization, d, dtype)
    strength = Fraction(regularization)
    longest = min(1 / strength, Fraction(sqrt_up(_LARGEST_PULL / strength)))
    # This bound is valid for weights whose length is at most 2 W, where W is `longest`. The
    # rounding error of a product w'x is at most (d + 1) eps / 2 times the length of w. The
    # sigmoid's slope is at most 1/4, so a quarter of this error remains. Five other rounding errors
    # add up to 8 eps: of the sigmoid, of its product with a record, of the average of these
    # products, of lambda w, and of lambda w minus the average. The grid of the average adds eps / 8
    # in each coordinate.
    gradient_error = (d + 1) * longest / 4 + 8 + Fraction(d, 8)
    # The largest slope of the loss of a record is 1 / (1 + exp(-W)), where W is `longest`. It is
    # rounded up.
    context = decimal.Context(prec=50)
    length = context.divide(
        decimal.Decimal(longest.numerator), decimal.Decimal(longest.denominator)
    )
    pull = 1 / (1 + Fraction(context.exp(-length)) * (1 - Fraction(1, 10**30)))
    return _Objective(strength, Fraction(1, 4), longest, pull, gradient_error, d, unit(dtype))


def ridge_regression(*, regularization: float, dims: int | None = None) -> BoundedSum:
    """The weights of ridge regression, as a target.

    Minimizes (1/n) sum_i (y_i - w'x_i)^2 / 2 + (lambda / 2) ||w||^2. Each x_i outside of the unit
    ball is scaled into it, and y_i is clipped to [-1, 1]; NaN counts as 0. The minimizer solves
    (S + lambda I) w = s, where S and s are the averages of x_i x_i' and y_i x_i.

    Args:
        regularization: lambda, above 0.
        dims: d, the number of features. With None, no sensitivity is known.

    Returns:
        A target with a known `sensitivity`, in l2: maps {"x": (n, d) features, "y": (n,)
        responses} to w, shape (d,). Append a constant feature for an intercept. Neighbors share
        n - 1 records, and the sampler computes the sums over these once.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; on a database, if it has other dims, or lambda
            is below 16 (d + 8) eps, too near to rounding: 2.1e-5 for 3 features in float32.

    Formal guarantees:
        The l2 sensitivity under replace-one is at most min(2 W, 2 (1 + W) / (n lambda) + 2 E),
        rounding included. For the exact minimizer E is 0.

        W bounds ||w||: 1 / (2 sqrt(lambda)) if lambda <= 1, else 1 / (1 + lambda). E bounds the
        error of a solution, whatever its refinement returned: max(5 e, 2 e + (lambda + 1) u) /
        lambda + u. Here e = eps (d + 8) (1 + (1 + lambda) W) bounds the rounding of second moments
        and of a residual, and u = eps (W (d / 2 + 8) + 16) the rounding of a step. If the gradient
        is longer than 4 e, gradient steps follow, which end near the minimizer from any point. They
        are rarely needed. The proof is in docs/proofs/learners.md. Second moments are added up in
        fixed point, exactly, so the order of the records does not matter.

    Source:
        Hoerl and Kennard (1970). The bound follows Chaudhuri, Monteleoni and Sarwate (2011),
        Lemma 7.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> fit = targets.ridge_regression(regularization=0.25)
        >>> w = fit({"x": jnp.array([[0.5], [-0.5]]), "y": jnp.array([1.0, -1.0])})
        >>> round(float(w[0]), 5)
        1.0
        >>> fit = targets.ridge_regression(regularization=0.25, dims=2)
        >>> round(fit.sensitivity("l2", n=100).value, 3)
        0.16
    """
    strength, dims = check_strength(regularization), dims_or_none(dims)

    def statistic(record: PyTree) -> dict[str, jax.Array]:
        x = into_unit_ball(record["x"])
        y = clip_and_replace_nan(record["y"].astype(x.dtype), -1, 1)
        return {"xx": x[:, None] * x[None, :], "xy": x * y}

    def finish(average: dict[str, jax.Array]) -> jax.Array:
        second, product = average["xx"], average["xy"]
        check_dims(dims, len(product))
        objective = _ridge_objective(strength, len(product), product.dtype)
        whitening = inverse_factor(second + strength * jnp.eye(len(second), dtype=second.dtype))

        def residual(w: jax.Array) -> jax.Array:
            return product - second @ w - strength * w

        def refined(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            return w + (whitening @ residual(w)) @ whitening, None

        with jax.default_matmul_precision("highest"):
            start = (whitening @ product) @ whitening
            found, _ = lax.scan(refined, start, length=_REFINEMENTS)
            return objective.walk(lambda w: -residual(w), found)

    def bound(n: int | None, dtype: np.dtype) -> list[Fraction]:
        return _ridge_objective(strength, known_dims(dims), dtype).bound(n)

    return BoundedSum(statistic, finish, True, 1.0, bound=bound, norms=("l2",))


def _ridge_objective(regularization: float, d: int, dtype: np.dtype) -> _Objective:
    """Returns the objective. Refuses a lambda that is too small for the dtype."""
    check_carried(regularization, d, dtype)
    strength = Fraction(regularization)
    longest = 1 / (1 + strength) if strength > 1 else Fraction(sqrt_up(1 / (4 * strength)))
    # The gradient is S w + lambda w - s (see `ridge_regression`). Let X = 1 + (1 + lambda) W, where
    # W is `longest`. All errors are in units of eps / 2. The rounding error of S w is at most (d +
    # 1) W, and that of lambda w at most lambda W. The addition and the subtraction add at most 2 X.
    # S and s are averages. The terms of an average are rounded to a grid, and their sum is divided
    # by n. This causes an error of at most d / 2 + 5.
    gradient_error = (d + 8) * (1 + (1 + strength) * longest)
    return _Objective(strength, Fraction(1), longest, 1 + longest, gradient_error, d, unit(dtype))
