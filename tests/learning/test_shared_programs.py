"""Equal trainings share a compiled program; a loss that changed, also where it hides, does not."""

import dataclasses

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import Guarantee, NeighboringRelation, learning
from dpjax.learning import _fit, _training_step
from dpjax.learning._per_example import fixed_loss
from dpjax.random import seeded_key
from dpjax.targets._optax_training import optax_promotion

N, DIMS = 40, 3
RECORDS = np.linspace(0.1, 1.0, N * DIMS, dtype="float32").reshape(N, DIMS)
SETTINGS = {
    "database": RECORDS,
    "epochs": 1,
    "batch_size": N,
    "clip_norm": 100.0,
    "noise_multiplier": 1e-3,
    "delta": 1e-5,
}


def dot(w, x):
    return jnp.dot(w, x)


@pytest.fixture(autouse=True)
def cheap_accounts(monkeypatch):
    """So little noise is refused, and accounts are not what is tested."""
    nothing = Guarantee(1.0, relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    for name in ("guarantee", "dp_sgd"):
        monkeypatch.setattr(_fit, name, lambda *_, **__: nothing)
    monkeypatch.setattr(_fit, "dp_sgd_noise_multiplier", lambda *_, epsilon, **__: 1 / epsilon)
    _training_step.step._compiled.cache_clear()


def fit(loss=dot, key=0, rate=0.1, optimizer=optax.sgd, **settings):
    given = {**SETTINGS, **settings}
    if "epsilon" in settings:
        del given["noise_multiplier"]
    key = seeded_key(key)
    found = learning.fit(key, loss, jnp.zeros(DIMS), optimizer=optimizer(rate), **given)
    return np.asarray(found.value)


@pytest.fixture
def no_noise(monkeypatch):
    """Averages without noise, which compile quickly and show what was computed."""

    def average(total, state, multiplier, least, size):
        del multiplier, least
        state = dataclasses.replace(state, step=state.step + 1)
        return jax.tree.map(lambda x: x / size, total.value), state

    monkeypatch.setattr(_training_step, "noisy_average", average)


@pytest.fixture
def compiled():
    """The programs that were compiled."""
    found = []

    def heard(event, duration_secs, **more):
        if event.endswith("backend_compile_duration"):
            found.append(more)

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


def test_a_second_training_compiles_nothing(compiled):
    """Nor does another key, epsilon, clip norm, learning rate, or a function with the same code."""
    changes = (
        {},
        {"key": 1},
        {"clip_norm": 0.5},
        {"rate": 0.2},
        {"epsilon": 0.5},
        {"epsilon": 3.0},
        {"epochs": 2},
        {"loss": lambda w, x: jnp.dot(w, x)},
    )
    fit(optimizer=optax.adam)
    assert compiled
    found = [fit(optimizer=optax.adam, **changed) for changed in changes[1:]]
    compiled.clear()
    again = [fit(optimizer=optax.adam, **changed) for changed in changes[1:]]
    assert not compiled
    np.testing.assert_array_equal(found, again)
    info = _training_step.step._compiled.cache_info()
    assert info.misses == 1
    assert info.maxsize == 8


def test_a_shared_program_does_not_train_under_an_open_ledger(tmp_path):
    """The refusal is a part of tracing, and nothing is traced again where no ledger is open."""
    fit()
    ledger = dpjax.Ledger(tmp_path / "ledger", epsilon=10, delta="1e-4")
    with ledger, pytest.raises(ValueError, match="pays for all of its steps at once"):
        fit()
    assert ledger.spent.epsilon == 0
    fit()


def test_similar_epsilons_have_batches_of_one_size():
    """The probability that a batch exceeds its slots is at most the one that epsilon allows."""
    allowed = [_fit.rare_enough(epsilon, 1e-5, 180) for epsilon in (0.1, 1.0, 8.0, 12.0, 30.0)]
    rounded = [_fit._rounded(rare) for rare in allowed]
    assert all(less <= rare for less, rare in zip(rounded, allowed, strict=True))
    np.testing.assert_allclose(rounded, [1e-15, 1e-15, 1e-15, 1e-20, 1e-25])
    assert _fit._rounded(0.0) == 0


def test_a_number_of_an_earlier_training_is_not_used_again(no_noise):
    """Every record joins the batch, and no gradient is clipped at the norm 100."""
    mean = RECORDS.mean(axis=0)
    np.testing.assert_allclose(fit(), -0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(fit(rate=0.2), -0.2 * mean, rtol=1e-5)
    lengths = np.linalg.norm(RECORDS, axis=1, keepdims=True)
    clipped = (RECORDS * np.minimum(1, 0.5 / lengths)).mean(axis=0)
    np.testing.assert_allclose(fit(clip_norm=0.5), -0.1 * clipped, rtol=1e-5)
    np.testing.assert_allclose(fit(epochs=2), -0.2 * mean, rtol=1e-5)
    np.testing.assert_allclose(fit(), -0.1 * mean, rtol=1e-5)
    assert _training_step.step._compiled.cache_info().misses == 1


def test_a_loss_that_changed_does_not_train_by_its_old_program(no_noise):
    """By an array written in place, or a number in a list."""
    weights, scale = np.ones(DIMS, "float32"), [1.0]

    def loss(w, x):
        return scale[0] * jnp.dot(w * weights, x)

    first = fit(loss)
    weights[:] = 2.0
    np.testing.assert_allclose(fit(loss), 2 * first, rtol=1e-5)
    scale[0] = 3.0
    np.testing.assert_allclose(fit(loss), 6 * first, rtol=1e-5)
    weights[:], scale[0] = 1.0, 1.0
    np.testing.assert_array_equal(fit(loss), first)


def test_a_kept_loss_does_not_keep_the_numbers_of_an_array():
    """JAX converts an array of 64 bits once, while anything keeps the result."""
    weights, one = np.ones(DIMS), jax.ShapeDtypeStruct((DIMS,), jnp.float32)

    def loss(w, x):
        return jnp.dot(w * weights, x)

    kept = fixed_loss(loss, jnp.ones(DIMS), one)
    weights[:] = 2
    changed = fixed_loss(loss, jnp.ones(DIMS), one)
    assert changed != kept
    found = [float(x(jnp.ones(DIMS), jnp.ones(DIMS))) for x in (kept, changed)]
    assert found == [DIMS, 2 * DIMS]


def test_a_derivative_that_changed_is_another_loss(no_noise):
    """Its value is the same; the rule shows in the gradients alone, and so do its arrays."""

    def ruled(factor):
        @jax.custom_vjp
        def product(w, x):
            return jnp.dot(w, x)

        def backward(x, g):
            return g * factor * x, jnp.zeros_like(x)

        product.defvjp(lambda w, x: (jnp.dot(w, x), x), backward)
        return product

    array = jnp.full(DIMS, 2.0)
    first, doubled, by_array = fit(ruled(1.0)), fit(ruled(2.0)), fit(ruled(array))
    np.testing.assert_allclose(doubled, 2 * first, rtol=1e-5)
    np.testing.assert_allclose(by_array, 2 * first, rtol=1e-5)
    np.testing.assert_allclose(fit(ruled(3 * array)), 6 * first, rtol=1e-5)


def in_a_loop(product):
    """The function inside a scan."""
    return lambda w, x: jax.lax.scan(lambda _, row: (None, product(*row)), None, (w, x))[1].sum()


@pytest.mark.parametrize("place", [lambda product: product, in_a_loop], ids=["alone", "loop"])
@pytest.mark.parametrize("wraps", [jax.custom_vjp, jax.custom_jvp])
def test_a_rule_whose_array_changed_does_not_train_by_its_old_program(wraps, place, no_noise):
    """JAX would keep the numbers of an array of 64 bits that a rule of the old program used."""
    array = np.full((), 2.0)

    @wraps
    def product(w, x):
        return jnp.sum(w * x)

    if wraps is jax.custom_vjp:

        def backward(x, g):
            return g * array * x, jnp.zeros_like(x)

        product.defvjp(lambda w, x: (jnp.sum(w * x), x), backward)
    else:
        product.defjvp(lambda at, by: (jnp.sum(at[0] * at[1]), jnp.sum(by[0] * array * at[1])))
    first = fit(place(product))
    array[...] = 6.0
    np.testing.assert_allclose(fit(place(product)), 3 * first, rtol=1e-5)
    array[...] = 2.0
    np.testing.assert_array_equal(fit(place(product)), first)
    assert _training_step.step._compiled.cache_info().misses == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda x: optax.chain(optax.clip(1.0), optax.sgd(x, nesterov=True, momentum=0.9)),
        optax.adam,
        optax.adamw,
        lambda x: optax.adam(optax.cosine_decay_schedule(x, 6)),
        lambda x: optax.inject_hyperparams(optax.adam)(x),
        lambda x: optax.masked(optax.sgd(x), {"a": True, "b": False}),
        lambda x: optax.chain(optax.add_noise(x, 0.5, 0), optax.sgd(x)),
        lambda x: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(x)),
        lambda x: optax.chain(optax.ema(0.5), optax.adafactor(x)),
    ],
)
def test_an_update_with_its_numbers_is_that_of_the_optimizer(make):
    """Three steps, in float32 and bfloat16; another rate compiles nothing, if code holds it."""
    parameters = {"a": jnp.linspace(0.1, 1, 4), "b": jnp.full((2, 3), 0.5, jnp.bfloat16)}
    gradient = jax.tree.map(lambda x: x / 3, parameters)
    updates = []
    for rate in (0.1, 0.3):
        optimizer = make(rate)
        with optax_promotion():
            state = optimizer.init(parameters)
        update, numbers = _training_step.fixed_update(optimizer, state, parameters)
        updates.append(update)
        ours, after = parameters, state
        theirs, known = parameters, state
        for _ in range(3):
            ours, after = update(numbers, gradient, after, ours)
            with optax_promotion():
                moves, known = optimizer.update(gradient, known, theirs)
                theirs = optax.apply_updates(theirs, moves)
        assert jax.tree.structure(after) == jax.tree.structure(known)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert x.dtype == y.dtype
            tolerance = 2e-2 if x.dtype == jnp.bfloat16 else 1e-5
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=tolerance)
    assert updates[0] == updates[1] or make not in (optax.adam, optax.adamw)
