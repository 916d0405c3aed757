"""What several releases reveal together: `compose_at` a given delta, and the `risk` of attacks."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from dpjax._core import _checks
from dpjax._core._losses import (
    MOST_DIMS,
    TRANSFORMS,
    LossKind,
    Risk,
    joint_losses,
    kind_of_losses,
    risk_of_kinds,
)
from dpjax._core._values import Guarantee, Mechanism
from dpjax._exact._numerics import bisect, sum_up
from dpjax.accounting._composition import SHARE, charged, common_relation, compose, release_under
from dpjax.accounting._concentrated import concentration, guarantee_of, zcdp_to_epsilon

CompositionMethod = Literal["drv", "kov", "optimal", "zcdp", "renyi", "pld"]
_OUTWARD = 1 + 1e-12
# A bound on the relative rounding error of dp-accounting, whose sums have up to 10^5 terms. It also
# bounds the relative rounding error of optimal composition: 2^-50 for each release.
_ROUNDING = 1e-9


def compose_at(
    *releases: Mechanism | Guarantee,
    delta: float,
    method: CompositionMethod = "optimal",
    dims: int = 2**20,
) -> Guarantee:
    """Composes several releases on one database, at a delta of your choice.

    As for `compose`, you must have chosen targets, sizes, norms and oracles without the private
    data and without earlier releases of it. The same is required of epsilons, deltas and the number
    of releases. To choose these adaptively, use `PrivacyFilter`.

    Take a pair of databases on which no target differs by more than its sampled sensitivity. On
    this pair, the releases together are differentially private, and the method computes their
    epsilon. The gammas of the samplings are added. Three methods use the epsilons e_i of the
    guarantees. Here s is the part of delta that is left after the deltas of the releases:

    - "drv": sqrt(2 log(1 / s) sum e_i^2) + sum e_i (exp(e_i) - 1), advanced composition;
    - "kov": the least of the closed forms of Kairouz, Oh and Viswanath, for any e_i;
    - "optimal": the least possible epsilon. It is exact if there are few distinct e_i, and within
      about 4% if all e_i are distinct. It accepts up to 10^4 releases.

    Three methods use the mechanisms' noise:

    - "zcdp": adds up `mechanism.zcdp`. Its rho is (Delta / sigma)^2 / 2 for Gaussian noise,
      epsilon^2 / 8 for the exponential mechanism, and epsilon^2 / 2 for other mechanisms;
    - "renyi" and "pld": Renyi divergences, or distributions of the privacy loss, by dp-accounting.

    Neighboring relations are combined as in `compose`. If a release under add-or-remove-one is
    converted to replace-one, the methods that use the noise double its shift.

    If delta is at least the sum of deltas, the result is never worse than from `compose`.

    Args:
        *releases: a mechanism, or a guarantee, for each release.
        delta: the delta of the joint statement, strictly between 0 and 1.
        method: the method, as described above.
        dims: the largest number of coordinates in a release. The tables of the noise omit a small
            probability in each coordinate, and "zcdp", "renyi" and "pld" add it to delta.

    Returns:
        A `Guarantee`: epsilon rounded up, gamma and confidence as in `compose`.

    Raises:
        ModuleNotFoundError: if dp-accounting is not installed, for "renyi" and "pld".
        TypeError: if a release is neither a mechanism nor a concrete guarantee.
        ValueError: if no release is given, if their group sizes differ, or if no finite epsilon is
            known at this delta.

    Formal guarantees:
        (epsilon, delta, sum gamma)-random DP for the joint release, under the restriction above.
        All rounding is outward. We assume that the Fourier transforms of dp-accounting have an
        error of at most 1e-15 in delta, and a relative error of at most 1e-9 in epsilon.

    Source:
        Dwork, Rothblum and Vadhan (2010); Kairouz, Oh and Viswanath (2015), Theorems 3.3 to 3.5;
        Bun and Steinke (2016); Canonne, Kamath and Steinke (2020); Mironov (2017); Koskela, Jalko
        and Honkela (2020).

    Example:
        >>> import dpjax
        >>> hundred = [dpjax.laplace(0.01, epsilon=0.1)] * 100
        >>> round(dpjax.accounting.compose_at(*hundred, delta=1e-6).epsilon, 4)
        4.7746
    """
    _checks.choice("method", method, get_args(CompositionMethod))
    delta = _checks.fraction("delta", delta)
    dims = _checks.integer("dims", dims, least=1)
    relation = common_relation([guarantee_of(release) for release in releases])
    releases = tuple(release_under(release, relation) for release in releases)
    guarantees = [guarantee_of(release) for release in releases]
    together = compose(*guarantees)
    if not math.isfinite(together.epsilon):
        raise ValueError(
            f"releases must all have a finite epsilon, got releases with joint guarantee {together}"
        )
    if method in _BY_GUARANTEE:
        epsilon = _by_guarantee(guarantees, delta, _BY_GUARANTEE[method])
    else:
        drawn = dims * sum(not isinstance(release, Guarantee) for release in releases)
        # The method bounds the epsilon of ideal noise. `charged` adds the cost of real noise, which
        # is drawn from tables.
        ideal = _BY_NOISE[method](releases, delta * (1 - SHARE))
        epsilon, needed = charged(ideal, delta, drawn)
        epsilon = epsilon if needed <= delta else math.inf
    if together.delta <= delta:
        epsilon = min(epsilon, float(together.epsilon))
    if not math.isfinite(epsilon):
        raise ValueError(
            f"delta={delta:g} is too small: it must cover the sum of the deltas of the releases,"
            f" {together.delta:g}, and the noise outside of the noise tables for dims={dims}"
        )
    return dataclasses.replace(together, epsilon=epsilon, delta=delta)


def risk(*releases: Mechanism | Guarantee, dims: int = MOST_DIMS) -> Risk:
    """What any attack can learn about one record from several releases together.

    An epsilon bounds the privacy loss in the worst case. But the success of most attacks depends on
    the whole distribution of the loss: with Gaussian noise, an attacker gains much less than
    epsilon and delta alone allow.

    Args:
        *releases: a mechanism, or a guarantee, for each release. For a guarantee, the bounds use
            only its epsilon and delta, because its noise is not known. Relations are combined as in
            `compose_at`.
        dims: the largest number of coordinates in a release, as in `compose_at`.

    Returns:
        A `Risk`: `advantage`, `tradeoff(false_positive_rate)` and `reconstruction_bound(prior)`.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a release is neither a mechanism nor a concrete guarantee.
        ValueError: if no release is given, or their privacy units differ.

    Formal guarantees:
        Bounds for every attack on two neighboring databases, for releases that are chosen in
        advance as in `compose`. Losses are rounded up by dp-accounting. The noise tables, and the
        rounding of Fourier transforms, are charged. If gammas are above 0, the bounds hold for all
        pairs of databases except for a fraction of at most the sum of the gammas. They hold at the
        confidence of `compose`, which also matters for a guarantee by `monte_carlo`, although its
        gamma is 0.

        The reconstruction bound is 1 - f(p), where f is the trade-off curve and p the prior.
        Compare the release with one in which the record is a fixed other record. There the
        attacker succeeds with probability at most p. 1 - f is concave, so an average over records
        is at most 1 - f(p).

    Source:
        Wasserman and Zhou (2010); Dong, Roth and Su, "Gaussian differential privacy" (2022);
        Kulynych, Gomez, Kaissis, du Pin Calmon and Troncoso, "Attack-aware noise calibration for
        differential privacy" (2024).

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.gaussian(1.0, epsilon=1.0, delta=1e-6)
        >>> round(dpjax.accounting.risk(mechanism).advantage, 3)
        0.094
        >>> round(dpjax.accounting.risk(mechanism.guarantee).advantage, 3)
        0.462
    """
    dims = _checks.integer("dims", dims, least=1)
    promised = [guarantee_of(release) for release in releases]
    together = compose(*promised)  # This refuses guarantees for different privacy units.
    relation = common_relation(promised)
    alike = [release_under(release, relation) for release in releases]
    counts = _counted_losses(alike)
    return risk_of_kinds(tuple(counts.items()), relation, float(together.gamma), dims)


def _by_guarantee(
    guarantees: list[Guarantee], delta: float, method: Callable[[list[float], float], float]
) -> float:
    """Returns the epsilon of all releases together, from their guarantees alone.

    An (e_i, d_i)-DP release behaves like a release that is e_i-DP with probability 1 - d_i. So the
    part s of delta that is left for composition solves 1 - (1 - s) prod (1 - d_i) = delta.
    """
    epsilons = [float(guarantee.epsilon) for guarantee in guarantees]
    deltas = [float(guarantee.delta) for guarantee in guarantees]
    if max(deltas) >= 1:
        return math.inf
    log_pure = math.fsum(math.log1p(-own) for own in deltas)
    slack = -math.expm1(math.log1p(-delta) - log_pure)
    # The subtraction covers the rounding errors of the logarithms.
    slack -= 2.0**-50 * (delta + sum(deltas))
    return method(epsilons, slack) if slack > 0 else math.inf


def _drv(epsilons: list[float], slack: float) -> float:
    squares = math.fsum(epsilon**2 for epsilon in epsilons)
    mean = math.fsum(e * math.expm1(e) if e < 700 else math.inf for e in epsilons)
    return (math.sqrt(-2 * math.log(slack) * squares) + mean) * _OUTWARD


def _kov(epsilons: list[float], slack: float) -> float:
    squares = math.fsum(epsilon**2 for epsilon in epsilons)
    mean = math.fsum(epsilon * math.tanh(epsilon / 2) for epsilon in epsilons)
    logs = -math.log(slack), math.log(math.e + math.sqrt(squares) / slack)
    return (mean + math.sqrt(2 * min(logs) * squares)) * _OUTWARD


def _zcdp(releases: Sequence[Mechanism | Guarantee], delta: float) -> float:
    costs = [concentration(release) for release in releases]
    rho = sum_up(cost.rho for cost in costs)
    # The last factor rounds `slack` down.
    slack = (delta - sum_up(cost.delta for cost in costs)) * (1 - 2**-50)
    if slack <= 0 or not math.isfinite(rho):
        return math.inf
    return zcdp_to_epsilon(rho, delta=slack)


def _pld(releases: Sequence[Mechanism | Guarantee], delta: float) -> float:
    """Returns the epsilon of all releases together, by privacy loss distributions.

    The losses are rounded up.
    """
    certain = delta * (1 - 1e-6) - TRANSFORMS
    joint = joint_losses(_counted_losses(releases))
    if certain <= 0 or joint is None:
        return math.inf
    return _rounded(joint.get_epsilon_for_delta(certain))


def _renyi(releases: Sequence[Mechanism | Guarantee], delta: float) -> float:
    """Returns the epsilon of all releases together, by Renyi divergences.

    The deltas of guarantees are subtracted from `delta` first.
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    accountant = accounting.rdp.RdpAccountant()
    spare = delta
    for (kind, first, second, _), count in _counted_losses(releases).items():
        if kind == "gaussian":
            event = accounting.GaussianDpEvent(first)
        elif kind == "laplace":
            event = accounting.LaplaceDpEvent(first)
        else:
            spare -= second * count * (1 + _ROUNDING)
            event = accounting.ZCDpEvent(first**2 / 2 * (1 + _ROUNDING))
        accountant.compose(event, count)
    return _rounded(accountant.get_epsilon(spare * (1 - 1e-6))) if spare > 0 else math.inf


