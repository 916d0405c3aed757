"""p-values of a release among simulated ones, and a search of a box for large p-values."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
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


Evaluate: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Computes p-values and distances, shape (count,), of points in [0, 1]^d, shape (count, d)."""

# The number of first points: on a line, on each side of a square, and in higher dimensions.
_LINE, _PLANE, _SPACE = 65, 17, 512
_CUT, _ROUNDS = 16, 4  # The intervals into which a round cuts a bracket, and the rounds.
_PROPOSED, _STEPS = 16, 12  # Proposals for each end of a projection, and steps.
_NARROW = 0.6  # The factor by which a step shrinks if its end did not move.


@dataclasses.dataclass(eq=False)
class Search:
    """Points of the unit cube and their p-values; a point *belongs* if its p-value exceeds alpha.

    Attributes:
        evaluate: computes p-values and distances.
        alpha: the level.
        dims: the dimension of the cube.
        points: all points evaluated so far.
        p_values: the p-values of these points.
    """

    evaluate: Evaluate
    alpha: float
    dims: int

    def __post_init__(self) -> None:
        self.points = np.empty((0, self.dims))
        self.p_values, self._distances = np.empty(0), np.empty(0)

    def look(self, points: np.ndarray) -> np.ndarray:
        """Evaluates points, and returns whether each point belongs."""
        found, distances = self.evaluate(points)
        self.points = np.concatenate([self.points, points])
        self.p_values = np.concatenate([self.p_values, found])
        self._distances = np.concatenate([self._distances, distances])
        return found > self.alpha

    @property
    def best(self) -> np.ndarray:
        """The point with the largest p-value; among ties, the one with the least distance."""
        return self.points[np.lexsort((self._distances, -self.p_values))[0]]

    @property
    def has_found(self) -> bool:
        """Whether any point belongs."""
        return bool((self.p_values > self.alpha).any())

    def begin(self) -> None:
        """Evaluates points all over the cube, then near the best point, until one point belongs."""
        self.look(_spread(self.dims))
        self.climb(until_found=True)

    def climb(self, *, until_found: bool = False) -> None:
        """Evaluates points around the best point, closer and closer to it."""
        rng, width = np.random.default_rng(0), 0.25
        for _ in range(_STEPS):
            if until_found and self.has_found:
                return
            around = self.best + width * rng.uniform(
                -1, 1, (_PROPOSED * max(2, self.dims), self.dims)
            )
            self.look(np.clip(around, 0, 1))
            width *= _NARROW

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest coordinates of the points that belong, moved outward.

        Returns:
            Two arrays of shape (d,); NaN where no point belongs.
        """
        self.begin()
        if not self.has_found:
            return np.full(self.dims, np.nan), np.full(self.dims, np.nan)
        return self._ends_on_a_line() if self.dims == 1 else self._projections()

    def _ends_on_a_line(self) -> tuple[np.ndarray, np.ndarray]:
        """Refines the brackets of the outermost points that belong. Returns their outer ends."""
        for _ in range(_ROUNDS):
            brackets = [x for x in self._brackets() if x[0] != x[1]]
            inner = [np.linspace(*x, _CUT + 1)[1:-1] for x in brackets]
            if not inner:
                break
            self.look(np.concatenate(inner)[:, None])
        (low, _), (high, _) = self._brackets()
        return np.array([low]), np.array([high])

    def _brackets(self) -> list[tuple[float, float]]:
        """For each side, the nearest outer point that does not belong, and the last that does."""
        line = self.points[:, 0]
        inside = line[self.p_values > self.alpha]
        low, high = float(inside.min()), float(inside.max())
        return [
            (float(max(line[line < low], default=low)), low),
            (float(min(line[line > high], default=high)), high),
        ]

    def _projections(self) -> tuple[np.ndarray, np.ndarray]:
        """Moves outward from the outermost points that belong, in shrinking steps."""
        rng = np.random.default_rng(0)
        inside = self.points[self.p_values > self.alpha]
        width = np.maximum(np.ptp(inside, axis=0), 1 / _PLANE)
        steps = np.tile(width, (2 * self.dims, 1)) / 2
        for _ in range(_STEPS):
            before = self._outermost()
            proposed = [self._beyond(rng, end, steps[end]) for end in range(2 * self.dims)]
            self.look(np.concatenate(proposed))
            stays = self._outermost() <= before + 0.1 * np.diagonal(np.tile(steps, (1, 2)))
            steps[stays] *= _NARROW
        left = np.diagonal(np.tile(steps, (1, 2)))  # The last step of each end, along its axis.
        reach = self._outermost() + left
        return np.maximum(-reach[: self.dims], 0), np.minimum(reach[self.dims :], 1)

    def _signed(self, points: np.ndarray) -> np.ndarray:
        """How far out each point is in the direction of each end, low ends first."""
        return np.concatenate([-points, points], axis=1)

    def _outermost(self) -> np.ndarray:
        return self._signed(self.points[self.p_values > self.alpha]).max(axis=0)

    def _beyond(self, rng: np.random.Generator, end: int, step: np.ndarray) -> np.ndarray:
        """Points near the outermost ones at an end, most of them farther out."""
        inside = self.points[self.p_values > self.alpha]
        first = inside[np.argsort(-self._signed(inside)[:, end])[:4]]
        moves = step * rng.normal(size=(_PROPOSED, self.dims)) / 2
        axis, sign = end % self.dims, 1 if end >= self.dims else -1
        moves[:, axis] = sign * np.abs(moves[:, axis])
        return np.clip(first[np.arange(_PROPOSED) % len(first)] + moves, 0, 1)


def _spread(dims: int) -> np.ndarray:
    """The first points: a grid on a line or a square, or an additive sequence (Roberts 2018)."""
    if dims <= 2:
        side = np.linspace(0, 1, _LINE if dims == 1 else _PLANE)
        return np.stack(np.meshgrid(*[side] * dims, indexing="ij"), axis=-1).reshape(-1, dims)
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (dims + 1))
    powers = root ** -np.arange(1, dims + 1)
    return (0.5 + np.arange(1, _SPACE + 1)[:, None] * powers) % 1
