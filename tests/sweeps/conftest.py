"""What the tests of sweeps share."""

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def key():
    """Where nothing is released threefry will do, and compiles faster."""
    return jax.random.key(20170611)


@pytest.fixture
def keys():
    """Fixed keys for tests that need several: `keys(i)`."""
    return jax.random.key


@pytest.fixture
def draw():
    """A function of a key and a number, cheap to compile."""

    def draw(key, x=0.0, shift=0):
        return jax.random.uniform(key) + jnp.float32(x) + shift

    return draw
