"""Tuning: one price for a secret number of runs, paid before, and only the winner is shown."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import learning
from dpjax.learning import _tune
from dpjax.random._repetitions import Coins, repetitions

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
N, DELTA, SEED = 64, 1e-5, 2  # A key with three runs of about four.
SETTINGS = {
    "database": jnp.eye(N)[:, :4],
    "epochs": 1,
    "batch_size": 32,
    "clip_norm": 1.0,
    "noise_multiplier": 4.0,
    "delta": DELTA,
}


def loss(w, x):
    return jnp.dot(w, x)


def trained(key, rate, **settings):
    given = {**SETTINGS, "optimizer": optax.sgd(rate), **settings}
    return learning.fit(key, loss, jnp.zeros(4), **given)


def public_score(w):
    return -float(jnp.abs(w).sum())


def tuned(key, fit_one=trained, candidates=(0.1, 1.0), **settings):
    given = {"runs": 4, "delta": DELTA, "public_score": public_score, **settings}
    return learning.tune(key, fit_one, candidates, **given)


def ledger_at(path, epsilon=10.0):
    return dpjax.Ledger(path / "ledger", epsilon=epsilon, delta="1e-3", relation=ADD)


def test_only_the_best_run_is_shown_and_all_are_paid_once_before_the_first(keys, tmp_path):
    """The ledger has one entry, which says nothing about the number of runs."""
    ledger, seen = ledger_at(tmp_path), []

    def fit_one(key, rate):
        release = trained(key, rate)
        seen.append((len(ledger.history()), rate, public_score(release.value)))
        return release

    release = tuned(keys(1), fit_one, ledger=ledger)
    assert len(seen) > 1
    assert {paid for paid, _, _ in seen} == {1}
    assert len(ledger.history()) == 1
    assert ledger.history()[0]["what"] == "tuning"
    assert release.value.score == np.float32(max(score for _, _, score in seen))
    best = max(seen, key=lambda run: run[2])
    assert (0.1, 1.0)[release.value.candidate] == best[1]
    assert public_score(release.value.value) == pytest.approx(release.value.score)
    sampling = learning.poisson_sampling(N, batch_size=32, capacity=N)
    price = functools.partial(
        dpjax.accounting.dp_sgd_best_of_runs, sampling, noise_multiplier=4.0, delta=DELTA, dims=4
    )
    expected = price(steps=2, runs=4)
    assert 1 <= float(release.guarantee.epsilon / expected.epsilon) < 1 + 1e-3
    assert release.guarantee.notes[-2:] == (*expected.notes[-1:], "seeded key")
    assert float(ledger.spent.epsilon) == pytest.approx(float(release.guarantee.epsilon), rel=1e-9)


@pytest.mark.parametrize("secret", [True, False])
def test_tunings_of_one_secret_key_share_no_number_of_runs(secret, keys, monkeypatch, tmp_path):
    """Equal numbers of runs would make two winners tell more than their prices together.

    A tuning under a seeded key can be repeated. A ledger refuses a key that it knows.
    """
    used = []

    def coins(key):
        used.append(jax.random.key_data(key).tolist())
        return Coins(key)

    monkeypatch.setattr(_tune, "Coins", coins)
    key = dpjax.random.secure_key() if secret else keys(SEED)
    first, second = tuned(key), tuned(key)
    equal = used[: len(used) // 2] == used[len(used) // 2 :]
    assert equal == (not secret) == (repr(first.value) == repr(second.value))
    assert not secret or len({str(one) for one in used}) == len(used)
    ledger = ledger_at(tmp_path)
    tuned(key, ledger=ledger)
    with pytest.raises(ValueError, match="key"):
        tuned(key, ledger=ledger)


def test_an_interrupted_run_counts_once_and_the_number_of_runs_stays(keys, tmp_path):
    """Under a seeded key, a repeated run draws the same candidate and the same noise."""
    runs, path, ledger = [], tmp_path / "tuning", ledger_at(tmp_path)

    def fit_one(key, rate):
        release = trained(key, rate)
        runs.append((rate, release.value.tolist()))
        return release

    whole = tuned(keys(SEED), fit_one)
    uninterrupted = runs[:]
    runs.clear()
    assert len(uninterrupted) > 2

    def stops(key, rate):
        release = fit_one(key, rate)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return release

    with pytest.raises(KeyboardInterrupt):
        tuned(keys(SEED), stops, checkpoint=path, ledger=ledger)
    assert path.stat().st_mode & 0o077 == 0
    spent = ledger.spent
    with pytest.raises(ValueError, match="to another run, with a different runs"):
        tuned(keys(SEED), fit_one, checkpoint=path, ledger=ledger, runs=5)
    # Another key: the first call's key counts.
    found = tuned(keys(4), fit_one, checkpoint=path, ledger=ledger)
    assert runs == [*uninterrupted[:2], *uninterrupted[1:]]
    np.testing.assert_array_equal(found.value.value, whole.value.value)
    assert found.value[1:] == whole.value[1:]
    assert repr(ledger.spent) == repr(spent)
    assert not path.exists()


def test_a_run_that_is_not_what_was_paid_for_is_refused(keys, tmp_path):
    calls = []

    def louder(key, rate):
        calls.append(rate)
        return trained(key, rate, noise_multiplier=4.0 if len(calls) == 1 else 2.0)

    def twice(key, rate):
        trained(jax.random.fold_in(key, 1), rate)
        return trained(key, rate)

    def leaks(key, rate):
        return dpjax.Release(jnp.zeros(4), dpjax.Guarantee(0.0))

    def looks(key, rate):
        return trained(key, rate, evaluate=lambda epoch, w: None)

    def own_ledger(key, rate):
        return trained(key, rate, ledger=ledger_at(tmp_path))

    def own_steps(key, rate):
        release = trained(key, rate)
        learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=1).init(jnp.zeros(4))
        return release

    def looser(key, rate):
        laplace = dpjax.laplace(1.0, 0.1)
        return trained(key, rate), laplace(key, 1.0), laplace(key, 2.0)

    def releases(w):
        return dpjax.laplace(1.0, 0.1)(keys(9), 1.0).value

    def pair(key, rate):
        return trained(key, rate), dpjax.laplace(1.0, 0.3)(key, 1.0)

    def per_person(key, rate):
        one = dpjax.assume_sensitivity(1.0, norm="l1")
        person = dataclasses.replace(one, privacy_unit="person")
        return trained(key, rate), dpjax.laplace(person, 0.1)(key, 1.0)

    released = {"public_score": None, "score_epsilon": 0.2}
    for fit_one, settings, error, message in (
        (louder, {}, ValueError, "releases that tune has paid for"),
        (twice, {}, ValueError, "releases of fit_one must be 1, got"),
        (leaks, {}, ValueError, "got no release"),
        (looks, {}, ValueError, "evaluate must not be given to a training"),
        (own_ledger, {}, ValueError, "ledger must not be given to a training"),
        (own_steps, {}, ValueError, "a run pays for all of its steps"),
        (looser, released, ValueError, "releases of fit_one must be 2, got"),
        (pair, released, ValueError, r"instead of \(epsilon=0.2"),
        (per_person, released, ValueError, r"per person.* instead of \(epsilon=0.2"),
        (trained, released, TypeError, "must return two Releases"),
        (trained, {"public_score": releases}, ValueError, "releases of fit_one must be 1"),
        (trained, {"score_epsilon": 0.1}, ValueError, "one of public_score and score_epsilon"),
        (trained, {"public_score": None}, ValueError, "one of public_score and score_epsilon"),
        (trained, {"runs": 1}, ValueError, "runs must be above 1"),
        (trained, {"distribution": 2.0}, ValueError, "distribution must be above -1"),
        (trained, {"distribution": -0.99, "runs": 100}, ValueError, "has a long tail"),
        (trained, {"delta": 0}, ValueError, "too small for the best of"),
        (trained, {"candidates": ()}, ValueError, "at least one"),
    ):
        with pytest.raises(error, match=message):
            tuned(keys(1), fit_one, **{"candidates": (0.1,), **settings})
    with (
        ledger_at(tmp_path),
        pytest.raises(ValueError, match="pass it to tune as ledger="),
    ):
        tuned(keys(1))
    with pytest.raises(dpjax.BudgetExceededError):
        tuned(keys(1), ledger=dpjax.Ledger(tmp_path / "small", epsilon=0.01, delta="1e-3"))


def test_a_run_without_a_price_of_its_own_is_refused(keys):
    """The price of the best run is for gamma 0, one privacy unit, and releases that were paid."""
    known = dpjax.assume_sensitivity(1.0, norm="l1")
    sampled = dpjax.Sensitivity(1.0, 0.05, 0.99, "l1", None, m=90, k=90, identity="sampled")

    def released(key, sensitivity):
        return dpjax.laplace(sensitivity, 0.1)(key, 1.0)

    def forged(key, sensitivity):
        return released(key, sensitivity), dpjax.Release(1.0, dpjax.Guarantee(0.1))

    for candidates, fit_one, settings, error, message in (
        ([sampled], released, {}, ValueError, "with gamma=0, confidence=1"),
        ([known, dataclasses.replace(known, privacy_unit="person")], released, {}, ValueError,
         "for one privacy unit"),
        ([known], forged, {"public_score": None, "score_epsilon": 0.1}, ValueError,
         "2 releases but 1 payments"),
        ([known], released, {"public_score": lambda x: jnp.zeros(2)}, TypeError, "one number"),
    ):  # fmt: skip
        given = {"relation": dpjax.NeighboringRelation.REPLACE_ONE, "public_score": float}
        with pytest.raises(error, match=message):
            tuned(keys(1), fit_one, candidates, **{**given, **settings})


def test_a_training_costs_what_it_costs_under_the_relation_of_the_tuning(keys):
    """A replaced record is two that are added or removed, also in steps of DP-SGD."""
    replace = {"relation": dpjax.NeighboringRelation.REPLACE_ONE, "runs": 1.1}
    own = tuned(keys(1), **replace).guarantee
    other = tuned(keys(1), functools.partial(trained, relation=ADD), **replace).guarantee
    assert other.relation is replace["relation"]
    assert other.epsilon == own.epsilon
    assert float(own.epsilon) > 1.5 * float(tuned(keys(1), runs=1.1).guarantee.epsilon)


def test_a_released_score_is_a_part_of_the_price(keys):
    """Pure candidates: a geometric number of runs costs three times the epsilon of one run."""
    data = jnp.arange(8.0)

    def fit_one(key, scale):
        first, second = jax.random.split(key)
        noisy = dpjax.laplace(1.0, 0.5)(first, scale * data.mean())
        return noisy, dpjax.laplace(1.0, 0.25)(second, data.max())

    replace = {"relation": dpjax.NeighboringRelation.REPLACE_ONE, "score_epsilon": 0.25}
    release = tuned(keys(2), fit_one, delta=0, public_score=None, **replace)
    assert float(release.guarantee.epsilon) == 3 * 0.75
    assert float(release.guarantee.delta) == 0
    with pytest.raises(ValueError, match="checkpoint needs a fit_one that trains"):
        tuned(keys(2), fit_one, public_score=None, checkpoint="x", **replace)


def test_a_poisson_number_of_runs_may_be_zero(keys):
    """A key has no run with probability .36, which nothing about the records changes."""
    fit_one = lambda key, c: dpjax.laplace(1.0, 0.5)(key, 1.0)  # noqa: E731
    given = {"runs": 1.01, "distribution": "poisson", "public_score": float, "delta": 0}
    given["relation"] = dpjax.NeighboringRelation.REPLACE_ONE
    shown = []
    for i in range(40):
        try:
            shown.append(tuned(keys(i), fit_one, **given).value.score)
        except RuntimeError:
            continue
    assert 5 < len(shown) < 39
    law = repetitions(1.01, math.inf)
    assert len(shown) == sum(
        law.draw(Coins(jax.random.split(keys(i), 3)[0])) > 0 for i in range(40)
    )
    one = dpjax.laplace(1.0, 0.5).guarantee
    promised = dpjax.accounting.best_of_runs(one, runs=1.01, shape=math.inf)
    assert float(promised.epsilon) == pytest.approx(0.5 + 1.01 * math.tanh(0.25), rel=1e-4)
