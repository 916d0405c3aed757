"""Ridge regression, a function of second moments."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax._exact._numerics import round_up
from dpjax.targets._bounds import VectorNorm, sqrt_up, unit
from dpjax.targets._interval import clip_and_replace_nan
from dpjax.targets._known_sensitivity import (
    BoundedSum,
    bounded_average,
    check_dims,
    dims_or_none,
    known_dims,
)
from dpjax.targets._spd_solve import inverse_factor
from dpjax.targets._strong_convexity import (
    check_carried,
    check_strength,
    walk_error,
    walk_plan,
    walk_to_minimizer,
)
from dpjax.targets._unit_ball import into_unit_ball

# Each refinement lowers the residual by a factor of 16 or more, down to its rounding.
_REFINEMENTS = 6
# The largest curvature of the loss along a unit vector.
_CURVATURE = Fraction(1)


def ridge_regression(*, regularization: float, dims: int | None = None) -> BoundedSum:
    """The weights of ridge regression, as a target.

    Minimizes (1/n) sum_i (y_i - w'x_i)^2 / 2 + (lambda / 2) ||w||^2. Each x_i outside of the unit
    ball is scaled into it, and y_i is clipped to [-1, 1]; NaN counts as 0. The minimizer solves
    (S + lambda I) w = s, where S and s are the averages of x_i x_i' and y_i x_i.

    Args:
        regularization: lambda, above 0.
        dims: d, the number of features. With None, no sensitivity is known.

    Returns:
        A target with a known `sensitivity`, in l2: takes {"x": (n, d) features, "y": (n,)
        responses} to w, shape (d,). Append a constant feature for an intercept. Neighbors share
        n - 1 records, and the sampler computes their sums once.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; on a database, if it has other dims, or lambda
            is below 16 (d + 8) eps, too near to rounding: 2.1e-5 for 3 features in float32.

    Formal guarantees:
        The l2 sensitivity under replace-one is at most min(2 W, 2 (1 + W) / (n lambda) + 2 E),
        rounding included. For the exact minimizer E is 0.

        W bounds ||w||: 1 / (2 sqrt(lambda)) where lambda <= 1, else 1 / (1 + lambda). E bounds the
        error of a solution, for any result of its refinement: max(5 e, 2 e + (lambda + 1) u) /
        lambda + u. e = eps (d + 8) (1 + (1 + lambda) W) bounds the rounding of second moments and
        of a residual, and u = eps (W (d / 2 + 8) + 16) that of a step. Steps along the gradient,
        which take any point to the minimizer, follow where it is longer than 4 e: usually none.
        docs/proofs/learners.md has the proof. Second moments are added up in fixed point, exactly,
        so the order of the records does not matter.

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
    longest = _longest(Fraction(strength))

    def statistic(record: PyTree) -> dict[str, jax.Array]:
        x = into_unit_ball(record["x"])
        y = clip_and_replace_nan(record["y"].astype(x.dtype), -1, 1)
        return {"xx": x[:, None] * x[None, :], "xy": x * y}

    def finish(average: dict[str, jax.Array]) -> jax.Array:
        second, product = average["xx"], average["xy"]
        check_dims(dims, len(product))
        check_carried(strength, len(product), product.dtype)
        whitening = inverse_factor(second + strength * jnp.eye(len(second), dtype=second.dtype))

        def residual(w: jax.Array) -> jax.Array:
            return product - second @ w - strength * w

        def refined(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            return w + (whitening @ residual(w)) @ whitening, None

        error = _gradient_error(Fraction(strength), len(product), product.dtype)
        plan = walk_plan(
            strength,
            curvature=float(_CURVATURE),
            radius=round_up(longest),
            gradient_error=float(error),
        )
        with jax.default_matmul_precision("highest"):
            start = (whitening @ product) @ whitening
            return walk_to_minimizer(
                lambda w: -residual(w),
                lax.scan(refined, start, length=_REFINEMENTS)[0],
                step_size=1 / (strength + 1),
                plan=plan,
            )

    def bound(norm: VectorNorm, n: int | None, dtype: np.dtype) -> float:
        del norm  # l2.
        d, exactly = known_dims(dims), Fraction(strength)
        check_carried(strength, d, dtype)
        eps, most = unit(dtype), _longest(exactly)
        error = walk_error(
            exactly,
            curvature=_CURVATURE,
            gradient_error=_gradient_error(exactly, d, dtype),
            rounding=eps * (most * (Fraction(d, 2) + 8) + 16),
        )
        exact = 2 * (1 + most) / (_checks.integer("n", n, least=1) * exactly)
        return round_up(min(2 * most * (1 + (d + 8) * eps), exact + 2 * error))

    return bounded_average(statistic, finish, largest=1.0, bound=bound, norms=("l2",))


def _gradient_error(strength: Fraction, d: int, dtype: np.dtype) -> Fraction:
    """A bound on the rounding of a gradient, that of second moments included.

    In eps / 2: a product with moments is off by d + 1 times the length of w, lambda w by 1, and two
    differences by 2. Moments, rounded to a grid and as they are divided, are off by d / 2 + 5.
    """
    return unit(dtype) * (d + 8) * (1 + (1 + strength) * _longest(strength))


def _longest(strength: Fraction) -> Fraction:
    """A bound on the length of the exact minimizer."""
    return 1 / (1 + strength) if strength > 1 else Fraction(sqrt_up(1 / (4 * strength)))
