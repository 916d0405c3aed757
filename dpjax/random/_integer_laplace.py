"""Laplace noise for one integer, where the scale may be private."""

import jax
from jax.typing import DTypeLike

from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._limbs import Limbs
from dpjax.random._grid_fit import Calibration, GridFit, divided, fit_of_scale
from dpjax.random._noise import LAPLACE_LATTICE

# A private scale should have at most 2^25 steps of a grid: see `fit_of_scale`.
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
    """The fit of noise whose scale, in steps of a grid, is private and at most 2^25."""
    return fit_of_scale(LAPLACE_LATTICE, exponent, scale)


def steps_to_float(steps: Limbs, exponent: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Steps of a grid as a float. Everything before is integer, so this is post-processing."""
    return _limbs.to_float(steps, dtype) * power_of_two(exponent, dtype)
