"""Private quantiles of numbers between public bounds, each with a confidence interval."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, Ends, intervals_of
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import NeighboringRelation, Release
from dpjax._tracing._programs import Unchanging
from dpjax.queries._counts import histogram_query
from dpjax.queries._groups import By, groups_of, of_complete
from dpjax.queries._padded_records import drops_missing
from dpjax.queries._people import groups_alone, integers_by
from dpjax.queries._private_release import shape_of_record, slots_of
from dpjax.queries._query import IntegerQuery
from dpjax.queries._rank_search import Ranks, RankSearch, rank_search, thresholds
from dpjax.release._privatize import PrivateFunction, privatize
from dpjax.targets._clamping import check_interval
from dpjax.targets._summaries import exact_probability

# The most cells of the histogram, for one group and for all groups together.
_MOST_CELLS, _MOST_OF_GROUPS = 2**16, 2**22
# If the wanted number of cells is between 2^12 and 2^14, at most 2^12 cells are used. More cells
# need a larger program to draw their noise, and the gain in accuracy is too small to justify it.
_USUAL_CELLS = 2**12
# The search looks for quantiles whose rank differs from the lowest and highest rank by at least
# this many noise scales. This distance is limited to a quarter of all records.
_FROM_END, _MOST_FROM_END = 4, Fraction(1, 4)
# Records are counted between thresholds around a selected edge. The nearest thresholds work best if
# the density of records near the edge is `_DENSEST` times the average density. Farther thresholds
# work best for lower densities.
_DENSEST = 8
_TRUSTED = 0.8  # The confidence of the intervals to which estimates are clipped.
# A bound on rounding errors in float32, as a fraction of max(|lower|, |upper|).
_FLOATS = 2.0**-21


def private_quantiles(
    key: Key,
    database: Database,
    probabilities: float | Fraction | Sequence[float | Fraction],
    *,
    lower: float,
    upper: float,
    epsilon: float,
    relation: NeighboringRelation | None = None,
    name: str | None = None,
    by: By | None = None,
    missing: Literal["drop", "lower"] = "drop",
) -> Release:
    """Quantiles of numbers that are clamped to public bounds, each with an interval.

    First, exponential mechanisms find the quantiles on a fine grid: the middle quantile, then those
    on each side of it. This costs half of epsilon for one quantile, and a third for several. A
    record affects only one search at each level of this recursion, so epsilon is split by the
    number of levels, not by the number of quantiles. The rest of epsilon pays for counting the
    records between thresholds around the numbers that were found. These counts correct the numbers
    and give the intervals.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n,); under add-or-remove-one a `PaddedRecords` of such an
            array.
        probabilities: one or several, each from 0 to 1, in any order. 0 is the minimum and 1 the
            maximum. A float represents the decimal that it prints.
        lower: a finite number, public.
        upper: a finite number above `lower`, public.
        epsilon: the epsilon of all quantiles together.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for every group, as for `private_mean`.
        missing: "drop" leaves out a record with a missing number (NaN). "lower" replaces a missing
            number by `lower`.

    Returns:
        A `Release` of floats, shape () for one probability and (quantiles,) for several; by group
        with a leading axis. `release.interval(0.95)` encloses each quantile of the records. The
        interval of a minimum begins at `lower`, because no private release can rule out a single
        small record. A quantile too close to 0 or 1 for the noise is estimated by the nearest
        quantile that the noise allows.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is private
            and the database is not a `PaddedRecords`.

    Formal guarantees:
        epsilon-DP under the relation, by docs/proofs/quantiles.md. An interval is the set of cells
        of a grid that are consistent with the noisy counts. It contains the quantile with
        probability at least its confidence, up to a normal approximation of sums of noise, which is
        corrected for tails. This holds for any records, including records with ties and gaps.

    Source:
        Smith (2011); Kaplan, Schnapp and Stemmer, "Differentially Private Approximate Quantiles"
        (2022); Drechsler, Globus-Harris, McMillan, Sarathy and Smith (2022), for intervals by
        inverted tests.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> from dpjax import queries
        >>> release = queries.private_quantiles(
        ...     dpjax.random.secure_key(), np.arange(1000.0), 0.5, lower=0, upper=1000, epsilon=1.0
        ... )
        >>> low, high = release.interval(0.999999)
        >>> bool(low < 500 < high)
        True
    """
    drops = drops_missing(missing, "lower")
    low, high = check_interval(lower, upper)
    one = np.ndim(probabilities) == 0  # type: ignore  # A Fraction counts as an object of NumPy.
    wanted = exact_probabilities([probabilities] if one else probabilities)  # type: ignore
    _checks.host_only("queries.private_quantiles", key, "queries.quantile_scores")
    shape_of_record(database, "(n,)", by=by)
    relation = relation_or_inherited(relation)
    groups = math.prod(len(one.keys) for one in groups_of(groups_alone(by)))
    capacity = slots_of(database, relation)
    epsilon = _checks.positive("epsilon", epsilon)
    _checks.host_only("queries.private_quantiles", epsilon, "queries.quantile_scores")
    cells = _distinct(low, high, _cells(capacity, groups, epsilon))
    searched = _searched(wanted, capacity, groups, epsilon)

    query = _histogram(low, high, cells)
    query = integers_by(of_complete(query) if drops else query, by)
    nearest = _nearest(cells, capacity / groups, epsilon, len(searched))
    mechanism, ask = _private(query, epsilon, searched, capacity, relation, nearest)
    release = ask(key, database, name=name)
    facts = mechanism.facts(cells) | {
        "asked": [float(p) for p in wanted],
        "places": [searched.index(min(max(p, searched[0]), searched[-1])) for p in wanted],
        "lower": low,
        "upper": high,
        "scalar": one,
        "groups": groups,
    }
    value = jax.device_put(_estimates(release.value, facts).astype(jnp.result_type(float)))
    about = Accuracy.of("ranks", facts, release.value._asdict())
    return dataclasses.replace(release, value=value, accuracy=about)


def exact_probabilities(probabilities: Sequence[float | Fraction]) -> tuple[Fraction, ...]:
    """Converts the probabilities to fractions.

    Refuses an empty list, and numbers outside of [0, 1].
    """
    if not len(probabilities):
        raise ValueError("probabilities must contain at least one probability, got none")
    return tuple(
        Fraction(int(p)) if not isinstance(p, bool) and p in (0, 1) else exact_probability(p)
        for p in probabilities
    )


def _cells(capacity: int, groups: int, epsilon: float) -> int:
    """Returns the number of cells: a power of two, up to a limit.

    Below this limit, a cell has at most about 1 / epsilon records, even where the density of
    records is 10 times the average density.
    """
    most = min(_MOST_CELLS, max(64, _MOST_OF_GROUPS // groups))
    wanted = 10 * epsilon * capacity / groups
    if _USUAL_CELLS < wanted < 4 * _USUAL_CELLS:
        most = min(most, _USUAL_CELLS)
    return 2 ** min(max(6, math.ceil(math.log2(wanted))), int(math.log2(most)))


def _searched(
    wanted: tuple[Fraction, ...], capacity: int, groups: int, epsilon: float
) -> tuple[Fraction, ...]:
    """Returns the quantiles to search for: the requested ones, moved away from 0 and 1."""
    depth = len(set(wanted)).bit_length()
    scale = 2 * depth * 3 / epsilon
    ranks = Fraction(math.ceil(_FROM_END * scale) * groups, capacity)
    margin = min(_MOST_FROM_END, ranks.limit_denominator(1000))
    return tuple(sorted({min(max(p, margin), 1 - margin) for p in wanted}))


def _nearest(cells: int, records: float, epsilon: float, quantiles: int) -> int:
    """Returns how many cells there are between a selected edge and the nearest thresholds.

    Where the density of records is `_DENSEST` times the average density, the number of records in
    these cells is about as large as the noise that is added to their count.
    """
    noise = 3 * math.sqrt(10 * quantiles) / epsilon
    return max(1, int(min(noise * cells / (_DENSEST * records), cells / 2**6)))


@functools.lru_cache(maxsize=64)
def _histogram(low: float, high: float, cells: int) -> IntegerQuery:
    return histogram_query(_edges_of_cells(low, high, cells).tolist(), outliers="clip")._integers


def _edges_of_cells(low: float, high: float, cells: int) -> np.ndarray:
    share = np.arange(cells + 1) / cells
    return low * (1 - share) + high * share


def _distinct(low: float, high: float, cells: int) -> int:
    """Halves `cells` until no two edges of cells are the same float, and returns it."""
    while not np.all(np.diff(_edges_of_cells(low, high, cells)) > 0):
        cells //= 2
    if cells < 2:
        raise ValueError(
            f"bounds must be further apart in float64, got lower={low!r} and upper={high!r}:"
            " subtract a public number from the column first"
        )
    return cells


@functools.lru_cache(maxsize=64)
def _private(
    query: IntegerQuery,
    epsilon: float,
    searched: tuple[Fraction, ...],
    capacity: int,
    relation: NeighboringRelation,
    nearest: int,
) -> tuple[RankSearch, PrivateFunction]:
    sensitivity = query.sensitivity("l1", relation=relation)
    mechanism = rank_search(
        sensitivity, epsilon, probabilities=searched, capacity=capacity, nearest=nearest
    )
    return mechanism, privatize(Unchanging("quantiles", query), mechanism)


def _estimates(ranks: Ranks, facts: dict[str, Any]) -> np.ndarray:
    """Estimates each group's quantiles from counts and positions, weighted by precisions.

    This runs on the host, because the few numbers are public, and compiling a program would take
    seconds.
    """
    edges, counts = map(np.asarray, ranks)
    bounds, below, before = _known(edges, counts, facts)
    least_after = np.minimum.accumulate(below[..., ::-1], -1)[..., ::-1]
    below = (np.maximum.accumulate(below, -1) + least_after) / 2
    flat = (x.reshape(-1, x.shape[-1]) for x in (edges, bounds, below, before))
    found = np.array([_of_group(group, facts) for group in zip(*flat, strict=True)])
    value = _number(found.reshape(*edges.shape[:-1], -1), facts)
    value = value[..., 0] if facts["scalar"] else value
    # For a quantile near 0 or 1, the search looked for a more central quantile. So the estimate is
    # clipped to the interval that the counts allow for the requested quantile.
    measured = {"edges": edges, "counts": counts}
    low, high = _of_ranks(None, measured, facts, _TRUSTED, False)
    return np.clip(value, low, high)


def _known(
    edges: np.ndarray, counts: np.ndarray, facts: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the thresholds, and two numbers for each threshold.

    These are the noisy number of records below the threshold, and how many noisy counts were added
    up for it.
    """
    bounds = thresholds(edges, facts["cells"], facts["nearest"])
    # If two consecutive thresholds are the same edge, no record is between them.
    real = np.diff(bounds, axis=-1) > 0
    none = np.zeros((*edges.shape[:-1], 1))
    below = np.concatenate([none, np.cumsum(np.where(real, counts, 0), axis=-1)], axis=-1)
    before = np.concatenate([none, np.cumsum(real, axis=-1)], axis=-1)
    return bounds, below, before


