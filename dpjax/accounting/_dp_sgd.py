"""The guarantee of a whole run of DP-SGD, computed by dp-accounting on the host.

The noise multiplier z is sigma divided by the largest norm of one record's contribution. Replacing
a record may change the sum by twice this norm. The accountants of dp-accounting treat this factor
of 2 in different ways.
"""

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, get_args

import scipy

from dpjax._core import _checks
from dpjax._core._guarantee import RECORD, check_privacy_unit
from dpjax._core._losses import Risk, risk_of_losses
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._compose_events import AccountingMethod
from dpjax.accounting._composed_steps import (
    Kind,
    NoEpsilonError,
    Sampling,
    composed_divergences,
    composed_losses,
    epsilon_by_renyi,
    epsilons_by_losses,
)
from dpjax.random._noise import GAUSSIAN

_OUTWARD = 1 + 1e-9
# Real noise and real batches are only nearly ideal. At most this fraction of delta may pay for the
# difference.
_LARGEST_SHARE = 0.1
# Kinds of sampling in which one key draws the batches of all steps.
_ONE_KEY = ("bins", "separated")


class Columns(Protocol):
    """The strategy matrix of correlated noise, such as `dpjax.learning.toeplitz_strategy`."""

    @property
    def bands(self) -> int:
        """The number of bands of the matrix: a batch affects the results of this many steps."""
        ...

    def overlap(self, *, groups: int, steps: int) -> float:
        """Returns how far one record can move all published rows together, in the norm l2.

        The record joins every `groups`-th batch. The result is relative to the largest norm of a
        column of the strategy matrix, and rounded up.
        """
        ...


def dp_sgd(
    sampling: Sampling,
    *,
    noise_multiplier: float,
    steps: int,
    delta: float,
    dims: int,
    strategy: Columns | None = None,
    relation: NeighboringRelation | None = None,
    privacy_unit: str = RECORD,
    method: AccountingMethod = "pld",
) -> Guarantee:
    """The guarantee of a whole run of DP-SGD.

    Args:
        sampling: how batches are drawn.
        noise_multiplier: z, the standard deviation of the noise divided by the norm bound.
        steps: the number of steps.
        delta: the delta of the guarantee, in (0, 1).
        dims: how many numbers get noise in a step, which is the number of all parameters.
        strategy: the strategy of correlated noise; None for independent noise.
        relation: which databases are neighbors. None takes the relation of an open ledger, or
            add-or-remove-one if no ledger is open. Batches of a fixed size need replace-one. Under
            add-or-remove-one, both neighbors are stored in the n slots of the sampling, and one
            neighbor leaves one slot empty. n, the rate and everything else about the sampling are
            public.
        privacy_unit: the unit that the sampling draws, as in `Guarantee`; "record" for single
            examples.
        method: "pld", by privacy loss distributions, or "renyi", which is looser and faster.

    Returns:
        A `Guarantee`.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, the relation does not fit the sampling, batches
            exceed their capacity too often for this delta, or losses are too large to compute; if a
            strategy has more bands than the sampling has groups, unless all records of a group or
            bin join its batches.

    Formal guarantees:
        (epsilon, delta)-DP of the joint distribution of all steps, rounded up. Each step may depend
        on the results of earlier steps. docs/proofs/dp-sgd.md has the proof and its assumptions.
        The guarantee includes the cost of the following:

        - the discretization of dp-accounting, which is pessimistic;
        - batches that exceed their capacity: a delta of (1 + e^epsilon) p for every step, where p
          is the probability of exceeding the capacity; similarly for ties among the random words
          that determine the order of a batch;
        - probability that convolutions may lose: a delta of 1e-15 for every step, with "pld";
        - the difference between the tables of the noise and the normal distribution, for every
          coordinate of every step.

        For bins, and for batches at random distances, this is the guarantee for records whose
        batches are known to the attacker. It is also valid if they are secret. To make use of the
        secret, simulate privacy losses by `learning.participation_losses`. With a strategy,
        docs/proofs/correlated-noise.md has the proof.

        For batches of a fixed size, the hockey-stick divergence at e^epsilon is the rate times the
        divergence of the Gaussian mechanism at 1 + (e^epsilon - 1) / rate. Swapping the neighbors
        gives a second case of the same formula.

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
        (epsilon=1.67166, delta=1e-05)-DP, under add-or-remove-one, in 1000 public slots
    """
    run = DpSgdRun(sampling, steps, delta, dims, relation, method, strategy=strategy).checked()
    check_privacy_unit(privacy_unit)
    z = _checks.concrete_positive("noise_multiplier", noise_multiplier)
    epsilon = run.epsilon(z)
    found = Guarantee(epsilon, run.delta, privacy_unit=privacy_unit)
    if run.replaced:
        return found
    replacing = None
    with contextlib.suppress(NoEpsilonError):
        other = run._replace(relation=NeighboringRelation.REPLACE_ONE).epsilon(z)
        replacing = other, run.delta, epsilon, run.delta
    notes, added = (f"in {sampling.n} public slots",), NeighboringRelation.ADD_OR_REMOVE_ONE
    return dataclasses.replace(found, relation=added, notes=notes, replacing=replacing)


