"""The Laplace mechanism."""

from dpjax._core._values import NoiseKind, Scalar, Sensitivity
from dpjax.mechanisms._additive import AdditiveMechanism, additive
from dpjax.mechanisms._start import check_noise
from dpjax.random._facade import LAPLACE


def laplace(
    sensitivity: Sensitivity | float, epsilon: Scalar, *, noise: NoiseKind = "exact"
) -> AdditiveMechanism:
    """The Laplace mechanism: independent noise of scale b = Delta / epsilon on every coordinate.

    Its density is proportional to exp(-||output - value||_1 / b).

    Args:
        sensitivity: a `Sensitivity` in the norm "l1", or a number, taken as a global bound in it.
        epsilon: finite, above 0.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `AdditiveMechanism`: `mechanism(key, value)` releases any pytree of real arrays. Integers
        get the noise rounded to integers.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if one of them is not positive and finite, or the sensitivity's norm is not l1.

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP where
        the sensitivity is a global bound (gamma 0). Holds for the noise that is drawn, given
        uniform bits: the scale covers rounding to the grid and the tables of the noise, see
        `effective_scale`. With noise="float" nothing is promised.

        `dp_event` is that of the scalar mechanism, also for vectors: shifts a >= b of two
        coordinates (in scales) are dominated by the shift a + b of one. The hockey-stick divergence
        of that one at t >= 0 is 1 - exp((t - a - b) / 2); with s = t - a, that of the two is
        smaller by (b - s) exp((s - b) / 2) / 4 where |s| <= b, by b exp((s - b) / 2) / 2 where
        s < -b; negative t follow by symmetry.

    Source:
        Dwork, McSherry, Nissim and Smith (2006); Rubinstein and Aldà (2017), Corollary 10.

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.laplace(1 / 100, epsilon=0.5)
        >>> mechanism.scale
        0.02
        >>> mechanism.guarantee
        (epsilon=0.5, delta=0)-DP, under replace-one
    """
    drawn = LAPLACE if check_noise(noise) else LAPLACE.in_floats()
    return additive(sensitivity, epsilon, norm="l1", noise=drawn)
