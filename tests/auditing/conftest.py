"""Mechanisms with a known epsilon, in plain JAX: functions of a key and a value."""

import math

import jax
import jax.numpy as jnp
import pytest

from dpjax._core._values import Guarantee, Release
from dpjax.random import seeded_key


def _flip(epsilon):
    """Randomized response on one bit."""
    lie = 1 / (1 + math.exp(epsilon))

    def mechanism(key, bit):
        return jnp.where(jax.random.bernoulli(key, lie), 1 - bit, bit)

    return mechanism


def _discrete_laplace(scale):
    """Integer noise z with probability ~ exp(-|z| / scale): the difference of two geometrics."""

    def geometric(key):
        uniform = jax.random.uniform(key, minval=2.0**-30)
        return jnp.floor(-scale * jnp.log(uniform)).astype(jnp.int32)

    def mechanism(key, count):
        up, down = jax.random.split(key)
        return count + geometric(up) - geometric(down)

    return mechanism


def _rounded(sample, scale=1.0):
    """Continuous noise of a scale, rounded to a grid that is too coarse for its bits to tell."""

    def mechanism(key, value):
        noisy = value + scale * sample(key, value.shape)
        return jnp.round(noisy * 1024).astype(jnp.int32)

    return mechanism


def _naive(sample):
    """What everybody writes first."""
    return lambda key, value: value + sample(key, value.shape, value.dtype)


class _Promising:
    """A mechanism that guarantees something."""

    def __init__(self, mechanism, epsilon, delta):
        self.mechanism = mechanism
        self.guarantee = Guarantee(epsilon, delta)

    def __call__(self, key, value):
        return Release(self.mechanism(key, value), self.guarantee)


@pytest.fixture
def key():
    """A fixed key for mechanisms in plain JAX, which compile faster with it."""
    return jax.random.key(20170611)


@pytest.fixture
def release_key():
    """A fixed key for mechanisms of dpjax."""
    return seeded_key(20170611)


@pytest.fixture(scope="session")
def flip():
    """`flip(epsilon)`: of (key, bit)."""
    return _flip


@pytest.fixture(scope="session")
def discrete_laplace():
    """`discrete_laplace(scale)`: of (key, integer); epsilon is sensitivity / scale."""
    return _discrete_laplace


@pytest.fixture(scope="session")
def rounded():
    """`rounded(sample, scale)`: of (key, float array); sound, as far as its sampler is."""
    return _rounded


@pytest.fixture(scope="session")
def naive():
    """`naive(sample)`: of (key, float array); its bits give the value away."""
    return _naive


@pytest.fixture(scope="session")
def promising():
    """`promising(mechanism, epsilon, delta)`: the mechanism with this guarantee."""
    return _Promising
