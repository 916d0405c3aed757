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
