"""Quantiles with noise scaled to the smooth sensitivity, which is small where records are dense.

docs/proofs/smooth-quantile.md has the proofs.

Each record is clamped to public bounds, rounded to a public grid, and stored as an integer: the
number of grid steps above the lower bound. Each record is rounded separately, so neighboring
databases remain neighbors. All later computations are exact in integers.

Let x_1 <= ... <= x_n be the sorted records, x_0 the lower bound and x_(n+1) the upper bound. If k
records are replaced, the local sensitivity of x_r is at most

    A_k = max of x_j - x_i over i <= r <= j, j - i = k + 1.

A_k of a database is at most A_(k+1) of any neighbor (docs/proofs/smooth-quantile.md).
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import down, made, made_by_factory, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, count_below, outward
from dpjax.mechanisms._noise_intervals import noise_quantile
from dpjax.mechanisms._noisy_arrays import as_number
from dpjax.mechanisms._start import begin, check_one_array
from dpjax.random._grid_fit import GridFit
from dpjax.random._noise import LAPLACE
from dpjax.random._release import SCALE_BITS, laplace_steps, private_fit, steps_to_float
from dpjax.release._mechanism import SensitivityMechanism


class OrderedRecords(NamedTuple):
    """Sorted records, as integer numbers of grid steps above the lower bound.

    Attributes:
        steps: int32, shape (n + 2,): 0, the sorted records, the upper bound.
        lowest: the lower bound in steps.
        exponent: the spacing of the grid is 2^exponent.
    """

    steps: jax.Array
    lowest: Limbs
    exponent: jax.Array

    @classmethod
    def of(cls, x: jax.Array, bounds: tuple[float, float], exponent: jax.Array) -> "OrderedRecords":
        """Rounds and sorts records. NaN counts as the lower bound.

        The bounds must be less than 2^31 steps apart.
        """
        low, high = (round_to_grid(jnp.asarray(bound, float), exponent) for bound in bounds)
        above = _limbs.subtract(round_to_grid(x, exponent), low)
        width = _limbs.subtract(high, low)
        above = _limbs.where(_limbs.less(width, above), width, above)
        outside = _limbs.is_negative(above) | jnp.isnan(x)
        steps = jnp.sort(jnp.where(outside, 0, _limbs.to_integers(above, "int32")))
        top = _limbs.to_integers(width, "int32")
        return cls(jnp.concatenate([jnp.zeros(1, "int32"), steps, top[None]]), low, exponent)

    @property
    def n(self) -> int:
        """Returns the number of records."""
        return self.steps.size - 2

    def absolute(self, steps: jax.Array) -> Limbs:
        """Takes steps counted from the lower bound. Returns the same steps counted from 0."""
        return _limbs.add(self.lowest, _limbs.from_integers(steps))


def rank_of(probability: float, count: int) -> int:
    """Returns the rank of a quantile among `count` records, as in `dpjax.targets.quantile`."""
    return math.ceil(Fraction(str(probability)) * count)


def smooth_bound(records: OrderedRecords, rank: int, decay: Scalar) -> jax.Array:
    """Returns the smooth sensitivity in steps: max_k e^(-k decay) A_k, but at least 1.

    A_k is the largest local sensitivity after k records were replaced. The result is at least 1,
    because a result of 0 would violate smoothness. Rounding must not violate smoothness, either.
    Consecutive rounded factors e^(-k decay) have a quotient of at most e^(decay + 2^-16), and
    rounding of products is monotone. So one record changes the result by a factor of at most
    e^(decay + 2^-16) (1 + 2^-23).
    """
    steps = records.steps.astype(jnp.float32)  # Integers up to 2^24 are exact in float32.
    decay = jnp.asarray(decay, jnp.float32)
    # The value of the first factor does not matter. It is only multiplied by steps[rank] -
    # steps[rank], which is 0.
    factors = jnp.concatenate([jnp.ones(1, jnp.float32), discounts(decay, records.n)])
    right = steps[rank:]

    def widen(left: jax.Array, best: jax.Array) -> jax.Array:
        gaps = right - steps[rank - left]
        return jnp.maximum(best, jnp.max(gaps * lax.dynamic_slice(factors, (left,), right.shape)))

    # After `reach` iterations, factors are below 2^-25 and gaps are below 2^24. So products are
    # below 1, and cannot be the maximum. If decay is NaN, the loop runs only once.
    reach = jnp.where(decay > 0, jnp.minimum(jnp.ceil(18 / decay) + 1, float(rank)), 0)
    return lax.fori_loop(0, reach.astype(jnp.int32) + 1, widen, jnp.float32(1))


def discounts(decay: jax.Array, most: int) -> jax.Array:
    """Returns e^(-k decay) for k = 0, ..., most, in float32."""
    return jnp.exp(-decay * jnp.arange(most + 1, dtype=jnp.float32))


def replacements_until(records: OrderedRecords, rank: int, bound: jax.Array) -> jax.Array:
    """Returns how many replacements make the local sensitivity exceed a bound; n + 1 if none do.

    `bound` is in steps of the grid. If one record is replaced, the returned number changes by at
    most 1. Let x be the sorted records. For every i up to the rank, a binary search finds the first
    j at or above the rank with x_j - x_i > bound. Then j - i - 1 replacements are enough.
    """
    left = records.steps[: rank + 1]
    right = records.steps[rank:]
    first = count_below(right, left + bound, or_equal=True)
    between = first + jnp.arange(rank, -1, -1, dtype=jnp.int32) - 1
    never = jnp.int32(records.n + 1)
    return jnp.min(jnp.where(first < right.size, between, never), initial=never)


class QuantileMechanism(SensitivityMechanism):
    """A base class of mechanisms for quantiles of records between public bounds."""

    delta: Scalar
    lower: float
    upper: float

    def _check_value(self, value: Value) -> None:
        check_one_array(value, "records, shape (n,)")

    def clamped(self, value: Value) -> Value:
        """The records after clamping to the bounds. NaN becomes the lower bound.

        Args:
            value: an array of records.

        Returns:
            An array of the same shape. It is private data, like the value itself.
        """
        x = _checks.real_arrays("value", value)
        x = x.astype(compute_dtype(x.dtype))
        low, high = (jnp.asarray(bound).astype(x.dtype) for bound in (self.lower, self.upper))
        return jnp.clip(jnp.where(jnp.isnan(x), low, x), low, high)

    @property
    def dp_event(self) -> Any:
        """An unsupported event, because no `DpEvent` describes noise that depends on the data."""
        return _checks.extra("dp_accounting", "accounting").UnsupportedDpEvent()


def check_bounds(lower: float, upper: float) -> tuple[float, float]:
    """Checks public bounds, which must be in order and far enough apart for a grid."""
    low, high = _checks.finite("lower", lower), _checks.finite("upper", upper)
    if _checks.is_traced(low) or _checks.is_traced(high):
        raise TypeError("lower and upper must be known when the mechanism is made")
    if not low < high:
        raise ValueError(f"lower must be below upper, got {low:g} and {high:g}")
    width = high - low
    if width < 2.0**-20 * max(abs(low), abs(high)) or not 1e-25 < width < 1e25:
        raise ValueError(
            "upper - lower must be between 1e-25 and 1e25, and at least 2^-20 times the larger of"
            f" |lower| and |upper|, got {low:g} and {high:g}"
        )
    return low, high


def check_probability(probability: float) -> float:
    """Checks that a probability is concrete and in (0, 1)."""
    p = _checks.fraction("probability", probability)
    if _checks.is_traced(p):
        raise TypeError("probability must be known when the mechanism is made")
    return float(p)


def rounding_of_a_release(magnitude: Scalar) -> Scalar:
    """Bounds the error of rounding a release of at most this magnitude to float32.

    The largest error is half of this bound. The other half covers the rounding error of the bound.
    """
    return magnitude * float(jnp.finfo(jnp.float32).eps)


# The decay is beta minus this margin. The margin has three parts: 2^-15 for rounding the divisor of
# the noise to 16 bits, 2^-16 for rounding the factors in `smooth_bound`, and the rest for rounding
# products and quotients.
_SMOOTHNESS_MARGIN = 2.0**-14
_LEAST_DECAY = 2.0**-13
# A relative margin on alpha, and on beta in `_smoothing`. It covers rounding in float32, and the
# errors of the noise tables.
_MARGIN = 2.0**-16
# A relative margin on the logarithm of delta in `_smoothing`, for about 30 rounding errors in
# float32.
_SLACK = 2.0**-18
# upper - lower, in steps of the grid, has at most this many bits. float32 represents such integers
# exactly.
_MOST_BITS = 23


@made_by_factory
class SmoothQuantile(QuantileMechanism):
    """Adds noise of a private scale to a quantile; made by `smooth_quantile`.

    Attributes:
        sensitivity: a bound of 1 in the norm "hamming": one record changes.
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee.
        shift: alpha. The scale of the noise is the smooth sensitivity over alpha.
        decay: beta of the smooth sensitivity, minus a margin for rounding.
        lower: the lower bound of the records.
        upper: the upper bound of the records.
        probability: the probability of the quantile.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    delta: Scalar = up()
    shift: Scalar = down()
    decay: Scalar = down()
    lower: float
    upper: float
    probability: float = static()

    @property
    def _exponent(self) -> jax.Array:
        """Returns the exponent of the grid, which depends only on public numbers.

        The scale of the noise is private, so the grid suits all scales that are possible.
        """
        shift = jnp.where(self.shift > 0, jnp.asarray(self.shift, jnp.float32), 1)
        # `shift` is alpha, and `frexp` returns an exponent e with alpha >= 2^(e - 1). The smooth
        # sensitivity is at most 2^bits steps of the grid, and bits <= e + 24. So the scale, which
        # is the smooth sensitivity divided by alpha, is at most 2^(bits - e + 1) <= 2^25 steps.
        bits = jnp.minimum(jnp.frexp(shift)[1] + SCALE_BITS - 1, _MOST_BITS)
        width = jnp.asarray(self.upper, jnp.float32) - jnp.asarray(self.lower, jnp.float32)
        return (jnp.frexp(width)[1] - bits).astype(jnp.int32)

    def _measured(self, value: jax.Array) -> tuple[OrderedRecords, int, GridFit]:
        """Returns the sorted records, the rank of the quantile, and the scale of the noise."""
        records = OrderedRecords.of(value, (self.lower, self.upper), self._exponent)
        rank = rank_of(self.probability, records.n)
        smooth = smooth_bound(records, rank, self.decay)
        # If a traced parameter is invalid, the scale is NaN, and so is the release.
        scale = smooth / jnp.asarray(self.shift, jnp.float32)
        return records, rank, private_fit(records.exponent, scale)

    def _draw(self, key: Key, value: Value) -> jax.Array:
        records, rank, fit = self._measured(value)
        (noise,) = laplace_steps(key, fit)
        noisy = _limbs.add(records.absolute(records.steps[rank]), noise)
        dtype = compute_dtype(value.dtype)
        released = steps_to_float(noisy, records.exponent, dtype)
        return jnp.where(jnp.isnan(fit.scale), jnp.nan, released)

    def grids(self, value: Value) -> PyTree:
        """The grid spacing of releases, a power of two; it does not depend on `value`."""
        del value
        return power_of_two(self._exponent, jnp.float32)

    def noise_scale(self, value: Value) -> jax.Array:
        """The scale of the noise on this database, S(x) / alpha. It is as private as the database.

        Call this method on public or simulated records to see which scale to expect.

        Args:
            value: an array of records, shape (n,).

        Returns:
            A scalar in the units of the records.
        """
        return _noise_scale(self, self._checked(value))

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        value = self._checked(value)
        records, rank, fit = self._measured(value)
        dtype = compute_dtype(value.dtype)
        center = steps_to_float(records.absolute(records.steps[rank]), records.exponent, dtype)
        scale = fit.scale.astype(dtype)
        return LAPLACE.log_density((jnp.asarray(output, dtype) - center) / scale) - jnp.log(scale)

    def error(self, *, confidence: float = 0.95) -> Scalar:
        """A bound on the distance of a release from the true quantile, for all databases.

        The scale of the noise is private, so this bound uses the largest possible scale, (upper -
        lower) / alpha. On most databases the noise is smaller, see `noise_scale`.

        Args:
            confidence: in (0, 1). The error of a release is within the bound with at least this
                probability.

        Returns:
            A scalar in the units of the records, including the error of rounding to the grid and to
            floats.
        """
        step = power_of_two(self._exponent, jnp.float32)
        quantile = noise_quantile(LAPLACE, confidence)
        # The added step covers the rounding of the bounds to the grid. The factor covers the
        # relative rounding error of the scale: 2^-15, and a few float32 operations.
        scale = (self.upper - self.lower + step) / self.shift * (1 + 2.0**-14)
        bound = as_number(scale * quantile + step)
        return bound + rounding_of_a_release(max(abs(self.lower), abs(self.upper)) + bound)