def dp_sgd_risk(
    sampling: Sampling,
    *,
    noise_multiplier: float,
    steps: int,
    dims: int,
    strategy: Columns | None = None,
    relation: NeighboringRelation | None = None,
) -> Risk:
    """What any attack can learn about one record from all steps of a run of DP-SGD.

    Args:
        sampling: how batches are drawn.
        noise_multiplier: z, as for `dp_sgd`.
        steps: the number of steps.
        dims: how many numbers get noise in a step.
        strategy: the strategy of correlated noise, as for `dp_sgd`.
        relation: which databases are neighbors, as for `dp_sgd`.

    Returns:
        A `Risk`, which includes the costs that `dp_sgd` lists.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, the relation does not fit the sampling, or
            losses are too large to compute.

    Formal guarantees:
        Those of `risk`, for the joint distribution of all steps, each of which may depend on the
        results of earlier steps.

    Source:
        See `dp_sgd` and `risk`.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.poisson_sampling(1000, batch_size=50)
        >>> found = dpjax.accounting.dp_sgd_risk(
        ...     sampling, noise_multiplier=1.5, steps=100, dims=10
        ... )
        >>> round(found.advantage, 3), round(found.reconstruction_bound(0.01), 3)
        (0.145, 0.027)
    """
    run = DpSgdRun(sampling, steps, 0.5, dims, relation, "pld", strategy=strategy).checked()
    return run.risk(_checks.concrete_positive("noise_multiplier", noise_multiplier))


class _Drawn(NamedTuple):
    """The public parameters of a sampling. They are hashable, so they can be in a cache key."""

    kind: Kind
    n: int
    rate: float
    capacity: int


