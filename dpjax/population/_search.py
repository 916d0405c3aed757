"""Searches a box for the points whose p-value is above a level."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

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
