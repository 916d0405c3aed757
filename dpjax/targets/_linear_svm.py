"""The linear support vector machine, trained by Mehrotra's interior point method."""

import functools
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Database
from dpjax._exact._numerics import compute_dtype
from dpjax.sensitivity._order_statistics import order_statistic
from dpjax.targets._clamping import clip_and_replace_nan
from dpjax.targets._known_sensitivity import (
    BoundedTarget,
    check_dims,
    dims_or_none,
    known_dims,
    sqrt_up,
    unit,
)
from dpjax.targets._minimizers import check_strength, inverse_factor

# The largest length of a step, as a fraction of the step that would reach the boundary. With a
# larger fraction, divisors in the next step would lose digits. With a smaller fraction, more steps
# would be needed.
_STRIDE = 0.99
# Every record has two products, slope * beyond and spare * short (see `Point`). Both are 0 at the
# solution. The last steps aim to make both products equal to a small number, the gap. The gap is at
# least a fraction of the cap. If a record's slope is near the cap, its `beyond` is about gap / cap
# instead of 0. So the record's margin has an error of about this fraction. In float32 the fraction
# is a tenth of eps. In float64 it is 1e-12, because a tenth of eps might not be reached in a fixed
# number of steps.
_GAP_IN_UNITS, _LEAST_GAP = 0.1, 1e-12
# The gap is also at least this number times cap^2 eps. This limits the Hessian. The Hessian is a
# sum: 1 on the diagonal for the penalty, and one term for each record. For a record of length 1,
# the term is largest if the slope is half of the cap. Then the term is cap^2 / (8 gap), so it is at
# most 1 / (128 eps). A Cholesky factorization in floats works for sums up to about 1 / eps. This
# leaves a factor of 128 for longer records, or for several records with undecided slopes (see
# `_DECIDED`).
_GAP_PER_CAP_IN_UNITS = 16
# Each number h on the diagonal of the Hessian is increased by this number times eps h. The increase
# covers the rounding errors of the Hessian, so that no pivot is negative. The increase changes the
# solver's steps but not the solution, because residuals are computed without it.
_JITTER_IN_UNITS = 8
# Without `clip`, features are clipped to this magnitude, so that products do not overflow.
_LARGEST_FEATURE = 1e6
# The number of final steps. They use only the records with the largest `curvature`. The slope of
# every other record's loss stays fixed, because it is already near 0 or near its upper limit.
_LAST_STEPS = 8
# At the starting point, the slope of each record's loss is from `_LEAST_START` to `_MOST_START`
# times its upper limit, the cap. The variables `short` and `beyond` of `Point` start at `_WIDTH` or
# more.
_LEAST_START, _MOST_START, _WIDTH = 0.001, 0.9, 1.0
# The slope of a record's loss is between 0 and the cap. The slope counts as decided if its distance
# from 0 or from the cap is below this fraction of the cap.
_DECIDED = 0.1
# A penalty on the bias keeps the Hessian from being singular if the slopes of all records are
# decided. The penalty is `_BIAS_HOLD` * eps * cap in the first steps, and `_LAST_BIAS_HOLD` * cap
# in the final steps.
_BIAS_HOLD, _LAST_BIAS_HOLD = 8, 1.0


class Point(NamedTuple):
    """Primal and dual variables of the optimization. All variables except theta stay positive."""

    theta: jax.Array
    slope: jax.Array  # The slope of each record's hinge loss. It is less than the cap.
    # cap - slope. It is stored because a subtraction would lose digits.
    spare: jax.Array
    # How far the record's margin is below 1. At the solution, short * spare is 0.
    short: jax.Array
    # How far the record's margin is above 1. At the solution, beyond * slope is 0.
    beyond: jax.Array


