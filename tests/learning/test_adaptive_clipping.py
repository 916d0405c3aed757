"""Clip norms that follow a quantile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import learning
from dpjax.learning._clipping import LARGEST_NORM, LEAST_NORM

SIZE = 100
SETTINGS = {
    "noise_multiplier": 1.0,
    "batch_size": SIZE,
    "initial_clip_norm": 1.0,
    "learning_rate": 1.0,
    "count_noise": 4.0,
}


def linear(w, x):
    return jnp.dot(w, x)


def sum_of(within, *, size=SIZE):
    """A sum of gradients, some of which are within the clip norm."""
    examples = jnp.where(jnp.arange(size) < within, 0.5, 2.0)[:, None] * jnp.eye(1, 3)
    return learning.clipped_gradients(linear, clip_norm=1.0)(jnp.zeros(3), examples, True)


@pytest.fixture(scope="module")
def many_steps(keys):
    """First steps under 600 keys, of 60 of 100 within the norm: `many_steps(**settings)`."""

    def run(**settings):
        noise = learning.adaptive_noise(keys(5), **{**SETTINGS, **settings})
        start = noise.init(jnp.zeros(3))

        def step(key):
            state = dataclasses.replace(start, noise=dataclasses.replace(start.noise, key=key))
            gradient, state = noise.update(sum_of(60), state)
            return gradient, state.clip_norm

        return jax.jit(jax.vmap(step))(jax.random.split(keys(6), 600))

    return run


def test_the_noise_of_the_count_is_not_that_of_the_gradient(many_steps):
    """Independent noise is correlated by 5 / sqrt(600) with probability 6e-7, for each of three."""
    gradients, norms = map(np.asarray, many_steps())
    for gradient in gradients.T:
        assert abs(np.corrcoef(gradient, np.log(norms))[0, 1]) < 5 / np.sqrt(600)


def test_a_step_moves_the_norm_by_the_noisy_fraction(many_steps):
    """The fraction is in [0, 1], whatever its noise: so is a step bounded."""
    norms = np.asarray(many_steps(count_noise=1000.0, quantile=0.3)[1])
    assert np.min(norms) == pytest.approx(np.exp(0.3 - 1))
    assert np.max(norms) == pytest.approx(np.exp(0.3))
    # Noise of 2000 on a count of 20 of 200: nearly all are cut off, half on either side.
    assert 0.4 < np.mean(norms < 1) < 0.6


@pytest.mark.parametrize(("start", "within"), [(LEAST_NORM, SIZE), (LARGEST_NORM, 0)])
def test_clip_norms_stay_in_the_range_of_clipped_gradients(start, within, keys):
    """Beyond it they would be NaN, and so would all gradients to come."""
    noise = learning.adaptive_noise(keys(5), **{**SETTINGS, "initial_clip_norm": start})
    state = noise.init(jnp.zeros(3))
    for _ in range(3):
        _, state = noise.update(sum_of(within), state)
        assert float(state.clip_norm) == pytest.approx(start)
    clipped = learning.clipped_gradients(linear, clip_norm=1.0)
    found = clipped(jnp.zeros(3), jnp.ones((4, 3)), True, clip_norm=state.clip_norm)
    assert np.isfinite(found.norm_bound)


def test_every_step_has_keys_of_its_own(keys):
    noise = learning.adaptive_noise(keys(5), **SETTINGS)
    state, drawn = noise.init(jnp.zeros(3)), []
    for _ in range(3):
        gradient, state = noise.update(sum_of(60), state)
        drawn += [*gradient.tolist(), tuple(jax.random.key_data(state.noise.key).tolist())]
    assert len(set(drawn)) == 12
    assert int(state.noise.step) == 3


def test_states_and_sums_are_checked(keys):
    """As those of `gaussian_noise`: what else a step would account for, or give noise to."""
    noise = learning.adaptive_noise(keys(5), **SETTINGS)
    floats = learning.adaptive_noise(keys(5), **SETTINGS, noise="float").init(jnp.zeros(3))
    for other in (noise.init(jnp.zeros(2)), floats):
        with pytest.raises(ValueError, match="state must have dims=4 and noise='exact'"):
            noise.update(sum_of(60), other)
    with pytest.raises(TypeError, match="updates must be a ClippedSum"):
        noise.update(jnp.zeros(3), noise.init(jnp.zeros(3)))


@pytest.mark.parametrize("count_noise", [0.5, 0.5 - 1e-9])
def test_a_count_that_takes_all_is_refused(count_noise, keys):
    with pytest.raises(ValueError, match="count_noise must be above noise_multiplier / 2"):
        learning.adaptive_noise(keys(5), **{**SETTINGS, "count_noise": count_noise})
