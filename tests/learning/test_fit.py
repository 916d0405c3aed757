"""Private training in one call: made of the parts, interrupted and continued, paid for before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import learning
from dpjax._files._chunk_files import read_chunks
from dpjax.learning import _fit

N, DELTA = 64, 1e-5
DATABASE = jnp.eye(N)
SETTINGS = {
    "database": DATABASE,
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "epochs": 3,
    "batch_size": 32,
    "clip_norm": 1.0,
    "noise_multiplier": 4.0,
    "delta": DELTA,
}


def loss(w, x):
    return jnp.dot(w, x)


def fit(key, **settings):
    return learning.fit(key, loss, jnp.zeros(N), **{**SETTINGS, **settings})


def promised(**settings):
    sampling = learning.poisson_sampling(N, batch_size=32)
    given = {"noise_multiplier": 4.0, "steps": 6, "delta": DELTA, "dims": N}
    return dpjax.accounting.dp_sgd(sampling, **{**given, **settings})


def test_a_training_goes_on_after_an_interruption_as_if_there_was_none(keys, tmp_path):
    """The same parameters and guarantee, paid for once; nobody sees an epoch that is not on disk.

    Steps after the file are taken again, with the keys in it. If somebody had seen their results,
    and the records were others by then, the difference of the two would have no noise.
    """
    whole = fit(keys(1))
    assert float(whole.guarantee.epsilon) == float(promised().epsilon)
    assert whole.guarantee.notes == ("seeded key",)
    path, seen = tmp_path / "training", []

    def evaluate(epoch, parameters):
        (file,) = read_chunks(tmp_path, "training", "training")
        assert file.header["epoch"] == epoch
        np.testing.assert_array_equal(file.arrays[0], parameters)
        assert path.stat().st_mode & 0o077 == 0
        if not seen:
            with pytest.raises(ValueError, match="is used by another training"):
                fit(keys(1), checkpoint=path)
        seen.append(epoch)
        if len(seen) == 2:
            raise KeyboardInterrupt

    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=10, delta="1e-4")
    kept = {"evaluate": evaluate, "checkpoint": path, "ledger": ledger}
    with pytest.raises(KeyboardInterrupt):
        fit(keys(1), **kept)
    spent = ledger.spent
    assert float(spent.epsilon) >= float(whole.guarantee.epsilon)
    with pytest.raises(ValueError, match="of another run, with another noise_multiplier"):
        fit(keys(1), **kept, noise_multiplier=5.0)
    with pytest.raises(ValueError, match="of another run, with another ledger"):
        fit(keys(1), **{**kept, "ledger": None})
    with pytest.raises(ValueError, match="of another run, with another sampling, steps"):
        fit(keys(1), **kept, batch_size=16)
    found = fit(keys(2), **kept)
    np.testing.assert_array_equal(found.value, whole.value)
    assert float(found.guarantee.epsilon) == float(whole.guarantee.epsilon)
    assert repr(found.guarantee) == repr(whole.guarantee)
    assert seen == [1, 2, 2, 3]
    assert repr(ledger.spent) == repr(spent)
    assert not path.exists()


@pytest.mark.parametrize("bad", [{"evaluate": "x"}, {"delta": 2.0}], ids=str)
def test_what_is_wrong_is_refused_before_it_is_paid(bad, keys, tmp_path):
    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=10, delta="1e-4")
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        fit(keys(1), ledger=ledger, **bad)
    with pytest.raises(TypeError, match="not inside jit or vmap"):
        jax.vmap(lambda records: fit(keys(1), ledger=ledger, database=records).value)(
            jnp.stack([DATABASE, DATABASE])
        )
    assert ledger.spent.epsilon == 0


def test_steps_and_trainings_have_batches_of_their_own(keys, monkeypatch):
    """With little noise, an epoch shows in how many of its two batches a record was.

    That is one batch for half of the records, and never one if both batches are the same. Two
    trainings of one secret key have the same count for 3/8 of the records, for all of them if
    batches are the same, and for .65 with probability 1e-5.
    """
    monkeypatch.setattr(_fit, "guarantee", lambda *_, **__: None)  # Of so little noise, it is slow.
    settings = {"optimizer": optax.sgd(32.0), "epochs": 1, "noise_multiplier": 0.1}

    def counts(key):
        return np.round(-np.asarray(fit(key, **settings).value))

    assert np.mean(counts(keys(3)) == 1) > 0.25
    key = dpjax.random.secure_key()
    assert np.mean(counts(key) == counts(key)) < 0.65


def test_epsilon_is_kept(key):
    """By a whole batch, whose noise is found quickly."""
    epsilon = fit(key, batch_size=N, epochs=1, noise_multiplier=None, epsilon=1.5).guarantee.epsilon
    assert 1.49 < float(epsilon) <= 1.5


def test_what_is_wrong_is_refused_before_it_costs(key, tmp_path):
    seen, path = [], tmp_path / "training"
    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=0.1, delta="1e-4")
    watched = {"evaluate": lambda *x: seen.append(x), "ledger": ledger, "checkpoint": path}
    for settings, error, message in (
        ({}, dpjax.BudgetExceededError, "budget"),
        ({"epsilon": 1.0}, ValueError, "one of epsilon and noise_multiplier"),
        ({"noise_multiplier": None}, ValueError, "one of epsilon and noise_multiplier"),
        ({"epochs": 0}, ValueError, "epochs must be"),
        ({"batch_size": N + 1}, ValueError, "batch_size must be at most n=64"),
        ({"delta": 0.0}, ValueError, "delta must be"),
        ({"database": jnp.ones((N, 3))}, TypeError, "dot_general requires contracting dimensions"),
        ({"checkpoint": tmp_path}, ValueError, "must be a file"),
        (
            {"database": dpjax.queries.padded_records(DATABASE, capacity=N)},
            TypeError,
            "got PaddedRecords",
        ),
    ):
        with pytest.raises(error, match=message):
            fit(key, **{**watched, **settings})
        assert ledger.spent.epsilon == 0
    with pytest.raises(TypeError, match=r"equinox\.partition"):
        learning.fit(key, loss, {"activation": jax.nn.relu}, **SETTINGS)
    with ledger, pytest.raises(ValueError, match="pays for all of its steps at once"):
        fit(key)
    with pytest.raises(TypeError, match="fit runs on the host"):
        jax.jit(fit)(key)
    assert not seen
    assert not path.exists()


def test_a_training_does_not_go_on_with_another_loss(key, tmp_path):
    """Its file keeps the fingerprint: of operations, and of constants that the loss closes over."""
    path, weights = tmp_path / "training", jnp.ones(N)

    def stop(epoch, parameters):
        raise KeyboardInterrupt

    def weighted(scale):
        return lambda w, x: jnp.dot(w * (scale * weights), x)

    def go_on(loss, evaluate=None):
        kept = {"checkpoint": path, "evaluate": evaluate, **SETTINGS}
        return learning.fit(key, loss, jnp.zeros(N), **kept)

    with pytest.raises(KeyboardInterrupt):
        go_on(weighted(1.0), stop)
    for other in (weighted(2.0), lambda w, x: jnp.sum(w * x)):
        with pytest.raises(ValueError, match="of another run, with another loss"):
            go_on(other)
    go_on(weighted(1.0))  # A function with the same program is the same loss.
    assert not path.exists()
