"""Order statistics that hold at every number of pairs at once, so that one may watch and stop.

docs/proofs/sampled-sensitivity.md, "At any time", has the proof.
"""

import math
from collections.abc import Callable

import scipy

# Bounds the relative error of SciPy's functions and of the sums below, with room to spare.
_ERROR = 1e-12
# The same of the logarithms of gamma functions that SciPy adds up for `betaln`.
_ERROR_OF_A_LOG = 1e-15


def least_k(m: int, gamma: float, confidence: float) -> int | None:
    """The least rank whose order statistic covers 1 - gamma; None if even the largest does not."""
    return _least(m, lambda k: _excess(k, m, gamma, scipy.special.betainc) >= _needed(confidence))


def lower_k(m: int, gamma: float, confidence: float) -> int:
    """The largest rank whose order statistic is below the quantile of 1 - gamma; 0 for none."""
    # Grows as the rank falls, so the ranks are counted from above.
    found = _least(
        m, lambda j: _excess(m - j, m, gamma, scipy.special.betaincc) >= _needed(confidence)
    )
    return 0 if found is None else m - found


def least_m(gamma: float, confidence: float, most: int) -> float:
    """The least number of pairs whose largest distance covers 1 - gamma; infinite beyond `most`."""
    found = _least(most, lambda m: least_k_exists(m, gamma, confidence))
    return math.inf if found is None else found


def least_gamma(m: int, confidence: float) -> float:
    """The least gamma that the largest of m distances covers, rounded up."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if least_k_exists(m, middle, confidence):
            high = middle
        else:
            low = middle
    return high


def least_k_exists(m: int, gamma: float, confidence: float) -> bool:
    """Whether some rank of m covers 1 - gamma."""
    return _excess(m, m, gamma, scipy.special.betainc) >= _needed(confidence)


def _needed(confidence: float) -> float:
    return -math.log1p(-confidence) * (1 + _ERROR)


def _least(most: int, holds: Callable[[int], bool]) -> int | None:
    """The least of 1 to `most` for which something holds that goes on to hold; None if none."""
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _excess(k: int, m: int, gamma: float, tail: Callable[[float, float, float], float]) -> float:
    """Log of the mixture e-value of k of m pairs, against one side of 1 - gamma, rounded down.

    In terms of the m - k others and gamma, which keeps its digits. The mixture over gammas below
    has `betainc` as its tail, that over gammas above `betaincc`.
    """
    mass = float(tail(m - k + 1, k + 1, gamma))
    if not 0 < gamma < 1 or mass <= 0:
        return -math.inf
    covered, left = math.log1p(-gamma), math.log(gamma)
    side = left if tail is scipy.special.betainc else covered
    terms = (
        scipy.special.betaln(k + 1, m - k + 1),
        math.log(mass),
        -side,
        -k * covered,
        (k - m) * left,
    )
    error = _ERROR * (1 + math.fsum(map(abs, terms))) + _ERROR_OF_A_LOG * math.lgamma(m + 2)
    return math.fsum(terms) - error
