"""Lower bounds on epsilon from one run, where an attacker guesses the coin flips of canaries."""

import math
from typing import Literal

import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._exact._numerics import bisect
from dpjax.accounting._share import log_delta

_ROUNDING = 1e-9  # A bound on the relative error of the probabilities that SciPy computes.
# The largest epsilon that is tested. To refute a larger epsilon, an attacker would need too many
# guesses.
_MOST_EPSILON = 64.0
# The largest shift of a Gaussian mechanism that is tested, in standard deviations.
_MOST_SHIFT = 16.0


def one_run_epsilon(
    *,
    canaries: int,
    guesses: int,
    correct: int,
    delta: float = 0.0,
    p: float = 0.05,
    losses: Literal["any", "gaussian"] = "any",
) -> float:
    """A lower bound on epsilon, from one run on a database with many canaries.

    A fair coin for each of m canaries decides whether the canary is in the database. Under
    replace-one, the coin chooses between two records z and z' instead. The attacker guesses r of
    the coins from the output, and v guesses are right. The attacker may choose these r coins by the
    output, but not their number.

    "any": let B be binomial, with r trials of probability e^epsilon / (1 + e^epsilon). Under
    (epsilon, delta)-DP, the probability of v or more right guesses is bounded by

        P(v or more) <= P(B >= v) + 2 m delta max_i P(v - i <= B < v) / i

    The result is the largest epsilon at which this bound is below p.

    "gaussian": let p_i be the probability of i right guesses. Under mu-Gaussian DP, for each c,

        sum_(i >= c) i p_i / m <= Phi(Phi^-1(sum_(i >= c) (r - i + 1) p_(i - 1) / m) + mu)

    Suppose that P(v or more) = p. Then these inequalities determine the least possible sum of all
    p_i. If this least sum exceeds 1, mu is refuted. The result is the epsilon at delta of the
    largest mu that is refuted.

    Args:
        canaries: m, at least 1.
        guesses: r, at most m.
        correct: v, at most r.
        delta: the delta at which epsilon is bounded, in [0, 1). Above 0 for "gaussian".
        p: the probability that the bound exceeds the true epsilon, in (0, 1/2).
        losses: "any", or "gaussian" if the privacy loss is that of Gaussian noise, as in a training
            whose batches have all records. Guesses then refute larger epsilons.

    Returns:
        The largest epsilon that the guesses refute, rounded down; 0 if none, and at most 64.

    Raises:
        TypeError: if a count is not an integer, or another parameter not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Let canaries, guesses, delta, p and losses be chosen in advance, let coins be fair and
        independent, and let guesses depend on the output alone. Then "any" exceeds the true epsilon
        at delta with probability at most p, over coins and mechanism. Under mu-Gaussian DP,
        "gaussian" exceeds the epsilon of mu with probability at most p. So it can contradict a
        claim that a mechanism satisfies mu-Gaussian DP. It says nothing about a mechanism whose
        privacy loss has another distribution, such as a training with sampled batches. The relation
        is add-or-remove-one for canaries that are in or out, and replace-one for pairs z and z'.
        One run gives weaker bounds than many runs: even if all r guesses are right, "any" refutes
        at most an epsilon of about log(r / log(1 / p)). docs/proofs/shorter.md proves "gaussian".

    Source:
        Steinke, Nasr and Jagielski (2023), Theorem 5.2 and Appendix D; Mahloujifar, Melis and
        Chaudhuri, "Auditing f-differential privacy in one run" (2024), for "gaussian".

    Example:
        >>> import dpjax
        >>> run = {"canaries": 1000, "guesses": 100, "correct": 95, "delta": 1e-5}
        >>> round(dpjax.auditing.one_run_epsilon(**run), 2)
        2.17
        >>> round(dpjax.auditing.one_run_epsilon(**run, losses="gaussian"), 2)
        3.32
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
    _checks.choice("losses", losses, ("any", "gaussian"))
    if losses == "gaussian":
        if delta == 0:
            raise ValueError("delta must be above 0 for losses='gaussian', got 0")

        def refuted(mu: float) -> bool:
            return least_mass(m, r, v, p, mu) > 1 + _ROUNDING

        shift = bisect(refuted, 0.0, _MOST_SHIFT)[0] if refuted(0.0) else 0.0
        return _epsilon_of_shift(shift, delta)

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
    # For i from 1 to v, `below[i - 1]` is P(v - i <= B < v), where B has the distribution
    # `binomial`.
    below = np.cumsum(binomial.pmf(np.arange(v - 1, -1, -1)))
    likelier = float(np.max(below / np.arange(1, v + 1)))
    return (float(binomial.sf(v - 1)) + 2 * m * delta * likelier) * (1 + _ROUNDING)


def least_mass(m: int, r: int, v: int, p: float, mu: float) -> float:
    """Returns the least possible p_0 + ... + p_r under mu-GDP, given p_v + ... + p_r = p.

    Here p_j is the probability of j right guesses. If the least sum is above 1, p is impossible
    under mu-GDP. Then the computation stops at the first partial sum above 1, and returns this
    partial sum. The result decreases in mu.
    """
    mass, right, wrong = p, p * v / m, p * (r - v) / m
    for i in range(v - 1, -1, -1):
        # `right` is the sum of j p_j / m over all j > i, and `wrong` the sum of (r - j) p_j / m.
        needed = float(scipy.special.ndtr(scipy.special.ndtri(min(right, 1.0)) - mu))
        added = max(needed * (1 - _ROUNDING) - wrong, 0.0) * m / (r - i)
        mass, right, wrong = mass + added, right + added * i / m, wrong + added * (r - i) / m
        if mass > 1 + 2 * _ROUNDING:
            break
    return mass


def _epsilon_of_shift(mu: float, delta: float) -> float:
    """Returns the epsilon of mu-Gaussian DP at delta, rounded down."""
    least = math.log(delta) + _ROUNDING
    if mu == 0 or log_delta(0.0, mu) <= least:
        return 0.0
    return bisect(lambda epsilon: log_delta(epsilon, mu) > least, 0.0, _MOST_EPSILON)[0]
