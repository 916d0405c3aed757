"""The one seam between mechanisms and noise: every draw that is published is made here.

Exact noise is integer noise on a grid (see `_grid_fit`); a float is made of it at the very end,
which is post-processing. Noise in floats is for sweeps where nothing is published.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax import _checks, _limbs
from dpjax._grid import power_of_two, round_to_grid
from dpjax._limbs import Limbs
from dpjax._numerics import compute_dtype
from dpjax.random._grid_fit import Calibration, GridFit, divided
from dpjax.random._noise import EXPONENTIAL, Noise, exponential, gumbel

# Noise in floats: covers the few roundings on the way to a draw.
_OUTWARD = 1 + 2.0**-21

# Values on the grid are clamped here, so that no sum with noise wraps.
_BOUND = 2**61
# Integer releases are clamped here; the least integer of the dtype marks a failure.
_INTEGER_BOUND = {4: 2**31 - 2, 8: 2**61}


def add_noise(key: jax.Array, value: Any, calibration: Calibration, noise: Noise) -> Any:
    """Adds independent noise to every coordinate of a pytree.

    NaN becomes 0, and values out of range are clamped: nothing about a private value decides
    whether or how it is released. Integers get noise rounded to integers. A scale that is NaN,
    infinite or not positive gives NaN, for integers the least of their dtype.

    Args:
        key: a typed key.
        value: a pytree of arrays.
        calibration: what the noise must cover.
        noise: the distribution.

    Returns:
        A pytree of the same structure and shapes. Floats keep their dtype; booleans and integers
        narrower than 32 bits become int32.
    """
    add = _add_in_floats if noise.lattice is None else _add_exactly
    leaves, structure = jax.tree.flatten(value)
    keys = [key] if len(leaves) == 1 else list(jax.random.split(key, len(leaves)))
    released = [
        _unless_zero(add(leaf_key, leaf, calibration, noise), leaf, calibration)
        for leaf_key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, released)


def _add_exactly(key: jax.Array, x: jax.Array, calibration: Calibration, noise: Noise) -> jax.Array:
    assert noise.lattice is not None
    fit = calibration.fit(noise.lattice, x.dtype)
    drawn = divided(noise.lattice.sample(key, x.shape), fit)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        dtype = integer_dtype(x.dtype)
        total = _limbs.add(_limbs.clip(_limbs.from_integers(x), _BOUND), drawn)
        bounded = _limbs.clip(total, _INTEGER_BOUND[dtype.itemsize])
        released = _limbs.to_integers(bounded, dtype)
        return jnp.where(jnp.isnan(fit.scale), jnp.iinfo(dtype).min, released)
    dtype = compute_dtype(x.dtype)
    total = _limbs.add(round_to_grid(x.astype(dtype), fit.exponent), drawn)
    released = _limbs.to_float(total, dtype) * power_of_two(fit.exponent, dtype)
    largest = float(jnp.finfo(dtype).max)
    released = jnp.clip(released, -largest, largest)
    return _checks.saturating_cast(jnp.where(jnp.isnan(fit.scale), jnp.nan, released), x.dtype)


def _add_in_floats(
    key: jax.Array, x: jax.Array, calibration: Calibration, noise: Noise
) -> jax.Array:
    scale = usable_scale(calibration.scale, x.dtype)
    drawn = _OUTWARD * scale * noise.sample(key, x.shape, scale.dtype)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _checks.saturating_cast(centered(x) + drawn, x.dtype)
    dtype = integer_dtype(x.dtype)
    # Half the dtype's range for the value, half for the noise.
    bound = 2.0 ** (8 * dtype.itemsize - 3)
    rounded = jnp.clip(jnp.round(drawn), -bound, bound).astype(dtype)
    released = jnp.clip(centered(x), -int(bound), int(bound)) + rounded
    return jnp.where(jnp.isnan(scale), jnp.iinfo(dtype).min, released)


def _unless_zero(released: jax.Array, x: jax.Array, calibration: Calibration) -> jax.Array:
    if not calibration.zero_allowed:
        return released
    bare = _checks.saturating_cast(centered(x), released.dtype)
    return jnp.where(jnp.asarray(calibration.scale) == 0, bare, released)


def usable_scale(scale: Any, dtype: Any) -> jax.Array:
    """The scale in the dtype of the computation; NaN where it could not carry noise."""
    dtype = compute_dtype(dtype)
    scale = jnp.asarray(scale).astype(dtype)
    limits = jnp.finfo(dtype)
    usable = (scale >= float(limits.tiny) / float(limits.eps)) & (scale < jnp.inf)
    return jnp.where(usable, scale, jnp.nan)


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


def integer_dtype(dtype: Any) -> Any:
    """The dtype in which integers are released."""
    return jnp.dtype("int64" if jnp.dtype(dtype).itemsize == 8 else "int32")


def centered(x: jax.Array) -> jax.Array:
    """An array as it is released without noise: NaN replaced by 0, clamped to what noise leaves."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        dtype = integer_dtype(x.dtype)
        bound = _INTEGER_BOUND[dtype.itemsize]
        whole = x.astype(dtype) if x.dtype == bool else _checks.saturating_cast(x, dtype)
        return jnp.clip(whole, -bound, bound)
    dtype = compute_dtype(x.dtype)
    bound = float(jnp.finfo(dtype).max) / 2
    return jnp.clip(jnp.where(jnp.isnan(x), 0, x).astype(dtype), -bound, bound)


