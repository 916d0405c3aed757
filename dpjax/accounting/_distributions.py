"""Composition by dp-accounting: privacy loss distributions, and Renyi divergences.

Two of its accountants forget the count of an event: privacy loss distributions forget it for
randomized response, Renyi divergences for the exponential mechanism. So we pass counts only for
Gaussian and Laplace noise. Every other release is accounted for by its guarantee.
"""

import collections
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dpjax._core import _checks
from dpjax._core._values import Guarantee, Mechanism
from dpjax.accounting._concentrated import guarantee_of

# Bounds the accountants' rounding: in sums of 10^5 terms, and in delta by Fourier transforms.
_ROUNDING, _TRANSFORMS = 1e-9, 1e-15
_LARGEST_EPSILON = 500.0  # Exponentials overflow beyond, where adding epsilons is as good.


def pld_epsilon(releases: Sequence[Mechanism | Guarantee], delta: float) -> float:
    """The joint epsilon by privacy loss distributions, whose losses are rounded up."""
    accounting = _checks.extra("dp_accounting", "accounting")
    distributions = _checks.extra("dp_accounting.pld.privacy_loss_distribution", "accounting")
    common = _checks.extra("dp_accounting.pld.common", "accounting")
    certain = delta * (1 - 1e-6) - _TRANSFORMS
    largest = max(float(guarantee_of(release).epsilon) for release in releases)
    if certain <= 0 or largest > _LARGEST_EPSILON:
        return math.inf
    joint = distributions.identity()
    for (kind, first, second), count in _counted(releases, accounting).items():
        if kind == "gaussian":
            one = distributions.from_gaussian_mechanism(first / math.sqrt(count))
        elif kind == "laplace":
            one = distributions.from_laplace_mechanism(first).self_compose(count)
        else:
            parameters = common.DifferentialPrivacyParameters(first, second)
            one = distributions.from_privacy_parameters(parameters).self_compose(count)
        joint = joint.compose(one)
    return _rounded(joint.get_epsilon_for_delta(certain))


def renyi_epsilon(releases: Sequence[Mechanism | Guarantee], delta: float) -> float:
    """The joint epsilon by Renyi divergences; delta also pays for the deltas of guarantees."""
    accounting = _checks.extra("dp_accounting", "accounting")
    accountant = accounting.rdp.RdpAccountant()
    spare = delta
    for (kind, first, second), count in _counted(releases, accounting).items():
        if kind == "gaussian":
            event = accounting.GaussianDpEvent(first)
        elif kind == "laplace":
            event = accounting.LaplaceDpEvent(first)
        else:
            spare -= second * count * (1 + _ROUNDING)
            event = accounting.ZCDpEvent(first**2 / 2 * (1 + _ROUNDING))
        accountant.compose(event, count)
    return _rounded(accountant.get_epsilon(spare * (1 - 1e-6))) if spare > 0 else math.inf


def _counted(
    releases: Sequence[Mechanism | Guarantee], accounting: ModuleType
) -> dict[tuple[str, float, float], int]:
    """How many releases there are of each kind: the kind's name, and two numbers."""
    return collections.Counter(_kind(release, accounting) for release in releases)


def _kind(release: Mechanism | Guarantee, accounting: ModuleType) -> tuple[str, float, float]:
    promised = guarantee_of(release)
    event: Any = getattr(release, "dp_event", None)
    if isinstance(event, accounting.GaussianDpEvent) and event.noise_multiplier > 0:
        return "gaussian", event.noise_multiplier * (1 - _ROUNDING), 0.0
    # Some mechanisms have the event of a Laplace mechanism of larger epsilon.
    laplace = isinstance(event, accounting.LaplaceDpEvent)
    if laplace and event.noise_multiplier * promised.epsilon > 1 - _ROUNDING:
        return "laplace", event.noise_multiplier * (1 - _ROUNDING), 0.0
    return "guarantee", float(promised.epsilon), float(promised.delta)


def _rounded(epsilon: float) -> float:
    return float(epsilon) * (1 + _ROUNDING) + _ROUNDING