def _counted_losses(releases: Sequence[Mechanism | Guarantee]) -> dict[LossKind, int]:
    """Counts the releases by the kind of their privacy losses.

    Mechanisms with Gaussian or Laplace noise are represented by their events of dp-accounting, and
    all other releases by their guarantees.
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    known = ((getattr(one, "dp_event", None), guarantee_of(one)) for one in releases)
    return collections.Counter(
        kind_of_losses(accounting, event, float(promised.epsilon), float(promised.delta))
        for event, promised in known
    )


def _rounded(epsilon: float) -> float:
    return float(epsilon) * (1 + _ROUNDING) + _ROUNDING


_BY_NOISE = {"zcdp": _zcdp, "renyi": _renyi, "pld": _pld}


# Optimal composition. Among all epsilon-DP mechanisms, randomized response is the least private.
# Its privacy loss is epsilon with probability e^epsilon / (1 + e^epsilon), and otherwise -epsilon.
# Let L be the sum of the privacy losses of all releases. Then the delta of the composition at a
# given epsilon is the expectation of max(0, 1 - e^(epsilon - L)).

# The largest number of distinct values of L that are computed. If there are more, the epsilons of
# the releases are rounded up to multiples of a common unit.
_MOST_POINTS = 2**16
MOST_RELEASES = 10**4


def optimal_epsilon(epsilons: list[float], delta: float) -> float:
    """Returns the smallest epsilon of all releases together at the given delta, rounded up.

    If there are few distinct epsilons, the result is exact up to rounding. Otherwise every epsilon
    is first rounded up to a multiple of a common unit, which is at most 1/16 of the average
    epsilon.
    """
    if len(epsilons) > MOST_RELEASES:
        raise ValueError(
            f'"optimal" accepts at most {MOST_RELEASES} releases, got {len(epsilons)}: use "kov"'
        )
    counts = collections.Counter(epsilons)
    if math.prod(count + 1 for count in counts.values()) > _MOST_POINTS:
        unit = math.fsum(epsilons) / max(_MOST_POINTS, 16 * len(epsilons))
        losses, masses = _on_a_lattice(counts, unit)
    else:
        losses, masses = _exactly(counts)
    total = math.fsum(epsilons)

    def delta_at(epsilon: float) -> float:
        beyond = losses > epsilon  # Privacy losses of at most epsilon do not contribute to delta.
        return float(masses[beyond] @ -np.expm1(epsilon - losses[beyond]))

    allowed = delta * (1 - _ROUNDING) - 1e-300
    high = 0.0
    if allowed <= 0 or not delta_at(high) <= allowed:
        _, high = bisect(lambda epsilon: not delta_at(epsilon) <= allowed, 0.0, total)
    # The last term covers the rounding errors of the losses.
    return min(total * (1 + 2**-50), high + total * 2.0**-40)


def _exactly(counts: dict[float, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns all possible sums of privacy losses, and the probability of each."""
    losses, masses = np.zeros(1), np.ones(1)
    for epsilon, count in counts.items():
        lies = np.arange(count + 1)
        lying = _add_up([(1, epsilon)] * count)
        losses = np.add.outer(losses, epsilon * (count - 2.0 * lies)).ravel()
        masses = np.multiply.outer(masses, lying).ravel()
    return losses, masses


