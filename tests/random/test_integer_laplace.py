"""Noise of integers whose scale may be private."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.mechanisms._smooth_quantile import _SMOOTHNESS_MARGIN
from dpjax.random._release import laplace_steps, private_fit

KEYS, SCALES = 4096, np.array([1.0, 3.7, 1000.0, 2.0**25], "float32")


@pytest.fixture
def steps(keys):
    """Noise of every scale (rows) under some keys, in steps; and what divides it."""

    @jax.jit
    def draw(scales, keys):
        fits = [private_fit(jnp.int32(0), scales[i]) for i in range(len(SCALES))]
        noise = jax.vmap(lambda key: laplace_steps(key, *fits))(keys)
        return noise, [(fit.divisor, fit.shift) for fit in fits]

    noise, divisors = draw(jnp.asarray(SCALES), jax.random.split(keys(5), KEYS))
    found = [
        (np.asarray(x.high).astype(np.int32).astype(np.int64) << 32) + np.asarray(x.low)
        for x in noise
    ]
    return np.array(found), np.array([int(c) << int(s) for c, s in divisors])


def test_noises_of_one_draw_are_independent_and_of_their_scales(steps):
    noise, points = steps
    assert np.all(points % 2 == 0)
    scales = 2.0**43 / points
    assert np.all((scales >= SCALES * (1 - 2**-21)) & (scales <= SCALES * (1 + 2**-15 + 2**-21)))
    relative = noise / SCALES[:, None]
    # |Z| has mean and variance 1; integers of scale 1 are rounded.
    np.testing.assert_allclose(np.abs(relative[1:]).mean(axis=1), 1, atol=0.08)
    # The correlation of 4,096 pairs has a standard error of .016.
    correlation = np.corrcoef(relative) - np.eye(len(SCALES))
    assert np.abs(correlation).max() < 0.08


def test_a_drawn_scale_exceeds_a_private_one_by_two_to_the_minus_fifteen_at_most():
    """docs/proofs/smooth-quantile.md adds this up with the floats of the smooth bound."""
    scales = np.geomspace(1, 2**25, 200_001).astype(np.float32)
    fits = jax.vmap(lambda scale: private_fit(jnp.int32(0), scale))(scales)
    points = np.asarray(fits.divisor, float) * 2.0 ** np.asarray(fits.shift, float)
    excess = 2.0**43 / points / scales.astype(float) - 1
    assert excess.min() >= -(2.0**-21)
    assert 0.9 * 2.0**-15 <= excess.max() <= 2.0**-15 + 2.0**-21
    np.testing.assert_allclose(fits.scale, 2.0**43 / points, rtol=2.0**-21)
    between = 2.0**-16 + math.log1p(2.0**-23) + math.log1p(2.0**-15)
    between += math.log1p(2.0**-21) - math.log1p(-(2.0**-21))
    assert between < _SMOOTHNESS_MARGIN
