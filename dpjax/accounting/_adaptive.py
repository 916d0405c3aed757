"""A filter and an odometer in zCDP, for releases that are chosen by earlier releases."""

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

# An odometer gives order j the weight 1 / (1 + |j|)^2, and this is the sum over all orders.
_ALL_WEIGHTS = math.pi**2 / 3 - 1
_LEVELS = range(-64, 65)


class _Sums(NamedTuple):
    """Sums over some releases: their zCDP, how many numbers get noise, and their guarantee."""

    rho: Fraction = Fraction(0)  # Fractions, because sums of floats could round down.
    delta: Fraction = Fraction(0)
    drawn: int = 0
    together: Guarantee | None = None

    @property
    def added(self) -> float:
        """The sum of epsilons. It bounds the privacy loss if no release has a delta."""
        if self.together is None:
            return 0.0
        return float(self.together.epsilon) if self.together.delta == 0 else math.inf


class _Adaptive:
    """The releases so far, as counted by a filter or an odometer.

    Attributes:
        _paying: a lock, held from the check of the remaining budget until a release is paid. It is
            in `__slots__`, so that `vars` of a budget holds only values.
    """

    __slots__ = ("__dict__", "_paying")

    def __init__(
        self, delta: float, reserved: float, dims: int, relation: NeighboringRelation | None
    ) -> None:
        self.relation = relation_or_inherited(relation)
        self.delta = _checks.fraction("delta", delta)
        self._reserved = _checks.non_negative("reserved", reserved)
        # delta pays for three things: the noise tables, the deltas of releases, and the conversion
        # from zCDP, which gets this remainder.
        self._slack = self.delta * (1 - SHARE) - self._reserved
        if self._slack <= 0:
            raise ValueError(f"reserved must be smaller than delta={delta:g}, got {reserved:g}")
        self._dims = _checks.integer("dims", dims, least=1)
        self._sums = _Sums()
        self._process, self._paying = os.getpid(), threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a filter or odometer cannot be copied or pickled: neither copy would know what the"
            " other has released; keep it in one process, or use a dpjax.Ledger for several"
        )

    def _refuse_forks(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "a filter or odometer must be used in the process that made it, got a fork of it:"
                " neither process would know what the other has released; use a dpjax.Ledger"
            )

    def _with(self, release: Mechanism | Guarantee) -> _Sums:
        """The sums with one more release, without adding it."""
        rho, delta, drawn, together = self._sums
        # A guarantee already includes its noise tables.
        drawn += self._dims * (not isinstance(release, Guarantee))
        release = release_under(release, self.relation)
        one, cost = guarantee_of(release), concentration(release)
        if not (math.isfinite(cost.rho) and cost.delta < 1):
            raise BudgetExceededError(f"no budget pays for a release with {one}")
        together = compose(one) if together is None else compose(together, one)
        return _Sums(rho + Fraction(cost.rho), delta + Fraction(cost.delta), drawn, together)

    def _promise(self, epsilon: float, delta: float) -> Guarantee:
        together = self._sums.together or Guarantee(0.0, relation=self.relation)
        return dataclasses.replace(together, epsilon=epsilon, delta=delta)


