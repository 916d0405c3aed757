"""Public records with noise: an oracle that also draws records between the public ones."""

from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._records import record_arrays
from dpjax.base import Oracle
from dpjax.oracles._resample import resample


def smoothed_resample(records: Any, bandwidth: float | None = None) -> Oracle:
    """The smoothed bootstrap: resampled public records plus Gaussian noise on their floats.

    The noise of a coordinate has `bandwidth` times the coordinate's standard deviation among the
    public records. Integers and booleans are resampled as they are.

    Args:
        records: a pytree of arrays with a common leading axis: public records, at least 2. A
            DataFrame counts as the dict of its columns.
        bandwidth: above 0; by default p^(-1/5) for p public records, Silverman's rate.

    Returns:
        An `Oracle`: `oracle(key, n)` draws a database of n independent records.

    Raises:
        TypeError: if the records are not real arrays.
        ValueError: if they have no common leading axis, fewer than 2 records, or if bandwidth is
            not above 0.

    Formal guarantees:
        A guarantee under this oracle speaks of the smoothed public records, not of the population
        that they came from; `dpjax.accounting.transfer` bounds the difference.

    Source:
        Silverman (1986), Section 3.4 and 6.4.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> oracle = dpjax.oracles.smoothed_resample(jnp.array([31.0, 44.0, 58.0]))
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5,)
    """
    public, count = record_arrays("records", records, least=2)
    width = count**-0.2 if bandwidth is None else _checks.positive("bandwidth", bandwidth)
    draw = resample(public)
    spread = jax.tree.map(lambda leaf: width * jnp.std(leaf.astype(float), axis=0), public)

    def oracle(key: jax.Array, n: int) -> Any:
        key_choice, key_noise = jax.random.split(key)
        leaves, structure = jax.tree.flatten(draw(key_choice, n))
        keys = list(jax.random.split(key_noise, len(leaves)))
        smoothed = [
            _smooth(leaf_key, leaf, scale)
            for leaf_key, leaf, scale in zip(keys, leaves, jax.tree.leaves(spread), strict=True)
        ]
        return jax.tree.unflatten(structure, smoothed)

    return oracle


def _smooth(key: jax.Array, leaf: jax.Array, scale: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf + scale.astype(leaf.dtype)[None] * jax.random.normal(key, leaf.shape, leaf.dtype)
