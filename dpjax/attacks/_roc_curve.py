"""`roc_curve` of an attack, and `compare_with_claim`, which compares the curve with a guarantee."""

import dataclasses
import math

import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._losses import Risk
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.accounting._composition import concrete

# The expected number of false positives must be at least this number. An estimate from fewer false
# positives is mostly noise.
_LEAST_FALSE_POSITIVES = 10


@dataclasses.dataclass(frozen=True)
class TruePositiveRate:
    """The true positive rate at a false positive rate.

    Attributes:
        estimate: the rate at the threshold with this false positive rate in the sample.
        lower: an exact lower limit of the rate; None if scores are not independent.
        upper: an exact upper limit of the rate; None if scores are not independent.

    Formal guarantees:
        Those of `RocCurve.true_positive_rate`, which returns this object.
    """

    estimate: float
    lower: float | None
    upper: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class RocCurve:
    """The true and false positive rates of a score at all thresholds; see `roc_curve`.

    Attributes:
        members: scores of members, in ascending order.
        non_members: scores of non-members, in ascending order.
        confidence: the confidence of the limits; None if scores are not independent, so that no
            limits exist.

    Formal guarantees:
        Limits are exact for any distributions, also with ties. All limits of `limits` and `corners`
        are valid together with probability at least `confidence`. The error probability is divided
        equally among Clopper-Pearson limits of both rates. The thresholds of these limits are
        scores of non-members whose ranks are fixed in advance.
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

        def rates(scores: np.ndarray) -> np.ndarray:
            return np.concatenate([[0.0], _at_least(scores, thresholds) / len(scores)])

        return rates(self.non_members), rates(self.members)

    def true_positive_rate(self, false_positive_rate: float) -> TruePositiveRate:
        """The true positive rate at one false positive rate, fixed in advance.

        The limits are valid with probability at least `confidence`. The scores of two non-members
        serve as thresholds: with high probability, one of them has a lower false positive rate than
        the given one, and the other has a higher one. Clopper-Pearson limits bound the true
        positive rates at these two thresholds. Raises ValueError if fewer than 10 false positives
        are expected.
        """
        rate = _checks.fraction("false_positive_rate", false_positive_rate)
        n = len(self.non_members)
        if rate * n < _LEAST_FALSE_POSITIVES * (1 - 1e-9):
            least = math.ceil(_LEAST_FALSE_POSITIVES / rate * (1 - 1e-9))
            raise ValueError(
                f"false_positive_rate must give at least {_LEAST_FALSE_POSITIVES} expected false"
                f" positives, got {rate:g} with {n:,} non-members: take at least {least:,}"
            )
        estimate = self._flagged_above(math.floor(rate * n * (1 + 1e-9)) + 1) / len(self.members)
        if self.confidence is None:
            return TruePositiveRate(estimate, None, None)
        error = (1 - self.confidence) / 4
        # Let t be the threshold whose false positive rate is exactly `rate`. The number B of
        # non-members with scores above t is binomial. Rank 1 is the highest score of a non-member.
        # With probability at least 1 - `error`, B is at least `surely_below`. In this case, the
        # score of rank `surely_below` is above t. As a threshold, this score has a false positive
        # rate of at most `rate`. With probability at least 1 - `error`, B is less than
        # `surely_above`. In this case, the score of rank `surely_above`, as a threshold, has a
        # false positive rate of at least `rate`.
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
        """Lower and upper limits of the true positive rates. All are valid simultaneously."""
        at = _checks.host_numbers("false_positive_rates", false_positive_rates).astype(float)
        rates, lower = self.corners()
        below = np.searchsorted(rates, at, "right")
        lower = np.concatenate([[0.0], np.maximum.accumulate(lower)])[below]
        rates, upper = self._upper_corners()
        above = np.searchsorted(rates, at, "left")
        upper = np.concatenate([np.minimum.accumulate(upper[::-1])[::-1], [1.0]])[above]
        return lower, upper

    def corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Upper limits of false positive rates, and lower limits of true positive rates.

        Both are for the same thresholds, which are scores of some non-members.
        """
        n, ranks, error = len(self.non_members), self._ranks(), self._error()
        thresholds = self.non_members[n - ranks]
        # A score that is equal to a threshold does not count as positive.
        passed = n - np.searchsorted(self.non_members, thresholds, "right")
        covering = ranks[np.searchsorted(ranks, passed + 1, "left")]
        rates = clopper_pearson_upper(covering - 1, n, error)
        found = len(self.members) - np.searchsorted(self.members, thresholds, "right")
        return rates, clopper_pearson_lower(found, len(self.members), error)

    def _upper_corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns lower limits of false positive rates, and upper limits of true positive rates."""
        n, ranks, error = len(self.non_members), self._ranks(), self._error()
        thresholds = self.non_members[n - ranks]
        passed = _at_least(self.non_members, thresholds)
        covered = ranks[np.searchsorted(ranks, passed, "right") - 1]
        rates = clopper_pearson_lower(covered, n, error)
        found = _at_least(self.members, thresholds)
        return rates, clopper_pearson_upper(found, len(self.members), error)

    def _ranks(self) -> np.ndarray:
        """Returns some ranks i from 1 to n, in steps of about sqrt(min(i, n + 1 - i)).

        The number of non-members above a fixed threshold has about this standard deviation.
        """
        n = len(self.non_members)
        squares = np.arange(2, 2 * math.isqrt(n) + 2) ** 2 // 4
        near = squares[squares <= (n + 1) // 2]
        return np.union1d(near, n + 1 - near)

    def _error(self) -> float:
        """Returns the error probability of each confidence limit."""
        if self.confidence is None:
            raise ValueError(
                "this curve has no confidence limits, because it is from roc_curve(..., "
                "confidence=None). Confidence limits need independent scores: at most one score "
                "from each training"
            )
        return (1 - self.confidence) / (4 * len(self._ranks()))

    def _flagged_above(self, rank: int) -> int:
        """Returns how many members score above the non-member of this rank; all if rank > n."""
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
    """The ROC curve of a score: true and false positive rates at all thresholds.

    Args:
        scores: numbers, higher for members; NaN counts as the lowest.
        members: booleans of the same shape: whether a score belongs to a member.
        confidence: the confidence of the limits of the rates, in (0, 1). It requires independent
            scores: one from each training, as in `membership_trials`. Scores of many records under
            one model depend on each other, and so do scores of `lira` and `rmia`. For dependent
            scores, pass None. Then the curve has no limits.

    Returns:
        A `RocCurve`.

    Raises:
        TypeError: if confidence is not a number.
        ValueError: if the shapes differ, members are all True or all False, confidence is out of
            range, or it is given for an array of scores with several axes.

    Formal guarantees:
        As for `RocCurve`, if scores are independent given the memberships. Rates over many records
        of each model are estimates without limits.

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
        raise ValueError("members must contain both True and False, got only one of them")
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
    """Returns the number of scores at or above each threshold, given ascending scores."""
    return np.asarray(len(ascending) - np.searchsorted(ascending, thresholds, "left"))


