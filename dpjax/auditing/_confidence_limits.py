"""Bounds on epsilon or delta from confidence limits of probabilities."""

import dataclasses

import numpy as np
from jax.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Question:
    """The quantity to bound: "epsilon" or "delta", at a value of the other one.

    (epsilon, delta)-DP says p <= exp(epsilon) q + delta for the probabilities p and q of any event.
    So a lower limit of p and an upper limit of q bound epsilon and delta from below.
    """

    bounded: str
    at: float

    def answer(self, lower: ArrayLike, upper: ArrayLike) -> np.ndarray:
        """The bound by limits of p and q; below 0 if they show nothing."""
        lower, upper = np.asarray(lower), np.asarray(upper)
        with np.errstate(divide="ignore", over="ignore"):
            if self.bounded == "epsilon":
                return np.log(np.maximum(lower - self.at, 0.0) / upper)
            return lower - np.exp(self.at) * upper
