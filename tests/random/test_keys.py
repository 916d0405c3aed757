"""Keys: where they come from, and which are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.random import secure_key, seeded_key
from dpjax.random._keys import check_key, check_sampling_key


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def is_one_typed_key(key):
    return key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def test_secure_keys_are_typed_and_distinct():
    made = [secure_key() for _ in range(100)]
    assert all(is_one_typed_key(key) for key in made)
    assert len({words(key) for key in made}) == 100
    # All 256 bits vary: each one is missing from 100 keys with probability 2^-99.
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
    made = jax.random.key(np.uint32(seed), impl=dpjax.random.CHACHA20)
    assert words(seeded_key(seed)) == words(made)


def test_seeded_key_uses_256_bits_of_the_seed():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 2**255, 2**256 - 1]
    assert len({words(seeded_key(seed)) for seed in seeds}) == len(seeds)
    assert words(seeded_key(7)) == words(seeded_key(np.uint64(7)))
    assert is_one_typed_key(seeded_key(2**256 - 1))


@pytest.mark.parametrize("seed", [-1, 2**256])
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


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_other_implementations_release_nothing(implementation):
    key = jax.random.key(0, impl=implementation)
    message = f"of the chacha20 implementation to release anything, got {implementation}"
    with pytest.raises(TypeError, match=message):
        check_key(key)
    if implementation == "threefry2x32":
        assert check_sampling_key(key) is key
    else:
        with pytest.raises(TypeError, match=f"got {implementation}"):
            check_sampling_key(key)


def test_releases_check_their_key():
    mechanism = dpjax.laplace(1.0, 1.0)
    for wrong in (0, jax.random.PRNGKey(0), jax.random.key(0, impl="rbg"), jax.random.key(0)):
        with pytest.raises(TypeError, match="key must be"):
            mechanism(wrong, 0.0)
        with pytest.raises(TypeError, match="key must be"):
            dpjax.privatize(jnp.mean, mechanism)(wrong, np.zeros(3))


# The ledger of keys.


@pytest.mark.parametrize("where", ["memory", "file"])
def test_ledger_refuses_a_key_that_was_used(where, tmp_path, keys):
    path = None if where == "memory" else tmp_path / "keys.db"
    ledger = dpjax.random.KeyLedger(path)
    private = dpjax.privatize(jnp.mean, dpjax.laplace(1.0, 1.0), ledger=ledger)
    private(keys(0), np.zeros(3))
    with pytest.raises(ValueError, match="was used for a release before"):
        private(keys(0), np.ones(3))
    private(keys(1), np.zeros(3))
    assert len(ledger) == 2
    assert keys(0) in ledger
    assert keys(2) not in ledger
    if path is not None:
        # Another process, later, knows them too, and finds nothing of the key in the file.
        with pytest.raises(ValueError, match="was used"):
            dpjax.random.KeyLedger(path).claim(keys(1))
        secret = dpjax.random.secure_key()
        dpjax.random.KeyLedger(path).claim(secret)
        data = np.asarray(jax.random.key_data(secret)).tobytes()
        assert not any(data[i : i + 4] in path.read_bytes() for i in range(0, 32, 4))


def test_a_refused_database_uses_no_key(keys):
    ledger = dpjax.random.KeyLedger()
    sensitivity = dpjax.analytic_sensitivity(1.0, norm="l1", n=3)
    private = dpjax.privatize(jnp.mean, dpjax.laplace(sensitivity, 1.0), ledger=ledger)
    with pytest.raises(ValueError, match="n=3"):
        private(keys(0), np.zeros(4))
    assert len(ledger) == 0


def test_ledger_needs_a_key_that_is_known(keys):
    ledger = dpjax.random.KeyLedger()
    private = dpjax.privatize(jnp.mean, dpjax.laplace(1.0, 1.0), ledger=ledger)
    with pytest.raises(TypeError, match="debug_key_reuse"):
        jax.jit(private)(keys(0), jnp.zeros(3))
