"""The distances themselves: which databases they come from, and that they can be reproduced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._running._devices import Layout
from dpjax._running._processes import Team
from dpjax.sensitivity import _chunks
from dpjax.sensitivity._chunks import Block, kth_distance
from dpjax.sensitivity._loop import sample_block
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._plan import Sampling


@pytest.fixture
def samples(key, uniform):
    """A few distances; each test names what matters to it."""

    def samples(target=jnp.max, oracle=uniform, **settings):
        settings = {"n": 5, "norm": "l1", "m": 20, **settings}
        return dpjax.sample_distances(settings.pop("key", key), target, oracle, **settings)

    return samples


def normal(key, n):
    return jax.random.normal(key, (n,))


@pytest.mark.parametrize("chunk_size", [None, 1, 7])
def test_pair_i_is_drawn_from_fold_in(samples, key, uniform, chunk_size):
    """Recomputed by hand. A maximum has no rounding, so the bits agree at any chunk size."""
    found = samples(chunk_size=chunk_size)
    for i in range(20):
        records = uniform(jax.random.fold_in(key, i), 6)
        database, neighbor = records[:5], records[jnp.array([0, 1, 2, 3, 5])]
        assert float(found[i]) == abs(float(database.max()) - float(neighbor.max())), i
    assert np.count_nonzero(found) > 1


def test_a_secure_key_becomes_one_threefry_key(samples, uniform):
    """Databases come from that key, a function of the one given, eager or not."""
    key = dpjax.random.seeded_key(3)
    words = jax.random.bits(jax.random.fold_in(key, 2**32 - 1), (2,))
    threefry = jax.random.wrap_key_data(words, impl="threefry2x32")
    implementations = []

    def oracle(key, n):
        implementations.append(jax.random.key_impl(key))
        return uniform(key, n)

    found = samples(key=key, oracle=oracle)
    assert set(implementations) == {"threefry2x32"}
    np.testing.assert_array_equal(found, samples(key=threefry))
    batch = jax.random.wrap_key_data(
        jnp.stack([jax.random.key_data(key)] * 2), impl=dpjax.random.CHACHA20
    )
    stacked = jax.jit(jax.vmap(lambda key: samples(key=key, chunk_size=20)))(batch)
    np.testing.assert_array_equal(stacked, [found, found])
    sampled = [
        dpjax.sample_sensitivity(key, jnp.max, uniform, n=5, norm="l1", m=20)
        for key in (key, threefry)
    ]
    assert sampled[0].identity == sampled[1].identity


@pytest.mark.slow
def test_other_targets_agree_to_rounding_at_any_batch_size(samples):
    def solve(database):
        matrix = database.reshape(4, 4)
        return jnp.linalg.solve(matrix @ matrix.T + jnp.eye(4), matrix[0]), jnp.mean(database)

    some = [samples(solve, n=16, norm="l2", m=40, chunk_size=size) for size in (1, 7, 40)]
    np.testing.assert_allclose(some[0], some[1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(some[0], some[2], rtol=0, atol=2e-6)


def test_the_last_chunk_is_padded(samples):
    few, many = (samples(jnp.mean, n=100, m=m, chunk_size=8) for m in (13, 16))
    np.testing.assert_array_equal(few, many[:13])


@pytest.mark.parametrize("k", [1, 250, 500])
def test_the_sampler_selects_among_the_same_bits(samples, key, k):
    distances = samples(jnp.mean, normal, n=20, m=500, chunk_size=64)
    sampler = RandomPair.trace(key, jnp.mean, normal, n=20, norm="l1", positions="last")
    layout = Layout((None,), 500, 64)
    block, _ = sample_block(Sampling(key, sampler, layout, Team((0,))))
    selected, _ = kth_distance(block, k, layout=layout)
    assert selected == np.sort(distances)[k - 1]


def test_the_host_selects_what_a_program_does(monkeypatch):
    strange = jnp.asarray([[3.0, -0.0, jnp.nan, 1.0, -1.0], [jnp.inf, 0.0, 1e-40, 1.0, jnp.inf]])
    block, layout = Block(strange, jnp.asarray([0.5])), Layout((None,), 5, 5)
    on_host = [kth_distance(block, k, layout=layout) for k in range(1, 11)]
    monkeypatch.setattr(_chunks, "_FEW", 0)
    monkeypatch.setattr(_chunks, "platform_of", lambda device: "gpu")
    assert on_host == [kth_distance(block, k, layout=layout) for k in range(1, 11)]
    assert [np.signbit(distance) for distance, _ in on_host] == [False] * 10


def test_under_jit_and_vmap_over_keys(samples, keys):
    stacked = jax.jit(jax.vmap(lambda key: samples(key=key, chunk_size=8)))(
        jnp.stack([keys(0), keys(1)])
    )
    assert stacked.shape == (2, 20)
    for i in range(2):
        np.testing.assert_array_equal(stacked[i], samples(key=keys(i)))


def test_under_vmap_over_what_the_target_closes_over(samples):
    scales = jnp.array([1.0, 2.0, 4.0])
    stacked = jax.vmap(lambda scale: samples(lambda x: scale * jnp.max(x)))(scales)
    np.testing.assert_array_equal(stacked, scales[:, None] * stacked[:1])


def test_a_second_call_compiles_nothing(samples, compilations):
    samples()
    assert compilations(samples) == []


def test_nan_counts_as_infinite(samples, key, uniform):
    found = samples(lambda x: jnp.where(x > 0.5, jnp.nan, x), n=1)
    records = jnp.stack([uniform(jax.random.fold_in(key, i), 2) for i in range(20)])
    np.testing.assert_array_equal(np.isinf(found), (records > 0.5).any(axis=1))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "float32"])
def test_distances_are_at_least_float32(samples, key, dtype):
    found = jax.eval_shape(lambda key: samples(lambda x: (4 * x).astype(dtype), key=key), key)
    assert (found.shape, found.dtype) == ((20,), jnp.float32)


def test_float64_distances(samples, key, uniform, x64):
    found = samples(lambda x: 1e6 + jnp.mean(x), n=2)
    exact = [abs(np.diff(uniform(jax.random.fold_in(key, i), 3)[1:])[0]) / 2 for i in range(20)]
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"m": 0}, "m must be .* got 0"),
        ({"m": 2**32}, "m must be .* got 4294967296"),
        ({"n": 0}, "n must be .* got 0"),
        ({"norm": "l3"}, "norm must be"),
        ({"positions": "all"}, "positions must be"),
        ({"chunk_size": 0}, "chunk_size must be"),
    ],
)
def test_bad_settings_are_refused(samples, settings, message):
    with pytest.raises(ValueError, match=message):
        samples(**settings)


def test_the_docstring_says_what_to_do_for_several_gammas():
    assert "1 - (1 - C)/J" in dpjax.sample_distances.__doc__
