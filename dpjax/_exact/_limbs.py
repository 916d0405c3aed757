"""Signed 64-bit and 96-bit integers as uint32 limbs, with the same bits with and without x64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpjax._exact._kernels import sums_of_rows

# `scale` multiplies by fractions of the form k / 2^FRACTION_BITS, where k is an integer.
FRACTION_BITS = 30
_HALF = np.uint32(0xFFFF)
_LIMB = 2.0**32
# A sum of this many 16-bit numbers is below 2^32.
_BLOCK = 2**16
# A sum of this many products is within int32, if one factor has 16 bits and the other is at most
# 2^9 in magnitude.
_PRODUCTS = 2**5


class Limbs(NamedTuple):
    """An array of the integers high * 2^32 + low, in two's complement and modulo 2^64.

    Both limbs are uint32. The most significant bit of `high` is the sign.
    """

    high: jax.Array
    low: jax.Array


class Wide(NamedTuple):
    """An array of the integers top * 2^64 + rest, in two's complement and modulo 2^96.

    `top` is uint32, and its most significant bit is the sign. `rest` is an unsigned number.
    """

    top: jax.Array
    rest: Limbs


def constant(value: int) -> Limbs:
    """Returns a concrete integer in [-2^63, 2^63) as limbs."""
    return Limbs(jnp.uint32((value >> 32) & 0xFFFFFFFF), jnp.uint32(value & 0xFFFFFFFF))


def from_integers(x: jax.Array) -> Limbs:
    """Converts an array of integers of any dtype to limbs; uint64 saturates at 2^63 - 1."""
    if x.dtype.itemsize == 8:
        if x.dtype == jnp.uint64:
            x = jnp.minimum(x, np.uint64(2**63 - 1))
        low = (x & x.dtype.type(0xFFFFFFFF)).astype(jnp.uint32)
        return Limbs((x >> x.dtype.type(32)).astype(jnp.uint32), low)
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        x = x.astype(jnp.uint32)
        return Limbs(jnp.zeros_like(x), x)
    x = x.astype(jnp.int32)
    return Limbs((x >> 31).astype(jnp.uint32), x.astype(jnp.uint32))


def to_float(x: Limbs, dtype: DTypeLike) -> jax.Array:
    """Converts to a float: the nearest float or a neighbor of it.

    The result is exact if the integer fits into the significand.
    """
    negative = is_negative(x)
    magnitude = where(negative, negate(x), x)
    value = magnitude.high.astype(dtype) * _LIMB + magnitude.low.astype(dtype)
    return jnp.where(negative, -value, value)


def wide_to_float(x: Wide, dtype: DTypeLike) -> jax.Array:
    """Converts a 96-bit integer to a float, with the rounding of `to_float`."""
    negative = x.top >> np.uint32(31) == 1
    opposite = negate(x.rest)
    carried = ((opposite.high | opposite.low) == 0).astype(jnp.uint32)
    top = jnp.where(negative, ~x.top + carried, x.top).astype(dtype)
    rest = where(negative, opposite, x.rest)
    value = top * _LIMB**2 + (rest.high.astype(dtype) * _LIMB + rest.low.astype(dtype))
    return jnp.where(negative, -value, value)


def to_integers(x: Limbs, dtype: DTypeLike) -> jax.Array:
    """Converts to int32 or int64; the integer must be in the range of the dtype."""
    if jnp.dtype(dtype).itemsize == 8:
        return x.high.astype(jnp.int32).astype(dtype) << 32 | x.low.astype(dtype)
    return x.low.astype(dtype)


def is_negative(x: Limbs) -> jax.Array:
    """Whether x is negative."""
    return x.high >> np.uint32(31) == 1


def invert(x: Limbs) -> Limbs:
    """Returns -1 - x."""
    return Limbs(~x.high, ~x.low)


def negate(x: Limbs) -> Limbs:
    """Returns -x."""
    low = ~x.low + np.uint32(1)
    return Limbs(~x.high + (low == 0).astype(jnp.uint32), low)


def add(x: Limbs, y: Limbs) -> Limbs:
    """Returns the sum x + y."""
    low = x.low + y.low
    return Limbs(x.high + y.high + (low < x.low).astype(jnp.uint32), low)


def widen(x: Limbs) -> Wide:
    """Returns the same integer with 96 bits."""
    return Wide((x.high.astype(jnp.int32) >> 31).astype(jnp.uint32), x)


def add_to_wide(x: Wide, y: Limbs) -> Wide:
    """Returns the 96-bit sum x + y."""
    rest = add(x.rest, y)
    carried = (rest.high < y.high) | ((rest.high == y.high) & (rest.low < y.low))
    return Wide(x.top + widen(y).top + carried.astype(jnp.uint32), rest)


def saturate(x: Wide, bound: int) -> Limbs:
    """Returns x clamped to [-bound, bound]; the bound must be below 2^63."""
    negative = x.top >> np.uint32(31) == 1
    end = where(negative, constant(-bound), constant(bound))
    return clip(where(x.top == widen(x.rest).top, x.rest, end), bound)


def subtract(x: Limbs, y: Limbs) -> Limbs:
    """Returns the difference x - y."""
    return Limbs(x.high - y.high - (x.low < y.low).astype(jnp.uint32), x.low - y.low)


def multiply(x: Limbs, y: Limbs) -> Limbs:
    """Returns the product x * y."""
    product = full_product(x.low, y.low)
    return Limbs(product.high + x.high * y.low + x.low * y.high, product.low)


def scale(x: Limbs, numerators: jax.Array) -> Limbs:
    """Returns x * n / 2^30 rounded, halves up, for integers n from -2^30 to 2^30.

    x must be from -2^61 to 2^61 - 1. Two numbers at a distance d have results at a distance of less
    than |n| / 2^30 * d + 1.
    """
    size, negative = jnp.abs(numerators).astype(jnp.uint32), numerators < 0
    fine = x.low & np.uint32(2**FRACTION_BITS - 1)
    # floor(x / 2^30) fits into an int32, because x has at most 62 bits.
    coarse = (x.high << np.uint32(32 - FRACTION_BITS)) | (x.low >> np.uint32(FRACTION_BITS))
    whole, rest = full_product(coarse, size), full_product(fine, size)
    below_zero = coarse >> np.uint32(31)
    whole = Limbs(whole.high - below_zero * size, whole.low)
    whole, rest = (where(negative, negate(part), part) for part in (whole, rest))
    half = constant(2 ** (FRACTION_BITS - 1))
    return add(whole, shift_right(add(rest, half), jnp.uint32(FRACTION_BITS)))


def where(condition: jax.Array, x: Limbs, y: Limbs) -> Limbs:
    """Returns x where the condition is true, and y elsewhere."""
    return Limbs(jnp.where(condition, x.high, y.high), jnp.where(condition, x.low, y.low))


def less(x: Limbs, y: Limbs) -> jax.Array:
    """Whether x < y."""
    x_high, y_high = x.high.astype(jnp.int32), y.high.astype(jnp.int32)
    return (x_high < y_high) | ((x_high == y_high) & (x.low < y.low))


def clip(x: Limbs, bound: int) -> Limbs:
    """Returns x clamped to [-bound, bound]."""
    high, low = constant(bound), constant(-bound)
    x = where(less(high, x), high, x)
    return where(less(x, low), low, x)


def halve(x: Limbs) -> Limbs:
    """Returns floor(x / 2)."""
    high = (x.high.astype(jnp.int32) >> 1).astype(jnp.uint32)
    return Limbs(high, (x.low >> np.uint32(1)) | (x.high << np.uint32(31)))


def shift_left(x: Limbs, by: jax.Array) -> Limbs:
    """Shifts left by 0 to 63 places: x * 2^by modulo 2^64."""
    far, by = by >= 32, by & np.uint32(31)
    high, low = jnp.where(far, x.low, x.high), jnp.where(far, np.uint32(0), x.low)
    # The bits that leave `low` are shifted in two steps. For `by` = 0, a single shift would be by
    # 32 places, which is undefined.
    carried = (low >> np.uint32(1)) >> (np.uint32(31) - by)
    return Limbs((high << by) | carried, low << by)


def shift_right(x: Limbs, by: jax.Array) -> Limbs:
    """Shifts right by 0 to 63 places: floor(x / 2^by)."""
    far, by = by >= 32, by & np.uint32(31)
    high = x.high.astype(jnp.int32)
    low = jnp.where(far, x.high, x.low)
    high = jnp.where(far, high >> 31, high)
    # The bits that leave `high` are shifted in two steps. For `by` = 0, a single shift would be by
    # 32 places, which is undefined.
    carried = (high.astype(jnp.uint32) << np.uint32(1)) << (np.uint32(31) - by)
    return Limbs((high >> by.astype(jnp.int32)).astype(jnp.uint32), (low >> by) | carried)


def floor_divide(x: Limbs, divisor: jax.Array) -> Limbs:
    """Returns floor(x / divisor) for a uint32 divisor in [1, 2^16], in time independent of x."""
    negative = is_negative(x)
    magnitude = where(negative, invert(x), x)
    rest = jnp.zeros_like(x.high)
    digits = []
    # Schoolbook division, 16 bits at a time. The remainder is below 2^16, so nothing overflows.
    for limb in magnitude:
        for digit in (limb >> np.uint32(16), limb & _HALF):
            quotient, rest = divide((rest << np.uint32(16)) | digit, divisor)
            digits.append(quotient)
    quotient = Limbs(
        (digits[0] << np.uint32(16)) | digits[1], (digits[2] << np.uint32(16)) | digits[3]
    )
    return where(negative, invert(quotient), quotient)


def divide(x: jax.Array, divisor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns quotient and remainder of two uint32, in time that does not depend on x.

    Division instructions may be faster for small numbers, so their time would leak x. Therefore, x
    is multiplied by the reciprocal of the divisor instead.
    """
    # The guess is either the quotient or smaller by 1, because (2^32 - 1) // divisor is at least
    # 2^32 / divisor - 1, and x < 2^32.
    guess = full_product(x, np.uint32(2**32 - 1) // divisor).high
    rest = x - guess * divisor
    missed = (rest >= divisor).astype(jnp.uint32)
    return guess + missed, rest - missed * divisor


def full_product(x: jax.Array, y: jax.Array) -> Limbs:
    """Returns the product of two uint32, with 64 bits."""
    x0, x1 = x & _HALF, x >> np.uint32(16)
    y0, y1 = y & _HALF, y >> np.uint32(16)
    low, cross, other, high = x0 * y0, x0 * y1, x1 * y0, x1 * y1
    middle = (low >> np.uint32(16)) + (cross & _HALF) + (other & _HALF)
    carried = (cross >> np.uint32(16)) + (other >> np.uint32(16)) + (middle >> np.uint32(16))
    return Limbs(high + carried, (middle << np.uint32(16)) | (low & _HALF))


def total(x: Limbs) -> Limbs:
    """Returns the sum over the leading axis modulo 2^64, computed in blocks of 2^16 rows."""
    n = len(x.low)
    if n <= _BLOCK:
        return _total_of_a_block(x)
    whole = n // _BLOCK * _BLOCK
    blocks = Limbs(*(limb[:whole].reshape(-1, _BLOCK, *limb.shape[1:]) for limb in x))
    found = total(jax.vmap(_total_of_a_block)(blocks))
    if whole == n:
        return found
    return add(found, _total_of_a_block(Limbs(*(limb[whole:] for limb in x))))


def _total_of_a_block(x: Limbs) -> Limbs:
    """Returns the sum of at most 2^16 rows, modulo 2^64.

    Sums of 16-bit halves of `low` do not wrap around. Sums of `high` may wrap around, because the
    result is modulo 2^64.
    """
    shift = np.uint32(16)
    bottom, middle, high = sums_of_rows(x.low & _HALF, x.low >> shift, x.high)
    return add(Limbs(high, bottom), Limbs(middle >> shift, middle << shift))


def weighted_total(weights: jax.Array, x: jax.Array) -> Limbs:
    """Returns the sum of weights[i] * x[i] over the leading axis; x is int32.

    Weights are from -2^18 to 2^18.

    The result is exact if it is below 2^63. Each factor is split into two digits, so that products
    of digits fit into 32 bits.
    """

    def of_rows(weights: jax.Array, x: jax.Array) -> Limbs:
        weights = weights.reshape(-1, *[1] * (x.ndim - 1))
        fine, coarse, low, high = weights & 511, weights >> 9, x & 0xFFFF, x >> 16
        products = fine * low, coarse * low, fine * high, coarse * high
        parts = zip((0, 9, 16, 25), sums_of_rows(*products), strict=True)
        return functools.reduce(add, [_limbs_of(shift, part) for shift, part in parts])

    count = len(x)
    if count <= _PRODUCTS:
        return of_rows(weights, x)

    def go_on(i: jax.Array, found: Limbs) -> Limbs:
        # The last block overlaps with the block before. Rows that were already added get the weight
        # 0.
        start = jnp.minimum(i * _PRODUCTS, count - _PRODUCTS)
        some, rows = (lax.dynamic_slice_in_dim(y, start, _PRODUCTS) for y in (weights, x))
        is_new = start + jnp.arange(_PRODUCTS) >= i * _PRODUCTS
        return add(found, of_rows(jnp.where(is_new, some, 0), rows))

    zero = _limbs_of(0, x[0] & 0)
    return lax.fori_loop(0, -(-count // _PRODUCTS), go_on, zero)


def _limbs_of(shift: int, x: jax.Array) -> Limbs:
    return shift_left(from_integers(x), jnp.uint32(shift))
