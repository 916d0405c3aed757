"""Releases noisy sums, and computes a private statistic of them with its confidence interval.

The distance of a noisy sum from the true sum is bounded by noise and rounding. An average of a
private number of records is a quotient of two noisy sums; its interval inverts a test of each
possible average (Fieller 1954). The interval of a covariance inverts such a test for all averages
in intervals of their own, which hold with a larger probability.

Other statistics use a parametric bootstrap. The released sums replace the true sums, and simulated
noise shows how far the statistic of noisy sums is from the statistic of the sums. This is valid if
the statistic is nearly linear over the range of the noise. These statistics come from eigenvectors
of a noisy matrix, so the noise must be small compared with the gaps between eigenvalues. If the
noise is not small, the interval has at least a half-width that the statistic provides.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, Ends, intervals_of
from dpjax._core._columns import check_numbers
from dpjax._core._records import Parts, check_padded
from dpjax._core._types import Database, Key, PyTree, Scalar, Value
from dpjax._core._values import NeighboringRelation, Release
from dpjax._tracing._programs import Unchanging
from dpjax.accounting._composition import post_process
from dpjax.mechanisms._additive import AdditiveMechanism, gaussian, laplace
from dpjax.mechanisms._noise_intervals import OUTWARD_QUANTILE, as_floats, noise_bounds
from dpjax.queries._groups import By, each_group, inside_groups, of_complete
from dpjax.queries._padded_records import may_miss, number_of_records, records_and_slots
from dpjax.queries._people import RowsOfPeople, groups_alone, integers_by
from dpjax.queries._query import IntegerQuery, compiled
from dpjax.queries._second_moments import Moments, combinations_of, moments_of
from dpjax.release._privatize import privatize

# Bounds on rounding errors in float32 and float64, relative to the largest magnitude of a record.
_FLOATS, _LONG_FLOATS = 2.0**-21, 2.0**-50


@intervals_of("mean")
def _of_mean(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns an interval of an average of numbers that are clipped to [lower, upper].

    Let m be the middle of [lower, upper], and h half of its length. Let C be h times the count of
    numbers, and S the sum of (number - m). Then the average is m + h S / C, and S / C is in
    [-1, 1]. The release contains either C and S, or the sum U of (upper - number) and the sum L of
    (number - lower). In the second case, C = (L + U) / 2 and S = (L - U) / 2.
    """
    lower, upper = facts["lower"], facts["upper"]
    middle, half = lower / 2 + upper / 2, upper / 2 - lower / 2
    rows = _FROM_ENDS if facts["from_ends"] else np.eye(measured["sums"].shape[-1])
    tail = (1 - confidence) / (_numbers(rows, facts) if simultaneous else 1)
    ratio = _means(measured, rows, half, facts, tail)
    is_long = np.result_type(value) == np.float64
    spared = (_LONG_FLOATS if is_long else _FLOATS) * max(abs(lower), abs(upper))
    first, last = (
        np.clip(middle + half * end + side, lower, upper).reshape(np.shape(value))
        for end, side in zip(ratio, (-spared, spared), strict=True)
    )
    return first, last


# Let U be the sum of the numbers' distances from the upper end, and let L be the sum of their
# distances from the lower end. This matrix maps (U, L) to the scaled count, (U + L) / 2, and to the
# sum of the differences from the middle, (L - U) / 2.
_FROM_ENDS = np.array([[0.5, 0.5], [-0.5, 0.5]])


def _numbers(rows: np.ndarray, facts: dict[str, Any]) -> int:
    """Returns how many numbers have an interval: in each group, the number of rows minus 1.

    The first row of a group counts its records, and has no interval.
    """
    sums, released = rows.shape
    return facts["coordinates"] // released * (sums - 1)


def _means(
    measured: PyTree, rows: np.ndarray, one: float, facts: dict[str, Any], tail: float
) -> Ends:
    """Returns intervals of averages in [-1, 1], each with error probability `tail`.

    The matrix `rows` maps the released numbers to a scaled count and to sums. Each record adds
    `one` to this count. If the number of records is public, the first released numbers are the
    count and the sums themselves.
    """
    sums, n = as_floats(measured["sums"]), measured["n"]
    if n is None:
        return _ratio(sums @ rows.T, rows, facts, tail)
    (bound,) = noise_bounds(facts, 1 - tail, 1)
    reach, divisor = (bound + facts["rounding"]) * facts["unit"], n[..., None] * one
    sums = sums[..., 1 : len(rows)] * facts["unit"]
    return _quotient((sums - reach, sums + reach), (divisor, divisor))


