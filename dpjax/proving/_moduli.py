"""How far apart a function takes two numbers of [low, high] that differ by at most d.

A bound by the largest slope times d is larger, because the slope falls on the way. For a convex
function the farthest two numbers lie at the steeper end; for an odd one whose slope falls with |x|,
around 0.
"""

from collections.abc import Callable

import numpy as np
import scipy

Modulus = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _centered(function: Callable[[np.ndarray], np.ndarray]) -> Modulus:
    return lambda low, high, d: 2 * function(d / 2)


# exp(high) - exp(high - d), log(low + d) - log(low), and low^-1/2 - (low + d)^-1/2.
EXP: Modulus = lambda low, high, d: -np.exp(high) * np.expm1(-d)  # noqa: E731
LOG: Modulus = lambda low, high, d: np.log1p(d / low)  # noqa: E731
LOG1P: Modulus = lambda low, high, d: np.log1p(d / (1 + low))  # noqa: E731
TANH = _centered(np.tanh)
LOGISTIC: Modulus = lambda low, high, d: np.tanh(d / 4)  # noqa: E731
ERF = _centered(lambda x: scipy.special.erf(x))
RSQRT: Modulus = lambda low, high, d: -np.expm1(-np.log1p(d / low) / 2) / np.sqrt(low)  # noqa: E731
# low^-1 - (low + d)^-1, and (low + d)^1/2 - low^1/2.
RECIPROCAL: Modulus = lambda low, high, d: d / low / (low + d)  # noqa: E731
SQRT: Modulus = lambda low, high, d: d / (np.sqrt(low + d) + np.sqrt(low))  # noqa: E731
