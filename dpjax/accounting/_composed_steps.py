"""The epsilon of composed steps of DP-SGD, by dp-accounting: privacy losses, or Renyi divergences.

dp-accounting discretizes privacy losses such that its result is an upper bound on epsilon, for any
width of the intervals. This module handles two remaining problems: convolutions by FFT lose some
probability mass, and small noise or many steps need too much memory.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import scipy

from dpjax._core import _checks
from dpjax.accounting._compose_events import left_out_orders_hidden

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# The least and the largest width of intervals of privacy losses. Between them, the width is the
# standard deviation of one step's loss divided by `_PARTS_OF_A_STEP`. Then the intervals raise
# epsilon by a fraction of about 2e-5.
_LEAST_INTERVAL, _LARGEST_INTERVAL, _PARTS_OF_A_STEP = 1e-4, 4e-4, 64
# If more than `_MOST_INTERVALS` intervals would be needed, the intervals are made wider. A run with
# privacy losses above `_LARGEST_LOSS` is refused.
_MOST_INTERVALS, _LARGEST_LOSS = 2**20, 1e6
# Convolutions by FFT lose probability mass to rounding: at most `_LOST_TO_ROUNDING`, and
# `_LOST_PER_STEP` more for every step. The reason is that the total probability of one step has an
# error of 1e-16, and is raised to the power of the number of steps.
_LOST_TO_ROUNDING = 1e-13
_LOST_PER_STEP = 1e-15
# dp-accounting raises the number of outcomes to the power of the number of steps. Above this number
# of steps, the power would overflow.
_MOST_AT_ONCE = 1000


Kind = Literal["poisson", "fixed", "bins", "separated"]


class Sampling(Protocol):
    """A rule that draws batches, such as `dpjax.learning.poisson_sampling`."""

    @property
    def kind(self) -> Kind:
        """How records join batches.

        "poisson": each record joins each batch independently. "fixed": each batch is a random set
        of a fixed size. "bins": each record joins the batches of one secret bin. "separated": after
        joining a batch, a record skips a fixed number of batches, and then joins each batch with a
        fixed probability.
        """
        ...

    @property
    def n(self) -> int:
        """The public number of slots for records; neighbors differ in one slot."""
        ...

    @property
    def rate(self) -> float:
        """The public probability that a record is in a batch."""
        ...

    @property
    def capacity(self) -> int:
        """The number of slots of a batch."""
        ...


class NoEpsilonError(ValueError):
    """Raised if no finite epsilon is known at the requested delta."""


def epsilons_by_losses(
    sampling: Sampling, z: float, steps: int, replaced: bool, coarseness: float = 1.0
) -> Callable[[float], float]:
    """Returns a function from delta to the epsilon of composed Gaussian mechanisms.

    Each mechanism uses a sampled batch. The arguments are those of `composed_losses`.
    """
    composed, lost = composed_losses(sampling, z, steps, replaced, coarseness)

    def epsilon_at(delta: float) -> float:
        left = delta * (1 - 1e-6) - lost
        found = composed.get_epsilon_for_delta(left) if left > 0 else math.inf
        if not math.isfinite(found):
            raise NoEpsilonError(f'delta={delta:g} is too small for method="pld": use "renyi"')
        return float(found)

    return epsilon_at


def composed_losses(
    sampling: Sampling, z: float, steps: int, replaced: bool, coarseness: float = 1.0
) -> "tuple[PrivacyLossDistribution, float]":
    """Returns the privacy losses of composed Gaussian mechanisms on sampled batches.

    Returns also how much probability mass their computation may have lost.

    Args:
        sampling: how batches are drawn.
        z: the noise multiplier.
        steps: the number of mechanisms.
        replaced: True for the relation replace-one, False for add-or-remove-one.
        coarseness: a factor on the width of the loss intervals. Computations with wide intervals
            are faster, and still give an upper bound on epsilon.
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    # sigma is the standard deviation of the noise, divided by the largest change of the sum.
    sigma, lost = z / (2 if replaced else 1), _LOST_TO_ROUNDING
    rate = sampling.rate
    if rate == 1:
        whole = sigma / math.sqrt(steps)
        composed = accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
            whole, value_discretization_interval=_interval(whole, 1.0, 1) * coarseness
        )
    else:
        interval = _interval(sigma, rate, steps) * coarseness
        if sampling.kind == "poisson":
            relations = accounting.NeighboringRelation
            one = accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
                z,
                sampling_prob=rate,
                neighboring_relation=(
                    relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE
                ),
                value_discretization_interval=interval,
            )
        else:
            one = _fixed_size(accounting, rate, sigma, interval)
        composed = _self_composed(one, steps)
        lost += steps * _LOST_PER_STEP
    return composed, lost


