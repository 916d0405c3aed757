"""Keys that are spread over devices: the same bits as on one."""

import pytest


@pytest.mark.slow
def test_keys_spread_over_devices_draw_the_same(run_python):
    run_python(
        """
import jax, jax.numpy as jnp, numpy as np, dpjax
from dpjax import queries
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))
keys = jax.random.split(dpjax.random.seeded_key(0), 4)
scores = jnp.array([0, 1, 3, 2])
codes = jnp.asarray(dpjax.targets.encode_text(["ab"] * 30 + ["b"] * 9, width=2))
draws = (
    lambda key: queries.top_k(1.0, 1.0, k=2)(key, scores).value,
    lambda key: queries.select_each(1.0, 1.0, count=2)(key, jnp.stack([scores, scores])).value,
    lambda key: queries.name_search(1.0, width=2, threshold=5, capacity=2)(key, codes).value,
    lambda key: dpjax.unary_encoding(1.0, 3)(key, jnp.arange(3)).value,
)
for draw in draws:
    alone = jax.vmap(draw)(keys)
    spread = jax.shard_map(jax.vmap(draw), mesh=mesh, in_specs=P("keys"), out_specs=P("keys"))
    np.testing.assert_array_equal(jax.jit(spread)(keys), alone)
""",
        devices=2,
    )