# A bound on the relative rounding error in float64.
_ROUNDING_OF_BOUND = 1e-14


def guessing_bound(guarantee: Guarantee | Risk, *, categories: int = 2) -> float:
    """Bounds the probability that an attacker guesses one record right from a release.

    The record has one of K values, with equal probabilities. The attacker may know all other
    records. Then a guess is right with probability at most
    (e^epsilon + (K - 1) delta) / (e^epsilon + K - 1). For a fair bit (K = 2) this is (1 + a) / 2.
    Here a = (e^epsilon - 1 + 2 delta) / (e^epsilon + 1) is the largest difference of true and false
    positive rates.

    Args:
        guarantee: the guarantee of one release, or of several by `dpjax.accounting.compose`. For a
            `Risk`, such as `mechanism.risk`, the result is smaller: the least of the bounds at all
            epsilons.
        categories: K, at least 2. Under add-or-remove-one it must be 2: present or absent.

    Returns:
        The bound, in [1 / K, 1], rounded up.

    Raises:
        TypeError: if the guarantee is not concrete, or K not an integer.
        ValueError: if K is out of range, or the guarantee is a batch or NaN.

    Formal guarantees:
        Valid for every attack, on databases that differ in this record, if the guarantee covers
        them. With gamma = 0 it covers all pairs. Otherwise it covers all pairs under the oracle
        except for a fraction gamma, at its confidence. If the n records of a database are
        independent and uniform, the bound is also valid for the expected fraction of right guesses
        of any reconstruction. Randomized response attains it.

    Source:
        Wasserman and Zhou (2010); Kairouz, Oh and Viswanath (2015), for two values. For K values,
        add up P(S_k | k) <= e^epsilon P(S_k | j) + delta over all j other than k, and over all k.

    Example:
        >>> import dpjax
        >>> round(dpjax.attacks.guessing_bound(dpjax.Guarantee(1.0)), 4)
        0.7311
        >>> mechanism = dpjax.gaussian(1.0, epsilon=1.0, delta=1e-6)
        >>> round(dpjax.attacks.guessing_bound(mechanism.risk), 4)
        0.5471
    """
    promised = guarantee if isinstance(guarantee, Risk) else concrete(guarantee)
    others = _checks.integer("categories", categories, least=2) - 1
    if others > 1 and promised.relation is not NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            f"categories must be 2 under {promised.relation}, got {categories}: a record is either"
            " present or absent"
        )
    # The numerator and the denominator of the bound are divided by e^epsilon, because e^epsilon
    # might overflow.
    if isinstance(promised, Risk):
        epsilons, deltas = promised.epsilons, promised.deltas
    else:
        epsilons, deltas = np.array([float(promised.epsilon)]), np.array([float(promised.delta)])
    rest = others * np.exp(-epsilons)
    return min(1.0, float(np.min((1 + rest * deltas) / (1 + rest))) * (1 + _ROUNDING_OF_BOUND))


