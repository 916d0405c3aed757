"""The guarantee of all steps of a run of DP-SGD: host arithmetic around dp-accounting.

The noise multiplier z is sigma over the norm bound of one record's contribution. Replacing a record
moves the sum by up to twice that bound. Each accountant must be told so in its own way.
"""

import math
from collections.abc import Callable
from typing import Literal, Protocol, get_args

import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._left_out_orders import left_out_orders_hidden
from dpjax.accounting._loss_distributions import NoEpsilonError, epsilons_by_losses
from dpjax.random._facade import GAUSSIAN

AccountingMethod = Literal["pld", "renyi"]

# Orders of Renyi divergences: dense where the best order of most runs lies.
_ORDERS = (*(1 + i / 10 for i in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256)
_OUTWARD = 1 + 1e-9
# Below this noise multiplier, Renyi divergences under replace-one are bounded in closed form.
_LEAST_INTEGRATED = 0.25


class Sampling(Protocol):
    """A rule that draws batches, such as `dpjax.learning.poisson_sampling`."""

    @property
    def kind(self) -> Literal["poisson", "fixed"]:
        """Each record joins independently ("poisson"), or batches have a fixed size ("fixed")."""
        ...

    @property
    def n(self) -> int:
        """The number of records."""
        ...

    @property
    def rate(self) -> float:
        """The probability that a record is in a batch."""
        ...

    @property
    def capacity(self) -> int:
        """The number of slots of a batch."""
        ...


def dp_sgd(
    sampling: Sampling,
    *,
    noise_multiplier: float,
    steps: int,
    delta: float,
    dims: int,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    method: AccountingMethod = "pld",
) -> Guarantee:
    """The guarantee of a whole run of DP-SGD.

    Args:
        sampling: how batches are drawn.
        noise_multiplier: z, the standard deviation of the noise over the norm bound.
        steps: the number of steps.
        delta: of the guarantee, in (0, 1).
        dims: how many numbers get noise in a step: the size of all parameters.
        relation: which databases are neighbors. Batches of a fixed size need replace-one.
        method: "pld", by privacy loss distributions, or "renyi", which is looser and faster.

    Returns:
        A `Guarantee`.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, the relation does not fit the sampling, batches
            that exceed their capacity use up delta, or losses are too large to compute.

    Formal guarantees:
        (epsilon, delta)-DP of the joint distribution of all steps, rounded up. Each step may be
        chosen with knowledge of the earlier ones. The guarantee pays for the following:

        - the discretization of dp-accounting, which is pessimistic;
        - batches that exceed their capacity: (1 + e^epsilon) p for every step, if one does so with
          probability p; the same for equal random words;
        - mass that convolutions may lose: 1e-15 of delta for every step, with "pld";
        - the distance between the tables of the noise and the normal distribution, for every
          coordinate of every step.

        For batches of a fixed size, the hockey-stick divergence at e^epsilon is the rate times that
        of the Gaussian mechanism at 1 + (e^epsilon - 1) / rate. Swapping the neighbors gives
        another case of the same formula.

    Source:
        Abadi et al. (2016); Mironov, Talwar and Zhang (2019) and Wang, Balle and Kasiviswanathan
        (2019) for Renyi; Doroshenko, Ghazi, Kamath, Kumar and Manurangsi (2022) for privacy loss
        distributions; Balle, Barthe and Gaboardi (2018), Theorem 9, and Zhu, Dong and Wang (2022)
        for batches of a fixed size; Chua et al. (2024), Theorem 3.1, for the capacity.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.poisson_sampling(1000, batch_size=50)
        >>> dpjax.accounting.dp_sgd(
        ...     sampling, noise_multiplier=1.5, steps=100, delta=1e-5, dims=10
        ... )
        (epsilon=1.67165, delta=1e-05)-DP, under add-or-remove-one
    """
    relation = NeighboringRelation(relation)
    _checks.choice("method", method, get_args(AccountingMethod))
    z = _positive("noise_multiplier", noise_multiplier)
    steps = _checks.integer("steps", steps, least=1, most=10**9)
    dims = _checks.integer("dims", dims, least=1)
    delta = _checks.fraction("delta", delta)
    _checks.host_only("delta", delta, "a concrete number")
    _check_sampling(sampling)
    if sampling.kind == "fixed" and relation is not NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            f"relation must be replace-one for batches of a fixed size, got {relation}: use"
            " poisson_sampling, or replace-one, under which n is public"
        )
    replaced = relation is NeighboringRelation.REPLACE_ONE
    if method == "pld":
        curve = epsilons_by_losses(sampling.kind, sampling.rate, z, steps, replaced=replaced)
    else:
        curve = _renyi(sampling, z, steps, replaced)
    epsilon = _with_charges(curve, delta, sampling, steps * dims, steps)
    return Guarantee(epsilon, delta, relation=relation)


