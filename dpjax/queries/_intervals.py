"""Confidence intervals of private statistics, from intervals of their noisy sums or by simulation.

The distance of a noisy sum from the true sum is bounded by noise and rounding. An average of a
private number of records is a quotient of two noisy sums; its interval inverts a test of each
possible average (Fieller 1954). The extremes of another quotient or product of sums are at the ends
of the sums' intervals. If a number depends on k sums, it uses k intervals that are simultaneously
correct at the given confidence.

Other statistics use a parametric bootstrap. The released sums replace the true sums, and simulated
noise shows how far the statistic of noisy sums is from the statistic of the sums. This is valid if
the statistic is nearly linear over the range of the noise. These statistics come from eigenvectors
of a noisy matrix, so the noise must be small compared with the gaps between eigenvalues. If the
noise is not small, the interval has at least a half-width that the statistic provides.
"""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._types import PyTree, Value
from dpjax.mechanisms._noisy_arrays import OUTWARD_QUANTILE, as_floats, noise_bounds
from dpjax.queries._query import compiled
from dpjax.queries._second_moments import Moments, averages

# A bound on rounding errors in float32, relative to the largest magnitude of a record.
_FLOATS = 2.0**-21


@intervals_of("mean")
def _of_mean(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns an interval of an average of numbers that are clipped to [lower, upper].

    The release contains the count times half of the length of [lower, upper], and the sum of the
    differences from the middle of [lower, upper]. So their quotient is in [-1, 1].
    """
    lower, upper, n = facts["lower"], facts["upper"], measured["n"]
    middle, half = lower / 2 + upper / 2, upper / 2 - lower / 2
    together = facts["coordinates"] if simultaneous else 1
    if n is None:
        ratio = _ratio(measured["sums"], facts, (1 - confidence) / together)
    else:
        low, high = _sums(measured["sums"], facts, confidence, together)
        ratio = _quotient((low[..., 1:], high[..., 1:]), (n[..., None] * half,) * 2)
    spared = _FLOATS * max(abs(lower), abs(upper))
    first, last = (
        np.clip(middle + half * end + side, lower, upper).reshape(np.shape(value))
        for end, side in zip(ratio, (-spared, spared), strict=True)
    )
    return first, last


# The ratio r in `_ratio` is rounded up to a multiple of 1 / 64 before the quantile of |Y - r Z| is
# looked up.
_RATIOS = 64


def _ratio(sums: np.ndarray, facts: dict[str, Any], tail: float) -> Ends:
    """Returns the interval of the quotients r in [-1, 1] that a test on noisy sums does not reject.

    Here r is the quotient of a true sum and a true count. Let S and C be the noisy sum and count,
    and Y and Z their errors. For the true r, S - r C = Y - r Z. So r is kept if |S - r C| is at
    most a quantile of |Y - r Z|, which grows with |r|. The quantile is computed at an upper bound
    on |r|. Each step computes the interval of r that this quantile keeps, and so a new bound on
    |r|, which is no larger.
    """
    count, sums = as_floats(sums)[..., :1], as_floats(sums)[..., 1:]
    bounds = _bounds_of_differences(facts, tail)
    low, high = -np.ones_like(sums), np.ones_like(sums)
    # A noisy count of 0 or less gives no information about the quotient.
    unknown = count <= 0
    divisor = np.where(unknown, 1, count)

    def bound(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        largest = np.nan_to_num(np.maximum(np.abs(low), np.abs(high)), nan=1)
        return bounds[np.ceil(largest * _RATIOS).astype(int)]

    for _ in range(_RATIOS):
        before, reach = (low, high), bound(low, high)
        low = np.where(unknown, -1, np.clip((sums - reach) / divisor, -1, 1))
        high = np.where(unknown, 1, np.clip((sums + reach) / divisor, -1, 1))
        if np.array_equal(before, (low, high), equal_nan=True):
            break
    return low, high


def _bounds_of_differences(facts: dict[str, Any], tail: float) -> np.ndarray:
    """Returns bounds on |Y - r Z| for r = 0, 1/64, ..., 1, for error probability `tail`.

    Y and Z are the errors of two released sums by noise and rounding, in units of the sums.
    """
    ratios = np.arange(_RATIOS + 1) / _RATIOS
    if facts["noise"] == "gaussian":
        bound = -scipy.special.ndtri(tail / 2) * np.hypot(1, ratios)
    else:
        bound = _laplace_difference(ratios, tail)
    # The noise is continuous noise that is rounded to integers. The 0.5 covers this rounding.
    rounding = (facts["rounding"] + 0.5) * (1 + ratios)
    return OUTWARD_QUANTILE * facts["arrays"][0]["scale"] * bound + rounding


def _laplace_difference(ratios: np.ndarray, tail: float) -> np.ndarray:
    """Returns t with P(|Y - r Z| > t) = `tail`, for independent Y and Z with density exp(-|x|) / 2.

    The probability is (exp(-t) - r^2 exp(-t / r)) / (1 - r^2), and (1 + t / 2) exp(-t) for r = 1.
    """
    least, most = np.zeros_like(ratios), np.full_like(ratios, 2 * math.log(2 / tail))
    r = ratios[1:-1]
    for _ in range(100):
        t = (least + most) / 2
        inside = (np.exp(-t[1:-1]) - r**2 * np.exp(-t[1:-1] / r)) / (1 - r**2)
        beyond = np.concatenate([[np.exp(-t[0])], inside, [(1 + t[-1] / 2) * np.exp(-t[-1])]])
        least, most = np.where(beyond > tail, t, least), np.where(beyond > tail, most, t)
    return most


@intervals_of("moments")
def _of_moments(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns intervals of the mean and the covariance of vectors in a public ball.

    Numbers are in units of the ball's radius. A covariance is E[x y] - E[x] E[y].
    """
    del value
    private_n = measured["n"] is None

    def averages(parts: int) -> Ends:
        together = facts["coordinates"] if simultaneous else parts + private_n
        return _averages(measured, facts, confidence, together)

    mean = tuple(end[..., 0, 1:] for end in averages(1))
    across, alone = (_covariance(*averages(parts)) for parts in (3, 2))
    same = np.eye(mean[0].shape[-1], dtype=bool)
    # The variance of one coordinate depends on only two sums, so its interval is narrower than that
    # of a covariance. It is never negative.
    spread = [np.where(same, one, two) for one, two in zip(alone, across, strict=True)]
    spread[0] = np.where(same, np.maximum(spread[0], 0), spread[0])
    middle = np.asarray(facts["middle"])
    size = np.broadcast_to(facts["size"], middle.shape)  # An ellipsoid has a radius per axis.
    spared = _FLOATS * (np.abs(middle) + size)
    low, high = (
        _named(middle + size * one + side, np.outer(size, size) * two, facts["scalar"])
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
    """Returns the interval of quotients by a positive divisor, clipped to [-1, 1]."""
    low, high = over
    least, most = (np.maximum(end, np.finfo(float).tiny) for end in under)
    with np.errstate(over="ignore"):
        first, last = np.minimum(low / least, low / most), np.maximum(high / least, high / most)
    return np.clip(first, -1, 1), np.clip(last, -1, 1)


def _averages(measured: PyTree, facts: dict[str, Any], confidence: float, together: int) -> Ends:
    """Returns intervals of averages of z z^T, z = (1, x), from a released upper triangle."""
    low, high = _sums(measured["sums"], facts, confidence, together)
    size = 1 + len(facts["middle"])
    place = np.zeros((size, size), int)
    rows, columns = np.triu_indices(size)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows))
    n = measured["n"]
    count = (low[..., :1], high[..., :1]) if n is None else (n[..., None],) * 2
    # Records at the edge of the ball are shrunk by up to this fraction, so their products are
    # shrunk by up to twice this fraction.
    vectors = np.minimum(np.arange(size), 1)
    edge = facts["edge"] * np.add.outer(vectors, vectors)
    first, last = (end[..., place] for end in _quotient((low, high), count))
    center = facts["center"] * np.diag(vectors)  # Squares were released minus this center.
    return np.clip(first - edge + center, -1, 1), np.clip(last + edge + center, -1, 1)


