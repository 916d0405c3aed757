"""Operating points: the number of pairs, the rank of the order statistic, gamma and confidence.

docs/proofs/sampled-sensitivity.md has the proofs.
"""

import decimal
import functools
import math
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import scipy

from dpjax._core import _checks
from dpjax._core._values import Method, OperatingPoint
from dpjax._exact._numerics import bisect, round_up

_Tail: TypeAlias = Callable[[float, float, float], float]

MOST_PAIRS = 10**10
# The number 1 in fixed-point arithmetic, with a unit of 2^-1280. Every float64 is a multiple of
# this unit.
_ONE = 2**1280
# Floats are not trusted to compare two numbers whose relative difference is below `_UNRESOLVED`,
# because SciPy's incomplete beta function has a relative error of a few 1e-15. For at most
# `_FEW_PAIRS` pairs, exact integers are used instead.
_UNRESOLVED = 1e-12
_FEW_PAIRS = 1000
# A generous bound on the relative error of SciPy's functions and of sums of logarithms.
_ERROR = 1e-12
# SciPy's `betaln` adds up log gamma values. This is a bound on the error of each of them.
_ERROR_OF_A_LOG = 1e-15


def operating_point(
    *,
    m: int | None = None,
    gamma: float | None = None,
    method: Method = "exact",
    confidence: float | Literal["default"] | None = "default",
) -> OperatingPoint:
    """The least m, k or gamma for which the k-th of m distances covers all but gamma of the pairs.

    Let Phi be the distribution function of the distance G of a random pair. Method "exact" uses
    that Phi(G_(k)) is stochastically at least Beta(k, m - k + 1):

    - with `confidence` C, the least k with P(Binomial(m, 1 - gamma) <= k - 1) >= C;
    - with `confidence=None`, k = ceil((1 - gamma)(m + 1)), by exchangeability.

    Method "dkw" is Table 1 of the paper. Its statement holds for all thresholds at once, so k is
    larger than for "exact". The statement of method "anytime" holds for every m at once, so you may
    look at the samples and decide whether to draw more. For this, k is a few ranks larger than for
    "exact": at gamma .05, confidence .99 and m = 900, k is 876 instead of 871. The least possible m
    is 126 instead of 90.

    If only gamma is given, m is the least feasible number of pairs and k = m, which selects the
    largest distance. If only m is given, gamma is the least feasible gamma and k = m. If both are
    given, k is the least feasible rank.

    Args:
        m: number of pairs, at most 10^10.
        gamma: probability that a random pair is not covered, in (0, 1).
        method: "exact", "dkw" or "anytime".
        confidence: probability C over the samples, in (0, 1); None for the marginal statement,
            which is about the samples and a fresh pair together. The default is 0.99, or None for
            "dkw", whose statement is marginal.

    Returns:
        The `OperatingPoint`.

    Raises:
        TypeError: if m or gamma is not a number.
        ValueError: if a parameter is out of range, if neither m nor gamma is given, if they are
            infeasible together (the message names feasible ones), if m would exceed 10^10, if a
            confidence is given with "dkw", or if it is None with "anytime".

    Formal guarantees:
        Assumes that the m pairs are independent draws. If a confidence C is given, then
        Phi(G_(k)) >= 1 - gamma with probability at least C over the samples. Without a confidence,
        P(G_new <= G_(k)) >= 1 - gamma over the samples and a fresh pair together. Both statements
        are true for any Phi, continuous or not. Choose m, gamma and C before you look at the
        samples. To choose among J such settings afterwards, use confidence 1 - (1 - C)/J for each.
        With "anytime", you may choose m by any rule after you look at the samples, but not gamma
        or C. Then, with probability at least C, Phi(G_(k)) >= 1 - gamma at every m, where k is the
        rank for m and G_(k) is taken over the first m pairs.

    Source:
        Wilks (1941) for "exact"; Rubinstein and Aldà (2017), Theorem 15 and Table 1, for "dkw";
        Ville (1939), Howard and Ramdas (2022) for "anytime".

    Example:
        >>> import dpjax
        >>> dpjax.operating_point(m=1500, gamma=0.1).k
        1377
        >>> print(dpjax.operating_point(gamma=0.05, method="dkw"))
        m=1305, k=1305, gamma=0.05, rho=0.004183 (dkw, marginal)
    """
    _checks.choice("method", method, get_args(Method))
    if m is None and gamma is None:
        raise ValueError("m, gamma or both must be given, got neither")
    if m is not None:
        m = _checks.integer("m", m, least=1, most=MOST_PAIRS)
    for name, value in (("gamma", gamma), ("confidence", confidence)):
        if _checks.is_traced(value):
            raise TypeError(
                f"{name} must be a concrete number, because operating points are computed on the "
                "host, got a traced value: call operating_point outside of jit and vmap"
            )
    if gamma is not None:
        gamma = _checks.fraction("gamma", gamma)
    if method == "dkw":
        if confidence not in ("default", None):
            raise ValueError(
                f'confidence must be None with method="dkw", got {confidence!r}: this method bounds'
                " a probability over the samples and a fresh pair together, so its statement has no"
                " separate confidence over the samples"
            )
        return _dkw(m, gamma)
    if confidence == "default":
        confidence = 0.99
    if confidence is not None:
        confidence = _checks.fraction("confidence", confidence)
    elif method == "anytime":
        raise ValueError('confidence must be in (0, 1) with method="anytime", got None')
    return _point(m, gamma, method, confidence)


