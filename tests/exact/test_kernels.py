"""Results that one loop computes are what each is alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._exact import _kernels


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1000,), (3, 5)])
def test_results_stay_what_they_are(shape):
    bits = np.random.default_rng(0).integers(2**32, size=(2, *shape), dtype=np.uint32)
    x, y = map(jnp.asarray, bits)

    def results(x, y):
        total = x + y
        return {"sum": total, "both": (total ^ x, total < x, -total.astype(jnp.int32))}

    together = jax.jit(lambda x, y: _kernels.at_once(results(x, y)))(x, y)
    alone = results(x, y)
    assert [z.dtype for z in jax.tree.leaves(together)] == [z.dtype for z in jax.tree.leaves(alone)]
    jax.tree.map(np.testing.assert_array_equal, together, alone)


def test_one_loop_computes_what_several_results_share():
    """What it is for: XLA would compile a loop for each, if it no longer fused reductions so."""

    def mixed(x, y):
        total = x + y
        return total, total ^ x, total - (x ^ y)

    x = jnp.arange(4096, dtype=jnp.uint32)
    program = jax.jit(lambda x, y: _kernels.reduced(mixed(x, y))).lower(x, x).compile()
    assert program.as_text().count(" fusion(") == 1


def _odd_arrays():
    bits = np.random.default_rng(0).integers(2**16, size=(3, 64), dtype=np.uint16)
    nans = np.tile(np.array([0x7F800001, 0xFFC00002, 0x80000000, 1], np.uint32), (3, 1))
    return {
        "bfloat16": jax.lax.bitcast_convert_type(jnp.asarray(bits), "bfloat16"),
        "float16": jax.lax.bitcast_convert_type(jnp.asarray(bits), "float16"),
        "NaNs, -0 and a subnormal": jax.lax.bitcast_convert_type(jnp.asarray(nans), "float32"),
        "integers": jnp.asarray(bits),
        "booleans": jnp.asarray(bits % 2 == 0),
        "complex": jnp.asarray(bits * (1 + 2j), "complex64"),
        "narrow": jnp.ones((3, 4), "int4"),
        "no columns": jnp.zeros((3, 2, 0)),
        "keys": jax.random.split(jax.random.key(0), (3, 2)),
    }


def test_written_arrays_keep_every_bit():
    """Tried: every kind of dtype that a record may have, in lanes of a batch."""
    arrays = _odd_arrays()
    jax.tree.map(_same_bits, jax.jit(jax.vmap(_kernels.written))(arrays), arrays)


def _same_bits(found, given):
    assert found.dtype == given.dtype
    if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        found, given = jax.random.key_data(found), jax.random.key_data(given)
    assert np.asarray(found).tobytes() == np.asarray(given).tobytes()


def test_written_arrays_have_a_derivative():
    slope = jax.grad(lambda scale: jnp.sum(_kernels.written(scale * jnp.arange(3.0))))
    assert slope(2.0) == 3
