"""`under_distribution_shift`: guarantees for records that the oracle does not describe exactly.

docs/proofs/distribution-shift.md proves the bounds.
"""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable

from dpjax._core import _checks
from dpjax._core._guarantee import Guarantee, SampledEvent, concrete
from dpjax._exact._numerics import bisect, sum_up
from dpjax.accounting._composition import distinct_events, joint

# A bound on the relative rounding error of a few float64 operations, including logarithms.
_ERROR = 16 * sys.float_info.epsilon


def under_distribution_shift(
    guarantee: Guarantee,
    *,
    kl: float | None = None,
    reverse_kl: float | None = None,
    chi2: float | None = None,
    ratio: float | None = None,
    n: int,
    records: int | None = None,
) -> Guarantee:
    """Converts a guarantee from the oracle's distribution P of records to another distribution Q.

    Two databases that differ in t records have N = n + t records together. If only two records
    determine the distance of a pair, pass records=2; then N = 2 t. The distance of a pair exceeds
    the estimated sensitivity with probability gamma under P, and with probability q under Q. Pass
    one of these bounds on the shift of the distribution of a single record:

        kl:          tau >= KL(P || Q),       kl(gamma || q) <= N tau
        reverse_kl:  tau >= KL(Q || P),       kl(q || gamma) <= N tau
        chi2:        c >= chi^2(Q || P),      q <= gamma + sqrt(((1 + c)^N - 1) gamma (1 - gamma))
        ratio:       W >= dQ/dP everywhere,   q <= W^N gamma

    where kl(a || b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b)). The largest q is the new
    gamma.

    Args:
        guarantee: the guarantee under P, for databases of n records.
        kl: tau, 0 or above.
        reverse_kl: tau, 0 or above.
        chi2: c, 0 or above.
        ratio: W, 1 or above.
        n: the number of records, at least 1.
        records: the number of independent records that determine the distance of a pair, as in
            `Sensitivity.deciding_records`: 2 for affine `dpjax.targets.summable` targets under
            `dpjax.oracles.independent`. None counts all records.

    Returns:
        A `Guarantee` under Q, gamma capped at 1 and rounded up.

    Raises:
        TypeError: if the guarantee is not concrete or a parameter is not a number.
        ValueError: if not exactly one bound is given, a number is out of range, or `records` does
            not fit a sampling of the guarantee.

    Formal guarantees:
        The result assumes i.i.d. records. The shift counts once for all releases that the guarantee
        covers, so call `compose` first and this function last. A guarantee without samplings is
        valid under any Q, and is returned unchanged. For `kl`, the result is never above Pinsker's
        bound gamma + sqrt(N tau / 2).

    Source:
        Rubinstein and Aldà (2017), Proposition 8, with the data processing inequality of each
        divergence in place of Pinsker's (docs/proofs/distribution-shift.md).

    Example:
        >>> import dpjax
        >>> sampled = dpjax.Guarantee(1.0, gamma=0.05, confidence=0.99)
        >>> dpjax.accounting.under_distribution_shift(sampled, kl=1e-6, n=999)
        (epsilon=1, delta=0, gamma=0.0603506)-random DP, confidence 0.99, under replace-one
        >>> dpjax.accounting.under_distribution_shift(sampled, ratio=1.0001, n=999)
        (epsilon=1, delta=0, gamma=0.0552583)-random DP, confidence 0.99, under replace-one
    """
    under_p = concrete(guarantee)
    n = _checks.integer("n", n, least=1)
    bounds = {"kl": kl, "reverse_kl": reverse_kl, "chi2": chi2, "ratio": ratio}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if len(given) != 1:
        raise ValueError(f"exactly one of kl, reverse_kl, chi2, ratio must be given, got {given}")
    ((name, bound),) = given.items()
    bound = _checks.non_negative(name, bound)
    if name == "ratio" and bound < 1:
        raise ValueError(
            f"ratio must be at least 1, because it bounds dQ/dP, whose average is 1, got {bound}"
        )
    events = distinct_events([under_p])
    if not events:
        return under_p
    gamma, confidence = joint(events)
    if records is not None and {event.records for event in events} != {records}:
        raise ValueError(
            f"records must agree with the samplings of the guarantee, got records={records}, but"
            f" the samplings have {[event.records for event in events]}: omit the argument records"
        )
    size = under_p.group_size
    under_q = _worst(name, gamma, bound, n + size if records is None else records * size)
    # The identity is a hash of the samplings, the bound and n, so calls with equal arguments give
    # equal identities. When their results are composed, gamma counts only once.
    counted = (n,) if records is None else (n, records)
    words = (*sorted(event.identity for event in events), repr((name, bound, *counted)))
    identity = hashlib.sha256("|".join(words).encode()).hexdigest()[:32]
    return dataclasses.replace(
        under_p,
        gamma=under_q,
        confidence=confidence,
        events=(SampledEvent(under_q, confidence, identity),),
    )


