"""Which grid a value is rounded to, and which integer divides the lattice's noise for it.

A value x becomes the integer round(x / g), a grid point, and gets the integer round(N / c): N is
noise on the fine lattice, of scale T. As x + round(Z) = round(x + Z) for integers x, that is
post-processing of c round(x / g) + N, whose noise has scale T on a lattice that c steps make one
grid step of. Its scale in the value's units, T g / c, covers

- the nominal scale;
- rounding to the grid, which moves every coordinate by at most one step more than the value moved:
  the sensitivity Delta becomes Delta + g ||1||, with the norm of the mechanism;
- the certificate of the tables: 2 loss per coordinate of epsilon, and e^(loss) of delta.

g is a power of two, so that x / g is exact, and c is rounded down.

docs/proofs/exact-noise.md has the proofs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._kernels import at_once
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype
from dpjax.random._noise import Lattice

# The least part of the sensitivity, over ||1||, that a grid step should be: a charge of .0008%. A
# finer grid would gain nothing, and its integers would clamp large values earlier.
_FINEST = 2.0**-17
# Covers the float32 roundings below, and the scale of the exponential's restarts.
_OUTWARD = 1 + 2.0**-19
_LARGEST_DIVISOR = 2.0**50
_DIVISOR_BITS = 16


class GridFit(NamedTuple):
    """A grid and the scale of the noise on it.

    Attributes:
        exponent: int32, the grid is 2^exponent; 0 for integers.
        divisor: uint32, below 2^16; c is divisor * 2^shift.
        shift: uint32.
        scale: of the noise, in units of the value; NaN where there is none that fits.

    Formal guarantees:
        Those of the module.
    """

    exponent: jax.Array
    divisor: jax.Array
    shift: jax.Array
    scale: jax.Array

    @property
    def points(self) -> Limbs:
        """Lattice points in a grid step, c."""
        unshifted = Limbs(jnp.zeros_like(self.divisor), self.divisor)
        return _limbs.shift_left(unshifted, self.shift)


@frozen_pytree
class Calibration:
    """What noise is calibrated to, in the units of the value.

    Attributes:
        scale: nominal scale of the noise.
        sensitivity: in the mechanism's norm.
        epsilon: of the guarantee.
        rounding: ||1||, the norm of ones in all float coordinates, those that are rounded.
        coordinates: how often the certificate's loss is charged, one for every noisy coordinate.
        zero_allowed: whether a scale of 0, no noise, was asked for by name.
        grid_dtype: float64 where all float leaves are, else float32: the grid is found in it.

    Formal guarantees:
        None of its own.
    """

    scale: Scalar
    sensitivity: Scalar
    epsilon: Scalar = up()
    rounding: Scalar
    coordinates: Scalar
    zero_allowed: bool = static(default=False)
    grid_dtype: Any = static(default=np.float32)

    def fit(self, lattice: Lattice, dtype: Any, exponent: Any = None) -> GridFit:
        """The grid for values of a dtype; its scale is NaN where none can carry the noise.

        Args:
            lattice: of the noise.
            dtype: of the values.
            exponent: of a grid that is given, as where several noises share one.
        """
        floating = bool(jnp.issubdtype(dtype, jnp.floating))
        # Not the default float, so that integers get the same noise with and without x64.
        compute = compute_dtype(dtype if floating else jnp.float32)
        if exponent is None:
            scale, sensitivity, _, rounding = self._numbers(self.grid_dtype)
            exponent = _exponent(lattice, scale, sensitivity, rounding, self.grid_dtype, jnp)
        scale, sensitivity, epsilon, rounding = self._numbers(compute)
        limits = jnp.finfo(compute)
        usable = (scale >= float(limits.tiny) / float(limits.eps)) & (scale < jnp.inf)
        grid = power_of_two(exponent, compute)
        needed = self._needed(lattice, scale, sensitivity, epsilon, rounding, grid)
        if not floating:
            exponent, grid = jnp.zeros_like(exponent), jnp.ones_like(grid)
        short, shift = _divisor(lattice, grid / needed, jnp)
        usable &= (short >= 1) & (4 * self._loss(lattice) < epsilon)
        short = jnp.where(usable, short, 1)
        drawn = float(lattice.resolution) / (short * power_of_two(shift, compute)) * grid
        drawn = jnp.where(usable, drawn, jnp.nan)
        return GridFit(exponent, short.astype(jnp.uint32), shift.astype(jnp.uint32), drawn)

    def fits(self, lattice: Lattice, dtype: Any) -> bool:
        """Whether a grid can carry the noise, for concrete numbers on the host."""
        scale, sensitivity, epsilon, rounding = (
            np.float64(x) for x in (self.scale, self.sensitivity, self.epsilon, self.rounding)
        )
        exponent = _exponent(lattice, scale, sensitivity, rounding, self.grid_dtype, np)
        grid = np.ldexp(1.0, exponent)
        needed = self._needed(lattice, scale, sensitivity, epsilon, rounding, grid)
        step = grid if jnp.issubdtype(dtype, jnp.floating) else 1.0
        short, shift = _divisor(lattice, step / needed, np)
        if sensitivity < float(jnp.finfo(self.grid_dtype).tiny):
            return False
        # One more than needed, for float32 finds a little less.
        return bool(short * 2.0**shift >= 2 and 4 * self._loss(lattice) < epsilon)

    def _numbers(self, dtype: Any) -> list[jax.Array]:
        numbers = (self.scale, self.sensitivity, self.epsilon, self.rounding)
        # Programs in which they are constants must compute with them like all others.
        return lax.optimization_barrier([jnp.asarray(x).astype(dtype) for x in numbers])

    def _loss(self, lattice: Lattice) -> Scalar:
        return self.coordinates * lattice.certificate.loss

    def _needed(
        self, lattice: Lattice, scale: Any, sensitivity: Any, epsilon: Any, rounding: Any, grid: Any
    ) -> Any:
        """The scale that covers rounding and tables; the grid is that of all leaves."""
        loss = self._loss(lattice)
        # (epsilon - a, delta) takes at most epsilon / (epsilon - a) times the noise of (epsilon,
        # delta), and delta e^-a at most 1 + 4 a times, for delta <= .9.
        certified = scale * (_OUTWARD * (1 + 4 * loss)) / (1 - 2 * loss / epsilon)
        return certified * (1 + rounding * (grid / sensitivity))

    def covers(self, lattice: Lattice, delta: Any, numpy: Any) -> Any:
        """Whether the margin that delta is calibrated with covers the mass that the tables miss."""
        if lattice.certificate.delta == 0:
            return True
        # Above .9 the scale does not cover e^loss, so the margin must.
        margin = numpy.minimum(delta, 1 - delta)
        small = self.coordinates * lattice.certificate.loss <= 2.0**-25 * margin
        enough = self.epsilon <= self.largest_epsilon(lattice, delta, numpy)
        return enough & (small | (delta <= 0.9))

    def largest_epsilon(self, lattice: Lattice, delta: Any, numpy: Any = np) -> Any:
        """The most at which the margin covers what tables that miss any mass do; may be below 0."""
        # (1 + e^epsilon) missed <= min(delta, 1 - delta) 2^-25, in logarithms, and the calibration
        # leaves 2^-24 of it.
        missed = self.coordinates * lattice.certificate.delta
        return numpy.log(numpy.minimum(delta, 1 - delta)) - math.log(missed) - 26 * math.log(2)


def _exponent(
    lattice: Lattice, scale: Any, sensitivity: Any, rounding: Any, dtype: Any, numpy: Any
) -> Any:
    """The exponent of the grid: one for all leaves, since every leaf is charged for all."""
    # Where so fine a grid leaves too little to divide, both errors are made equal.
    balanced = numpy.sqrt(scale / sensitivity * (rounding / float(lattice.resolution)))
    ideal = numpy.maximum(balanced, _FINEST) / numpy.maximum(rounding, 1)
    # The nearest power of two. By exponents: the product itself may underflow.
    (x, i), (y, j) = numpy.frexp(sensitivity), numpy.frexp(ideal)
    exponent = i + j + numpy.frexp(x * y * math.sqrt(2))[1] - 1
    limits = jnp.finfo(dtype)
    return numpy.clip(exponent, limits.minexp + 8, limits.maxexp - 8).astype(np.int32)


def _divisor(lattice: Lattice, steps: Any, numpy: Any) -> tuple[Any, Any]:
    """The lattice points in a grid step, rounded down to sixteen bits, and their shift."""
    points = numpy.floor(numpy.minimum(float(lattice.resolution) * steps, _LARGEST_DIVISOR))
    shift = numpy.maximum(numpy.frexp(points)[1] - _DIVISOR_BITS, 0).astype(np.int32)
    unit = power_of_two(-shift, points.dtype) if numpy is jnp else np.ldexp(1.0, -shift)
    return numpy.floor(points * unit), shift


def fit_of_scale(lattice: Lattice, exponent: jax.Array, scale: jax.Array) -> GridFit:
    """A fit for noise of at least a scale in steps of a given grid, which need not be public.

    The scale drawn exceeds it by a factor of at most 1 + 2^-14, in float32. Of at most 2^-17 of the
    resolution, c is even: then round(N / c) is floor(N / c + 1/2), the same function of the real
    number N / c for every such c.
    """
    short, shift = _divisor(lattice, 1 / scale, jnp)
    usable = (scale > 0) & (short >= 1)
    drawn = float(lattice.resolution) / (short * power_of_two(shift, scale.dtype))
    drawn = jnp.where(usable, drawn * power_of_two(exponent, scale.dtype), jnp.nan)
    short = jnp.where(usable, short, 1)
    return GridFit(exponent, short.astype(jnp.uint32), shift.astype(jnp.uint32), drawn)


def divided(noise: Limbs, fit: GridFit) -> Limbs:
    """round(noise / c), halves up."""
    centered = _limbs.add(noise, _limbs.halve(fit.points))
    return at_once(_limbs.floor_divide(_limbs.shift_right(centered, fit.shift), fit.divisor))
