"""`Share`: a part of a ledger's budget, which composes Gaussian releases by squares of their mu."""

import math
import os
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import scipy

from dpjax._core._open_ledgers import Account, Drawing, Payment
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax._exact._numerics import bisect
from dpjax._files._ledger_file import EPSILON_DIGITS, BudgetExceededError
from dpjax.accounting._composition import SHARE, charged, compose, under
from dpjax.accounting._prices import Amount, as_decimals, cost_of, float_down
from dpjax.random._noise import GAUSSIAN

_MARGIN = 1e-6  # This covers the float64 rounding errors of the functions in this file.


class Pool:
    """A part of a ledger's budget that several shares spend together.

    If the budget has no delta, the cost of a release is its epsilon, in units of the ledger. Every
    release pays its own cost, and what is not spent stays in the ledger. If the budget has a delta,
    costs are squares of mu, see `Share`. Then the first release pays for the whole pool, and later
    releases pay nothing.

    Attributes:
        pay: a function that writes a debit to the file. The amount is the given price; if the price
            is None, it is the cost of the guarantee.
        whole: the epsilon and delta of the pool, in units of the ledger.
        epsilon: the epsilon of the pool, as a float.
        delta: the delta of the pool, as a float.
        relation: the relation of the ledger.
        most: the largest sum of costs that the pool can pay.
        spent: the sum of costs so far.
        drawn: how many noisy numbers have been drawn so far.
        used: whether a release has been paid for.
    """

    def __init__(
        self,
        pay: Callable[[Payment, Amount | None], None],
        whole: Amount,
        relation: NeighboringRelation,
    ) -> None:
        self.pay, self.whole, self.relation = pay, whole, relation
        self.epsilon, self.delta = map(float, as_decimals(*whole))
        self.most = Fraction(whole[0])
        if self.delta > 0:
            # A fraction SHARE of epsilon and of delta is set aside for the cost of noise tables.
            mu = largest_mu(self.epsilon * (1 - SHARE), self.delta * (1 - SHARE))
            self.most = Fraction(mu) ** 2
        self.spent, self.drawn, self.used = Fraction(0), 0, False
        self.process, self.lock = os.getpid(), threading.RLock()

    def cost(self, guarantee: Guarantee, drawing: Drawing | None) -> Fraction:
        """Returns the cost of one release, rounded up."""
        shift = 1 if guarantee.relation is self.relation else 2
        guarantee = under(guarantee, self.relation)
        units, _ = cost_of(guarantee)
        if self.delta == 0:
            return Fraction(units)
        mu = _mu_of(guarantee, drawing, shift)
        if mu is None:
            raise BudgetExceededError(
                "shares of a budget with a delta above 0 pay only for Gaussian noise in the norm l2"
                " and for releases with delta 0: pay for this release from the ledger itself"
            )
        return Fraction(mu) ** 2

    def covers(self, drawn: int) -> bool:
        """Whether the reserved part of the budget pays for inexact noise tables.

        `drawn` is the number of noisy numbers that are drawn in total.
        """
        if self.delta == 0:
            return True
        epsilon, delta = charged(self.epsilon * (1 - SHARE), self.delta, drawn)
        return epsilon <= self.epsilon and delta <= self.delta

    def price(self) -> Amount | None:
        """Returns the price of the next release; None if its guarantee determines the price."""
        if self.delta == 0:
            return None
        return (0, 0) if self.used else self.whole


