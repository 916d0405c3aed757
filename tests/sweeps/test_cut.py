"""Draws of a sweep are programs of their own, and draw what they draw inside of a larger one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._tracing._programs import Program
from dpjax.sweeps._parts import cut_at_draws


def draw(key, x, n):
    key_one, key_other = jax.random.split(key)
    noise = dpjax.laplace(1 / n, x)(key_one, x).value
    return noise + (jax.random.bits(key_other, (n,)).max() >> 8).astype(jnp.float32)


def in_loops_and_under_keys_of_values(key, x, n):
    def bits(key):
        return (jax.random.bits(key, (n,)).max() >> 8).astype(jnp.float32)

    key_first, key_second, key_third = jax.random.split(key, 3)
    public = bits(jax.random.key(5))
    in_loop = jax.lax.map(bits, jax.random.split(key_first, n)).max()
    chosen = jax.lax.cond(x > 1, lambda: bits(key_third), lambda: jnp.float32(-1))
    of_value = bits(jax.random.fold_in(key_second, (10 * x).astype(jnp.int32)))
    return jnp.stack([public, in_loop, of_value, chosen, jax.jit(bits)(key_second)])


def in_lanes(key, x, n):
    """Keys of the kind of the cell's, and others."""
    words = jax.random.key_data(key)[:2]
    other = jax.random.wrap_key_data(words, impl="threefry2x32")
    keys, others = jax.random.split(key, n), jax.random.split(other, n)
    bits = jax.vmap(jax.random.bits)(keys) ^ jax.vmap(jax.random.bits)(others)
    return x + (bits.max() >> 8).astype(jnp.float32)


def written_to(key, x, n):
    """No output shows that the third line computes something."""
    bits = (jax.random.bits(key) >> 8).astype(jnp.float32)
    reference = jax.new_ref(jnp.zeros(n))
    reference[0] = x * bits
    return reference[...] + bits


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (draw, "seeded"),
        (in_loops_and_under_keys_of_values, "threefry"),
        (in_lanes, "seeded"),
        (in_lanes, "threefry"),
        (written_to, "threefry"),
    ],
)
def test_no_bit_depends_on_the_cut(function, kind):
    """Also of draws in loops, under keys of values, and beside arrays that are written to."""
    key = dpjax.random.seeded_key(0) if kind == "seeded" else jax.random.key(0)
    keys, xs = jax.random.split(key, 4), jnp.array([0.5, 2.0, 3.0, 4.0])
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype), (keys, xs))
    program = Program.trace("function", lambda key, x: function(key, x, 3), *specs)
    cut = cut_at_draws(program)
    assert bool(cut.draws) == (function is not written_to)
    drawn = [jax.jit(jax.vmap(one))(keys) for one in cut.draws]
    found, expected = jax.jit(jax.vmap(cut.rest))(keys, xs, *drawn), jax.vmap(program)
    np.testing.assert_array_equal(found, jax.jit(expected)(keys, xs))


def test_choices_share_their_draws(compilations):
    """One program for the keys of cells, one that splits them, and one for the noise."""

    def error(key, n):
        key_data, key_release = jax.random.split(key)
        words = jax.random.key_data(key_data)[:n].sum() >> 8
        return dpjax.laplace(1 / n, 1.0)(key_release, words.astype(jnp.float32)).value

    def swept():
        found = dpjax.sweep(dpjax.random.seeded_key(0), error, static={"n": [1, 2]}, repeats=77)
        return found.value.values

    names = compilations(swept)
    counts = {kind: names.count(f"jit(_compiled_{kind})") for kind in ("keys", "draw", "rest")}
    assert counts == {"keys": 1, "draw": 2, "rest": 2}


def test_a_rule_for_vmap_is_left_out():
    """A compiled draw would keep a rule that changes later."""
    ruled = jax.custom_batching.custom_vmap(lambda words: words)
    ruled.def_vmap(lambda size, mapped, x: (x + np.uint32(1), True))

    def swept(words):
        def drawn(key):
            data = words(jax.random.key_data(jax.random.fold_in(key, 3)))
            return jax.random.uniform(jax.random.wrap_key_data(data, impl="threefry2x32"))

        return dpjax.sweep(jax.random.key(1), drawn, repeats=3).value.values

    np.testing.assert_array_equal(swept(ruled), swept(lambda words: words))
