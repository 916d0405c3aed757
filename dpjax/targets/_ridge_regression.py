"""Ridge regression, a function of second moments."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._numerics import round_up
from dpjax._summable import Summable
from dpjax.targets._bounds import sqrt_up
from dpjax.targets._spd_solve import solve
from dpjax.targets._summable import summable
from dpjax.targets._unit_ball import into_unit_ball


def ridge_regression(*, regularization: float) -> Summable:
    """The weights of ridge regression, as a target.

    Minimizes (1/n) sum_i (y_i - w'x_i)^2 / 2 + (lambda / 2) ||w||^2, with x_i scaled into the unit
    ball where it lies outside and y_i clipped to [-1, 1]; NaN counts as 0. The minimizer solves
    (S + lambda I) w = s, where S and s are the averages of x_i x_i' and y_i x_i.

    Args:
        regularization: lambda, above 0.

    Returns:
        A target: takes {"x": (n, d) features, "y": (n,) responses} to w, shape (d,). Append a
        constant feature for an intercept. Neighbors share n - 1 records, of which the sampler
        computes the sums once.

    Raises:
        TypeError: if lambda is not a number.
        ValueError: if lambda is not above 0.

    Formal guarantees:
        The exact minimizer has the global l2 sensitivity of `ridge_regression_bound` under
        replace-one; the target sums over records, so it ignores their order.

    Source:
        Hoerl and Kennard (1970).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> fit = targets.ridge_regression(regularization=0.25)
        >>> w = fit({"x": jnp.array([[0.5], [-0.5]]), "y": jnp.array([1.0, -1.0])})
        >>> round(float(w[0]), 5)
        1.0
    """
    strength = _checks.positive("regularization", regularization)

    def statistic(record: Any) -> dict[str, jax.Array]:
        x = into_unit_ball(record["x"])
        y = record["y"].astype(x.dtype)
        y = jnp.clip(jnp.where(jnp.isnan(y), 0, y), -1, 1)
        return {"xx": x[:, None] * x[None, :], "xy": x * y}

    def finish(average: dict[str, jax.Array]) -> jax.Array:
        second = average["xx"]
        return solve(second + strength * jnp.eye(len(second), dtype=second.dtype), average["xy"])

    return summable(statistic, finish, average=True)


def ridge_regression_bound(*, regularization: float, n: int) -> float:
    """A global l2 sensitivity of `ridge_regression`: min(2 W, 2 (1 + W) / (n lambda)).

    W bounds ||w||: 1 / (2 sqrt(lambda)) where lambda <= 1, else 1 / (1 + lambda). For let R^2 be
    the average squared residual. At the minimizer w = sum_i (y_i - w'x_i) x_i / (n lambda), hence
    ||w|| <= R / lambda; and its product with w says that lambda ||w||^2 is the average of
    (y_i - w'x_i) w'x_i, at most R - R^2. The two together give W. Replacing a record then moves the
    gradient at w by at most 2 (1 + W) / n, and the objective is lambda-strongly convex.

    Args:
        regularization: lambda, above 0.
        n: number of records, at least 1.

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with norm "l2".

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Holds for the exact minimizer on features in the unit ball and responses in [-1, 1], as the
        target makes them, under replace-one; a float solution also has a rounding error, which a
        bound leaves out and the sampler measures.

    Source:
        The lines above, in the manner of Chaudhuri, Monteleoni and Sarwate (2011), Lemma 7.

    Example:
        >>> from dpjax import targets
        >>> targets.ridge_regression_bound(regularization=0.25, n=100)
        0.16
    """
    strength = Fraction(_checks.positive("regularization", regularization))
    n = _checks.integer("n", n, least=1)
    longest = 1 / (1 + strength) if strength > 1 else Fraction(sqrt_up(1 / (4 * strength)))
    return round_up(min(2 * longest, 2 * (1 + longest) / (n * strength)))
