"""Parts of a ledger's budget, in which Gaussian releases add up by their squares."""

import math
import os
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias

import jax
import numpy as np
import scipy

from dpjax._core._open_ledgers import Account, Drawing, Request, fingerprint_of_key
from dpjax._core._values import Guarantee, NeighboringRelation, Release
from dpjax._files._ledger_chain import EPSILON_DIGITS
from dpjax._files._ledger_errors import BudgetExceededError
from dpjax.accounting._composition import SHARE, charged, compose, under
from dpjax.random._facade import GAUSSIAN

_MARGIN = 1e-6  # Covers what float64 rounds in the functions below.

Asked: TypeAlias = tuple[Guarantee, str, str, Request | None]
"""A release that wants to be paid: its guarantee, the name of its key, what it is, the request."""
Price: TypeAlias = tuple[float | Decimal, float | Decimal]
Pay: TypeAlias = Callable[[Guarantee, str, str, Request | None, Price], None]
"""Writes a debit of a price to the file."""


class Pool:
    """A part of a budget that several shares draw on.

    Without a delta, costs are epsilons. Every release pays its own, so the rest stays in the
    ledger. With a delta, costs are squares of mu, see `Share`. Then the first release pays for the
    whole pool, and the others pay nothing more.

    Attributes:
        epsilon: of the pool.
        delta: of the pool.
        relation: of the ledger.
        most: the largest sum of costs.
    """

    def __init__(
        self, pay: Pay, epsilon: Decimal, delta: Decimal, relation: NeighboringRelation
    ) -> None:
        self.pay, self.epsilon, self.delta, self.relation = pay, epsilon, delta, relation
        if delta == 0:
            self.most = Fraction(epsilon)
        else:
            ideal = float(epsilon) * (1 - SHARE), float(delta) * (1 - SHARE)
            self.most = Fraction(largest_mu(*ideal)) ** 2
        self.spent, self.drawn, self._used = Fraction(0), 0, False
        self._process, self._lock = os.getpid(), threading.RLock()

    def cost(self, guarantee: Guarantee, drawing: Drawing | None) -> Fraction:
        """The cost of one release, rounded up."""
        shift = 1 if guarantee.relation is self.relation else 2
        guarantee = under(guarantee, self.relation)
        if not math.isfinite(guarantee.epsilon):
            raise BudgetExceededError(f"no budget pays for a release with {guarantee}")
        if self.delta == 0:
            # As the file counts it.
            units = math.ceil(Fraction(repr(float(guarantee.epsilon))) * 10**EPSILON_DIGITS)
            return Fraction(units, 10**EPSILON_DIGITS)
        mu = _mu_of(guarantee, drawing, shift)
        if mu is None:
            raise BudgetExceededError(
                "a share of a budget with a delta pays for Gaussian noise in the norm l2 and for"
                " releases without a delta; pay for others from the ledger itself"
            )
        return Fraction(mu) ** 2

    def release(self, share: "Share", asked: Asked, drawing: Drawing | None) -> None:
        """Pays for a release of a share. The debit is on the disk before the sums count it."""
        if self._process != os.getpid():
            raise BudgetExceededError(
                "a share belongs to the process that made it: its sums are in memory, and a fork"
                " would spend them twice"
            )
        guarantee = compose(asked[0])
        with self._lock:
            cost, numbers = self.cost(guarantee, drawing), drawing.numbers if drawing else 0
            drawn = self.drawn + numbers
            left = share.most - share.spent
            if cost > left or self.spent + cost > self.most or not self._covers(drawn):
                raise BudgetExceededError(
                    f"this costs {float(cost / share.most):.3g} of the share, which has"
                    f" {float(left / share.most):.3g} left; a Gaussian release of epsilon"
                    f" {share.epsilon:.4g} and delta {share.delta:.4g}, or one of epsilon"
                    f" {share.pure_epsilon:.4g} without a delta, costs all of it"
                )
            self.pay(*asked, self._price(under(guarantee, self.relation)))
            self.drawn, self._used = drawn, True
            share.spent, self.spent = share.spent + cost, self.spent + cost

    def _covers(self, drawn: int) -> bool:
        """Whether the pool covers the tables of the noise too."""
        if self.delta == 0:
            return True
        epsilon, delta = float(self.epsilon), float(self.delta)
        grown, needed = charged(epsilon * (1 - SHARE), delta, drawn)
        return grown <= epsilon and needed <= delta

    def _price(self, guarantee: Guarantee) -> Price:
        if self.delta == 0:
            return float(guarantee.epsilon), float(guarantee.delta)
        return (0, 0) if self._used else (self.epsilon, self.delta)


