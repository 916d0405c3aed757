"""The grid to which a value is rounded, and the divisor that scales noise from tables to the grid.

A value x becomes the integer X = round(x / g), where g is the step of the grid. Let N be noise of
scale T on the fine lattice, drawn from tables. The release is X + round(N / c), so a grid step is c
lattice points. The release is post-processing of c X + N, because X + round(Z) = round(X + Z) for
an integer X. Discrete Laplace noise is floor(N / c) - floor(M / c), for exponential N and M. In
units of the value, the noise has the scale T g / c. This scale must cover

- the nominal scale;
- rounding to the grid: the difference of two rounded coordinates may be one step larger, so the
  sensitivity Delta becomes Delta + g ||1||, in the norm of the mechanism;
- the errors of the tables, by their certificate: each coordinate adds 2 loss to epsilon, and
  multiplies delta by e^loss.

g is a power of two, so that x / g is exact. c is rounded down, which makes the noise larger.

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

# A grid step is at least this fraction of sensitivity / ||1||, which increases the noise by .0008%.
# A finer grid would have no benefit, and would clamp large values earlier.
_FINEST = 2.0**-17
# This factor covers the float32 rounding errors below, and the error of exponential draws that
# restart.
_OUTWARD = 1 + 2.0**-19
_LARGEST_DIVISOR = 2.0**50
_DIVISOR_BITS = 16


# Checks use numbers on the host, and draws use JAX scalars.
_Number: TypeAlias = float | np.ndarray | np.floating | jax.Array


def is_usable(scale: Any) -> jax.Array:
    """Whether a scale is in the range of its dtype, with a rounding unit that is not subnormal.

    Devices may flush subnormal numbers to 0.
    """
    limits = float_limits(scale.dtype)
    return (scale >= float(limits.tiny) / float(limits.eps)) & (scale < jnp.inf)


class GridFit(NamedTuple):
    """A grid and the scale of the noise on it.

    Attributes:
        exponent: int32; a grid step is 2^exponent; 0 for integers.
        divisor: uint32, below 2^16; c is divisor * 2^shift.
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
        """The fit for noise that is at least as large as a given scale.

        Args:
            lattice: the lattice of the noise.
            exponent: see the attribute.
            step: a grid step, in units of the value.
            ratio: a grid step, divided by the given scale.
            usable: whether the given scale is in range; otherwise the scale of the fit is NaN.
            numpy: JAX's or NumPy's, which computes numbers on the host without compilation.
        """
        points = numpy.floor(numpy.minimum(float(lattice.resolution) * ratio, _LARGEST_DIVISOR))
        usable &= points >= 1
        points = numpy.where(usable, points, numpy.ones_like(points))
        # `_limbs.floor_divide` accepts divisors of 16 bits. Rounding down makes the noise larger.
        shift = numpy.maximum(numpy.frexp(points)[1] - _DIVISOR_BITS, 0).astype(np.int32)
        short = numpy.floor(points * _power(-shift, points.dtype, numpy))
        drawn = float(lattice.resolution) / (short * _power(shift, points.dtype, numpy)) * step
        # A traced number cannot raise an error, so it gives NaN.
        drawn = numpy.where(usable, drawn, np.nan * drawn)
        return cls(exponent, short.astype(np.uint32), shift.astype(np.uint32), drawn)

    @property
    def points(self) -> Limbs:
        """Lattice points in a grid step, c."""
        unshifted = Limbs(jnp.zeros_like(self.divisor), self.divisor)
        return _limbs.shift_left(unshifted, self.shift)


