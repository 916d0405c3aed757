"""A quantile with noise scaled to its smooth sensitivity, which is small where records are dense.

docs/proofs/smooth-quantile.md has the proofs.

Each record is clamped to public bounds, and rounded to a public grid. It becomes an integer: the
number of grid steps above the lower bound. Records are rounded one by one, so neighbors stay
neighbors. All later computations are exact in integers.

Let x_1 <= ... <= x_n be the records in order, x_0 the lower bound and x_(n+1) the upper one. The
largest local sensitivity of x_r that k replaced records can cause is

    A_k = max of x_j - x_i over i <= r <= j, j - i = k + 1.

So A_k of a database is at most A_(k+1) of any neighbor (docs/proofs/smooth-quantile.md).
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
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, count_below, outward
from dpjax.mechanisms._noisy_arrays import as_number, noise_quantile
from dpjax.mechanisms._start import begin, check_one_array
from dpjax.random._grid_fit import GridFit
from dpjax.random._noise import LAPLACE
from dpjax.random._release import SCALE_BITS, laplace_steps, private_fit, steps_to_float
from dpjax.release._mechanism import SensitivityMechanism


class OrderedRecords(NamedTuple):
    """Records in order, in steps of a grid above the lower bound.

    Attributes:
        steps: int32, shape (n + 2,): 0, the records in order, the upper bound.
        lowest: the lower bound in steps.
        exponent: the grid is 2^exponent.
    """

    steps: jax.Array
    lowest: Limbs
    exponent: jax.Array

    @classmethod
    def of(cls, x: jax.Array, bounds: tuple[float, float], exponent: jax.Array) -> "OrderedRecords":
        """Sorts records, with NaN as the lower bound.

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
        """The number of records."""
        return self.steps.size - 2

    def absolute(self, steps: jax.Array) -> Limbs:
        """Converts steps above the lower bound to steps above 0."""
        return _limbs.add(self.lowest, _limbs.from_integers(steps))


def rank_of(probability: float, count: int) -> int:
    """The rank of a quantile among the records, as in `dpjax.targets.quantile`."""
    return math.ceil(Fraction(str(probability)) * count)


def smooth_bound(records: OrderedRecords, rank: int, decay: Scalar) -> jax.Array:
    """The smooth sensitivity in steps: the largest of e^(-k decay) A_k over all k, and at least 1.

    Without the 1, it could fall to 0 and would not be smooth. Rounding could break smoothness. All
    factors e^(-k decay) come from one array, and the rounded quotient of consecutive factors is at
    most e^(decay + 2^-16). Products round monotonically. So one record changes the result by a
    factor of at most e^(decay + 2^-16) (1 + 2^-23).
    """
    steps = records.steps.astype(jnp.float32)  # Exact up to 2^24.
    decay = jnp.asarray(decay, jnp.float32)
    # The first factor belongs to i = j, where the gap is 0. So this factor does not matter.
    factors = jnp.concatenate([jnp.ones(1, jnp.float32), discounts(decay, records.n)])
    right = steps[rank:]

    def widen(left: jax.Array, best: jax.Array) -> jax.Array:
        gaps = right - steps[rank - left]
        return jnp.maximum(best, jnp.max(gaps * lax.dynamic_slice(factors, (left,), right.shape)))

    # After `reach` rounds, factors are below 2^-25 and gaps below 2^24, so products are below 1 and
    # cannot be the maximum. If decay is NaN, the loop has no such rounds.
    reach = jnp.where(decay > 0, jnp.minimum(jnp.ceil(18 / decay) + 1, float(rank)), 0)
    return lax.fori_loop(0, reach.astype(jnp.int32) + 1, widen, jnp.float32(1))


def discounts(decay: jax.Array, most: int) -> jax.Array:
    """e^(-k decay) for k = 0, ..., most, in float32."""
    return jnp.exp(-decay * jnp.arange(most + 1, dtype=jnp.float32))


def replacements_until(records: OrderedRecords, rank: int, bound: jax.Array) -> jax.Array:
    """The least k with A_k > bound; n + 1 if there is none. One record moves it by at most 1.

    `bound` is in steps. For every i, a binary search finds the first j >= r with x_j - x_i > bound.
    """
    left = records.steps[: rank + 1]
    right = records.steps[rank:]
    first = count_below(right, left + bound, or_equal=True)
    between = first + jnp.arange(rank, -1, -1, dtype=jnp.int32) - 1
    never = jnp.int32(records.n + 1)
    return jnp.min(jnp.where(first < right.size, between, never), initial=never)


