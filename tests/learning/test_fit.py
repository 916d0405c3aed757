"""Private training in one call: made of the parts, interrupted and continued, paid for before."""

import contextlib
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import binom

import dpjax
from dpjax import learning
from dpjax._files._chunk_files import read_chunks
from dpjax.learning import _fit
from dpjax.learning._fit import scores
from dpjax.learning._training_step import fixed_update
from dpjax.targets._optax_training import optax_promotion

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE

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


def promised(n=N, **settings):
    sampling = learning.poisson_sampling(n, batch_size=32, capacity=n)
    given = {"noise_multiplier": 4.0, "steps": 6, "delta": DELTA, "dims": N}
    return dpjax.accounting.dp_sgd(sampling, **{**given, **settings})


def test_a_training_goes_on_after_an_interruption_as_if_there_was_none(keys, tmp_path):
    """The same parameters and guarantee, paid for once; nobody sees an epoch that is not on disk.

    Steps after the file are taken again, with the keys in it. If somebody had seen their results,
    and the records were others by then, the difference of the two would have no noise.
    """
    whole = fit(keys(1))
    assert 1 <= float(whole.guarantee.epsilon / promised(n=N).epsilon) < 1 + 1e-3
    assert whole.guarantee.notes == ("in 64 public slots", "seeded key")
    path, seen = tmp_path / "training", []

    def evaluate(epoch, parameters):
        (file,) = read_chunks(tmp_path, "training", "training")
        assert file.header["epoch"] == epoch.number
        np.testing.assert_array_equal(file.arrays[0], parameters)
        assert path.stat().st_mode & 0o077 == 0
        if not seen:
            with pytest.raises(ValueError, match="is used by another training"):
                fit(keys(1), checkpoint=path)
        seen.append(epoch.number)
        if len(seen) == 2:
            raise KeyboardInterrupt

    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=10, delta="1e-4", relation=ADD)
    kept = {"evaluate": evaluate, "checkpoint": path, "ledger": ledger}
    with pytest.raises(KeyboardInterrupt):
        fit(keys(1), **kept)
    spent = ledger.spent
    assert float(spent.epsilon) >= float(whole.guarantee.epsilon)
    with pytest.raises(ValueError, match="to another run, with a different noise_multiplier"):
        fit(keys(1), **kept, noise_multiplier=5.0)
    with pytest.raises(ValueError, match="to another run, with a different ledger"):
        fit(keys(1), **{**kept, "ledger": None})
    with pytest.raises(ValueError, match=r"to another run, with a different sampling, batch_size"):
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
    with pytest.raises(TypeError, match="inside of jit or vmap"):
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
    nothing = dpjax.Guarantee(1.0, relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for name in ("guarantee", "dp_sgd"):  # So little noise is refused.
        monkeypatch.setattr(_fit, name, lambda *_, **__: nothing)
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
        ({"database": jnp.ones((N, 3))}, ValueError, "loss must be .* dot_general requires"),
        ({"checkpoint": tmp_path}, ValueError, "must be a file"),
        ({"noise_multiplier": 1e-3}, ValueError, "use more noise or a larger delta"),
        ({"noise_multiplier": None, "epsilon": 200.0}, ValueError, "use a smaller epsilon or"),
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


def test_what_an_empty_slot_holds_changes_nothing(keys):
    """Rate, steps, shapes and the guarantee are those of all slots, however many are taken.

    What else reaches it: databases of nobody, and NaN in a slot that is empty.
    """
    present = jnp.arange(N) < N - 20
    noisy = jnp.where(present[:, None], DATABASE, jnp.nan)

    def of(records, present):
        return fit(keys(7), database=dpjax.queries.PaddedRecords(records, present))

    one, other, full = of(DATABASE, present), of(noisy, present), fit(keys(7))
    np.testing.assert_array_equal(one.value, other.value)
    assert not np.array_equal(one.value, full.value)
    assert repr(one.guarantee) == repr(full.guarantee)
    assert one.guarantee.notes == ("in 64 public slots", "seeded key")
    nobody, no_record = (of(x, jnp.zeros(N, bool)) for x in (DATABASE, noisy))
    np.testing.assert_array_equal(nobody.value, no_record.value)


@pytest.mark.parametrize("asked", [1.0, 18.0, 30.0])
def test_any_epsilon_is_met_by_the_least_noise(asked, key, monkeypatch):
    """The slots of a batch follow from epsilon, delta and steps; they cost less than 1% of noise.

    With a chance of 1e-15 for each batch, no epsilon above 20 was within reach, and from 16 on the
    noise was 14% more than needed. What else reaches it: `noise_multiplier`, whose epsilon follows.
    """
    everyone = learning.poisson_sampling(N, batch_size=16, capacity=N)
    few = _fit.least_capacity(N, everyone.rate, _fit.rare_enough(asked, DELTA, 4))
    assert 4 * (1 + math.exp(asked)) * binom.sf(few, N, everyone.rate) < DELTA / 999
    for name in ("dp_sgd", "dp_sgd_noise_multiplier", "guarantee"):  # "pld" takes a minute.
        faster = functools.partial(getattr(_fit, name), method="renyi")
        monkeypatch.setattr(_fit, name, faster)
    settings = {"batch_size": 16, "epochs": 1}
    release = fit(key, noise_multiplier=None, epsilon=asked, **settings)
    assert 0.99 * asked < float(release.guarantee.epsilon) <= asked
    found = release.training.noise_multiplier
    less = {"noise_multiplier": 0.99 * found, "steps": 4, "delta": DELTA, "dims": N}
    assert float(_fit.dp_sgd(everyone, **less).epsilon) > asked
    again = fit(key, noise_multiplier=found, **settings).guarantee
    assert float(again.epsilon) == pytest.approx(float(release.guarantee.epsilon), rel=1e-3)


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
        with pytest.raises(ValueError, match="to another run, with a different loss"):
            go_on(other)
    go_on(weighted(1.0))  # A function with the same program is the same loss.
    assert not path.exists()


# Of every argument of `fit`: others that change the training, and one that does not.
OTHERS = {
    "key": ([], dpjax.random.seeded_key(3)),
    "loss": ([lambda w, x: 2 * jnp.dot(w, x)],),
    "parameters": ([jnp.ones(N), jnp.zeros(N).at[3].set(1e-6)],),
    "database": ([jnp.eye(N)[:-1], dpjax.queries.padded_records(DATABASE, capacity=N)],),
    "optimizer": (
        [optax.sgd(0.2, momentum=0.9), optax.sgd(0.1, momentum=0.8), optax.adam(0.1)],
        optax.sgd(0.1, momentum=0.9),
    ),
    "epochs": ([2, 4],),
    "batch_size": ([16, 32.0000001], 32.0),
    "clip_norm": ([1.5],),
    "delta": ([2e-5],),
    "epsilon": ([1.0],),
    "noise_multiplier": ([5.0],),
    "relation": ([dpjax.NeighboringRelation.REPLACE_ONE],),
    "microbatch_size": ([16], 256),
    "evaluate": ([], lambda epoch, parameters: None),
    "ledger": (["a ledger"],),
    "checkpoint": ([],),
    "progress": ([], True),
    # A strategy has tests of its own.
    "sampling": ([],),
    "simulated": ([],),
    "strategy": ([learning.toeplitz_strategy([1.0], steps=6)],),
    # So has a table of people.
    "person": ([],),
    "rows": ([],),
    "most_people": ([],),
}


def test_a_training_does_not_go_on_with_another_argument(tmp_path):
    """Of every argument, by the signature. The optimizer and microbatch_size were missing.

    What else reaches it: where to start from, the structure of a database, epochs and batch sizes
    that give as many steps at the same rate. Values of private records are not compared.
    """
    assert set(OTHERS) == set(inspect.signature(learning.fit).parameters)
    path = tmp_path / "training"
    first = {"key": dpjax.random.seeded_key(0), "loss": loss, "parameters": jnp.zeros(N)}

    def called(**changed):
        given = {**first, **SETTINGS, "checkpoint": path, **changed}
        if "epsilon" in changed:
            del given["noise_multiplier"]
        return learning.fit(**given)

    def stop(epoch, parameters):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called(evaluate=stop)
    before = path.read_bytes()
    for name, (refused, *_) in OTHERS.items():
        for other in refused:
            if name == "ledger":
                other = dpjax.Ledger(tmp_path / other, epsilon=10, delta="1e-4")
            with pytest.raises(ValueError, match="belongs to another run, with a different"):
                called(**{name: other})
    assert path.read_bytes() == before
    called(**{name: free[0] for name, (_, *free) in OTHERS.items() if free})
    assert not path.exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: optax.chain(optax.clip(1.0), optax.sgd(x, nesterov=True, momentum=0.9)),
        lambda x: optax.inject_hyperparams(optax.adam)(x),
        lambda x: optax.adam(optax.cosine_decay_schedule(x, 6)),
        lambda x: optax.masked(optax.sgd(x), True),
        lambda x: optax.multi_transform({"a": optax.sgd(x), "b": optax.sgd(1.0)}, "a"),
        lambda x: optax.add_decayed_weights(x),
        lambda x: optax.ema(x),
        lambda x: optax.add_noise(x, 0.5, 0),
        lambda x: optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * x, updates)),
        lambda x: optax.stateless(lambda updates, _: updates * (x * jnp.ones(N))),
    ],
)
def test_a_number_anywhere_in_an_optimizer_makes_it_another(make):
    """In a chain, a state, a schedule, behind a mask or a label, closed over; made anew it is one.

    What else reaches it: optimizers of the caller's own, with numbers and arrays in closures.
    """
    parameters = jnp.zeros(N)

    def of(rate):
        optimizer = make(rate)
        with optax_promotion():
            first = optimizer.init(parameters)
            state = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), first)
        return _fit._of_optimizer(*fixed_update(optimizer, state, parameters), state)

    assert of(0.1) == of(0.1) != of(0.1 * (1 + 1e-6))


