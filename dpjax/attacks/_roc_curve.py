"""Receiver operating characteristics: how many members an attack finds, at which false alarms."""

import dataclasses
import math
from typing import Any

import numpy as np
import scipy

from dpjax import _checks
from dpjax._numerics import clopper_pearson_lower, clopper_pearson_upper

# A rate that rests on fewer false positives is mostly noise.
_LEAST_FALSE_POSITIVES = 10


@dataclasses.dataclass(frozen=True)
class TruePositiveRate:
    """The true positive rate at a false positive rate.

    Attributes:
        estimate: at the threshold that the false positives choose.
        lower: exact limit; None where scores are not independent.
        upper: exact limit; None where scores are not independent.

    Formal guarantees:
        Those of `RocCurve.true_positive_rate`, which makes it.
    """

    estimate: float
    lower: float | None
    upper: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class RocCurve:
    """True against false positive rates of all thresholds of a score; see `roc_curve`.

    Attributes:
        members: scores of members, in ascending order.
        non_members: scores of non-members, in ascending order.
        confidence: of the limits; None where scores are not independent, and there are none.

    Formal guarantees:
        Limits are exact for any distributions, ties included. Those of `limits` and `corners` hold
        together with probability at least `confidence`: at false positive ranks that are fixed in
        advance, Clopper-Pearson limits of both rates share the error.
    """

    members: np.ndarray
    non_members: np.ndarray
    confidence: float | None

    @property
    def area(self) -> float:
        """The probability that a member has a higher score than a non-member, ties by half."""
        below = np.searchsorted(self.non_members, self.members, "left")
        not_above = np.searchsorted(self.non_members, self.members, "right")
        return float(np.mean(below + not_above) / (2 * len(self.non_members)))

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """False and true positive rates of all thresholds, in ascending order."""
        thresholds = np.unique(np.concatenate([self.members, self.non_members]))[::-1]
        rates = (
            np.concatenate([[0.0], _at_least(scores, thresholds) / len(scores)])
            for scores in (self.non_members, self.members)
        )
        false_positives, true_positives = rates
        return false_positives, true_positives

    def true_positive_rate(self, false_positive_rate: float) -> TruePositiveRate:
        """The true positive rate at one false positive rate, fixed in advance.

        The limits are exact, and hold with `confidence` by themselves: false positive ranks that
        are surely below and above the rate choose thresholds, and Clopper-Pearson limits bound the
        true positives there. ValueError where fewer than 10 false positives are to be expected.
        """
        rate = _checks.fraction("false_positive_rate", false_positive_rate)
        n = len(self.non_members)
        if rate * n < _LEAST_FALSE_POSITIVES * (1 - 1e-9):
            least = math.ceil(_LEAST_FALSE_POSITIVES / rate * (1 - 1e-9))
            raise ValueError(
                f"false_positive_rate must rest on {_LEAST_FALSE_POSITIVES} false positives at"
                f" least, got {rate:g} with {n:,} non-members: it takes {least:,}"
            )
        estimate = self._flagged_above(math.floor(rate * n * (1 + 1e-9)) + 1) / len(self.members)
        if self.confidence is None:
            return TruePositiveRate(estimate, None, None)
        error = (1 - self.confidence) / 4
        # The k-th highest score has a false positive rate above `rate` if there are fewer than k
        # false positives at it.
        surely_below = int(scipy.stats.binom.ppf(error, n, rate))
        surely_above = int(scipy.stats.binom.isf(error, n, rate)) + 1
        lower, upper = 0.0, 1.0
        if surely_below > 0:
            hits = self._flagged_above(surely_below)
            lower = float(clopper_pearson_lower(hits, len(self.members), error))
        if surely_above <= n:
            hits = _at_least(self.members, self.non_members[n - surely_above])
            upper = float(clopper_pearson_upper(hits, len(self.members), error))
        return TruePositiveRate(float(estimate), lower, upper)

    def limits(self, false_positive_rates: Any) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limits of the true positive rate, all of which hold together."""
        at = _checks.host_numbers("false_positive_rates", false_positive_rates).astype(float)
        rates, lower = self.corners()
        below = np.searchsorted(rates, at, "right")
        lower = np.concatenate([[0.0], np.maximum.accumulate(lower)])[below]
        rates, upper = self._upper_corners()
        above = np.searchsorted(rates, at, "left")
        upper = np.concatenate([np.minimum.accumulate(upper[::-1])[::-1], [1.0]])[above]
        return lower, upper

    def corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Upper limits of false and lower limits of true positive rates, of some thresholds."""
        n, ranks, error = len(self.non_members), self._ranks(), self._error()
        thresholds = self.non_members[n - ranks]
        # Of what is above a threshold, ties with it are no part.
        passed = n - np.searchsorted(self.non_members, thresholds, "right")
        covering = ranks[np.searchsorted(ranks, passed + 1, "left")]
        rates = clopper_pearson_upper(covering - 1, n, error)
        found = len(self.members) - np.searchsorted(self.members, thresholds, "right")
        return rates, clopper_pearson_lower(found, len(self.members), error)

    def _upper_corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower limits of false and upper limits of true positive rates."""
        n, ranks, error = len(self.non_members), self._ranks(), self._error()
        thresholds = self.non_members[n - ranks]
        covered = ranks[
            np.searchsorted(ranks, _at_least(self.non_members, thresholds), "right") - 1
        ]
        rates = clopper_pearson_lower(covered, n, error)
        found = _at_least(self.members, thresholds)
        return rates, clopper_pearson_upper(found, len(self.members), error)

    def _ranks(self) -> np.ndarray:
        """Some ranks, from 1 to n: their steps are as wide as the ranks are uncertain."""
        n = len(self.non_members)
        squares = np.arange(2, 2 * math.isqrt(n) + 2) ** 2 // 4
        near = squares[squares <= (n + 1) // 2]
        return np.union1d(near, n + 1 - near)

    def _error(self) -> float:
        """Of each limit."""
        if self.confidence is None:
            raise ValueError(
                "the curve must be made of independent scores, one for each training, for its"
                " limits to hold; those of roc_curve(..., confidence=None) describe what was found"
            )
        return (1 - self.confidence) / (4 * len(self._ranks()))

    def _flagged_above(self, rank: int) -> int:
        """Members that score higher than the non-member of a rank from the top; beyond it, all."""
        n = len(self.non_members)
        if rank > n:
            return len(self.members)
        threshold = self.non_members[n - rank]
        return len(self.members) - int(np.searchsorted(self.members, threshold, "right"))

    def __repr__(self) -> str:
        return (
            f"RocCurve({len(self.members):,} members, {len(self.non_members):,} non-members,"
            f" area {self.area:.4g})"
        )


def roc_curve(scores: Any, members: Any, *, confidence: float | None = 0.95) -> RocCurve:
    """How many members the thresholds of a score find, at how many false positives.

    Args:
        scores: numbers, higher for members; NaN counts as lowest of all.
        members: of the same shape, which scores are those of members.
        confidence: of the limits, in (0, 1), for one score from each training, as those of
            `membership_trials`. None for scores of many records under one model, as those of
            `lira` and `rmia`, which depend on each other: there are no limits then.

    Returns:
        A `RocCurve`.

    Raises:
        TypeError: if confidence is not a number.
        ValueError: if the shapes differ, there are no members or no non-members, confidence is out
            of range, or is given for scores in rows, those of one model.

    Formal guarantees:
        Those of `RocCurve`, if scores are independent given who is a member. What is pooled over
        records and models is an estimate without limits.

    Source:
        Clopper and Pearson (1934); Carlini, Chien, Nasr, Song, Terzis and Tramèr (2022) for the
        true positive rate at low false positive rates as what counts.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> random = np.random.default_rng(0)
        >>> members = random.random(10_000) < 0.5
        >>> curve = dpjax.attacks.roc_curve(random.normal(size=10_000) + members, members)
        >>> round(curve.area, 1), round(curve.true_positive_rate(0.01).estimate, 1)
        (0.8, 0.1)
    """
    values = _checks.host_numbers("scores", scores).astype(float)
    inside = _checks.booleans("members", members)
    if values.shape != inside.shape:
        raise ValueError(
            f"members must have the shape of scores, {values.shape}, got {inside.shape}"
        )
    if inside.all() or not inside.any():
        raise ValueError("members must hold some True and some False")
    if confidence is not None:
        confidence = _checks.fraction("confidence", confidence)
        if values.ndim != 1:
            raise ValueError(
                f"confidence must be None for scores of shape {values.shape}: those of one model"
                " depend on each other"
            )
    values = np.where(np.isnan(values), -np.inf, values)
    return RocCurve(np.sort(values[inside]), np.sort(values[~inside]), confidence)


def _at_least(ascending: np.ndarray, thresholds: Any) -> Any:
    """How many scores are not below thresholds."""
    return len(ascending) - np.searchsorted(ascending, thresholds, "left")
