"""Accounts by simulation: against exact ones, in how many runs they hold, and what is refused."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import dpjax
from dpjax import accounting
from dpjax.random import seeded_key

LEVELS = np.array([0.0, 0.2, 0.5, 1.0, 1.5, 2.0])


def gaussian_loss(key):
    """One Gaussian release, whose mean moves by one standard deviation."""
    return jax.random.normal(key, dtype="float64") + 0.5


def of_gaussian(epsilon):
    return norm.cdf(0.5 - epsilon) - np.exp(epsilon) * norm.cdf(-0.5 - epsilon)


def poisson_losses(rate, z, steps):
    """Both directions of DP-SGD with Poisson batches, which dominate every training."""

    def sample(key):
        joins, noise = jax.random.split(key)
        x = z * jax.random.normal(noise, (2, steps), "float64")
        joins = jax.random.bernoulli(joins, rate, (steps,))
        x = x + jnp.stack([joins.astype("float64"), jnp.zeros(steps, "float64")])
        ratio = jnp.log1p(rate * jnp.expm1((x - 0.5) / z**2))
        return jnp.sum(ratio, axis=1) * jnp.asarray([1.0, -1.0], "float64")

    return sample


def test_limits_are_above_exact_losses_and_near():
    """Ten sampled steps, by dp-accounting; and one Gaussian release, by its formula."""
    rate, z, steps = 0.2, 1.5, 10
    found = accounting.monte_carlo(
        seeded_key(0), poisson_losses(rate, z, steps), draws=100_000, confidence=0.999
    )
    losses = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=rate
    )
    exact = losses.self_compose(steps).get_delta_for_epsilon(LEVELS)
    limits = np.array([found.delta(level) for level in LEVELS])
    assert np.all(limits >= exact * (1 - 1e-6))
    assert np.all(limits <= 1.4 * exact + 3e-4)
    one = accounting.monte_carlo(seeded_key(1), gaussian_loss, draws=100_000, confidence=0.999)
    limits = np.array([one.delta(level) for level in LEVELS])
    assert np.all(limits >= of_gaussian(LEVELS))
    assert np.all(limits <= 1.2 * of_gaussian(LEVELS) + 2e-4)
    epsilon = one.epsilon(1e-2)
    assert one.delta(epsilon) <= 1e-2 < one.delta(epsilon * (1 - 1e-6))
    assert of_gaussian(epsilon) <= 1e-2


def test_limits_hold_as_often_as_they_say():
    """In 1,000 runs at a confidence of .9, more than 128 misses have a probability of .2%.

    The plain averages miss in most runs, so the test would notice limits that are too low.
    """
    misses = plain = 0
    exact = of_gaussian(LEVELS)
    for seed in range(1000):
        found = accounting.monte_carlo(seeded_key(seed), gaussian_loss, draws=400, confidence=0.9)
        limits = np.array([found.delta(level) for level in LEVELS])
        misses += np.any(limits < exact)
        (band,) = found._bands
        losses = np.random.default_rng(seed).normal(0.5, 1.0, 400)
        gains = -np.expm1(np.minimum(LEVELS[:, None] - losses, 0))
        plain += np.any(np.mean(gains, axis=1) < exact)
        assert np.all(np.diff(band.limits) >= 0)
    assert misses <= 128
    assert plain > 500


def test_both_directions_count():
    """The larger one decides, and each has half of the error."""

    def both(key):
        loss = gaussian_loss(key)
        return jnp.stack([jnp.zeros_like(loss), loss])

    one = accounting.monte_carlo(seeded_key(0), gaussian_loss, draws=10_000, confidence=0.995)
    two = accounting.monte_carlo(seeded_key(0), both, draws=10_000, confidence=0.99)
    np.testing.assert_allclose([one.delta(x) for x in LEVELS], [two.delta(x) for x in LEVELS])


def test_an_infinite_loss_and_nan_count_as_lost():
    def sample(key):
        u = jax.random.uniform(key, dtype="float64")
        return jnp.where(u < 0.05, jnp.inf, jnp.where(u < 0.1, jnp.nan, -1.0))

    found = accounting.monte_carlo(seeded_key(0), sample, draws=20_000)
    assert 0.1 <= found.delta(50.0) <= found.delta(0.0) <= 0.12
    assert found.epsilon(0.12) == 0
    with pytest.raises(ValueError, match=r"delta=0\.01 is too small for draws=20000"):
        found.epsilon(0.01)


def test_the_confidence_travels_and_adds():
    """One simulation counts once; two of them may mislead twice as often."""
    one, other = (
        accounting.monte_carlo(seeded_key(seed), gaussian_loss, draws=5_000).guarantee(0.05)
        for seed in (0, 1)
    )
    assert one.confidence == 0.99
    assert "by simulation" in one.notes
    assert accounting.compose(one, one).confidence == pytest.approx(0.99)
    both = accounting.compose(one, other, dpjax.laplace(1.0, 0.5).guarantee)
    assert both.confidence == pytest.approx(0.98)
    assert float(both.gamma) == 0
    assert float(both.epsilon) >= float(one.epsilon) + float(other.epsilon) + 0.5


def test_what_is_no_simulation_is_refused():
    key = seeded_key(0)
    for bad, message in (
        (dpjax.laplace(1.0, 1.0), "got an object with a guarantee, .*: use compose_at"),
        (lambda key: jax.random.normal(key, dtype="float32"), "in float64"),
        (lambda key: jnp.zeros((2, 2), "float64"), "a number or a vector"),
        (1.0, "sample_losses must be a function"),
    ):
        with pytest.raises(TypeError, match=message):
            accounting.monte_carlo(key, bad, draws=1000)
    for settings in ({"draws": 10}, {"draws": 1000, "confidence": 1.0}):
        with pytest.raises(ValueError, match=list(settings)[-1]):
            accounting.monte_carlo(key, gaussian_loss, **settings)


@pytest.mark.slow
def test_limits_hold_in_200_simulations():
    """Of sampled steps, and of the first step of balls in bins, against exact losses.

    At a confidence of .9, all levels hold together. More than 44 of 200 runs would miss one with
    probability below 1e-6. The plain averages miss one in most runs, so the test would notice
    limits that are too low.
    """
    rate, z, draws = 0.2, 1.0, 2_000
    relation = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
    bins = dpjax.learning.balls_in_bins_sampling(40, bins=5)
    first = dpjax.learning.participation_losses(bins, noise_multiplier=z, steps=1, dims=1)
    for losses, steps in ((poisson_losses(rate, z, 4), 4), (first, 1)):
        exact = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
            z, sampling_prob=rate, value_discretization_interval=1e-3, pessimistic_estimate=False
        )
        exact = exact.self_compose(steps).get_delta_for_epsilon(LEVELS)
        missed, ratios = 0, []
        for run in range(200):
            found = accounting.monte_carlo(
                seeded_key(run), losses, draws=draws, confidence=0.9, relation=relation
            )
            limits = np.array([found.delta(level) for level in LEVELS])
            missed += bool(np.any(limits < exact * (1 - 1e-5) - 1e-9))
            ratios.append(limits[1] / exact[1])
        assert missed <= 44
        assert np.sum(np.any(averages(losses, 200, draws) < exact, axis=1)) > 100
        assert np.mean(ratios) < 1.5


def averages(losses, runs, draws):
    """What simulations without confidence would report: a row of estimates for each run."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), runs * draws)
        drawn = np.asarray(jax.jit(jax.vmap(losses))(keys)).reshape(runs, draws, -1)
    gains = [np.mean(-np.expm1(np.minimum(x - drawn, 0)), axis=1) for x in LEVELS]
    return np.max(gains, axis=-1).T
