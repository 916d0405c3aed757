"""What the statistical tests of mechanisms share."""

import jax
import numpy as np
import pytest


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
        return jax.tree.map(np.asarray, _draws(mechanism, jax.random.split(key, count), value))

    return draw


@pytest.fixture(scope="session")
def log_probs():
    """`log_probs(mechanism, outputs, value)`: of every output of a batch, in NumPy float64."""

    def log_prob(mechanism, outputs, value):
        return np.asarray(_log_probs(mechanism, outputs, value), float)

    return log_prob