def dp_sgd_noise_multiplier(
    sampling: Sampling,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    dims: int,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    method: AccountingMethod = "pld",
) -> float:
    """The least noise multiplier for which a run of DP-SGD is (epsilon, delta)-DP.

    Args:
        sampling: how batches are drawn.
        epsilon: of the guarantee, finite, above 0.
        delta: of the guarantee, in (0, 1).
        steps: the number of steps.
        dims: how many numbers get noise in a step.
        relation: which databases are neighbors.
        method: as for `dp_sgd`.

    Returns:
        A noise multiplier, at most .1% above the least one.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or no noise reaches the guarantee.

    Formal guarantees:
        With this noise multiplier `dp_sgd` has at most this epsilon. That is checked at the end.

    Source:
        See `dp_sgd`.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.poisson_sampling(1000, batch_size=50)
        >>> z = dpjax.accounting.dp_sgd_noise_multiplier(
        ...     sampling, epsilon=2.0, delta=1e-5, steps=100, dims=10, method="renyi"
        ... )
        >>> round(z, 2)
        1.45
    """
    target = _positive("epsilon", epsilon)

    def promised(z: float, method: AccountingMethod) -> float:
        try:
            guarantee = dp_sgd(
                sampling,
                noise_multiplier=z,
                steps=steps,
                delta=delta,
                dims=dims,
                relation=relation,
                method=method,
            )
        except NoEpsilonError:
            return math.inf
        return float(guarantee.epsilon)

    # Renyi accounting is fast and close. It narrows the search, and "pld" finishes it.
    above = 1.0
    while promised(above, "renyi") > target:
        above = _more(above, 2, target)
    while promised(above / 2, "renyi") <= target and above > 1e-2:
        above /= 2
    above = _least(lambda z: promised(z, "renyi"), target, above / 2, above)
    if method == "renyi":
        return above
    below = above / 1.1
    while promised(below, "pld") <= target:
        below, above = below / 1.1, below
    return _least(lambda z: promised(z, "pld"), target, below, above)


def _least(promised: Callable[[float], float], target: float, below: float, above: float) -> float:
    """The least z with promised(z) <= target, rounded up by at most .1%; `promised` falls."""
    growth = 1.1
    while promised(above) > target:
        below, above, growth = above, _more(above, growth, target), growth**2
    low, high = math.log(below), math.log(above)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if promised(math.exp(middle)) <= target:
            high = middle
        else:
            low = middle
    return math.exp(high) if promised(math.exp(high)) <= target else above


def _more(z: float, factor: float, target: float) -> float:
    if z > 1e9:
        raise ValueError(
            f"no noise multiplier up to 1e9 reaches epsilon={target:g}: delta may be too small, or"
            " batches that exceed their capacity may use it up"
        )
    return factor * z