def _of_group(group: tuple[np.ndarray, ...], facts: dict[str, Any]) -> list[float]:
    """Returns the position of each quantile, from its edge and from what `_known` returns."""
    (edges, bounds, below, before), found = group, []
    for place in facts["places"]:
        p, edge = facts["searched"][place], edges[place]
        here = np.searchsorted(bounds, edge)
        left, right = before[here], before[-1] - before[here]
        counted = _variance_of_excess(left, right, p, facts["scale"])
        trust = counted / (counted + facts["spread"][place] ** 2)
        rank = trust * below[here] + (1 - trust) * p * max(below[-1], 0)
        found.append(_at_rank(rank, below, bounds))
    return found


def _at_rank(rank: float, below: np.ndarray, bounds: np.ndarray) -> float:
    """Returns the position with `rank` records below it; the middle if several qualify."""

    def inside(cell: int) -> float:
        cell = min(max(cell, 1), len(below) - 1)
        gap = below[cell] - below[cell - 1]
        share = np.clip((rank - below[cell - 1]) / gap, 0, 1) if gap > 0 else 0.5
        return bounds[cell - 1] + share * (bounds[cell] - bounds[cell - 1])

    first, last = (int(np.searchsorted(below, rank, side=side)) for side in ("left", "right"))
    return (inside(first) + inside(last)) / 2