def _interval(sigma: float, rate: float, steps: int) -> float:
    """Returns the width of the loss intervals.

    The bound on epsilon is valid for every width. Where memory requires it, intervals are wider.
    """
    variance = min(sigma**-2, math.log1p(rate**2 * math.expm1(min(700.0, sigma**-2))))
    largest = 0.5 / sigma**2 + 10.5 / sigma + 20 * math.sqrt(steps * variance)
    if largest > _LARGEST_LOSS:
        raise NoEpsilonError(
            f'privacy losses of {largest:.1g} are too large for method="pld": add more noise, or'
            ' use method="renyi"'
        )
    # A single step is not convolved, so narrow intervals take little time.
    of_one_step = rate * math.sqrt(math.expm1(min(3.0, sigma**-2))) if steps > 1 else 0.0
    width = min(max(_LEAST_INTERVAL, of_one_step / _PARTS_OF_A_STEP), _LARGEST_INTERVAL)
    return max(width, largest / _MOST_INTERVALS)


def _self_composed(
    distribution: "PrivacyLossDistribution", steps: int
) -> "PrivacyLossDistribution":
    """Composes a distribution with itself, in stages, so that dp-accounting does not overflow."""
    if steps <= _MOST_AT_ONCE:
        return distribution.self_compose(steps)
    whole, rest = divmod(steps, _MOST_AT_ONCE)
    composed = _self_composed(distribution.self_compose(_MOST_AT_ONCE), whole)
    return composed.compose(distribution.self_compose(rest)) if rest else composed


def _fixed_size(
    accounting: ModuleType, rate: float, sigma: float, interval: float
) -> "PrivacyLossDistribution":
    """Returns the loss distribution of a Gaussian mechanism on a random subset of fixed size.

    The mechanism has sensitivity 1, and the relation is replace-one. dp-accounting computes the
    distribution from hockey-stick divergences on a grid of epsilons. Swapping the two neighbors
    gives the same privacy losses, so divergences at negative epsilons are computed from those at
    positive epsilons.
    """
    # Privacy losses are at most `largest`, except with a probability of e^-50.
    largest = math.log1p(rate * math.expm1(min(700.0, 0.5 / sigma**2 + 10.5 / sigma)))
    count = math.ceil(largest / interval)
    epsilons = interval * np.arange(count + 1)
    inner = np.log1p(np.expm1(epsilons) / rate)
    tails = scipy.special.ndtr(0.5 / sigma - inner * sigma)
    mirrored = np.exp(inner + scipy.special.log_ndtr(-0.5 / sigma - inner * sigma))
    # Divergences are at least 0. The term 1e-16 covers the rounding errors.
    upper = rate * np.maximum(tails - mirrored, 0) + 1e-16
    upper = np.minimum.accumulate(upper)
    lower = -np.expm1(-epsilons[:0:-1]) + np.exp(-epsilons[:0:-1]) * upper[:0:-1]
    lower = np.minimum(lower, 1.0)
    deltas = np.concatenate([lower, upper])
    pmf = accounting.pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -count, count, deltas
    )
    return accounting.pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


