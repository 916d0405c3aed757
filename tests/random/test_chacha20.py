"""The chacha20 key implementation: RFC 8439 vectors, and what JAX expects of keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.random import _chacha20, _samples
from dpjax.random._keys import split_on_host
from dpjax.random._lattice import lattice_laplace

# RFC 8439: section 2.3.2, and the keystream vectors 1 to 5 of appendix A.1.
_INCREASING = bytes(range(32)).hex()
VECTORS = [
    (
        _INCREASING,
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32,
        0,
        "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "00" * 12,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32,
        0,
        "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]


WAYS = {
    "rows": _chacha20._by_rows(_chacha20.reduced),
    "unrolled_rows": _chacha20._by_rows(lambda rows: rows, unroll=20),
    "words": _chacha20._by_words(_chacha20._rounds_of_words),
    "kernels": _chacha20._by_words(_chacha20._rounds_in_kernels),
    "unrolled_words": _chacha20._by_words(_chacha20._unrolled_rounds),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_rfc_8439(vector, way, monkeypatch):
    key, counter, nonce, expected = vector
    monkeypatch.setattr(_chacha20.lax, "platform_dependent", lambda state, **_: WAYS[way](state))
    words = np.frombuffer(bytes.fromhex(key), "<u4").tolist()
    nonces = np.frombuffer(bytes.fromhex(nonce), "<u4").tolist()
    state = np.array([*_chacha20._CONSTANTS, *words, counter, *nonces], np.uint32)
    block = np.asarray(_chacha20.block_function(jnp.asarray(state[:, None])))[:, 0]
    assert block.astype("<u4").tobytes().hex() == expected
    assert _chacha20._block_on_host(state).astype("<u4").tobytes().hex() == expected


@pytest.mark.parametrize("lanes", [_chacha20._MANY_LANES + 3, 2 * _chacha20._PAGE_LANES])
def test_a_block_does_not_depend_on_how_many_there_are(lanes):
    """Nor on how they are computed: few lanes in one way, many in another."""
    state = np.random.default_rng(0).integers(2**32, size=(16, lanes), dtype=np.uint32)
    blocks = np.asarray(_chacha20.block_function(jnp.asarray(state)))
    assert blocks.shape == state.shape
    for few in (5, _chacha20._MANY_LANES - 1):
        alone = _chacha20.block_function(jnp.asarray(state[:, :few]))
        np.testing.assert_array_equal(alone, blocks[:, :few])
    for lane in (*range(9), *range(lanes - 9, lanes)):
        np.testing.assert_array_equal(blocks[:, lane], _chacha20._block_on_host(state[:, lane]))


def test_bits_are_the_key_stream(key):
    state = _chacha20._one_state(np.asarray(jax.random.key_data(key)), 0, 0)
    np.testing.assert_array_equal(jax.random.bits(key, (16,)), _chacha20._block_on_host(state))


@pytest.mark.parametrize(
    "derive",
    [
        lambda key: jax.random.key_data(jax.random.split(key, 3)),
        lambda key: jax.random.key_data(jax.random.fold_in(key, 3)),
        lambda key: jax.random.bits(key, (3,)),
    ],
    ids=["split", "fold_in", "bits"],
)
def test_a_derivation_is_one_program_with_the_same_bits_in_a_larger_one(derive, key, compilations):
    jax.clear_caches()
    # What is compiled before are small conversions of its arguments.
    assert len(compilations(lambda: derive(key))) <= 2
    np.testing.assert_array_equal(jax.jit(derive)(key), derive(key))


def test_domains_do_not_meet(key):
    """No output is a key, no child of `split` is one of `fold_in`, and noise is none of them."""
    bits = jax.random.bits(key, (64, 8))
    split = jax.random.key_data(jax.random.split(key, 64))
    fold = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(jnp.arange(64))
    data = jax.random.key_data(key)
    noise = [
        _chacha20.uniform_words(data, 0, nonce=nonce, width=8, count=64)
        for nonce in (_samples._OWN, _samples._SHARED)
    ]
    words = np.concatenate([np.ravel(x) for x in (bits, split, fold, *noise)])
    # 2,560 random words are all different but for one key in 1,300.
    assert len(set(words.tolist())) == 5 * 64 * 8


@pytest.mark.slow
def test_children_do_not_depend_on_their_number(key):
    many, few = (jax.random.key_data(jax.random.split(key, n)) for n in (70_001, 3))
    np.testing.assert_array_equal(many[:3], few)
    assert len(np.unique(many, axis=0)) == 70_001


@pytest.mark.parametrize("count", [1, 17, pytest.param(40_000, marks=pytest.mark.slow)])
def test_batches_have_the_bits_of_their_keys(count, key):
    batch = jax.random.split(key, 5)
    draw = jax.jit(lambda one: jax.random.bits(one, (count,)))
    np.testing.assert_array_equal(jax.vmap(draw)(batch), [draw(one) for one in batch])
    nested = jax.vmap(jax.vmap(draw))(batch[:4].reshape(2, 2))
    np.testing.assert_array_equal(nested.reshape(4, count), jax.vmap(draw)(batch[:4]))


def test_many_keys_have_the_bits_of_each(key):
    batch = jax.random.split(key, 40_000)
    together = jax.vmap(lambda one: jax.random.bits(one, (3,)))(batch)
    for i in (0, 16_383, 16_384, 39_999):
        np.testing.assert_array_equal(together[i], jax.random.bits(batch[i], (3,)))


@pytest.mark.parametrize("width", [8, 16, 32])
def test_bits_are_uniform(width, key):
    bits = np.asarray(jax.random.bits(key, (200_000,), f"uint{width}"))
    for bit in range(width):
        # A false alarm once in 1.7 million.
        assert abs(((bits >> bit) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)


@pytest.mark.parametrize(
    ("draw", "most"),
    [
        (lambda key, count: jax.jit(lambda k: jax.random.bits(k, (count,))).lower(key), 2**32),
        (lambda key, count: jax.eval_shape(lambda k: lattice_laplace(k, (count,)), key), 2**31),
    ],
    ids=["words", "noise"],
)
def test_no_counter_starts_again(draw, most, key):
    """A key draws no more than its counters of 32 bits tell apart."""
    draw(key, most - 16)
    with pytest.raises(ValueError, match="the limit of one key"):
        draw(key, most)


@pytest.mark.slow
def test_64_bits(key, x64):
    bits = jax.random.bits(key, (3, 4), "uint64")
    assert bits.shape == (3, 4)
    assert len(np.unique(bits)) == 12
    np.testing.assert_array_equal(jax.random.bits(key, (5,), "uint64"), bits.ravel()[:5])
    words = jax.random.bits(key, (12, 2), "uint32").astype("uint64")
    np.testing.assert_array_equal(words[:, 0] << 32 | words[:, 1], bits.ravel())


@pytest.mark.slow
def test_every_function_of_jax_random_takes_it(key):
    random = jax.random
    for draw in (random.normal, random.uniform, random.laplace, random.gumbel, random.exponential):
        assert np.isfinite(draw(key, (5,))).all()
    assert sorted(np.asarray(random.permutation(key, 9))) == list(range(9))
    assert random.categorical(key, jnp.zeros(4)).shape == ()
    assert random.randint(key, (3,), 0, 10).max() < 10
    assert random.gamma(key, 2.0, (3,)).shape == (3,)


def test_serialization(key):
    again = jax.random.wrap_key_data(
        np.asarray(jax.random.key_data(key)), impl=dpjax.random.CHACHA20
    )
    np.testing.assert_array_equal(jax.random.bits(again, (4,)), jax.random.bits(key, (4,)))


@pytest.mark.slow
def test_sharded_keys_give_the_same_bits(run_python):
    run_python(
        """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import dpjax

