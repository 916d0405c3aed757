"""The best attack that a guarantee allows, and whether an attack was better."""

import dataclasses
import math

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._composition import concrete
from dpjax.attacks._roc_curve import RocCurve


@dataclasses.dataclass(frozen=True, eq=False)
class ClaimComparison:
    """An attack, compared with the guarantee of the releases that it attacked.

    Attributes:
        claimed: the guarantee.
        epsilon: the least epsilon that allows the attack's rates, at the claimed delta, gamma and
            confidence; 0 if the attack shows nothing.
        false_positive_rate: its upper limit, at the threshold that shows the largest epsilon.
        true_positive_rate: its lower limit, at that threshold.
        confidence: of all limits together.

    Formal guarantees:
        Those of `compare_with_claim`, which makes it.
    """

    claimed: Guarantee
    epsilon: float
    false_positive_rate: float
    true_positive_rate: float
    confidence: float

    @property
    def contradicted(self) -> bool:
        """Whether the claim must be wrong, if the limits hold."""
        return self.epsilon > float(self.claimed.epsilon)

    def __repr__(self) -> str:
        verdict = "is contradicted" if self.contradicted else "is not contradicted"
        return (
            f"ClaimComparison({self.claimed} {verdict}: epsilon is at least {self.epsilon:.4g},"
            f" where TPR >= {self.true_positive_rate:.4g} at FPR <= {self.false_positive_rate:.4g},"
            f" confidence {self.confidence:g})"
        )


def highest_true_positive_rate(guarantee: Guarantee, false_positive_rates: ArrayLike) -> np.ndarray:
    """The highest true positive rate that a guarantee allows any attack, over random pairs.

    The slack is s = delta + gamma + 1 - C, where C is the confidence, or 1 if gamma is marginal.
    The rate is the smaller of e^epsilon FPR + s and 1 - e^-epsilon (1 - s - FPR), and at most 1.

    Args:
        guarantee: of a release, under replace-one.
        false_positive_rates: numbers in [0, 1].

    Returns:
        An array of the shape of the rates.

    Raises:
        TypeError: if the guarantee is not a `Guarantee`, or is traced.
        ValueError: if it is a batch, NaN, under another relation, or for groups.

    Formal guarantees:
        On pairs that the guarantee covers, both the positives and the negatives of an attack obey
        (epsilon, delta)-DP. On the other pairs, of probability gamma, the guarantee says nothing.

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
        curve: of the independent scores of `membership_trials`.
        guarantee: of the attacked releases, under replace-one.

    Returns:
        A `ClaimComparison`.

    Raises:
        TypeError: as `highest_true_positive_rate`.
        ValueError: if the curve has no limits, or as `highest_true_positive_rate`.

    Formal guarantees:
        Let a guarantee hold, and be fixed before the trials. It is contradicted with probability at
        most 1 - `curve.confidence`, for all thresholds together. That is also over the samples, if
        every trial samples its own sensitivity. If one sampled sensitivity serves all trials, the
        probability grows by at most 1 - C, since it may cover fewer pairs than gamma says. For a
        marginal gamma (C is None) and one sensitivity for all trials, there is no statement. A
        guarantee that is not contradicted may still be wrong.

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
    assert curve.confidence is not None  # Else it has no corners.
    return ClaimComparison(
        claimed,
        max(0.0, float(epsilons[best])),
        float(false_positives[best]),
        float(true_positives[best]),
        curve.confidence,
    )


def _about_one_record(guarantee: Guarantee) -> Guarantee:
    """The guarantee with numbers as leaves; refuses one that is not about replacing one record."""
    claimed = concrete(guarantee)
    if claimed.relation is not NeighboringRelation.REPLACE_ONE or claimed.group_size != 1:
        raise ValueError(
            "guarantee must be about replacing one record, since the attack distinguishes such"
            f" databases, got {claimed} under {claimed.relation}"
        )
    return claimed


def _slack(claimed: Guarantee) -> float:
    """The true positive rate that is allowed at FPR 0, for any epsilon."""
    doubt = 0.0 if claimed.confidence is None else 1 - float(claimed.confidence)
    return float(claimed.delta) + float(claimed.gamma) + doubt
