"""Releases that are chosen by what was released before: a filter and an odometer, in zCDP."""

import math
from fractions import Fraction
from typing import Any

from dpjax._core import _checks
from dpjax._core._values import Guarantee
from dpjax._exact._numerics import round_up
from dpjax._files._ledger_errors import BudgetExceededError
from dpjax.accounting._composition import compose
from dpjax.accounting._concentrated import (
    concentration,
    guarantee_of,
    largest_rho,
)
from dpjax.accounting._ideal_noise import SHARE, charged

# Weights of the orders that an odometer looks at, 1 / (1 + |j|)^2, add up to this.
_ALL_WEIGHTS = math.pi**2 / 3 - 1
_LEVELS = range(-64, 65)


class _Adaptive:
    """Sums over the releases so far."""

    def __init__(self, delta: float, reserved: float, dims: int) -> None:
        self.delta = _checks.fraction("delta", delta)
        self._reserved = _checks.non_negative("reserved", reserved)
        self._slack = self.delta * (1 - SHARE) - self._reserved
        if self._slack <= 0:
            raise ValueError(f"reserved must be smaller than delta={delta:g}, got {reserved:g}")
        self._dims = _checks.integer("dims", dims, least=1)
        self._rho, self._delta, self._drawn = Fraction(0), Fraction(0), 0
        self._together: Guarantee | None = None

    def _with(self, release: Any) -> tuple[Fraction, Fraction, Guarantee]:
        """The sums with one more release; nothing is changed yet."""
        one, cost = guarantee_of(release), concentration(release)
        if not (math.isfinite(cost.rho) and cost.delta < 1):
            raise BudgetExceededError(f"no budget pays for a release that promises {one}")
        together = compose(one) if self._together is None else compose(self._together, one)
        return self._rho + Fraction(cost.rho), self._delta + Fraction(cost.delta), together

    def _drawn_with(self, release: Any) -> int:
        """How many numbers were drawn; a guarantee holds for what is."""
        return self._drawn + self._dims * (not isinstance(release, Guarantee))

    @staticmethod
    def _added(together: Guarantee | None) -> float:
        """The sum of epsilons, which bounds the loss itself where no release has a delta."""
        if together is None:
            return 0.0
        return float(together.epsilon) if together.delta == 0 else math.inf

    def _add(self, release: Any, sums: tuple[Fraction, Fraction, Guarantee]) -> None:
        self._rho, self._delta, self._together = sums
        self._drawn = self._drawn_with(release)

    def _promise(self, epsilon: float, delta: float) -> Guarantee:
        together = self._together or Guarantee(0.0)
        return Guarantee(
            epsilon,
            delta,
            together.gamma,
            together.confidence,
            together.events,
            together.relation,
            together.notes,
            together.group_size,
        )


class PrivacyFilter(_Adaptive):
    """Admits releases, each chosen by what was released before, while a budget lasts.

    `filter.admit(mechanism)` before a release with it. The budget is spent in zCDP, in which many
    small releases cost far less than by adding; a few large ones that have no delta may be added
    instead. It lives in memory; `dpjax.Ledger` is for what must survive.

    Attributes:
        epsilon: of the budget.
        delta: of the budget.

    Formal guarantees:
        All admitted releases together are (epsilon, delta)-DP on a pair of databases on which the
        samplings hold, whatever order, mechanism and moment to stop is chosen by the releases
        before: where the sum of rho admits the last release the loss is that of a zCDP filter, and
        where the sum of epsilons does it is below epsilon. Refusals depend on the guarantees alone.

        *Sampled* sensitivities must have been fixed in advance: targets, sizes, norms, oracles, and
        which of them are released. `filter.guarantee` adds the gammas of those that were admitted;
        where answers choose among several, those of all that might have been chosen add.

        Filters and odometers are due to Rogers, Roth, Ullman and Vadhan (2016), those in zCDP to
        Feldman and Zrnic (2021) and Whitehouse, Ramdas, Rogers and Wu (2023).
    """

    def __init__(
        self, *, epsilon: float, delta: float, reserved: float = 0.0, dims: int = 2**20
    ) -> None:
        """Makes a filter.

        Args:
            epsilon: of the budget.
            delta: of the budget, strictly between 0 and 1.
            reserved: the part of delta that is kept for the deltas of releases whose zCDP has one,
                which Gaussian and pure mechanisms have not.
            dims: at most so many numbers are in each release.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if a parameter is out of range.
        """
        super().__init__(delta, reserved, dims)
        self.epsilon = _checks.positive("epsilon", epsilon)
        self._most = largest_rho(self.epsilon * (1 - SHARE), self._slack)

    def admit(self, release: Any) -> None:
        """Takes a release from the budget, before it is made.

        Args:
            release: its mechanism, or its guarantee.

        Raises:
            BudgetExceededError: if too little is left; then nothing is taken.
            TypeError: if it is neither a mechanism nor a concrete guarantee.
            ValueError: if it is for other neighbors than the releases before.
        """
        sums = self._with(release)
        drawn = self._drawn_with(release)
        epsilon, delta = charged(self.epsilon * (1 - SHARE), self.delta, drawn)
        tables = epsilon > self.epsilon or delta > self.delta
        concentrated = sums[0] <= self._most and sums[1] <= self._reserved and not tables
        if not concentrated and self._added(sums[2]) > self.epsilon:
            raise BudgetExceededError(
                f"this costs rho={float(sums[0] - self._rho):.4g} and"
                f" delta={float(sums[1] - self._delta):.4g}, and there is left"
                f" rho={self._most - float(self._rho):.4g} and"
                f" delta={self._reserved - float(self._delta):.4g}"
                + (f", or noise for {drawn} coordinates is too much" if tables else "")
            )
        self._add(release, sums)

    @property
    def remaining(self) -> float:
        """The part of the budget that is left: of rho, or of epsilon where more of that is."""
        added = self._added(self._together) / self.epsilon
        return max(0.0, 1 - min(added, float(self._rho / Fraction(self._most))))

    @property
    def guarantee(self) -> Guarantee:
        """What all that will ever be admitted promises; gamma of what was admitted so far."""
        return self._promise(self.epsilon, self.delta)


