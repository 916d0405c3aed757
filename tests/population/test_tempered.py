"""Posteriors by tempered sequential Monte Carlo, against exact ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.population._latents import Latents
from dpjax.population._tempered import (
    _LEAST,
    ISLANDS,
    RANDOM,
    Islands,
    _check_runs,
    along_a_path,
    effective_size,
    runs_that_count,
    weights_of,
    with_slope,
)
from dpjax.population._world import World


def draws_of_many_kinds(key):
    keys = jax.random.split(key, 8)
    return {
        "normal": jax.random.normal(keys[0]),
        "uniform": jax.random.uniform(keys[1], minval=2.0, maxval=3.0),
        "one of 256": jax.random.randint(keys[2], (), 0, 256).astype(float),
        "by rejection": jax.random.gamma(keys[3], 2.0),
        "mapped": jax.vmap(jax.random.exponential)(jax.random.split(keys[4], 2))[1],
        "a choice": jax.random.choice(keys[5], jnp.arange(3.0)),
        "in a loop": jax.lax.scan(
            lambda total, key: (total + jax.random.normal(key), None),
            0.0,
            jax.random.split(keys[6], 3),
        )[0],
        "a key twice": jax.random.uniform(keys[7]) - jax.random.uniform(keys[7]),
    }


def test_functions_of_normal_numbers_have_the_law_of_the_program(keys):
    """Nine tests of two samples, at a false-alarm rate of 1e-5 each."""
    found = Latents.of(draws_of_many_kinds, jax.random.key(0))
    count = 4000
    normal = jax.random.normal(jax.random.key(1), (count, found.size))
    ours = jax.jit(jax.vmap(found.evaluate))(normal)
    real = jax.jit(jax.vmap(draws_of_many_kinds))(jax.random.split(jax.random.key(2), count))
    for name, numbers in real.items():
        assert stats.ks_2samp(np.asarray(ours[name]), np.asarray(numbers)).pvalue > 1e-5, name
    assert not np.asarray(ours["a key twice"]).any()
    # The lowest bits count where a number is taken modulo 256.
    assert len(np.unique(np.asarray(ours["one of 256"]))) > 250
    # Numbers of different keys are independent.
    correlation = np.corrcoef(ours["normal"], ours["uniform"])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(count)
    # Power: the law of another program is told from it.
    assert (
        stats.ks_2samp(np.asarray(ours["normal"]) * 1.3, np.asarray(real["normal"])).pvalue < 1e-5
    )


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (lambda key: jax.random.normal(key) + jax.random.uniform(key), "every key once"),
        (lambda key: jax.random.key_data(key)[1] % 7, "only to functions of jax.random"),
    ],
)
def test_keys_that_tempering_cannot_follow_are_refused(program, told):
    with pytest.raises(ValueError, match=told):
        Latents.of(program, jax.random.key(0))


def test_the_effective_size_is_that_of_independent_draws(keys):
    """16 equal runs of 64: about 1,024 independent draws, and fewer where runs disagree."""
    rng = np.random.default_rng(0)
    weights = np.full(ISLANDS * 64, 1 / (ISLANDS * 64))
    found = [effective_size([rng.normal(size=len(weights))], weights) for _ in range(40)]
    assert 300 < np.median(found) <= 1024
    apart = rng.normal(size=(ISLANDS, 64)) + rng.normal(size=(ISLANDS, 1))
    assert effective_size([apart.ravel()], weights) < 60


def test_one_run_with_all_weight_does_not_look_exact():
    """Its own average is the average of all draws; what the others say shows the error."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(ISLANDS, 64)) + 10.0 * (np.arange(ISLANDS) == 3)[:, None]
    shares = np.where(np.arange(ISLANDS) == 3, 0.999, 0.001 / 15)
    weights = np.repeat(shares / 64, 64)
    assert effective_size([numbers.ravel()], weights) < 1
    assert runs_that_count(weights) == pytest.approx(1, abs=0.01)
    assert runs_that_count(np.full(ISLANDS * 64, 1 / (ISLANDS * 64))) == pytest.approx(ISLANDS)
    with pytest.raises(ValueError, match="16 independent runs disagree"):
        _check_runs(7.9, 1024)
    _check_runs(8.1, 1024)


