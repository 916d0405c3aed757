"""The grid to which values are rounded, and the divisor that scales table noise to the grid.

A value x becomes the integer X = round(x / g), where g is the step of the grid. Let N be noise of
scale T on the fine lattice, drawn from tables. The release is X + round(N / c), so a step of the
grid corresponds to c lattice points. The release is post-processing of c X + N, because X +
round(Z) = round(X + Z) for every integer X. Discrete Laplace noise is floor(N / c) - floor(M / c),
for exponential N and M. In units of the value, the scale of the noise is T g / c. This scale must
cover

- the nominal scale;
- the rounding to the grid: the difference of two rounded coordinates may be one step larger, so the
  sensitivity Delta becomes Delta + g ||1||, in the norm of the mechanism;
- the errors of the tables, which their certificate bounds: each coordinate adds 2 loss to epsilon,
  and multiplies delta by e^loss.

The step g is a power of two, so that x / g is exact. The divisor c is rounded down, which makes the
noise larger.

docs/proofs/exact-noise.md has the proofs.
"""

import dataclasses
import math
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpjax._core._checks import any_traced
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._kernels import at_once
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, float_limits
from dpjax.random._lattice import LatticeNoise, Pair
from dpjax.random._noise import Lattice

# The step of the grid is at least about this fraction of sensitivity / max(rounding, 1). This
# smallest step increases the noise by 0.0008%. With a finer grid, the noise would hardly be
# smaller, and large values would be clamped earlier.
_FINEST = 2.0**-17
# This factor covers the float32 rounding errors below. It also covers the errors of the tables for
# exponential noise above 24 units: such noise is a sum of several draws, and their errors add up.
_OUTWARD = 1 + 2.0**-19
_LARGEST_DIVISOR = 2.0**50
_DIVISOR_BITS = 16


# Checks compute with numbers on the host, and draws compute with JAX scalars.
_Number: TypeAlias = float | np.ndarray | np.floating | jax.Array


def is_usable(scale: Any) -> jax.Array:
    """Whether a scale, and its rounding unit, are normal numbers of its dtype.

    Devices may flush subnormal numbers to 0.
    """
    limits = float_limits(scale.dtype)
    return (scale >= float(limits.tiny) / float(limits.eps)) & (scale < jnp.inf)


class GridFit(NamedTuple):
    """A grid, and the scale of the noise on it.

    Attributes:
        exponent: int32; the step of the grid is 2^exponent; for integers, the exponent is 0.
        divisor: uint32, below 2^16. A step of the grid has c = divisor * 2^shift lattice points.
        shift: uint32, see `divisor`.
        scale: the scale of the noise, in units of the value; NaN if no divisor fits.
    """

    exponent: jax.Array
    divisor: jax.Array
    shift: jax.Array
    scale: jax.Array

    @classmethod
    def of(
        cls,
        lattice: Lattice,
        exponent: jax.Array,
        step: jax.Array,
        ratio: jax.Array,
        usable: jax.Array | bool,
        numpy: ModuleType = jnp,
    ) -> "GridFit":
        """Returns the fit for noise that is at least as large as a given scale.

        Args:
            lattice: the lattice of the noise.
            exponent: see the attribute.
            step: the step of the grid, in units of the value.
            ratio: the step of the grid, divided by the given scale.
            usable: whether the given scale is in range; otherwise the scale of the fit is NaN.
            numpy: `jax.numpy`, or NumPy, which computes with numbers on the host without
                compilation.
        """
        points = numpy.floor(numpy.minimum(float(lattice.resolution) * ratio, _LARGEST_DIVISOR))
        usable &= points >= 1
        points = numpy.where(usable, points, numpy.ones_like(points))
        # `_limbs.floor_divide` needs a divisor of at most 16 bits. Rounding the divisor down makes
        # the noise larger.
        shift = numpy.maximum(numpy.frexp(points)[1] - _DIVISOR_BITS, 0).astype(np.int32)
        short = numpy.floor(points * _power(-shift, points.dtype, numpy))
        drawn = float(lattice.resolution) / (short * _power(shift, points.dtype, numpy)) * step
        # A check of a traced number cannot raise an error, so an unusable number gives NaN.
        drawn = numpy.where(usable, drawn, np.nan * drawn)
        return cls(exponent, short.astype(np.uint32), shift.astype(np.uint32), drawn)

    @property
    def points(self) -> Limbs:
        """The divisor c: how many lattice points make one step of the grid."""
        unshifted = Limbs(jnp.zeros_like(self.divisor), self.divisor)
        return _limbs.shift_left(unshifted, self.shift)


