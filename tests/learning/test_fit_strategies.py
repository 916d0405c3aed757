"""`fit` with correlated noise: made of the parts, interrupted and continued, paid for before."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import Guarantee, NeighboringRelation, learning
from dpjax.learning import _buffers, _fit, _training_step

N, DELTA = 60, 1e-5
STRATEGY = learning.toeplitz_strategy([1.0, 0.5, 0.25], steps=12)
SETTINGS = {
    "database": jnp.eye(N),
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "epochs": 2,
    "batch_size": 10,
    "strategy": STRATEGY,
    "clip_norm": 1.0,
    "noise_multiplier": 4.0,
    "delta": DELTA,
}


def fit(key, **settings):
    given = {**SETTINGS, **settings}
    return learning.fit(key, lambda w, x: jnp.dot(w, x), jnp.zeros(N), **given)


def promised(sampling, **settings):
    given = {"noise_multiplier": 4.0, "steps": 12, "delta": DELTA, "dims": N}
    return float(dpjax.accounting.dp_sgd(sampling, **{**given, **settings}).epsilon)


def test_the_guarantee_is_that_of_the_groups(keys):
    """Three bands make three groups, and a record joins at most 4 of 12 batches."""
    found = fit(keys(1)).guarantee
    cyclic = learning.cyclic_sampling(N, groups=3, batch_size=10, capacity=20)
    assert 1 <= float(found.epsilon) / promised(cyclic) < 1 + 1e-3
    plain = learning.poisson_sampling(N, batch_size=10, capacity=N)
    assert promised(plain) != pytest.approx(promised(cyclic), rel=1e-2)
    epochs = learning.cyclic_sampling(N, groups=6, batch_size=10)
    found = fit(keys(1), sampling=epochs, batch_size=None).guarantee
    assert float(found.epsilon) == pytest.approx(promised(epochs), rel=1e-4)


def test_epsilon_is_kept(keys):
    """By whole groups, whose noise is found quickly."""
    epochs = learning.cyclic_sampling(N, groups=6, batch_size=10)
    given = {"sampling": epochs, "batch_size": None, "noise_multiplier": None, "epsilon": 1.5}
    assert 1.49 < float(fit(keys(1), **given).guarantee.epsilon) <= 1.5


def test_a_training_goes_on_after_an_interruption_as_if_there_was_none(keys, tmp_path):
    whole, path, seen = fit(keys(1)), tmp_path / "training", []

    def evaluate(epoch, parameters):
        del parameters
        seen.append(epoch.number)
        if len(seen) == 1:
            raise KeyboardInterrupt

    added = NeighboringRelation.ADD_OR_REMOVE_ONE
    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=10, delta="1e-4", relation=added)
    kept = {"evaluate": evaluate, "checkpoint": path, "ledger": ledger}
    with pytest.raises(KeyboardInterrupt):
        fit(keys(1), **kept)
    with pytest.raises(ValueError, match="to another run, with a different strategy"):
        fit(keys(1), **kept, strategy=learning.toeplitz_strategy([1.0, 0.5, 0.2], steps=12))
    spent = ledger.spent
    found = fit(keys(2), **kept)
    np.testing.assert_array_equal(found.value, whole.value)
    assert repr(found.guarantee) == repr(whole.guarantee)
    assert seen == [1, 1, 2]
    assert repr(ledger.spent) == repr(spent)
    assert float(spent.epsilon) >= float(found.guarantee.epsilon)


def test_buffers_go_on_after_an_interruption_as_if_there_was_none(keys, tmp_path):
    whole_groups = learning.cyclic_sampling(N, groups=6, batch_size=10)
    given = {
        "strategy": _buffers.rounded([0.9, 0.4], [0.3, 0.2], steps=12),
        "sampling": whole_groups, "batch_size": None,
    }  # fmt: skip
    whole, path, seen = fit(keys(1), **given), tmp_path / "training", []

    def evaluate(epoch, parameters):
        del epoch, parameters
        seen.append(1)
        if len(seen) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(keys(1), **given, evaluate=evaluate, checkpoint=path)
    others = [([0.9, 0.5], [0.3, 0.2]), ([0.9, 0.4], [0.3, 0.3])]
    for decays, scales in others:
        other = _buffers.rounded(decays, scales, steps=12)
        with pytest.raises(ValueError, match="to another run, with a different strategy"):
            fit(keys(1), **{**given, "strategy": other}, evaluate=evaluate, checkpoint=path)
    found = fit(keys(2), **given, evaluate=evaluate, checkpoint=path)
    np.testing.assert_array_equal(found.value, whole.value)
    promised_for = promised(whole_groups, strategy=given["strategy"])
    assert float(found.guarantee.epsilon) == pytest.approx(promised_for, rel=1e-4)


@pytest.fixture
def cheap(monkeypatch):
    """So little noise is refused, and accounts are not what is tested."""
    nothing = Guarantee(1.0, relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    for name in ("guarantee", "dp_sgd"):
        monkeypatch.setattr(_fit, name, lambda *_, **__: nothing)


def test_batches_are_those_of_the_groups_in_turn(keys, cheap):
    """In an epoch of whole groups, each record moves its own parameter once, in its step."""
    del cheap
    epochs = learning.cyclic_sampling(N, groups=6, batch_size=10)
    halving = optax.sgd(lambda step: 10 * 0.5**step)
    found = fit(
        keys(1), sampling=epochs, batch_size=None, epochs=1, noise_multiplier=1e-4,
        optimizer=halving,
    )  # fmt: skip
    np.testing.assert_allclose(found.value, -(0.5 ** (np.arange(N) % 6)), atol=0.02)


def test_the_noise_of_a_sum_is_that_of_the_strategy(keys, cheap):
    """Of 20,000 numbers, the standard deviation is within 1.5% with probability .997."""
    del cheap
    size, weak = 20_000, learning.banded_strategy(np.full((12, 1), 1.0))
    for strategy in (learning.toeplitz_strategy([1.0, 0.5, 0.375], steps=12), weak):
        found = learning.fit(
            keys(1), lambda w, x: 0 * x[0] * w[0], jnp.zeros(size),
            **{**SETTINGS, "strategy": strategy, "optimizer": optax.sgd(1.0)},
        )  # fmt: skip
        last = np.linalg.solve(strategy.matrix.T, np.ones(12))
        exact = 4 * strategy.column_norm * np.linalg.norm(last) / 10
        assert np.std(found.value) == pytest.approx(exact, rel=0.015)
    assert np.std(found.value) == pytest.approx(0.4 * np.sqrt(12), rel=0.015)


def test_a_second_training_shares_the_program(keys, cheap, monkeypatch):
    """Also with an equal strategy, another key, another multiplier or rate."""
    del cheap
    made, kept = [], _training_step.step._compiled
    kept.cache_clear()
    monkeypatch.setattr(
        _training_step.step, "_compiled", lambda x: made.append(kept(x)) or made[-1]
    )
    fit(keys(1))
    fit(keys(2), noise_multiplier=3.0, optimizer=optax.sgd(0.2, momentum=0.9))
    fit(keys(1), strategy=learning.toeplitz_strategy([1.0, 0.5, 0.25], steps=12))
    assert kept.cache_info().misses == 1
    assert made[0]._cache_size() == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"epochs": 3}, "at least the 18 steps of the training, got 12"),
        ({"batch_size": None}, "one of batch_size and sampling must be given"),
        ({"sampling": learning.poisson_sampling(N, batch_size=10)}, "one of batch_size and"),
        (
            {"sampling": learning.poisson_sampling(N, batch_size=10), "batch_size": None},
            "at least 3 groups, one for each band",
        ),
        (
            {
                "sampling": learning.cyclic_sampling(61, groups=3, batch_size=10),
                "batch_size": None,
            },
            "from the 60 slots of the database",
        ),
        ({"batch_size": 30}, "batch_size must be at most n / groups = 20"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_paid(changed, words, keys, tmp_path):
    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=10, delta="1e-4")
    with pytest.raises(ValueError, match=words):
        fit(keys(1), ledger=ledger, **changed)
    assert ledger.spent.epsilon == 0


@pytest.mark.parametrize("name", ["strategy", "sampling"])
def test_other_objects_are_refused(name, keys):
    with pytest.raises(TypeError, match=f"{name} must be made by"):
        fit(keys(1), **{name: "balls"})