class QuantileMechanism(SensitivityMechanism):
    """A base for mechanisms that sort records between public bounds, under replace-one."""

    delta: Scalar
    lower: float
    upper: float
    norm: Norm = "hamming"

    def _check_value(self, value: Value) -> None:
        check_one_array(value, "records, shape (n,)")

    def _checked(self, value: Value) -> jax.Array:
        """The records as an array; refuses anything else."""
        records = _checks.real_arrays("value", value)
        self._check_value(records)
        return records

    def clamped(self, value: Value) -> Value:
        """The records as they are sorted: between the bounds, with NaN as the lower one.

        Args:
            value: an array of records.

        Returns:
            An array of the same shape, as private as the value.
        """
        x = _checks.real_arrays("value", value)
        x = x.astype(compute_dtype(x.dtype))
        low, high = (jnp.asarray(bound).astype(x.dtype) for bound in (self.lower, self.upper))
        return jnp.clip(jnp.where(jnp.isnan(x), low, x), low, high)

    @property
    def dp_event(self) -> Any:
        """An event that no accountant knows: the privacy loss depends on the database."""
        return _checks.extra("dp_accounting", "accounting").UnsupportedDpEvent()


def check_bounds(lower: float, upper: float) -> tuple[float, float]:
    """Two public numbers in order, far enough apart for a grid between them."""
    low, high = _checks.finite("lower", lower), _checks.finite("upper", upper)
    if _checks.is_traced(low) or _checks.is_traced(high):
        raise TypeError("lower and upper must be known when the mechanism is made")
    if not low < high:
        raise ValueError(f"lower must be below upper, got {low:g} and {high:g}")
    width = high - low
    if width < 2.0**-20 * max(abs(low), abs(high)) or not 1e-25 < width < 1e25:
        raise ValueError(
            "lower and upper must be further apart, and less than 1e25 apart, got"
            f" {low:g} and {high:g}"
        )
    return low, high


def check_probability(probability: float) -> float:
    """A number in (0, 1) that is known when the mechanism is made."""
    p = _checks.fraction("probability", probability)
    if _checks.is_traced(p):
        raise TypeError("probability must be known when the mechanism is made")
    return float(p)


def rounding_of_a_release(magnitude: Scalar) -> Scalar:
    """A bound on the error of rounding a release of at most this magnitude to float32.

    Half of this bound is the largest error. The other half covers the rounding of the bound itself.
    """
    return magnitude * float(jnp.finfo(jnp.float32).eps)


# The decay is below beta by this margin: 2^-15 for the 16-bit divisor of the noise, 2^-16 for the
# factors in `smooth_bound`, and the rest for the rounding of products and quotients.
_SMOOTHNESS_MARGIN = 2.0**-14
_LEAST_DECAY = 2.0**-13
# A margin on alpha, and on w in `_smoothing`. It covers float32 and the tables of the noise.
_MARGIN = 2.0**-16
# On a finer grid, float32 could not hold all integers between the bounds.
_MOST_BITS = 23