@frozen_pytree
class Calibration:
    """The numbers that determine the scale of noise, in units of the value.

    Attributes:
        scale: the nominal scale of the noise.
        sensitivity: the sensitivity in the mechanism's norm.
        epsilon: the epsilon of the guarantee.
        rounding: the norm of a vector that is 1 in each float coordinate and 0 in each integer
            coordinate. Only float coordinates are rounded.
        coordinates: the number of noisy coordinates. For each of them, the error of the noise
            tables, `Certificate.loss`, is added to the privacy loss.
        zero_allowed: whether the caller explicitly allowed a scale of 0, which means no noise.
        grid_dtype: the dtype in which the grid is computed: float64 if all float leaves have this
            dtype, else float32.
    """

    scale: Scalar
    sensitivity: Scalar
    epsilon: Scalar = up()
    rounding: Scalar
    coordinates: Scalar
    zero_allowed: bool = static(default=False)
    grid_dtype: DTypeLike = static(default=np.float32)

    def fit(self, lattice: Lattice, dtype: DTypeLike, exponent: jax.Array | None = None) -> GridFit:
        """The grid for values of a dtype, and the scale of the noise on it.

        The scale is computed from the divisor of the lattice, and is at least the scale that is
        needed. If no divisor gives such a scale, the scale is NaN. The computation is in floats,
        also inside of `jit`. Every rounding makes the scale larger, or is covered by `_OUTWARD`.

        Args:
            lattice: the lattice of the noise.
            dtype: the dtype of the values.
            exponent: the exponent of a known grid, if several noises share it; None finds one.
        """
        if any_traced(self, exponent):
            return self._fit(lattice, np.dtype(dtype), exponent, jnp)
        # NumPy needs no compilation. NumPy and JAX round every operation alike, except that XLA may
        # fuse a product into a sum. `_OUTWARD` covers this difference.
        with np.errstate(all="ignore"):
            return self._fit(lattice, np.dtype(dtype), exponent, np)

    def _fit(self, lattice: Lattice, dtype: np.dtype, exponent: Any, numpy: ModuleType) -> GridFit:
        floating = bool(jnp.issubdtype(dtype, jnp.floating))
        # Noise for integers is computed in float32, not in the default float dtype, so that x64
        # does not change it.
        compute = compute_dtype(dtype if floating else jnp.float32)
        if exponent is None:
            exponent = self._in(self.grid_dtype, numpy)._exponent(lattice, numpy)
        known, grid = self._in(compute, numpy), _power(exponent, compute, numpy)
        # The second condition makes the denominator in `_needed` larger than 1/2.
        usable = is_usable(known.scale) & (4 * known._loss(lattice) < known.epsilon)
        # Integers are not rounded, so their step is 1. However, `_needed` uses the grid of the
        # float leaves even for integers, because one sensitivity bounds the changes of all leaves
        # together.
        step = grid if floating else numpy.ones_like(grid)
        exponent = exponent if floating else numpy.zeros_like(exponent)
        ratio = step / known._needed(lattice, grid)
        return GridFit.of(lattice, exponent, step, ratio, usable, numpy)

    def fits(self, lattice: Lattice, dtype: DTypeLike) -> bool:
        """Whether `fit` finds a divisor of the lattice. Numbers must be concrete, not traced."""
        if self.sensitivity < float(float_limits(self.grid_dtype).tiny):
            return False
        found = self.fit(lattice, dtype)
        # When noise is drawn, the same numbers may be rounded differently. So the divisor may then
        # be smaller by 1 than the divisor found here.
        return bool(found.scale > 0) and int(found.divisor) << int(found.shift) >= 2

    def _in(self, dtype: DTypeLike, numpy: ModuleType) -> "Calibration":
        """Converts all numbers to arrays of a dtype."""
        names = ("scale", "sensitivity", "epsilon", "rounding")
        numbers = [numpy.asarray(getattr(self, name)).astype(dtype) for name in names]
        if numpy is jnp:
            # XLA folds constants at compile time, and might round them differently from a program
            # that receives these numbers as arguments. Both programs must compute the same grid, so
            # a barrier prevents constant folding.
            numbers = lax.optimization_barrier(numbers)
        return dataclasses.replace(self, **dict(zip(names, numbers, strict=True)))

    def _loss(self, lattice: Lattice) -> Scalar:
        return self.coordinates * lattice.certificate.loss

    def _needed(self, lattice: Lattice, grid: jax.Array) -> jax.Array:
        """Returns a scale that is large enough for the errors of the tables and of rounding.

        `grid` is the step of the grid that all leaves share.
        """
        loss = self._loss(lattice)
        # docs/proofs/exact-noise.md, "The scale that covers everything": let a = 2 loss. To lower
        # epsilon to epsilon - a, it is enough to multiply the scale by epsilon / (epsilon - a). To
        # lower delta to delta * e^-loss, it is enough to multiply the scale by 1 + 4 loss, if delta
        # is at most 0.9.
        certified = self.scale * (_OUTWARD * (1 + 4 * loss)) / (1 - 2 * loss / self.epsilon)
        return certified * (1 + self.rounding * (grid / self.sensitivity))

    def _exponent(self, lattice: Lattice, numpy: ModuleType) -> jax.Array:
        """Returns the exponent of the grid that all leaves share.

        Every power of two is a valid step g of the grid. The chosen step keeps the noise small.
        Rounding values to the grid increases the scale by the factor 1 + rounding * g /
        sensitivity. A step of the grid spans c points of the noise's lattice, where c is
        proportional to g. Rounding c down to an integer increases the scale by a factor of about
        1 + 1 / c.
        """
        # The step for which both factors are equal, in units of sensitivity / rounding.
        ratio = self.scale / self.sensitivity
        balanced = numpy.sqrt(ratio * (self.rounding / float(lattice.resolution)))
        ideal = numpy.maximum(balanced, _FINEST) / numpy.maximum(self.rounding, 1)
        # The power of two nearest to sensitivity * ideal, computed from exponents because the
        # product may underflow.
        (x, i), (y, j) = numpy.frexp(self.sensitivity), numpy.frexp(ideal)
        exponent = i + j + numpy.frexp(x * y * math.sqrt(2))[1] - 1
        limits = float_limits(self.grid_dtype)
        return numpy.clip(exponent, limits.minexp + 8, limits.maxexp - 8).astype(np.int32)

    def covers(self, lattice: Lattice, delta: _Number, numpy: ModuleType) -> bool | _Number:
        """Whether the reserved part of delta pays for the outcomes that the tables omit."""
        if lattice.certificate.delta == 0:
            return True
        # The part of delta that the calibration reserves is 2^-24 `margin`. If delta is above 0.9,
        # the scale does not cover the factor e^loss (see `_needed`). Then the reserved part must
        # cover this factor.
        margin = numpy.minimum(delta, 1 - delta)
        small = self.coordinates * lattice.certificate.loss <= 2.0**-25 * margin
        enough = self.epsilon <= self.largest_epsilon(lattice, delta, numpy)
        return enough & (small | (delta <= 0.9))

    def largest_epsilon(self, lattice: Lattice, delta: _Number, numpy: ModuleType = np) -> _Number:
        """The largest epsilon for which the reserved delta is enough; below 0 if there is none."""
        return largest_epsilon(self.coordinates * lattice.certificate.delta, delta, numpy)


