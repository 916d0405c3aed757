"""What confidence limits of probabilities say about epsilon or delta."""

import dataclasses
from typing import Any

import numpy as np


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
