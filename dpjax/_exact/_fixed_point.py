"""Averages of bounded floats in fixed point: integer sums are exact, and the same in any order.

The error of a float sum of n terms may be n units in its last place. In float32, from about n =
10^5 on, this may exceed a single term.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._exact._kernels import sums_of_rows
from dpjax._exact._numerics import float_limits

# The grid follows from the exponent of `largest`, or from this exponent if it is greater, because
# the inverse of the grid's step must be a finite float. The keys are the sizes of dtypes in bytes.
_LEAST_EXPONENT = {4: -90, 8: -900}


def average(terms: jax.Array, largest: ArrayLike) -> jax.Array:
    """Returns the average over the leading axis of floats whose magnitude is bounded.

    Each term is rounded to a grid whose step is half a unit in the last place of `largest`. It is
    then split into digits, which are short enough that sums of n digits do not overflow. The sums
    of digits then give the average of the rounded terms, with a relative error of at most 2 eps.

    Args:
        terms: shape (n, ...), float32 or float64, in [-largest, largest]. No term may be NaN: one
            NaN could move the average from one end to the other.
        largest: numbers above 0, known before tracing, that broadcast to the shape of a term.

    Returns:
        The average, in [-largest, largest] and of the dtype of the terms.

    Raises:
        ValueError: if n is too large for the integers.
    """
    n, dtype = len(terms), terms.dtype
    bound = np.minimum(np.asarray(largest, float), float(float_limits(dtype).max))
    exponent = np.maximum(np.frexp(bound)[1], _LEAST_EXPONENT[dtype.itemsize])
    digits, bits = digits_of(terms, n, exponent)
    result = jnp.zeros(terms.shape[1:], dtype)
    for digit_sum in reversed(sums_of_rows(*digits)):
        result = _shifted(result + digit_sum.astype(dtype), -bits)
    # The average is clipped, because rounding may move it beyond the bound. XLA may combine the two
    # powers of two in `_shifted` to 2^128, which float32 does not have. So the average and the
    # bound are doubled here, and the exponent of the last shift is smaller by 1.
    limit = np.ldexp(bound, 1 - exponent).astype(dtype)
    return _shifted(jnp.clip(2 * result / n, -limit, limit), exponent - 1)


def digits_of(terms: jax.Array, n: int, exponent: int | np.ndarray) -> tuple[list[jax.Array], int]:
    """Splits terms in [-2^exponent, 2^exponent] into digits, and returns the bits per digit, too.

    A digit d at index k stands for d * 2^(exponent - bits (k + 1)). Sums of n digits do not
    overflow. The sum of all digits of a term differs from the term by at most half a unit of the
    last digit. All digits together have at least two bits more than the dtype has.
    """
    dtype = terms.dtype
    bits = bits_of_a_digit(n, dtype)
    rest, digits = _shifted(terms, bits - exponent), list[jax.Array]()
    for _ in range(math.ceil((float_limits(dtype).nmant + 2) / bits)):
        digits.append(nearest_integers(rest))
        rest = _shifted(rest - digits[-1].astype(dtype), bits)
    return digits, bits


def bits_of_a_digit(n: int, dtype: np.dtype) -> int:
    """Returns how many bits a digit may have, such that sums of n digits fit into integers."""
    size = 8 * np.dtype(dtype).itemsize
    bits = size - 2 - (n - 1).bit_length()
    if bits < 1:
        raise ValueError(f"n must be at most 2^{size - 3} in {dtype}, got {n}")
    return min(bits, float_limits(dtype).nmant - 1)  # `nearest_integers` needs this limit.


def rounding_of_average(largest: Fraction, dtype: np.dtype) -> Fraction:
    """Bounds by how much rounding can increase the change of `average` when a term is replaced.

    In units of `largest`, rounding the terms to the grid adds at most eps / 2, and each of the two
    averages has an error of at most 2 eps. So 5 eps are enough, unless `largest` is so small that
    `_LEAST_EXPONENT` determines the grid. Then the summand `grid` covers the rounding of the terms.
    """
    limits = float_limits(dtype)
    grid = Fraction(2) ** (_LEAST_EXPONENT[np.dtype(dtype).itemsize] - limits.nmant)
    return 5 * Fraction(float(limits.eps)) * min(largest, Fraction(float(limits.max))) + grid


def nearest_integers(x: jax.Array) -> jax.Array:
    """Rounds floats in [-2^(nmant - 1), 2^(nmant - 1)] to integers, halves to even.

    After 1.5 * 2^nmant is added, the last bit of the float stands for 1. So the addition rounds to
    an integer. This integer is the bit pattern of the sum minus the bit pattern of 1.5 * 2^nmant.
    Addition and subtraction take two instructions. A conversion to integers would take more,
    because it handles NaN and overflow.
    """
    middle = np.ldexp(1.5, float_limits(x.dtype).nmant).astype(x.dtype)
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x + middle, integers) - middle.view(integers)


def _shifted(x: jax.Array, exponent: int | np.ndarray) -> jax.Array:
    """Multiplies by 2^exponent, in two steps because 2^exponent may be out of range."""
    for part in map(np.asarray, (exponent // 2, exponent - exponent // 2)):
        power = np.ldexp(1.0, part).astype(x.dtype)
        x = x * power.reshape((1,) * (x.ndim - power.ndim) + power.shape)
    return x