def test_the_bar_shows_the_scores_of_an_epoch(keys, monkeypatch):
    """Nothing that `evaluate` returns ends a training that is paid, but True."""
    shown = []

    @contextlib.contextmanager
    def counting(*_, **__):
        yield lambda more, found="": shown.append(found) if not more else None

    monkeypatch.setattr(_fit, "counting", counting)
    odd = [{"loss": jnp.float32(0.25), "right": 1 / 3}, keys(7), "a text"]
    fit(keys(5), evaluate=lambda epoch, parameters: odd[epoch.number - 1])
    assert shown == ["loss=0.25, right=0.3333", "", "a text"]
    others = [scores(x) for x in (None, False, 2, np.float64(0.5), np.zeros(3), 1j, object)]
    assert others == ["", "", "2", "0.5", "", "", ""]


def test_an_epoch_tells_how_far_the_training_is_and_nothing_of_the_records(keys, tmp_path):
    """The same for another database, and for a training that goes on after an interruption."""
    path = tmp_path / "training"

    def stop(epoch, parameters):
        if epoch.number == 2:
            raise KeyboardInterrupt

    def told(**settings):
        seen = []
        release = fit(keys(5), evaluate=lambda epoch, _: seen.append(epoch), **settings)
        assert repr(seen[-1].guarantee) == repr(release.guarantee)
        return seen

    first, *_, last = whole = told()
    assert repr(first) == "Epoch(number=1, epochs=3, step=2, steps=6)"
    assert (last.number, last.step) == (last.epochs, last.steps)
    for epoch in whole:
        expected = promised(steps=epoch.step).epsilon
        assert 1 <= float(epoch.guarantee.epsilon / expected) < 1 + 1e-3
    assert told(database=jnp.zeros((N, N))) == whole
    with pytest.raises(KeyboardInterrupt):
        fit(keys(5), evaluate=stop, checkpoint=path)
    assert told(checkpoint=path) == whole[1:]


def test_a_stop_keeps_the_parameters_of_its_epoch_and_the_guarantee_of_all(keys, tmp_path):
    """The results decide when to stop. So a guarantee of fewer steps would be wrong."""
    seen, path = [], tmp_path / "training"

    def evaluate(epoch, parameters):
        seen.append(np.asarray(parameters))
        return epoch.number == 2

    whole = fit(keys(5), evaluate=lambda epoch, parameters: seen.append(parameters))
    every, seen = seen, []
    found = fit(keys(5), evaluate=evaluate, checkpoint=path)
    assert len(every) == 3
    assert len(seen) == 2
    np.testing.assert_array_equal(found.value, every[1])
    assert repr(found.guarantee) == repr(whole.guarantee)
    assert found.training.steps == 6
    assert not path.exists()
