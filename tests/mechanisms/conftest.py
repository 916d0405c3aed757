"""What the statistical tests of mechanisms share."""

import math

import jax
import numpy as np
import pytest

BATCH = 2**12  # Releases of one program, so that all counts share it.


@jax.jit
def _draws(mechanism, keys, value):
    return jax.vmap(lambda key: mechanism(key, value).value)(keys)


@jax.jit
def _log_probs(mechanism, outputs, value):
    return jax.vmap(mechanism.log_prob, in_axes=(0, None))(outputs, value)


@pytest.fixture
def draws(key):
    """Independent releases of one value: `draws(mechanism, value, count)`, NumPy arrays."""

    def draw(mechanism, value, count):
        keys = jax.random.split(key, (math.ceil(count / BATCH), BATCH))
        batches = [jax.device_get(_draws(mechanism, keys[i], value)) for i in range(len(keys))]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *batches)

    return draw


@pytest.fixture(scope="session")
def log_probs():
    """`log_probs(mechanism, outputs, value)`: of every output of a batch, in NumPy float64."""

    def log_prob(mechanism, outputs, value):
        return np.asarray(_log_probs(mechanism, outputs, value), float)

    return log_prob
