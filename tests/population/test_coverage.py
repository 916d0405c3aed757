"""Coverage of confidence sets over 3,000 runs, and calibration of posteriors, for many pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries
from dpjax._exact._numerics import clopper_pearson_upper
from dpjax.auditing import calibration

RUNS, SEEDS = 3000, 39
# A set with coverage .95 is refuted here once in a million times.
ERROR = 1e-6


def normal(key, theta, n):
    return theta["mean"] + theta["sd"] * jax.random.normal(key, (n,))


def clamped_moments(x):
    """The example of Awan and Wang: values clamped to [0, 3], where the mean is 1."""
    x = jnp.clip(x, 0, 3)
    return jnp.stack([jnp.mean(x), jnp.var(x)])


GRID = tuple(range(0, 41))


def median(numbers):
    """Scores of a median on a grid: minus the distance of ranks from the middle, in integers."""
    below = jnp.sum(numbers[:, None] < jnp.asarray(GRID, numbers.dtype)[None], axis=0)
    return -jnp.abs(2 * below - len(numbers))


COVERED = {
    "mean and variance": (
        lambda: dpjax.privatize(clamped_moments, dpjax.laplace((3 + 9) / 100, epsilon=1.0)),
        normal,
        100,
        {"mean": 1.0, "sd": 1.0},
        {"mean": 2.5, "sd": 1.0},
    ),
    "a proportion": (
        lambda: dpjax.privatize(
            lambda x: jnp.sum(x, dtype=jnp.int32), dpjax.laplace(1.0, epsilon=1.0)
        ),
        lambda key, share, n: (jax.random.uniform(key, (n,)) < share).astype(jnp.int32),
        50,
        0.3,
        0.7,
    ),
    "a median": (
        lambda: dpjax.privatize(median, dpjax.exponential(2.0, epsilon=1.0)),
        lambda key, middle, n: middle + 8 * jax.random.normal(key, (n,)),
        100,
        20.0,
        30.0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERED)
def test_sets_cover_the_truth(name, keys):
    make, model, n, truth, other = COVERED[name]
    private = make()
    like = jax.tree.map(jnp.float32, truth)
    bounds = tuple(
        jax.tree.map(lambda x, move=move: np.float64(x + move), truth) for move in (-9, 9)
    )
    released = private(keys(0), model(jax.random.key(0), like, n))
    simulation = dpjax.confidence_set(
        keys(1), released, private, model=model, n=n, bounds=bounds, seeds=SEEDS
    )._simulation

    def p_values(key):
        of_set, of_data, of_noise = jax.random.split(key, 3)
        database = model(dpjax.random._keys.sampling_key(of_data), like, n)
        observed = simulation.numbers([simulation.draws[0](of_noise, database)])
        far = jax.tree.map(jnp.float32, other)
        return [simulation.p_value(of_set, x, observed)[0] for x in (like, far)]

    true, wrong = jax.jit(lambda keys: jax.lax.map(p_values, keys, batch_size=20))(
        jax.random.split(keys(2), RUNS)
    )
    covered = int(np.sum(np.asarray(true) > 0.05))
    assert clopper_pearson_upper(covered, RUNS, ERROR) >= 0.95
    assert np.mean(np.asarray(wrong) > 0.05) < 0.6  # Power.


def uniform_ones(key, share, n):
    return jax.random.bernoulli(key, share, (n,)).astype(jnp.int32)


def ones(x):
    return jnp.sum(x, dtype=jnp.int32)


PAIRS = {
    "Laplace mean": lambda n: (lambda x: jnp.mean(x.astype(float)), dpjax.laplace(1 / n, 1.0)),
    "Gaussian histogram": lambda n: (
        queries.histogram_query(2),
        dpjax.gaussian(queries.histogram_query(2).sensitivity("l2"), 1.0, 1e-5),
    ),
    "exponential mode": lambda n: (
        lambda x: jnp.stack([ones(x), n - ones(x)]),
        dpjax.exponential(1.0, 0.2),
    ),
    "randomized response": lambda n: (lambda x: x[:6], dpjax.randomized_response(1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_posteriors_are_calibrated(name, keys):
    n = 40
    target, mechanism = PAIRS[name](n)
    bank = dpjax.simulation_bank(
        keys(1),
        dpjax.privatize(target, mechanism),
        prior=jax.random.uniform,
        model=uniform_ones,
        n=n,
        draws=20_000,
    )
    found = calibration(
        keys(2),
        bank.sample,
        prior=jax.random.uniform,
        release=bank.draw_release,
        repeats=2000,
    )
    assert found.p_value > 1e-4
    assert found.coverage() == pytest.approx(0.95, abs=0.02)
    # Power: another prior.
    wrong = calibration(
        keys(3),
        bank.sample,
        prior=lambda key: jax.random.uniform(key) ** 2,
        release=bank.draw_release,
        repeats=2000,
    )
    assert wrong.p_value < 1e-4