def _with_charges(
    epsilon_at: Callable[[float], float],
    delta: float,
    sampling: Sampling,
    draws: int,
    steps: int,
) -> float:
    """The epsilon of the real run, whose noise and batches differ slightly from the ideal ones.

    Outside of a mass m, densities of the two runs are within a factor e^loss. Then
    (epsilon, delta_0)-DP of the ideal run implies (epsilon + 2 loss, delta)-DP of the real run,
    where delta is e^loss delta_0 + (1 + e^(epsilon + loss)) m. The charge grows with epsilon, so
    the loop looks for a fixed point, from below.
    """
    assert GAUSSIAN.lattice is not None
    certificate = GAUSSIAN.lattice.certificate
    loss = draws * certificate.loss
    tables = draws * certificate.delta
    missed = tables + steps * _probability_of_a_bad_batch(sampling)
    epsilon = 0.0
    for _ in range(200):
        if epsilon + loss > 700:
            left = 0.0
        else:
            left = (delta - (1 + math.exp(epsilon + loss)) * missed) * math.exp(-loss)
        if left <= 0:
            cut_off = sampling.kind == "poisson" and missed > 2 * tables
            cause, advice = (
                (f"a batch exceeds its capacity of {sampling.capacity}", "a larger capacity")
                if cut_off
                else (
                    "the noise or a batch leaves its distribution",
                    "more noise or a larger delta",
                )
            )
            raise NoEpsilonError(
                f"delta={delta:g} is used up at epsilon={epsilon:.3g}: in {steps} steps {cause}"
                f" with probability {missed:.2g}; use {advice}"
            )
        found = epsilon_at(left)
        if found <= epsilon:
            break
        epsilon = found * _OUTWARD
    else:
        raise NoEpsilonError(
            f"at delta={delta:g} no epsilon covers how far noise and batches are from their"
            " distributions: use more noise, a larger capacity or a larger delta"
        )
    return (epsilon + 2 * loss) * _OUTWARD


def _probability_of_a_bad_batch(sampling: Sampling) -> float:
    """The probability that a batch is not drawn as the accountants assume."""
    if sampling.kind == "fixed":
        # A union bound over pairs of records with equal random words.
        return sampling.n**2 * 2.0**-129
    if sampling.capacity >= sampling.n:
        return 0.0
    # The larger of two neighbors has n + 1 records.
    return float(scipy.stats.binom.sf(sampling.capacity, sampling.n + 1, sampling.rate)) * _OUTWARD


@left_out_orders_hidden()
def _renyi(sampling: Sampling, z: float, steps: int, replaced: bool) -> Callable[[float], float]:
    accounting = _checks.extra("dp_accounting", "accounting")
    relations = accounting.NeighboringRelation
    orders = np.array(_ORDERS)
    if sampling.rate == 1:
        divergences = orders / (2 * z**2) * (4 if replaced else 1)
    elif sampling.kind == "fixed":
        # The accountant assumes a sensitivity of 1. Replacing a record moves the sum by 2.
        event = accounting.SampledWithoutReplacementDpEvent(
            sampling.n, sampling.capacity, accounting.GaussianDpEvent(z / 2)
        )
        accountant = accounting.rdp.RdpAccountant(_ORDERS, relations.REPLACE_ONE)
        divergences = accountant.compose(event).rdp
    elif replaced:
        divergences = np.array([_renyi_of_replacing(x, sampling.rate, z) for x in _ORDERS])
    else:
        event = accounting.PoissonSampledDpEvent(sampling.rate, accounting.GaussianDpEvent(z))
        divergences = accounting.rdp.RdpAccountant(_ORDERS).compose(event).rdp
    # At low rates rounding hides a divergence, and may make it negative: dp-accounting computes it
    # as a logarithm of nearly 1. Its error at all orders is below 1e-13 times the rate (measured).
    divergences = np.maximum(divergences, 0) + 1e-13 * sampling.rate
    composed = divergences * (steps * _OUTWARD)

    def epsilon_at(delta: float) -> float:
        return max(0.0, float(accounting.rdp.compute_epsilon(orders, composed, delta)[0]))

    return epsilon_at


def _renyi_of_replacing(order: float, rate: float, z: float) -> float:
    """The divergence of (1 - q) N(0, 1) + q N(1 / z, 1) from (1 - q) N(0, 1) + q N(-1 / z, 1).

    The trapezoidal rule converges faster than any power for such functions. At small z it would be
    slow, and sampling helps little. There we return the divergence without sampling, which is an
    upper bound.
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


def _check_sampling(sampling: Sampling) -> None:
    _checks.choice("sampling.kind", sampling.kind, ("poisson", "fixed"))
    if not 0 < sampling.rate <= 1:
        raise ValueError(f"sampling.rate must be in (0, 1], got {sampling.rate}")
    _checks.integer("sampling.capacity", sampling.capacity, least=1)
    _checks.integer("sampling.n", sampling.n, least=1)


def _positive(name: str, value: float) -> float:
    number = _checks.positive(name, value)
    _checks.host_only(name, number, "a concrete number")
    return number
