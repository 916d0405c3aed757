"""Epsilon of composed steps by privacy loss distributions, which dp-accounting discretizes.

Its discretization is pessimistic at every width. What is not: convolutions by FFT lose mass, and
small noise or many steps take more memory than there is.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import scipy

from dpjax._core import _checks

_INTERVAL = 1e-4
# Beyond so many intervals they are made wider, and beyond this loss nothing is computed.
_MOST_INTERVALS, _LARGEST_LOSS = 2**20, 1e6
# What convolutions by FFT may lose: they raise a mass of 1, which is off by 1e-16, to the power of
# the steps.
_LOST_TO_ROUNDING = 1e-13
_LOST_PER_STEP = 1e-15
# dp-accounting takes a number of outcomes to the power of the steps.
_MOST_AT_ONCE = 1000


class NoEpsilonError(ValueError):
    """No epsilon goes with a delta."""


def epsilons_by_losses(
    kind: Literal["poisson", "fixed"], rate: float, z: float, steps: int, *, replaced: bool
) -> Callable[[float], float]:
    """A function from delta to epsilon, of steps of a Gaussian mechanism on sampled batches.

    Args:
        kind: of sampling.
        rate: the probability that a record is in a batch.
        z: the noise multiplier.
        steps: how many.
        replaced: whether neighbors replace a record, instead of adding or removing it.
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    # Of the noise, over how far a record moves the sum.
    sigma, lost = z / (2 if replaced else 1), _LOST_TO_ROUNDING
    if rate == 1:
        whole = sigma / math.sqrt(steps)
        composed = accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
            whole, value_discretization_interval=_interval(whole, 1.0, 1)
        )
    else:
        interval = _interval(sigma, rate, steps)
        if kind == "poisson":
            one = _poisson(accounting, rate, z, interval, replaced)
        else:
            one = _fixed_size(accounting, rate, sigma, interval)
        composed = _self_composed(one, steps)
        lost += steps * _LOST_PER_STEP

    def epsilon_at(delta: float) -> float:
        left = delta * (1 - 1e-6) - lost
        found = composed.get_epsilon_for_delta(left) if left > 0 else math.inf
        if not math.isfinite(found):
            raise NoEpsilonError(f'delta={delta:g} is too small for method="pld"; use "renyi"')
        return float(found)

    return epsilon_at


def _interval(sigma: float, rate: float, steps: int) -> float:
    """Between losses that are told apart: as wide as the memory for all of them asks for.

    Wider ones are pessimistic too.
    """
    variance = min(sigma**-2, math.log1p(rate**2 * math.expm1(min(700.0, sigma**-2))))
    reach = 0.5 / sigma**2 + 10.5 / sigma + 20 * math.sqrt(steps * variance)
    if reach > _LARGEST_LOSS:
        raise NoEpsilonError(
            f'losses of {reach:.1g} are too large for method="pld": give more noise, or use "renyi"'
        )
    return max(_INTERVAL, reach / _MOST_INTERVALS)


def _self_composed(distribution: Any, steps: int) -> Any:
    """In stages, so that a power of the number of outcomes stays one that can be computed."""
    if steps <= _MOST_AT_ONCE:
        return distribution.self_compose(steps)
    whole, rest = divmod(steps, _MOST_AT_ONCE)
    composed = _self_composed(distribution.self_compose(_MOST_AT_ONCE), whole)
    return composed.compose(distribution.self_compose(rest)) if rest else composed


def _poisson(accounting: Any, rate: float, z: float, interval: float, replaced: bool) -> Any:
    """Of a Gaussian mechanism on a batch that records join by themselves."""
    relations = accounting.NeighboringRelation
    return accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=rate,
        neighboring_relation=relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE,
        value_discretization_interval=interval,
    )


def _fixed_size(accounting: Any, rate: float, sigma: float, interval: float) -> Any:
    """Of a Gaussian mechanism of sensitivity 1 on a subset, where one record is replaced.

    The curve of its hockey-stick divergences at epsilons on a grid, from a half of it: that of
    either order of the neighbors bounds that of the other.
    """
    # Beyond it the ratio of densities lies with probability e^-50 only.
    largest = math.log1p(rate * math.expm1(min(700.0, 0.5 / sigma**2 + 10.5 / sigma)))
    count = math.ceil(largest / interval)
    epsilons = interval * np.arange(count + 1)
    inner = np.log1p(np.expm1(epsilons) / rate)
    tails = scipy.special.ndtr(0.5 / sigma - inner * sigma)
    mirrored = np.exp(inner + scipy.special.log_ndtr(-0.5 / sigma - inner * sigma))
    # A divergence is no less than 0, and rounding must not make it less than it is.
    upper = rate * np.maximum(tails - mirrored, 0) + 1e-16
    upper = np.minimum.accumulate(upper)
    lower = -np.expm1(-epsilons[:0:-1]) + np.exp(-epsilons[:0:-1]) * upper[:0:-1]
    lower = np.minimum(lower, 1.0)
    deltas = np.concatenate([lower, upper])
    pmf = accounting.pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -count, count, deltas
    )
    return accounting.pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)
