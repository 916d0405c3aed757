"""Auditing in one run: an attacker guesses the coin flips of many canaries from one output."""

import math

import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._exact._numerics import bisect

_ROUNDING = 1e-9  # Bounds the relative error of SciPy's binomial probabilities.
# To refute a larger epsilon, an attacker would need more guesses than a machine can count.
_MOST_EPSILON = 64.0


def one_run_epsilon(
    *, canaries: int, guesses: int, correct: int, delta: float = 0.0, p: float = 0.05
) -> float:
    """A lower bound on epsilon, from one run on a database with many canaries.

    A fair coin for each of m canaries decides whether the canary is in the database. Under
    replace-one, the coin chooses between two records z and z' instead. The attacker guesses r of
    the coins from the output, and v guesses are right. The attacker may choose these r coins by the
    output. Let B be binomial, with r trials of probability e^epsilon / (1 + e^epsilon). Under
    (epsilon, delta)-DP, B dominates the number of right guesses, up to mass of order m delta: P(v
    or more) <= P(B >= v) + 2 m delta max_i P(v - i <= B < v) / i.

    Args:
        canaries: m, at least 1.
        guesses: r, at most m.
        correct: v, at most r.
        delta: the delta at which epsilon is bounded, in [0, 1).
        p: the probability that the bound exceeds the true epsilon, in (0, 1/2).

    Returns:
        The largest epsilon that the guesses refute, rounded down; 0 if none, and at most 64.

    Raises:
        TypeError: if a count is not an integer, or another parameter not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Let canaries, delta and p be chosen in advance, let coins be fair and independent, and let
        guesses depend on the output alone. Then the bound exceeds the true epsilon at delta with
        probability at most p, over coins and mechanism. The relation is add-or-remove-one for
        canaries that are in or out, and replace-one for pairs z and z'. One run gives weaker bounds
        than many runs: even if all r guesses are right, they refute at most an epsilon of about
        log(r / log(1 / p)).

    Source:
        Steinke, Nasr and Jagielski (2023), Theorem 5.2 and Appendix D.

    Example:
        >>> import dpjax
        >>> round(dpjax.auditing.one_run_epsilon(canaries=100, guesses=100, correct=100), 3)
        3.493
    """
    m = _checks.integer("canaries", canaries, least=1)
    r = _checks.integer("guesses", guesses, least=0, most=m)
    v = _checks.integer("correct", correct, least=0, most=r)
    delta = _checks.non_negative("delta", delta)
    if delta >= 1:
        raise ValueError(f"delta must be below 1, got {delta}")
    p = _checks.fraction("p", p)
    if p >= 0.5:
        raise ValueError(f"p must be below 1/2, got {p}")

    if chance(m, r, v, 0.0, delta) >= p:
        return 0.0
    return bisect(lambda epsilon: chance(m, r, v, epsilon, delta) < p, 0.0, _MOST_EPSILON)[0]


def chance(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Bounds the probability of v or more right guesses under (epsilon, delta)-DP.

    The bound grows with epsilon.
    """
    if v == 0:
        return 1.0
    binomial = scipy.stats.binom(r, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(binomial.pmf(np.arange(v - 1, -1, -1)))  # P(v - i <= B < v), i = 1, ..., v.
    likelier = float(np.max(below / np.arange(1, v + 1)))
    return (float(binomial.sf(v - 1)) + 2 * m * delta * likelier) * (1 + _ROUNDING)
