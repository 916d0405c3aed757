"""Gaussian noise calibrated to a bound on the advantage of membership attacks."""

import scipy

from dpjax._core import _checks
from dpjax._core._values import Sensitivity
from dpjax._exact._numerics import bisect
from dpjax.mechanisms._additive import AdditiveMechanism, gaussian
from dpjax.mechanisms._gaussian_multipliers import analytic_multiplier


def gaussian_for_advantage(
    sensitivity: Sensitivity | float, advantage: float, *, delta: float = 1e-6
) -> AdditiveMechanism:
    """The Gaussian mechanism with the least noise that keeps membership attacks below an advantage.

    The advantage of an attack is its true positive rate minus its false positive rate. The best
    attack on Gaussian noise has an advantage of 2 Phi(Delta / (2 sigma)) - 1. So sigma is Delta /
    (2 Phi^-1((1 + advantage) / 2)). A pair of epsilon and delta also bounds the advantage, but
    calibrating to a pair that gives the same bound takes several times more noise.

    Args:
        sensitivity: as for `gaussian`.
        advantage: the largest advantage, from 1e-5 to .999.
        delta: the delta of the guarantee that the mechanism states; it does not change the noise.

    Returns:
        An `AdditiveMechanism`, with the least epsilon for this noise and delta.

    Raises:
        TypeError: if a parameter is not a concrete number.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not l2.

    Formal guarantees:
        Those of `gaussian` at the epsilon and delta of the mechanism. Its `advantage` is at most
        the given one, in up to 2^20 coordinates.

    Source:
        Kulynych, Gomez, Kaissis, du Pin Calmon and Troncoso, "Attack-aware noise calibration for
        differential privacy" (2024).

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.mechanisms.gaussian_for_advantage(1.0, 0.2, delta=1e-5)
        >>> round(mechanism.scale, 2)
        1.97
    """
    largest = _checks.finite("advantage", advantage)
    delta = _checks.fraction("delta", delta)
    for name, number in (("advantage", largest), ("delta", delta)):
        _checks.host_only(name, number, "a concrete number")
    if not 1e-5 <= largest <= 0.999:
        raise ValueError(f"advantage must be from 1e-5 to .999, got {largest}")
    # A small margin covers the errors of the tables from which noise is drawn, and the rounding of
    # privacy loss distributions.
    ideal = float(largest) * (1 - 1e-6) - 1e-7
    if delta >= ideal:
        raise ValueError(
            f"delta must be below advantage={largest:g}, because the advantage is delta at an"
            f" epsilon of 0, got {delta:g}"
        )
    needed = 0.5 / float(scipy.special.ndtri((1 + ideal) / 2)) * (1 + 1e-9)

    def is_enough(epsilon: float) -> bool:
        return bool(analytic_multiplier(epsilon, delta) >= needed)

    epsilon, _ = bisect(is_enough, 1e-12, 500.0, in_logarithms=True)
    return gaussian(sensitivity, epsilon, delta)