def confidence_of_each(confidence: float | None, statements: int) -> float | None:
    """Returns 1 - (1 - C)/n, rounded up: n statements at this confidence hold together at C."""
    if confidence is None:
        return None
    return round_up(1 - (1 - Fraction(confidence)) / statements)


def _within_limit(m: float, gamma: float) -> int:
    """Rounds a number of pairs up to an integer. Raises an error if it is above `MOST_PAIRS`."""
    if m > MOST_PAIRS:
        raise ValueError(
            f"gamma={gamma:g} needs more pairs than the limit of {MOST_PAIRS:.0g}: take a larger"
            " gamma"
        )
    return math.ceil(m)


def _refuse_infeasible(m: int, gamma: float, least_m: float, least_gamma: float) -> NoReturn:
    advice = [f"m of at least {math.ceil(least_m)}"] if least_m <= MOST_PAIRS else []
    if least_gamma < 1:
        # This gamma is rounded up, so that it is feasible as it is printed.
        rounding = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)
        advice.append(f"gamma of at least {rounding.create_decimal(least_gamma)}")
    raise ValueError(f"m={m} is too small for gamma={gamma:g}: take {', or '.join(advice)}")


@functools.lru_cache
def _point(
    m: int | None, gamma: float | None, method: Method, confidence: float | None
) -> OperatingPoint:
    """Returns the operating point of "exact" or "anytime".

    Parameters that are not given get their least possible values.
    """
    least_m, least_gamma, least_k = _LEAST["marginal" if confidence is None else method]
    if gamma is None:
        assert m is not None
        gamma = least_gamma(m, confidence)
        if gamma == 1:
            raise ValueError(f"m={m} is too small for any gamma below 1: take a larger m")
        return OperatingPoint(m, m, gamma, None, method, confidence)
    if m is None:
        m = _within_limit(least_m(gamma, confidence), gamma)
    k = least_k(m, gamma, confidence)
    if k is None:
        _refuse_infeasible(m, gamma, least_m(gamma, confidence), least_gamma(m, confidence))
    return OperatingPoint(m, k, gamma, None, method, confidence)


# The following functions are for method "exact" with a confidence.