def linear_svm(
    *,
    regularization: float,
    dims: int | None = None,
    clip: bool = True,
    steps: int = 12,
    working_set: int | None = 128,
) -> BoundedTarget:
    """The weights and the bias of a linear support vector machine, as a target.

    Minimizes (1/n) sum_i max(0, 1 - y_i (w'x_i + b)) + (lambda / 2) ||w||^2 by an interior point
    method with a fixed number of steps. C = 1 / lambda is the weight of the average hinge loss. The
    weights are unique. The bias is the middle of all minimizing biases. With p positive labels, the
    bias is the average of the p-th and the (p + 1)-th smallest y_i - w'x_i. So it is continuous in
    the records. If all labels are equal, w is 0 and b is the label, 1 or -1. In this case, biases
    of the same sign that are further from 0 are minimizers, too.

    Args:
        regularization: lambda, above 0; 1 / (n lambda) is the C of scikit-learn's SVC.
        dims: d, the number of features. With None, no sensitivity is known.
        clip: clips features to [0, 1]; without it no sensitivity is known. NaN counts as 0.
        steps: interior point steps, at least 1; 8 final steps follow. We measured the l1 error at
            12 steps in float32. On the paper's two Gaussians (C = 3, n = 1000, d = 2 to 64) it was
            below .4% of the sampled sensitivity. On many other kinds of databases, for C <= 3, it
            was at most 2% of the effect of replacing a record. For the Gaussians 8 steps are
            enough. Hard problems at C = 100 need more than 12, and float64.
        working_set: how many records, at least 2 (d + 1), take part in the final steps: the most
            undecided ones. The slopes of other records stay fixed. None uses all records. Use None
            if many records lie on the margin, such as copies of each other at large C.

    Returns:
        A target with a known `sensitivity`, in l1: maps {"x": (n, d) features, "y": (n,) labels,
        positive or not} to {"w": (d,), "b": ()}.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; on a database, if it has other dims.

    Formal guarantees:
        On clipped features the l1 sensitivity under replace-one is at most 2 + 4 L, where L = min(C
        d / 2, sqrt(C d)). This includes rounding, and solutions that have not converged. At the
        minimizer ||w||_1 is at most L, and the bias is between -1 - L and 1 + L. The target scales
        and clips its solution into this set, and the diameter of the set is the bound
        (docs/proofs/learners.md). The exact minimizer changes by at most 2 + L + 4 C d / n, which
        is less. But no error bound is proven for the solution in floats. Without clipping, there is
        no finite bound. The order of the records matters only through rounding.

    Source:
        Cortes and Vapnik (1995); Mehrotra (1992); Rubinstein and Aldà (2017), Section 6, whose
        Proposition 19 has 2 + 2 C sqrt(d) + 4 C d / n for the exact minimizer.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> fit = targets.linear_svm(regularization=1.0)
        >>> model = fit({"x": jnp.array([[0.25], [0.75]]), "y": jnp.array([-1, 1])})
        >>> round(float(model["w"][0]), 3), round(float(model["b"]), 3)
        (0.25, -0.125)
        >>> fit = targets.linear_svm(regularization=0.5, dims=2)
        >>> round(fit.sensitivity("l1").value, 3)
        10.0
    """
    cost, dims = 1 / _checks.positive("regularization", regularization), dims_or_none(dims)
    steps = _checks.integer("steps", steps, least=1)
    if working_set is not None:
        working_set = _checks.integer("working_set", working_set, least=1)

    def fit(database: Database) -> dict[str, jax.Array]:
        ends = (0, 1) if clip else (-_LARGEST_FEATURE, _LARGEST_FEATURE)
        x = clip_and_replace_nan(database["x"].astype(compute_dtype(database["x"].dtype)), *ends)
        n, d = x.shape
        check_dims(dims, d)
        positive = database["y"].astype(x.dtype) > 0
        positives = jnp.sum(positive)
        y = jnp.where(positive, 1, -1).astype(x.dtype)
        # With centered features, the bias hardly depends on the weights, so the solver converges
        # faster.
        centered = x - jnp.mean(x, axis=0)[None, :]
        rows = jnp.concatenate([centered, jnp.ones((n, 1), x.dtype)], axis=1).T * y[None, :]
        cap = jnp.asarray(cost / n, x.dtype)
        size = n if working_set is None else min(n, max(working_set, 2 * (d + 1)))
        theta = _solve(rows, positive, cap, steps, size)
        solved = (positives > 0) & (positives < n) & jnp.all(jnp.isfinite(theta))
        w = jnp.where(solved, theta[:d], 0)
        if not clip:
            return {"w": w, "b": _middle_bias(y - x @ w, positives)}
        longest = jnp.minimum(cost * d / 2, jnp.sqrt(cost * d)).astype(x.dtype)
        length = jnp.maximum(jnp.sum(jnp.abs(w)), np.finfo(x.dtype).tiny)
        w = w * jnp.minimum(longest / length, 1)
        bias = jnp.clip(_middle_bias(y - x @ w, positives), -1 - longest, 1 + longest)
        return {"w": w, "b": bias}

    def bound(n: int | None, dtype: np.dtype) -> list[Fraction]:
        del n  # The bound is the same for all n.
        if not clip:
            raise ValueError("clip must be True for a known bound, got False")
        check_strength(regularization)
        d, exactly = known_dims(dims), Fraction(cost)
        longest = min(exactly * d / 2, Fraction(sqrt_up(exactly * d)))
        return [(2 + 4 * longest) * (1 + (d + 8) * unit(dtype))]

    return BoundedTarget(fit, bound=bound, norms=("l1",))