def _covariance(low: np.ndarray, high: np.ndarray) -> Ends:
    corners = np.stack(
        [
            one[..., 0, 1:, None] * two[..., 0, None, 1:]
            for one, two in itertools.product((low, high), repeat=2)
        ]
    )
    largest, least = np.max(corners, axis=0), np.min(corners, axis=0)
    same = np.eye(corners.shape[-1], dtype=bool)
    crosses = low[..., 0, 1:] * high[..., 0, 1:] <= 0
    # On the diagonal both factors are the same number. The least square is 0 if the ends of the
    # interval have different signs. A product of two different ends is not a square, so it is not
    # used.
    squares = np.minimum(low[..., 0, 1:] ** 2, high[..., 0, 1:] ** 2)
    square = np.where(crosses, 0, squares)[..., None, :]
    least = np.where(same, square, least)
    first, last = low[..., 1:, 1:] - largest, high[..., 1:, 1:] - least
    return np.clip(first, -1, 1), np.clip(last, -1, 1)


class Statistic(NamedTuple):
    """A statistic of noisy averages whose confidence intervals are simulated.

    Attributes:
        of_moments: maps averages and public facts to the value of a release, and to the symmetric
            matrix whose eigenvectors it uses.
        least_reach: maps the eigenvalues of the released matrix, in ascending order, and bounds on
            their errors to the least half-width of each interval, for cases in which simulated
            intervals would be too short.
        largest: bounds on the magnitudes of the numbers.
    """

    of_moments: Callable[[Moments, dict[str, Any]], tuple[PyTree, jax.Array]]
    least_reach: Callable[[np.ndarray, np.ndarray, dict[str, Any]], PyTree]
    largest: PyTree