def smooth_quantile(
    epsilon: Scalar,
    delta: Scalar,
    *,
    lower: float,
    upper: float,
    probability: float = 0.5,
) -> SmoothQuantile:
    """A quantile with Laplace noise of scale S(x) / alpha, where S is its smooth sensitivity.

    The global sensitivity of a quantile is upper - lower. The local sensitivity is small if many
    records are near the quantile. S(x) is the maximum, over all databases y, of the local
    sensitivity of y times e^(-beta d), where d is the number of records in which y and x differ.
    The mechanism takes the array of records, not their quantile.

    Args:
        epsilon: finite, above 0.
        delta: in (0, 1).
        lower: the lower bound of the records, which are clamped; public.
        upper: the upper bound of the records, public.
        probability: p, for the ceil(p n)-th smallest record, as in `targets.quantile`. At 0.5 it is
            the (lower) median.

    Returns:
        A `SmoothQuantile`: `mechanism(key, records)` takes numbers of shape (n,), and releases a
        float, which may be outside of the bounds. NaN counts as `lower`. A release takes O(n log n)
        time for sorting, plus at most 18 n / beta operations.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a number is out of range, the bounds are out of order, or beta is so small
            that the margin for rounding would exceed it; at a release, if the value is not one
            array of records.

    Formal guarantees:
        (epsilon, delta)-DP when one record is replaced, for the integers that are drawn, by the
        proof in docs/proofs/smooth-quantile.md. Here alpha = epsilon / 2. The proof requires beta
        <= alpha and (1 - e^-beta) exp(-(alpha + beta) / (e^beta - 1)) <= delta. The mechanism uses
        the largest such beta, and subtracts 2^-14 from it to cover rounding.

        A release reveals the private scale only through its noise: the grid is computed from
        epsilon and the bounds, and every integer is possible at every scale. The running time of a
        release depends on the records, and may reveal something about them. There is no variant
        with delta = 0, because it needs noise with heavier tails, for which dpjax has no exact
        tables.

    Source:
        Nissim, Raskhodnikova and Smith (2007), sections 2 and 3.1. The proof is our own. The usual
        proof gives delta (1 + e^(epsilon / 2)) / 2, and its beta, epsilon / (2 log(2 / delta)), is
        31% smaller at epsilon = 1, delta = 1e-6.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> median = dpjax.smooth_quantile(1.0, 1e-6, lower=0.0, upper=1000.0)
        >>> ages = jnp.arange(10_000) % 100
        >>> 48 < float(median(dpjax.random.seeded_key(0), ages).value) < 51
        True
    """
    sensitivity, epsilon = begin("hamming", 1.0, epsilon)
    delta = _checks.fraction("delta", delta)
    low, high = check_bounds(lower, upper)
    p = check_probability(probability)
    shift, decay = _smoothing(epsilon, delta)
    if not _checks.is_traced(decay) and decay < _LEAST_DECAY:
        raise ValueError(
            f"epsilon={epsilon:g} is too small for delta={delta:g}: beta would be below the margin"
            " for rounding. Take a larger epsilon or delta"
        )
    if _checks.is_traced(decay):
        usable = decay >= _LEAST_DECAY
        epsilon = jnp.where(usable, outward(epsilon, math.inf), jnp.nan)
        shift = jnp.where(usable, shift, jnp.nan)
    return made(SmoothQuantile, sensitivity, epsilon, delta, shift, decay, low, high, p)


