"""From guarantees of ideal noise to guarantees of noise that is drawn from tables."""

import math

# Bounds for one coordinate of any noise of dpjax: see the certificates of `random/_lattice.py`.
_LOSS, _MASS = 2.0**-46, 2.0**-118
SHARE = 2.0**-10  # The part of delta that pays for the difference.


def charged(epsilon: float, delta: float, dims: int) -> tuple[float, float]:
    """Turns (epsilon, delta (1 - 2^-10))-DP of ideal noise into (epsilon, delta) of drawn noise.

    Outside of a mass m, drawn probabilities P' are within a factor e^c of the ideal P. So
    P'(S) <= e^c P(S) + m <= e^c (e^epsilon Q(S) + delta) + m, and Q(S) <= e^c Q'(S) + m.

    Args:
        epsilon: of the ideal noise.
        delta: of the final guarantee.
        dims: how many numbers are drawn; 0 where no noise is drawn, and nothing is charged.
    """
    if dims == 0:
        return epsilon, delta
    loss, missed = _LOSS * dims, _MASS * dims
    grown = epsilon + 2 * loss
    if not grown < 500:
        return math.inf, math.inf
    needed = delta * (1 - SHARE) * math.exp(loss) + missed * (1 + math.exp(grown))
    return grown * (1 + 2**-50), needed * (1 + 1e-9)