class PrivacyOdometer(_Adaptive):
    """Says what releases, each chosen by what was released before, have cost at any moment.

    `odometer.add(mechanism)` with every release. There is no budget: unlike what a filter promises,
    its reading may itself decide when to stop.

    Attributes:
        delta: with which the readings hold.

    Formal guarantees:
        On a pair of databases on which the samplings hold, with probability at least 1 - delta the
        privacy loss is below `reading.epsilon` at all moments at once: so the reading at a moment
        that is chosen by the releases is a guarantee. For every order a > 1, exp((a - 1) (loss - a
        sum rho)) is a supermartingale; Ville's inequality bounds it over all time, at 129 orders
        with a part of delta each, and the best one is read, or the sum of epsilons where no release
        has a delta. That part of delta which the deltas of releases may take is set aside at the
        start: a delta that grew with what is read would be no bound where releases choose it.

        *Sampled* sensitivities as in `PrivacyFilter`.
    """

    def __init__(self, *, delta: float, reserved: float = 0.0, dims: int = 2**20) -> None:
        """Makes an odometer.

        Args:
            delta: of every reading, strictly between 0 and 1.
            reserved: the part of delta that is kept for the deltas of releases, as in a filter.
            dims: at most so many numbers are in each release.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if a parameter is out of range.
        """
        super().__init__(delta, reserved, dims)

    def add(self, release: Any) -> Guarantee:
        """Counts a release, before it is made.

        Args:
            release: its mechanism, or its guarantee.

        Returns:
            The reading after it.

        Raises:
            BudgetExceededError: if the release promises nothing, or its delta is more than is left
                of what was reserved; it must not be made.
            TypeError: if it is neither a mechanism nor a concrete guarantee.
            ValueError: if it is for other neighbors than the releases before.
        """
        sums = self._with(release)
        if sums[1] > self._reserved:
            raise BudgetExceededError(
                f"this has delta={float(sums[1] - self._delta):.4g}, and of what was reserved there"
                f" is left {self._reserved - float(self._delta):.4g}"
            )
        self._add(release, sums)
        return self.reading

    @property
    def reading(self) -> Guarantee:
        """What the releases so far promise together."""
        if self._together is None:
            return Guarantee(0.0)
        rho = round_up(self._rho)
        ideal = min(_at_level(level, rho, self._slack) for level in _LEVELS)
        epsilon, needed = charged(ideal, self.delta, self._drawn)
        if needed > self.delta:
            epsilon = math.inf
        return self._promise(min(epsilon, self._added(self._together)), self.delta)


def _at_level(level: int, rho: float, delta: float) -> float:
    """The bound at the order that is the best for a rho of 2^level, rounded up."""
    log = -math.log(delta / (_ALL_WEIGHTS * (1 + abs(level)) ** 2))
    above_one = math.sqrt(log / 2.0**level)
    return ((1 + above_one) * rho + log / above_one) * (1 + 1e-12)