# The ratio r in `_ratio` is rounded up to a multiple of 1 / 64 before the quantile of |Y - r Z| is
# looked up.
_RATIOS = 64


def _ratio(sums: np.ndarray, rows: np.ndarray, facts: dict[str, Any], tail: float) -> Ends:
    """Returns the interval of the quotients r in [-1, 1] that a test on noisy sums does not reject.

    Here r is the quotient of a true sum and a true count. Let S and C be the noisy sum and count,
    and Y and Z their errors. For the true r, S - r C = Y - r Z. So r is kept if |S - r C| is at
    most a quantile of |Y - r Z|. This quantile grows with |r|, so it is computed at an upper bound
    on |r|. Each step computes the interval of all r that are kept. The interval gives the next
    upper bound on |r|, which is at most the previous one.
    """
    count, sums = sums[..., :1], sums[..., 1:]
    bounds = _bounds_of_differences(rows, facts, tail)
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


def _bounds_of_differences(rows: np.ndarray, facts: dict[str, Any], tail: float) -> np.ndarray:
    """Returns bounds on |Y - r Z| for r = 0, 1/64, ..., 1, for error probability `tail`.

    Y is the error of a noisy sum, Z is the error of a noisy count, and r is the quotient of the
    true sum and the true count. The errors come from noise and rounding, and are in units of the
    released numbers. The matrix `rows` maps the released numbers to the count and the sums. The
    bound is the same for each sum, and for r and -r.
    """
    ratios = np.arange(_RATIOS + 1) / _RATIOS
    count, first = rows[:2, np.any(rows[:2], axis=0)]
    weights = np.abs(first - ratios[:, None] * count)
    # For a low confidence, a larger weight may have a smaller quantile.
    return np.maximum.accumulate(_bounds_of_sums(weights, facts, tail))


def _bounds_of_sums(weights: np.ndarray, facts: dict[str, Any], tail: float) -> np.ndarray:
    """Returns bounds on the errors of weighted sums, in units of the released numbers.

    The errors are those of noise and rounding. Each bound fails with probability at most `tail`.
    The weights are along the last axis, and at least 0.
    """
    if facts["noise"] == "gaussian":
        bound = -scipy.special.ndtri(tail / 2) * np.linalg.norm(weights, axis=-1)
    else:
        few = weights.shape[-1] <= _FEW
        bound = (_laplace_sum if few else _laplace_sum_of_many)(weights, tail)
    # The noise is continuous noise that is rounded to integers. The 0.5 covers this rounding.
    rounding = (facts["rounding"] + 0.5) * weights.sum(axis=-1)
    return OUTWARD_QUANTILE * facts["arrays"][0]["scale"] * bound + rounding


# Weights are increased until each is at least `_APART` times the next smaller one, and the least is
# at least `_LEAST_WEIGHT` times the largest.
_APART, _LEAST_WEIGHT = 1.01, 1e-3
_FEW = 4  # For more weights, differences of the a_i in `_laplace_sum` lose digits.


def _laplace_sum(weights: np.ndarray, tail: float) -> np.ndarray:
    """Returns t with P(|sum of w_i L_i| > t) <= `tail`, where each L_i has density exp(-|x|) / 2.

    If all weights differ, the probability is the sum of a_i exp(-t / w_i), where a_i is the product
    of w_i^2 / (w_i^2 - w_j^2) over all other j. The probability grows with each weight.
    """
    weights = np.sort(weights, axis=-1)
    weights[..., 0] = np.maximum(weights[..., 0], _LEAST_WEIGHT * weights[..., -1])
    count = weights.shape[-1]
    for i in range(1, count):
        weights[..., i] = np.maximum(weights[..., i], _APART * weights[..., i - 1])
    squares = weights**2
    apart = squares[..., :, None] - squares[..., None, :] + np.eye(count)
    factors = np.where(np.eye(count, dtype=bool), 1, squares[..., :, None] / apart)
    coefficients = np.prod(factors, axis=-1)
    least = np.zeros(weights.shape[:-1])
    most = weights.sum(axis=-1) * math.log(count / tail)
    for _ in range(60):
        t = (least + most) / 2
        beyond = np.sum(coefficients * np.exp(-t[..., None] / weights), axis=-1)
        least, most = np.where(beyond > tail, t, least), np.where(beyond > tail, most, t)
    return most


