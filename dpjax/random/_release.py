"""The one seam between mechanisms and noise: every draw that is published is made here.

The noise of this version is floating-point: see "What does not hold yet" in the README.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax._numerics import compute_dtype
from dpjax.random._noise import Noise, Sampler

# Covers the few roundings on the way to a draw, and parameters that crossed `jit` as float32.
OUTWARD = 1 + 2.0**-21

# Integer values and their noise are clamped so that no sum wraps. Clamping the noise at twice the
# bound of the sum changes nothing: whatever lies beyond lands on the bound of the sum anyway.
_INTEGER_BOUND = {4: 2**29, 8: 2**61}


def add_noise(
    key: jax.Array, value: Any, scale: Any, noise: Noise, *, zero_allowed: bool = False
) -> Any:
    """Adds independent noise of a scale to every coordinate of a pytree.

    NaN becomes 0, and values out of range are clamped, see `centered`: nothing about a private
    value decides whether or how it is released. Integers get noise rounded to integers, which is
    post-processing: x + round(Z) = round(x + Z). A scale that is NaN, infinite or not positive
    gives NaN, for integers the least of their dtype.

    Args:
        key: a typed key.
        value: a pytree of arrays.
        scale: a scalar.
        noise: the distribution at scale 1.
        zero_allowed: whether a scale of 0, no noise, was asked for by name.

    Returns:
        A pytree of the same structure and shapes. Floats keep their dtype; booleans and integers
        narrower than 32 bits become int32.
    """
    leaves, structure = jax.tree.flatten(value)
    keys = [key] if len(leaves) == 1 else list(jax.random.split(key, len(leaves)))
    released = []
    for leaf_key, leaf in zip(keys, leaves, strict=True):
        usable = usable_scale(scale, leaf.dtype, zero_allowed=zero_allowed)
        released.append(_add_to_array(leaf_key, leaf, usable, noise))
    return jax.tree.unflatten(structure, released)


def _add_to_array(key: jax.Array, x: jax.Array, scale: jax.Array, noise: Noise) -> jax.Array:
    center = centered(x)
    drawn = OUTWARD * scale * noise.sample(key, x.shape, scale.dtype)
    if jnp.issubdtype(center.dtype, jnp.integer):
        bound = _INTEGER_BOUND[center.dtype.itemsize]
        rounded = jnp.clip(jnp.round(drawn), -2.0 * bound, 2.0 * bound).astype(center.dtype)
        released = jnp.clip(center + rounded, -bound, bound)
        return jnp.where(jnp.isnan(scale), jnp.iinfo(center.dtype).min, released)
    return _checks.saturating_cast(center + drawn, x.dtype)


def usable_scale(scale: Any, dtype: Any, *, zero_allowed: bool = False) -> jax.Array:
    """The scale in the dtype of the computation; NaN where it could not carry noise."""
    dtype = compute_dtype(dtype)
    scale = jnp.asarray(scale).astype(dtype)
    limits = jnp.finfo(dtype)
    usable = (scale >= float(limits.tiny) / float(limits.eps)) & (scale < jnp.inf)
    return jnp.where(usable | (zero_allowed & (scale == 0)), scale, jnp.nan)


def check_scale(name: str, scale: Any, value: Any, *, zero_allowed: bool = False) -> None:
    """Refuses a concrete scale that the dtypes of a value cannot carry."""
    if _checks.is_traced(scale) or np.ndim(scale) > 0:
        return
    for leaf in jax.tree.leaves(value):
        limits = jnp.finfo(compute_dtype(leaf.dtype))
        carried = float(limits.tiny) / float(limits.eps) <= scale <= float(limits.max)
        if not carried and not (zero_allowed and scale == 0):
            raise ValueError(
                f"{name} {float(scale):.3g} is out of the range of {limits.dtype}: rescale the"
                " target's value, or enable float64"
            )


def centered(x: jax.Array) -> jax.Array:
    """An array as noise is added to it: in the computation's dtype, NaN replaced by 0, clamped.

    Clamped to half the largest float, or to 2^29 (2^61 for int64). Rounding the sum to a float is
    post-processing, so a value so large that noise hardly changes it needs no other bound.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        dtype = jnp.dtype("int64" if x.dtype.itemsize == 8 else "int32")
        bound = _INTEGER_BOUND[dtype.itemsize]
        whole = x.astype(dtype) if x.dtype == bool else _checks.saturating_cast(x, dtype)
        return jnp.clip(whole, -bound, bound)
    dtype = compute_dtype(x.dtype)
    bound = float(jnp.finfo(dtype).max) / 2
    return jnp.clip(jnp.where(jnp.isnan(x), 0, x).astype(dtype), -bound, bound)


