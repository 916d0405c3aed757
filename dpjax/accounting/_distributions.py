"""Composition by dp-accounting: privacy loss distributions, and Renyi divergences.

Two of its accountants ignore how often an event is repeated: that of privacy loss distributions for
randomized response, that of Renyi divergences for the exponential mechanism. So only events of
Gaussian and Laplace noise are handed over with a count; any other release counts as what its
guarantee says.
"""

import collections
import math
from typing import Any

from dpjax._core import _checks
from dpjax._core._values import is_mechanism
from dpjax.accounting._concentrated import guarantee_of

# The accountants' own rounding: of sums of 10^5 terms, in delta also of fast Fourier transforms.
_ROUNDING, _TRANSFORMS = 1e-9, 1e-15
_LARGEST_EPSILON = 500.0  # Beyond, exponentials overflow; adding is no worse.


def pld_epsilon(releases: list[Any], delta: float) -> float:
    """The joint epsilon by privacy loss distributions, which are rounded to worse losses."""
    accounting = _checks.extra("dp_accounting", "accounting")
    distributions = _checks.extra("dp_accounting.pld.privacy_loss_distribution", "accounting")
    common = _checks.extra("dp_accounting.pld.common", "accounting")
    certain = delta * (1 - 1e-6) - _TRANSFORMS
    largest = max(guarantee_of(release).epsilon for release in releases)
    if certain <= 0 or largest > _LARGEST_EPSILON:
        return math.inf
    joint = distributions.identity()
    for (kind, *numbers), count in _counted(releases, accounting).items():
        if kind == "gaussian":
            one = distributions.from_gaussian_mechanism(numbers[0] / math.sqrt(count))
        elif kind == "laplace":
            one = distributions.from_laplace_mechanism(numbers[0]).self_compose(count)
        else:
            parameters = common.DifferentialPrivacyParameters(*numbers)
            one = distributions.from_privacy_parameters(parameters).self_compose(count)
        joint = joint.compose(one)
    return _rounded(joint.get_epsilon_for_delta(certain))


def renyi_epsilon(releases: list[Any], delta: float) -> float:
    """The joint epsilon by Renyi divergences; deltas of guarantees are taken from delta."""
    accounting = _checks.extra("dp_accounting", "accounting")
    accountant = accounting.rdp.RdpAccountant()
    spare = delta
    for (kind, *numbers), count in _counted(releases, accounting).items():
        if kind == "gaussian":
            event = accounting.GaussianDpEvent(numbers[0])
        elif kind == "laplace":
            event = accounting.LaplaceDpEvent(numbers[0])
        else:
            epsilon, own = numbers
            spare -= own * count * (1 + _ROUNDING)
            event = accounting.ZCDpEvent(epsilon**2 / 2 * (1 + _ROUNDING))
        accountant.compose(event, count)
    return _rounded(accountant.get_epsilon(spare * (1 - 1e-6))) if spare > 0 else math.inf


def _counted(releases: list[Any], accounting: Any) -> dict[tuple[Any, ...], int]:
    """How often there is each kind of release."""
    return collections.Counter(_kind(release, accounting) for release in releases)


def _kind(release: object, accounting: Any) -> tuple[Any, ...]:
    promised = guarantee_of(release)
    event: Any = release.dp_event if is_mechanism(release) else None
    if isinstance(event, accounting.GaussianDpEvent) and event.noise_multiplier > 0:
        return "gaussian", event.noise_multiplier * (1 - _ROUNDING)
    # The event of some mechanisms is a Laplace mechanism of larger epsilon.
    laplace = isinstance(event, accounting.LaplaceDpEvent)
    if laplace and event.noise_multiplier * promised.epsilon > 1 - _ROUNDING:
        return "laplace", event.noise_multiplier * (1 - _ROUNDING)
    return "guarantee", promised.epsilon, promised.delta


def _rounded(epsilon: float) -> float:
    return float(epsilon) * (1 + _ROUNDING) + _ROUNDING