@made_by_factory
class SmoothQuantile(QuantileMechanism):
    """Adds noise of a private scale to a quantile; made by `smooth_quantile`.

    Attributes:
        sensitivity: one record changes, norm "hamming".
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee.
        shift: alpha. The scale of the noise is the smooth sensitivity over alpha.
        decay: beta of the smooth sensitivity, minus a margin for rounding.
        lower: the lower bound of the records.
        upper: the upper bound of the records.
        probability: the probability of the quantile.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    delta: Scalar = up()
    shift: Scalar = down()
    decay: Scalar = down()
    lower: float
    upper: float
    probability: float = static()

    @property
    def _exponent(self) -> jax.Array:
        """The exponent of the grid. It depends on public numbers, and suits any private scale."""
        shift = jnp.where(self.shift > 0, jnp.asarray(self.shift, jnp.float32), 1)
        # The smooth sensitivity has at most 2^bits steps, and alpha is at least half of the power
        # of two that `frexp` finds. So the scale is below 2^25 steps.
        bits = jnp.minimum(jnp.frexp(shift)[1] + SCALE_BITS - 1, _MOST_BITS)
        width = jnp.asarray(self.upper, jnp.float32) - jnp.asarray(self.lower, jnp.float32)
        return (jnp.frexp(width)[1] - bits).astype(jnp.int32)

    def _measured(self, value: jax.Array) -> tuple[OrderedRecords, int, GridFit]:
        """The records in order, the rank of the quantile, and the fit of its noise."""
        records = OrderedRecords.of(value, (self.lower, self.upper), self._exponent)
        rank = rank_of(self.probability, records.n)
        smooth = smooth_bound(records, rank, self.decay)
        # A bad traced parameter is NaN here, and makes the release NaN.
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
        """The spacing of releases, a power of two; `value` does not matter."""
        del value
        return power_of_two(self._exponent, jnp.float32)

    def noise_scale(self, value: Value) -> jax.Array:
        """The scale of the noise on this database, S(x) / alpha. It is as private as the database.

        Call this on public or simulated records, to see the scale that you can expect.

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
            confidence: the probability, at least, that a release keeps the bound; in (0, 1).

        Returns:
            A scalar in the units of the records; it covers the rounding to the grid and to floats.
        """
        step = power_of_two(self._exponent, jnp.float32)
        quantile = noise_quantile(LAPLACE, confidence)
        # Covers the rounding of the bounds to the grid, and the relative rounding of the scale:
        # 2^-15 and a few floats.
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

    The global sensitivity of a quantile is upper - lower. The local one is small where records are
    dense around the quantile. S(x) is the largest local sensitivity of any database, times
    e^(-beta) for each record in which that database differs from x. The mechanism takes records.

    Args:
        epsilon: finite, above 0.
        delta: in (0, 1).
        lower: the lower bound of the records, which are clamped; public.
        upper: the upper bound of the records, public.
        probability: p, for the ceil(p n)-th smallest record, as in `targets.quantile`. At 0.5 it is
            the (lower) median.

    Returns:
        A `SmoothQuantile`: `mechanism(key, records)` takes numbers of shape (n,), NaN as lower, and
        releases a float, which may lie outside of the bounds. It takes O(n log n) time, plus at
        most 18 n / beta steps.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a number is out of range, the bounds are out of order, or beta is so small
            that the margin for rounding would exceed it; at a release, if the value is not one
            array of records.

    Formal guarantees:
        (epsilon, delta)-DP when one record is replaced, for the integers that are drawn, by the
        proof in docs/proofs/smooth-quantile.md. Here alpha = epsilon / 2. For w = (epsilon / 2) /
        beta the proof needs w >= 1, and w >= log(beta / delta) + epsilon / 2 - 1. The least such w
        is taken. Then 2^-14 is subtracted from beta, for rounding.

        The private scale reveals nothing more: the grid follows from epsilon and the bounds, and at
        every scale all integers are possible. The time of a release depends on the records, and may
        reveal something about them. There is no variant with delta = 0, because it needs noise with
        heavier tails, for which dpjax has no exact tables.

    Source:
        Nissim, Raskhodnikova and Smith (2007), sections 2 and 3.1. The proof is our own: the usual
        argument adds up to delta (1 + e^(epsilon / 2)) / 2, and its beta, epsilon /
        (2 log(2 / delta)), is 29% smaller at epsilon = 1, delta = 1e-6.

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
            f"epsilon={epsilon:g} is too small for delta={delta:g}: the margin for rounding would"
            " use all of it"
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
    """The numbers alpha and decay, rounded down.

    Let u = epsilon / 2. The decay is u / w, where w >= 1 solves w + log w = log u + u - 1 - log
    delta. Newton's method on this concave function ends slightly below the root. `_MARGIN` covers
    that.
    """
    traced = _checks.is_traced(epsilon) or _checks.is_traced(delta)
    numpy: Any = jnp if traced else np
    half = epsilon / 2
    total = numpy.log(half) + half - 1 - numpy.log(delta)
    w = numpy.maximum(total, 1.0)
    for _ in range(6):
        w = numpy.maximum(w * (1 + total - numpy.log(w)) / (w + 1), 1.0)
    decay = half / (w * (1 + _MARGIN)) - _SMOOTHNESS_MARGIN
    shift = half * (1 - _MARGIN)
    return (shift, decay) if traced else (float(shift), float(decay))
