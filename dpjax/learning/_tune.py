"""`tune`: releases the best of a random number of private trainings, paid for in advance."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._open_ledgers import Account, Payment, relation_or_inherited, told
from dpjax._core._types import Key, PyTree
from dpjax._core._values import Guarantee, NeighboringRelation, Release
from dpjax._files._durable import Json
from dpjax.accounting._composition import compose, under
from dpjax.accounting._ledger import Ledger
from dpjax.accounting._repeat_and_select import OneRun, checked_repetitions, selected
from dpjax.learning._training_step import TrainingFile
from dpjax.learning._trainings import key_of_next_use
from dpjax.random._keys import check_key, is_seeded, secure_key
from dpjax.random._repetitions import Coins, Repetitions
from dpjax.release._transaction import paid_steps

C = TypeVar("C")
FitOne = Callable[[Key, C], Any]
Distribution = Literal["geometric", "logarithmic", "poisson"]
P = ParamSpec("P")
R = TypeVar("R")
# The arguments of `fit` that would reveal results of a run, or the number of runs.
_OF_ONE_TRAINING = ("ledger", "evaluate", "checkpoint", "progress")
_SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}


class Winner(NamedTuple):
    """The best run of a tuning.

    Attributes:
        value: the value that the run released, such as the parameters of a model.
        candidate: which of the candidates the run tried, from 0.
        score: the score of the run, as a float32.

    Formal guarantees:
        All three are covered by the guarantee of `tune`.
    """

    value: PyTree
    candidate: int
    score: float


def tune(
    key: Key,
    fit_one: FitOne[C],
    candidates: Sequence[C],
    *,
    runs: float,
    delta: float,
    public_score: Callable[[PyTree], float] | None = None,
    score_epsilon: float | None = None,
    distribution: Distribution | float = "geometric",
    relation: NeighboringRelation | None = None,
    ledger: Ledger | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Release:
    """The best of a random number of private trainings, each with a random candidate.

    `fit_one(key, candidate)` trains once by `learning.fit`, and returns its release. `tune` draws a
    secret number of runs, and a random candidate for each run. It shows only the run with the
    largest score. So ten or a hundred runs cost about two or three times as much as one run.

    The score must not leak the records either, so say where it comes from:

    - `public_score(value)` scores the result of a run on public data. It must not read private
      records.
    - With `score_epsilon`, `fit_one` returns two releases: the training, and the score as a number
      with Laplace noise, for the same privacy unit. Make the training first, and then the score.

    Args:
        key: a key from `dpjax.random.secure_key`, used for nothing else.
        fit_one: makes one run from a key and a candidate. It must not release or show anything
            else. Its noise, steps and batches must depend on the candidate alone.
        candidates: public settings, such as learning rates. Each run tries one of them, chosen
            uniformly at random.
        runs: the mean number of runs, above 1 and at most 10^4.
        delta: the delta of the guarantee, in [0, 1); 0 only if every run has delta 0.
        public_score: the score of a value, larger is better. NaN counts as the lowest score.
        score_epsilon: the epsilon of the score that `fit_one` releases.
        distribution: the distribution of the number of runs. Geometric and logarithmic numbers are
            at least 1; logarithmic ones cost less, and are more often small. A Poisson number may
            be 0. A number in (-1, 1] is the shape of a truncated negative binomial distribution.
        relation: which databases are neighbors; None for the relation of the ledger, else
            add-or-remove-one.
        ledger: pays for all runs before the first one. Do not open it by `with`.
        checkpoint: a file that stores how many runs are done, and the best one. After an
            interruption, the same call continues. The interrupted run is repeated with its key and
            candidate, so it counts as one run. The file contains keys and the number of runs: keep
            it secret, use it for one tuning, and never restore an old copy. Needs a `fit_one` that
            returns the release of `learning.fit`.

    Returns:
        A `Release` of a `Winner`, with the guarantee of the whole tuning.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if an argument, or what `fit_one` returns, has the wrong type.
        ValueError: if an argument is out of range; if both or none of public_score and
            score_epsilon are given; if a ledger is open; if the key was used before; if a run does
            not make the releases that were paid for; or if the checkpoint belongs to another run.
        BudgetExceededError: if the ledger has too little left.
        RuntimeError: if a Poisson number of runs is 0.

    Formal guarantees:
        The release has the guarantee of `accounting.dp_sgd_best_of_runs`, with the largest privacy
        loss of all candidates, or of `accounting.best_of_runs`, whichever is smaller. The price is
        determined before the first run: `fit_one` is called for each candidate, and stopped at its
        first payment, before anything is computed. A run that asks for more than its price is
        refused.

        The number of runs has exactly the stated distribution: it is computed from random bits by
        integers, and independently of the records. The guarantee is void if readers of the release
        can learn the number of runs, for example from a file, from a clock, or from a count of
        keys: the best of exactly k runs costs up to k times as much as one run.

    Source:
        Liu and Talwar, "Private selection from private candidates" (2019); Papernot and Steinke,
        "Hyperparameter tuning with Renyi differential privacy" (2022).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import dpjax
        >>> def loss(w, example):
        ...     return (jnp.dot(w, example["x"]) - example["y"]) ** 2
        >>> def fit_one(key, rate):
        ...     return dpjax.learning.fit(
        ...         key, loss, jnp.zeros(2),
        ...         database={"x": jnp.ones((500, 2)), "y": jnp.ones(500)},
        ...         optimizer=optax.sgd(rate), epochs=1, batch_size=50, clip_norm=1.0,
        ...         noise_multiplier=2.0, delta=1e-5,
        ...     )
        >>> def public_score(w):
        ...     return -abs(float(w.sum()) - 1)
        >>> release = dpjax.learning.tune(
        ...     dpjax.random.secure_key(), fit_one, [0.01, 0.1, 1.0],
        ...     runs=2, delta=1e-5, public_score=public_score,
        ... )
        >>> release.guarantee.epsilon < 2.2 * 0.8
        True
    """
    _checks.host_only("tune", key, "a loop on the host")
    check_key(key)
    _checks.function("fit_one", fit_one)
    candidates = tuple(candidates)
    if not candidates:
        raise ValueError("candidates must contain at least one candidate, got none")
    delta = _checks.fraction("delta", delta) if delta else 0.0
    _checks.exactly_one(public_score=public_score, score_epsilon=score_epsilon)
    if public_score is not None:
        _checks.function("public_score", public_score)
    epsilon = 0.0 if score_epsilon is None else _checks.positive("score_epsilon", score_epsilon)
    law = checked_repetitions(runs, _shape(distribution))
    relation = relation_or_inherited(relation, NeighboringRelation.ADD_OR_REMOVE_ONE, payer=ledger)
    if any(isinstance(one, Account) for one in told()):
        raise ValueError("a ledger is open: pass it to tune as ledger=, do not open it by `with`")
    prices = [_price(fit_one, candidate, relation, epsilon) for candidate in candidates]
    promised = _promised(prices, law, delta, key)
    state = like = _State(key, np.float32(-math.inf), np.int32(-1), None)
    if checkpoint is not None:
        like = like._replace(value=_zeros(prices))
    run: Json = {
        "runs": repr(law),
        "candidates": [repr(price.one) for price in prices],
        "delta": delta,
        "relation": str(relation),
        "ledger": None if ledger is None else str(ledger.path),
    }
    with TrainingFile(checkpoint, run) as file:
        found = file.read(like)
        if found is None:
            for one in told(ledger):
                one.record(Payment(key, promised, "tuning"))
            # Two tunings from one key would have equal numbers of runs, and so not be independent.
            # So later tunings get other keys.
            state = state._replace(key=key_of_next_use(key))
            file.write(0, like._replace(key=state.key))
        first, state = found or (0, state)
        of_count, of_choices, of_runs = jax.random.split(state.key, 3)
        for i in range(first, law.draw(Coins(of_count))):
            choice = Coins(jax.random.fold_in(of_choices, i)).below(len(candidates))
            account = RunAccount(relation, epsilon, prices[choice])
            # The score is computed under this account, too: if the code that computes it makes a
            # release, this release is counted.
            with account:
                made = fit_one(jax.random.fold_in(of_runs, i), candidates[choice])
                release, score = _result(made, account, public_score)
            if state.candidate < 0 or score > state.score:
                state = _State(state.key, score, np.int32(choice), release.value)
            if checkpoint is not None:
                _check_structure(release.value, like.value)
                file.write(i + 1, state)
        file.remove()
    if state.candidate < 0:
        raise RuntimeError(
            "the Poisson number of runs happened to be 0, independently of the records, and the "
            "ledger has paid: use a larger mean, or the geometric distribution"
        )
    winner = Winner(state.value, int(state.candidate), float(state.score))
    return Release(winner, promised)


# `tune` pays a price for each run. A run may make only the releases that this price covers.


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
    """Checks that the releases of one run cost no more than the price that `tune` has paid.

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
        found = _price_of(release, self._relation, self._score_epsilon)
        if self._price is None:
            raise Priced(found)
        paid = [self._price.one]
        if self._score_epsilon:
            unit = paid[0].guarantee.privacy_unit
            bound = Guarantee(self._score_epsilon, 0.0, relation=self._relation, privacy_unit=unit)
            paid.append(OneRun(bound))
        if self.payments == len(paid):
            raise ValueError(
                f"the number of releases of fit_one must be {len(paid)}, got one more, which the"
                f" price of a run does not include: {release.what} with {release.guarantee}"
            )
        _refuse_dearer(found.one, paid[self.payments], release.what)
        self.payments += 1


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
            f"fit_one must make the releases that tune has paid for in advance, got {what} with"
            f" {now} instead of {before}. Let noise, steps and batches depend on the candidate"
            " alone. Release a score with epsilon = score_epsilon, such as by dpjax.laplace, and"
            " for the same privacy unit"
        )