def _number(place: np.ndarray, facts: dict[str, Any]) -> np.ndarray:
    """Returns the number at a position of the grid."""
    share = place / facts["cells"]
    return facts["lower"] * (1 - share) + facts["upper"] * share


@intervals_of("ranks")
def _of_ranks(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns the closest pair of thresholds around all cells that may contain the true quantile.

    A test on the noisy counts decides whether a cell may contain it. docs/proofs/quantiles.md
    explains why one test for each cell is enough.
    """
    edges, counts = measured["edges"], measured["counts"]
    together = facts["groups"] * len(facts["asked"]) if simultaneous else 1
    normal = -scipy.special.ndtri((1 - confidence) / (2 * together))
    bounds, below, before = _known(edges, counts, facts)
    real = np.diff(bounds, axis=-1) > 0
    ends = []
    for p in facts["asked"]:
        excess = below - p * below[..., -1:]
        reach = _reach_of_excess(before, before[..., -1:] - before, p, facts["scale"], normal)
        too_high, too_low = excess > reach, excess < -reach
        possible = real & ~too_high[..., :-1] & ~too_low[..., 1:]
        some = possible.any(axis=-1)
        first = np.where(some, possible.argmax(axis=-1), 0)
        last = np.where(some, real.shape[-1] - possible[..., ::-1].argmax(axis=-1), real.shape[-1])
        ends.append([np.take_along_axis(bounds, x[..., None], -1) for x in (first, last)])
    low, high = facts["lower"], facts["upper"]
    spared = _FLOATS * max(abs(low), abs(high))
    first, last = (
        _number(np.concatenate(side, axis=-1), facts) for side in zip(*ends, strict=True)
    )
    first, last = np.maximum(first - spared, low), np.minimum(last + spared, high)
    return (first[..., 0], last[..., 0]) if facts["scalar"] else (first, last)


def _variance_of_excess(left: ArrayLike, right: ArrayLike, p: float, scale: float) -> Any:
    """Returns the variance of the noise of the excess of a threshold.

    The excess is the number of records below the threshold, minus p times the number of all
    records. There are `left` noisy counts below the threshold and `right` above. The noise of the
    excess is (1 - p) times the noise of the counts below, minus p times that of the counts above.
    """
    # Noise on integers is rounded to integers, which adds 1/12 to the variance.
    return (2 * scale**2 + 1 / 12) * (left * (1 - p) ** 2 + right * p**2)


def _reach_of_excess(
    left: np.ndarray, right: np.ndarray, p: float, scale: float, normal: float
) -> Any:
    """Returns 1 plus a quantile of the noise in the excess. `_variance_of_excess` defines excess.

    The quantile is computed from the variance and the fourth cumulant of this noise. `normal` is
    the quantile of the standard normal distribution for the same probability.
    """
    variance = _variance_of_excess(left, right, p, scale)
    fourth = 12 * scale**4 * (left * (1 - p) ** 4 + right * p**4)
    kurtosis = np.divide(fourth, variance**2, where=variance > 0, out=np.zeros_like(variance))
    tails = np.maximum(kurtosis / 24 * (normal**3 - 3 * normal), 0)
    # Adding 1 covers different definitions of a quantile, which differ by at most one rank.
    return np.sqrt(variance) * (normal + tails) + 1