@jax.jit
def _noise_scale(mechanism: SmoothQuantile, value: jax.Array) -> jax.Array:
    return mechanism._measured(value)[2].scale


def _smoothing(epsilon: Scalar, delta: Scalar) -> tuple[Scalar, Scalar]:
    """Computes the shift and the decay of a `SmoothQuantile`, both rounded down.

    The shift is alpha = u, where u = epsilon / 2. The decay is beta, minus a margin. beta is the
    largest number up to u such that (1 - e^-beta) e^(-(u + beta) / (e^beta - 1)) is at most delta.
    This expression grows with beta, so a bisection finds beta from below. It compares logarithms.
    `_SLACK` covers the rounding errors of these logarithms in float32. These errors are small,
    because nothing cancels. `_MARGIN` covers errors of the noise's tables.
    """
    traced = _checks.is_traced(epsilon) or _checks.is_traced(delta)
    numpy: Any = jnp if traced else np
    half = epsilon / 2
    log_delta = numpy.log(delta)
    most = log_delta - _SLACK * (1 - log_delta)

    def keeps(beta: Scalar) -> Any:
        left = -numpy.expm1(-beta)
        return numpy.log(left) - (half + beta) * numpy.exp(-beta) / left <= most

    low, high = half / 2**30, half
    for _ in range(34):
        middle = (low + high) / 2
        kept = keeps(middle)
        low, high = numpy.where(kept, middle, low), numpy.where(kept, high, middle)
    beta = numpy.where(keeps(half), half, numpy.where(keeps(low), low, 0.0))
    decay = beta / (1 + _MARGIN) - _SMOOTHNESS_MARGIN
    shift = half * (1 - _MARGIN)
    return (shift, decay) if traced else (float(shift), float(decay))
