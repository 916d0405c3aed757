"""What the tests of oracles share."""

import jax
import pytest


@pytest.fixture
def key():
    """As the sampler hands them to an oracle: threefry, which compiles faster than ChaCha20."""
    return jax.random.key(20170611)
