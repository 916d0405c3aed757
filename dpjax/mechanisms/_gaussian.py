"""The Gaussian mechanism."""

from typing import Literal

from dpjax._core import _checks
from dpjax._core._values import NoiseKind, Scalar, Sensitivity
from dpjax.mechanisms._additive import AdditiveMechanism, additive
from dpjax.mechanisms._gaussian_calibration import analytic_multiplier, classical_multiplier
from dpjax.mechanisms._start import check_noise
from dpjax.random._facade import GAUSSIAN

_CALIBRATIONS = {"analytic": analytic_multiplier, "classical": classical_multiplier}


def gaussian(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    delta: Scalar,
    *,
    calibration: Literal["analytic", "classical"] = "analytic",
    noise: NoiseKind = "exact",
) -> AdditiveMechanism:
    """The Gaussian mechanism: independent normal noise of standard deviation sigma.

    The analytic sigma is the least one with Phi(x) - exp(epsilon) Phi(x - mu) <= delta, where
    mu = Delta / sigma and x = mu / 2 - epsilon / mu. The classical one is
    Delta sqrt(2 log(1.25 / delta)) / epsilon.

    Args:
        sensitivity: a `Sensitivity` in the norm "l2", or a number, taken as a global bound in it.
        epsilon: finite, above 0. For the classical calibration at most 1: above, its noise is too
            small.
        delta: at most 1 - 1e-9 (traced: .999). For every coordinate that is released, the tables of
            the noise allow from about 2e-28 exp(epsilon) to about 1 - 5e-7. Other values raise, or
            give NaN if traced.
        calibration: "analytic" or "classical".
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `AdditiveMechanism` whose `scale` is sigma: `mechanism(key, value)` releases any pytree
        of real arrays. Integers get the noise rounded to integers.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not l2.

    Formal guarantees:
        (epsilon, delta, gamma)-random DP under the sensitivity's neighboring relation;
        (epsilon, delta)-DP where the sensitivity is a global bound. sigma is rounded up: by less
        than 1e-6 for concrete parameters, by less than 0.2% for traced ones. Holds for the noise
        that is drawn, in any dimension. That is a discrete Gaussian on a lattice of 2^-35 sigma,
        divided down to the grid. It is within e^(2^-46) of the rounded normal, except for a mass of
        2^-118. noise="float" promises nothing.

    Source:
        Balle and Wang (2018), Theorem 8; Dwork and Roth (2014), Theorem A.1, for the classical
        calibration; Rubinstein and Aldà (2017), Corollary 12.

    Example:
        >>> import dpjax
        >>> round(dpjax.gaussian(1.0, 1.0, 1e-5).scale, 4)
        3.7306
    """
    multiplier = _CALIBRATIONS[_checks.choice("calibration", calibration, tuple(_CALIBRATIONS))]
    delta = _checks.fraction("delta", delta)
    epsilon = _checks.positive("epsilon", epsilon)
    if not _checks.is_traced(delta) and not 1e-300 <= delta <= 1 - 1e-9:
        raise ValueError(f"delta must be from 1e-300 to 1 - 1e-9, got {delta}")
    if calibration == "classical" and not _checks.is_traced(epsilon) and epsilon > 1:
        raise ValueError(
            f"epsilon must be at most 1 for the classical calibration, got {epsilon}:"
            ' above, it adds too little noise; use calibration="analytic"'
        )
    drawn = GAUSSIAN if check_noise(noise) else GAUSSIAN.in_floats()
    return additive(
        sensitivity, epsilon, norm="l2", noise=drawn, delta=delta, multiplier=multiplier
    )
