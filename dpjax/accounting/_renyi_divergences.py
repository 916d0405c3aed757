"""Epsilon of composed steps of DP-SGD by the Renyi divergences of dp-accounting."""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import scipy

from dpjax._core import _checks
from dpjax.accounting._compose_events import left_out_orders_hidden

if TYPE_CHECKING:
    from dpjax.accounting._dp_sgd import Sampling

# Orders of Renyi divergences. They are closest together where most runs have their best order.
ORDERS = (*(1 + i / 10 for i in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256)
_OUTWARD = 1 + 1e-9
# Below this noise multiplier, divergences under replace-one are bounded by a closed form instead of
# an integral.
_LEAST_INTEGRATED = 0.25
# For batches of fixed size with more noise than this, dp-accounting would compute the logarithm of
# 0. So the noise multiplier is limited to this number, which increases epsilon.
_MOST_WITHOUT_REPLACEMENT = 1e7


@left_out_orders_hidden()
def epsilons_by_renyi(
    sampling: "Sampling", z: float, steps: int, replaced: bool
) -> Callable[[float], float]:
    """Returns a function from delta to epsilon, for Gaussian mechanisms on sampled batches.

    The mechanisms are composed. The arguments are those of `composed_divergences`.
    """
    return functools.partial(epsilon_by_renyi, composed_divergences(sampling, z, steps, replaced))


def epsilon_by_renyi(divergences: np.ndarray, delta: float) -> float:
    """Returns the epsilon at a delta, from the Renyi divergences of the orders in `ORDERS`."""
    accounting = _checks.extra("dp_accounting", "accounting")
    found, _ = accounting.rdp.compute_epsilon(np.array(ORDERS), divergences, delta)
    return max(0.0, float(found))


@left_out_orders_hidden()
def composed_divergences(sampling: "Sampling", z: float, steps: int, replaced: bool) -> np.ndarray:
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
