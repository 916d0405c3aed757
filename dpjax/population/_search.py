"""p-values of a release among simulated releases, and a search for large p-values in a box."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

# If numbers are equal, their covariance matrix is not invertible. So each variance v is raised by
# 1e-6 max(v, 1e-6).
_LEAST_VARIANCE = 1e-6
# A number of a release may be nearly a linear function of the earlier numbers. Then the earlier
# numbers explain most of its variance. If the unexplained fraction is smaller than this, float32 is
# too coarse for the lengths in `margins`.
_LEAST_UNEXPLAINED = 1e-3
_FURTHEST = 1e6  # The largest distance from the median, in interquartile ranges.


def p_value(observed: jax.Array, simulated: jax.Array) -> jax.Array:
    """Returns the fraction of all points that are no more central than the observed point.

    All points are treated alike: the depth of a point is a function of the point and of the set of
    all R + 1 points. So if they are exchangeable, the fraction is at most alpha with probability at
    most alpha. For the i-th least central point, the fraction is i / (R + 1). Ties increase the
    fraction.

    A single number is compared by its rank from the nearer end. Several numbers are compared by
    their Mahalanobis distance from the mean of all points.

    Args:
        observed: shape (k,).
        simulated: shape (R, k).
    """
    points = _without_nan(jnp.concatenate([observed[None], simulated]))
    if points.shape[1] == 1:
        numbers = points[:, 0]
        below = jnp.sum(numbers[None] <= numbers[:, None], axis=1)
        above = jnp.sum(numbers[None] >= numbers[:, None], axis=1)
        depth = jnp.minimum(below, above)
        return jnp.mean((depth <= depth[0]).astype(points.dtype))
    moved, scatter = _around_the_mean(_standardized(points))
    with jax.default_matmul_precision("highest"):
        inverse = jnp.linalg.inv(scatter)
        away = jnp.sum(moved[:, :, None] * inverse[None], axis=1)
        distances = jnp.sum(away * moved, axis=1)
    return jnp.mean((distances >= distances[0]).astype(distances.dtype))


def margins(observed: jax.Array, simulated: jax.Array) -> jax.Array:
    """Returns numbers that determine `upper_p_values`, and change little if theta changes little.

    For releases of one number, these are the sorted differences of simulated releases and the
    observed release. For releases of k numbers, coordinates are changed so that the simulated
    releases have unit variances and no correlations. The result contains the vector from the mean
    of the simulated releases to the observed release, and then the sorted lengths of the vectors
    from this mean to the simulated releases.

    If the numbers are almost collinear, all lengths are infinite, so that they exclude no theta.

    Args:
        observed: shape (k,).
        simulated: shape (R, k).

    Returns:
        Shape (R,) if k is 1, else (k + R,). No NaN.
    """
    points = _without_nan(jnp.concatenate([observed[None], simulated]))
    if points.shape[1] == 1:
        largest = jnp.finfo(points.dtype).max / 8
        away = jnp.where(points[1:] == points[:1], 0, points[1:] - points[:1])
        return jnp.sort(jnp.clip(away[:, 0], -largest, largest))
    standard = _standardized(points)
    moved, scatter = _around_the_mean(standard[1:])
    observed = standard[:1] - (standard[1:2] - moved[:1])
    with jax.default_matmul_precision("highest"):
        root = jnp.linalg.cholesky(scatter)
        every = jnp.concatenate([observed, moved]).T
        white = solve_triangular(root, every, lower=True)
        lengths = jnp.sqrt(jnp.sum(white[:, 1:] ** 2, axis=0))
    unexplained = jnp.square(jnp.diagonal(root)) / jnp.diagonal(scatter)
    # If Cholesky's method fails, all entries of `root` are NaN, and this is False.
    is_accurate = jnp.all(unexplained >= _LEAST_UNEXPLAINED)
    lengths = jnp.where(is_accurate & ~jnp.isnan(lengths), lengths, jnp.inf)
    return jnp.concatenate([jnp.nan_to_num(white[:, 0]), jnp.sort(lengths)])


def upper_p_values(low: np.ndarray, high: np.ndarray, numbers: int) -> np.ndarray:
    """Returns upper bounds of p-values for parameters whose `margins` are between `low` and `high`.

    There are R simulated releases and the observed release. If a release is one number, count how
    many of the R + 1 numbers are at or below the observed one, and how many are at or above it. Let
    d be the smaller count. Then the p-value is at most 2 d / (R + 1), even with ties.

    If a release has k numbers, the first k margins are the vector from the mean of the simulated
    releases to the observed release. Let u be its length. The other margins are the lengths of the
    vectors from this mean to the simulated releases. If the vector of a simulated release is
    shorter than (R - 1) / (R + 1) u / sqrt(1 + u^2 / (R + 1)), this release is more central than
    the observed one, and the p-value does not count it. The threshold follows from the formula of
    Sherman and Morrison, because `p_value` uses the mean and the scatter of all R + 1 releases.

    Args:
        low: the least margins, with any leading axes.
        high: the largest margins, of the same shape.
        numbers: k, how many numbers a release has.
    """
    if numbers == 1:
        points = low.shape[-1] + 1
        below, above = ((x <= 0).sum(axis=-1) + 1 for x in (low, -high))
        return np.minimum(1.0, 2 * np.minimum(below, above) / points)
    points = low.shape[-1] - numbers + 1
    nearest = np.clip(0, low[..., :numbers], high[..., :numbers])
    u = np.linalg.norm(nearest, axis=-1, keepdims=True)
    least = _ROUNDING * (points - 2) / points * u / np.sqrt(1 + u**2 / points)
    return (1 + (high[..., numbers:] >= least).sum(axis=-1)) / points


# This factor covers the rounding of float32, and the effect of `_LEAST_VARIANCE`.
_ROUNDING = 0.999


def _without_nan(points: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(points), jnp.inf, points)  # NaN counts as the largest value.


def _standardized(points: jax.Array) -> jax.Array:
    """Subtracts the medians, divides by the interquartile ranges, and clips to a finite range."""
    largest = jnp.finfo(points.dtype).max / 4
    finite = jnp.clip(points, -largest, largest)
    ordered = jnp.sort(finite, axis=0)
    count = len(points)
    places = [int(share * (count - 1)) for share in (0.5, 0.25, 0.75)]
    middle, low, high = (ordered[place : place + 1] for place in places)
    spread = jnp.where(high > low, high - low, ordered[-1:] - ordered[:1])
    spread = jnp.where(spread > 0, spread, 1)
    return jnp.clip((finite - middle) / spread, -_FURTHEST, _FURTHEST)


def _around_the_mean(points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns points minus their mean, and their covariance matrix, which is made invertible."""
    # Points are sorted, so that the sums do not depend on which of the points is the observed one.
    columns = lax.sort(tuple(points.T), num_keys=points.shape[1])
    ordered = jnp.stack(columns, axis=1)
    center = jnp.mean(ordered, axis=0, keepdims=True)
    away = ordered - center
    with jax.default_matmul_precision("highest"):
        scatter = jnp.mean(away[:, :, None] * away[:, None, :], axis=0)
    scale = jnp.diagonal(scatter)
    scatter = scatter + _LEAST_VARIANCE * jnp.diag(jnp.maximum(scale, _LEAST_VARIANCE))
    return points - center, scatter