def gaussian_means(dims, n, sd, epsilon):
    """Means of normal records, under a normal prior: the exact posterior is normal."""
    noise = dpjax.gaussian(2 * sd / n * dims**0.5, epsilon, delta=1e-6)
    private = dpjax.privatize(lambda x: jnp.mean(x, axis=0), noise)

    def model(key, theta, n):
        return theta[None] + sd * jax.random.normal(key, (n, dims))

    variance = float(noise.effective_scale(like=jnp.zeros(dims))) ** 2 + sd**2 / n
    return private, model, lambda key: jax.random.normal(key, (dims,)), variance


def check_against_exact(keys, dims, n, draws):
    private, model, prior, variance = gaussian_means(dims, n, sd=0.5, epsilon=4.0)
    released = jnp.linspace(-1, 1.5, dims)
    found = dpjax.posterior(
        keys(1), released, private, prior=prior, model=model, n=n, draws=draws, method="tempered"
    )
    sd = np.sqrt(variance / (1 + variance))
    off = (found.mean - released / (1 + variance)) / sd
    # Of 4.5 standard errors; the size is estimated from 16 runs, so it may be too large by a half.
    assert np.abs(off).max() < 4.5 * np.sqrt(1.5 / found.effective_size)
    low, high = found.interval(0.9)
    assert (high - low) / (2 * 1.645 * sd) == pytest.approx(1, abs=0.2)
    # Power: without the noise the interval would be outside of this tolerance.
    assert sd > 1.2 * 0.5 / n**0.5
    return found


def test_moves_reach_the_exact_posterior(keys):
    found = check_against_exact(keys, dims=2, n=10, draws=1024)
    assert len(found.weights) == 1024
    assert found.weights.sum() == pytest.approx(1)


def test_every_path_is_accepted_where_the_density_is_constant(keys):
    """Paths preserve the density of normal numbers, so only a change of the density refuses one."""

    def both(point):
        return jnp.float32(0), jnp.zeros_like(point)

    particle = jax.random.normal(keys(1), (3,))
    normal = jax.random.normal(keys(2), (20, 3 + RANDOM))
    moved, _, share = jax.vmap(
        lambda normal: along_a_path(both, jnp.float32(1), jnp.float32(0.3), normal, particle, 0.0)
    )(normal)
    np.testing.assert_allclose(share, 1, atol=1e-4)
    assert np.all(np.abs(moved - particle[None]).max(1) > 1e-2)


@pytest.mark.slow
def test_eight_numbers_have_the_exact_posterior_where_weights_collapse(keys):
    found = check_against_exact(keys, dims=8, n=50, draws=2048)
    assert found.effective_size > 300
    private, model, prior, _ = gaussian_means(8, 50, sd=0.5, epsilon=4.0)
    with pytest.raises(ValueError, match='method="tempered"'):
        dpjax.posterior(keys(1), jnp.linspace(-1, 1.5, 8), private, prior=prior, model=model, n=50)


@pytest.mark.slow
def test_counts_without_derivatives_have_the_exact_posterior(keys):
    n = 30
    private = dpjax.privatize(
        lambda x: jnp.sum(x, dtype=jnp.int32), dpjax.laplace(1.0, epsilon=1.0)
    )

    def model(key, share, n):
        return (jax.random.uniform(key, (n,)) < share).astype(jnp.int32)

    found = dpjax.posterior(
        keys(2),
        np.int32(9),
        private,
        prior=jax.random.uniform,
        model=model,
        n=n,
        draws=1024,
        method="tempered",
    )
    grid, counts = (np.arange(500) + 0.5) / 500, np.arange(n + 1)
    likelihood = stats.binom.pmf(counts[:, None], n, grid) * np.exp(-np.abs(9 - counts))[:, None]
    exact = likelihood.sum(axis=0) / likelihood.sum()
    below = np.cumsum(exact)
    for level in (0.1, 0.5, 0.9):
        at = grid[np.searchsorted(below, level)] + 1e-3
        share = found.weights[np.asarray(found.theta) <= at].sum()
        assert abs(share - below[np.searchsorted(below, level)]) < 4.5 * 0.5 * np.sqrt(
            1.5 / found.effective_size
        )
    assert found.effective_size > 100