STATISTICS: dict[str, Statistic] = {}
# A simulated interval of an eigenvector is used only if the gap between its eigenvalue and the
# others is at least this many times the error of an eigenvalue. By Weyl's inequality, the noise can
# separate equal eigenvalues by at most twice the error.
CLEAR = 3
_DRAWS = 1999
_LARGEST_CONFIDENCE = 0.995


@intervals_of("bootstrap")
def _of_draws(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns the value, plus and minus a quantile of the distances of simulated values from it."""
    if confidence > _LARGEST_CONFIDENCE:
        raise ValueError(
            f"confidence must be at most {_LARGEST_CONFIDENCE} for a simulated interval, got"
            f" {confidence}"
        )
    statistic = STATISTICS[facts["statistic"]]
    draws, matrices = jax.tree.map(np.asarray, _draws(measured, facts))
    groups = measured["sums"].ndim - 1
    rank = math.ceil((_DRAWS + 1) * confidence) - 1

    def distance(draws: np.ndarray, value: np.ndarray) -> np.ndarray:
        return np.abs(_turned(draws[1:], value, groups) - value)

    errors = np.linalg.norm(matrices[1:] - matrices[0], 2, axis=(-2, -1))
    error = np.sort(errors, axis=0)[rank]
    least = statistic.least_reach(np.linalg.eigvalsh(matrices[0]), error, facts)
    distances = jax.tree.map(distance, draws, value)
    reach = jax.tree.map(lambda x, r: np.maximum(np.sort(x, axis=0)[rank], r), distances, least)
    if simultaneous:
        # Each distance is divided by the half-width of the interval of its number. The largest of
        # these ratios in each draw determines a factor for all half-widths.
        numbers = jax.tree.leaves((distances, errors)), jax.tree.leaves((reach, error))
        ratios = [np.divide(x, r, where=r > 0, out=0 * x) for x, r in zip(*numbers, strict=True)]
        flat = np.concatenate([x.reshape(_DRAWS, -1) for x in ratios], axis=1)
        factor = np.sort(flat.max(axis=1))[rank]
        reach = jax.tree.map(lambda r: r * factor, reach)
    low, high = jax.tree.map(np.subtract, value, reach), jax.tree.map(np.add, value, reach)
    largest = statistic.largest
    return (
        jax.tree.map(lambda x, end: np.maximum(x, -end), low, largest),
        jax.tree.map(np.minimum, high, largest),
    )


def _turned(draws: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """Flips simulated eigenvectors to agree with the value, because signs are arbitrary."""
    if value.ndim - groups < 2:
        return draws
    return draws * np.where(np.sum(draws * value, axis=-1, keepdims=True) < 0, -1, 1)


def _draws(measured: PyTree, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Returns the statistic and its matrix for the released sums and for simulated sums."""
    sums, n = np.asarray(measured["sums"], np.float64), measured["n"]
    if n is not None and sums.ndim > 1:
        raise ValueError(
            "an interval of this statistic cannot be simulated for a batch of releases: call "
            "interval() on each release separately"
        )
    scale = facts["arrays"][0]["scale"]
    # The sums are public, and serve as the seed, so that an interval is the same at every call. If
    # all releases used one seed, the errors of their simulations would be equal: all intervals
    # would be too short, or all too long.
    seed = hashlib.sha256(np.ascontiguousarray(sums).tobytes()).digest()
    generator = np.random.default_rng(list(seed))
    sampler = {"laplace": generator.laplace, "gaussian": generator.normal}[facts["noise"]]
    noise = scale * sampler(size=(_DRAWS, *sums.shape))
    noisy = np.concatenate([sums[None], sums + noise])
    statistic = _program(json.dumps(facts))
    # With groups, sums have an axis of groups, and n is None because the sizes of groups are
    # private.
    for _ in range(sums.ndim - 1):
        statistic = jax.vmap(statistic, (1, None), out_axes=1)
    return statistic(jnp.asarray(noisy, float), n)


@functools.lru_cache
def _program(text: str) -> Callable[[jax.Array, jax.Array | None], tuple[PyTree, jax.Array]]:
    """Compiles the statistic and its matrix as a function of noisy sums.

    `text` contains the facts in JSON.
    """
    facts = json.loads(text)
    statistic, unit = STATISTICS[facts["statistic"]], facts["unit"]
    noise = facts["arrays"][0]["scale"] * unit

    weight, left_out = facts.get("weight", 1.0), facts.get("left_out", 0)
    center = facts.get("center", 0.0)

    def of_row(sums: jax.Array, n: jax.Array | None) -> tuple[PyTree, jax.Array]:
        triangle = jnp.append(sums * unit, jnp.zeros(left_out))
        moments = averages(triangle, n, noise, weight=weight, center=center)
        return statistic.of_moments(moments, facts)

    return compiled(jax.vmap(of_row, (0, None)))