def inside_a_run(fit: Callable[P, R]) -> Callable[P, R]:
    """Inside a run of `tune`, lets the run's account pay for the training.

    Raises an error for arguments that would show a run to others, such as `checkpoint`. `tune`
    shows only the best run.
    """

    @functools.wraps(fit)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        accounts = [one for one in told() if isinstance(one, RunAccount)]
        if not accounts:
            return fit(*args, **kwargs)
        if shown := [name for name in _OF_ONE_TRAINING if kwargs.get(name)]:
            raise ValueError(
                f"{shown[0]} must not be given to a training inside of learning.tune, because tune"
                " shows only the best run: give ledger and checkpoint to tune"
            )
        with paid_steps():
            return fit(*args, **{**kwargs, "ledger": accounts[0]})

    return call


class _State(NamedTuple):
    """What a checkpoint stores: the key, and the best run so far."""

    key: Key
    score: np.float32
    candidate: np.int32
    value: PyTree


def _shape(distribution: Distribution | float) -> float:
    if isinstance(distribution, str):
        _checks.choice("distribution", distribution, tuple(_SHAPES))
        return _SHAPES[distribution]
    shape = _checks.finite("distribution", distribution)
    if not -1 < shape <= 1:
        raise ValueError(
            "distribution must be above -1 and at most 1 if it is a number (a shape parameter), got"
            f" {shape}"
        )
    return shape