def _worst(name: str, gamma: float, bound: float, records: int) -> float:
    """Returns the largest possible gamma under the records' distribution Q, rounded up.

    `gamma` is the value under the oracle's distribution P. `name` says what `bound` limits: a
    divergence of P and Q, or their density ratio.
    """
    if name == "kl":
        limit = _up(records * bound)
        pinsker = sum_up((gamma, _up(math.sqrt(limit / 2)) if limit else 0.0))
        return min(1.0, pinsker, _largest(lambda q: _least_divergence(gamma, q), gamma, limit))
    if name == "reverse_kl":
        if gamma == 0:
            # KL(Q || P) is finite, so any event with probability 0 under P has probability 0 under
            # Q.
            return 0.0
        return _largest(lambda q: _least_divergence(q, gamma), gamma, _up(records * bound))
    # `exponent` is the logarithm of the factor ratio^records or (1 + chi2)^records. If this factor
    # overflows, the result is 1.
    exponent = _up(records * _up(math.log(bound) if name == "ratio" else math.log1p(bound)))
    if name == "ratio":
        return min(1.0, _up(gamma * _up(math.exp(exponent))) if exponent < 700 else 1.0)
    distance = _up(math.expm1(exponent)) if exponent < 700 else math.inf
    # The square roots are taken before the multiplication, because a product of two tiny numbers
    # could underflow to 0.
    spread = _up(math.sqrt(gamma) * math.sqrt(1 - gamma))
    moved = _up(math.sqrt(distance) * spread)
    return min(1.0, sum_up((gamma, moved)))


def _largest(divergence: Callable[[float], float], gamma: float, limit: float) -> float:
    """Returns the largest q in [gamma, 1] whose divergence is at most `limit`, rounded up.

    `divergence(q)` is a lower bound on the divergence, and increases with q. The bisection returns
    a q at which this lower bound exceeds the limit, or 1. So the returned q is never too small.
    """
    if limit == 0:
        return gamma
    return bisect(lambda q: not divergence(q) > limit, gamma, 1.0)[1]


def _least_divergence(a: float, b: float) -> float:
    """Returns the KL divergence of the Bernoulli distributions with means a and b, rounded down.

    The mean a is in [0, 1], and b is in (0, 1).
    """
    inside, size = _term(a, math.log(a) if a else 0.0, math.log(b))
    outside, more = _term(1 - a, math.log1p(-a) if a < 1 else 0.0, math.log1p(-b))
    return inside + outside - _ERROR * (size + more)


def _term(weight: float, log_a: float, log_b: float) -> tuple[float, float]:
    """Returns one term of the divergence, and a number proportional to its rounding error."""
    return weight * (log_a - log_b), weight * (abs(log_a) + abs(log_b))


def _up(number: float) -> float:
    """Rounds the result of one operation up by more than the operation's rounding error."""
    return math.nextafter(number * (1 + _ERROR), math.inf) if number else 0.0
