"""What a statement about ideal noise says of noise that is drawn from tables."""

import math

# Of one coordinate, for every noise there is: see the certificates of `random/_lattice.py`.
_LOSS, _MASS = 2.0**-46, 2.0**-118
SHARE = 2.0**-10


def charged(epsilon: float, delta: float, dims: int) -> tuple[float, float]:
    """(epsilon, delta (1 - 2^-10)) of ideal noise, as what holds of drawn noise.

    Drawn probabilities P' are within e^c of ideal ones but for a mass of m, so that
    P'(S) <= e^c P(S) + m <= e^c (e^epsilon Q(S) + delta) + m, and Q(S) <= e^c Q'(S) + m.

    Args:
        epsilon: of the ideal noise.
        delta: that is to hold in the end.
        dims: numbers that are drawn; 0 where only guarantees count, which hold as they are.
    """
    if dims == 0:
        return epsilon, delta
    loss, missed = _LOSS * dims, _MASS * dims
    grown = epsilon + 2 * loss
    if not grown < 500:
        return math.inf, math.inf
    needed = delta * (1 - SHARE) * math.exp(loss) + missed * (1 + math.exp(grown))
    return grown * (1 + 2**-50), needed * (1 + 1e-9)