# The integral in `_laplace_sum_of_many` goes from 0 to `_NODES` / 10, in steps of 1 / 10. For
# weights of norm 1, a quantile is rounded up to the next number in `_QUANTILES`.
_NODES = 256
_QUANTILES = np.geomspace(0.05, 25, 600)


def _laplace_sum_of_many(weights: np.ndarray, tail: float) -> np.ndarray:
    """Returns the same as `_laplace_sum`, for many weights. No weight may dominate the others.

    The characteristic function f(u) is the product of 1 / (1 + w_i^2 u^2). By Gil-Pelaez (1951),
    P(|sum of w_i L_i| > t) = 1 - 2 / pi times the integral of sin(u t) f(u) / u over u > 0. The
    midpoint rule with steps of 1/10 changes this probability by at most P(|sum| > 20 pi - t). The
    integral ends after the last point u. As f decays at least as fast as u^-2, the rest of the
    integral changes the probability by at most f(u) / pi.
    """
    lengths = np.maximum(np.linalg.norm(weights, axis=-1), np.finfo(float).tiny)
    squares = (weights / lengths[..., None]).reshape(-1, weights.shape[-1]) ** 2
    nodes = (np.arange(_NODES) + 0.5) / 10
    logarithms = np.zeros((len(squares), _NODES))
    for square in squares.T:
        logarithms -= np.log1p(square[:, None] * nodes**2)
    values = np.exp(logarithms)
    within = values @ (np.sin(nodes[:, None] * _QUANTILES) / (5 * np.pi * nodes[:, None]))
    is_bound = 1 - within + values[:, -1:] / np.pi <= tail
    found = np.where(is_bound.any(axis=-1), _QUANTILES[is_bound.argmax(axis=-1)], np.inf)
    most = weights.sum(axis=-1) * math.log(weights.shape[-1] / tail)
    return np.minimum(found.reshape(lengths.shape) * lengths, most)