class Share(Account):
    """A part of a budget; made by `ledger.share` or `ledger.split`.

    `with share:` pays for the releases inside, and `dpjax.privatize(..., ledger=share)` for those
    of one function. Named releases are those of the ledger.

    Attributes:
        epsilon: of a Gaussian release that costs the whole share, with `delta`; without a delta, of
            any release.
        delta: likewise.
        pure_epsilon: of a release without a delta that costs the whole share.

    Formal guarantees:
        All releases in the shares of one `share` or `split` together cost the ledger the part of
        its epsilon and delta that was asked for, at most. A share of a budget without a delta adds
        up epsilons, and every release pays its own.

        A share with a delta adds up squares of mu, the sensitivity over the scale of Gaussian
        noise. The first release debits the whole part, before its noise is drawn, and nothing
        returns. A smaller cost that is read off at the end would be chosen by the answers, and no
        guarantee. A part that was never used costs nothing. If a process is killed, what it had
        left of a share is lost.

        All releases of such a part are together a random function of one draw of Gaussian noise of
        the largest mu that is (epsilon, delta)-DP, less what the tables of the noise need. They may
        stand between other releases of the ledger. docs/proofs/adaptive.md has the proof. gamma is
        as for the ledger.
    """

    def __init__(self, ledger: Account, pool: Pool, parts: int) -> None:
        self._ledger, self._pool = ledger, pool
        self.most, self.spent = pool.most / parts, Fraction(0)
        self.delta = float(pool.delta)
        if pool.delta == 0:
            units = math.floor(self.most * 10**EPSILON_DIGITS)
            self.epsilon = self.pure_epsilon = _down(Fraction(units, 10**EPSILON_DIGITS))
        else:
            mu = math.sqrt(self.most) * (1 - _MARGIN)
            self.epsilon = epsilon_of(mu, self.delta * (1 - 2**-20))
            self.pure_epsilon = _logit_of_half(mu)

    @property
    def relation(self) -> NeighboringRelation:
        """That of the ledger."""
        return self._pool.relation

    @property
    def remaining(self) -> float:
        """The part of the share that is left, from 0 to 1."""
        return float((self.most - self.spent) / self.most)

    def record(
        self,
        key: jax.Array,
        guarantee: Guarantee,
        what: str,
        request: Request | None,
        drawing: Drawing | None = None,
    ) -> None:
        """Pays for a release that is about to be drawn."""
        self._pool.release(self, (guarantee, fingerprint_of_key(key), what, request), drawing)

    def released(self, request: Request) -> Release | None:
        """The release that the ledger keeps under a request, if any."""
        return self._ledger.released(request)

    def keep(self, request: Request, release: Release) -> Release:
        """Keeps the first release under a request, and returns it."""
        return self._ledger.keep(request, release)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a share cannot be copied or pickled: both would spend it")

    def __repr__(self) -> str:
        return f"Share({self.remaining:.4g} left, of {self._ledger!r})"


def _mu_of(guarantee: Guarantee, drawing: Drawing | None, shift: int) -> float | None:
    """The mu of a release, rounded up; None if it is neither Gaussian nor without a delta.

    To replace a record shifts Gaussian noise under add-or-remove-one twice as far.
    """
    mechanism = drawing.mechanism if drawing else None
    if mechanism and getattr(mechanism, "noise", None) is GAUSSIAN and mechanism.norm == "l2":
        rho, missed = mechanism.zcdp
        return (
            None
            if missed > 0 or not math.isfinite(rho)
            else shift * math.sqrt(2 * rho) * (1 + _MARGIN)
        )
    if guarantee.delta > 0 or not math.isfinite(guarantee.epsilon):
        return None
    # Phi(mu / 2) = 1 / (1 + e^-epsilon), through the smaller tail.
    tail = -np.logaddexp(0.0, float(guarantee.epsilon))
    return -2 * float(scipy.special.ndtri_exp(tail)) * (1 + _MARGIN)


def _logit_of_half(mu: float) -> float:
    """The epsilon of a release without a delta that costs mu^2, rounded down."""
    upper, lower = scipy.special.log_ndtr([mu / 2, -mu / 2])
    return float(upper - lower) * (1 - 4 * _MARGIN)


def _log_delta(epsilon: float, mu: float) -> float:
    """Log of the delta of Gaussian noise: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - ...)."""
    first, second = scipy.special.log_ndtr([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
    gap = min(epsilon + second - first, -1e-300)
    return float(first + math.log(-math.expm1(gap)))


def largest_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which Gaussian noise is (epsilon, delta)-DP, rounded down."""
    low, high = 1e-40, 100.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        if _log_delta(epsilon, middle) <= math.log(delta) - _MARGIN:
            low = middle
        else:
            high = middle
    return low * (1 - _MARGIN)


def epsilon_of(mu: float, delta: float) -> float:
    """An epsilon for which Gaussian noise of at most this mu is calibrated, rounded down."""
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        # Still too small: noise of this mu is not (middle, delta)-DP.
        if middle == 0 or _log_delta(middle, mu) > math.log(delta):
            low = middle
        else:
            high = middle
    return low * (1 - _MARGIN)


def _down(number: Fraction) -> float:
    """The float64 that prints as the decimal, or the next below."""
    nearest = float(number)
    return nearest if Fraction(repr(nearest)) <= number else math.nextafter(nearest, 0)
