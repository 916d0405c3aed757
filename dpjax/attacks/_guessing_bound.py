"""How often any attack can be right about one record, once it is private."""

import math

from dpjax._core import _checks
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._composition import concrete

# What roundings in float64 may take away, relative to the bound.
_ROUNDING = 1e-14


def guessing_bound(guarantee: Guarantee, *, categories: int = 2) -> float:
    """The most often that anyone guesses one record right from a release, whatever else is known.

    The record is one of K values with equal chances, and everything else may be known. Then a guess
    is right with probability (e^epsilon + (K - 1) delta) / (e^epsilon + K - 1) at most. For a fair
    bit (K = 2) that is half of one more than the largest advantage, the true positive rate less the
    false positive rate, which is (e^epsilon - 1 + 2 delta) / (e^epsilon + 1).

    Args:
        guarantee: of one release, or of several as `dpjax.accounting.compose` adds them up.
        categories: K, at least 2. Under add-or-remove-one it must be 2: the record is there or not.

    Returns:
        The bound, in [1 / K, 1], rounded up.

    Raises:
        TypeError: if the guarantee is not concrete, or K not an integer.
        ValueError: if K is out of range, or the guarantee is a batch or NaN.

    Formal guarantees:
        Holds for every attack, on databases that differ in this record and that the guarantee
        covers: all of them where gamma is 0, else all but those of probability gamma under the
        oracle, at the confidence of the guarantee. Of a database whose n records are independent
        and fair it bounds the expected fraction that any reconstruction has right. Randomized
        response attains it.

    Source:
        Wasserman and Zhou (2010); Kairouz, Oh and Viswanath (2015), for two values. For K add up
        P(S_k | k) <= e^epsilon P(S_k | j) + delta over all j other than k, and over all k.

    Example:
        >>> import dpjax
        >>> round(dpjax.attacks.guessing_bound(dpjax.Guarantee(1.0)), 4)
        0.7311
    """
    promised = concrete(guarantee)
    others = _checks.integer("categories", categories, least=2) - 1
    if others > 1 and promised.relation is not NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            f"categories must be 2 under {promised.relation}, got {categories}: a record is there"
            " or not"
        )
    # Divided by e^epsilon, which may overflow.
    rest = others * math.exp(-float(promised.epsilon))
    return min(1.0, (1 + rest * float(promised.delta)) / (1 + rest) * (1 + _ROUNDING))
