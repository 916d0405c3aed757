"""An interior point method for sums of hinges: Mehrotra's, a fixed number of steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.targets._spd_solve import inverse_factor

# How near the boundary a step may come, as a share of the way. Nearer, what is divided by in the
# next step would have lost its digits; farther, more steps would be needed.
_STRIDE = 0.99
# The complementary products aimed for, over the cap, in units in the last place. They are of slope
# and distance, so this is how far off a margin ends: by a tenth of what a float of size 1 resolves,
# and in float64, where that is finer than any answer needs, by 1e-12, for the number of steps is
# fixed and each takes the products only so far.
_GAP_IN_UNITS, _LEAST_GAP = 0.1, 1e-12
# But an undecided record of length 1 adds cap^2 / (8 gap) to a Hessian that begins at the penalty,
# 1: at a gap of 16 cap^2 units that is 1 / (128 units), which leaves its Cholesky factor seven bits
# for longer and more records.
_GAP_PER_CAP_IN_UNITS = 16
# Added to the diagonal, relative: covers the rounding of the sums that it is made of, so that no
# pivot is negative. It bends the path, not where that ends: the residuals know nothing of it.
_JITTER_IN_UNITS = 8


class Point(NamedTuple):
    """Primal and dual variables; all but theta stay above 0."""

    theta: jax.Array
    slope: jax.Array  # Below the cap.
    spare: jax.Array  # The cap less the slope, kept apart because the difference cancels.
    short: jax.Array  # How far a record falls short of the margin; complementary to spare.
    beyond: jax.Array  # How far it lies beyond; complementary to slope.


def first_point(
    rows: jax.Array, cap: jax.Array, theta: jax.Array, slope: jax.Array, *, width: float
) -> Point:
    """Where to start: theta, slopes strictly between 0 and the cap, and a width to move in."""
    missing = 1 - theta @ rows
    short, beyond = jnp.maximum(missing, 0) + width, jnp.maximum(-missing, 0) + width
    return Point(theta, slope, cap - slope, short, beyond)


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

    Newton steps on the optimality conditions, each predicted and then corrected.

    Args:
        rows: shape (p, n).
        penalty: shape (p,), above 0.
        pull: shape (p,).
        cap: the largest slope of a hinge, above 0.
        start: a point from `first_point`, or from an earlier call for the same or more rows.
        steps: their number.

    Returns:
        The point reached.
    """
    eps = float(jnp.finfo(rows.dtype).eps)
    least = max(_GAP_IN_UNITS * eps, _LEAST_GAP)
    least = jnp.maximum(least, _GAP_PER_CAP_IN_UNITS * eps * cap) * cap

    def step(at: Point, _: None) -> tuple[Point, None]:
        missing = 1 - at.theta @ rows
        weight = curvature(at)
        hessian = (rows * weight[None, :]) @ rows.T + jnp.diag(penalty)
        jitter = _JITTER_IN_UNITS * eps * jnp.diagonal(hessian)
        whitening = inverse_factor(hessian + jnp.diag(jitter))
        residual = pull + rows @ at.slope - penalty * at.theta

        def toward(short_gap: jax.Array, beyond_gap: jax.Array) -> Point:
            """The Newton step to where the complementary products are these."""
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

        # What a plain Newton step leaves says how hard to aim for the middle (Mehrotra's rule): its
        # cube is next to nothing where the step was good, and asks for centering where not.
        gap = _gap(at)
        predicted = toward(jnp.zeros_like(at.short), jnp.zeros_like(at.beyond))
        aim = jnp.maximum(gap * (_gap(_move(at, predicted)) / gap) ** 3, least)
        corrected = toward(
            aim - predicted.spare * predicted.short, aim - predicted.slope * predicted.beyond
        )
        moved = _move(at, corrected)
        # Where a factorization has broken down after all, the last sound point is the answer.
        sound = jnp.all(jnp.isfinite(moved.theta))
        return jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, at), None

    return lax.scan(step, start, None, length=steps)[0]


def curvature(at: Point) -> jax.Array:
    """What each hinge adds to the Hessian; large where it is undecided on which side it ends."""
    return 1 / (at.short / at.spare + at.beyond / at.slope)


def _gap(at: Point) -> jax.Array:
    """The mean of the complementary products, 0 at the solution."""
    return jnp.mean(at.slope * at.beyond + at.spare * at.short) / 2


def _move(at: Point, step: Point) -> Point:
    """The point after a step, cut short where a variable would reach 0."""
    pairs = list(zip(at[1:], step[1:], strict=True))
    shrinkage = jnp.stack([jnp.max(-move / value) for value, move in pairs])
    length = _STRIDE / jnp.maximum(jnp.max(shrinkage), _STRIDE)
    # The stride keeps everything above 0 but for rounding, and 0 would be divided by.
    tiny = jnp.finfo(at.theta.dtype).tiny
    positive = (jnp.maximum(value + length * move, tiny) for value, move in pairs)
    return Point(at.theta + length * step.theta, *positive)
