"""A privacy filter and a privacy odometer, for adaptively chosen releases, in zCDP."""

import dataclasses
import math
import os
import threading
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._values import Guarantee, Mechanism, NeighboringRelation
from dpjax._exact._numerics import round_up
from dpjax._files._ledger_file import BudgetExceededError
from dpjax.accounting._composition import SHARE, charged, compose, release_under
from dpjax.accounting._concentrated import concentration, guarantee_of, largest_rho

# The odometer splits delta among integers j ("levels") with weights 1 / (1 + |j|)^2, whose sum over
# all j is `_ALL_WEIGHTS`. Only the levels in `_LEVELS` are used.
_ALL_WEIGHTS = math.pi**2 / 3 - 1
_LEVELS = range(-64, 65)


class _Sums(NamedTuple):
    """Totals over several releases: rho, delta, how many numbers were drawn, and the guarantee."""

    # Rho is summed as a fraction, because a sum of floats might be rounded down.
    rho: Fraction = Fraction(0)
    delta: Fraction = Fraction(0)
    drawn: int = 0
    together: Guarantee | None = None

    @property
    def added(self) -> float:
        """The sum of epsilons, which bounds the privacy loss; infinite if a release has a delta."""
        if self.together is None:
            return 0.0
        return float(self.together.epsilon) if self.together.delta == 0 else math.inf


class _Adaptive:
    """The base class of filter and odometer, which adds up the costs of releases so far.

    Attributes:
        _paying: a lock that is held from the check of the remaining budget until the payment is
            recorded.
    """

    def __init__(
        self,
        *,
        delta: float,
        reserved: float = 0.0,
        dims: int = 2**20,
        relation: NeighboringRelation | None = None,
    ) -> None:
        """Starts with no releases.

        Args:
            delta: the delta of the reported guarantees, strictly between 0 and 1.
            reserved: the part of delta that is set aside for the deltas of releases, as in
                `PrivacyFilter`.
            dims: the largest number of coordinates in a release.
            relation: which databases are neighbors, as in `PrivacyFilter`.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if a parameter is out of range.
        """
        self.relation = relation_or_inherited(relation)
        self.delta = _checks.fraction("delta", delta)
        self._reserved = _checks.non_negative("reserved", reserved)
        # delta is split into three parts: for the noise tables, for the deltas of releases, and for
        # the conversion from zCDP.
        self._slack = self.delta * (1 - SHARE) - self._reserved
        if self._slack <= 0:
            raise ValueError(f"reserved must be smaller than delta={delta:g}, got {reserved:g}")
        self._dims = _checks.integer("dims", dims, least=1)
        self._sums = _Sums()
        self._process, self._paying = os.getpid(), threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a filter or odometer cannot be copied or pickled, because neither copy would know the"
            " releases of the other: for several processes, use a dpjax.Ledger"
        )

    def _refuse_forks(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "a filter or odometer must be used in the process that made it, not in a fork of it"
                " that would not know its later releases: use a dpjax.Ledger"
            )

    def _with(self, release: Mechanism | Guarantee) -> _Sums:
        """Returns the totals including `release`, without changing the filter or odometer."""
        rho, delta, drawn, together = self._sums
        # A `Guarantee` already includes the cost of its noise tables, so its draws are not counted
        # again.
        drawn += self._dims * (not isinstance(release, Guarantee))
        release = release_under(release, self.relation)
        one, cost = guarantee_of(release), concentration(release)
        if not (math.isfinite(cost.rho) and cost.delta < 1):
            raise BudgetExceededError(
                f"release must have a finite epsilon and a delta below 1, got {one}"
            )
        together = compose(one) if together is None else compose(together, one)
        return _Sums(rho + Fraction(cost.rho), delta + Fraction(cost.delta), drawn, together)

    def _promise(self, epsilon: float, delta: float) -> Guarantee:
        together = self._sums.together or Guarantee(0.0, relation=self.relation)
        return dataclasses.replace(together, epsilon=epsilon, delta=delta)


