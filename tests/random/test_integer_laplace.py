"""Noise of integers whose scale may be private."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.random._integer_laplace import laplace_steps, private_fit

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
    assert np.all((scales >= SCALES * (1 - 1e-6)) & (scales <= SCALES * (1 + 2**-14)))
    relative = noise / SCALES[:, None]
    # |Z| has mean and variance 1; integers of scale 1 are rounded.
    np.testing.assert_allclose(np.abs(relative[1:]).mean(axis=1), 1, atol=0.08)
    # The correlation of 4,096 pairs has a standard error of .016.
    correlation = np.corrcoef(relative) - np.eye(len(SCALES))
    assert np.abs(correlation).max() < 0.08