class PrivacyFilter(_Adaptive):
    """Admits releases while a budget lasts. Each release may depend on the results of earlier ones.

    Call `filter.admit(mechanism)` before every release. The budget is spent in zCDP, where many
    small releases cost far less than their sum of epsilons. A few large releases without a delta
    may be added up instead. The budget lives in the memory of one process, and cannot be copied. To
    keep one in a file, or for several processes, use `dpjax.Ledger`.

    Attributes:
        epsilon: the epsilon of the budget.
        delta: the delta of the budget.
        relation: which databases are neighbors. It must not depend on answers, so it is fixed at
            the start.

    Formal guarantees:
        All admitted releases together are (epsilon, delta)-DP on every pair of databases that the
        sampled sensitivities cover. The order, the mechanisms and the moment to stop may depend on
        earlier releases. If the last release was admitted by the sum of rho, the loss is that of a
        zCDP filter. If it was admitted by the sum of epsilons, the loss is at most epsilon
        (docs/proofs/adaptive.md). Refusals depend on the guarantees alone.

        *Sampled* sensitivities must be fixed in advance: their targets, sizes, norms and oracles,
        and the choice of those that are released. `filter.guarantee` adds the gammas of admitted
        releases. If answers decide which of several sensitivities is used, the gammas of all
        candidates add.

        Filters and odometers are due to Rogers, Roth, Ullman and Vadhan (2016), those in zCDP to
        Feldman and Zrnic (2021) and Whitehouse, Ramdas, Rogers and Wu (2023).
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
                Gaussian and pure mechanisms need no such part.
            dims: the largest number of coordinates in a release.
            relation: which databases are neighbors; None for the relation of an open ledger, else
                replace-one. Replace-one also accepts releases under add-or-remove-one, and
                doubles their shift.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if a parameter is out of range.
        """
        super().__init__(delta, reserved, dims, relation)
        self.epsilon = _checks.positive("epsilon", epsilon)
        self._most = largest_rho(self.epsilon * (1 - SHARE), self._slack)

    def admit(self, release: Mechanism | Guarantee) -> None:
        """Pays for a release, before it is made.

        Args:
            release: its mechanism, or its guarantee.

        Raises:
            BudgetExceededError: if too little is left; then nothing is spent.
            TypeError: if it is neither a mechanism nor a concrete guarantee.
            ValueError: if its group size differs from earlier releases, or it is under replace-one
                but this filter is not.
            RuntimeError: in a fork of the process that made it.
        """
        self._refuse_forks()
        with self._paying:
            sums = self._with(release)
            # The budget must also cover the noise tables of all releases, this one included.
            epsilon, delta = charged(self.epsilon * (1 - SHARE), self.delta, sums.drawn)
            tables = epsilon > self.epsilon or delta > self.delta
            concentrated = sums.rho <= self._most and sums.delta <= self._reserved and not tables
            if not concentrated and sums.added > self.epsilon:
                raise BudgetExceededError(
                    f"this costs rho={float(sums.rho - self._sums.rho):.4g} and"
                    f" delta={float(sums.delta - self._sums.delta):.4g}, but the budget has left"
                    f" rho={self._most - float(self._sums.rho):.4g} and"
                    f" delta={self._reserved - float(self._sums.delta):.4g}"
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
        """The guarantee of all releases, including future ones.

        Its gamma covers only releases so far.
        """
        self._refuse_forks()
        return self._promise(self.epsilon, self.delta)


class PrivacyOdometer(_Adaptive):
    """Tells the cost of all releases at any moment. Each release may depend on earlier ones.

    Call `odometer.add(mechanism)` with every release. There is no budget, and the reading itself
    may decide when to stop.

    Attributes:
        delta: the delta of every reading.
        relation: which databases are neighbors, fixed at the start.

    Formal guarantees:
        On a pair of databases that the sampled sensitivities cover, with probability at least 1 -
        delta the privacy loss is below `reading.epsilon` at all moments at once. So a reading is a
        guarantee even if earlier releases decide when to read it (docs/proofs/adaptive.md). The
        odometer splits delta among 129 orders, and reports the best bound. If no release has a
        delta, it may report the sum of epsilons. The part of delta for the deltas of releases is
        set aside at the start.

        *Sampled* sensitivities as in `PrivacyFilter`.
    """

    def __init__(
        self,
        *,
        delta: float,
        reserved: float = 0.0,
        dims: int = 2**20,
        relation: NeighboringRelation | None = None,
    ) -> None:
        """Makes an odometer.

        Args:
            delta: the delta of every reading, strictly between 0 and 1.
            reserved: the part of delta that is kept for the deltas of releases, as in a filter.
            dims: the largest number of coordinates in a release.
            relation: which databases are neighbors; None for the relation of an open ledger, else
                replace-one. Replace-one also accepts releases under add-or-remove-one, and
                doubles their shift.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if a parameter is out of range.
        """
        super().__init__(delta, reserved, dims, relation)

    def add(self, release: Mechanism | Guarantee) -> Guarantee:
        """Adds the cost of a release, before it is made.

        Args:
            release: its mechanism, or its guarantee.

        Returns:
            The reading after this release.

        Raises:
            BudgetExceededError: if the release guarantees nothing, or its delta exceeds the
                reserved delta that is left; do not make the release then.
            TypeError: if it is neither a mechanism nor a concrete guarantee.
            ValueError: if its group size differs from earlier releases, or it is under replace-one
                but this odometer is not.
            RuntimeError: in a fork of the process that made it.
        """
        self._refuse_forks()
        with self._paying:
            sums = self._with(release)
            if sums.delta > self._reserved:
                raise BudgetExceededError(
                    f"this has delta={float(sums.delta - self._sums.delta):.4g}, but the reserved"
                    f" delta has {self._reserved - float(self._sums.delta):.4g} left"
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
        # delta was split among all levels in advance, so the best of their bounds holds.
        ideal = min(_at_level(level, rho, self._slack) for level in _LEVELS)
        epsilon, needed = charged(ideal, self.delta, self._sums.drawn)
        if needed > self.delta:
            epsilon = math.inf
        return self._promise(min(epsilon, self._sums.added), self.delta)


def _at_level(level: int, rho: float, delta: float) -> float:
    """The odometer's bound at the order that is best for a rho of 2^level; rounded up."""
    log = -math.log(delta / (_ALL_WEIGHTS * (1 + abs(level)) ** 2))
    above_one = math.sqrt(log / 2.0**level)
    return ((1 + above_one) * rho + log / above_one) * (1 + 1e-12)
