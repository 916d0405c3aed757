"""Training with optax: the steps of a loop, sampled and released as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import targets

START = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def loss(parameters, records):
    margins = records["y"] * (records["x"] @ parameters["w"] + parameters["b"])
    penalty = 0.05 * jnp.sum(jnp.square(parameters["w"]))
    return jnp.mean(jax.nn.softplus(-margins)) + penalty


def people(key, n):
    key_x, key_noise = jax.random.split(key)
    x = jax.random.normal(key_x, (n, 3))
    noise = jax.random.normal(key_noise, (n,))
    return {"x": x, "y": jnp.where(x[:, 0] - x[:, 1] + 0.3 * noise > 0, 1.0, -1.0)}


def loop(optimizer, steps, records, average_last=1):
    """The parameters after a Python loop of optax updates, on average over the last ones."""

    @jax.jit
    def advance(parameters, state):
        gradient = jax.grad(loss)(parameters, records)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters, state = START, optimizer.init(START)
    path = []
    for _ in range(steps):
        # Strict promotion is not for optax.
        with jax.numpy_dtype_promotion("standard"):
            parameters, state = advance(parameters, state)
        path.append(parameters)
    return jax.tree.map(lambda *points: np.mean(points, axis=0), *path[-average_last:])


def assert_same(got, expected, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), got, expected)


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.5), optax.adam(0.1), optax.sgd(optax.linear_schedule(1.0, 0.0, 20), momentum=0.9)],
    ids=["sgd", "adam", "schedule"],
)
def test_steps_are_those_of_a_loop(optimizer, key):
    records = people(key, 50)
    fit = targets.optax_training(loss, START, optimizer, steps=20)
    expected = loop(optimizer, 20, records)
    assert_same(jax.jit(fit)(records), expected)
    assert np.linalg.norm(expected["w"]) > 0.5


def in_a_ball(radius):
    """Brings the parameters into a ball after every step."""

    def step(updates, parameters):
        new = optax.projections.projection_l2_ball(optax.apply_updates(parameters, updates), radius)
        return jax.tree.map(jnp.subtract, new, parameters)

    return optax.stateless(step)


def test_decay_schedules_balls_and_averages_are_those_of_a_loop(key):
    records = people(key, 50)
    schedule = optax.cosine_decay_schedule(1.0, 20)
    optimizer = optax.chain(
        optax.add_decayed_weights(0.1), optax.sgd(schedule, momentum=0.5), in_a_ball(0.7)
    )
    fit = targets.optax_training(loss, START, optimizer, steps=20, average_last=19)
    found = jax.jit(fit)(records)
    assert_same(found, loop(optimizer, 20, records, average_last=19))
    # The ball is reached, and the average is of points before it too.
    last = loop(optimizer, 20, records)
    assert abs(float(optax.tree.norm(last)) - 0.7) < 1e-5
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, found, last))) > 1e-3


WIDTH = 5000


def average_square(w, x):
    return jnp.mean(jnp.square(x @ w))


@pytest.mark.parametrize(("optimizer", "kept"), [(optax.sgd(0.1), 1), (optax.adam(0.1), 3)])
def test_a_run_takes_the_memory_of_parameters_and_optimizer(optimizer, kept):
    """Of a thousand at once, beside records and results: as XLA plans it."""
    fit = targets.optax_training(average_square, jnp.ones(WIDTH), optimizer, steps=5)
    databases = jax.ShapeDtypeStruct((1000, 4, WIDTH), jnp.float32)
    memory = jax.jit(jax.vmap(fit)).lower(databases).compile().memory_analysis()
    assert kept - 0.1 < memory.temp_size_in_bytes / (1000 * 4 * WIDTH) < kept + 0.1
    assert memory.output_size_in_bytes < 1.01 * 1000 * 4 * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "kept"), [(optax.sgd(0.1), 1), (optax.adam(0.1), 3)])
def test_the_sampler_adds_two_copies_of_the_parameters(optimizer, kept):
    def far(w, x):
        return jnp.mean(jnp.square(x - jnp.sum(w)))

    def sample(key):
        options = {"n": 4, "norm": "l2", "m": 500, "chunk_size": 500}
        return dpjax.sample_distances(
            key, fit, lambda key, n: jax.random.normal(key, (n,)), **options
        )

    fit = targets.optax_training(far, jnp.ones(WIDTH), optimizer, steps=5)
    memory = jax.jit(sample).lower(jax.random.key(0)).compile().memory_analysis()
    assert kept + 0.9 < memory.temp_size_in_bytes / (1000 * 4 * WIDTH) < kept + 2.1


@pytest.mark.slow
def test_line_searches_find_the_minimum(key):
    records = people(key, 50)
    fit = targets.optax_training(loss, START, optax.lbfgs(), steps=20)
    gradient = jax.grad(loss)(jax.jit(fit)(records), records)
    assert_same(gradient, START, atol=1e-4)


@pytest.mark.slow
def test_databases_are_trained_on_at_once(keys):
    databases = [people(keys(i), 20) for i in range(3)]
    fit = targets.optax_training(loss, START, optax.adam(0.1), steps=10)
    together = jax.jit(jax.vmap(fit))(jax.tree.map(lambda *x: jnp.stack(x), *databases))
    one_by_one = [jax.jit(fit)(database) for database in databases]
    assert_same(together, jax.tree.map(lambda *x: jnp.stack(x), *one_by_one))


def test_a_learner_is_sampled_and_released(key):
    fit = targets.optax_training(loss, START, optax.sgd(0.5), steps=20)
    sensitivity = dpjax.sample_sensitivity(key, fit, people, n=50, norm="l2", m=200)
    # One record of 50, at a rate of 0.5 for 20 steps and a gradient of at most its length.
    assert 0.01 < sensitivity.value < 20 * 0.5 * 2 * 4 / 50
    private = dpjax.privatize(fit, dpjax.gaussian(sensitivity, 1.0, 1e-5))
    records = jax.tree.map(np.array, people(key, 50))
    value = private(key, records).value
    assert {name: leaf.shape for name, leaf in value.items()} == {"w": (3,), "b": ()}
    records["x"][0] = np.nan
    assert all(np.all(np.isfinite(leaf)) for leaf in private(key, records).value.values())


def test_nan_is_left_to_the_mechanism(key):
    records = people(key, 20)
    fit = targets.optax_training(loss, START, optax.sgd(0.5), steps=2)
    trained = fit({"x": records["x"].at[0].set(jnp.nan), "y": records["y"]})
    assert np.all(np.isnan(trained["w"]))


def test_float64_is_kept(x64):
    start = np.zeros(2)
    fit = targets.optax_training(
        lambda w, x: jnp.mean(jnp.square(x - w[None])), start, optax.adam(0.1), steps=3
    )
    assert fit(jnp.ones((4, 2))).dtype == "float64"


# Minibatches.


def minibatch(key, **settings):
    settings = {"optimizer": optax.sgd(0.5), "steps": 10, "batch_size": 4, **settings}
    return targets.optax_minibatch_training(key, loss, START, **settings)


def test_a_minibatch_of_all_records_is_the_full_gradient(key):
    records = people(key, 20)
    full = targets.optax_training(loss, START, optax.sgd(0.5), steps=10)
    assert_same(jax.jit(minibatch(key, batch_size=20))(records), jax.jit(full)(records))


def test_minibatches_hold_distinct_records_and_change(key):
    seen = []

    def record_batch(parameters, batch):
        jax.debug.callback(lambda x: seen.append(np.array(x)), batch)
        return jnp.sum(parameters)

    fit = targets.optax_minibatch_training(
        key, record_batch, jnp.zeros(1), optimizer=optax.sgd(0.1), steps=30, batch_size=4
    )
    jax.block_until_ready(fit(jnp.arange(8)))
    jax.effects_barrier()
    assert len(seen) == 30
    assert all(len(set(batch)) == 4 for batch in seen)
    assert len({tuple(sorted(batch)) for batch in seen}) > 15
    assert set(np.concatenate(seen)) == set(range(8))


def test_the_key_fixes_the_minibatches(keys):
    records = people(keys(0), 20)
    first, again, other = (jax.jit(minibatch(keys(i)))(records) for i in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["w"], other["w"])


@pytest.mark.slow
def test_minibatches_depend_on_the_order_and_say_so(key):
    settings = {"n": 20, "norm": "l2", "m": 100}
    with pytest.raises(ValueError, match="order of the records"):
        dpjax.sample_sensitivity(key, minibatch(key), people, **settings)
    sensitivity = dpjax.sample_sensitivity(
        key, minibatch(key), people, positions="average", **settings
    )
    assert sensitivity.value > 0
    private = dpjax.privatize(minibatch(key), dpjax.gaussian(sensitivity, 1.0, 1e-5))
    assert private(key, people(key, 20)).value["w"].shape == (3,)


# Refusals.


def test_bad_arguments_are_refused(key):
    good = optax.sgd(0.1)
    with pytest.raises(TypeError, match="loss must be a function"):
        targets.optax_training("loss", START, good, steps=1)
    with pytest.raises(TypeError, match=r"parameters must be floats, got dtypes \['int32'\]"):
        targets.optax_training(loss, jnp.zeros(3, int), good, steps=1)
    with pytest.raises(ValueError, match="parameters must contain at least one array"):
        targets.optax_training(loss, {}, good, steps=1)
    with pytest.raises(TypeError, match="optimizer must be from optax"):
        targets.optax_training(loss, START, "sgd", steps=1)
    with pytest.raises(ValueError, match="steps must be"):
        targets.optax_training(loss, START, good, steps=0)
    with pytest.raises(ValueError, match="average_last must be"):
        targets.optax_training(loss, START, good, steps=3, average_last=4)
    with pytest.raises(TypeError, match="steps must be"):
        targets.optax_training(loss, START, good, steps=2.5)
    with pytest.raises(TypeError, match="key"):
        minibatch(0)
    with pytest.raises(ValueError, match="batch_size must be"):
        minibatch(key, batch_size=0)
    with pytest.raises(ValueError, match="batch_size must be at most n=3, got 4"):
        minibatch(key)(people(key, 3))
