"""The key that databases are drawn with."""

import jax
import numpy as np
import pytest

import dpjax
from dpjax.random._keys import sampling_key


@pytest.mark.parametrize("seed", [0, 1, 2**256 - 1, 20170611])
def test_the_host_derives_what_a_program_does(seed, compilations):
    key = dpjax.random.seeded_key(seed)
    traced = jax.random.key_data(jax.jit(sampling_key)(key))
    np.testing.assert_array_equal(jax.random.key_data(sampling_key(key)), traced)
    assert compilations(lambda: jax.random.key_data(sampling_key(key))) == []


def test_a_key_that_is_used_twice_is_seen():
    with jax.debug_key_reuse(True):
        key = sampling_key(dpjax.random.seeded_key(0))
        jax.random.bits(key)
        with pytest.raises(jax.errors.KeyReuseError):
            jax.random.bits(key)


def test_a_threefry_key_stays():
    key = jax.random.key(0)
    assert sampling_key(key) is key
