"""A key for each value: two values under one key share their noise, and their difference is public.

The check returns the key that noise is drawn from. So it is part of what is released, and no
transformation removes it as dead code.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax import _shards

# Of what may be folded in: nobody numbers from here.
_LAST = np.uint32(2**32 - 1)


def key_for_each(key: jax.Array, value: Any) -> jax.Array:
    """The same key; refuses to use it for values that are mapped over while it is not.

    Args:
        key: a typed key.
        value: a pytree of arrays that noise from this key is for.

    Returns:
        The key, to draw from.

    Raises:
        ValueError: under `vmap` over values alone, or `shard_map` that shards values alone.
    """
    _shards.refuse_unchecked()
    # An empty draw uses the key up, for `jax.debug_key_reuse`: what is drawn later, from a key that
    # is wrapped anew, it would not see.
    used = jax.random.bits(key, (0,))
    data = _checked(jax.random.key_data(key), used, value)
    if alone := _shards.varying_axes(value) - _shards.varying_axes(data):
        raise ValueError(_message(f"jax.shard_map shards values over {sorted(alone)}"))
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return _other_than_on_earlier_shards(key)


def _other_than_on_earlier_shards(key: jax.Array) -> jax.Array:
    """The same key, but a new one on a shard where an earlier one has the same.

    `jax.lax.pcast` makes a key that varies over shards in type alone.
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
def _checked(key_data: jax.Array, used: jax.Array, value: Any) -> jax.Array:
    return _mapped_alike(key_data, used, value)


@_checked.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    """Keys have no derivative; and that of a `custom_vmap` may recurse without end."""
    del tangents
    data = _checked(*primals)
    return data, np.zeros(data.shape, jax.dtypes.float0)


@custom_vmap
def _mapped_alike(key_data: jax.Array, used: jax.Array, value: Any) -> jax.Array:
    del used, value
    return key_data


@_mapped_alike.def_vmap
def _(
    axis_size: int, mapped: tuple[bool, bool, Any], key_data: jax.Array, used: Any, value: Any
) -> tuple[jax.Array, bool]:
    del axis_size
    key_is_mapped, _, value_is_mapped = mapped
    if any(jax.tree.leaves(value_is_mapped)) and not key_is_mapped:
        raise ValueError(_message("jax.vmap maps over values"))
    return _mapped_alike(key_data, used, value), key_is_mapped


def _message(cause: str) -> str:
    return (
        f"key must be one for each value: {cause} and not over keys, and would add one draw to all"
        " of them, so that their differences were released exactly; split the key, and map over"
        " both"
    )
