"""Norms in exact rational arithmetic, rounded up, from which known bounds are computed.

A bound must hold for the program that runs. So it includes the rounding error of that program's
dtype. Float32 rounds more than float64, so a bound for float32 holds for both.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype, round_up


def running_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype in which a target computes, for records of a dtype: float32 or float64.

    Without x64, JAX turns NumPy's float64 into float32.
    """
    found = np.dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"dtype must be a dtype of floats, got {found}")
    return compute_dtype(jax.dtypes.canonicalize_dtype(found))


def unit(dtype: np.dtype) -> Fraction:
    """eps, the distance from 1 to the next float, exactly."""
    return Fraction(float(np.finfo(dtype).eps))


VectorNorm = Literal["l1", "l2", "linf"]


def norm_up(magnitudes: Sequence[Fraction], norm: VectorNorm) -> float:
    """The least float64 that is not below the norm of a vector of these magnitudes."""
    _checks.choice("norm", norm, get_args(VectorNorm))
    if norm == "l1":
        return round_up(sum(magnitudes, Fraction(0)))
    if norm == "l2":
        return sqrt_up(sum((x**2 for x in magnitudes), Fraction(0)))
    return round_up(max(magnitudes))


def sqrt_up(exact: Fraction) -> float:
    """The least float64 that is not below the square root of an exact rational."""
    # `shift` is chosen so that the integer square root has more bits than a float64.
    shift = 128 + max(0, exact.denominator.bit_length() - exact.numerator.bit_length())
    scaled = exact * 4**shift
    root = math.isqrt(math.ceil(scaled))
    root += root**2 < scaled
    return round_up(Fraction(root, 2**shift))