def permute_and_flip_index(key: jax.Array, scores: jax.Array, calibration: Calibration) -> Any:
    """The largest of score + exponential noise (report noisy max), in integers.

    Let the noise of all other options be fixed. Option r wins where its noise reaches an integer
    threshold, with probability exp(-threshold / scale) if that is positive; a neighbor moves the
    threshold by at most twice the sensitivity. Ties go to the first option, whatever the scores.

    Args:
        key: a typed key.
        scores: shape (K,); NaN counts as the lowest score.
        calibration: at the scale 2 sensitivity / epsilon.

    Returns:
        An int32 scalar; -1 where the scale could carry no noise.
    """
    fit = calibration.fit(EXPONENTIAL, scores.dtype)
    race = _limbs.subtract(EXPONENTIAL.sample(key, scores.shape), _scaled_gaps(scores, fit))
    return _selected(_first_largest(race), scores, calibration, fit.scale)


def exponential_index(key: jax.Array, scores: jax.Array, calibration: Calibration) -> jax.Array:
    """Softmax by rejection: a uniform option is kept with probability exp(-gap / scale), exactly.

    The number of rounds depends on the scores: at most one in seven needs a second one.

    Args:
        key: a typed key.
        scores: shape (K,); NaN counts as the lowest score.
        calibration: at the scale 2 sensitivity / epsilon.

    Returns:
        An int32 scalar; -1 where the scale could carry no noise.
    """
    fit = calibration.fit(EXPONENTIAL, scores.dtype)
    gaps = _scaled_gaps(scores, fit)
    options = scores.size
    # Every try succeeds with probability 1 / K at least: 2 K of them fail with e^-2 at most.
    tries = 2 * options

    def again(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return state[1] < 0

    def attempt(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        round_number, _ = state
        key_option, key_noise = jax.random.split(jax.random.fold_in(key, round_number))
        words = jax.random.bits(key_option, (tries,), jnp.uint32)
        # Lemire (2019): words below the threshold would favor some options.
        product = _limbs.full_product(words, jnp.uint32(options))
        fair = product.low >= np.uint32(2**32 % options)
        option = product.high.astype(jnp.int32)
        drawn = EXPONENTIAL.sample(key_noise, (tries,))
        chosen = Limbs(gaps.high[option], gaps.low[option])
        kept = fair & ~_limbs.less(drawn, chosen)
        first = jnp.argmax(kept)
        return round_number + np.uint32(1), jnp.where(kept[first], option[first], -1)

    _, index = lax.while_loop(again, attempt, (jnp.uint32(0), jnp.int32(-1)))
    return _selected(index, scores, calibration, fit.scale)


def float_index(
    key: jax.Array, scores: jax.Array, calibration: Calibration, *, flip: bool
) -> jax.Array:
    """Either selection in floats: Gumbel noise gives softmax, exponential permute-and-flip."""
    scale = usable_scale(calibration.scale, scores.dtype)
    race = exponential if flip else gumbel
    noise = race(key, scores.shape, scale.dtype)
    index = jnp.argmax(noise - score_gaps(scores) / (_OUTWARD * scale)).astype(jnp.int32)
    return _selected(index, scores, calibration, scale)


def _selected(
    index: jax.Array, scores: jax.Array, calibration: Calibration, scale: jax.Array
) -> jax.Array:
    index = jnp.where(jnp.isnan(scale), -1, index)
    if calibration.zero_allowed:
        best = jnp.argmin(score_gaps(scores)).astype(jnp.int32)
        index = jnp.where(jnp.asarray(calibration.scale) == 0, best, index)
    return index


def _scaled_gaps(scores: jax.Array, fit: GridFit) -> Limbs:
    """How far every score lies below the best, in points of the noise's lattice, exactly.

    Clamped at 2^61 points, where no noise reaches: that replaces scores by the larger of them and best - bound, which move
    no further than the scores do.
    """
    if jnp.issubdtype(scores.dtype, jnp.floating):
        dtype = compute_dtype(scores.dtype)
        lowest = jnp.where(jnp.isnan(scores), -jnp.inf, scores).astype(dtype)
        points = round_to_grid(lowest, fit.exponent)
    else:
        points = _limbs.clip(_limbs.from_integers(scores), _BOUND)
    high = jnp.max(points.high.astype(jnp.int32)).astype(jnp.uint32)
    low = jnp.max(jnp.where(points.high == high, points.low, np.uint32(0)))
    gaps = _limbs.subtract(Limbs(high, low), points)
    farthest = _limbs.shift_right(_limbs.constant(2**61), fit.shift)
    farthest = _limbs.floor_divide(farthest, fit.divisor)
    return _limbs.multiply(_limbs.where(_limbs.less(farthest, gaps), farthest, gaps), fit.points)


def _first_largest(x: Limbs) -> jax.Array:
    high = x.high.astype(jnp.int32)
    top = high == jnp.max(high)
    low = jnp.max(jnp.where(top, x.low, np.uint32(0)))
    return jnp.argmax(top & (x.low == low)).astype(jnp.int32)


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
