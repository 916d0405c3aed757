"""What the tests of the sampler share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def key():
    """Sampling holds no secret: here mostly threefry, which compiles faster than ChaCha20."""
    return jax.random.key(20170611)


@pytest.fixture(scope="session")
def keys():
    """Fixed keys for tests that need several: `keys(i)`."""
    return jax.random.key


@pytest.fixture(scope="session")
def uniform():
    """An oracle of uniform numbers that compiles much faster than one of `jax.random`."""

    def oracle(key, n):
        word = jax.random.key_data(key)[0] + jnp.arange(n, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's last step
            word = (word ^ (word >> shift)) * np.uint32(factor)
        return ((word ^ (word >> 16)) >> 8).astype(float) / 2**24

    return oracle
