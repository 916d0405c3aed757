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
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _limbs
from dpjax._grid import power_of_two
from dpjax._limbs import Limbs
from dpjax._numerics import compute_dtype
from dpjax.base import Scalar
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


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What noise is calibrated to, in the units of the value.

    Attributes:
        scale: nominal scale of the noise.
        sensitivity: in the mechanism's norm.
        epsilon: of the guarantee.
        rounding: ||1||, the norm of ones in all float coordinates, those that are rounded.
        coordinates: number of coordinates that get noise.
        zero_allowed: whether a scale of 0, no noise, was asked for by name.

    Formal guarantees:
        None of its own.
    """

    scale: Scalar
    sensitivity: Scalar
    epsilon: Scalar
    rounding: Scalar
    coordinates: int
    zero_allowed: bool = False

    def fit(self, lattice: Lattice, dtype: Any) -> GridFit:
        """The grid for values of a dtype; its scale is NaN where none can carry the noise."""
        # Not the default float, so that integers get the same noise with and without x64.
        floating = jnp.issubdtype(dtype, jnp.floating)
        compute = compute_dtype(dtype if floating else jnp.float32)
        scale, *others = (
            jnp.asarray(x).astype(compute)
            for x in (self.scale, self.sensitivity, self.epsilon, self.rounding)
        )
        return _fitted(lattice, scale, *others, self.coordinates, floating)

    def fits(self, lattice: Lattice, dtype: Any) -> bool:
        """Whether a grid can carry the noise, for concrete numbers on the host."""
        numbers = (self.scale, self.sensitivity, self.epsilon, self.rounding)
        floating = jnp.issubdtype(dtype, jnp.floating)
        _, divisor = _steps(lattice, *map(np.float64, numbers), self.coordinates, floating, np)
        # One more than needed, for float32 finds a little less.
        return bool(divisor >= 2)

    def covers(self, lattice: Lattice, delta: Any, numpy: Any) -> Any:
        """Whether the margin that delta is calibrated with covers the mass that the tables miss."""
        missed = self.coordinates * lattice.certificate.delta
        if missed == 0:
            return True
        # (1 + e^epsilon) missed <= min(delta, 1 - delta) 2^-25, in logarithms, and the calibration
        # leaves 2^-24 of it; above .9 the scale does not cover e^loss, so that margin must.
        room = math.log(missed) + 26 * math.log(2)
        margin = numpy.minimum(delta, 1 - delta)
        small = self.coordinates * lattice.certificate.loss <= 2.0**-25 * margin
        return (self.epsilon + room <= numpy.log(margin)) & (small | (delta <= 0.9))


def _fitted(
    lattice: Lattice,
    scale: jax.Array,
    sensitivity: jax.Array,
    epsilon: jax.Array,
    rounding: jax.Array,
    coordinates: int,
    floating: bool,
) -> GridFit:
    limits = jnp.finfo(scale.dtype)
    usable = (scale >= float(limits.tiny) / float(limits.eps)) & (scale < jnp.inf)
    exponent, divisor = _steps(
        lattice, scale, sensitivity, epsilon, rounding, coordinates, floating, jnp
    )
    usable &= divisor >= 1
    divisor = jnp.where(usable, divisor, 1)
    grid = power_of_two(exponent, scale.dtype)
    drawn = jnp.where(usable, float(lattice.resolution) / divisor * grid, jnp.nan)
    shift = jnp.maximum(jnp.frexp(divisor)[1] - _DIVISOR_BITS, 0).astype(jnp.int32)
    short = divisor * power_of_two(-shift, scale.dtype)
    return GridFit(exponent, short.astype(jnp.uint32), shift.astype(jnp.uint32), drawn)


def _steps(
    lattice: Lattice,
    scale: Any,
    sensitivity: Any,
    epsilon: Any,
    rounding: Any,
    coordinates: int,
    floating: bool,
    numpy: Any,
) -> tuple[Any, Any]:
    """The exponent of the grid, and the divisor as a float, NaN or below 1 where none fits."""
    points = float(lattice.resolution)
    loss = coordinates * lattice.certificate.loss
    # (epsilon - a, delta) takes at most epsilon / (epsilon - a) times the noise of (epsilon,
    # delta), and delta e^-a at most 1 + 4 a times, for delta <= .9.
    certified = scale * (_OUTWARD * (1 + 4 * loss)) / (1 - 2 * loss / epsilon)
    # Where a grid of a thousandth is too fine to divide the noise for, both errors are made equal.
    ideal = numpy.maximum(numpy.sqrt(scale / sensitivity * (rounding / points)), _FINEST)
    exponent = numpy.frexp(sensitivity * (ideal / numpy.maximum(rounding, 1)))[1] - 1
    limits = jnp.finfo(scale.dtype)
    exponent = numpy.clip(exponent, limits.minexp + 8, limits.maxexp - 8).astype(np.int32)
    grid = power_of_two(exponent, scale.dtype) if numpy is jnp else np.ldexp(1.0, exponent)
    needed = certified * (1 + rounding * (grid / sensitivity))
    if not floating:
        exponent, grid = numpy.zeros_like(exponent), numpy.ones_like(grid)
    divisor = numpy.floor(numpy.minimum(points * (grid / needed), _LARGEST_DIVISOR))
    # Down to sixteen significant bits, which makes division short.
    last = numpy.maximum(numpy.frexp(divisor)[1] - _DIVISOR_BITS, 0).astype(np.int32)
    unit = power_of_two(last, scale.dtype) if numpy is jnp else np.ldexp(1.0, last)
    divisor = numpy.floor(divisor / unit) * unit
    return exponent, numpy.where(2 * loss < epsilon, divisor, 0)


def divided(noise: Limbs, fit: GridFit) -> Limbs:
    """round(noise / c), halves up."""
    centered = _limbs.add(noise, _limbs.halve(fit.points))
    return _limbs.floor_divide(_limbs.shift_right(centered, fit.shift), fit.divisor)
