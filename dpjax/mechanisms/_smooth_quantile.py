"""A quantile with noise of its smooth sensitivity: little where the records are dense around it.

docs/proofs/smooth-quantile.md has the proofs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import down, frozen_pytree, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._numerics import compute_dtype, outward
from dpjax.mechanisms._lattice_mechanism import as_number
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin
from dpjax.mechanisms._noise_intervals import noise_quantile
from dpjax.mechanisms._ordered_records import (
    OrderedRecords,
    check_bounds,
    check_records,
    clamped_records,
    rank_of,
    rounding_of_a_release,
    smooth_bound,
)
from dpjax.random._facade import (
    LAPLACE,
    SCALE_BITS,
    GridFit,
    laplace_steps,
    private_fit,
    steps_to_float,
)

# A margin of the decay: 2^-15 for the sixteen bits of the noise's divisor, 2^-16 for the factors of
# the smooth bound, and less for the products and quotients of floats between them.
_SMOOTHNESS_MARGIN = 2.0**-14
_LEAST_DECAY = 2.0**-13
# A margin of the scale and of w below. It covers float32 and the tables of the noise.
_MARGIN = 2.0**-16
# A finer grid would have more steps between the bounds than float32 knows integers.
_MOST_BITS = 23


@frozen_pytree
class SmoothQuantile(SensitivityMechanism):
    """Adds noise of a private scale to a quantile; made by `smooth_quantile`.

    Attributes:
        sensitivity: one record changes, norm "hamming".
        epsilon: of the guarantee.
        delta: of the guarantee.
        shift: how many scales of the noise the smooth sensitivity is, alpha.
        decay: of the smooth sensitivity, beta minus a margin for rounding.
        lower: of the records.
        upper: of the records.
        probability: of the quantile.

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
    def norm(self) -> Norm:
        """The norm of the sensitivity."""
        return "hamming"

    def _delta(self) -> Scalar:
        return self.delta

    def _check_value(self, value: Value) -> None:
        check_records(value)

    @property
    def _exponent(self) -> jax.Array:
        """Of the grid, by public numbers alone: noise of any private scale can be drawn on it."""
        shift = jnp.where(self.shift > 0, jnp.asarray(self.shift, jnp.float32), 1)
        # The scale is below 2^25 steps: at most 2^bits of them, over alpha >= 2^(exponent - 1).
        bits = jnp.minimum(jnp.frexp(shift)[1] + SCALE_BITS - 1, _MOST_BITS)
        width = jnp.asarray(self.upper, jnp.float32) - jnp.asarray(self.lower, jnp.float32)
        return (jnp.frexp(width)[1] - bits).astype(jnp.int32)

    def _measured(self, value: jax.Array) -> tuple[OrderedRecords, int, GridFit]:
        """The records in order, which of them is the quantile, and the noise that it gets."""
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
        """What the release is a multiple of, a power of two.

        Args:
            value: an array of records; its contents do not matter.

        Returns:
            A scalar.
        """
        del value
        return power_of_two(self._exponent, jnp.float32)

    def noise_scale(self, value: Value) -> jax.Array:
        """The scale of the noise that a database gets: S(x) / alpha, as private as the database.

        Run it on public or drawn records, to see what to expect.

        Args:
            value: an array of records, shape (n,).

        Returns:
            A scalar in the units of the records.
        """
        records = _checks.real_arrays("value", value)
        self._check_value(records)
        return _noise_scale(self, records)

    def clamped(self, value: Value) -> Value:
        """Records as they are ordered: between the bounds, NaN as the lower one.

        Args:
            value: an array of records.

        Returns:
            An array of the same shape, as private as the value.
        """
        return clamped_records(value, self.lower, self.upper)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        value = _checks.real_arrays("value", value)
        self._check_value(value)
        records, rank, fit = self._measured(value)
        dtype = compute_dtype(value.dtype)
        center = steps_to_float(records.absolute(records.steps[rank]), records.exponent, dtype)
        scale = fit.scale.astype(dtype)
        return LAPLACE.log_density((jnp.asarray(output, dtype) - center) / scale) - jnp.log(scale)

    def error(self, *, confidence: float = 0.95) -> Scalar:
        """A bound on the distance of a release from the true quantile, for all databases.

        The scale of the noise is private. This is the bound for the largest one, (upper - lower) /
        alpha. Run `noise_scale` on public records to see what to expect on databases like yours.

        Args:
            confidence: the probability, at least, that a release keeps the bound; in (0, 1).

        Returns:
            A scalar in the units of the records; it covers the rounding to the grid and to floats.
        """
        step = power_of_two(self._exponent, jnp.float32)
        quantile = noise_quantile(LAPLACE, confidence)
        # The bounds are rounded to the grid too, and the scale by up to 2^-14.
        scale = (self.upper - self.lower + step) / self.shift * (1 + 2.0**-13)
        bound = as_number(scale * quantile + step)
        return bound + rounding_of_a_release(max(abs(self.lower), abs(self.upper)) + bound)

    @property
    def dp_event(self) -> Any:
        """An event that no accountant knows: the privacy loss depends on the database."""
        return _checks.extra("dp_accounting", "accounting").UnsupportedDpEvent()