def _solve(
    rows: jax.Array, positive: jax.Array, cap: jax.Array, steps: int, size: int
) -> jax.Array:
    """Returns the weights and the bias.

    `rows` has shape (d + 1, n). Each column is a record times its label, followed by the label.
    """
    p, n = rows.shape
    weights_only = jnp.arange(p) < p - 1
    penalty = weights_only.astype(rows.dtype)
    start = _between_the_means(rows, positive, cap)
    eps = np.finfo(rows.dtype).eps
    held = jnp.where(weights_only, penalty, _BIAS_HOLD * eps * cap)
    first = steps + (_LAST_STEPS if size == n else 0)
    at = interior_point(rows, held, jnp.zeros_like(held), cap, start, steps=first)
    if size == n:
        return at.theta

    _, chosen = jax.lax.top_k(curvature(at), size)
    slope = jnp.where(at.spare < _DECIDED * cap, cap, at.slope)
    slope = jnp.where(at.slope < _DECIDED * cap, 0, slope)
    few = rows.T[chosen].T
    # The sum of the fixed slopes can differ from zero, so a penalty keeps the bias near its last
    # value.
    held = jnp.where(weights_only, penalty, _LAST_BIAS_HOLD * cap)
    pull = rows @ slope - few @ slope[chosen] + (held - penalty) * at.theta
    undecided = at._replace(**{name: getattr(at, name)[chosen] for name in at._fields[1:]})
    return interior_point(few, held, pull, cap, undecided, steps=_LAST_STEPS).theta


def _between_the_means(rows: jax.Array, positive: jax.Array, cap: jax.Array) -> Point:
    """Returns a starting point.

    The weight vector is parallel to the difference of the class means. So it is a sum of the
    records times their labels, each with a coefficient. The slope of a record starts at this
    coefficient, but at least at `_LEAST_START` times the cap.
    """
    sizes = jnp.where(positive, jnp.sum(positive), jnp.sum(~positive)).astype(rows.dtype)
    share = 1 / sizes
    difference = (rows @ share).at[-1].set(0)
    margins = difference @ rows
    # The weights are `length` times `difference`. With `nearest` as `length`, the margins are as
    # near to 1 as possible, in least squares. `length` is limited so that no slope is above
    # _MOST_START * cap.
    nearest = jnp.sum(margins) / jnp.maximum(jnp.sum(jnp.square(margins)), cap**2)
    length = jnp.clip(nearest, 0, _MOST_START * cap / jnp.max(share))
    slope = jnp.maximum(length * share, _LEAST_START * cap)
    theta = length * difference
    missing = 1 - theta @ rows
    short, beyond = jnp.maximum(missing, 0) + _WIDTH, jnp.maximum(-missing, 0) + _WIDTH
    return Point(theta, slope, cap - slope, short, beyond)


def _middle_bias(thresholds: jax.Array, positives: jax.Array) -> jax.Array:
    """Returns the middle of the interval of biases at which the sum of hinge losses is least.

    Thresholds are y - w'x, and `positives` is the number of labels 1. The derivative of the sum by
    the bias is -positives for a very low bias, and grows by one at each threshold. So the
    derivative is 0 between the order statistics of ranks positives and positives + 1.
    """
    lowest = jnp.min(thresholds)
    above = thresholds - lowest
    low = order_statistic(above, jnp.maximum(positives, 1))
    following = jnp.min(jnp.where(above > low, above, jnp.inf))
    alone = (positives == 0) | jnp.isinf(following)
    tied = jnp.sum(above <= low) > positives
    return lowest + jnp.where(alone | tied, low, (low + following) / 2)


