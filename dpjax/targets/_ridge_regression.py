"""Ridge regression, a function of second moments."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._exact._numerics import round_up
from dpjax.sensitivity._sum_targets import Summable
from dpjax.targets._bounds import running_dtype, sqrt_up, unit
from dpjax.targets._spd_solve import inverse_factor
from dpjax.targets._strong_convexity import check_carried, check_strength, into_ball
from dpjax.targets._summable import bounded_average
from dpjax.targets._unit_ball import into_unit_ball

# Each lowers the residual by a factor of 16 or more, down to its rounding.
_REFINEMENTS = 6


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
        ValueError: if lambda is not above 0; on a database, if rounding in its dtype is not small
            against lambda: below 16 (d + 8) eps, 2.1e-5 for 3 features in float32.

    Formal guarantees:
        The global l2 sensitivity under replace-one is at most that of `ridge_regression_bound`, in
        floats too: second moments are added up in fixed point, exactly, so the order of the records
        does not matter either; the solution is refined down to the rounding of its residual, and
        brought into a ball that holds the exact one.

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
    strength = check_strength(regularization)
    longest = float(_longest(Fraction(strength)))

    def statistic(record: Any) -> dict[str, jax.Array]:
        x = into_unit_ball(record["x"])
        y = record["y"].astype(x.dtype)
        y = jnp.clip(jnp.where(jnp.isnan(y), 0, y), -1, 1)
        return {"xx": x[:, None] * x[None, :], "xy": x * y}

    def finish(average: dict[str, jax.Array]) -> jax.Array:
        second, product = average["xx"], average["xy"]
        check_carried(strength, len(product), product.dtype)
        whitening = inverse_factor(second + strength * jnp.eye(len(second), dtype=second.dtype))

        def refined(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            residual = product - second @ w - strength * w
            return w + (whitening @ residual) @ whitening, None

        with jax.default_matmul_precision("highest"):
            start = (whitening @ product) @ whitening
            return into_ball(lax.scan(refined, start, length=_REFINEMENTS)[0], longest)

    return bounded_average(statistic, finish, largest=1.0)


def ridge_regression_bound(
    *, regularization: float, n: int, d: int, dtype: jax.typing.DTypeLike = "float32"
) -> float:
    """A global l2 sensitivity of `ridge_regression`: min(2 W, 2 (1 + W) / (n lambda) + 2 E).

    W bounds ||w||: 1 / (2 sqrt(lambda)) where lambda <= 1, else 1 / (1 + lambda). For let R^2 be
    the average squared residual. At the minimizer w = sum_i (y_i - w'x_i) x_i / (n lambda), hence
    ||w|| <= R / lambda; and its product with w says that lambda ||w||^2 is the average of
    (y_i - w'x_i) w'x_i, at most R - R^2. The two together give W. Replacing a record then moves the
    gradient at w by at most 2 (1 + W) / n, and the objective is lambda-strongly convex.

    E = 8 (d + 8) eps (1 + (1 + lambda) W) / lambda bounds the error of a solution, the gradient
    over lambda: rounding moves second moments by at most (d + 8) eps / 2, in the spectral norm, and
    a residual by as much times 1 + (1 + lambda) W; refinement ends within four of those.

    Args:
        regularization: lambda, above 0.
        n: number of records, at least 1.
        d: number of features, at least 1.
        dtype: float dtype of the features; what holds for float32 holds for float64 as well.

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with norm "l2".

    Raises:
        TypeError: if a parameter is not a number, or dtype is not one of floats.
        ValueError: if a parameter is out of range, or rounding in the dtype is not small against
            lambda.

    Formal guarantees:
        Holds under replace-one for any records, for what `ridge_regression` computes in floats of
        this dtype; for the exact minimizer even without E.

    Source:
        The lines above, in the manner of Chaudhuri, Monteleoni and Sarwate (2011), Lemma 7.

    Example:
        >>> from dpjax import targets
        >>> round(targets.ridge_regression_bound(regularization=0.25, n=100, d=2), 3)
        0.16
    """
    strength = Fraction(check_strength(regularization))
    n = _checks.integer("n", n, least=1)
    d = _checks.integer("d", d, least=1)
    running = running_dtype(dtype)
    check_carried(float(strength), d, running)
    eps, longest = unit(running), _longest(strength)
    error = 8 * (d + 8) * eps * (1 + (1 + strength) * longest) / strength
    exact = 2 * (1 + longest) / (n * strength)
    return round_up(min(2 * longest * (1 + (d + 8) * eps), exact + 2 * error))


def _longest(strength: Fraction) -> Fraction:
    """A bound on the length of the exact minimizer."""
    return 1 / (1 + strength) if strength > 1 else Fraction(sqrt_up(1 / (4 * strength)))
