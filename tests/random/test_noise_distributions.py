"""The distributions of noise: densities, quantiles and draws.

Kolmogorov-Smirnov tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import dataclasses

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

from dpjax.random import GAUSSIAN, LAPLACE

FALSE_ALARM = 1e-6
PAIRS = pytest.mark.parametrize(
    ("noise", "distribution"),
    [(LAPLACE, stats.laplace), (GAUSSIAN, stats.norm)],
    ids=["laplace", "gaussian"],
)


@PAIRS
def test_density_and_distribution_function(noise, distribution):
    x = np.linspace(-30, 30, 601)
    log_density = np.asarray(jax.jit(noise.log_density)(jnp.asarray(x)))
    np.testing.assert_allclose(log_density, distribution.logpdf(x), rtol=1e-5, atol=1e-5)
    log_cdf = np.asarray(jax.jit(noise.log_cdf)(jnp.asarray(x)))
    np.testing.assert_allclose(log_cdf, distribution.logcdf(x), rtol=1e-5, atol=1e-7)


def exact_log_interval(name, lower, upper):
    with mpmath.workdps(60):
        low, high = mpmath.mpf(lower), mpmath.mpf(upper)
        if low > 0:
            low, high = -high, -low
        if name == "gaussian":
            cdf = mpmath.ncdf
        else:
            cdf = lambda t: mpmath.exp(t) / 2 if t < 0 else 1 - mpmath.exp(-t) / 2  # noqa: E731
        return float(mpmath.log(cdf(high) - cdf(low)))


@PAIRS
def test_probability_of_an_interval_is_exact_in_both_tails(noise, distribution):
    intervals = [(-0.5, 0.5), (0.25, 0.75), (3, 4), (-4, -3), (12, 12.5), (-12.5, -12), (-1, 20)]
    lower, upper = (jnp.asarray(x, "float32") for x in zip(*intervals, strict=True))
    got = jax.jit(noise.log_interval)(lower, upper)
    exact = [exact_log_interval(noise.name, *interval) for interval in intervals]
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=1e-6)


@PAIRS
def test_tail_quantile(noise, distribution):
    for probability in (1e-6, 0.1, 0.5, 0.95, 1 - 1e-9):
        exact = float(distribution.isf((1 - probability) / 2))
        assert noise.tail_quantile(1 - probability) == pytest.approx(exact, rel=1e-6)


@PAIRS
def test_draws(noise, distribution, key):
    sample = np.asarray(noise.sample(key, (100_000,), jnp.float32), float)
    assert stats.kstest(sample, distribution.cdf, method="asymp").pvalue > FALSE_ALARM
    assert stats.kstest(0.9 * sample, distribution.cdf, method="asymp").pvalue < FALSE_ALARM


def test_event_says_the_noise_multiplier():
    assert LAPLACE.dp_event(2.0).noise_multiplier == 2.0
    assert GAUSSIAN.dp_event(3.0).noise_multiplier == 3.0


def test_noise_is_static_for_jit():
    @jax.jit
    def draw(key):
        return dataclasses.replace(LAPLACE).sample(key, (), jnp.float32)

    assert hash(LAPLACE) == hash(dataclasses.replace(LAPLACE))
    assert draw(jax.random.key(0)).shape == ()
