"""Quantiles on a public grid: selections whose scores are distances in ranks."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, Ends, KnowsAccuracy, intervals_of
from dpjax._core._columns import Numbers, as_arrays, check_numbers, comparing, in_64_bits
from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import Inside, Mechanism, NeighboringRelation
from dpjax._exact import _limbs
from dpjax._exact._numerics import count_below, round_up
from dpjax.mechanisms._several_selections import SeveralSelections
from dpjax.queries._padded_records import present_records
from dpjax.queries._totals import Addend, OfParts, Totals, cells_of_present, in_groups, totals_of
from dpjax.targets._clamping import comparable, increasing
from dpjax.targets._known_sensitivity import KnownSensitivity, VectorNorm
from dpjax.targets._summaries import exact_probability


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuantileScores(OfParts, KnownSensitivity, KnowsAccuracy):
    """Scores each number of a grid by how near its rank is to the rank of a quantile.

    Made by `quantile_scores`.

    Attributes:
        numerators: the numerator a of each quantile a / b.
        denominator: the common denominator b. Scores are in units of 1 / b of a rank.
        grid: the candidates, increasing.

    Formal guarantees:
        The guarantees of `quantile_scores`.
    """

    numerators: tuple[int, ...]
    denominator: int
    grid: np.ndarray

    norms = ("linf",)
    # Whether the number of scored records is private even under replace-one. It is private if
    # records are scored in groups, because a replaced record may change its group.
    _n_is_private: ClassVar = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores: the numbers of quantiles and of candidates."""
        return len(self.numerators), self.grid.size

    def partial(self, records: jax.Array | Numbers, present: jax.Array) -> Totals:
        """Exact totals of some of the records. Totals of disjoint parts may be `added`.

        Args:
            records: numbers of shape (slots,).
            present: booleans of the same shape.

        Returns:
            The number of records below each candidate, above each candidate, and in total.

        Raises:
            ValueError: if a shape is wrong, or there are too many slots for JAX's integers.
        """
        return self.partial_of(records, cells_of_present(present), 1)

    def partial_of(self, records: jax.Array | Numbers, group: jax.Array, groups: int) -> Totals:
        """Like `partial`, for several groups, given the group of each record (below 0 for none)."""
        check_numbers("database", records, group.shape)
        self.check_size(records.size)
        with in_64_bits(records):
            numbers = as_arrays(records)
            with comparing(numbers):
                place, first = _bins(numbers, self.grid)
        bins = Addend(place, 2 * self.grid.size + 1)
        (counts,) = totals_of([in_groups(bins, group, groups)])
        up_to = jnp.cumsum(counts.low.reshape(groups, -1), axis=1)
        # Bins 0 to 2 j contain the records below candidate j. Bin 2 j + 1 contains the records
        # equal to it.
        below, everybody = up_to[:, 2 * first], up_to[:, -1:]
        sides = below, everybody - up_to[:, 2 * first + 1], everybody
        return tuple(_limbs.from_integers(side.reshape(-1, 1)) for side in sides)

    def check_size(self, n: int) -> None:
        """Raises a `ValueError` if scores of n records may not fit into JAX's integers."""
        scored = jnp.result_type(int)
        if n * self.denominator > jnp.iinfo(scored).max:
            raise ValueError(
                f"n={n} records are too many, because scores in units of 1/{self.denominator} of a"
                f" rank would not fit into {scored}: use probabilities with fewer digits, or enable"
                " x64"
            )

    def finish(self, totals: Totals) -> jax.Array:
        """Scores of shape (quantiles, candidates), from the totals of all parts of the records."""
        scored = jnp.result_type(int)
        below, above, n = (_limbs.to_integers(x, scored)[None, :, 0] for x in totals)
        a = jnp.asarray(self.numerators, scored)[:, None]
        b = jnp.asarray(self.denominator, scored)
        # Ranks are multiplied by b, the common denominator of the probabilities a / b, so that all
        # numbers are integers.
        too_high = b * below - a * n
        too_low = b * above - (b - a) * n
        return -jnp.maximum(jnp.maximum(too_high, too_low), 0)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        b = self.denominator
        # For a probability a / b, `finish` computes `too_high` = b * below - a * n and `too_low` =
        # b * above - (b - a) * n. An added record changes `too_high` by b - a or -a, and `too_low`
        # by a or a - b. If a record is replaced, n stays the same, and the counts `below` and
        # `above` change by at most 1, which changes scores by at most b.
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            return round_up(Fraction(max(max(a, b - a) for a in self.numerators)))
        return round_up(Fraction(b))

    def _accuracy_of(
        self, noise: Accuracy, relation: NeighboringRelation, value: Value, database: Database
    ) -> Accuracy:
        if noise.kind != "selections":
            return noise
        n = None
        if relation is NeighboringRelation.REPLACE_ONE and not self._n_is_private:
            n = jnp.sum(present_records(database)[1], dtype=jnp.int32)
        if _checks.is_traced(value):
            found = self._numbers(value)
        else:  # On the host, the grid is float64 even if x64 is disabled.
            indices = np.asarray(value)
            found = np.where(indices < 0, np.nan, self.grid[indices])
        facts = {"numerators": self.numerators, "denominator": self.denominator}
        ends = {"lower": float(self.grid[0]), "upper": float(self.grid[-1])}
        public = {**noise.facts, **facts, **ends}
        return Accuracy.of("quantiles", public, {"numbers": found, "n": n})

    def _inside(self, mechanism: Mechanism) -> Inside:
        if not isinstance(mechanism, SeveralSelections):
            return Inside(self, mechanism)
        return Inside(self, mechanism, self._numbers, self._indices)

    def _numbers(self, indices: jax.Array) -> jax.Array:
        """Returns the grid's numbers at some indices; NaN if a traced parameter was invalid."""
        grid = jnp.asarray(self.grid, jnp.result_type(float))
        return jnp.where(indices < 0, jnp.nan, grid[indices])

    def _indices(self, numbers: jax.Array) -> jax.Array:
        """Returns the indices of released numbers on the grid.

        If several candidates round to the same float, it returns the first of their indices.
        """
        grid = jnp.asarray(self.grid, jnp.result_type(float))
        found = jnp.searchsorted(grid, numbers).astype(jnp.int32)
        return jnp.where(grid.at[found].get(mode="clip") == numbers, found, -1)

    def error(self, mechanism: SeveralSelections, *, confidence: float = 0.95) -> float:
        """A bound on the rank errors of released numbers, relative to the grid's best number.

        Args:
            mechanism: made by `select_each`.
            confidence: the probability that the bound is correct, in (0, 1).

        Returns:
            A number of ranks. With probability at least `confidence`, every released number is at
            most this many ranks farther from its quantile than the best number of the grid.

        Raises:
            TypeError: if the confidence is not a number.
            ValueError: if the confidence is out of range.
        """
        confidence = _checks.fraction("confidence", confidence)
        scores = jax.ShapeDtypeStruct(self.shape, jnp.result_type(int))
        gap = mechanism.score_gap(confidence=confidence, like=scores, simultaneous=True)
        return float(gap) / self.denominator