def _price(
    fit_one: FitOne[C], candidate: C, relation: NeighboringRelation, score_epsilon: float
) -> Price:
    """Calls `fit_one`, ends the call at its first payment, and returns the price of the run."""
    account = RunAccount(relation, score_epsilon)
    try:
        with account:
            # No noise is drawn from this key.
            fit_one(secure_key(), candidate)
    except Priced as priced:
        return priced.price
    raise ValueError(
        "fit_one must release its result by learning.fit or a mechanism, got no release"
    )


def _promised(prices: list[Price], law: Repetitions, delta: float, key: Key) -> Guarantee:
    ones = [price.one for price in prices]
    units = {one.guarantee.privacy_unit for one in ones}
    if len(units) > 1:
        raise ValueError(f"candidates must be for one privacy unit, got {sorted(units)}")
    promised = selected(ones, law, delta)
    notes = tuple(note for note in promised.notes if note != "seeded key")
    seeded = ("seeded key",) if is_seeded(key) else ()
    return dataclasses.replace(promised, notes=(*notes, *seeded))


def _result(
    made: Any, account: RunAccount, public_score: Callable[[PyTree], float] | None
) -> tuple[Release, np.float32]:
    """Returns the release and the score of a run.

    It raises errors only about the structure of the result, which is public.
    """
    expected = "a Release" if public_score else "two Releases, of the training and of the score"
    releases: list[Any] = [made] if public_score else [*made] if isinstance(made, tuple) else []
    kinds = [type(one) for one in releases]
    if kinds != [Release] * (1 if public_score else 2):
        raise TypeError(f"fit_one must return {expected}, got {_checks.described(made)}")
    if account.payments != len(releases):
        raise ValueError(
            "fit_one must itself make every release that it returns, got "
            f"{len(releases)} releases but {account.payments} payments"
        )
    score = public_score(releases[0].value) if public_score else releases[1].value
    if np.ndim(score):
        raise TypeError(f"the score must be one number, got shape {np.shape(score)}")
    score = np.float32(score)
    return releases[0], np.float32(-math.inf) if np.isnan(score) else score


def _zeros(prices: list[Price]) -> PyTree:
    """Returns arrays of zeros in the structure of every run's result, for a checkpoint."""
    shapes = [price.parameters for price in prices]
    if any(shape is None for shape in shapes):
        raise ValueError(
            "checkpoint needs a fit_one that trains by learning.fit: for any other fit_one, leave"
            " out checkpoint"
        )
    for shape in shapes[1:]:
        _check_structure(shape, shapes[0])
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[0])


def _check_structure(value: PyTree, like: PyTree) -> None:
    if _checks.described(value) != _checks.described(like):
        raise TypeError(
            "fit_one must return parameters of the same structure every time if there is a"
            f" checkpoint, got {_checks.described(value)} and {_checks.described(like)}"
        )
