"""Receiver operating characteristics: the members that an attack finds, against false alarms."""

import dataclasses
import math

import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper

# With fewer expected false positives, a rate is mostly noise.
_LEAST_FALSE_POSITIVES = 10


@dataclasses.dataclass(frozen=True)
class TruePositiveRate:
    """The true positive rate at a false positive rate.

    Attributes:
        estimate: at the threshold with this false positive rate in the sample.
        lower: exact limit; None if scores are not independent.
        upper: exact limit; None if scores are not independent.

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
        confidence: of the limits; None if scores are not independent, and no limits exist.

    Formal guarantees:
        Limits are exact for any distributions, also with ties. Those of `limits` and `corners` hold
        together with probability at least `confidence`: Clopper-Pearson limits of both rates share
        the error, at false positive ranks that are fixed in advance.
    """

    members: np.ndarray
    non_members: np.ndarray
    confidence: float | None

    @property
    def area(self) -> float:
        """The probability that a member scores higher than a non-member; ties count half."""
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

        The limits of one rate are exact, and hold with `confidence`. Two false positive ranks, one
        surely below the rate and one surely above it, choose two thresholds. Clopper-Pearson limits
        bound the true positives there. ValueError if fewer than 10 false positives are expected.
        """
        rate = _checks.fraction("false_positive_rate", false_positive_rate)
        n = len(self.non_members)
        if rate * n < _LEAST_FALSE_POSITIVES * (1 - 1e-9):
            least = math.ceil(_LEAST_FALSE_POSITIVES / rate * (1 - 1e-9))
            raise ValueError(
                f"false_positive_rate must rest on {_LEAST_FALSE_POSITIVES} false positives at"
                f" least, got {rate:g} with {n:,} non-members: it needs {least:,}"
            )
        estimate = self._flagged_above(math.floor(rate * n * (1 + 1e-9)) + 1) / len(self.members)
        if self.confidence is None:
            return TruePositiveRate(estimate, None, None)
        error = (1 - self.confidence) / 4
        # The k-th highest score of non-members has a false positive rate above `rate` only if fewer
        # than k of them lie above the true quantile, a binomial event.
        surely_below = int(scipy.stats.binom.ppf(error, n, rate))
        surely_above = int(scipy.stats.binom.isf(error, n, rate)) + 1
        lower, upper = 0.0, 1.0
        if surely_below > 0:
            hits = self._flagged_above(surely_below)
            lower = float(clopper_pearson_lower(hits, len(self.members), error))
        if surely_above <= n:
            hits = int(_at_least(self.members, self.non_members[n - surely_above]))
            upper = float(clopper_pearson_upper(hits, len(self.members), error))
        return TruePositiveRate(float(estimate), lower, upper)

    def limits(self, false_positive_rates: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limits of the true positive rates, which all hold together."""
        at = _checks.host_numbers("false_positive_rates", false_positive_rates).astype(float)
        rates, lower = self.corners()
        below = np.searchsorted(rates, at, "right")
        lower = np.concatenate([[0.0], np.maximum.accumulate(lower)])[below]
        rates, upper = self._upper_corners()
        above = np.searchsorted(rates, at, "left")
        upper = np.concatenate([np.minimum.accumulate(upper[::-1])[::-1], [1.0]])[above]
        return lower, upper

    def corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Upper limits of false and lower limits of true positive rates, at some thresholds."""
        n, ranks, error = len(self.non_members), self._ranks(), self._error()
        thresholds = self.non_members[n - ranks]
        # Ties with a threshold do not count as above it.
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
        """Some ranks from 1 to n, whose steps grow like the uncertainty of a rank."""
        n = len(self.non_members)
        squares = np.arange(2, 2 * math.isqrt(n) + 2) ** 2 // 4
        near = squares[squares <= (n + 1) // 2]
        return np.union1d(near, n + 1 - near)

    def _error(self) -> float:
        """The probability that one limit may fail."""
        if self.confidence is None:
            raise ValueError(
                "limits need independent scores, one for each training; a curve of"
                " roc_curve(..., confidence=None) has only estimates"
            )
        return (1 - self.confidence) / (4 * len(self._ranks()))

    def _flagged_above(self, rank: int) -> int:
        """The number of members above the non-member of a rank from the top; else all."""
        n = len(self.non_members)
        if rank > n:
            return len(self.members)
        return int(np.sum(self.members > self.non_members[n - rank]))

    def __repr__(self) -> str:
        return (
            f"RocCurve({len(self.members):,} members, {len(self.non_members):,} non-members,"
            f" area {self.area:.4g})"
        )


def roc_curve(
    scores: ArrayLike, members: ArrayLike, *, confidence: float | None = 0.95
) -> RocCurve:
    """The members that thresholds of a score find, against their false positives.

    Args:
        scores: numbers, higher for members; NaN counts as the lowest.
        members: booleans of the same shape: whether a score is that of a member.
        confidence: of the limits, in (0, 1). It needs one score from each training, such as those
            of `membership_trials`. Scores of many records under one model depend on each other, as
            do those of `lira` and `rmia`: give None, and the curve has no limits.

    Returns:
        A `RocCurve`.

    Raises:
        TypeError: if confidence is not a number.
        ValueError: if the shapes differ, members are all True or all False, confidence is out of
            range, or it is given for scores in rows, which are those of one model.

    Formal guarantees:
        Those of `RocCurve`, if scores are independent given the memberships. Rates that are pooled
        over records and models are estimates without limits.

    Source:
        Clopper and Pearson (1934); Carlini, Chien, Nasr, Song, Terzis and Tramèr (2022), who
        compare attacks by true positive rates at low false positive rates.

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
                f"confidence must be None for scores of shape {values.shape}: scores of one model"
                " depend on each other"
            )
    values = np.where(np.isnan(values), -np.inf, values)
    return RocCurve(np.sort(values[inside]), np.sort(values[~inside]), confidence)


def _at_least(ascending: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """The numbers of scores that are not below thresholds."""
    return np.asarray(len(ascending) - np.searchsorted(ascending, thresholds, "left"))
