"""Intervals of averages, variances and covariances, from intervals of noisy sums that hold at once.

A sum is within its noise and rounding of the truth. A quotient or a product of such sums lies
between its values at the corners. A number that k sums make takes intervals of which all k hold
with the confidence that is asked for.
"""

from typing import Any

import numpy as np

from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._types import PyTree, Value
from dpjax.mechanisms._noise_intervals import as_floats, noise_bounds

_FLOATS = 2.0**-21  # Relative to the largest record: what float32 rounds, more than once.


@intervals_of("mean")
def _of_mean(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """An average of numbers in [lower, upper]: the middle, plus a sum over a count.

    The count is in units of half of the interval, so the quotient is in [-1, 1].
    """
    lower, upper, n = facts["lower"], facts["upper"], measured["n"]
    middle, half = lower / 2 + upper / 2, upper / 2 - lower / 2
    together = facts["coordinates"] if simultaneous else 1 + (n is None)
    low, high = _sums(measured["sums"], facts, confidence, together)
    count = (low[..., :1], high[..., :1]) if n is None else (n[..., None] * half,) * 2
    ratio = _quotient((low[..., 1:], high[..., 1:]), count)
    spared = _FLOATS * max(abs(lower), abs(upper))
    first, last = (
        np.clip(middle + half * end + side, lower, upper).reshape(np.shape(value))
        for end, side in zip(ratio, (-spared, spared), strict=True)
    )
    return first, last


@intervals_of("moments")
def _of_moments(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """An average, and a variance or covariance, of vectors in a public ball.

    In units of its radius, a covariance is E[x y] - E[x] E[y].
    """
    del value
    private_n = measured["n"] is None

    def averages(parts: int) -> Ends:
        together = facts["coordinates"] if simultaneous else parts + private_n
        return _averages(measured, facts, confidence, together)

    mean = tuple(end[..., 0, 1:] for end in averages(1))
    across, alone = (_covariance(*averages(parts)) for parts in (3, 2))
    same = np.eye(mean[0].shape[-1], dtype=bool)
    # The variance of one coordinate is made of two sums, and it is not negative.
    spread = [np.where(same, one, two) for one, two in zip(alone, across, strict=True)]
    spread[0] = np.where(same, np.maximum(spread[0], 0), spread[0])
    middle, size = np.asarray(facts["middle"]), facts["size"]
    spared = _FLOATS * (np.abs(middle) + size)
    low, high = (
        _named(middle + size * one + side, size**2 * two, facts["scalar"])
        for one, two, side in zip(mean, spread, (-spared, spared), strict=True)
    )
    return low, high


def _named(mean: np.ndarray, spread: np.ndarray, scalar: bool) -> PyTree:
    if scalar:
        return {"mean": mean[..., 0], "variance": spread[..., 0, 0]}
    return {"mean": mean, "covariance": spread}


def _sums(sums: np.ndarray, facts: dict[str, Any], confidence: float, together: int) -> Ends:
    (bound,) = noise_bounds(facts, confidence, together)
    reach = bound + facts["rounding"]
    return (as_floats(sums) - reach) * facts["unit"], (as_floats(sums) + reach) * facts["unit"]


def _quotient(over: Ends, under: Ends) -> Ends:
    """The quotients of two intervals that are in [-1, 1], where the divisor is positive."""
    low, high = over
    least, most = (np.maximum(end, np.finfo(float).tiny) for end in under)
    with np.errstate(over="ignore"):
        first, last = np.minimum(low / least, low / most), np.maximum(high / least, high / most)
    return np.clip(first, -1, 1), np.clip(last, -1, 1)


def _averages(measured: PyTree, facts: dict[str, Any], confidence: float, together: int) -> Ends:
    """Averages of z z^T with z = (1, x), from the upper triangle of the sum."""
    low, high = _sums(measured["sums"], facts, confidence, together)
    size = 1 + len(facts["middle"])
    place = np.zeros((size, size), int)
    rows, columns = np.triu_indices(size)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows))
    n = measured["n"]
    count = (low[..., :1], high[..., :1]) if n is None else (n[..., None],) * 2
    # Records at the edge of the ball are scaled into it by this part, products of two twice.
    vectors = np.minimum(np.arange(size), 1)
    edge = facts["edge"] * np.add.outer(vectors, vectors)
    first, last = (end[..., place] for end in _quotient((low, high), count))
    return np.clip(first - edge, -1, 1), np.clip(last + edge, -1, 1)


def _covariance(low: np.ndarray, high: np.ndarray) -> Ends:
    corners = np.stack(
        [
            one[..., 0, 1:, None] * two[..., 0, None, 1:]
            for one in (low, high)
            for two in (low, high)
        ]
    )
    largest, least = np.max(corners, axis=0), np.min(corners, axis=0)
    same = np.eye(corners.shape[-1], dtype=bool)
    crosses = low[..., 0, 1:] * high[..., 0, 1:] <= 0
    # A square is 0 between two ends of different signs; two different ends are no square.
    squares = np.minimum(low[..., 0, 1:] ** 2, high[..., 0, 1:] ** 2)
    square = np.where(crosses, 0, squares)[..., None, :]
    least = np.where(same, square, least)
    first, last = low[..., 1:, 1:] - largest, high[..., 1:, 1:] - least
    return np.clip(first, -1, 1), np.clip(last, -1, 1)
