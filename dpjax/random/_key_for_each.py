"""A key for each value: two values under one key share their noise, which reveals their difference.

The check returns the key that noise is drawn from. So the release depends on it, and no
transformation removes the check as dead code.
"""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._core._types import PyTree, Value
from dpjax._tracing import _shards

# The largest number that can be folded in. Callers number from 0, so this end is free.
_LAST = np.uint32(2**32 - 1)


def key_for_each(key: jax.Array, value: Value) -> jax.Array:
    """The same key, to draw from; ValueError if `vmap` or `shard_map` maps values and not keys."""
    _shards.refuse_unchecked()
    # An empty draw marks the key as used for `jax.debug_key_reuse`, which would not see the later
    # draws: they are from a key that is wrapped anew.
    used = jax.random.bits(key, (0,))
    data = _checked(jax.random.key_data(key), used, value)
    if alone := _shards.varying_axes(value) - _shards.varying_axes(data):
        raise ValueError(_message(f"jax.shard_map shards values over {sorted(alone)}"))
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return _other_than_on_earlier_shards(key)


def _other_than_on_earlier_shards(key: jax.Array) -> jax.Array:
    """The same key, but a new one on a shard if an earlier shard has the same key.

    A key after `jax.lax.pcast` varies over shards in its type alone: all shards have the same bits.
    """
    axes = tuple(sorted(_shards.varying_axes(key)))
    if not axes:
        return key
    data = jax.random.key_data(key)
    everywhere = lax.all_gather(data, axes)
    same = jnp.all(everywhere == data[None], axis=1)
    earlier = jnp.arange(len(everywhere)) < lax.axis_index(axes)
    repeated = jnp.sum(same & earlier, dtype=jnp.uint32)
    other = jax.random.fold_in(key, _LAST - repeated)
    return jnp.where(repeated == 0, key, other)


@jax.custom_jvp
def _checked(key_data: jax.Array, used: jax.Array, value: Value) -> jax.Array:
    return _mapped_alike(key_data, used, value)


@_checked.defjvp
def _without_derivative(
    primals: tuple[jax.Array, jax.Array, Value], tangents: PyTree
) -> tuple[jax.Array, PyTree]:
    """Keys have no derivative. JAX's own rule for a `custom_vmap` may recurse without end."""
    del tangents
    data = _checked(*primals)
    return data, np.zeros(data.shape, jax.dtypes.float0)


@custom_vmap
def _mapped_alike(key_data: jax.Array, used: jax.Array, value: Value) -> jax.Array:
    del used, value
    return key_data


@_mapped_alike.def_vmap
def _mapped(
    axis_size: int,
    mapped: tuple[bool, bool, PyTree],
    key_data: jax.Array,
    used: jax.Array,
    value: Value,
) -> tuple[jax.Array, bool]:
    del axis_size
    key_is_mapped, _, value_is_mapped = mapped
    if any(jax.tree.leaves(value_is_mapped)) and not key_is_mapped:
        raise ValueError(_message("jax.vmap maps over values"))
    return _mapped_alike(key_data, used, value), key_is_mapped


def forwards_key(equation: jex.JaxprEqn) -> bool:
    """Whether a traced operation returns its first operand, and checks how `vmap` maps others."""
    return getattr(equation.params.get("rule"), "rule", None) is _mapped


def _message(cause: str) -> str:
    return (
        f"key must be one for each value: {cause} and not over keys. One draw for all values would"
        " release their differences exactly; split the key, and map over both"
    )
