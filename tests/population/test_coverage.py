"""Coverage of confidence sets over 3,000 runs, and of their intervals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper

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


def answers(key, slope, n):
    """Features, and labels that are 1 or -1 by a logistic model."""
    of_x, of_y = jax.random.split(key)
    x = jax.random.uniform(of_x, (n, 1), minval=-1, maxval=1)
    positive = jax.random.uniform(of_y, (n,)) < jax.nn.sigmoid(slope * x[:, 0])
    return {"x": x, "y": jnp.where(positive, 1.0, -1.0)}


def line(key, slope, n):
    """Points near a line."""
    of_x, of_y = jax.random.split(key)
    x = jax.random.uniform(of_x, (n, 1), minval=-1, maxval=1)
    return {"x": x, "y": slope * x[:, 0] + 0.1 * jax.random.normal(of_y, (n,))}


COVERED = {
    "mean and variance": (
        lambda: dpjax.privatize(clamped_moments, dpjax.laplace((3 + 9) / 100, epsilon=1.0)),
        normal,
        100,
        {"mean": 1.0, "sd": 1.0},
        {"mean": 2.5, "sd": 1.0},
    ),
    "a mean": (
        lambda: dpjax.privatize(lambda x: clamped_moments(x)[0], dpjax.laplace(3 / 100, 1.0)),
        lambda key, mean, n: normal(key, {"mean": mean, "sd": 1.0}, n),
        100,
        1.0,
        1.6,
    ),
    "a variance": (
        lambda: functools.partial(queries.private_variance, lower=0, upper=3, epsilon=1.0),
        lambda key, sd, n: normal(key, {"mean": 1.0, "sd": sd}, n),
        100,
        1.0,
        0.3,
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
    "a logistic slope by objective perturbation": (
        lambda: dpjax.learning.objective_perturbation(
            regularization=0.1, n=60, dims=1, epsilon=2.0, delta=1e-5
        ),
        answers,
        60,
        2.0,
        -6.0,
    ),
    "a regression from private second moments": (
        lambda: functools.partial(
            queries.private_linear_regression, x_radius=1.0, y_radius=1.0, epsilon=2.0
        ),
        line,
        100,
        0.5,
        -0.5,
    ),
    "a median": (
        lambda: dpjax.privatize(median, dpjax.exponential(2.0, epsilon=1.0)),
        lambda key, middle, n: middle + 8 * jax.random.normal(key, (n,)),
        100,
        20.0,
        30.0,
    ),
}


def set_of(name, key):
    """The confidence set of one release, and a function that draws further releases."""
    make, model, n, truth, _ = COVERED[name]
    private = make()
    like = jax.tree.map(jnp.float32, truth)
    bounds = tuple(
        jax.tree.map(lambda x, move=move: np.float64(x + move), truth) for move in (-9, 9)
    )
    if name == "a proportion":
        bounds = (0.0, 1.0)
    if "sd" in str(truth):
        bounds = ({"mean": -1.0, "sd": 0.05}, {"mean": 3.0, "sd": 3.0})
    of_set, of_release = jax.random.split(key)
    released = private(of_release, model(jax.random.key(0), like, n))
    found = dpjax.confidence_set(
        of_set, released, private, model=model, n=n, bounds=bounds, seeds=SEEDS
    )

    def release(key):
        of_data, of_noise = jax.random.split(key)
        database = model(dpjax.random._keys.sampling_key(of_data), like, n)
        return found._simulation.draws[0](of_noise, database)

    return found, jax.jit(release)


def check_covered(name, covered, runs):
    ends = [end(covered, runs, 0.025) for end in (clopper_pearson_lower, clopper_pearson_upper)]
    print(f"{name}: {covered} of {runs}, [{ends[0]:.4f}, {ends[1]:.4f}]")
    assert clopper_pearson_upper(covered, runs, ERROR) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERED)
def test_sets_cover_the_truth(name, keys):
    truth, other = COVERED[name][-2:]
    found, release = set_of(name, keys(1))
    simulation = found._simulation

    def p_values(key):
        of_set, of_release = jax.random.split(key)
        observed = simulation.numbers([release(of_release)])
        both = (jax.tree.map(jnp.float32, x) for x in (truth, other))
        return [simulation.p_value(of_set, x, observed)[0] for x in both]

    true, wrong = jax.jit(lambda keys: jax.lax.map(p_values, keys, batch_size=20))(
        jax.random.split(keys(2), RUNS)
    )
    level = 0.05 + 1e-6  # p-values are multiples of 1 / 40, in float32.
    check_covered(name, int(np.sum(np.asarray(true) > level)), RUNS)
    assert np.mean(np.asarray(wrong) > level) < 0.6  # Power.


@pytest.mark.slow
@pytest.mark.parametrize(("name", "runs"), {"a proportion": 3000, "mean and variance": 200}.items())
def test_intervals_cover_the_truth(name, runs, keys):
    """What a user sees: the ends that the search returns, which include the truth with the set."""
    truth = COVERED[name][-2]
    found, release = set_of(name, keys(3))
    covered, widths = 0, []
    for key in jax.random.split(keys(4), runs):
        of_set, of_release = jax.random.split(key)
        one = found.given(of_set, np.asarray(release(of_release)))
        low, high = one.interval()
        within = jax.tree.map(lambda a, b, x: bool(a <= x <= b), low, high, truth)
        belongs = one.contains(truth)
        assert all(jax.tree.leaves(within)) or not belongs
        covered += all(jax.tree.leaves(within))
        widths.append(jax.tree.leaves(jax.tree.map(np.subtract, high, low)))
    check_covered(f"intervals, {name}", covered, runs)
    print("widths", np.mean(widths, axis=0))
    # Power: not the whole bounds.
    whole = jax.tree.leaves(jax.tree.map(np.subtract, found.bounds[1], found.bounds[0]))
    assert (np.mean(widths, axis=0) < np.array(whole) * 0.8).all()