def interior_point(
    rows: jax.Array,
    penalty: jax.Array,
    pull: jax.Array,
    cap: jax.Array,
    start: Point,
    *,
    steps: int,
) -> Point:
    """Minimizes sum penalty theta^2 / 2 - pull'theta + cap sum max(0, 1 - theta'rows).

    It takes Newton steps on the optimality conditions, each with a predictor and a corrector.

    Args:
        rows: shape (p, n).
        penalty: shape (p,), above 0.
        pull: shape (p,).
        cap: the largest slope of a hinge, above 0.
        start: any point, such as the result of another call.
        steps: how many steps to take.

    Returns:
        The last point.
    """
    eps = float(np.finfo(rows.dtype).eps)
    least = max(_GAP_IN_UNITS * eps, _LEAST_GAP)
    least = jnp.maximum(least, _GAP_PER_CAP_IN_UNITS * eps * cap) * cap

    def step(at: Point, _: None) -> tuple[Point, None]:
        missing = 1 - at.theta @ rows
        weight = curvature(at)
        hessian = (rows * weight[None, :]) @ rows.T + jnp.diag(penalty)
        jitter = _JITTER_IN_UNITS * eps * jnp.diag(hessian)
        whitening = inverse_factor(hessian + jnp.diag(jitter))
        residual = pull + rows @ at.slope - penalty * at.theta

        def toward(short_gap: jax.Array, beyond_gap: jax.Array) -> Point:
            """Returns the Newton step that gives two products of each record new values.

            To first order, `spare * short` becomes `short_gap`, and `slope * beyond` becomes
            `beyond_gap` (see `Point` for these variables).
            """
            error = missing - short_gap / at.spare + beyond_gap / at.slope
            theta = (whitening @ (residual + rows @ (weight * error))) @ whitening
            slope = weight * (error - theta @ rows)
            return Point(
                theta,
                slope,
                -slope,
                short_gap / at.spare - at.short + at.short / at.spare * slope,
                beyond_gap / at.slope - at.beyond - at.beyond / at.slope * slope,
            )

        # This is Mehrotra's rule. Compute a Newton step that aims at a gap of 0. Let r be the
        # fraction of the gap that would remain after this step. The step that is taken aims at r^3
        # times the gap.
        gap = _gap(at)
        predicted = toward(jnp.zeros_like(at.short), jnp.zeros_like(at.beyond))
        aim = jnp.maximum(gap * (_gap(_move(at, predicted)) / gap) ** 3, least)
        corrected = toward(
            aim - predicted.spare * predicted.short, aim - predicted.slope * predicted.beyond
        )
        moved = _move(at, corrected)
        # If a factorization fails in spite of the jitter, the last finite point is returned.
        finite = jnp.all(jnp.isfinite(moved.theta))
        return jax.tree.map(functools.partial(jnp.where, finite), moved, at), None

    return lax.scan(step, start, None, length=steps)[0]


def curvature(at: Point) -> jax.Array:
    """Returns each record's weight in the Hessian; small if the slope is near 0 or near the cap."""
    return 1 / (at.short / at.spare + at.beyond / at.slope)


def _gap(at: Point) -> jax.Array:
    """Returns the mean of the products `slope * beyond` and `spare * short`; 0 at the solution."""
    return jnp.mean(at.slope * at.beyond + at.spare * at.short) / 2


def _move(at: Point, step: Point) -> Point:
    """Returns the point after a step, which is shortened if a variable would reach 0."""
    pairs = list(zip(at[1:], step[1:], strict=True))
    shrinkage = jnp.stack([jnp.max(-move / value) for value, move in pairs])
    length = _STRIDE / jnp.maximum(jnp.max(shrinkage), _STRIDE)
    # The stride keeps variables positive only up to rounding, and a 0 would later be a divisor.
    tiny = np.finfo(at.theta.dtype).tiny
    positive = (jnp.maximum(value + length * move, tiny) for value, move in pairs)
    return Point(at.theta + length * step.theta, *positive)
