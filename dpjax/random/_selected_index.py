"""Private selection of an option by its score, in exact integer arithmetic.

A base measure multiplies the probabilities of the options by public weights. The negative
logarithms of these weights are first rounded to the lattice of the noise, which is harmless because
weights are public. Then they are added to the score gaps as integers. So no private number is
rounded.
"""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_modulo
from dpjax._exact._kernels import at_once, written
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, float_limits
from dpjax.random._chacha20 import consume
from dpjax.random._grid_fit import Calibration, GridFit
from dpjax.random._lattice import exponential_rounds, lattice_exponential
from dpjax.random._noise import EXPONENTIAL
from dpjax.random._release import OUTWARD, resized, shares_programs, usable_scale

# The log weight of each option.
LogBase: TypeAlias = tuple[float, ...]
# The next round, and the selected index, or -1 if no try has succeeded yet.
_Tries: TypeAlias = tuple[jax.Array, jax.Array]
# The public weight of an option is converted to a penalty. The unit of penalties is one step of the
# lattice on which noise is drawn. The penalty is added to the gap between the best score and the
# option's score. Smaller weights have larger penalties. `_LEAST_WEIGHT` is the largest penalty of a
# positive weight, and is larger than any noise. `_NO_WEIGHT` is the penalty of weight 0. It is
# larger than any gap plus any other penalty.
_LEAST_WEIGHT, _NO_WEIGHT = 2.0**60, 2**62


def permute_and_flip_index(
    key: jax.Array,
    scores: jax.Array,
    calibration: Calibration,
    log_base: LogBase | None = None,
    taken: jax.Array | None = None,
) -> jax.Array:
    """Returns the index of the largest score + exponential noise (report noisy max).

    All arithmetic is on integers.

    Proof of privacy: fix the noise of all other options. Option r is selected if its noise reaches
    an integer threshold. If the threshold is positive, this has probability exp(-threshold /
    scale). On a neighboring database, the threshold differs by at most twice the sensitivity. In a
    tie, the first option is always selected.

    The scale is 2 sensitivity / epsilon. NaN counts as the lowest score. If the scale is not valid,
    the result is -1.

    Args:
        key: a typed key.
        scores: shape (K,).
        calibration: the calibration of the noise.
        log_base: log weights of the options.
        taken: public booleans of shape (K,): options that must not be selected. At least one entry
            is False.
    """
    fit = calibration.fit(EXPONENTIAL, scores.dtype)
    left_out = without_weight(log_base) if taken is None else taken
    gaps = _scaled_gaps(remaining_scores(scores, left_out), fit, log_base)
    if taken is not None:
        gaps = _limbs.where(taken, _limbs.constant(_NO_WEIGHT), gaps)
    race = _limbs.subtract(lattice_exponential(key, scores.shape), gaps)
    return _selected(_first_largest(race), scores, calibration, fit.scale, left_out)


def exponential_index(
    key: jax.Array,
    scores: jax.Array,
    calibration: Calibration,
    log_base: LogBase | None = None,
    taken: jax.Array | None = None,
) -> jax.Array:
    """Samples from the softmax of the scores by rejection, exactly.

    A uniformly drawn option is accepted with probability exp(-gap / scale).

    The scale is 2 sensitivity / epsilon. NaN counts as the lowest score. If the scale is not valid,
    the result is -1. The number of rounds depends on the scores, but at most one draw in seven
    needs a second round.

    Args:
        key: a typed key.
        scores: shape (K,).
        calibration: the calibration of the noise.
        log_base: log weights of the options.
        taken: public booleans of shape (K,): options that must not be selected. At least one entry
            is False.
    """
    fit = calibration.fit(EXPONENTIAL, scores.dtype)
    taken = without_weight(log_base) if taken is None else taken
    scores = remaining_scores(scores, taken)
    gaps = _scaled_gaps(scores, fit, log_base)

    def attempt(state: _Tries) -> _Tries:
        return _tried(key, state[0], gaps, taken)

    consume(key)
    # Under `shard_map`, the initial values of a loop must have the same type as its later values.
    # The type of the later values says that they differ between devices. So this zero is computed
    # from the key and the data.
    zero = (jax.random.key_data(key)[0] ^ gaps.low[0]) & np.uint32(0)
    start = zero, zero.astype(jnp.int32) - 1
    _, index = lax.while_loop(lambda state: state[1] < 0, attempt, start)
    return _selected(index, scores, calibration, fit.scale, taken)