def noisy_argmax(
    key: jax.Array,
    scores: jax.Array,
    temperature: Any,
    race: Sampler,
    *,
    zero_allowed: bool = False,
) -> jax.Array:
    """Index of the largest of score / temperature + noise: report noisy max.

    With Gumbel noise, index r is drawn with probability proportional to exp(score / temperature);
    with exponential noise, by permute-and-flip.

    Args:
        key: a typed key.
        scores: shape (K,); NaN counts as the lowest score.
        temperature: a scalar.
        race: draws the noise, `gumbel` or `exponential`.
        zero_allowed: whether a temperature of 0, no noise, was asked for by name.

    Returns:
        An int32 scalar; -1 where the temperature could carry no noise.
    """
    temperature = usable_scale(temperature, scores.dtype, zero_allowed=zero_allowed)
    drawn = race(key, scores.shape, temperature.dtype)
    logits = jnp.where(
        temperature == 0, -score_gaps(scores), -score_gaps(scores) / (OUTWARD * temperature) + drawn
    )
    return jnp.where(jnp.isnan(temperature), -1, jnp.argmax(logits).astype(jnp.int32))


def score_gaps(scores: jax.Array) -> jax.Array:
    """How far every score lies below the best one: exact for integers, finite for floats."""
    dtype = compute_dtype(scores.dtype)
    if jnp.issubdtype(scores.dtype, jnp.floating):
        limit = float(jnp.finfo(scores.dtype).max) / 4
        finite = jnp.clip(jnp.where(jnp.isnan(scores), -limit, scores), -limit, limit)
        finite = finite.astype(dtype)
        return jnp.max(finite) - finite
    if scores.dtype == bool:
        scores = scores.astype(jnp.int32)
    # The difference of two integers of a dtype always fits the unsigned dtype of that width.
    unsigned = jnp.dtype(f"uint{8 * scores.dtype.itemsize}")
    gaps = jnp.max(scores).astype(unsigned) - scores.astype(unsigned)
    return gaps.astype(dtype)


def keep_or_lie(key: jax.Array, categories: jax.Array, lie_weight: Any, count: int) -> jax.Array:
    """Randomized response: each lie has probability lie_weight / 2^32, exactly.

    Args:
        key: a typed key.
        categories: integers; out of range they are clamped to [0, count).
        lie_weight: uint32; 0 marks a parameter that could not carry noise.
        count: number of categories.

    Returns:
        int32 categories of the same shape; -1 where lie_weight is 0.
    """
    truth = in_range(categories, count)
    weight = jnp.asarray(lie_weight).astype(jnp.uint32)
    word = jax.random.bits(key, truth.shape, jnp.uint32)
    lie = (word // jnp.maximum(weight, 1)).astype(jnp.uint32)
    lies = lie < count - 1
    other = lie.astype(jnp.int32) + (lie.astype(jnp.int32) >= truth).astype(jnp.int32)
    return jnp.where(weight == 0, -1, jnp.where(lies, other, truth))


def in_range(categories: jax.Array, count: int) -> jax.Array:
    """Categories as int32, clamped to [0, count)."""
    return jnp.clip(_checks.saturating_cast(categories, jnp.int32), 0, count - 1)