def _on_a_lattice(counts: dict[float, int], unit: float) -> tuple[np.ndarray, np.ndarray]:
    steps = [
        (steps, steps * unit)
        for epsilon, count in counts.items()
        # Without the factor, a rounded quotient could make the ceiling too small.
        for steps in [math.ceil(epsilon / unit * (1 + 2**-50))] * count
    ]
    masses = _add_up(steps)
    total = sum(number for number, _ in steps)
    return unit * (total - 2.0 * np.arange(len(masses))), masses


def _add_up(steps: list[tuple[int, float]]) -> np.ndarray:
    """Returns the probabilities of all sums of the releases' privacy losses, the largest sum first.

    `steps` contains a pair (k, epsilon) for each release. The privacy loss of the release is +k
    units with probability e^epsilon / (1 + e^epsilon), and -k units otherwise. Entry i of the
    result is the probability that the sum of the losses is 2 i units below the largest sum.
    """
    sums, end = np.eye(1, 1 + sum(number for number, _ in steps))[0], 1
    for number, epsilon in steps:
        shrunk = math.exp(-epsilon)
        lying = shrunk / (1 + shrunk) * sums[:end]
        end += number
        sums[:end] *= 1 / (1 + shrunk)
        sums[number:end] += lying
    return sums


_BY_GUARANTEE = {"drv": _drv, "kov": _kov, "optimal": optimal_epsilon}
