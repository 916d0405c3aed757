"""Exact selection of an order statistic in linear time."""

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import _checks
from dpjax._numerics import compute_dtype


def order_statistic(distances: jax.Array, k: int | jax.Array) -> jax.Array:
    """The exact k-th smallest of m distances, in O(m) and without sorting.

    Non-negative floats order like their bit patterns, so the k-th smallest is the largest pattern
    with fewer than k distances below it: its bits are found from the top, one counting pass each
    (31 in float32, 63 in float64). Jit-able and vmap-able.

    Args:
        distances: shape (m,), non-negative; NaN and negative numbers count as infinite.
        k: which one, counted from 1. A traced k out of range gives NaN.

    Returns:
        A scalar of the dtype of `distances` (float32 at least).

    Raises:
        TypeError: if k is not an integer or the distances are not floats.
        ValueError: if `distances` is not a non-empty vector or k is not between 1 and m.

    Formal guarantees:
        None of its own. At the k of an operating point it is the estimate that
        `dpjax.operating_point` speaks of; passed on as a bare number it would be taken for a
        global bound, so use `dpjax.sample_sensitivity` for anything that is published.

    Source:
        Algorithm 1 of Rubinstein and Aldà (2017), whose sort needs only this element.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> float(dpjax.order_statistic(jnp.array([3.0, jnp.inf, 1.0, 2.0]), 3))
        3.0
    """
    distances = jnp.asarray(distances)
    if distances.ndim != 1 or distances.size == 0:
        raise ValueError(f"distances must have shape (m,), m >= 1, got {distances.shape}")
    if not jnp.issubdtype(distances.dtype, jnp.floating):
        raise TypeError(f"distances must be floats, got dtype {distances.dtype}")
    m = distances.shape[0]
    if not _checks.is_traced(k):
        k = _checks.integer("k", k, least=1, most=m)
    elif not jnp.issubdtype(jnp.asarray(k).dtype, jnp.integer):
        raise TypeError(f"k must be an integer, got a traced {jnp.asarray(k).dtype}")
    return _select(distances.astype(compute_dtype(distances.dtype)), jnp.asarray(k))


@jax.jit
def _select(distances: jax.Array, k: jax.Array) -> jax.Array:
    selected = select(distances, k)
    return jnp.where((k >= 1) & (k <= distances.size), selected, jnp.nan)


def select(distances: jax.Array, k: jax.Array, *, axis: str | None = None) -> jax.Array:
    """The k-th smallest element of an array, or of the shards of one along a mesh axis.

    Counts are added up over the axis; distances stay where they are.
    """
    width = 8 * distances.dtype.itemsize
    unsigned = jnp.dtype(f"uint{width}")
    # abs turns -0.0, whose sign bit is set, into 0.0.
    ordered = jnp.where(distances >= 0, jnp.abs(distances), jnp.inf)
    patterns = lax.bitcast_convert_type(ordered, unsigned)
    rank = k.astype(jnp.uint32)

    def fix_bit(step: jax.Array, prefix: jax.Array) -> jax.Array:
        bit = (width - 2 - step).astype(unsigned)
        candidate = prefix | lax.shift_left(jnp.ones((), unsigned), bit)
        below = jnp.sum(patterns < candidate, dtype=jnp.uint32)
        below = below if axis is None else lax.psum(below, axis)
        return jnp.where(below < rank, candidate, prefix)

    pattern = lax.fori_loop(0, width - 1, fix_bit, jnp.zeros((), unsigned))
    return lax.bitcast_convert_type(pattern, distances.dtype)
