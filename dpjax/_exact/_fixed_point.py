"""Averages of bounded floats in fixed point: integers are added, so no order of them counts.

A sum of n floats may be off by n units in its last place: in float32, from n = 10^5 or so, by more
than one of them adds to it. A sum of integers is off by nothing.
"""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Smaller terms are rounded as if they were bounded by this power of two: 1 / grid must be a float.
_LEAST_EXPONENT = {4: -90, 8: -900}


def average(terms: jax.Array, largest: Any) -> jax.Array:
    """The average over the leading axis of floats of a bounded magnitude.

    A term is rounded to a grid of half a unit in the last place of `largest`, to digits that n
    terms cannot take beyond an integer. What is rounded after that is the average, to 2 eps.

    Args:
        terms: shape (n, ...), float32 or float64, in [-largest, largest].
        largest: numbers above 0, known before tracing, that broadcast to the shape of a term.

    Returns:
        The average, in [-largest, largest] and of the dtype of the terms.

    Raises:
        ValueError: if n is too large for the integers.
    """
    n, dtype = len(terms), terms.dtype
    integers = np.dtype(f"int{8 * dtype.itemsize}")
    bits = bits_of_a_digit(n, dtype)
    largest = np.minimum(np.asarray(largest, float), float(jnp.finfo(dtype).max))
    exponent = np.maximum(np.frexp(largest)[1], _LEAST_EXPONENT[dtype.itemsize])
    rest, digits = _shifted(terms, bits - exponent), []
    for _ in range(math.ceil((jnp.finfo(dtype).nmant + 2) / bits)):
        digit = jnp.round(rest)
        digits.append(jnp.sum(digit.astype(integers), axis=0, dtype=integers))
        rest = _shifted(rest - digit, bits)
    result = jnp.zeros(terms.shape[1:], dtype)
    for digit_sum in reversed(digits):
        result = _shifted(result + digit_sum.astype(dtype), -bits)
    # Rounding must not take the average of largest floats beyond them. Doubled, because XLA may
    # multiply the two powers of a shift first, and 2^128 is no float32.
    limit = np.ldexp(largest, 1 - exponent).astype(dtype)
    return _shifted(jnp.clip(2 * result / n, -limit, limit), exponent - 1)


def bits_of_a_digit(n: int, dtype: np.dtype) -> int:
    """How many bits an integer of the dtype's size has left when n of them are added up.

    The two roundings of an average, to eps, are relative to it where it is above 2^-bits `largest`.
    """
    size = 8 * np.dtype(dtype).itemsize
    bits = size - 2 - (n - 1).bit_length()
    if bits < 1:
        raise ValueError(f"n must be at most 2^{size - 3} in {dtype}, got {n}")
    return bits


def rounding_of_average(largest: Fraction, dtype: np.dtype) -> Fraction:
    """What rounding adds to how far `average` moves where one of its terms is replaced.

    The grid adds at most eps / 2 once, and each of the two results is off by 2 eps, times
    `largest`; next to 0, floats have an absolute error.
    """
    limits = jnp.finfo(dtype)
    grid = Fraction(2) ** (_LEAST_EXPONENT[np.dtype(dtype).itemsize] - limits.nmant)
    return 5 * Fraction(float(limits.eps)) * min(largest, Fraction(float(limits.max))) + grid


def _shifted(x: jax.Array, exponent: Any) -> jax.Array:
    """Multiplies by 2^exponent, which need not be a float itself."""
    exponent = np.asarray(exponent)
    for part in (exponent // 2, exponent - exponent // 2):
        power = np.ldexp(1.0, part).astype(x.dtype)
        x = x * power.reshape((1,) * (x.ndim - power.ndim) + power.shape)
    return x
