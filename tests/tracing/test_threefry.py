"""Rounds of threefry that are written out give the bits of JAX, for every draw."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

import dpjax
from dpjax._tracing._programs import Program
from dpjax._tracing._threefry import drawn

R = jax.random


def in_a_loop(key: jax.Array) -> jax.Array:
    return lax.map(lambda i: R.normal(R.fold_in(key, i), (3,)), jnp.arange(4))


def on_a_condition(key: jax.Array) -> jax.Array:
    one, two = R.split(key)
    return lax.cond(R.bernoulli(one), R.normal, R.uniform, two)


def until_accepted(key: jax.Array) -> jax.Array:
    return R.gamma(key, 0.7, (5,))


DRAWS = {
    "8 bits": lambda key: R.bits(key, (33,), jnp.uint8),
    "16 bits": lambda key: R.bits(key, (33,), jnp.uint16),
    "32 bits": lambda key: R.bits(key, (5, 7)),
    "nothing": lambda key: R.bits(key, (0,)),
    "many keys": lambda key: jax.vmap(R.bits)(R.split(key, 6)),
    "keys of keys": lambda key: R.key_data(jax.vmap(R.split)(R.split(key, (2, 3)).reshape(-1))),
    "one key, many numbers": lambda key: R.key_data(
        jax.vmap(R.fold_in, (None, 0))(key, jnp.arange(9))
    ),
    "as many keys as numbers": lambda key: R.key_data(
        jax.vmap(R.fold_in)(R.split(key, 9), jnp.arange(9))
    ),
    "many keys, one number": lambda key: R.key_data(
        jax.vmap(R.fold_in, (0, None))(R.split(key, 9), 2**31)
    ),
    "a raw key": lambda key: R.uniform(R.key_data(key), (4,)),
    "a key that is closed over": lambda key: R.normal(R.fold_in(R.key(7), R.bits(key))),
    "integers": lambda key: R.randint(key, (9,), 0, 1000),
    "normals": lambda key: R.normal(key, (100,)),
    "a loop": in_a_loop,
    "a condition": on_a_condition,
    "rejection": until_accepted,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_has_the_bits_of_jax(draw: Callable[[jax.Array], jax.Array]) -> None:
    keys = R.split(R.key(1), 3)
    lanes = jax.jit(jax.vmap(lambda key: drawn(draw, key)))(keys)
    np.testing.assert_array_equal(lanes, jax.jit(jax.vmap(draw))(keys))


@pytest.mark.parametrize("name", ["32 bits", "keys of keys"])
def test_draws_that_are_not_partitionable_have_them_too(name: str) -> None:
    draw, key = DRAWS[name], R.key(1)
    with jax.threefry_partitionable(False):
        found, by_jax = jax.jit(partial(drawn, draw))(key), draw(key)
    np.testing.assert_array_equal(found, by_jax)
    assert not np.array_equal(found, draw(key))


@pytest.mark.parametrize("key", [R.key(1, impl="rbg"), dpjax.random.seeded_key(1)], ids=str)
def test_keys_of_other_kinds_draw_as_before(key: jax.Array) -> None:
    np.testing.assert_array_equal(drawn(DRAWS["normals"], key), DRAWS["normals"](key))


def lowered(draw: Callable[..., jax.Array], platform: str) -> str:
    def draws(key: jax.Array, numbers: jax.Array) -> jax.Array:
        return jax.vmap(lambda i: R.normal(R.fold_in(key, i)))(numbers)

    traced = jax.jit(lambda *xs: draw(draws, *xs)).trace(R.key(0), jnp.arange(20))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_cpu_runs_no_loop_and_accelerators_what_jax_runs() -> None:
    by_jax, ours = (partial(lowered, draw) for draw in (lambda draw, *xs: draw(*xs), drawn))
    assert "stablehlo.while" in by_jax("cpu")
    assert "stablehlo.while" not in ours("cpu")
    assert "stablehlo.reduce" in ours("cpu")
    assert "stablehlo.reduce" not in ours("cuda")


def test_programs_on_other_devices_are_others() -> None:
    """The mesh is a part of the types in a program, also of an inner one that JAX keeps."""

    program = Program.trace("oracle", lambda key: R.normal(key, (3,)), R.key(0))

    def draw(key: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(drawn(program, key), jnp.uint32)

    for size in (8, 2):
        mesh, spread = AbstractMesh((size,), ("devices",)), PartitionSpec("devices")
        spread_draw = jax.shard_map(
            draw, mesh=mesh, in_specs=PartitionSpec(), out_specs=spread, check_vma=False
        )
        try:
            shape = jax.eval_shape(spread_draw, R.key(0)).shape
        except ValueError as error:
            pytest.fail(f"a program of another mesh was run: {error}")
        assert shape == (3 * size,)
