"""Selects the k-th smallest of many floats exactly, in linear time."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype


def order_statistic(distances: jax.Array, k: int | jax.Array) -> jax.Array:
    """The exact k-th smallest of m distances, in O(m) and without sorting.

    Non-negative floats sort like their bit patterns, read as unsigned integers. So the k-th
    smallest distance is the largest bit pattern with fewer than k distances below it. Bisection
    finds this pattern, with one pass over the distances for each bit (31 in float32, 63 in
    float64). For concrete distances on a CPU, NumPy selects instead, which takes fewer passes and
    no compilation. The function works under `jit` and `vmap`.

    Args:
        distances: shape (m,), non-negative; NaN and negative numbers count as infinite.
        k: the rank, counted from 1. A traced k out of range gives NaN.

    Returns:
        A scalar of the dtype of `distances` (float32 at least).

    Raises:
        TypeError: if k is not an integer or the distances are not floats.
        ValueError: if `distances` is not a non-empty vector or k is not between 1 and m.

    Formal guarantees:
        None of its own. If k comes from `dpjax.operating_point`, the result is the estimated
        sensitivity. But a mechanism treats a bare number as a global bound, so use
        `dpjax.sample_sensitivity` for anything that is published.

    Source:
        Algorithm 1 of Rubinstein and Aldà (2017), which sorts all distances to find this element.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> float(dpjax.order_statistic(jnp.array([3.0, jnp.inf, 1.0, 2.0]), 3))
        3.0
    """
    distances = jnp.asarray(_checks.real_arrays("distances", distances))
    if distances.ndim != 1 or distances.size == 0:
        raise ValueError(f"distances must have shape (m,), m >= 1, got {distances.shape}")
    if not jnp.issubdtype(distances.dtype, jnp.floating):
        raise TypeError(f"distances must be floats, got dtype {distances.dtype}")
    m = distances.shape[0]
    if not _checks.is_traced(k):
        k = _checks.integer("k", k, least=1, most=m)
    elif not jnp.issubdtype(jnp.asarray(k).dtype, jnp.integer):
        raise TypeError(f"k must be an integer, got a traced {jnp.asarray(k).dtype}")
    distances = distances.astype(compute_dtype(distances.dtype))
    if not _checks.any_traced(distances, k):
        platforms = [device.platform for device in distances.devices()]
        if platforms == ["cpu"]:
            device = distances.sharding if distances.committed else None
            return jnp.asarray(select_on_host(np.asarray(distances), int(k)), device=device)
    return _select(distances, jnp.asarray(k))


@jax.jit
def _select(distances: jax.Array, k: jax.Array) -> jax.Array:
    selected = select(distances, k)
    return jnp.where((k >= 1) & (k <= distances.size), selected, jnp.nan)


def select_on_host(distances: np.ndarray, k: int) -> np.floating:
    """Returns the k-th smallest element of an array, if it is in the memory of this host."""
    floats = distances.reshape(-1) + distances.dtype.type(0)  # A copy, in which -0.0 becomes 0.0.
    # NumPy partitions unsigned integers faster than floats. The bit patterns of NaN and of negative
    # numbers are larger than that of infinity.
    patterns = floats.view(f"uint{8 * floats.itemsize}")
    patterns.partition(k - 1)
    selected = floats[k - 1]
    return selected if selected >= 0 else floats.dtype.type(np.inf)


def select(distances: jax.Array, k: jax.Array, *, axis: str | None = None) -> jax.Array:
    """Returns the k-th smallest element of an array, or of all shards along a mesh axis.

    Devices exchange only counts. Distances stay on their devices.
    """
    patterns, rank = _patterns(distances.reshape(-1)), k.astype(jnp.uint32)
    infinity = _patterns(jnp.full((), jnp.inf, distances.dtype))

    def halve(_: jax.Array, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = low + (high - low) // 2
        below = jnp.sum(patterns < middle, dtype=jnp.uint32)
        few = (below if axis is None else lax.psum(below, axis)) < rank
        return jnp.where(few, middle, low), jnp.where(few, high, middle)

    # Each bit takes one pass over all distances. The number of passes does not depend on data. If
    # it did, an accelerator would wait for the host after each pass.
    bits = 8 * distances.dtype.itemsize - 1
    pattern, _ = lax.fori_loop(0, bits, halve, (jnp.zeros_like(infinity), infinity + 1))
    return lax.bitcast_convert_type(pattern, distances.dtype)


def _patterns(distances: jax.Array) -> jax.Array:
    unsigned = np.dtype(f"uint{8 * distances.dtype.itemsize}")
    infinity, zero = (np.array(x, distances.dtype).view(unsigned) for x in (np.inf, -0.0))
    # Integers are compared, because XLA compares subnormal floats as if they were 0. The bit
    # patterns of NaN and of negative numbers are larger than that of infinity.
    patterns = lax.bitcast_convert_type(distances, unsigned)
    return jnp.where(patterns == zero, 0, jnp.minimum(patterns, infinity))
