"""Features scaled into the unit ball, which bounds what one record contributes."""

import jax
import jax.numpy as jnp

from dpjax._exact._numerics import compute_dtype


def into_unit_ball(x: jax.Array) -> jax.Array:
    """Vectors along the last axis, scaled to length 1 where they are longer; NaN counts as 0.

    Lengths are rounded up, so that what comes out, of float32 at least, is no longer than 1.
    """
    x = x.astype(compute_dtype(x.dtype))
    # Large enough for any feature, small enough for a square: an infinity must not become NaN.
    x = jnp.clip(jnp.where(jnp.isnan(x), 0, x), -1e15, 1e15)
    length = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    margin = 1 + (x.shape[-1] + 8) * float(jnp.finfo(x.dtype).eps)
    return x / jnp.maximum(length * margin, 1)