def quantile_scores(
    probabilities: float | Fraction | Sequence[float | Fraction],
    *,
    grid: ArrayLike | Sequence[float],
) -> QuantileScores:
    """Scores each number of a public grid as a quantile: the negative distance in ranks.

    A number r is a p-quantile of n records if at most p n of them are below r and at most
    (1 - p) n above. Its score is the negative of the larger excess,

        u(r) = -max(0, #{x < r} - p n, #{x > r} - (1 - p) n),

    times a common denominator b of the probabilities: so a score is an integer, and is computed
    without rounding. Records equal to r count neither as below nor as above. NaN counts as -inf.
    With `select_each`, a release consists of the numbers themselves, for several quantiles at once.
    For example, this code releases two quantiles that enclose 90% of the records:

        scores = quantile_scores((0.05, 0.95), grid=range(121))
        mechanism = select_each(scores.sensitivity(), epsilon=1.0, count=2)
        low, high = dpjax.privatize(scores, mechanism)(key, ages).value

    Args:
        probabilities: p, one or several, each in (0, 1). A float represents the decimal that it
            prints, so 0.1 is 1/10. A `fractions.Fraction` is exact.
        grid: increasing finite numbers, public. Even 10^5 numbers are possible. If records are
            floats, the grid is rounded to their dtype, so that several numbers may coincide.
            Integers are compared exactly below 2^53, and larger integers as the nearest float64.

    Returns:
        A target: maps numbers of shape (n,) to scores of shape (quantiles, candidates), with
        `sensitivity` and `error(mechanism, confidence=)`. `dpjax.privatize(scores, mechanism)`
        releases numbers of the grid, shape (quantiles,), as floats. A mechanism that is called
        directly with scores releases indices.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a probability is out of range, or the grid does not increase; on a database,
            if it does not have shape (n,), or b n is too large for JAX's integers.

    Formal guarantees:
        In ranks, a score changes by at most 1 under replace-one, and max(p, 1 - p) under
        add-or-remove-one (1/2 for a median), for any records. Both are attained. The proof: a
        maximum changes by no more than its terms. Under replace-one n stays the same, and a count
        changes by at most 1. An added record adds 0 or 1 to #{x < r}, and p to p n. So the second
        term changes by -p or 1 - p, and the third by -(1 - p) or p. If n is private, pass
        `padded_records`, because the shape of a plain array reveals n. Let Delta be the bound on
        the change of a score. With `select_each` at epsilon, with probability 1 - beta all q
        quantiles are within (2 Delta q / epsilon) ln(q |grid| / beta) ranks of the best numbers of
        the grid: `error`.

    Source:
        Smith (2011), section 3, for the exponential mechanism on ranks; McSherry and Talwar (2007).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> scores = dpjax.queries.quantile_scores(0.5, grid=[0, 10, 20, 30])
        >>> scores(jnp.array([3.0, 10.0, 20.0, 25.0])).tolist()
        [[-4, 0, 0, -4]]
        >>> scores.sensitivity().value
        2.0
    """
    one = np.ndim(probabilities) == 0  # type: ignore  # A Fraction counts as an object of NumPy.
    shares = [exact_probability(p) for p in ([probabilities] if one else probabilities)]  # type: ignore
    if not shares:
        raise ValueError("probabilities must contain at least one probability, got none")
    b = math.lcm(*(share.denominator for share in shares))
    numerators = tuple(share.numerator * (b // share.denominator) for share in shares)
    wanted = "grid must be increasing finite numbers"
    candidates = increasing(wanted, grid, least=1)
    if not np.all(np.isfinite(candidates)):
        raise ValueError(f"{wanted}, got {_checks.shown(grid)}")
    return QuantileScores(numerators=numerators, denominator=b, grid=candidates)


def _bins(records: jax.Array, grid: np.ndarray) -> tuple[jax.Array, np.ndarray]:
    """Returns the bin of each record, and an index for each candidate.

    If several candidates round to one float, they all have the index of the first of them. Bin
    2 j + 1 contains the records that equal candidate j. Bin 2 j contains the records between
    candidate j - 1 and candidate j.
    """
    numbers = comparable(records)
    numbers = jnp.where(jnp.isnan(numbers), -jnp.inf, numbers)
    # Converts the grid on the host in the same way as `comparable` converts numbers of this dtype.
    with np.errstate(over="ignore", under="ignore"):
        candidates = np.asarray(grid, numbers.dtype)
    tiny = np.finfo(candidates.dtype).tiny
    candidates = np.where(np.abs(candidates) < tiny, candidates.dtype.type(0), candidates)
    first = np.searchsorted(candidates, candidates)
    place = count_below(jnp.asarray(candidates), numbers)
    equal = jnp.asarray(candidates).at[place].get(mode="clip") == numbers
    return 2 * place + equal.astype(place.dtype), first


@intervals_of("selections")
def _of_indices(*_: object) -> Ends:
    raise ValueError(
        "no interval is known for this release, because it selects options, and options have no "
        "distance from each other: use mechanism.score_gap, which bounds how far their scores "
        "are below the best score"
    )


@intervals_of("quantiles")
def _between_quantiles(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns the nearest released quantiles that enclose the true quantile at this confidence.

    Let q be the true p-quantile, and r the released p'-quantile for a probability p' < p. Suppose
    that every record is a number of the grid. Then the true p'-quantile is on the grid, and its
    score is 0, the best possible score. Suppose that the score of r is at most e ranks below 0.
    Then at most p' n + e records are below r. If r were above q, at least p n records would be
    below r. So r <= q if e < (p - p') n. The other side follows by symmetry.
    """
    if measured["n"] is None:
        raise ValueError(
            "no interval is known for quantiles if the number of records is private: pass"
            " at_least=, a lower bound on that number, such as the low end of the interval of a"
            " private count"
        )
    numbers, n = measured["numbers"], np.maximum(measured["n"], 2.0**-30)[..., None]
    # An interval is correct if the released quantiles at its two ends are correct.
    rows = numbers.size if simultaneous else min(2, facts["rows"])
    if facts["rows"] == 1:
        unit = facts["denominator"] * float(np.min(n))
        # The suggested release has three quantiles, which share epsilon. The interval is correct if
        # the two outer quantiles are within their error bounds.
        within, away = _gap(facts, confidence, 1) / unit, 3 * _gap(facts, confidence, 2) / unit
        raise ValueError(
            f"one quantile alone has no interval: at confidence {confidence:g}, the released number"
            f" is a p-quantile for some p within {within:.3g} of the requested probability. This "
            "does not bound how far the number is from the requested quantile. Release two more "
            f"quantiles at once, with probabilities more than {away:.3g} below and above the "
            "requested one"
        )
    # One rank is `denominator` units of a score.
    gap = _gap(facts, confidence, rows)
    numerators = facts["numerators"]
    # On each side, the loop visits quantiles from the farthest to the nearest. So the last
    # enclosing quantile that it finds is the nearest.
    order = np.argsort(numerators)
    low = np.full(numbers.shape, facts["lower"], float)
    high = np.full(numbers.shape, facts["upper"], float)
    for row, own in enumerate(numerators):
        here = slice(row, row + 1)
        for other in order:
            is_below = (own - numerators[other]) * n > gap
            low[..., here] = np.where(is_below, numbers[..., other, None], low[..., here])
        for other in order[::-1]:
            is_above = (numerators[other] - own) * n > gap
            high[..., here] = np.where(is_above, numbers[..., other, None], high[..., here])
    return low, high


def _gap(facts: dict[str, Any], confidence: float, rows: int) -> float:
    """Returns a bound on how far each of `rows` selected scores is below the best score.

    At this confidence, the bound holds for all `rows` scores.
    """
    gap = facts["scale"] * math.log(rows * facts["options"] / (1 - confidence))
    return math.floor(gap) if facts["whole"] else gap + facts["step"]
