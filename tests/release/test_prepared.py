"""What is kept of a mechanism from its first release on."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.release._prepared import _PREPARED, prepared


def test_a_value_of_another_kind_is_checked_anew(key):
    mechanism = dpjax.exponential(1.0, 1.0)
    mechanism(key, jnp.zeros(3))
    for _ in range(2):
        with pytest.raises(ValueError, match="one array of scores"):
            mechanism(key, jnp.zeros((1, 3)))
        with pytest.raises(ValueError, match="one array of scores"):
            mechanism(key, [jnp.zeros(3)])
    assert len(prepared(mechanism).accepted) == 1


def test_another_dtype_is_checked_anew(key):
    mechanism = dpjax.laplace(1e-60, 1.0)
    with jax.enable_x64(True):
        mechanism(key, jnp.float64(0))
        for _ in range(2):
            with pytest.raises(ValueError, match="out of the range of float32"):
                mechanism(key, jnp.float32(0))
    with pytest.raises(ValueError, match="out of the range of float32"):
        mechanism(key, 0.0)


def test_numbers_are_those_of_the_precision_at_hand():
    mechanism = dpjax.laplace(1.0, 0.3)
    for _ in range(2):
        assert prepared(mechanism).numbers[3] > 0.3
        with jax.enable_x64(True):
            assert prepared(mechanism).numbers[3] == 0.3


def test_of_tracers_nothing_is_kept(key):
    made = []

    @jax.jit
    def release(epsilon):
        made.append(dpjax.laplace(1.0, epsilon))
        return made[0](key, jnp.float32(0)).value

    assert np.isfinite(release(1.0))
    assert made[0] not in _PREPARED


def test_what_is_kept_goes_with_the_mechanism():
    mechanism = dpjax.laplace(1.0, 1.0)
    assert prepared(mechanism) is prepared(mechanism)
    kept = len(_PREPARED)
    del mechanism
    gc.collect()
    assert len(_PREPARED) < kept


def test_mechanisms_of_one_structure_share_a_program():
    """So they share their programs, whatever their sensitivity, m and gamma."""
    one = dpjax.laplace(1.0, 1.0)
    other = dpjax.laplace(dpjax.assume_sensitivity(2.0, norm="l1", n=7), 3.0)
    assert prepared(one).compiled is prepared(other).compiled
    assert prepared(one).compiled is not prepared(dpjax.gaussian(1.0, 1.0, 1e-5)).compiled
