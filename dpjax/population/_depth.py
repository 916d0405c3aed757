"""The depth of an observed release: how central it is among simulated ones."""

import jax
import jax.numpy as jnp
from jax import lax

# The least variance of standardized numbers. It keeps the covariance matrix of equal numbers
# invertible.
_LEAST_VARIANCE = 1e-6
_FURTHEST = 1e6  # The largest distance from the median, in interquartile ranges.


def p_value(observed: jax.Array, simulated: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The fraction of points that are no more central than the observed one, and its distance.

    All points are treated alike: the depth of a point is a function of the point and of the set of
    all R + 1 points. So if they are exchangeable, the fraction is at most alpha with probability at
    most alpha. The fraction is i / (R + 1) for the i-th least central point, and ties count against
    rejection.

    A single number is compared by its rank from the nearer end. Several numbers are compared by
    their Mahalanobis distance from the mean of all points.

    Args:
        observed: shape (k,).
        simulated: shape (R, k).

    Returns:
        The fraction, and the distance of the observed point from the center, in units of the
        spread. The distance guides a search if all fractions are equal.
    """
    points = jnp.concatenate([observed[None], simulated])
    # NaN counts as the largest value.
    points = jnp.where(jnp.isnan(points), jnp.inf, points)
    standard = _standardized(points)
    if points.shape[1] == 1:
        numbers = points[:, 0]
        below = jnp.sum(numbers[None] <= numbers[:, None], axis=1)
        above = jnp.sum(numbers[None] >= numbers[:, None], axis=1)
        depth = jnp.minimum(below, above)
        distance = jnp.abs(standard[0, 0])
        return jnp.mean((depth <= depth[0]).astype(distance.dtype)), distance
    distances = _mahalanobis(standard)
    return jnp.mean((distances >= distances[0]).astype(distances.dtype)), distances[0]


def _standardized(points: jax.Array) -> jax.Array:
    """Distances from the medians in interquartile ranges, finite and of comparable magnitudes."""
    largest = jnp.finfo(points.dtype).max / 4
    finite = jnp.clip(points, -largest, largest)
    ordered = jnp.sort(finite, axis=0)
    count = len(points)
    places = [int(share * (count - 1)) for share in (0.5, 0.25, 0.75)]
    middle, low, high = (ordered[place : place + 1] for place in places)
    spread = jnp.where(high > low, high - low, ordered[-1:] - ordered[:1])
    spread = jnp.where(spread > 0, spread, 1)
    return jnp.clip((finite - middle) / spread, -_FURTHEST, _FURTHEST)


def _mahalanobis(points: jax.Array) -> jax.Array:
    """Squared Mahalanobis distances from the mean, of points of shape (R + 1, k)."""
    k = points.shape[1]
    # Points are sorted, so that sums do not depend on which point is the observed one.
    columns = lax.sort(tuple(points.T), num_keys=k)
    ordered = jnp.stack(columns, axis=1)
    center = jnp.mean(ordered, axis=0, keepdims=True)
    away = ordered - center
    with jax.default_matmul_precision("highest"):
        scatter = jnp.mean(away[:, :, None] * away[:, None, :], axis=0)
        scale = jnp.diagonal(scatter)
        scatter = scatter + _LEAST_VARIANCE * jnp.diag(jnp.maximum(scale, _LEAST_VARIANCE))
        inverse = jnp.linalg.inv(scatter)
        moved = points - center
        return jnp.sum(jnp.sum(moved[:, :, None] * inverse[None], axis=1) * moved, axis=1)
