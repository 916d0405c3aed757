"""How often any attack can be right about one record of a private release."""

import math

from dpjax._core import _checks
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._composition import concrete

# Bounds the relative error by rounding in float64.
_ROUNDING = 1e-14


def guessing_bound(guarantee: Guarantee, *, categories: int = 2) -> float:
    """Bounds the probability that anyone guesses one record right from a release.

    The record takes one of K values, with equal probabilities. The attacker may know everything
    else. Then a guess is right with probability at most
    (e^epsilon + (K - 1) delta) / (e^epsilon + K - 1). For a fair bit (K = 2) that is (1 + a) / 2,
    where a is the largest difference of true and false positive rates,
    (e^epsilon - 1 + 2 delta) / (e^epsilon + 1).

    Args:
        guarantee: of one release, or of several by `dpjax.accounting.compose`.
        categories: K, at least 2. Under add-or-remove-one it must be 2: present or absent.

    Returns:
        The bound, in [1 / K, 1], rounded up.

    Raises:
        TypeError: if the guarantee is not concrete, or K not an integer.
        ValueError: if K is out of range, or the guarantee is a batch or NaN.

    Formal guarantees:
        Holds for every attack, on databases that differ in this record and that the guarantee
        covers. If gamma is 0 it covers all of them. Else it covers all outside of probability gamma
        under the oracle, at the confidence of the guarantee. If the n records of a database are
        independent and uniform, it bounds the expected fraction of right guesses of any
        reconstruction. Randomized response attains it.

    Source:
        Wasserman and Zhou (2010); Kairouz, Oh and Viswanath (2015), for two values. For K values,
        add up P(S_k | k) <= e^epsilon P(S_k | j) + delta over all j other than k, and over all k.

    Example:
        >>> import dpjax
        >>> round(dpjax.attacks.guessing_bound(dpjax.Guarantee(1.0)), 4)
        0.7311
    """
    promised = concrete(guarantee)
    others = _checks.integer("categories", categories, least=2) - 1
    if others > 1 and promised.relation is not NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            f"categories must be 2 under {promised.relation}, got {categories}: a record is either"
            " present or absent"
        )
    # We divide both terms by e^epsilon, which may overflow.
    rest = others * math.exp(-float(promised.epsilon))
    return min(1.0, (1 + rest * float(promised.delta)) / (1 + rest) * (1 + _ROUNDING))
