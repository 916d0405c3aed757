"""What a guarantee allows any attack, and whether an attack did better."""

import dataclasses
import math
from typing import Any

import numpy as np

from dpjax import _checks
from dpjax.accounting._composition import concrete
from dpjax.attacks._roc_curve import RocCurve
from dpjax.base import Guarantee, NeighboringRelation


@dataclasses.dataclass(frozen=True, eq=False)
class ClaimComparison:
    """An attack beside the guarantee of what it attacked.

    Attributes:
        claimed: the guarantee.
        epsilon: the least epsilon that allows what the attack did, at the claimed delta, gamma and
            confidence; 0 where it shows nothing.
        false_positive_rate: upper limit of it, at the threshold that shows the most.
        true_positive_rate: lower limit of it, there.
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
        """Whether the claim cannot be, but for the error of the limits."""
        return self.epsilon > float(self.claimed.epsilon)

    def __repr__(self) -> str:
        verdict = "is contradicted" if self.contradicted else "is not contradicted"
        return (
            f"ClaimComparison({self.claimed} {verdict}: epsilon is at least {self.epsilon:.4g},"
            f" where TPR >= {self.true_positive_rate:.4g} at FPR <= {self.false_positive_rate:.4g},"
            f" confidence {self.confidence:g})"
        )


def highest_true_positive_rate(guarantee: Guarantee, false_positive_rates: Any) -> np.ndarray:
    """The highest true positive rate that a guarantee allows any attack, over random pairs.

    With slack s = delta + gamma + 1 - C, C the confidence (1 where gamma is marginal), it is the
    smaller one of e^epsilon FPR + s and 1 - e^-epsilon (1 - s - FPR), and at most 1.

    Args:
        guarantee: what a release promises, under replace-one.
        false_positive_rates: numbers in [0, 1].

    Returns:
        An array of the shape of the rates.

    Raises:
        TypeError: if the guarantee is none, or traced.
        ValueError: if it is a batch, NaN, about another relation, or about groups.

    Formal guarantees:
        On pairs that the guarantee covers, both the positives and the negatives of an attack obey
        (epsilon, delta)-DP; on the others, of probability gamma, nothing is known.

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
    """Whether an attack over random pairs contradicts the guarantee of what it attacked.

    Args:
        curve: of the independent scores of `membership_trials`.
        guarantee: what the releases promised, under replace-one.

    Returns:
        A `ClaimComparison`.

    Raises:
        TypeError: as `highest_true_positive_rate` does.
        ValueError: if the curve has no limits, or as `highest_true_positive_rate` does.

    Formal guarantees:
        A guarantee that holds, and was fixed before the trials, is contradicted with probability at
        most 1 - `curve.confidence`, for all thresholds together; over the samples too, where every
        trial sampled its sensitivity anew. Where one sampled sensitivity served all trials, at most
        1 - C more: that is how often it covers fewer pairs than gamma says. Of a marginal gamma
        (C is None) with one sensitivity for all trials nothing can be said. What is not
        contradicted may still be wrong.

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
    shown = np.maximum(by_positives, by_negatives)
    best = int(np.argmax(shown))
    assert curve.confidence is not None  # Else it has no corners.
    return ClaimComparison(
        claimed,
        max(0.0, float(shown[best])),
        float(false_positives[best]),
        float(true_positives[best]),
        curve.confidence,
    )


def _about_one_record(guarantee: Guarantee) -> Guarantee:
    """The guarantee with numbers for leaves; refuses others than of one record that is replaced."""
    claimed = concrete(guarantee)
    if claimed.relation is not NeighboringRelation.REPLACE_ONE or claimed.group_size != 1:
        raise ValueError(
            "guarantee must be about replacing one record, which is what the attack tells apart,"
            f" got {claimed} under {claimed.relation}"
        )
    return claimed


def _slack(claimed: Guarantee) -> float:
    """What is allowed whatever epsilon is."""
    doubt = 0.0 if claimed.confidence is None else 1 - float(claimed.confidence)
    return float(claimed.delta) + float(claimed.gamma) + doubt