@dataclasses.dataclass(frozen=True, eq=False)
class ClaimComparison:
    """An attack, compared with the guarantee of the releases that it attacked.

    Attributes:
        claimed: the guarantee.
        epsilon: the least epsilon that allows the attack's rates, at the claimed delta, gamma and
            confidence; 0 if the attack proves nothing.
        false_positive_rate: the upper limit of the rate, at the threshold with the largest epsilon.
        true_positive_rate: the lower limit of the rate, at that threshold.
        confidence: the confidence of all limits together.

    Formal guarantees:
        Those of `compare_with_claim`, which returns this object.
    """

    claimed: Guarantee
    epsilon: float
    false_positive_rate: float
    true_positive_rate: float
    confidence: float

    @property
    def contradicted(self) -> bool:
        """Whether the attack contradicts the claim, if the attack's confidence limits are valid."""
        return self.epsilon > float(self.claimed.epsilon)

    def __repr__(self) -> str:
        verdict = "is contradicted" if self.contradicted else "is not contradicted"
        return (
            f"ClaimComparison({self.claimed} {verdict}: epsilon is at least {self.epsilon:.4g},"
            f" where TPR >= {self.true_positive_rate:.4g} at FPR <= {self.false_positive_rate:.4g},"
            f" confidence {self.confidence:g})"
        )


