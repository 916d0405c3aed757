"""Coverage of confidence sets over 3,000 runs, and calibration of posteriors, for many pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries
from dpjax._core._open_ledgers import untold_programs
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


def ones(x):
    return jnp.sum(x, dtype=jnp.int32)


def bernoulli(key, share, n):
    return jax.random.bernoulli(key, share, (n,)).astype(jnp.int32)


def categories(key, share, n):
    """Three categories, the first of which has a share."""
    others = 1 + jax.random.bernoulli(key, 0.3, (n,)).astype(jnp.int32)
    return jnp.where(bernoulli(jax.random.fold_in(key, 1), share, n) == 1, 0, others)


def powers(key, theta, n):
    """Numbers of the unit interval with the density of a power."""
    return jax.random.uniform(key, (n, 1)) ** (0.3 + theta)


def histogram_of_three(x):
    return jnp.stack([ones(x == i) for i in range(3)])


def density(records):
    """A kernel density, as a function on the unit interval."""
    return lambda x: jnp.mean(jnp.exp(-0.5 * ((x[0] - records[:, 0]) / 0.2) ** 2))


def logarithm_or_failure(records):
    """Code on the host that fails where nobody answers yes."""
    return np.float32(np.log(int(np.sum(records)) - 2))


def host():
    return dpjax.targets.host(
        logarithm_or_failure,
        output=jax.ShapeDtypeStruct((), jnp.float32),
        failure=jnp.float32(-1.0),
        jobs=1,
    )


PEOPLE = 40
MANY = 8000  # Trials after which coverage is known to 4 standard errors of .25%.
# Factors of epsilon in a wrong density. Where noise is small beside the sampling error, a larger
# epsilon is hardly wrong.
WRONG = {
    "Laplace mean": 1 / 8,
    "exponential mode": 8.0,
    "Bernstein density": 8.0,
    "sparse vector": 8.0,
}
HISTOGRAM = queries.histogram_query(2)


def privatized(target, mechanism):
    return lambda factor: dpjax.privatize(target, mechanism(factor))


# Private function given a factor of its epsilon, model, size of the bank, and trials.
PAIRS = {
    "Laplace mean": (
        privatized(lambda x: jnp.mean(x.astype(float)), lambda x: dpjax.laplace(1 / PEOPLE, x)),
        bernoulli,
        40_000,
        MANY,
    ),
    "Gaussian histogram": (
        privatized(HISTOGRAM, lambda x: dpjax.gaussian(HISTOGRAM.sensitivity("l2"), x, 1e-5)),
        bernoulli,
        20_000,
        2000,
    ),
    "exponential mode": (
        privatized(
            lambda x: jnp.stack([ones(x), PEOPLE - ones(x)]),
            lambda x: dpjax.exponential(1.0, 0.2 * x),
        ),
        bernoulli,
        40_000,
        MANY,
    ),
    "randomized response": (
        privatized(lambda x: x[:6], dpjax.randomized_response),
        bernoulli,
        20_000,
        2000,
    ),
    "Bernstein density": (
        privatized(
            dpjax.evaluate_on_lattice(density, degree=3, dims=1),
            lambda x: dpjax.bernstein(1 / PEOPLE, 4 * x, degree=3, dims=1),
        ),
        powers,
        20_000,
        2000,
    ),
    "linear regression": (
        lambda x: functools.partial(
            queries.private_linear_regression, x_radius=1.0, y_radius=1.0, epsilon=4 * x
        ),
        line,
        20_000,
        2000,
    ),
    "sparse vector": (
        privatized(histogram_of_three, lambda x: dpjax.above_threshold(1.0, x, threshold=15.0)),
        categories,
        2000,
        600,
    ),
    "top k": (
        privatized(histogram_of_three, lambda x: queries.top_k(1.0, x, k=2)),
        categories,
        20_000,
        2000,
    ),
    "black box": (
        lambda x: dpjax.privatize(host(), dpjax.laplace(1.0, 2 * x)),
        bernoulli,
        4000,
        1000,
    ),
}


def check(keys, posterior, release, repeats):
    """Uniform ranks and coverage of 95%; a prior of the trials that is another one is seen."""
    found = calibration(
        keys(2), posterior, prior=jax.random.uniform, release=release, repeats=repeats
    )
    print(found)
    assert found.p_value > 1e-4
    # 4 standard errors, and what the error of a bank adds.
    error = 0.01 if repeats >= MANY else 0.02 if repeats >= 2000 else 0.03
    assert found.coverage() == pytest.approx(0.95, abs=error)
    wrong = calibration(
        keys(3),
        posterior,
        prior=lambda key: jax.random.uniform(key) ** 3,
        release=release,
        repeats=min(repeats, 2000),
    )
    assert wrong.p_value < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_posteriors_are_calibrated(name, keys):
    make, model, draws, repeats = PAIRS[name]
    bank = dpjax.simulation_bank(
        keys(1), make(1.0), prior=jax.random.uniform, model=model, n=PEOPLE, draws=draws
    )
    check(keys, bank.sample, bank.draw_release, repeats)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_posteriors_by_a_wrong_density_are_refuted(name, keys):
    make, model, _, _ = PAIRS[name]
    right, wrong = (
        dpjax.simulation_bank(
            keys(1), make(factor), prior=jax.random.uniform, model=model, n=PEOPLE, draws=draws
        )
        for factor, draws in ((1.0, 200), (WRONG[name], 1000))
    )
    found = calibration(
        keys(4), wrong.sample, prior=jax.random.uniform, release=right.draw_release, repeats=1000
    )
    assert found.p_value < 1e-4


@pytest.mark.slow
def test_posteriors_of_objective_perturbation_are_calibrated(keys):
    """Its density in one dimension: the noise b is a function of the weight, and so is its slope.

    A release adds noise to the weight, over which a Gauss-Hermite rule integrates.
    """
    n, strength = PEOPLE, 0.1
    training = dpjax.learning.objective_perturbation(
        regularization=strength, n=n, dims=1, epsilon=2.0, delta=1e-5
    )
    plan = training.plan
    nodes, shares = np.polynomial.hermite_e.hermegauss(7)

    def model(key, theta, n):
        return answers(key, 6 * theta - 3, n)

    def log_density(weight, records):
        x, y = records["x"][:, 0], records["y"]
        at = weight - plan.output_scale * jnp.asarray(nodes, jnp.float32)
        off = jax.nn.sigmoid(-y[None] * at[:, None] * x[None])
        b = jnp.sum(y[None] * x[None] * off, axis=1) - n * strength * at
        slope = jnp.sum((x**2)[None] * off * (1 - off), axis=1) + n * strength
        logs = -0.5 * (b / plan.linear_scale) ** 2 + jnp.log(slope)
        return jax.scipy.special.logsumexp(logs + jnp.log(jnp.asarray(shares, jnp.float32)))

    split = jax.random.split(jax.random.key(1), 4000)
    theta = jax.vmap(jax.random.uniform)(split)
    bank = jax.vmap(lambda key, x: model(jax.random.fold_in(key, 1), x, n))(split, theta)

    def posterior(key, released, draws):
        logs = jax.vmap(lambda records: log_density(released[0], records))(bank)
        return theta[jax.random.categorical(key, logs, shape=(draws,))]

    def release(key, theta):
        of_data, of_noise = jax.random.split(key)
        data = model(dpjax.random._keys.sampling_key(of_data), theta, n)
        with untold_programs():
            return training(of_noise, data).value

    check(keys, posterior, release, 1000)