FEW = jnp.array([0.2, 0.5, 0.8])


def ones_or_failure(records):
    ones = int(np.sum(records))
    if ones > 6:
        raise ValueError("too many")
    return np.float32(ones)


def ones_or_nan(records):
    return jnp.where(jnp.sum(records) > 6, jnp.nan, jnp.sum(records).astype(float))


def coins(key, share, n):
    return (jax.random.uniform(key, (n,)) < share).astype(jnp.int32)


def test_moved_populations_have_the_values_of_failures():
    """Of 12 people, more than 6 say yes: NaN counts as 0, a failure as the value given for it."""
    on_host = dpjax.targets.host(
        ones_or_failure,
        output=jax.ShapeDtypeStruct((), jnp.float32),
        failure=jnp.float32(-5.0),
        jobs=1,
    )
    noise = dpjax.laplace(1.0, epsilon=0.8)
    privates = [dpjax.privatize(x, noise) for x in (ones_or_nan, on_host, jnp.sum)]
    world = World.of(jax.random.key(0), privates, jax.random.uniform, coins, 12, None)
    latents = Latents.of(world.simulated, jax.random.key(0))
    rows = jax.random.normal(jax.random.key(1), (24, latents.size))
    nan, host, ones = (np.asarray(x) for x in jax.vmap(latents.evaluate)(rows)["values"])
    assert (ones > 6).any()
    np.testing.assert_array_equal(host, np.where(ones > 6, -5, ones))
    replaced = jnp.asarray(np.where(ones > 6, 0, ones).astype(np.float32))
    density = jax.vmap(lambda value: noise.log_prob(jnp.float32(0), value))
    np.testing.assert_array_equal(density(jnp.asarray(nan)), density(replaced))


@pytest.mark.slow
def test_nan_is_tempered_as_what_is_released_instead(keys):
    """More than 6 of 12 people are the likeliest explanation of 0."""
    found = dpjax.posterior(
        keys(1),
        jnp.float32(0.0),
        dpjax.privatize(ones_or_nan, dpjax.laplace(1.0, epsilon=0.8)),
        prior=lambda key: jax.random.choice(key, FEW),
        model=coins,
        n=12,
        draws=1024,
        method="tempered",
    )
    counts = np.arange(13)
    likelihood = stats.binom.pmf(counts[None], 12, np.array(FEW)[:, None])

    def shares(values):
        given = likelihood @ np.exp(-0.8 * np.abs(values))
        return given / given.sum()

    theta = np.asarray(found.theta)
    ours = np.array([found.weights[theta == x].sum() for x in FEW])
    error = 4.5 * 0.5 * np.sqrt(1.5 / found.effective_size)
    assert np.abs(ours - shares(np.where(counts > 6, 0, counts))).max() < error
    assert np.abs(ours - shares(counts)).max() > error


def on_the_host(normal):
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(lambda x: np.float32(np.sum(x)), spec, normal)


def by_a_loop(normal):
    return jax.lax.while_loop(lambda x: x < 1, lambda x: x + 0.5, jnp.sum(normal))


def test_what_has_no_derivative_is_moved_without_one():
    row = jnp.array([0.5, -0.25])
    for density in (on_the_host, by_a_loop):
        value, slope = jax.jit(with_slope(density, 2))(row)
        assert value == density(row)
        assert not np.asarray(slope).any()
    assert np.asarray(with_slope(jnp.sum, 2)(row)[1]).all()


def test_draws_that_could_not_have_given_the_release_weigh_nothing():
    """Else, where no draw could have given it, the prior would be returned for the posterior."""
    log = np.full((ISLANDS, 20), _LEAST)
    islands = Islands(np.zeros((ISLANDS, 20)), log, np.full(ISLANDS, _LEAST))
    assert effective_size([np.zeros(ISLANDS * 20)], weights_of(islands)) == 0
    log[3, 5] = -7.0
    weights = weights_of(islands)
    assert (weights.argmax(), weights.sum()) == (3 * 20 + 5, 1)
