"""Hockey-stick divergences of a release on one pair of databases, by type of noise.

docs/proofs/privacy-profile.md proves the formulas.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import scipy

from dpjax._core._losses import LossFamily

# A generous bound on the relative rounding error of the closed forms below.
_ERROR = 1e-12
_LEAST = 1e-300
_FARTHEST = 1e150


@dataclasses.dataclass(frozen=True)
class PairCurve:
    """Bounds the divergence of several releases on a pair of databases, from the pair's stretch.

    The stretch of a pair is the distance of its values divided by the distance to which the
    releases are calibrated.

    Attributes:
        family: the kind of privacy profile that bounds all releases without Gaussian noise
            together: "laplace", "range" or "pure".
        loss: the total privacy loss of the releases without Gaussian noise, at stretch 1.
        deviations: the shift of all releases with Gaussian noise together, in standard deviations,
            at stretch 1.
        slack: the privacy loss that the noise tables add.
        missed: the probability of noise outside the tables.
        chances: the log of a factor. The factor covers rounding errors in the probabilities of
            sampled outputs.
    """

    family: LossFamily
    loss: float
    deviations: float
    slack: float
    missed: float
    chances: float = 0.0

    def is_pure(self, stretch: np.ndarray, epsilon: float) -> np.ndarray:
        """Whether the releases are (epsilon, 0)-DP on pairs of databases.

        `stretch` is, for each pair, the distance of its values divided by the distance to which the
        noise is calibrated.
        """
        largest = (self.loss * stretch + 2 * self.slack) * (1 + _ERROR)
        return (largest <= epsilon) & (self.deviations == 0)

    def delta(self, stretch: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Returns the divergence at epsilon, rounded up. It increases with the stretch.

        The two arrays are broadcast against each other.
        """
        stretch, epsilon = np.broadcast_arrays(stretch, epsilon)
        finite = np.where(np.isfinite(stretch), stretch, 0.0)
        epsilon = self._charged(epsilon)
        drawn = self._drawn(self._ideal(finite, epsilon - 2 * self.slack), epsilon)
        return np.where(np.isfinite(stretch), drawn, 1.0)

    def of_losses(self, loss: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Returns the contribution of an output with this privacy loss to the divergence."""
        epsilon = self._charged(epsilon)
        ideal = -np.expm1(np.minimum(epsilon - 2 * self.slack - loss, 0.0))
        return self._drawn(math.exp(self.chances) * ideal, epsilon)

    def _charged(self, epsilon: np.ndarray) -> np.ndarray:
        """Caps epsilon. The delta at the cap is valid for every larger epsilon, too.

        The noise tables add `missed` times 1 + e^epsilon to delta, which is large for large
        epsilons, so without the cap the bound would be looser.
        """
        return np.minimum(epsilon, -math.log(self.missed) / 2) if self.missed else epsilon

    def _drawn(self, ideal: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Converts the divergence of ideal noise to that of noise from tables, rounded up."""
        missed = self.missed * (1 + np.exp(epsilon)) if self.missed else 0.0
        return np.minimum((math.exp(self.slack) * ideal + missed) * (1 + _ERROR), 1.0)

    def _ideal(self, stretch: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        pure, deviations = self.loss * stretch, self.deviations * stretch
        if self.deviations == 0:
            return _FAMILIES[self.family](pure, epsilon)
        # All releases without Gaussian noise together are bounded by one randomized response,
        # whose privacy loss is either +pure or -pure.
        up = 1 / (1 + np.exp(-pure))
        return up * gaussian(deviations, epsilon - pure) + (1 - up) * gaussian(
            deviations, epsilon + pure
        )


def laplace(a: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """The divergence of Laplace noise if the sum of all coordinates' shifts is `a` noise scales."""
    return _both_signs(epsilon, lambda e: -np.expm1(np.minimum((e - a) / 2, 0)))


def bounded_range(a: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Returns the largest divergence if all privacy losses are in an interval of length a."""

    def at(e: np.ndarray) -> np.ndarray:
        above = np.where(a > e, a, 1.0)
        found = np.expm1(np.minimum((e - above) / 2, 0)) ** 2 / -np.expm1(-above)
        return np.where(a > e, found, 0.0)

    return _both_signs(epsilon, at)


def pure(a: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Returns the largest divergence if all privacy losses are in [-a, a].

    Randomized response attains it.
    """
    return _both_signs(epsilon, lambda e: -np.expm1(np.minimum(e - a, 0)) / (1 + np.exp(-a)))


def gaussian(mu: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """The divergence of normal noise that is shifted by mu standard deviations, rounded up."""
    safe = np.where(mu > 0, mu, 1.0)
    # For larger values of epsilon, the logarithms below would be infinite.
    epsilon = np.minimum(epsilon, _FARTHEST * safe)
    high = scipy.special.log_ndtr(safe / 2 - epsilon / safe)
    low = epsilon + scipy.special.log_ndtr(-safe / 2 - epsilon / safe)
    # Subtracting two nearly equal numbers loses digits. `error` bounds the relative error of the
    # result.
    error = 1e-14 * (1 + np.abs(high) + np.abs(low) + np.abs(epsilon))
    with np.errstate(under="ignore"):
        found = np.exp(high) * np.minimum(-np.expm1(np.minimum(low - high, 0)) + error, 1.0)
        # The divergence is above 0, so it must not underflow to 0.
        found = np.maximum(found, _LEAST)
    return np.where(mu > 0, found, np.maximum(-np.expm1(np.minimum(epsilon, 0)), 0.0))


def _both_signs(epsilon: np.ndarray, at: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Extends a divergence to epsilon < 0, for pairs whose privacy loss is symmetric.

    The divergence must be the same if the two databases are swapped.
    """
    found = np.maximum(at(np.abs(epsilon)), 0.0)
    with np.errstate(under="ignore"):
        return np.where(epsilon >= 0, found, 1 - np.exp(-np.abs(epsilon)) * (1 - found))


_FAMILIES = {"laplace": laplace, "range": bounded_range, "pure": pure}
