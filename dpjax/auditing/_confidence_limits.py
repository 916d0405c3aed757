"""Confidence limits of probabilities, and what they say about epsilon or delta."""

import dataclasses
from typing import Any

import numpy as np
import scipy

# Relative error of SciPy's incomplete beta functions, given away to stay on the safe side.
_ROUNDING = 1e-9


def clopper_pearson_lower(hits: Any, trials: int, error: float) -> np.ndarray:
    """A probability that the true one is below with probability at most `error`."""
    hits = np.asarray(hits, float)
    # The parameters are kept valid where the limit is 0 and SciPy's answer is not used.
    limit = scipy.special.betaincinv(np.maximum(hits, 0.5), trials - hits + 1, error)
    return np.where(hits <= 0, 0.0, limit * (1 - _ROUNDING))


def clopper_pearson_upper(hits: Any, trials: int, error: float) -> np.ndarray:
    """A probability that the true one is above with probability at most `error`."""
    hits = np.asarray(hits, float)
    limit = scipy.special.betainccinv(hits + 1, np.maximum(trials - hits, 0.5), error)
    return np.where(hits >= trials, 1.0, np.minimum(limit * (1 + _ROUNDING), 1.0))


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be bounded: epsilon at a delta, or delta at an epsilon.

    Attributes:
        bounded: "epsilon" or "delta".
        at: the other one of the two.

    Formal guarantees:
        (epsilon, delta)-DP says p <= exp(epsilon) q + delta for the probabilities p and q of any
        event, so whoever knows p from below and q from above knows epsilon and delta from below.
    """

    bounded: str
    at: float

    def answer(self, lower: Any, upper: Any) -> np.ndarray:
        """The bound, from limits of p and q; below 0 where they show nothing."""
        with np.errstate(divide="ignore", over="ignore"):
            if self.bounded == "epsilon":
                return np.log(np.maximum(lower - self.at, 0.0) / upper)
            return lower - np.exp(self.at) * upper
