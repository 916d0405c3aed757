"""Regularized logistic regression, solved to float precision."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._numerics import round_up
from dpjax.targets._spd_solve import solve
from dpjax.targets._unit_ball import into_unit_ball


def logistic_regression(*, regularization: float, steps: int = 12) -> Callable[[Any], jax.Array]:
    """The weights of L2-regularized logistic regression, as a target.

    Minimizes (1/n) sum_i log(1 + exp(-y_i w'x_i)) + (lambda / 2) ||w||^2 by Newton's method from 0,
    with x_i scaled into the unit ball where it lies outside, and NaN counted as 0. The number of
    steps is fixed and stated, so the target is a pure function. The default leaves an error far
    below the effect of a record for lambda n >= 1 and n up to 10^5; compare with more beyond.

    Args:
        regularization: lambda, above 0.
        steps: Newton steps, at least 1.

    Returns:
        A target: takes {"x": (n, d) features, "y": (n,) labels, positive or not} to w, shape (d,).
        Append a constant feature for an intercept.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if lambda is not above 0 or steps is below 1.

    Formal guarantees:
        The exact minimizer has global l2 sensitivity 2 / (n lambda) under replace-one, see
        `logistic_regression_bound`; the target sums over records, so it ignores their order.

    Source:
        Chaudhuri, Monteleoni and Sarwate (2011), Corollary 8.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> fit = targets.logistic_regression(regularization=0.1)
        >>> fit({"x": jnp.array([[0.5], [-0.5]]), "y": jnp.array([1, 0])}).shape
        (1,)
    """
    strength = _checks.positive("regularization", regularization)
    steps = _checks.integer("steps", steps, least=1)

    def fit(database: Any) -> jax.Array:
        x = into_unit_ball(database["x"])
        y = jnp.where(database["y"].astype(x.dtype) > 0, 1, -1).astype(x.dtype)

        def newton_step(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            margin = y * (x @ w)
            wrong = jax.nn.sigmoid(-margin)
            gradient = strength * w - (y * wrong) @ x / x.shape[0]
            curvature = wrong * (1 - wrong) / x.shape[0]
            hessian = (x.T * curvature[None, :]) @ x + strength * jnp.eye(x.shape[1], dtype=x.dtype)
            return w - solve(hessian, gradient), None

        start = jnp.zeros(x.shape[1], x.dtype)
        return jax.lax.scan(newton_step, start, None, length=steps)[0]

    return fit


def logistic_regression_bound(*, regularization: float, n: int) -> float:
    """The global l2 sensitivity of regularized logistic regression: 2 / (n lambda).

    Args:
        regularization: lambda, above 0.
        n: number of records, at least 1.

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with norm "l2".

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Holds for the exact minimizer on features in the unit ball, under replace-one.

    Source:
        Chaudhuri, Monteleoni and Sarwate (2011), Corollary 8.

    Example:
        >>> from dpjax import targets
        >>> round(targets.logistic_regression_bound(regularization=0.1, n=100), 6)
        0.2
    """
    strength = _checks.positive("regularization", regularization)
    return round_up(2 / (_checks.integer("n", n, least=1) * Fraction(strength)))
