"""The Gaussian mechanism."""

from typing import Literal

from dpjax._core import _checks
from dpjax._core._values import NoiseKind, Scalar, Sensitivity
from dpjax.mechanisms._additive import AdditiveMechanism, additive
from dpjax.mechanisms._gaussian_calibration import analytic_multiplier, classical_multiplier
from dpjax.mechanisms._mechanism import check_noise
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

    The analytic sigma is the least with Phi(x) - exp(epsilon) Phi(x - mu) <= delta, where
    mu = Delta / sigma and x = mu / 2 - epsilon / mu; the classical one is
    Delta sqrt(2 log(1.25 / delta)) / epsilon.

    Args:
        sensitivity: a `Sensitivity` in the norm "l2", or a number, taken as a global bound in it.
        epsilon: finite, above 0; at most 1 for the classical calibration, which under-noises above.
        delta: at most 1 - 1e-9 (traced: .999), and far enough from 0 and 1 for the tables of the
            noise: from about 2e-28 exp(epsilon) on, and up to about 1 - 5e-7, for every coordinate
            that is released (traced: NaN outside).
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
        (epsilon, delta)-DP where the sensitivity is a global bound. sigma is rounded outward: by
        less than 1e-6 for concrete parameters, by less than 0.2% for traced ones. Holds for what is
        really drawn, in any dimension: the noise is a discrete Gaussian on a lattice of 2^-35
        sigma, within e^(2^-46) of the rounded normal but for a mass of 2^-118, and divided down to
        the grid. With noise="float" nothing is promised.

    Source:
        Balle and Wang (2018), Theorem 8; Dwork and Roth (2014), Theorem A.1, for the classical
        one; Rubinstein and Aldà (2017), Corollary 12.

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
            ' above, its delta is wrong; use calibration="analytic"'
        )
    drawn = GAUSSIAN if check_noise(noise) else GAUSSIAN.in_floats()
    return additive(
        sensitivity, epsilon, norm="l2", noise=drawn, delta=delta, multiplier=multiplier
    )