def _covers(m: int, gamma: float, confidence: float) -> bool:
    """Whether m pairs are enough: 1 - (1 - gamma)^m >= confidence.

    Then, with this confidence, the largest of m distances is at least the (1 - gamma)-quantile.
    """
    # The power is computed by repeated squaring in fixed-point arithmetic. Products are rounded up,
    # so an error can only change the result to False, which is safe.
    square, power = int((1 - Fraction(gamma)) * _ONE), _ONE
    while m:
        if m % 2:
            power = -(-power * square // _ONE)
        square = -(-square * square // _ONE)
        m //= 2
    return power <= (1 - Fraction(confidence)) * _ONE


def _least_m(gamma: float, confidence: float) -> float:
    """Searches for the exact least m near an approximation.

    If the approximation is above `MOST_PAIRS`, it is returned itself.
    """
    about = math.log1p(-confidence) / math.log1p(-gamma)
    if about > MOST_PAIRS:
        return about
    m = max(1, math.ceil(about) - 1)
    while not _covers(m, gamma, confidence):
        m += 1
    return m


def _least_gamma(m: int, confidence: float) -> float:
    gamma = -math.expm1(math.log1p(-confidence) / m)
    while not _covers(m, gamma, confidence):
        gamma = math.nextafter(gamma, 1.0)
    return gamma


def _least_k(m: int, gamma: float, confidence: float) -> int | None:
    """Returns the least k with P(Binomial(m, 1 - gamma) >= k) <= 1 - confidence, or None."""
    if not _covers(m, gamma, confidence):
        return None
    allowed = 1 - Fraction(confidence)
    if m <= _FEW_PAIRS:
        return _least_k_of_few(m, Fraction(gamma), allowed)

    def covers(k: int) -> bool:
        # This tail probability is the complement of the regularized incomplete beta function
        # I_gamma(m - k + 1, k). If floats cannot decide the comparison, k is treated as too small,
        # which is safe.
        tail = float(scipy.special.betaincc(m - k + 1, k, gamma))
        return tail < float(allowed) * (1 - _UNRESOLVED)

    found = _least(m - 1, covers)
    return m if found is None else found


def _least_k_of_few(m: int, gamma: Fraction, allowed: Fraction) -> int:
    """Computes `_least_k` in exact integers. For few pairs this is faster than importing SciPy."""
    lost, whole = gamma.as_integer_ratio()
    # There are whole^m outcomes. `ways` is the number of outcomes in which exactly k of the m pairs
    # are covered.
    k, ways, seen, most = m, (whole - lost) ** m, 0, math.floor(allowed * whole**m)
    while seen + ways <= most:
        seen += ways
        ways = ways * k * lost // ((m - k + 1) * (whole - lost))
        k -= 1
    return k + 1


# The following functions are for method "exact" without a confidence, that is, for the marginal
# statement. The arithmetic is exact for the binary value of the float gamma. For example, the float
# .3 is slightly below 3/10, so it may need one more rank than 3/10 would.


def _least_marginal_m(gamma: float, _: None) -> int:
    return max(1, math.ceil(1 / Fraction(gamma) - 1))


def _marginal_k(m: int, gamma: float, _: None) -> int | None:
    k = max(1, math.ceil((1 - Fraction(gamma)) * (m + 1)))
    return k if k <= m else None


def _least_marginal_gamma(m: int, _: None) -> float:
    return round_up(Fraction(1, m + 1))


# The following functions are for method "anytime".


def anytime_k(m: int, gamma: float, confidence: float) -> int | None:
    """Returns the least rank whose order statistic bounds the 1 - gamma quantile, or None."""
    return _least(m, lambda k: _is_sure(k, m, gamma, confidence, scipy.special.betainc))


def anytime_lower_k(m: int, gamma: float, confidence: float) -> int:
    """Returns the largest rank whose order statistic is below the 1 - gamma quantile, or 0."""
    # If an order statistic is surely below the quantile, so are those of lower ranks. So the search
    # counts ranks down from m.
    found = _least(m, lambda j: _is_sure(m - j, m, gamma, confidence, scipy.special.betaincc))
    return 0 if found is None else m - found


def _least_anytime_m(gamma: float, confidence: float) -> float:
    """Returns the least m for which the largest of m distances bounds the 1 - gamma quantile.

    The result is infinite if it would be above `MOST_PAIRS`.
    """
    found = _least(MOST_PAIRS, lambda m: _is_sure(m, m, gamma, confidence, scipy.special.betainc))
    return math.inf if found is None else found


def _least_anytime_gamma(m: int, confidence: float) -> float:
    """Returns the least gamma for which the largest of m distances bounds the 1 - gamma quantile.

    The result is rounded up.
    """
    tail = scipy.special.betainc
    return bisect(lambda gamma: not _is_sure(m, m, gamma, confidence, tail), 0.0, 1.0)[1]


def _least(most: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the least number from 1 to `most` with a monotone property, or None."""
    found = bisect_left(range(1, most + 1), True, key=holds) + 1
    return found if found <= most else None


def _is_sure(k: int, m: int, gamma: float, confidence: float, tail: _Tail) -> bool:
    """Whether the e-value whose log is `_excess` is at least 1 / (1 - confidence)."""
    return _excess(k, m, gamma, tail) >= -math.log1p(-confidence) * (1 + _ERROR)


def _excess(k: int, m: int, gamma: float, tail: _Tail) -> float:
    """Returns the log of a mixture e-value, if k of m distances are below the 1 - gamma quantile.

    The result is rounded down. The formula is written in gamma and m - k, because 1 - gamma would
    lose digits if gamma is small. `tail` is `betainc` for a mixture over all numbers from 0 to
    gamma, and `betaincc` for a mixture over all numbers from gamma to 1.
    docs/proofs/sampled-sensitivity.md has the proof, in "At any time".
    """
    mass = float(tail(m - k + 1, k + 1, gamma))
    if not 0 < gamma < 1 or mass <= 0:
        return -math.inf
    covered, left = math.log1p(-gamma), math.log(gamma)
    side = left if tail is scipy.special.betainc else covered
    terms = (
        scipy.special.betaln(k + 1, m - k + 1),
        math.log(mass),
        -side,
        -k * covered,
        (k - m) * left,
    )
    error = _ERROR * (1 + math.fsum(map(abs, terms))) + _ERROR_OF_A_LOG * math.lgamma(m + 2)
    return math.fsum(terms) - error


# For each kind of statement: the functions that compute the least m, the least gamma and the least
# k. The function for k returns None if m is too small.
_LEAST: dict[str, tuple[Callable[..., float], Callable[..., float], Callable[..., Any]]] = {
    "exact": (_least_m, _least_gamma, _least_k),
    "marginal": (_least_marginal_m, _least_marginal_gamma, _marginal_k),
    "anytime": (_least_anytime_m, _least_anytime_gamma, anytime_k),
}


# The following functions implement method "dkw" (Table 1 of the paper).


def _dkw(m: int | None, gamma: float | None) -> OperatingPoint:
    if m is None:
        assert gamma is not None
        rho, least_m = _dkw_minimize_m(gamma)
        m = _within_limit(least_m, gamma)
        while _dkw_gamma(m, rho) > gamma:
            m += 1
        return OperatingPoint(m, m, gamma, rho, "dkw", None)
    rho = math.exp(scipy.special.lambertw(-1 / (4 * m), k=-1).real / 2)
    least_gamma = _dkw_gamma(m, rho)
    if gamma is None:
        if least_gamma >= 1:
            raise ValueError(
                f"m={m} is too small: its least gamma would be {least_gamma:.4g};"
                " take m of at least 2"
            )
        return OperatingPoint(m, m, least_gamma, rho, "dkw", None)
    if gamma < least_gamma:
        _refuse_infeasible(m, gamma, _dkw_minimize_m(gamma)[1], least_gamma)
    k = max(1, min(m, math.ceil(m * (1 - Fraction(gamma) + Fraction(least_gamma)))))
    return OperatingPoint(m, k, gamma, rho, "dkw", None)


def _dkw_minimize_m(gamma: float) -> tuple[float, float]:
    """Returns the rho for which m = log(1 / rho) / (2 (gamma - rho)^2) is smallest, and this m.

    If gamma^2 would underflow, m is infinite.
    """
    if gamma < 1e-100:
        return 0.0, math.inf
    rho = math.exp(scipy.special.lambertw(-gamma / (2 * math.sqrt(math.e)), k=-1).real + 0.5)
    return rho, math.log(1 / rho) / (2 * (gamma - rho) ** 2)


def _dkw_gamma(m: int, rho: float) -> float:
    """Returns the gamma of Theorem 15, rounded up: rho + sqrt(log(1 / rho) / (2 m))."""
    exact = decimal.Context(prec=50)
    root = exact.sqrt(exact.divide(-exact.ln(decimal.Decimal(rho)), decimal.Decimal(2 * m)))
    return round_up((Fraction(rho) + Fraction(root)) * (1 + Fraction(1, 10**40)))
