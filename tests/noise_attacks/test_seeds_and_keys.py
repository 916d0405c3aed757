"""Seed search: whoever can enumerate the keys removes the noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

SPACE = 2**16
SECRETS = np.array([17.0, 5.0, 203.0, 88.0], np.float32)


def naive(key):
    return SECRETS + jax.random.laplace(key, (4,), jnp.float32)


def candidates(noise_of_key, keys):
    """Noises of all candidate keys, (keys, 4)."""
    return np.asarray(jax.jit(jax.vmap(noise_of_key))(keys))


def recovered(released, noises):
    """The counts that some key in the space explains as whole numbers."""
    values = released - noises
    whole = np.all(np.abs(values - np.rint(values)) < 1e-4, axis=1)
    return np.rint(values[whole])


def test_a_32_bit_seed_is_found():
    """One part of 2^32 seeds, searched: every count comes back. All of them take minutes."""
    seed = 40_961
    released = np.asarray(naive(jax.random.key(seed)))
    keys = jax.vmap(jax.random.key)(jnp.arange(SPACE, dtype=jnp.uint32))
    found = recovered(released, candidates(lambda key: jax.random.laplace(key, (4,)), keys))
    assert SECRETS.tolist() in found.tolist()


@pytest.mark.parametrize("start", [0, 2**32, 2**200])
def test_a_secure_key_is_in_no_part_of_the_space(start):
    mechanism = dpjax.laplace(1.0, 1.0)
    released = np.asarray(mechanism(dpjax.random.secure_key(), SECRETS).value)
    words = np.zeros((SPACE, 8), np.uint32)
    for i in range(8):
        words[:, i] = (start >> 32 * i) & 0xFFFFFFFF
    words[:, 0] ^= np.arange(SPACE, dtype=np.uint32)
    keys = jax.random.wrap_key_data(jnp.asarray(words), impl=dpjax.random.CHACHA20)
    zeros = jnp.zeros(4)
    noises = candidates(lambda key: mechanism(key, zeros).value, keys)
    # By chance a noise makes all four whole with probability (2e-4)^4: never in 2^16.
    assert len(recovered(released, noises)) == 0


def test_a_seeded_key_is_found_and_says_so():
    """The control: the same search finds the key of a seed, which is why none is published."""
    mechanism = dpjax.laplace(1.0, 1.0)
    release = mechanism(dpjax.random.seeded_key(40_961), SECRETS)
    released = np.asarray(release.value)
    words = np.zeros((SPACE, 8), np.uint32)
    words[:, 0] = np.arange(SPACE)
    keys = jax.random.wrap_key_data(jnp.asarray(words), impl=dpjax.random.CHACHA20)
    noises = candidates(lambda key: mechanism(key, jnp.zeros(4)).value, keys)
    assert SECRETS.tolist() in recovered(released, noises).tolist()
    assert "seeded key" in repr(release.guarantee)


def test_rbg_keys_of_a_batch_share_their_noise_and_are_refused():
    """Under vmap `rbg` uses the first key of a batch: two that share it repeat the noise."""
    first, second, third = (jax.random.key(i, impl="rbg") for i in range(3))
    draw = jax.vmap(lambda key: jax.random.normal(key, ()))
    one, other = (draw(jnp.stack([first, key])) for key in (second, third))
    np.testing.assert_array_equal(one, other)  # Different keys, the same noise.
    with pytest.raises(TypeError, match="chacha20"):
        dpjax.laplace(1.0, 1.0)(first, 0.0)
    keys = [dpjax.random.seeded_key(i) for i in range(3)]
    release = jax.vmap(lambda key: dpjax.laplace(1.0, 1.0)(key, 0.0).value)
    one, other = (release(jnp.stack([keys[0], key])) for key in keys[1:])
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_lanes_and_leaves_never_share_a_key():
    mechanism = dpjax.laplace(1.0, 1.0)
    keys = jax.random.split(dpjax.random.seeded_key(3), 2000)
    tree = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2)), "c": jnp.float32(0)}
    drawn = jax.jit(jax.vmap(lambda key: mechanism(key, tree).value))(keys)
    columns = np.concatenate([leaf.reshape(2000, -1) for leaf in jax.tree.leaves(drawn)], axis=1)
    # 16,000 draws on a grid of 2^-19: a shared lane or leaf would repeat 2,000 of them.
    assert len(np.unique(columns)) > 0.98 * columns.size
    correlation = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlation).max() < 6 / np.sqrt(2000)
