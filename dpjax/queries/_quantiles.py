"""Quantiles on a public grid: how far every candidate is from each of them, in ranks."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._values import NeighboringRelation
from dpjax._exact._numerics import round_up
from dpjax.mechanisms._several_selections import SeveralSelections
from dpjax.queries._counts import comparable
from dpjax.queries._padded_records import present_records
from dpjax.targets._bounds import VectorNorm
from dpjax.targets._known_sensitivity import KnownSensitivity


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuantileScores(KnownSensitivity):
    """Scores of a grid's numbers as quantiles, a target; made by `quantile_scores`.

    Attributes:
        numerators: a of every quantile a / b.
        denominator: b, of all of them; scores are in units of 1 / b ranks.
        grid: the candidates, increasing.

    Formal guarantees:
        Those of `quantile_scores`.
    """

    numerators: tuple[int, ...]
    denominator: int
    grid: np.ndarray

    norms = ("linf",)
    relations = tuple(NeighboringRelation)

    def __call__(self, database: Any) -> jax.Array:
        """Scores of shape (quantiles, candidates) on n numbers, or a `PaddedRecords` of them."""
        return self.of_present(*present_records(database))

    def of_present(self, records: Any, present: jax.Array) -> jax.Array:
        """Scores of those records that are there, as in a database with a public number of slots.

        Args:
            records: numbers of shape (slots,).
            present: booleans of that shape.

        Returns:
            Integers of shape (quantiles, candidates).

        Raises:
            ValueError: if shapes are others, or there are too many slots for JAX's integers.
        """
        one_array = jax.tree_util.all_leaves([records]) and records.ndim == 1
        if not one_array or present.shape != records.shape:
            raise ValueError(
                f"database must have shape (n,), got {_checks.described((records, present))}"
            )
        scored = jnp.result_type(int)
        if records.size * self.denominator > jnp.iinfo(scored).max:
            raise ValueError(
                f"n={records.size} records, in units of 1/{self.denominator} ranks, are too many"
                f" for {scored}: ask for quantiles of fewer digits, or enable x64"
            )
        below, above = _counts_beside(records, present.astype(scored), self.grid)
        n = jnp.sum(present, dtype=scored)
        a = jnp.asarray(self.numerators, scored)[:, None]
        b = jnp.asarray(self.denominator, scored)
        too_high = b * below[None] - a * n
        too_low = b * above[None] - (b - a) * n
        return -jnp.maximum(jnp.maximum(too_high, too_low), 0)

    def _bound(
        self,
        norm: VectorNorm,
        relation: NeighboringRelation,
        n: int | None,
        dtype: jax.typing.DTypeLike,
    ) -> float:
        del norm, n, dtype  # linf, in integers.
        b = self.denominator
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            return round_up(Fraction(max(max(a, b - a) for a in self.numerators)))
        return round_up(Fraction(b))

    def numbers(self, indices: Any) -> np.ndarray:
        """The numbers of the grid that were released.

        Args:
            indices: as `select_each` releases them.

        Returns:
            float64, of the same shape; NaN where a traced parameter was bad.
        """
        indices = np.asarray(indices)
        return np.where(indices < 0, np.nan, self.grid[indices])

    def error(self, mechanism: SeveralSelections, *, beta: float) -> float:
        """How many ranks the numbers may be further off than the best ones of the grid.

        Args:
            mechanism: made by `select_each`.
            beta: in (0, 1).

        Returns:
            A number of ranks, which no quantile exceeds with probability at least 1 - beta.

        Raises:
            TypeError: if beta is not a number.
            ValueError: if beta is out of range.
        """
        confidence = 1 - _checks.fraction("beta", beta)
        scores = jax.ShapeDtypeStruct((len(self.numerators), self.grid.size), jnp.result_type(int))
        gap = mechanism.score_gap(confidence=confidence, like=scores, simultaneous=True)
        return float(gap) / self.denominator


def quantile_scores(
    probabilities: float | Sequence[float], *, grid: Sequence[float]
) -> QuantileScores:
    """How good every number of a public grid is as a quantile: minus its distance in ranks.

    r is a p-quantile of n records if at most p n of them are below r and at most (1 - p) n above.
    Its score is minus what either count exceeds that by,

        u(r) = -max(0, #{x < r} - p n, #{x > r} - (1 - p) n),

    times a common denominator b of the probabilities: an integer, computed without rounding. What
    is equal to r counts on neither side. NaN counts as -inf. `select_each` releases the indices of
    numbers, for several quantiles at once, or two for a range:

        scores = quantile_scores((0.05, 0.95), grid=range(121))
        mechanism = select_each(scores.sensitivity(), epsilon=1.0, count=2)
        release = dpjax.privatize(scores, mechanism)(key, ages)
        scores.numbers(release.value)

    Args:
        probabilities: p, one or several, each in (0, 1): the decimal number that it prints as, so
            that 0.1 is 1/10; or a `fractions.Fraction`.
        grid: increasing finite numbers, public; 10^5 of them are no burden. They are rounded to the
            dtype of the records, where several may become one.

    Returns:
        A target: takes numbers of shape (n,) to scores of shape (quantiles, candidates), with
        `sensitivity`, `numbers(indices)` and `error(mechanism, beta=)`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a probability is out of range, or the grid does not increase; on a database,
            if it does not have shape (n,), or b n is too large for JAX's integers.

    Formal guarantees:
        In ranks, no score moves by more than 1 under replace-one, and max(p, 1 - p) under
        add-or-remove-one (1/2 for a median), whatever the records; both are attained. For a
        maximum moves by no more than its terms. Under replace-one n stays, and a count moves by at
        most 1. A record that is added adds 0 or 1 to #{x < r} and p to p n, so that the second term
        moves by -p or 1 - p, and the third likewise by -(1 - p) or p. Where n is private, a plain
        array shows it by its shape: hand over `padded_records`.
        By `select_each` at epsilon, all of q quantiles are within (2 Delta q / epsilon)
        ln(q |grid| / beta) ranks of the best numbers of the grid, with probability 1 - beta:
        `error`.

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
    given = [probabilities] if np.ndim(probabilities) == 0 else list(probabilities)  # type: ignore
    if not given:
        raise ValueError("probabilities must hold at least one")
    shares = [_as_fraction(p) for p in given]
    b = math.lcm(*(share.denominator for share in shares))
    numerators = tuple(share.numerator * (b // share.denominator) for share in shares)
    return QuantileScores(numerators=numerators, denominator=b, grid=_increasing_grid(grid))


def _counts_beside(
    records: jax.Array, present: jax.Array, grid: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """How many records are below, and how many above, every number of a grid."""
    numbers = comparable(records)
    numbers = jnp.where(jnp.isnan(numbers), -jnp.inf, numbers)
    candidates = comparable(jnp.asarray(grid, numbers.dtype))

    def counts_up_to(side: str) -> jax.Array:
        # The first candidate that a record is below, or not above: so it is of all that follow.
        first = jnp.searchsorted(candidates, numbers, side=side)
        return jnp.cumsum(jnp.zeros(grid.size + 1, present.dtype).at[first].add(present))[:-1]

    return counts_up_to("right"), jnp.sum(present) - counts_up_to("left")


def _as_fraction(probability: Any) -> Fraction:
    if isinstance(probability, Fraction):
        share = probability
    else:
        number = _checks.fraction("probability", probability)
        if _checks.is_traced(number):
            raise TypeError("probability must be known when the target is made, got a traced one")
        share = Fraction(str(number))
    if not 0 < share < 1:
        raise ValueError(f"probability must be strictly between 0 and 1, got {share}")
    return share


def _increasing_grid(grid: Any) -> np.ndarray:
    wanted = "grid must be increasing finite numbers"
    try:
        array = np.array(grid, float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted}, got {_checks.shown(grid)}") from error
    increases = array.ndim == 1 and array.size > 0 and np.all(array[1:] > array[:-1])
    if not increases or not np.all(np.isfinite(array)):
        raise ValueError(f"{wanted}, got {_checks.shown(grid)}")
    return array