def largest_epsilon(missed: Scalar, delta: _Number, numpy: ModuleType = np) -> _Number:
    """Returns the largest epsilon for which the reserved part of delta is enough.

    `missed` is the probability of outcomes that the tables omit. These outcomes add
    (1 + e^epsilon) * `missed` to delta.
    """
    # The calibration reserves 2^-24 min(delta, 1 - delta) of delta. Half of this is for the omitted
    # outcomes. They add at most 2 e^epsilon * missed to delta. At the largest epsilon, this bound
    # equals half of the reserved part: 2^-25 min(delta, 1 - delta).
    return numpy.log(numpy.minimum(delta, 1 - delta)) - math.log(missed) - 26 * math.log(2)


def _power(exponent: Any, dtype: DTypeLike, numpy: ModuleType) -> Any:
    """Returns 2^exponent, which must be a normal number of the dtype."""
    if numpy is np:
        return np.ldexp(np.ones((), dtype), exponent)
    return power_of_two(exponent, dtype)


def divided(noise: LatticeNoise, fit: GridFit) -> Limbs:
    """Returns `quotients(noise, fit)`, computed in one loop."""
    return at_once(quotients(noise, fit))


def quotients(noise: LatticeNoise, fit: GridFit) -> Limbs:
    """Returns noise in steps of the grid: round(noise / c), with halves rounded up.

    c is the number of lattice points in a step of the grid. For a `Pair` of draws, the result is
    floor(first / c) - floor(second / c).
    """

    def quotient(points: Limbs) -> Limbs:
        return _limbs.floor_divide(_limbs.shift_right(points, fit.shift), fit.divisor)

    if isinstance(noise, Pair):
        return _limbs.subtract(quotient(noise.first), quotient(noise.second))
    centered = _limbs.add(noise, _limbs.halve(fit.points))
    return quotient(centered)
