"""Private selection among scores: in integers, so that no option is ever impossible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax import _limbs
from dpjax._grid import power_of_two, round_modulo
from dpjax._limbs import Limbs
from dpjax._numerics import compute_dtype
from dpjax.random._chacha20 import consume
from dpjax.random._grid_fit import Calibration, GridFit
from dpjax.random._lattice import exponential_rounds
from dpjax.random._noise import EXPONENTIAL, float_exponential, float_gumbel
from dpjax.random._release import OUTWARD, usable_scale


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


def exponential_index(
    key: jax.Array, scores: jax.Array, calibration: Calibration, taken: jax.Array | None = None
) -> jax.Array:
    """Softmax by rejection: a uniform option is kept with probability exp(-gap / scale), exactly.

    The number of rounds depends on the scores: at most one in seven needs a second one.

    Args:
        key: a typed key.
        scores: shape (K,); NaN counts as the lowest score.
        calibration: at the scale 2 sensitivity / epsilon.
        taken: booleans of shape (K,), public: options that are no longer there. Not all are.

    Returns:
        An int32 scalar; -1 where the scale could carry no noise.
    """
    fit = calibration.fit(EXPONENTIAL, scores.dtype)
    scores = remaining_scores(scores, taken)
    gaps = _scaled_gaps(scores, fit)
    options = scores.size
    # Every try succeeds with probability 1 / K at least: 2 K of them fail with e^-2 at most.
    tries = 2 * options

    def again(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return state[1] < 0

    def attempt(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        round_number, word, drawn = exponential_rounds(key, state[0], tries)
        # Lemire (2019): words below the threshold would favor some options.
        product = _limbs.full_product(word, jnp.uint32(options))
        fair = product.low >= np.uint32(2**32 % options)
        option = product.high.astype(jnp.int32)
        chosen = Limbs(gaps.high[option], gaps.low[option])
        kept = fair & ~_limbs.less(drawn, chosen)
        if taken is not None:
            kept &= ~taken[option]
        first = jnp.argmax(kept)
        return round_number, jnp.where(kept[first], option[first], -1)

    consume(key)
    # Zero, varying over devices as the data do: under `shard_map` a loop has to start so.
    zero = (jax.random.key_data(key)[0] ^ gaps.low[0]) & np.uint32(0)
    _, index = lax.while_loop(again, attempt, (zero, zero.astype(jnp.int32) - 1))
    return _selected(index, scores, calibration, fit.scale, taken)


def remaining_scores(scores: jax.Array, taken: jax.Array | None) -> jax.Array:
    """Scores of which those that are taken are no better than any other."""
    if taken is None:
        return scores
    # Before the minimum: in a large batch, XLA's CPU backend may find another one than NaN.
    scores = clamped_scores(scores) if jnp.issubdtype(scores.dtype, jnp.floating) else scores
    return jnp.where(taken, jnp.min(scores), scores)


def float_index(
    key: jax.Array, scores: jax.Array, calibration: Calibration, *, flip: bool
) -> jax.Array:
    """Either selection in floats: Gumbel noise gives softmax, exponential permute-and-flip."""
    scale = usable_scale(calibration.scale, scores.dtype)
    race = float_exponential if flip else float_gumbel
    noise = race(key, scores.shape, scale.dtype)
    index = jnp.argmax(noise - score_gaps(scores) / (OUTWARD * scale)).astype(jnp.int32)
    return _selected(index, scores, calibration, scale)


def _selected(
    index: jax.Array,
    scores: jax.Array,
    calibration: Calibration,
    scale: jax.Array,
    taken: jax.Array | None = None,
) -> jax.Array:
    index = jnp.where(jnp.isnan(scale), -1, index)
    if calibration.zero_allowed:
        gaps = score_gaps(scores)
        gaps = gaps if taken is None else jnp.where(taken, jnp.inf, gaps)
        best = jnp.argmin(gaps).astype(jnp.int32)
        index = jnp.where(jnp.asarray(calibration.scale) == 0, best, index)
    return index


def _scaled_gaps(scores: jax.Array, fit: GridFit) -> Limbs:
    """How far every score lies below the best, in points of the noise's lattice, exactly.

    Clamped at 2^61 points, where no noise reaches: that replaces scores by the larger of them and
    best - bound, which move no further than the scores do.
    """
    if jnp.issubdtype(scores.dtype, jnp.floating):
        finite = clamped_scores(scores)
        best = jnp.max(finite)
        points = (round_modulo(x, fit.exponent) for x in (best, finite))
        # Modulo 2^64 it is exact up to 2^63 steps; further apart, floats show it.
        far = best - finite > power_of_two(fit.exponent + 62, finite.dtype)
        gaps = _limbs.where(far, _limbs.constant(2**62), _limbs.subtract(*points))
    else:
        gaps = _limbs.from_integers(_integer_gaps(scores))
    farthest = _farthest(fit)
    return _limbs.multiply(_limbs.where(_limbs.less(farthest, gaps), farthest, gaps), fit.points)


def _farthest(fit: GridFit) -> Limbs:
    """Grid steps in 2^61 points of the noise's lattice."""
    return _limbs.floor_divide(_limbs.shift_right(_limbs.constant(2**61), fit.shift), fit.divisor)


def largest_gap(fit: GridFit, dtype: Any) -> jax.Array:
    """The gap of scores that larger ones count as, in a float dtype."""
    gap = _limbs.to_float(_farthest(fit), dtype) * power_of_two(fit.exponent, dtype)
    return jnp.minimum(gap, float(jnp.finfo(dtype).max))


def _first_largest(x: Limbs) -> jax.Array:
    high = x.high.astype(jnp.int32)
    top = high == jnp.max(high)
    low = jnp.max(jnp.where(top, x.low, np.uint32(0)))
    return jnp.argmax(top & (x.low == low)).astype(jnp.int32)


def score_gaps(scores: jax.Array) -> jax.Array:
    """How far every score lies below the best one: exact for integers, finite for floats."""
    if jnp.issubdtype(scores.dtype, jnp.floating):
        finite = clamped_scores(scores)
        return jnp.max(finite) - finite
    return _integer_gaps(scores).astype(compute_dtype(scores.dtype))


def clamped_scores(scores: jax.Array) -> jax.Array:
    """Float scores that are finite, and so are their differences; NaN counts as the lowest."""
    dtype = compute_dtype(scores.dtype)
    limit = float(jnp.finfo(dtype).max) / 2
    scores = scores.astype(dtype)
    return jnp.clip(jnp.where(jnp.isnan(scores), -limit, scores), -limit, limit)


def _integer_gaps(scores: jax.Array) -> jax.Array:
    """The differences of two integers of a dtype always fit the unsigned dtype of that width."""
    if scores.dtype == bool:
        scores = scores.astype(jnp.int32)
    unsigned = jnp.dtype(f"uint{8 * scores.dtype.itemsize}")
    return jnp.max(scores).astype(unsigned) - scores.astype(unsigned)
