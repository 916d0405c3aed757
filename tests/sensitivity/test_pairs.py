"""Both databases of a pair, one after the other and in one loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._core._values import Target
from dpjax.sensitivity._pairs import RandomPair, neighboring_pair


def _records(key: jax.Array, n: int) -> dict[str, jax.Array]:
    kx, ky = jax.random.split(key)
    return {"x": jax.random.uniform(kx, (n, 2)), "y": jax.random.bernoulli(ky, 0.5, (n,))}


def _searched(database: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A loop that takes as many steps as there are labels, a different number in each database."""
    count = jnp.sum(database["y"])
    start = jnp.asarray(0), jnp.asarray(0.5)
    steps, w = jax.lax.while_loop(
        lambda at: at[0] < count, lambda at: (at[0] + 1, jnp.arctan2(at[1], 3.0) + 1), start
    )
    return {"w": w, "steps": steps}


def _pair(target: Target) -> RandomPair:
    key = jax.random.key(0)
    return RandomPair.trace(key, target, _records, n=5, norm="l1", positions="last")


def test_one_loop_over_both_databases_has_the_same_values() -> None:
    pair, key, index = _pair(_searched), jax.random.key(1), jnp.uint32(0)

    def both_ways(key: jax.Array) -> object:
        databases = neighboring_pair(pair.records_of(key, index), 4)
        return pair._one_by_one(index, *databases), pair._together(index, *databases)

    alone, together = jax.jit(jax.vmap(both_ways))(jax.random.split(key, 8))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), alone, together)
    value, other = alone
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (value, other)), strict=True))


@pytest.mark.parametrize(("platform", "loops"), [("cpu", 2), ("cuda", 1), ("tpu", 1)])
def test_accelerators_have_one_loop_for_both_databases(platform: str, loops: int) -> None:
    pair = _pair(_searched)
    arguments = jax.random.key(0), jnp.uint32(0), jnp.uint32(0)
    lowered = jax.jit(pair.distance).trace(*arguments).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("atan2") == loops


def test_a_target_has_loops_where_a_step_is_repeated() -> None:
    def scanned(database: dict[str, jax.Array]) -> jax.Array:
        return jax.lax.scan(lambda total, x: (total + x, None), jnp.zeros(2), database["x"])[0]

    assert _pair(scanned).target.has_loops
    assert not _pair(lambda database: jnp.mean(database["x"])).target.has_loops


def test_a_cpu_computes_the_records_of_a_pair_once() -> None:
    """XLA drops barriers on CPUs, and would draw a record again for every number made of it."""

    def oracle(key: jax.Array, n: int) -> jax.Array:
        return jax.random.uniform(key, (n,)) * 0.1234

    def target(database: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(database[:, None] * jnp.arange(3.0)[None]), axis=0)

    key = jax.random.key(0)
    pair = RandomPair.trace(key, target, oracle, n=50, norm="l1", positions="last")
    chunk = jax.jit(jax.vmap(pair.distance, (None, 0, None)))
    compiled = chunk.lower(key, jnp.arange(4, dtype=jnp.uint32), jnp.uint32(0)).compile()
    assert str(compiled.as_text()).count("constant(0.1234)") == 1