class DpSgdRun(NamedTuple):
    """The parameters of a run of DP-SGD, except the noise multiplier."""

    sampling: Sampling
    steps: int
    delta: float
    dims: int
    relation: NeighboringRelation | None
    method: AccountingMethod
    # Among `groups` consecutive batches, at most one contains a given record.
    groups: int = 1
    strategy: Columns | None = None
    # The probability that a record is in a batch, if one key draws all batches.
    share: float = 1.0

    def checked(self) -> "DpSgdRun":
        """Returns the run with checked parameters; the relation None is replaced by a default."""
        relation = relation_or_inherited(self.relation, NeighboringRelation.ADD_OR_REMOVE_ONE)
        _checks.choice("method", self.method, get_args(AccountingMethod))
        steps = _checks.integer("steps", self.steps, least=1, most=10**9)
        dims = _checks.integer("dims", self.dims, least=1)
        delta = _checks.fraction("delta", self.delta)
        _checks.host_only("delta", delta, "a concrete number")
        sampling = self.sampling
        _checks.choice("sampling.kind", sampling.kind, get_args(Kind))
        if not 0 < sampling.rate <= 1:
            raise ValueError(f"sampling.rate must be in (0, 1], got {sampling.rate}")
        _checks.integer("sampling.capacity", sampling.capacity, least=1)
        _checks.integer("sampling.n", sampling.n, least=1)
        # A sampling without the attribute `groups` has one group.
        groups = getattr(sampling, "groups", 1)
        # If one key draws all batches, `groups` is the number of bins, or the number of steps until
        # a record may join again. Above 2^16, the bound `uneven` would not be valid.
        most = min(sampling.n, 2**16) if sampling.kind in _ONE_KEY else sampling.n
        groups = _checks.integer("sampling.groups", groups, least=1, most=most)
        if sampling.kind == "fixed" and groups != 1:
            raise ValueError(
                "sampling.groups must be 1 for batches of a fixed size, which draw from all"
                f" records, got {groups}: use cyclic_sampling"
            )
        if sampling.kind == "fixed" and relation is not NeighboringRelation.REPLACE_ONE:
            raise ValueError(
                f"relation must be replace-one for batches of a fixed size, got {relation}: use"
                " poisson_sampling, or replace-one"
            )
        if sampling.kind == "bins" and sampling.rate != 1:
            raise ValueError(
                "sampling.rate must be 1 for sampling by bins, because every record is in a bin,"
                f" got {sampling.rate}: use balls_in_bins_sampling"
            )
        # In separated sampling, it is secret which batches a record joins. Only simulations make
        # use of this secrecy. The formulas here assume the rate 1: a record joins every batch that
        # it is allowed to join.
        separated = sampling.kind == "separated"
        rate, share = sampling.rate, share_of_batches(sampling.rate, groups)
        drawn = _Drawn(sampling.kind, sampling.n, 1.0 if separated else rate, sampling.capacity)
        run = DpSgdRun(
            drawn, steps, delta, dims, relation, self.method, groups, self.strategy, share
        )
        if self.strategy is not None and run.overlaps and (rate != 1 or separated):
            raise ValueError(
                f"sampling must have at least {self.strategy.bands} groups, one for each band of "
                f"the strategy, got {sampling}: with fewer groups, one published number would "
                "depend on two batches with the same record. Draw batches by "
                "learning.cyclic_sampling, or let every batch contain all records of its group"
            )
        return run

    @property
    def overlaps(self) -> bool:
        """Whether one published number may depend on two batches that contain the same record."""
        return self.strategy is not None and self.strategy.bands > self.groups

    @property
    def replaced(self) -> bool:
        return self.relation is NeighboringRelation.REPLACE_ONE

    @property
    def joining(self) -> tuple[int, float]:
        """The most records that may join a batch, and the probability that a record joins."""
        if self.sampling.kind in _ONE_KEY:
            return self.sampling.n, min(1.0, self.share + self.uneven)
        return -(-self.sampling.n // self.groups), self.sampling.rate

    def gaussians(self, z: float) -> tuple[float, int]:
        """Returns noise multiplier and number of the Gaussian mechanisms that use one record.

        If no published number depends on two batches of the same record, each batch is a separate
        mechanism. Otherwise, all batches of a record together are one mechanism.
        """
        if self.strategy is None or not self.overlaps:
            return z, self.participations
        return z / self.strategy.overlap(groups=self.groups, steps=self.steps), 1

    @property
    def participations(self) -> int:
        """The largest number of steps whose batch may contain a given record."""
        return -(-self.steps // self.groups)

    @property
    def uneven(self) -> float:
        """Bounds the total variation distance of a record's batches from their ideal distribution.

        The bin of a record is a random 64-bit word modulo the number of bins, which is not exactly
        uniform. In separated sampling, the first batch that a record may join is not exactly
        uniform, either. After each batch, the random distance to the record's next batch is drawn
        by comparing one word with at most 255 numbers, which are rounded to 64 bits.
        """
        if self.sampling.kind not in _ONE_KEY:
            return 0.0
        distances = self.steps if self.sampling.kind == "separated" else 0
        return (self.groups + 256.0 * distances) * 2.0**-64

    @property
    def loss(self) -> float:
        """The log of the factor by which noise tables may change densities of a whole run."""
        assert GAUSSIAN.lattice is not None
        return self.steps * self.dims * GAUSSIAN.lattice.certificate.loss

    @property
    def missed_anyway(self) -> float:
        """The probability that noise falls outside its tables, or that two random words are equal.

        Batches are chosen by sorting random 128-bit words. If two of them are equal, the order of
        records is not uniform. The bound adds up this probability over all pairs of words.
        Fixed-size sampling sorts one word for every record, and Poisson sampling sorts one word for
        every slot of a batch.
        """
        assert GAUSSIAN.lattice is not None
        of_noise = self.dims * GAUSSIAN.lattice.certificate.delta
        ordered = self.sampling.n if self.sampling.kind == "fixed" else self.sampling.capacity
        return self.steps * (of_noise + float(ordered) ** 2 * 2.0**-129) + self.uneven

    @property
    def missed(self) -> float:
        """The sum of `missed_anyway` and the probability that a batch exceeds its capacity."""
        sampling = self.sampling
        if sampling.kind == "fixed":
            return self.missed_anyway
        # `joining` bounds the number of records that may join a batch, for both neighboring
        # databases.
        cut = scipy.stats.binom.sf(sampling.capacity, *self.joining)
        cut = float(cut) * _OUTWARD
        return self.missed_anyway + self.steps * cut

    # Results are cached, because `fit` calls this method several times, and a search takes a
    # second.
    @functools.lru_cache(1024)  # noqa: B019
    def epsilon(self, z: float, *, coarseness: float = 1.0) -> float:
        """Returns the epsilon of the real run, whose noise and batches are only nearly ideal.

        Except for a probability m, the densities of the real run and the ideal run are within a
        factor e^loss. So if the ideal run is (epsilon, delta_0)-DP, the real run is (epsilon + 2
        loss, delta)-DP, where delta = e^loss delta_0 + (1 + e^(epsilon + loss)) m. For the given
        delta, delta_0 depends on epsilon, and epsilon depends on delta_0. The loop in
        `real_epsilon` approaches the fixed point from below.
        """
        z, count = self.gaussians(z)
        steps = self.sampling, z, count, self.replaced
        needed = _delta_of_one_step(self.sampling, z, self.replaced, self._largest_epsilon())
        if needed > self.delta:
            raise NoEpsilonError(self._used_up())
        if self.method == "renyi":
            divergences = composed_divergences(*steps)
            return self.charged(functools.partial(epsilon_by_renyi, divergences))
        return self.charged(epsilons_by_losses(*steps, coarseness))

    def charged(self, curve: Callable[[float], float]) -> float:
        """Returns the epsilon of the real run, given a function from delta to the ideal epsilon."""
        epsilon = real_epsilon(curve, self.delta, self.loss, self.missed)
        if epsilon == math.inf:
            raise NoEpsilonError(self._used_up())
        return epsilon

    def advantage(self, z: float, *, coarseness: float = 1.0) -> float:
        """Returns `risk(z).advantage`, without computing the rest of the risk."""
        return self.risk(z, coarseness=coarseness, at_zero_only=True).advantage

    def risk(self, z: float, *, coarseness: float = 1.0, at_zero_only: bool = False) -> Risk:
        """Returns the risk of the real run, whose noise and batches are only nearly ideal."""
        assert self.relation is not None
        joint, lost = composed_losses(self.sampling, *self.gaussians(z), self.replaced, coarseness)
        return risk_of_losses(
            joint,
            basis="losses",
            relation=self.relation,
            loss=self.loss,
            missed=self.missed,
            lost=lost,
            at_zero_only=at_zero_only,
        )

    def check_within_reach(self, epsilon: float) -> None:
        """Refuses an epsilon at which deviations from an ideal run cost over a tenth of delta.

        There are two deviations: noise comes from tables, and a batch may exceed its capacity. Part
        of delta pays for them. If this part is at most a tenth, it hardly affects the least noise
        multiplier. If it is larger, the epsilon of the least noise multiplier might be below the
        requested epsilon.
        """
        if _charged_at(epsilon, self.loss, self.missed) > _LARGEST_SHARE * self.delta:
            raise NoEpsilonError(self._used_up(epsilon))

    def _largest_epsilon(self) -> float:
        """Returns an epsilon that is too large: no part of delta is left for the ideal run.

        At this epsilon, inexact noise and inexact batches already cost more than delta.
        """
        return max(0.0, math.log(self.delta) - math.log(self.missed))

    def _used_up(self, epsilon: float | None = None) -> str:
        at = self._largest_epsilon() if epsilon is None else epsilon
        stated = f"delta={self.delta:g} is used up at epsilon={at:.3g}: in {self.steps} steps"
        anyway = (1 + math.exp(min(at, 700.0))) * self.missed_anyway
        if self.missed > 2 * self.missed_anyway and anyway < _LARGEST_SHARE * self.delta:
            enough = least_capacity(*self.joining, rare_enough(at, self.delta, self.steps))
            advice = f"capacity={enough}" if epsilon else "more noise, or a larger capacity"
            return (
                f"{stated} a batch exceeds its capacity of {self.sampling.capacity} with"
                f" probability {self.missed:.2g}; use {advice}"
            )
        advice = "a smaller epsilon" if epsilon else "more noise"
        return (
            f"{stated} the noise or a batch deviates from its ideal distribution with probability"
            f" {self.missed:.2g}; use {advice} or a larger delta"
        )


def real_epsilon(
    curve: Callable[[float], float], delta: float, loss: float, missed: float
) -> float:
    """Returns the epsilon of a real run, given a function from delta to the ideal epsilon.

    Except with probability `missed`, the densities of the real and the ideal run are within a
    factor of e^loss. Part of delta pays for this difference. The result is infinite if no delta is
    left for the ideal run.
    """
    epsilon = 0.0
    for _ in range(200):
        left = (delta - _charged_at(epsilon, loss, missed)) * math.exp(-loss)
        if not left > 0:
            break
        found = curve(left)
        if found <= epsilon:
            return (epsilon + 2 * loss) * _OUTWARD
        epsilon = found * _OUTWARD
    return math.inf


def _charged_at(epsilon: float, loss: float, missed: float) -> float:
    """Returns the part of delta that pays for inexact noise and batches, at a given epsilon."""
    above = epsilon + loss
    return math.inf if above > 700 else (1 + math.exp(above)) * missed


def rare_enough(epsilon: float, delta: float, steps: int) -> float:
    """Returns the largest allowed probability that a batch exceeds its capacity in one step.

    With this probability, all steps together use a thousandth of delta.
    """
    if epsilon > 600:
        return 0.0
    return delta / 1000 / steps / (1 + math.exp(epsilon))


def share_of_batches(rate: float, separation: int) -> float:
    """Returns the probability that a batch contains a given record.

    After a batch that contains the record, the next `separation` - 1 batches do not contain it.
    Each later batch contains it with probability `rate`, until one does. For sampling by bins,
    `separation` is the number of bins, and the rate is 1.
    """
    return rate / (1 + (separation - 1) * rate)


def least_capacity(n: int, rate: float, rare: float) -> int:
    """Returns the least capacity that a batch exceeds with a probability of at most `rare`.

    The number of records in a batch is binomial, with parameters n and `rate`.
    """
    # The capacity is found by bisection, because SciPy's inverse of `sf` fails for small rates.
    exceeds = functools.partial(scipy.stats.binom.sf, n=n, p=rate)
    return min(n, bisect.bisect_left(range(n), True, key=lambda x: exceeds(x) <= rare) + 1)


def _delta_of_one_step(sampling: Sampling, z: float, replaced: bool, epsilon: float) -> float:
    """Returns a lower bound on the delta of one step at an epsilon.

    The delta of the whole run is at least as large.
    """
    sigma = z / 2 if replaced and sampling.kind == "fixed" else z
    inner = math.log1p(math.expm1(epsilon) / sampling.rate)
    mirrored = inner + scipy.special.log_ndtr(-0.5 / sigma - inner * sigma)
    ratio = math.exp(min(0.0, float(mirrored)))
    return sampling.rate * (float(scipy.special.ndtr(0.5 / sigma - inner * sigma)) - ratio)