class Share(Account):
    """A part of a budget; made by `ledger.share` or `ledger.split`.

    In a block `with share:`, the share pays for all releases. `dpjax.privatize(..., ledger=share)`
    makes a private function whose releases the share pays for. Both may be inside of a block
    `with ledger:`. Releases with a name are stored in the ledger.

    Attributes:
        epsilon: the epsilon of a single release that uses the whole share. If the budget has a
            delta, this release is Gaussian, at `delta`.
        delta: the delta of a Gaussian release that uses the whole share.
        pure_epsilon: the epsilon of a release without a delta that uses the whole share.

    Formal guarantees:
        All releases in the shares of one `share` or `split` together cost the ledger at most the
        requested part of its epsilon and delta. A share of a budget without a delta adds up
        epsilons, and every release pays its own epsilon.

        A share with a delta adds up squares of mu, where mu is the sensitivity over the standard
        deviation of Gaussian noise. The first release debits the whole part of the budget before
        its noise is drawn, and nothing is refunded. A refund at the end would depend on the
        answers, and so the smaller cost would not be a guarantee. A share that was never used costs
        nothing. If a process is killed, the rest of its shares is lost.

        All releases of such a share together can be simulated from a single Gaussian release, with
        the largest mu that is (epsilon, delta)-DP after the cost of the noise tables. Other
        releases of the ledger may happen in between. docs/proofs/adaptive.md has the proof. gamma
        is accounted as in the ledger.
    """

    def __init__(self, ledger: Account, pool: Pool, parts: int) -> None:
        self._pool, self.instead_of = pool, ledger
        self.most, self.spent = pool.most / parts, Fraction(0)
        self.delta = pool.delta
        if self.delta == 0:
            units = math.floor(self.most)
            self.epsilon = self.pure_epsilon = float_down(Fraction(units, 10**EPSILON_DIGITS))
        else:
            mu = math.sqrt(self.most) * (1 - _MARGIN)
            self.epsilon = epsilon_of(mu, self.delta * (1 - 2**-20))
            self.pure_epsilon = _logit_of_half(mu)

    @property
    def relation(self) -> NeighboringRelation:
        """The relation of the ledger."""
        return self._pool.relation

    @property
    def remaining(self) -> float:
        """The unspent fraction of this share, from 0 to 1."""
        return float((self.most - self.spent) / self.most)

    def record(self, release: Payment) -> None:
        """Pays for a release. The debit is written to the disk before the sums are updated."""
        pool, drawing = self._pool, release.drawing
        if pool.process != os.getpid():
            raise BudgetExceededError(
                "a share can only be used in the process that made it: a forked process would"
                " spend the same share again"
            )
        with pool.lock:
            cost = pool.cost(compose(release.guarantee), drawing)
            drawn = pool.drawn + (drawing.numbers if drawing else 0)
            left = self.most - self.spent
            if cost > left or pool.spent + cost > pool.most or not pool.covers(drawn):
                raise BudgetExceededError(
                    "the budget of this share is too small: the release costs "
                    f"{float(cost / self.most):.3g} of the share, but only "
                    f"{float(left / self.most):.3g} is left. The whole share pays for one Gaussian "
                    f"release with epsilon {self.epsilon:.4g} and delta {self.delta:.4g}, or for "
                    f"one release with epsilon {self.pure_epsilon:.4g} and delta 0"
                )
            pool.pay(release, pool.price())
            pool.drawn, pool.used = drawn, True
            self.spent, pool.spent = self.spent + cost, pool.spent + cost

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a share cannot be copied or pickled, because both copies would spend the same budget"
        )

    def __repr__(self) -> str:
        return f"Share({self.remaining:.4g} left, of {self.instead_of!r})"


def _mu_of(guarantee: Guarantee, drawing: Drawing | None, shift: int) -> float | None:
    """Returns mu, the sensitivity over the standard deviation of the noise, rounded up.

    For an epsilon-DP release, the result is the mu of Gaussian noise with the same cost. The result
    is None if the release has a delta and is not Gaussian.

    `shift` is 2 if the noise was calibrated under add-or-remove-one, but the ledger is under
    replace-one. Replacing a record then changes the value twice as much.
    """
    mechanism = drawing.mechanism if drawing else None
    if mechanism and getattr(mechanism, "noise", None) is GAUSSIAN and mechanism.norm == "l2":
        rho, missed = mechanism.zcdp
        known = missed == 0 and math.isfinite(rho)
        return shift * math.sqrt(2 * rho) * (1 + _MARGIN) if known else None
    if guarantee.delta > 0 or not math.isfinite(guarantee.epsilon):
        return None
    # An epsilon-DP release costs as much as Gaussian noise with Phi(mu / 2) = 1 / (1 + e^-epsilon).
    # The equivalent equation Phi(-mu / 2) = 1 / (1 + e^epsilon) is solved, because small
    # probabilities have small relative rounding errors.
    tail = -np.logaddexp(0.0, float(guarantee.epsilon))
    return -2 * float(scipy.special.ndtri_exp(tail)) * (1 + _MARGIN)


def _logit_of_half(mu: float) -> float:
    """Returns the epsilon at which an epsilon-DP release costs mu^2. It is rounded down."""
    upper, lower = scipy.special.log_ndtr([mu / 2, -mu / 2])
    return float(upper - lower) * (1 - 4 * _MARGIN)


def log_delta(epsilon: float, mu: float) -> float:
    """Returns the log of the delta at which Gaussian noise is (epsilon, delta)-DP.

    delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu).
    """
    first, second = scipy.special.log_ndtr([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
    # The difference is computed from logarithms, so it is accurate even if both terms are tiny.
    gap = min(epsilon + second - first, -1e-300)
    return float(first + math.log(-math.expm1(gap)))


def largest_mu(epsilon: float, delta: float) -> float:
    """Returns the largest mu for which Gaussian noise is (epsilon, delta)-DP, rounded down."""
    allowed = math.log(delta) - _MARGIN
    mu, _ = bisect(lambda mu: log_delta(epsilon, mu) <= allowed, 1e-40, 100.0, in_logarithms=True)
    return mu * (1 - _MARGIN)


def epsilon_of(mu: float, delta: float) -> float:
    """Returns the epsilon of Gaussian noise with this mu at the given delta, rounded down.

    So noise that is calibrated to the returned epsilon and this delta has at most the given mu.
    """
    # Below this epsilon, noise with this mu is not (epsilon, delta)-DP.
    epsilon, _ = bisect(lambda epsilon: log_delta(epsilon, mu) > math.log(delta), 0.0, 1000.0)
    return epsilon * (1 - _MARGIN)
