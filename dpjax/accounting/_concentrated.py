"""zCDP (zero-concentrated differential privacy): costs of releases, conversion to epsilon."""

import math
from typing import Literal, NamedTuple, get_args

import scipy

from dpjax._core import _checks
from dpjax._core._values import Guarantee, guarantee_in
from dpjax._exact._numerics import bisect
from dpjax.accounting._composition import concrete

# A bound on the rounding errors of a float64 sum, relative to the sum of its terms' magnitudes.
_ROUNDING = 1e-13
# Below this number, floats lose precision, so a smaller rho is rounded up to it.
_LEAST_RHO = 1e-300
Conversion = Literal["optimal", "simple"]


class Concentration(NamedTuple):
    """The cost of a release in delta-approximate rho-zCDP.

    Attributes:
        rho: except on an event of probability delta, the Renyi divergence of every order a is at
            most a * rho.
        delta: the probability of that event.
    """

    rho: float
    delta: float


def concentration(release: object) -> Concentration:
    """Returns the cost of one release in zCDP.

    The cost is the mechanism's `zcdp`, or the one that its guarantee implies.
    """
    known = getattr(release, "zcdp", None)
    if known is not None:
        rho, delta = map(float, known)
        if not (rho >= 0 and 0 <= delta <= 1):
            raise ValueError(
                "zcdp of a mechanism must be (rho, delta) with rho at least 0 and delta in [0, 1],"
                f" got {(rho, delta)}"
            )
        return Concentration(rho, delta)
    guarantee = guarantee_of(release)
    rho = float(guarantee.epsilon) ** 2 / 2 * (1 + _ROUNDING)
    return Concentration(rho, float(guarantee.delta))


def guarantee_of(release: object) -> Guarantee:
    """Returns the guarantee of a mechanism or release, or a given guarantee, in Python floats."""
    promised = guarantee_in(release)
    if promised is None:
        raise TypeError(f"releases must be mechanisms or guarantees, got {_checks.shown(release)}")
    return concrete(promised)


def zcdp_to_epsilon(rho: float, *, delta: float, method: Conversion = "optimal") -> float:
    """The epsilon of (epsilon, delta)-DP that rho-zCDP implies.

    "simple" is rho + 2 sqrt(rho log(1 / delta)). "optimal" minimizes the bound
    a rho + log(1 / (a delta)) / (a - 1) + log(1 - 1 / a) over orders a > 1. This is the least
    epsilon that the Renyi divergence of a single order implies.

    Args:
        rho: the parameter of zCDP, 0 or above.
        delta: strictly between 0 and 1.
        method: "optimal" or "simple".

    Returns:
        epsilon, rounded up.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        The result is valid for every rho-zCDP mechanism. Every order gives a valid bound, so an
        inexact search for the best order can only make epsilon larger.

    Source:
        Bun and Steinke (2016), Proposition 1.3; Canonne, Kamath and Steinke (2020), Proposition 12.

    Example:
        >>> import dpjax
        >>> round(dpjax.accounting.zcdp_to_epsilon(0.5, delta=1e-8), 4)
        6.0862
        >>> round(dpjax.accounting.zcdp_to_epsilon(0.5, delta=1e-8, method="simple"), 4)
        6.5697
    """
    rho = _checks.non_negative("rho", rho)
    delta = _checks.fraction("delta", delta)
    _checks.choice("method", method, get_args(Conversion))
    if rho == 0:
        return 0.0
    rho = max(rho, _LEAST_RHO)
    log = -math.log(delta)
    simple = (rho + 2 * math.sqrt(rho * log)) * (1 + _ROUNDING)
    if method == "simple":
        return simple
    # The simple conversion uses the order 1 + sqrt(log(1 / delta) / rho). The best order is near
    # this order, so only orders near it are searched.
    start = math.log(log / rho) / 2

    def bound(x: float) -> float:
        """Returns the bound on epsilon that uses order 1 + e^x, rounded up."""
        above, more = math.exp(x), math.log1p(math.exp(x))
        terms = (1 + above) * rho, log / above, -more / above, x - more
        return math.fsum(terms) + _ROUNDING * math.fsum(map(abs, terms))

    ends = start - 12, start + 3
    found = scipy.optimize.minimize_scalar(
        bound, bounds=ends, method="bounded", options={"xatol": 1e-9}
    )
    return max(0.0, min(simple, bound(float(found.x))))


def largest_rho(epsilon: float, delta: float) -> float:
    """Returns the largest rho for which rho-zCDP implies (epsilon, delta)-DP, up to rounding."""
    high = epsilon + 1.0
    while zcdp_to_epsilon(high, delta=delta) <= epsilon:
        high *= 2
    return bisect(lambda rho: zcdp_to_epsilon(rho, delta=delta) <= epsilon, 0.0, high)[0]