mesh = jax.make_mesh((8,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))
batch = jax.random.split(dpjax.random.seeded_key(0), 64)
draw = jax.jit(jax.vmap(lambda key: jax.random.bits(key, (3,))))
spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("keys")))
np.testing.assert_array_equal(draw(spread), draw(batch))
release = jax.jit(jax.vmap(lambda key: dpjax.laplace(1.0, 1.0)(key, np.float32(0)).value))
np.testing.assert_array_equal(release(spread), release(batch))
""",
        devices=8,
    )


def test_key_reuse_is_seen_by_jax():
    mechanism = dpjax.laplace(1.0, 1.0)
    with jax.debug_key_reuse(True):
        key = dpjax.random.seeded_key(1)
        mechanism(key, jnp.float32(0))
        with pytest.raises(jax.errors.KeyReuseError):
            mechanism(key, jnp.float32(0))


def test_a_few_words_are_the_first_of_more(key):
    many = jax.random.bits(key, (70,))
    data = np.asarray(jax.random.key_data(key))
    stream = [_chacha20._block_on_host(_chacha20._one_state(data, i, 0)) for i in range(5)]
    np.testing.assert_array_equal(many, np.concatenate(stream)[:70])
    for count in (1, 15, 16, 17):
        np.testing.assert_array_equal(jax.random.bits(key, (count,)), many[:count])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_host_splits_keys_alike(count):
    key = dpjax.random.seeded_key(7)
    on_host = [jax.random.key_data(one) for one in split_on_host(key, count)]
    np.testing.assert_array_equal(on_host, jax.random.key_data(jax.random.split(key, count)))
    assert split_on_host(key, count)[-1].dtype == key.dtype


def test_blocks_of_accelerators_have_the_same_bits(key, monkeypatch):
    """One block of all lanes there, and two that overlap on a CPU."""
    data, lanes = jax.random.key_data(key), 65
    monkeypatch.setattr(_chacha20, "CHUNK", 64)
    words = functools.partial(_chacha20.uniform_words, data, 0, nonce=5, width=16, count=lanes)
    on_cpu = words()
    monkeypatch.setattr(
        _chacha20.lax, "platform_dependent", lambda *x, default, **_: jax.jit(default)(*x)
    )
    np.testing.assert_array_equal(words(), on_cpu)
    state = _chacha20._one_state(np.asarray(data), lanes - 1, 5)
    np.testing.assert_array_equal(on_cpu[-1], _chacha20._block_on_host(state))