def smooth_quantile(
    epsilon: Scalar,
    delta: Scalar,
    *,
    lower: float,
    upper: float,
    probability: float = 0.5,
) -> SmoothQuantile:
    """A quantile with Laplace noise of scale S(x) / alpha, S the smooth sensitivity of the median.

    The global sensitivity of a quantile is upper - lower. S(x) is the largest local sensitivity of
    any database, times e^(-beta) for every record in which it differs from x: small where the
    records around the quantile are close to each other. Its mechanism takes the records themselves.

    Args:
        epsilon: finite, above 0.
        delta: in (0, 1).
        lower: of the records, which are clamped; public.
        upper: of the records, public.
        probability: of the quantile: the ceil(p n)-th smallest record, as `targets.quantile` has
            it. 0.5 is the (lower) median.

    Returns:
        A `SmoothQuantile`: `mechanism(key, records)` takes numbers of shape (n,), NaN as lower, and
        releases a float, which may lie outside of the bounds. It takes O(n log n) time, and n times
        18 / beta at most.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if one is out of range, the bounds are out of order, or epsilon is so small that
            rounding takes what beta is; at a release, if the value is not one array of records.

    Formal guarantees:
        (epsilon, delta)-DP when one record is replaced, for the noise that is drawn. With alpha =
        epsilon / 2, let the noise of the neighbor have 1/r of the scale, r <= e^beta. Where y is z
        scales from the quantile of x, log p(y) / p'(y) is at most alpha + beta for r <= 1, and
        alpha - log r + |z| (r - 1) for r > 1, since the two quantiles are at most alpha of either
        scale apart. Averaged over Laplace z, the excess over epsilon is

            (1 - 1/r) exp(-(epsilon - alpha + log r) / (r - 1)),

        which is largest for r = e^beta. With w = (epsilon / 2) / beta it is at most delta if w >= 1
        and w >= log(beta / delta) + epsilon / 2 - 1, by 1/(e^beta - 1) >= 1/beta - 1/2; the least
        such w is taken.

        That the scale is private gives nothing away: the grid is made of epsilon and the bounds,
        and for every scale all integers are possible. What is drawn, floor(x + N / c + 1/2) with an
        even integer c, is a function of the real number x + N / c, for which the proof is. beta
        pays 2^-14 for the sixteen bits of c and for floats in S, which is at least a step.
        How long a release takes depends on the records (they are sorted), and is not protected.

        There is no variant with delta = 0 here: it takes noise of heavier tails than there are
        exact tables for.

    Source:
        Nissim, Raskhodnikova and Smith (2007), sections 2 and 3.1. The usual constant, beta =
        epsilon / (2 log(2 / delta)), is 29% smaller at epsilon = 1, delta = 1e-6, and the usual
        argument, half of epsilon and of delta for shift and for scale each, adds up to
        delta (1 + e^(epsilon / 2)) / 2; the proof above stands by itself.

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
    p = _checks.fraction("probability", probability)
    if _checks.is_traced(p):
        raise TypeError("probability must be known when the mechanism is made")
    shift, decay = _smoothing(epsilon, delta)
    if not _checks.is_traced(decay) and decay < _LEAST_DECAY:
        raise ValueError(
            f"epsilon={epsilon:g} is too small for delta={delta:g}: rounding would take all of it"
        )
    if _checks.is_traced(decay):
        usable = decay >= _LEAST_DECAY
        epsilon = jnp.where(usable, outward(epsilon, math.inf), jnp.nan)
        shift = jnp.where(usable, shift, jnp.nan)
    return SmoothQuantile(sensitivity, epsilon, delta, shift, decay, low, high, p)


@jax.jit
def _noise_scale(mechanism: SmoothQuantile, value: jax.Array) -> jax.Array:
    return mechanism._measured(value)[2].scale


def _smoothing(epsilon: Scalar, delta: Scalar) -> tuple[Scalar, Scalar]:
    """Alpha and the decay, rounded down: w + log w = log u + u - 1 - log delta by Newton's method.

    The function is concave, so Newton's method ends a little below the root. The margin covers it.
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
