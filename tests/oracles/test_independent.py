"""Oracles that draw each record by itself: which one, and that it is the same one anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.oracles import independent
from dpjax.sensitivity._pairs import RandomPair

N = 7


@pytest.fixture
def key():
    """Threefry, which sampling draws with."""
    return jax.random.key(20170611)


def record(key):
    bits, uniform, count, normal = jax.random.split(key, 4)
    return {
        "bits": jax.random.bits(bits, (3,)),
        "uniform": jax.random.uniform(uniform),
        "count": jax.random.randint(count, (), 0, 9),
        "normal": jax.random.normal(normal, (2,)),
    }


def assert_same(found, expected):
    """But for the last place of normals, whose logarithms each program compiles in its own way."""
    for name in ("bits", "uniform", "count"):
        np.testing.assert_array_equal(found[name], expected[name])
    np.testing.assert_allclose(found["normal"], expected["normal"], rtol=1e-5)


def test_record_i_comes_from_fold_in_of_i(key):
    drawn = jax.jit(independent(record), static_argnums=1)(key, N)
    alone = jax.jit(lambda i: record(jax.random.fold_in(key, i)))
    each = [alone(i) for i in range(N)]
    assert_same(drawn, jax.tree.map(lambda *leaves: np.stack(leaves), *each))
    assert len(np.unique(drawn["bits"])) == 3 * N


def test_the_first_of_more_are_the_same(key):
    oracle = jax.jit(independent(record), static_argnums=1)
    assert_same(oracle(key, 3), jax.tree.map(lambda leaf: leaf[:3], oracle(key, N)))


@pytest.mark.parametrize(("n", "error"), [(-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_a_number_of_records_that_is_none_is_refused(key, n, error):
    with pytest.raises(error, match="n must be an integer of at least 0"):
        independent(jax.random.bits)(key, n)


def test_two_records_are_those_of_the_database_at_any_position(key):
    target = dpjax.targets.summable(lambda x: x["uniform"])
    sampler = RandomPair.trace(
        key, target, independent(record), n=N, norm="l1", positions="average"
    )
    assert sampler.shortcut == "two records"

    @jax.jit
    @jax.vmap
    def drawn(index):
        return jax.vmap(lambda i: sampler.two_records(jax.random.fold_in(key, index), i))(
            jnp.arange(N, dtype=jnp.int32)
        )

    indices = jnp.arange(5, dtype=jnp.uint32)
    old, new = drawn(indices)
    records = jax.jit(jax.vmap(lambda index: sampler.records_of(key, index)))(indices)
    assert_same(old, jax.tree.map(lambda leaf: leaf[:, :N], records))
    spare = jax.tree.map(lambda leaf: jnp.repeat(leaf[:, N:], N, axis=1), records)
    assert_same(new, spare)


@pytest.mark.parametrize("positions", ["last", "average", "each"])
def test_distances_are_the_same_bits_as_from_whole_databases(key, positions):
    """Of 64ths, whose sums are exact in any order."""
    oracle = independent(lambda key: jnp.floor(64 * jax.random.uniform(key, (2,))) / 64)
    target = dpjax.targets.summable(lambda x: x)
    settings = {"n": 5, "norm": "l1", "m": 20, "positions": positions}
    two = dpjax.sample_distances(key, target, oracle, **settings)
    whole = dpjax.sample_distances(key, lambda x: target(x), oracle, **settings)
    np.testing.assert_array_equal(two, whole)
    assert len(np.unique(two)) > 10


def test_a_fingerprint_is_that_of_the_program(key):
    def fingerprint(oracle):
        sampler = RandomPair.trace(key, jnp.mean, oracle, n=3, norm="l1", positions="last")
        return sampler.oracle.fingerprint

    oracle = independent(jax.random.uniform)
    assert fingerprint(oracle) == fingerprint(independent(lambda key: jax.random.uniform(key)))
    assert fingerprint(oracle) == fingerprint(lambda key, n: oracle(key, n))
    assert fingerprint(oracle) != fingerprint(independent(jax.random.normal))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="record must be"):
        independent(jnp.zeros(3))


def test_records_that_ignore_their_key_are_refused(key):
    with pytest.raises(ValueError, match="oracle must use its key"):
        dpjax.sample_sensitivity(
            key, jnp.mean, independent(lambda key: jnp.ones(())), n=3, norm="l1", m=100
        )
