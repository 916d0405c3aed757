"""Exact selection against a sort."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import order_statistic
from dpjax.sensitivity._order_statistics import select

INF, NAN = np.inf, np.nan


def every_rank(distances):
    """All the order statistics at once."""
    ranks = jnp.arange(1, len(distances) + 1)
    return np.asarray(jax.vmap(order_statistic, in_axes=(None, 0))(jnp.asarray(distances), ranks))


def sorted_distances(distances):
    """What they should be: NaN and negative numbers count as infinite, and -0.0 is 0.0."""
    distances = np.asarray(distances)
    return np.sort(np.where(distances >= 0, np.abs(distances), INF).astype(distances.dtype))


CASES = {
    "one": [3.5],
    "ties": [2.0, 1.0, 2.0, 2.0, 1.0, 0.0, 0.0],
    "equal": [7.0] * 9,
    "infinities": [INF, 1.0, INF, 0.0],
    "all infinite": [INF, INF],
    "nan": [NAN, 1.0, -NAN, 2.0],
    "negative": [-1.0, 5.0, -INF, 3.0],
    "negative subnormal": [-1e-45, 2.0, -1e-40, 0.0],
    "zeros of both signs": [-0.0, 0.0, -0.0, 1.0],
    "subnormal": [1e-45, 0.0, 1e-40, 3e-39, 1.2e-38],
    "extremes": [3.4e38, 1.2e-38, 1.0, 1.0000001, 0.99999994],
}


@pytest.mark.parametrize("name", CASES)
def test_every_k_agrees_with_a_sort(name):
    distances = np.array(CASES[name], np.float32)
    found = every_rank(distances)
    np.testing.assert_array_equal(found, sorted_distances(distances))
    assert not np.signbit(found).any()  # 0, never -0
    on_host = [float(order_statistic(distances, k + 1)) for k in range(len(distances))]
    np.testing.assert_array_equal(on_host, found)


def random_distances(count, dtype):
    """Over the whole range of exponents, with ties."""
    rng = np.random.default_rng(5)
    exponents = rng.uniform(np.finfo(dtype).minexp, np.finfo(dtype).maxexp, count)
    distances = np.exp2(exponents).astype(dtype)
    return np.where(rng.random(count) < 0.2, distances[0], distances)


def test_every_k_on_random_distances():
    distances = random_distances(500, np.float32)
    np.testing.assert_array_equal(every_rank(distances), np.sort(distances))


def test_every_k_in_float64(x64):
    distances = random_distances(500, np.float64)
    found = every_rank(distances)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.sort(distances))
    assert float(order_statistic(jnp.array([1.0, 1.0 + 2**-52, 2.0]), 2)) == 1.0 + 2**-52


# Densities that are smooth or not, ties, and orders that a sample of every 84th misreads.
COUNT = 600_011
MANY = {
    "exponential": lambda rng: rng.standard_exponential(COUNT),
    "every exponent": lambda rng: np.exp2(rng.uniform(-149, 127, COUNT)),
    "sorted": lambda rng: np.sort(rng.random(COUNT)),
    "periodic": lambda rng: np.arange(COUNT) % 84,
    "two values": lambda rng: np.where(np.arange(COUNT) < COUNT // 2, 1.0, INF),
    "one value": lambda rng: np.zeros(COUNT),
    "zeros of both signs": lambda rng: np.where(rng.random(COUNT) < 0.5, -0.0, rng.random(COUNT)),
    "half nan": lambda rng: np.where(rng.random(COUNT) < 0.5, NAN, rng.standard_normal(COUNT)),
    "one outlier": lambda rng: np.append(np.full(COUNT - 1, 2.0), 3.0),
}


@pytest.mark.parametrize("name", MANY)
def test_many_distances(name):
    distances = MANY[name](np.random.default_rng(6)).astype(np.float32)
    expected = sorted_distances(distances)
    on_device = jnp.asarray(distances)
    for k in (1, 2, COUNT // 2, COUNT // 2 + 1, 570_123, COUNT - 1, COUNT):
        assert float(order_statistic(on_device, k)) == expected[k - 1], k
    assert float(jax.jit(order_statistic)(on_device, 570_123)) == expected[570_122]


def test_many_distances_in_float64(x64):
    distances = np.random.default_rng(6).standard_exponential(COUNT)
    for k in (1, 570_123, COUNT):
        assert float(order_statistic(distances, k)) == np.partition(distances, k - 1)[k - 1]


def test_many_distances_over_shards():
    shards = np.random.default_rng(8).standard_exponential((2, COUNT)).astype(np.float32)
    shards[1] += 1  # Shards that differ: their counts do.
    over_shards = jax.jit(
        jax.vmap(lambda shard, k: select(shard, k, axis="shards"), (0, None), axis_name="shards")
    )
    expected = np.sort(shards, axis=None)
    for k in (1, COUNT, 2 * COUNT - 3000):
        found = over_shards(shards, jnp.uint32(k))
        np.testing.assert_array_equal(found, [expected[k - 1]] * 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_are_widened(dtype):
    found = order_statistic(jnp.array([3.0, 1.5, 2.0], dtype), 2)
    assert found.dtype == jnp.float32
    assert float(found) == 2.0


def test_integers_are_refused():
    with pytest.raises(TypeError, match="distances must be floats, got dtype int32"):
        order_statistic(jnp.array([5, 3, 9]), 2)


@pytest.mark.parametrize("k", [np.int64(2), np.uint8(2), jnp.int32(2)])
def test_k_may_be_any_integer(k):
    assert float(order_statistic(jnp.array([5.0, 3.0, 9.0]), k)) == 5.0


def test_under_jit_and_vmap():
    distances = np.random.default_rng(7).random((4, 50)).astype(np.float32)
    eager = [order_statistic(row, 17) for row in distances]
    compiled = jax.jit(jax.vmap(lambda row: order_statistic(row, 17)))(distances)
    np.testing.assert_array_equal(compiled, eager)


def test_traced_k_out_of_range_gives_nan():
    ranks = jnp.array([-(2**31), -1, 0, 1, 3, 4, 2**31 - 1])
    found = jax.vmap(order_statistic, in_axes=(None, 0))(jnp.array([2.0, 1.0, 3.0]), ranks)
    np.testing.assert_array_equal(found, [NAN, NAN, NAN, 1.0, 3.0, NAN, NAN])


def test_a_traced_k_that_is_no_integer_is_refused():
    # Truncating it would take a smaller order statistic: less noise.
    with pytest.raises(TypeError, match="k must be an integer"):
        jax.jit(order_statistic)(jnp.array([2.0, 1.0, 3.0]), 2.7)


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"k must be .* got {k}"):
        order_statistic(jnp.ones(3), k)


@pytest.mark.parametrize("k", [1.0, "1", None, True])
def test_k_that_is_no_integer(k):
    with pytest.raises(TypeError, match="k must be an integer"):
        order_statistic(jnp.ones(3), k)


@pytest.mark.parametrize("shape", [(), (0,), (3, 1)])
def test_distances_must_be_a_vector(shape):
    with pytest.raises(ValueError, match=r"distances must (have shape|not be empty)"):
        order_statistic(jnp.ones(shape), 1)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
    for inner in jax.extend.core.subjaxprs(jaxpr):
        yield from primitives(inner)


def test_nothing_is_sorted():
    distances = jax.ShapeDtypeStruct((10,), jnp.float32)
    names = set(primitives(jax.make_jaxpr(lambda x: order_statistic(x, 3))(distances).jaxpr))
    assert not {name for name in names if "sort" in name or "top_k" in name}
    assert "sort" in set(primitives(jax.make_jaxpr(jnp.sort)(jnp.ones(10)).jaxpr))


def test_it_takes_a_loop_of_known_length():
    """An accelerator would wait for the host in every step of another."""
    assert "while" not in str(jax.make_jaxpr(select)(jnp.ones(8), jnp.uint32(1)))