# Orders of Renyi divergences. They are closest together where most runs have their best order.
ORDERS = (*(1 + i / 10 for i in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256)
_OUTWARD = 1 + 1e-9
# Below this noise multiplier, divergences under replace-one are bounded by a closed form instead of
# an integral.
_LEAST_INTEGRATED = 0.25
# For batches of fixed size with more noise than this, dp-accounting would compute the logarithm of
# 0. So the noise multiplier is limited to this number, which increases epsilon.
_MOST_WITHOUT_REPLACEMENT = 1e7


def epsilon_by_renyi(divergences: np.ndarray, delta: float) -> float:
    """Returns the epsilon at a delta, from the Renyi divergences of the orders in `ORDERS`."""
    accounting = _checks.extra("dp_accounting", "accounting")
    found, _ = accounting.rdp.compute_epsilon(np.array(ORDERS), divergences, delta)
    return max(0.0, float(found))


@left_out_orders_hidden()
def composed_divergences(sampling: Sampling, z: float, steps: int, replaced: bool) -> np.ndarray:
    """Returns the Renyi divergences, for all `ORDERS`, of Gaussian mechanisms on batches.

    The mechanisms are composed.

    Args:
        sampling: how batches are drawn.
        z: the noise multiplier.
        steps: the number of mechanisms.
        replaced: True for the relation replace-one, False for add-or-remove-one.
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    relations = accounting.NeighboringRelation
    orders = np.array(ORDERS)
    if sampling.rate == 1:
        divergences = orders / (2 * z**2) * (4 if replaced else 1)
    elif sampling.kind == "fixed":
        # The accountant assumes that a record changes the sum by 1, but replacing a record may
        # change it by 2. So the noise multiplier is halved.
        one = accounting.GaussianDpEvent(min(z, _MOST_WITHOUT_REPLACEMENT) / 2)
        event = accounting.SampledWithoutReplacementDpEvent(sampling.n, sampling.capacity, one)
        accountant = accounting.rdp.RdpAccountant(ORDERS, relations.REPLACE_ONE)
        divergences = accountant.compose(event).rdp
    elif replaced:
        divergences = np.array([_renyi_of_replacing(x, sampling.rate, z) for x in ORDERS])
    else:
        event = accounting.PoissonSampledDpEvent(sampling.rate, accounting.GaussianDpEvent(z))
        divergences = accounting.rdp.RdpAccountant(ORDERS).compose(event).rdp
    # dp-accounting computes a divergence as the logarithm of a number near 1. At low rates, the
    # rounding error may exceed the divergence, and the result may be negative. At all orders, the
    # measured error is below 1e-13 times the rate.
    divergences = np.maximum(divergences, 0) + 1e-13 * sampling.rate
    return divergences * (steps * _OUTWARD)


def _renyi_of_replacing(order: float, rate: float, z: float) -> float:
    """Returns the Renyi divergence of two mixtures of normal distributions.

    The first is (1 - q) N(0, 1) + q N(1 / z, 1), the second (1 - q) N(0, 1) + q N(-1 / z, 1), where
    q is `rate`. They describe the noisy sums of two batches in which a record was replaced.

    The integrand is smooth and decays fast, so the error of the trapezoidal rule decreases faster
    than any power of the step. For small z, many points would be needed, but sampling would hardly
    reduce the divergence. So for small z, the function returns the divergence without sampling,
    which is an upper bound.
    """
    if z < _LEAST_INTEGRATED:
        return 2 * order / z**2
    end, step = (2 * order + 2) / z + 15, min(0.02, z / 50)
    x = np.arange(-end, end, step)
    shifts = np.array([[0.0], [1 / z]])
    weights = np.log([[1 - rate], [rate]])
    log_p = scipy.special.logsumexp(weights - (x - shifts) ** 2 / 2, axis=0)
    log_q = scipy.special.logsumexp(weights - (x + shifts) ** 2 / 2, axis=0)
    total = scipy.special.logsumexp(order * log_p + (1 - order) * log_q)
    log_moment = total + math.log(step) - math.log(2 * math.pi) / 2
    return max(0.0, log_moment) / (order - 1) * (1 + 1e-7) + 1e-12
