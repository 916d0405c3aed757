"""Mehrotra's interior point method for sums of hinges, with a fixed number of steps."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.targets._spd_solve import inverse_factor

# How near a step may come to the boundary, as a share of the way. Nearer, the divisors of the next
# step would lose their digits; farther, more steps would be needed.
_STRIDE = 0.99
# The complementary products to aim for, divided by the cap. A product is of a slope and a distance,
# so this bounds the error of a margin. In float32 it is a tenth of eps. In float64 that would be
# finer than any answer needs, and a fixed number of steps may not get there, so it is 1e-12.
_GAP_IN_UNITS, _LEAST_GAP = 0.1, 1e-12
# But an undecided record of length 1 adds cap^2 / (8 gap) to a Hessian that begins at the penalty,
# 1. At a gap of 16 cap^2 eps it adds 1 / (128 eps). So the Cholesky factor has seven bits left for
# longer records, and for more of them.
_GAP_PER_CAP_IN_UNITS = 16
# A relative amount added to the diagonal. It covers the rounding of its sums, so no pivot is
# negative. It changes the path but not the end, because residuals are computed without it.
_JITTER_IN_UNITS = 8


class Point(NamedTuple):
    """Primal and dual variables; all but theta stay above 0."""

    theta: jax.Array
    slope: jax.Array  # Below the cap.
    spare: jax.Array  # The cap minus the slope, a variable of its own: the difference would cancel.
    short: jax.Array  # How far a record is short of the margin; complementary to spare.
    beyond: jax.Array  # How far a record is beyond the margin; complementary to slope.


def first_point(
    rows: jax.Array, cap: jax.Array, theta: jax.Array, slope: jax.Array, *, width: float
) -> Point:
    """A start from theta and slopes between 0 and the cap; distances are at least width."""
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
            """The Newton step toward complementary products of these sizes."""
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

        # Mehrotra's rule: the share of the gap that a plain Newton step leaves says how much to
        # center. Its cube is near 0 after a good step, and near 1 after a bad one.
        gap = _gap(at)
        predicted = toward(jnp.zeros_like(at.short), jnp.zeros_like(at.beyond))
        aim = jnp.maximum(gap * (_gap(_move(at, predicted)) / gap) ** 3, least)
        corrected = toward(
            aim - predicted.spare * predicted.short, aim - predicted.slope * predicted.beyond
        )
        moved = _move(at, corrected)
        # If a factorization fails all the same, the last finite point is the answer.
        finite = jnp.all(jnp.isfinite(moved.theta))
        return jax.tree.map(functools.partial(jnp.where, finite), moved, at), None

    return lax.scan(step, start, None, length=steps)[0]


def curvature(at: Point) -> jax.Array:
    """The weight of each hinge in the Hessian; large while its side is undecided."""
    return 1 / (at.short / at.spare + at.beyond / at.slope)


def _gap(at: Point) -> jax.Array:
    """The mean of the complementary products, 0 at the solution."""
    return jnp.mean(at.slope * at.beyond + at.spare * at.short) / 2


def _move(at: Point, step: Point) -> Point:
    """The point after a step, cut short where a variable would reach 0."""
    pairs = list(zip(at[1:], step[1:], strict=True))
    shrinkage = jnp.stack([jnp.max(-move / value) for value, move in pairs])
    length = _STRIDE / jnp.maximum(jnp.max(shrinkage), _STRIDE)
    # The stride keeps all variables above 0, except for rounding; a 0 would be a divisor later.
    tiny = np.finfo(at.theta.dtype).tiny
    positive = (jnp.maximum(value + length * move, tiny) for value, move in pairs)
    return Point(at.theta + length * step.theta, *positive)
