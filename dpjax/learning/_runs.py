"""One run of `tune`: makes only the releases that its price covers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from dpjax._core._open_ledgers import Account, Payment, Request, told
from dpjax._core._values import Guarantee, NeighboringRelation, Release
from dpjax.accounting._composition import compose, under
from dpjax.accounting._repeat_and_select import OneRun
from dpjax.release._transaction import paid_steps

P = ParamSpec("P")
R = TypeVar("R")

# The arguments of `fit` that would reveal results of a run, or the number of runs.
_OF_ONE_TRAINING = ("ledger", "evaluate", "checkpoint", "progress")


class Price(NamedTuple):
    """The privacy cost of one run, and the shapes of its result if the run is a training.

    Attributes:
        one: the privacy cost of the run, including its score.
        parameters: the shapes of the trained parameters; None if the run is not a training.
    """

    one: OneRun
    parameters: Any


class Priced(BaseException):
    """Raised to end a call of `fit_one` at its first payment, before anything is computed.

    This is not a subclass of `Exception`, so that `except Exception` does not catch it.
    """

    def __init__(self, price: Price) -> None:
        self.price = price


class RunAccount(Account):
    """Pays for the releases of one run from a price that `tune` has already paid.

    If no price is given, the account raises `Priced` at the first payment of the run, with the
    price of this payment.
    """

    def __init__(
        self, relation: NeighboringRelation, score_epsilon: float, price: Price | None = None
    ) -> None:
        self._relation, self._score_epsilon, self._price = relation, score_epsilon, price
        self.payments = 0

    @property
    def relation(self) -> NeighboringRelation:
        """Returns the neighboring relation of the tuning."""
        return self._relation

    def record(self, release: Payment) -> None:
        """Counts a payment, or refuses one that the price does not cover."""
        found = _price_of(release, self._relation, self._score_epsilon)
        if self._price is None:
            raise Priced(found)
        if self.payments == 0:
            _refuse_dearer(found.one, self._price.one, release.what)
        elif self.payments == 1 and self._score_epsilon:
            unit = self._price.one.guarantee.privacy_unit
            _refuse_dearer_score(found.one.guarantee, self._score_epsilon, unit, release.what)
        else:
            most = "two releases" if self._score_epsilon else "one release"
            raise ValueError(
                f"fit_one must make only {most}, because the price of a run was computed for this"
                f" number, got one more: {release.what} with {release.guarantee}"
            )
        self.payments += 1

    def released(self, request: Request) -> Release | None:
        """Returns None, because every run is new."""
        del request
        return None

    def keep(self, request: Request, release: Release) -> Release:
        """Returns the release itself, because a run is not stored."""
        del request
        return release


def _price_of(release: Payment, relation: NeighboringRelation, score_epsilon: float) -> Price:
    promised = under(compose(release.guarantee), relation)
    if promised.gamma or promised.confidence != 1 or promised.group_size != 1:
        raise ValueError(
            "fit_one must make releases with gamma=0, confidence=1 and group_size=1, got"
            f" {release.what} with {release.guarantee}"
        )
    if (training := release.training) is None:
        return Price(OneRun(promised, None, score_epsilon), None)
    # Under replace-one, a record may change a training more than under add-or-remove-one.
    made = training.run._replace(relation=relation), training.noise_multiplier
    return Price(OneRun(promised, made, score_epsilon), training.parameters)


def _refuse_dearer(found: OneRun, paid: OneRun, what: str) -> None:
    now, before = found.guarantee, paid.guarantee
    covered = now.epsilon <= before.epsilon and now.delta <= before.delta
    covered &= now.privacy_unit == before.privacy_unit
    if not covered or found.training != paid.training:
        raise ValueError(
            f"fit_one must make the same release for a candidate each time, got {what} with "
            f"{now} now and {before} before: let noise, steps and batches depend on the "
            "candidate alone"
        )


def _refuse_dearer_score(promised: Guarantee, epsilon: float, unit: str, what: str) -> None:
    if promised.delta or promised.epsilon > epsilon:
        raise ValueError(
            f"the score must be released with an epsilon of at most score_epsilon={epsilon:g} and"
            f" delta 0, such as by dpjax.laplace, got {what} with {promised}"
        )
    if promised.privacy_unit != unit:
        raise ValueError(
            f"the score must be released with privacy_unit={unit!r}, like the first release, got "
            f"{what} with {promised}: the price of a run is for one privacy unit"
        )


def run_account() -> RunAccount | None:
    """Returns the account of the run of `tune` that executes this code; None outside of a run."""
    return next((one for one in told() if isinstance(one, RunAccount)), None)


def inside_a_run(fit: Callable[P, R]) -> Callable[P, R]:
    """Inside a run of `tune`, lets the run's account pay for the training.

    Refuses arguments that would reveal the run.
    """

    @functools.wraps(fit)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        account = run_account()
        if account is None:
            return fit(*args, **kwargs)
        if shown := [name for name in _OF_ONE_TRAINING if kwargs.get(name)]:
            raise ValueError(
                f"{shown[0]} must be left out of a training inside of learning.tune, which shows"
                " only the best run: give ledger and checkpoint to tune"
            )
        with paid_steps():
            return fit(*args, **{**kwargs, "ledger": account})

    return call
