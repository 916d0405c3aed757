"""Keys: where they come from, and which are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.random import secure_key, seeded_key
from dpjax.random._keys import check_key


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def is_one_typed_key(key):
    return key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def test_secure_keys_are_typed_and_distinct():
    made = [secure_key() for _ in range(100)]
    assert all(is_one_typed_key(key) for key in made)
    assert len({words(key) for key in made}) == 100
    # All 64 bits vary: each one is missing from 100 keys with probability 2^-99.
    bits = np.array([words(key) for key in made], "uint32").view("uint8")
    assert np.all(np.bitwise_or.reduce(bits) == 255)
    assert np.all(np.bitwise_and.reduce(bits) == 0)


def test_secure_key_ignores_the_seeds_of_python_and_numpy():
    import random

    def seeded():
        random.seed(0)
        np.random.seed(0)
        return words(secure_key())

    assert seeded() != seeded()


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1])
def test_seeded_key_is_that_of_jax_for_small_seeds(seed):
    assert words(seeded_key(seed)) == words(jax.random.key(np.uint32(seed), impl="threefry2x32"))


def test_seeded_key_uses_64_bits_of_the_seed():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    assert len({words(seeded_key(seed)) for seed in seeds}) == len(seeds)
    assert words(seeded_key(7)) == words(seeded_key(np.uint64(7)))
    assert is_one_typed_key(seeded_key(2**64 - 1))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed must be .* got {seed}"):
        seeded_key(seed)


@pytest.mark.parametrize("seed", [0.0, "0", None, True, np.zeros(2, int)])
def test_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="seed must be an integer"):
        seeded_key(seed)


@pytest.mark.parametrize("wrong", [0, None, "key", 1.5, np.zeros(2, "uint32")])
def test_what_is_no_key_is_refused(wrong):
    with pytest.raises(TypeError, match="key must be a typed JAX key"):
        check_key(wrong)


def test_legacy_raw_key_is_refused():
    with pytest.raises(TypeError, match="typed JAX key, got a raw uint32 array"):
        check_key(jax.random.PRNGKey(0))


def test_batch_of_keys_is_refused_but_vmap_is_not(key):
    with pytest.raises(ValueError, match=r"one key, got shape .* use jax.vmap"):
        check_key(jax.random.split(key, 3))
    jax.vmap(lambda one: jax.random.key_data(check_key(one)))(jax.random.split(key, 3))


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_keys_whose_bits_depend_on_the_batch_are_refused(implementation):
    with pytest.raises(TypeError, match=f"got '{implementation}'"):
        check_key(jax.random.key(0, impl=implementation))


def test_releases_check_their_key():
    mechanism = dpjax.laplace(1.0, 1.0)
    for wrong in (0, jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        with pytest.raises(TypeError, match="key must be"):
            mechanism(wrong, 0.0)