@intervals_of("moments")
def _of_moments(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns intervals of the mean and the covariance of vectors in a public ball.

    Numbers are in units of the ball's radius.
    """
    rows = combinations_of(facts, measured["sums"].shape[-1])
    tail = (1 - confidence) / (_numbers(rows, facts) if simultaneous else 1)
    middle = np.asarray(facts["middle"])
    mean = _means(measured, rows[: 1 + len(middle)], 1.0, facts, tail)
    spread = _covariances(measured, rows, facts, tail)
    size = np.broadcast_to(facts["size"], middle.shape)  # An ellipsoid has a radius per axis.
    # Records at the edge of the ball are shrunk by up to this fraction.
    edge = facts["edge"]
    is_long = np.result_type(*jax.tree.leaves(value)) == np.float64
    spared = (_LONG_FLOATS if is_long else _FLOATS) * (np.abs(middle) + size) + edge * size
    most = size + 2.0**-50 * (np.abs(middle) + size)
    # A record is converted to a float before the middle is subtracted. This may round it, for
    # example if it is an integer above 2^53. `rounded` allows for this error, in units of `size`.
    rounded = (2.0**-52 if is_long else 2.0**-23) * np.abs(middle) / size
    off = 4 * edge + rounded[:, None] + rounded + np.outer(rounded, rounded)
    low, high = (
        _named(
            middle + np.clip(size * one + side * spared, -most, most),
            np.outer(size, size) * np.clip(two + side * off, -1, 1),
            facts["scalar"],
        )
        for one, two, side in zip(mean, spread, (-1, 1), strict=True)
    )
    return low, high


def _named(mean: np.ndarray, spread: np.ndarray, scalar: bool) -> PyTree:
    if scalar:
        return {"mean": mean[..., 0], "variance": spread[..., 0, 0]}
    return {"mean": mean, "covariance": spread}


def _quotient(over: Ends, under: Ends) -> Ends:
    """Returns the interval of quotients by a positive divisor, clipped to [-1, 1]."""
    low, high = over
    least, most = (np.maximum(end, np.finfo(float).tiny) for end in under)
    with np.errstate(over="ignore"):
        first, last = np.minimum(low / least, low / most), np.maximum(high / least, high / most)
    return np.clip(first, -1, 1), np.clip(last, -1, 1)


# The interval of a covariance is computed from the intervals of two averages. These two together
# use this fraction of the error probability of the covariance's interval.
_OF_MEANS = 0.1
_STEPS = 3  # Further steps would hardly make an interval narrower.


def _covariances(measured: PyTree, rows: np.ndarray, facts: dict[str, Any], tail: float) -> Ends:
    """Returns intervals of the covariances of the coordinates of records.

    Let z be a 1 followed by the coordinates of a record. The matrix `rows` maps the released
    numbers to the upper triangle of the sum of z z^T. Let a and b be the true averages of x and y,
    c their covariance, and n the number of records. Then sum(x y) - a sum(y) - b sum(x) +
    (a b - c) n = 0. If the released sums replace the true ones, the left side is not 0: it is a
    weighted sum of their errors. The interval contains each c with the following property: for some
    a and b in their intervals, the magnitude of the left side is at most a bound on this error. The
    bound depends on upper bounds on the weights of the released numbers. Each weight is linear in
    a, b and a b - c. Each step computes an interval of c. This interval gives new bounds on the
    weights.
    """
    d, n = len(facts["middle"]), measured["n"]
    i, j = np.triu_indices(1 + d)
    parts = np.zeros((1 + d, 1 + d, rows.shape[1]))
    parts[i, j] = parts[j, i] = rows
    triangle = np.tensordot(as_floats(measured["sums"]), parts, (-1, -1))
    count = triangle[..., :1, :1] if n is None else n[..., None, None] / facts["unit"]
    same = np.eye(d, dtype=bool)
    shift = facts.get("center", 0.0) * same
    products, first = triangle[..., 1:, 1:] + shift * count, triangle[..., 0, 1:]
    ends = _means(measured, rows[: 1 + d], 1.0, facts, tail * _OF_MEANS / 2)

    def excess(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = a[..., :, None], b[..., None, :]
        return products - a * first[..., None, :] - b * first[..., :, None] + a * b * count

    corners = np.stack([excess(a, b) for a, b in itertools.product(ends, repeat=2)])
    least, most = corners.min(axis=0), corners.max(axis=0)
    # A variance is a covariance of x with itself, so a = b.
    inner = np.clip(first / np.where(count > 0, count, 1)[..., 0], *ends)
    least = np.where(same, excess(inner, inner), least)
    most = np.where(same, np.maximum(corners[0], corners[-1]), most)

    if n is not None:
        parts[0, 0] = 0  # A public number has no error.
    of_product, of_y, of_x, of_count = _of_few(
        parts[1:, 1:], parts[None, 0, 1:], parts[0, 1:, None], parts[None, :1, 0]
    )
    widest = np.where(same, 0.0, -1.0) + 0 * least, np.ones_like(least)
    low, high = widest
    for _ in range(_STEPS):
        weights = np.zeros(())
        for a, b, c in itertools.product(ends, ends, (low, high)):
            a, b = a[..., :, None, None], b[..., None, :, None]
            last = a * b + (shift - c)[..., None]
            weight = of_product - a * of_y - b * of_x + last * of_count
            weights = np.maximum(weights, np.abs(weight))
        reach = _bounds_of_sums(weights, facts, tail * (1 - _OF_MEANS))
        low, high = _quotient((least - reach, most + reach), (count, count))
        # A noisy count of 0 or less gives no information.
        low = np.where(count > 0, np.maximum(low, widest[0]), widest[0])
        high = np.where(count > 0, high, 1.0)
    return low, high


def _of_few(*parts: np.ndarray) -> list[np.ndarray]:
    """Removes released numbers that no part uses.

    Each part has the weights of the released numbers along its last axis. Equally many weights are
    kept in all places of the other axes. So some unused numbers may remain.
    """
    together = np.broadcast_arrays(*parts)
    unused = ~np.any(together, axis=0)
    order = np.argsort(unused, axis=-1, kind="stable")[..., : (~unused).sum(axis=-1).max()]
    return [np.take_along_axis(part, order, axis=-1) for part in together]


class Statistic(NamedTuple):
    """A statistic of noisy averages whose confidence intervals are simulated.

    Attributes:
        of_moments: maps averages and public facts to the value of a release, and to a symmetric
            matrix from which this value is computed.
        least_reach: maps the eigenvalues of the released matrix, in ascending order, and a bound on
            their errors, to a least half-width for each interval. Simulated intervals that are
            shorter are widened to it.
        largest: bounds on the magnitudes of the numbers.
        relative: whether matrices are converted, before `least_reach`, to coordinates in which the
            released matrix is the identity. Then the units and bounds of columns do not matter.
    """

    of_moments: Callable[[Moments, dict[str, Any]], tuple[PyTree, jax.Array]]
    least_reach: Callable[[np.ndarray, np.ndarray, dict[str, Any]], PyTree] = lambda *_: 0.0
    largest: PyTree = np.inf
    relative: bool = False


STATISTICS: dict[str, Statistic] = {}
# A simulated interval of an eigenvector is used only if the gap between its eigenvalue and the
# others is at least this many times the error of an eigenvalue. By Weyl's inequality, the noise can
# separate equal eigenvalues by at most twice the error.
CLEAR = 3
# If a statistic divides by a matrix A, its simulated interval is used only if, for every vector u,
# u^T A u is at least this many times the error of u^T A u. For variances, A is diagonal.
CLEAR_OF_ITSELF = 2
_DRAWS = 1999
_LARGEST_CONFIDENCE = 0.995


@intervals_of("bootstrap")
def _of_draws(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns intervals around the value, from a quantile of its distances to simulated values."""
    check_simulated(confidence)
    statistic = STATISTICS[facts["statistic"]]
    draws, matrices = jax.tree.map(np.asarray, draws_of(measured, facts))
    groups = measured["sums"].ndim - 1
    rank = math.ceil((_DRAWS + 1) * confidence) - 1

    def distance(draws: np.ndarray, value: np.ndarray) -> np.ndarray:
        return np.abs(_turned(draws[1:], value, groups) - value)

    matrices = _whitened(matrices) if statistic.relative else matrices
    errors = np.linalg.norm(matrices[1:] - matrices[0], 2, axis=(-2, -1))
    error = np.sort(errors, axis=0)[rank]
    least = statistic.least_reach(np.linalg.eigvalsh(matrices[0]), error, facts)
    distances = jax.tree.map(distance, draws, value)
    reach = jax.tree.map(lambda x, r: np.maximum(np.sort(x, axis=0)[rank], r), distances, least)
    if simultaneous:
        # In each draw, the distance between a released number and its drawn counterpart is divided
        # by the half-width of the released number's interval. The factor for all half-widths is a
        # quantile, over the draws, of the largest of these ratios.
        numbers = jax.tree.leaves((distances, errors)), jax.tree.leaves((reach, error))
        ratios = [np.divide(x, r, where=r > 0, out=0 * x) for x, r in zip(*numbers, strict=True)]
        flat = np.concatenate([x.reshape(_DRAWS, -1) for x in ratios], axis=1)
        factor = np.sort(flat.max(axis=1))[rank]
        reach = jax.tree.map(lambda r: r * factor, reach)
    low, high = jax.tree.map(np.subtract, value, reach), jax.tree.map(np.add, value, reach)
    low = jax.tree.map(lambda x, end: np.maximum(x, -end), low, statistic.largest)
    return low, jax.tree.map(np.minimum, high, statistic.largest)


def _whitened(matrices: np.ndarray) -> np.ndarray:
    """Returns the matrices in coordinates in which the first of them is the identity.

    Noise may make an eigenvalue of the first matrix negative or zero. Then the corresponding
    diagonal entry of the converted first matrix is 0 instead of 1.
    """
    matrices = matrices.astype(np.float64)
    values, vectors = np.linalg.eigh(matrices[0])
    sizes = np.where(values > 0, 1 / np.sqrt(np.where(values > 0, values, 1)), 0)
    axes = vectors * sizes[..., None, :]
    return np.swapaxes(axes, -1, -2) @ matrices @ axes


def _turned(draws: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """Flips simulated eigenvectors to agree with the value, because signs are arbitrary."""
    if value.ndim - groups < 2:
        return draws
    return draws * np.where(np.sum(draws * value, axis=-1, keepdims=True) < 0, -1, 1)


def check_simulated(confidence: float) -> None:
    """Raises an error if a simulation has too few draws for this confidence."""
    if confidence > _LARGEST_CONFIDENCE:
        raise ValueError(
            f"confidence must be at most {_LARGEST_CONFIDENCE} for a simulated interval, got"
            f" {confidence}"
        )


def draws_of(measured: PyTree, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Returns the results of `Statistic.of_moments` for the released and for simulated sums.

    They have a leading axis: first the result for the released sums, then one for each simulation.
    """
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
    return statistic(jax.device_put(noisy.astype(jnp.result_type(float))), n)


@functools.lru_cache
def _program(text: str) -> Callable[[jax.Array, jax.Array | None], tuple[PyTree, jax.Array]]:
    """Compiles `Statistic.of_moments` as a function of noisy sums.

    `text` is JSON with the public facts about the release.
    """
    facts = json.loads(text)
    statistic, unit = STATISTICS[facts["statistic"]], facts["unit"]
    noise = facts["arrays"][0]["scale"] * unit

    def of_row(sums: jax.Array, n: jax.Array | None) -> tuple[PyTree, jax.Array]:
        return statistic.of_moments(moments_of(sums * unit, n, noise, facts), facts)

    return compiled(jax.vmap(of_row, (0, None)))


def slots_of(database: Database, relation: NeighboringRelation) -> int:
    """Returns the public number of slots: the number of records n, unless n is private."""
    is_private = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if is_private and not isinstance(database, Parts):
        check_padded(database)
    return records_and_slots(database)[1]


def shape_of_record(
    database: Database, *wanted: Literal["(n,)", "(n, d)"], by: By | RowsOfPeople | None = None
) -> tuple[int, ...]:
    """Returns the shape of a record. Refuses a database that is not one array of a wanted shape.

    With `by`, the database also contains the columns that define groups.
    """
    records = inside_groups(records_and_slots(database)[0], groups_alone(by))
    shapes = {"(n,)": (None,), "(n, d)": (None, None)}
    name = "database, apart from the columns of groups," if by else "database"
    check_numbers(name, records, *(shapes[x] for x in wanted))
    return records.shape[1:]


class Terms(NamedTuple):
    """The arguments that a user passes to a private statistic and that its release needs."""

    epsilon: float
    delta: float | None
    relation: NeighboringRelation
    name: str | None
    by: By | RowsOfPeople | None = None
    drops: bool = False  # Whether records with missing numbers are dropped.


def _private(
    query: IntegerQuery,
    what: str,
    epsilon: float,
    delta: float | None,
    relation: NeighboringRelation,
) -> tuple[AdditiveMechanism, Callable[..., Release]]:
    """Returns the mechanism for a query, and the private function made from both."""
    if delta is None:
        mechanism = laplace(query.sensitivity("l1", relation=relation), epsilon)
    else:
        mechanism = gaussian(query.sensitivity("l2", relation=relation), epsilon, delta)
    return mechanism, privatize(Unchanging(what, query), mechanism)


# This function is cached so that equal queries are prepared only once. It does not depend on a
# database.
_kept_private = functools.lru_cache(maxsize=64, typed=True)(_private)


def released(
    key: Key,
    database: Database,
    make_query: Callable[[int], IntegerQuery],
    finish: Callable[[IntegerQuery, jax.Array, jax.Array | None, Scalar], Value],
    *,
    terms: Terms,
    what: str,
    kind: str,
    facts: dict[str, object],
) -> Release:
    """Releases a statistic that is computed from one noisy query. Ledgers list it as `what`.

    `make_query` maps the number of slots to the query. `finish` maps the query, its noisy value,
    the number of records n (None if it is private) and the noise scale to the statistic. With
    groups, `finish` is called for each group. `kind` and the public facts determine how intervals
    are computed.
    """
    relation, by = terms.relation, groups_alone(terms.by)
    query = make_query(slots_of(database, relation))
    asked = query
    if drops := terms.drops and may_miss(inside_groups(records_and_slots(database)[0], by)):
        asked = of_complete(asked)
    asked = integers_by(asked, terms.by)
    known = isinstance(terms.epsilon, (int, float)) and isinstance(terms.delta, float | None)
    private = _kept_private if known and not _checks.is_staging() else _private
    mechanism, ask = private(asked, what, terms.epsilon, terms.delta, relation)
    n = None
    # A replaced record may change its group or have a missing number, so the sizes of groups are
    # private.
    if relation is NeighboringRelation.REPLACE_ONE and not by and not drops:
        n = number_of_records(database)

    release = ask(key, database, name=terms.name)
    statistic = each_group(lambda value: finish(query, value, n, mechanism.scale), by)
    finished = post_process(release, statistic)
    if release.accuracy.kind != "noise":
        return finished
    about = {**release.accuracy.facts, **facts, "unit": query.unit, "rounding": query.rounding}
    accuracy = Accuracy.of(kind, about, {"sums": release.value, "n": n})
    return dataclasses.replace(finished, accuracy=accuracy)