@frozen_pytree
class Calibration:
    """The numbers that determine the scale of noise, in units of the value.

    Attributes:
        scale: the nominal scale of the noise.
        sensitivity: the sensitivity in the mechanism's norm.
        epsilon: the epsilon of the guarantee.
        rounding: the norm of a vector with a 1 in each float coordinate, which is rounded, and a 0
            in each integer coordinate.
        coordinates: the number of noisy coordinates, each of which adds the certificate's loss.
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
        """The grid for values of a dtype; its scale is NaN if no divisor fits.

        It computes in floats, also inside of `jit`. Every rounding is outward, or is covered by
        `_OUTWARD`. The returned scale is computed from the divisor, and is at least the scale that
        is needed.

        Args:
            lattice: the lattice of the noise.
            dtype: the dtype of the values.
            exponent: the exponent of a known grid, if several noises share it; None finds one.
        """
        if any_traced(self, exponent):
            return self._fit(lattice, np.dtype(dtype), exponent, jnp)
        # NumPy needs no compilation. Both round every step alike, except that XLA may fuse a
        # product into a sum. `_OUTWARD` covers the difference.
        with np.errstate(all="ignore"):
            return self._fit(lattice, np.dtype(dtype), exponent, np)

    def _fit(self, lattice: Lattice, dtype: np.dtype, exponent: Any, numpy: ModuleType) -> GridFit:
        floating = bool(jnp.issubdtype(dtype, jnp.floating))
        # Integers use float32, not the default float dtype, so that x64 does not change the noise.
        compute = compute_dtype(dtype if floating else jnp.float32)
        if exponent is None:
            exponent = self._in(self.grid_dtype, numpy)._exponent(lattice, numpy)
        known, grid = self._in(compute, numpy), _power(exponent, compute, numpy)
        # The second condition keeps the denominator of `_needed` above 1/2.
        usable = is_usable(known.scale) & (4 * known._loss(lattice) < known.epsilon)
        # Integers are not rounded, so their step is 1. `_needed` still uses the grid of the float
        # leaves, because one sensitivity bounds the changes of all leaves together.
        step = grid if floating else numpy.ones_like(grid)
        exponent = exponent if floating else numpy.zeros_like(exponent)
        ratio = step / known._needed(lattice, grid)
        return GridFit.of(lattice, exponent, step, ratio, usable, numpy)

    def fits(self, lattice: Lattice, dtype: DTypeLike) -> bool:
        """Whether `fit` finds a divisor, for concrete numbers."""
        if self.sensitivity < float(float_limits(self.grid_dtype).tiny):
            return False
        found = self.fit(lattice, dtype)
        # A draw may round the same numbers in another way, and its divisor may be 1 less.
        return bool(found.scale > 0) and int(found.divisor) << int(found.shift) >= 2

    def _in(self, dtype: DTypeLike, numpy: ModuleType) -> "Calibration":
        """Converts all numbers to arrays of a dtype."""
        names = ("scale", "sensitivity", "epsilon", "rounding")
        numbers = [numpy.asarray(getattr(self, name)).astype(dtype) for name in names]
        if numpy is jnp:
            # XLA folds constants at compile time, and may round differently from a program that
            # gets these numbers as arguments. Both programs must compute the same grid, so a
            # barrier prevents folding.
            numbers = lax.optimization_barrier(numbers)
        return dataclasses.replace(self, **dict(zip(names, numbers, strict=True)))

    def _loss(self, lattice: Lattice) -> Scalar:
        return self.coordinates * lattice.certificate.loss

    def _needed(self, lattice: Lattice, grid: jax.Array) -> jax.Array:
        """The scale that covers tables and rounding, for the common grid of all leaves."""
        loss = self._loss(lattice)
        # docs/proofs/exact-noise.md, "The scale that covers everything": let a = 2 loss. An epsilon
        # lowered to epsilon - a needs at most epsilon / (epsilon - a) times the noise. For
        # delta <= .9, a delta lowered to delta e^-loss needs at most 1 + 4 loss times the noise.
        certified = self.scale * (_OUTWARD * (1 + 4 * loss)) / (1 - 2 * loss / self.epsilon)
        return certified * (1 + self.rounding * (grid / self.sensitivity))

    def _exponent(self, lattice: Lattice, numpy: ModuleType) -> jax.Array:
        """The exponent of the grid, which all leaves share.

        Every power of two is a correct step of the grid. The chosen one keeps the noise small. A
        step g increases the scale by the factor 1 + rounding * g / sensitivity, and rounding c down
        by about 1 + 1 / c.
        """
        # The step at which both factors are equal, in units of sensitivity / rounding.
        ratio = self.scale / self.sensitivity
        balanced = numpy.sqrt(ratio * (self.rounding / float(lattice.resolution)))
        ideal = numpy.maximum(balanced, _FINEST) / numpy.maximum(self.rounding, 1)
        # The power of two nearest to sensitivity * ideal. The product itself may underflow.
        (x, i), (y, j) = numpy.frexp(self.sensitivity), numpy.frexp(ideal)
        exponent = i + j + numpy.frexp(x * y * math.sqrt(2))[1] - 1
        limits = float_limits(self.grid_dtype)
        return numpy.clip(exponent, limits.minexp + 8, limits.maxexp - 8).astype(np.int32)

    def covers(self, lattice: Lattice, delta: _Number, numpy: ModuleType) -> bool | _Number:
        """Whether the margin in delta covers the probability that the tables omit."""
        if lattice.certificate.delta == 0:
            return True
        # For delta above .9, the scale does not cover the factor e^loss (see `_needed`). Then the
        # margin must cover it.
        margin = numpy.minimum(delta, 1 - delta)
        small = self.coordinates * lattice.certificate.loss <= 2.0**-25 * margin
        enough = self.epsilon <= self.largest_epsilon(lattice, delta, numpy)
        return enough & (small | (delta <= 0.9))

    def largest_epsilon(self, lattice: Lattice, delta: _Number, numpy: ModuleType = np) -> _Number:
        """The largest epsilon at which the margin covers the omitted probability, or below 0."""
        # The calibration leaves a margin of 2^-24 min(delta, 1 - delta). Half of it must cover
        # (1 + e^epsilon) missed, which is at most 2 e^epsilon missed. In logarithms:
        missed = self.coordinates * lattice.certificate.delta
        return numpy.log(numpy.minimum(delta, 1 - delta)) - math.log(missed) - 26 * math.log(2)


def _power(exponent: Any, dtype: DTypeLike, numpy: ModuleType) -> Any:
    """2^exponent, for exponents of normal numbers."""
    if numpy is np:
        return np.ldexp(np.ones((), dtype), exponent)
    return power_of_two(exponent, dtype)


def divided(noise: LatticeNoise, fit: GridFit) -> Limbs:
    """round(noise / c), halves rounded up; for a pair, floor(first / c) - floor(second / c)."""

    def quotient(points: Limbs) -> Limbs:
        return _limbs.floor_divide(_limbs.shift_right(points, fit.shift), fit.divisor)

    if isinstance(noise, Pair):
        return at_once(_limbs.subtract(quotient(noise.first), quotient(noise.second)))
    centered = _limbs.add(noise, _limbs.halve(fit.points))
    return at_once(quotient(centered))
