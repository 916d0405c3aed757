"""Simulation-based calibration: uniform ranks where all fits together, and power where not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.auditing import Calibration, calibration

N = 30
# One p-value below this in 10,000 right ones, and 1e-6 for wrong ones to be seen.
RIGHT, WRONG = 1e-4, 1e-6


def exact(key, released, draws):
    """Of a normal mean with a normal prior, where the release adds noise of variance 1."""
    return released / 2 + jax.random.normal(key, (draws,)) * 0.5**0.5


def noisy(key, theta):
    return theta + jax.random.normal(key)


def test_exact_posteriors_pass_and_wrong_ones_fail(keys):
    def p_value(posterior, prior=jax.random.normal):
        return calibration(keys(1), posterior, prior=prior, release=noisy).p_value

    assert p_value(exact) > RIGHT
    assert p_value(lambda key, y, draws: exact(key, y, draws) + 0.2) < WRONG
    assert p_value(lambda key, y, draws: 1.3 * exact(key, y, draws) - 0.15 * y) < WRONG
    assert p_value(exact, prior=lambda key: 1.5 * jax.random.normal(key)) < WRONG


def test_ties_are_broken_at_random(keys):
    """A posterior of two values, given nothing: ranks are uniform all the same."""

    def coin(key, released, draws):
        return jax.random.bernoulli(key, 0.5, (draws,)).astype(jnp.int32)

    found = calibration(
        keys(1),
        coin,
        prior=lambda key: jax.random.bernoulli(key).astype(jnp.int32),
        release=lambda key, theta: jnp.zeros(()),
    )
    assert found.p_value > RIGHT


def test_counts_coverage_and_p_value_are_those_of_the_ranks():
    ranks = np.tile(np.arange(100), 10)[:, None]
    even = Calibration(ranks, 99)
    assert even.counts.tolist() == [[50] * 20]
    assert even.p_value == 1.0
    np.testing.assert_allclose(even.coverage(), 0.95)
    np.testing.assert_allclose(even.coverage(confidence=0.8), 0.8)
    assert "not refuted" in repr(even)
    assert "95.0% of 1,000 trials" in repr(even)
    middle = Calibration(np.full((1000, 1), 50), 99)
    assert middle.coverage() == 1.0
    assert middle.p_value < 1e-100
    assert "(refuted" in repr(middle)


def test_a_bank_is_calibrated_and_a_wrong_density_is_seen(keys):
    """The mean of clipped exponentials, with Laplace noise; the wrong one has half of the noise."""
    cap = 2.0

    def private(epsilon):
        def target(records):
            return jnp.mean(jnp.clip(records, 0, cap))

        return dpjax.privatize(target, dpjax.laplace(cap / N, epsilon))

    def prior(key):
        return jax.random.uniform(key, minval=0.3, maxval=3.0)

    def model(key, mean, n):
        return mean * jax.random.exponential(key, (n,))

    true, sharp = (
        dpjax.simulation_bank(keys(1), private(epsilon), prior=prior, model=model, n=N, draws=8000)
        for epsilon in (0.5, 1.0)
    )

    def p_value(posterior, of=prior):
        return calibration(keys(2), posterior, prior=of, release=true.draw_release).p_value

    assert p_value(true.sample) > RIGHT
    assert p_value(sharp.sample) < WRONG
    assert p_value(true.sample, lambda key: jax.random.uniform(key, minval=2.0, maxval=3.0)) < WRONG


def test_wrong_arguments_are_refused_by_name(keys):
    good = {"prior": jax.random.normal, "release": noisy}
    with pytest.raises(
        ValueError, match="posterior must return 99 draws along a leading axis, each like theta"
    ):
        calibration(keys(1), lambda key, y, draws: y, **good)
    with pytest.raises(ValueError, match="repeats must be"):
        calibration(keys(1), exact, **good, repeats=10)
    with pytest.raises(TypeError, match="posterior must be a function"):
        calibration(keys(1), 3, **good)