class PrivacyFilter(_Adaptive):
    """A budget for adaptively chosen releases, which refuses a release that would exceed it.

    Call `filter.admit(mechanism)` before every release. Each release may depend on the results of
    earlier releases. Costs are added up in zCDP, where many small releases cost far less than the
    sum of their epsilons. A release that the budget in zCDP does not cover is still admitted if the
    sum of all epsilons is within the budget. The budget is in the memory of one process, and cannot
    be copied. To keep a budget in a file, or for several processes, use `dpjax.Ledger`.

    Attributes:
        epsilon: the epsilon of the budget.
        delta: the delta of the budget.
        relation: which databases are neighbors. It is set at the start, because it must not depend
            on answers.

    Formal guarantees:
        All admitted releases together are (epsilon, delta)-DP on every pair of databases that the
        sampled sensitivities cover. The order, the mechanisms and the moment to stop may depend on
        earlier releases. If the last release was admitted by the sum of rho, the privacy loss is
        bounded as for a zCDP filter. If it was admitted by the sum of epsilons, the privacy loss is
        at most epsilon (docs/proofs/adaptive.md). Whether a release is refused depends only on the
        guarantees.

        *Sampled* sensitivities must be chosen in advance: their targets, sizes, norms and oracles,
        and also which of them are released. `filter.guarantee` adds the gammas of admitted
        releases. If answers determine which of several sensitivities is used, add the gammas of all
        candidates instead.

        Filters and odometers are due to Rogers, Roth, Ullman and Vadhan (2016). The versions in
        zCDP are due to Feldman and Zrnic (2021) and Whitehouse, Ramdas, Rogers and Wu (2023).
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        reserved: float = 0.0,
        dims: int = 2**20,
        relation: NeighboringRelation | None = None,
    ) -> None:
        """Makes a filter.

        Args:
            epsilon: the epsilon of the budget.
            delta: the delta of the budget, strictly between 0 and 1.
            reserved: the part of delta that is set aside for releases whose zCDP has a delta.
                Gaussian and epsilon-DP mechanisms have none, so they need no reserved delta.
            dims: the largest number of coordinates in a release.
            relation: which databases are neighbors. None takes the relation of an open ledger, or
                replace-one if no ledger is open. Under replace-one, releases under
                add-or-remove-one are also accepted, and pay what they cost under replace-one.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if a parameter is out of range.
        """
        super().__init__(delta=delta, reserved=reserved, dims=dims, relation=relation)
        self.epsilon = _checks.positive("epsilon", epsilon)
        self._most = largest_rho(self.epsilon * (1 - SHARE), self._slack)

    def admit(self, release: Mechanism | Guarantee) -> None:
        """Pays for a release. Call it before you make the release.

        Args:
            release: the mechanism or the guarantee of the release.

        Raises:
            BudgetExceededError: if too little of the budget is left; then nothing is spent.
            TypeError: if `release` is neither a mechanism nor a concrete guarantee.
            ValueError: if the group size differs from earlier releases, or if the release is under
                replace-one but this filter is not.
            RuntimeError: in a fork of the process that made the filter.
        """
        self._refuse_forks()
        with self._paying:
            sums = self._with(release)
            # The budget must also pay for the noise tables of all releases, including this one.
            epsilon, delta = charged(self.epsilon * (1 - SHARE), self.delta, sums.drawn)
            tables = epsilon > self.epsilon or delta > self.delta
            concentrated = sums.rho <= self._most and sums.delta <= self._reserved and not tables
            if not concentrated and sums.added > self.epsilon:
                raise BudgetExceededError(
                    f"this release costs rho={float(sums.rho - self._sums.rho):.4g} and "
                    f"delta={float(sums.delta - self._sums.delta):.4g}, but what is left of the "
                    f"budget is rho={self._most - float(self._sums.rho):.4g} and "
                    f"delta={self._reserved - float(self._sums.delta):.4g}"
                    + (f"; it does not cover noise for {sums.drawn} coordinates" if tables else "")
                )
            self._sums = sums

    @property
    def remaining(self) -> float:
        """The fraction of the budget that is left, in rho or in epsilon, whichever is larger."""
        self._refuse_forks()
        added = self._sums.added / self.epsilon
        return max(0.0, 1 - min(added, float(self._sums.rho / Fraction(self._most))))

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all releases together, including future releases.

        Its gamma covers only the releases so far.
        """
        self._refuse_forks()
        return self._promise(self.epsilon, self.delta)


class PrivacyOdometer(_Adaptive):
    """A running bound on the total cost of adaptively chosen releases, without a budget.

    Call `odometer.add(mechanism)` before every release. It returns a *reading*: a guarantee for all
    releases up to this one. Each release, and the decision to stop, may depend on earlier releases
    and readings.

    Attributes:
        delta: the delta of the readings.
        relation: which databases are neighbors; set at the start.

    Formal guarantees:
        On a pair of databases that the sampled sensitivities cover, with probability at least 1 -
        delta the privacy loss is below `reading.epsilon` at all moments at once. So a reading is a
        guarantee even if earlier releases determine when you read it (docs/proofs/adaptive.md). The
        odometer splits delta among 129 orders, and reports the best bound. If no release has a
        delta, it may report the sum of epsilons. The part of delta for the deltas of releases is
        set aside at the start.

        For *sampled* sensitivities, the rules of `PrivacyFilter` apply.
    """

    def add(self, release: Mechanism | Guarantee) -> Guarantee:
        """Adds the cost of a release. Call it before you make the release.

        Args:
            release: the mechanism or the guarantee of the release.

        Returns:
            The reading after this release.

        Raises:
            BudgetExceededError: if the release has no guarantee, or if its delta exceeds the
                remaining reserved delta. Then do not make the release.
            TypeError: if `release` is neither a mechanism nor a concrete guarantee.
            ValueError: if the group size differs from earlier releases, or if the release is under
                replace-one but this odometer is not.
            RuntimeError: in a fork of the process that made the odometer.
        """
        self._refuse_forks()
        with self._paying:
            sums = self._with(release)
            if sums.delta > self._reserved:
                raise BudgetExceededError(
                    f"this release has delta={float(sums.delta - self._sums.delta):.4g}, but "
                    f"only {self._reserved - float(self._sums.delta):.4g} of the reserved delta "
                    "is left: reserve a larger delta at the start"
                )
            self._sums = sums
            return self.reading

    @property
    def reading(self) -> Guarantee:
        """The guarantee of all releases so far."""
        self._refuse_forks()
        if self._sums.together is None:
            return Guarantee(0.0, relation=self.relation)
        rho = round_up(self._sums.rho)
        # Delta was split among the levels in advance, so with this delta, the bounds of all levels
        # are true simultaneously, and so is their minimum.
        ideal = min(_at_level(level, rho, self._slack) for level in _LEVELS)
        epsilon, needed = charged(ideal, self.delta, self._sums.drawn)
        if needed > self.delta:
            epsilon = math.inf
        return self._promise(min(epsilon, self._sums.added), self.delta)


def _at_level(level: int, rho: float, delta: float) -> float:
    """Returns the odometer's bound for the order that is optimal at rho = 2^level, rounded up."""
    log = -math.log(delta / (_ALL_WEIGHTS * (1 + abs(level)) ** 2))
    above_one = math.sqrt(log / 2.0**level)
    return ((1 + above_one) * rho + log / above_one) * (1 + 1e-12)