def highest_true_positive_rate(guarantee: Guarantee, false_positive_rates: ArrayLike) -> np.ndarray:
    """The highest true positive rate that any attack on random pairs can have under a guarantee.

    The slack is s = delta + gamma + 1 - C, where C is the confidence. If the confidence is None,
    gamma includes the probability that the sampling went wrong, and C is 1. The rate is the smaller
    of e^epsilon FPR + s and 1 - e^-epsilon (1 - s - FPR), and at most 1.

    Args:
        guarantee: the guarantee of a release, under replace-one.
        false_positive_rates: numbers in [0, 1].

    Returns:
        An array of the shape of the rates.

    Raises:
        TypeError: if the guarantee is not a `Guarantee`, or is traced.
        ValueError: if it is a batch, NaN, under another relation, or for groups.

    Formal guarantees:
        On pairs that the guarantee covers, (epsilon, delta)-DP limits both the positives and the
        negatives of an attack. On the other pairs, of probability gamma, it limits nothing.

    Source:
        Kairouz, Oh and Viswanath (2015), Theorem 2.1, averaged over pairs.

    Example:
        >>> import dpjax
        >>> guarantee = dpjax.Guarantee(1.0, gamma=0.05)
        >>> dpjax.attacks.highest_true_positive_rate(guarantee, [0.0, 0.1, 1.0]).round(2)
        array([0.05, 0.32, 1.  ])
    """
    claimed = _about_one_record(guarantee)
    epsilon, slack = float(claimed.epsilon), _slack(claimed)
    rates = _checks.host_numbers("false_positive_rates", false_positive_rates).astype(float)
    if epsilon == math.inf:
        return np.ones_like(rates)
    by_positives = math.exp(epsilon) * rates + slack
    by_negatives = 1 - math.exp(-epsilon) * (1 - slack - rates)
    return np.clip(np.minimum(by_positives, by_negatives), 0.0, 1.0)


def compare_with_claim(curve: RocCurve, guarantee: Guarantee) -> ClaimComparison:
    """Tests whether an attack over random pairs contradicts the guarantee of the releases.

    Args:
        curve: the curve of the independent scores of `membership_trials`.
        guarantee: the guarantee of the attacked releases, under replace-one.

    Returns:
        A `ClaimComparison`.

    Raises:
        TypeError: in the cases in which `highest_true_positive_rate` raises it.
        ValueError: if the curve has no limits, or in the cases in which
            `highest_true_positive_rate` raises it.

    Formal guarantees:
        A true guarantee that is fixed before the trials is contradicted with probability at most 1
        - `curve.confidence`, for all thresholds together. This includes the randomness of sampling
        if every trial samples its own sensitivity. If all trials use one sampled sensitivity, it
        may cover fewer pairs than gamma says, which adds at most 1 - C to this probability. With a
        marginal gamma (C is None), there is no such bound. A guarantee that is not contradicted may
        still be wrong.

    Source:
        As for `highest_true_positive_rate`.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> random = np.random.default_rng(0)
        >>> members = random.random(10_000) < 0.5
        >>> scores = random.laplace(size=10_000) + members  # Noise for epsilon 1.
        >>> curve = dpjax.attacks.roc_curve(scores, members)
        >>> [
        ...     dpjax.attacks.compare_with_claim(curve, dpjax.Guarantee(epsilon)).contradicted
        ...     for epsilon in (0.5, 1.0)
        ... ]
        [True, False]
    """
    claimed = _about_one_record(guarantee)
    slack = _slack(claimed)
    false_positives, true_positives = curve.corners()
    with np.errstate(divide="ignore"):
        by_positives = np.log(np.maximum(true_positives - slack, 0.0) / false_positives)
        by_negatives = np.log(np.maximum(1 - false_positives - slack, 0.0) / (1 - true_positives))
    epsilons = np.maximum(by_positives, by_negatives)
    best = int(np.argmax(epsilons))
    # `corners` has already refused a curve without a confidence level.
    assert curve.confidence is not None
    return ClaimComparison(
        claimed,
        max(0.0, float(epsilons[best])),
        float(false_positives[best]),
        float(true_positives[best]),
        curve.confidence,
    )


def _about_one_record(guarantee: Guarantee) -> Guarantee:
    """Returns the guarantee with its numbers converted to Python numbers.

    Raises ValueError if the guarantee is not for replacing one record.
    """
    claimed = concrete(guarantee)
    if claimed.relation is not NeighboringRelation.REPLACE_ONE or claimed.group_size != 1:
        raise ValueError(
            "guarantee must be under replace-one and not for groups, because the attack"
            " distinguishes databases that differ in one record, got"
            f" {claimed} under {claimed.relation}"
        )
    return claimed


def _slack(claimed: Guarantee) -> float:
    """Returns the true positive rate that the guarantee allows at a false positive rate of 0."""
    doubt = 0.0 if claimed.confidence is None else 1 - float(claimed.confidence)
    return float(claimed.delta) + float(claimed.gamma) + doubt
