"""Features scaled into the unit ball, which bounds the influence of one record."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._exact._numerics import compute_dtype
from dpjax.targets._interval import clip_and_replace_nan


def into_unit_ball(x: jax.Array) -> jax.Array:
    """Vectors along the last axis, scaled to length 1 where they are longer; NaN counts as 0.

    Lengths are rounded up, so no result is longer than 1. Results are float32 or wider.
    """
    # Large enough for any feature, and its square is finite: infinity over infinity would be NaN.
    x = clip_and_replace_nan(x.astype(compute_dtype(x.dtype)), -1e15, 1e15)
    length = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    margin = 1 + (x.shape[-1] + 8) * float(np.finfo(x.dtype).eps)
    return x / jnp.maximum(length * margin, 1)