Evaluate: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Computes p-values, shape (count,), and margins of points in [0, 1]^d, shape (count, d)."""

MOST_DIMS = 6
_UNITS = 2**22  # The corners of cells are multiples of 1 / _UNITS.
_FIRST = (32, 8, 4, 2, 2, 1)  # The number of initial cells along each axis, for 1 to 6 axes.
# A search evaluates about this many points in addition to those of the initial cells.
_POINTS = 3000
# At each step, for each end of each axis, the cells that reach farthest toward this end are split.
# At most this many cells are split for each end.
_CHOSEN = 16
_BATCH = 64
# Margins are evaluated at some points of a cell. The range of these margins is extended on both
# sides by this multiple of its length. All margins in the cell are assumed to be in the extended
# range.
_BEYOND = 0.5
# For each end of the set, an evaluated point of the set and an outer bound are known. The search
# ends if their distance is at most this fraction of the width of the set.
_NEAR = 1 / 256


class _Cells(NamedTuple):
    """Boxes in units of 1 / _UNITS, with an upper bound of the p-values in each."""

    lows: np.ndarray
    widths: np.ndarray
    bounds: np.ndarray

    def where(self, chosen: np.ndarray) -> "_Cells":
        return _Cells(*(x[chosen] for x in self))

    def and_others(self, others: "_Cells") -> "_Cells":
        return _Cells(*map(np.concatenate, zip(self, others, strict=True)))


class Search:
    """Finds the parts of the unit cube with large p-values, by splitting cells adaptively.

    A point *belongs* if its upper p-value exceeds alpha. The *places* of a cell are its corners,
    its middle, and the middles of its edges and faces. The *margins* of a point are the numbers
    that determine its upper p-value. Take the range from the least to the largest margin at the
    places of a cell, and extend the range on both sides by half of its length. The cell is left out
    only if the upper p-value is at most alpha for all margins in the extended range. Consider a
    margin that is a quadratic function along an edge of the cell. The extended range contains all
    its values on the edge.
    """

    def __init__(self, evaluate: Evaluate, alpha: float, dims: int, numbers: int = 1):
        self._evaluate, self._alpha, self._dims, self._numbers = evaluate, alpha, dims, numbers
        self._places: dict[tuple[int, ...], int] = {}
        # All evaluated points, in units of 1 / _UNITS, and their p-values and margins.
        self._found: list[np.ndarray] = []
        self._place = np.stack(np.unravel_index(np.arange(3**dims), (3,) * dims), axis=1)

    @property
    def points(self) -> np.ndarray:
        """Returns all points that were evaluated so far."""
        return self._found[0] / _UNITS

    @property
    def p_values(self) -> np.ndarray:
        """Returns the p-values of all `points`."""
        return self._found[1]

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the least and the largest coordinates of the cells that are not left out.

        Returns:
            Two arrays of shape (d,); NaN if all cells are left out.
        """
        cells = self._first()
        most = len(self._places) + _POINTS
        while True:
            cells = cells.where(cells.bounds > self._alpha)
            if not len(cells.lows):
                return np.full(self._dims, np.nan), np.full(self._dims, np.nan)
            reach = np.concatenate([-cells.lows, cells.lows + cells.widths], axis=1)
            outer = reach.max(axis=0)
            size = outer[: self._dims] + outer[self._dims :]
            near = np.tile(size * (_NEAR if self._dims > 1 else _NEAR**2), 2)
            beyond = np.where(self._can_split(cells)[:, None], reach - self._inner() - near, -1.0)
            # If no evaluated point is in the set, the cells with the largest bounds are split.
            beyond = np.where(np.isinf(beyond), cells.bounds[:, None], beyond)
            if not (beyond > 0).any() or len(self._places) >= most:
                return -outer[: self._dims] / _UNITS, outer[self._dims :] / _UNITS
            farthest = np.argsort(-beyond, axis=0)[:_CHOSEN]
            chosen = np.zeros(len(cells.lows), bool)
            for end in range(2 * self._dims):
                rows = farthest[:, end]
                chosen[rows[beyond[rows, end] > 0]] = True
            cells = cells.where(~chosen).and_others(self._split(cells.where(chosen)))

    def largest(self) -> float:
        """Returns an upper bound of the largest p-value in the cube."""
        cells = self._first()
        most = len(self._places) + _POINTS
        while True:
            best = float(self._upper_at_points().max())
            cells = cells.where(cells.bounds > best)
            is_open = self._can_split(cells)
            if not is_open.any() or len(self._places) >= most:
                return float(max(best, cells.bounds.max(initial=0.0)))
            chosen = np.zeros(len(cells.lows), bool)
            chosen[np.argsort(-np.where(is_open, cells.bounds, 0))[: 4 * _CHOSEN]] = True
            chosen &= is_open
            cells = cells.where(~chosen).and_others(self._split(cells.where(chosen)))

    def _first(self) -> _Cells:
        count = _FIRST[self._dims - 1]
        places = np.stack(np.unravel_index(np.arange(count**self._dims), (count,) * self._dims), 1)
        width = _UNITS // count
        return self._tested(places * width, np.full_like(places, width))

    def _can_split(self, cells: _Cells) -> np.ndarray:
        return np.asarray(cells.widths.max(axis=1) > 2)

    def _upper_at_points(self) -> np.ndarray:
        _, p_values, margins = self._found
        return np.maximum(upper_p_values(margins, margins, self._numbers), p_values)

    def _inner(self) -> np.ndarray:
        """Returns the negated minimum of each coordinate, and then the maximum of each coordinate.

        The minima and maxima are over the evaluated points whose upper p-value exceeds alpha.
        """
        inside = self._found[0][self._upper_at_points() > self._alpha]
        if not len(inside):
            return np.full(2 * self._dims, -np.inf)
        return np.concatenate([-inside.min(axis=0), inside.max(axis=0)])

    def _at_places(self, lows: np.ndarray, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns p-values and margins at 3^d points of each cell, with axes (cells, 3^d) first.

        The points are at the ends and in the middle of the cell along each axis.
        """
        places = lows[:, None] + widths[:, None] // 2 * self._place
        keys = [tuple(row) for row in places.reshape(-1, self._dims).tolist()]
        new = [key for key in dict.fromkeys(keys) if key not in self._places]
        if new:
            start = len(self._places)
            self._places.update((key, start + i) for i, key in enumerate(new))
            rows = np.array(new)
            found = [rows, *self._evaluate(rows / _UNITS)]
            together = zip(self._found, found, strict=True)
            self._found = list(map(np.concatenate, together)) if start else found
        rows = np.array([self._places[key] for key in keys]).reshape(places.shape[:2])
        _, p_values, margins = self._found
        return p_values[rows], margins[rows]

    def _tested(self, lows: np.ndarray, widths: np.ndarray) -> _Cells:
        """Computes an upper bound of the p-values in each cell, and returns the `_Cells`."""
        bounds: list[np.ndarray] = []
        for start in range(0, len(lows), _BATCH):
            part = slice(start, start + _BATCH)
            p_values, margins = self._at_places(lows[part], widths[part])
            low, high = margins.min(axis=1), margins.max(axis=1)
            # A margin is infinite if it could not be computed. Such a margin does not exclude the
            # cell.
            with np.errstate(invalid="ignore"):
                more = np.nan_to_num(_BEYOND * (high - low), posinf=np.inf)
            near = upper_p_values(low - more, high + more, self._numbers)
            bounds.append(np.maximum(near, p_values.max(axis=1)))
        return _Cells(lows, widths, np.concatenate(bounds))

    def _split(self, cells: _Cells) -> _Cells:
        """Halves each cell along the axis along which its margins change most."""
        _, margins = self._at_places(cells.lows, cells.widths)
        several = self._numbers if self._numbers > 1 else 0
        others = margins.shape[-1] - several
        weights = np.r_[np.ones(several), np.full(others, 1 / others)]
        changes = np.stack(
            [
                (np.abs(margins[:, side == 2] - margins[:, side == 0]) @ weights).mean(axis=1)
                for side in self._place.T
            ],
            axis=1,
        )
        changes = np.where(cells.widths > 2, changes, -1.0)
        # Among axes with equal changes, the longest axis is chosen.
        axis = np.argmax(changes + 1e-9 * cells.widths / _UNITS, axis=1)
        is_halved = np.arange(self._dims) == axis[:, None]
        widths = np.where(is_halved, cells.widths // 2, cells.widths)
        lows = np.concatenate([cells.lows, cells.lows + np.where(is_halved, widths, 0)])
        return self._tested(lows, np.concatenate([widths, widths]))
