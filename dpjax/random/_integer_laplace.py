"""Laplace noise for one integer, where the scale may be private."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._limbs import Limbs
from dpjax.random._grid_fit import Calibration, GridFit, divided, divisor
from dpjax.random._noise import LAPLACE_LATTICE

# A private scale should have at most 2^25 steps of a grid: see `private_fit`.
SCALE_BITS = 25


def laplace_steps(key: jax.Array, *fits: GridFit) -> tuple[Limbs, ...]:
    """Independent noise for several integers, one for each fit."""
    drawn = LAPLACE_LATTICE.sample(key, (len(fits),))
    return tuple(divided(Limbs(*(limb[i] for limb in drawn)), fit) for i, fit in enumerate(fits))


def integer_fit(scale: Scalar, sensitivity: Scalar, epsilon: Scalar, count: int) -> GridFit:
    """The fit of noise for one of `count` integers that are released under one epsilon."""
    calibration = Calibration(scale, sensitivity, epsilon, 0.0, count)
    return calibration.fit(LAPLACE_LATTICE, "int32")


def private_fit(exponent: jax.Array, scale: jax.Array) -> GridFit:
    """A fit for noise of at least a scale, in steps of a given grid; the scale may be private.

    The drawn scale exceeds it by a factor of at most 1 + 2^-15, because c has at least 2^15 units,
    and 1 +- 2^-21 for float32. A scale of at most 2^-17 of the resolution makes c even, because c
    then has a shift. For even c, round(N / c) is floor(N / c + 1/2): the same function of the real
    number N / c for every private c.
    """
    resolution = float(LAPLACE_LATTICE.resolution)
    short, shift = divisor(LAPLACE_LATTICE, 1 / scale, jnp)
    usable = (scale > 0) & (short >= 1)
    short = jnp.where(usable, short, 1)
    drawn = resolution / (short * power_of_two(shift, scale.dtype))
    drawn = jnp.where(usable, drawn * power_of_two(exponent, scale.dtype), jnp.nan)
    return GridFit(exponent, short.astype(jnp.uint32), shift.astype(jnp.uint32), drawn)


def steps_to_float(steps: Limbs, exponent: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Steps of a grid as a float. Everything before is integer, so this is post-processing."""
    return _limbs.to_float(steps, dtype) * power_of_two(exponent, dtype)