def tried_index(
    key: jax.Array, round_number: jax.Array, scores: jax.Array, calibration: Calibration
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes one round of `exponential_index`, for loops that do other work in each round.

    Returns:
        The next round, whether a try succeeded, and the index that it selected.
    """
    fit = calibration.fit(EXPONENTIAL, scores.dtype)
    gaps = _scaled_gaps(scores, fit, None)
    round_number, index = _tried(key, round_number, gaps, None)
    return round_number, index >= 0, _selected(index, scores, calibration, fit.scale)


def _tried(key: jax.Array, round_number: jax.Array, gaps: Limbs, taken: jax.Array | None) -> _Tries:
    options = gaps.low.size
    # Each try succeeds with probability at least 1 / K. So all 2 K tries fail with probability at
    # most e^-2.
    round_number, word, drawn = exponential_rounds(key, round_number, 2 * options)
    # Lemire (2019): accepting words below this threshold would make some options more likely.
    product = _limbs.full_product(word, jnp.uint32(options))
    fair = product.low >= np.uint32(2**32 % options)
    option = product.high.astype(jnp.int32)
    chosen = Limbs(gaps.high[option], gaps.low[option])
    kept = fair & ~_limbs.less(drawn, chosen)
    if taken is not None:
        kept &= ~taken[option]
    first = jnp.argmax(kept)
    return round_number, jnp.where(kept[first], option[first], -1)


def remaining_scores(scores: jax.Array, taken: jax.Array | None) -> jax.Array:
    """Replaces the score of every taken option by the lowest of all scores."""
    if taken is None:
        return scores
    # Scores are clamped first, because XLA's minimum on a CPU may ignore NaN.
    scores = clamped_scores(scores) if jnp.issubdtype(scores.dtype, jnp.floating) else scores
    return jnp.where(taken, jnp.min(scores), scores)


def float_index(
    key: jax.Array,
    scores: jax.Array,
    calibration: Calibration,
    log_base: LogBase | None = None,
    *,
    flip: bool,
) -> jax.Array:
    """Selects an option in floats: with exponential noise if `flip` is true, else Gumbel noise.

    Exponential noise gives permute-and-flip, and Gumbel noise gives softmax.
    """
    scale = usable_scale(calibration.scale, scores.dtype)
    if flip:
        noise = jax.random.exponential(key, scores.shape, scale.dtype)
    else:
        # Mode "high" is accurate in the upper tail, which determines the probabilities of unlikely
        # options.
        noise = jax.random.gumbel(key, scores.shape, scale.dtype, mode="high")
    worse = score_gaps(remaining_scores(scores, without_weight(log_base))) / (OUTWARD * scale)
    worse = worse if log_base is None else worse - jnp.asarray(log_base, worse.dtype)
    index = jnp.argmax(noise - worse).astype(jnp.int32)
    return _selected(index, scores, calibration, scale, without_weight(log_base))


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


def without_weight(log_base: LogBase | None) -> jax.Array | None:
    """Returns booleans that are True for options of weight 0; None if there is no such option."""
    if log_base is None or min(log_base) > -math.inf:
        return None
    return jnp.asarray(np.asarray(log_base) == -math.inf)


def _points_of_base(log_base: LogBase) -> Limbs:
    """Returns log(largest weight / weight) for each option, rounded to whole lattice points."""
    largest, resolution = max(log_base), EXPONENTIAL.resolution
    points = [
        _NO_WEIGHT
        if weight == -math.inf
        else round(min((largest - weight) * resolution, _LEAST_WEIGHT))
        for weight in log_base
    ]
    return Limbs(
        jnp.asarray([x >> 32 for x in points], jnp.uint32),
        jnp.asarray([x & 0xFFFFFFFF for x in points], jnp.uint32),
    )


def _scaled_gaps(scores: jax.Array, fit: GridFit, log_base: LogBase | None) -> Limbs:
    """Returns the exact gaps between the best score and all scores, in lattice points of the noise.

    If there is a base measure, the penalties of the public weights are added. Then the smallest sum
    is subtracted from all sums.

    Gaps are clamped to `farthest`, 2^61 lattice points, which is larger than any noise. This
    replaces a score s by max(s, best - farthest). If a record changes all scores by amounts between
    a and b, it also changes all these maxima by amounts between a and b.
    """
    # XLA may compute a score twice and round it differently. Then the gap of the best option could
    # be negative and wrap around, and the option would never be selected. `written` prevents this.
    scores = written(scores)
    if jnp.issubdtype(scores.dtype, jnp.floating):
        finite = clamped_scores(scores)
        best = jnp.max(finite)
        points = (round_modulo(x, fit.exponent) for x in (best, finite))
        # Differences modulo 2^64 are exact up to 2^63 steps. Larger differences are detected in
        # floats.
        far = best - finite > power_of_two(fit.exponent + 62, finite.dtype)
        gaps = _limbs.where(far, _limbs.constant(2**62), _limbs.subtract(*points))
    else:
        gaps = _limbs.from_integers(_integer_gaps(scores))
    farthest = _farthest(fit)
    nearer = _limbs.where(_limbs.less(farthest, gaps), farthest, gaps)
    gaps = at_once(_limbs.multiply(nearer, fit.points))
    if log_base is None:
        return gaps
    sums = _limbs.add(gaps, _points_of_base(log_base))
    first = _first_largest(_limbs.negate(sums))
    return _limbs.subtract(sums, Limbs(sums.high[first], sums.low[first]))


def _farthest(fit: GridFit) -> Limbs:
    """Returns 2^61 lattice points in steps of the grid. Larger gaps of scores are clamped."""
    return _limbs.floor_divide(_limbs.shift_right(_limbs.constant(2**61), fit.shift), fit.divisor)


def largest_gap(fit: GridFit, dtype: DTypeLike) -> jax.Array:
    """Returns the largest gap between two scores that is not clamped, as a float."""
    gap = _limbs.to_float(_farthest(fit), dtype) * power_of_two(fit.exponent, dtype)
    return jnp.minimum(gap, float(float_limits(dtype).max))


def _first_largest(x: Limbs) -> jax.Array:
    high = x.high.astype(jnp.int32)
    top = high == jnp.max(high)
    low = jnp.max(jnp.where(top, x.low, np.uint32(0)))
    return jnp.argmax(top & (x.low == low)).astype(jnp.int32)


def score_gaps(scores: jax.Array) -> jax.Array:
    """Returns the best score minus each score.

    Integer gaps are exact, and float gaps that overflow are infinite.
    """
    if jnp.issubdtype(scores.dtype, jnp.floating):
        finite = clamped_scores(scores)
        return jnp.max(finite) - finite
    return _integer_gaps(scores).astype(compute_dtype(scores.dtype))


def clamped_scores(scores: jax.Array) -> jax.Array:
    """Clamps float scores to finite numbers; NaN becomes the lowest score.

    Finite scores are not changed. With a tighter clamp, adding the same number to all scores could
    change the differences between them.
    """
    dtype = compute_dtype(scores.dtype)
    limit = float(float_limits(dtype).max)
    scores = scores.astype(dtype)
    return jnp.clip(jnp.where(jnp.isnan(scores), -limit, scores), -limit, limit)


def _integer_gaps(scores: jax.Array) -> jax.Array:
    """Returns the largest score minus each score, in the unsigned dtype of the same width.

    In this dtype, no difference overflows.
    """
    if scores.dtype == bool:
        scores = scores.astype(jnp.int32)
    unsigned = jnp.dtype(f"uint{8 * scores.dtype.itemsize}")
    return jnp.max(scores).astype(unsigned) - scores.astype(unsigned)


_LEAST_ROWS = 4


def peeled_indices(
    key: jax.Array, scores: jax.Array, calibration: Calibration, count: int
) -> jax.Array:
    """Selects `count` options without replacement; returns their indices in order of selection.

    If the scale is not valid, the indices are -1. Each option is drawn from the softmax of the
    remaining scores. The calibration is for a single selection.

    The options with the `count` largest sums of score and Gumbel noise have the same distribution
    (Plackett-Luce). But Gumbel noise from tables would have ties. Drawing further digits could not
    break these ties exactly, because digits of Gumbel noise are not independent. Here every
    selection is exact.
    """

    def peel(taken: jax.Array, one_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = exponential_index(one_key, scores, calibration, taken=taken)
        return taken.at[index].set(True), index

    # All entries are False. They are computed from the data, because a loop under `shard_map`
    # requires initial values that vary over the same devices as the data.
    none_taken = (scores > scores) & (jax.random.key_data(key)[0] == 0)
    _, indices = lax.scan(peel, none_taken, jax.random.split(key, count))
    return indices


def indices_of_rows(key: jax.Array, scores: jax.Array, calibration: Calibration) -> jax.Array:
    """Selects an option from each row of scores, independently by softmax; -1 for a bad scale."""
    traced = _checks.any_traced(key, scores, calibration)
    if traced or not shares_programs(scores):
        return _indices_of_rows(key, scores, calibration)
    # The selection in a row does not depend on the number of rows. So rows are padded, and arrays
    # with different numbers of rows share a program.
    count, options = scores.shape
    rows = max(_LEAST_ROWS, 2 ** (count - 1).bit_length())
    scores = resized(scores, (rows, options))
    indices = _indices_of_rows(key, scores, calibration)
    return resized(indices, (count,))


@jax.jit
def _indices_of_rows(key: jax.Array, scores: jax.Array, calibration: Calibration) -> jax.Array:
    keys = jax.random.split(key, len(scores))
    return jax.vmap(exponential_index, (0, 0, None))(keys, scores, calibration)
