"""Exact rounding to multiples of powers of two, and exact averages of numbers that were rounded so.

All arithmetic in this file is on the bits of floats. So results are the same if a device flushes
subnormal numbers to zero, fuses a product into a sum, or lacks float64.

The error of a float sum of n terms may be n units in its last place. In float32, from about n =
10^5 on, this may exceed a single term. Integer sums are exact, and the same in any order.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from dpjax._exact import _limbs
from dpjax._exact._kernels import sums_of_rows
from dpjax._exact._limbs import Limbs, Wide
from dpjax._exact._numerics import compute_dtype, float_limits

# The step of the grid is computed from the exponent of `largest`. Smaller exponents are replaced by
# this least exponent, because the inverse of the step must be a finite float. The keys of the
# dictionary are the sizes of dtypes in bytes.
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
    # The average is clipped, because rounding may move it beyond the bound. `_shifted` multiplies
    # by two powers of two. XLA may merge them into one factor, 2^128, which is too large for
    # float32. So the average and the bound are doubled here, and the exponent of the last shift is
    # smaller by 1.
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
    """Returns a bound on how much rounding adds to the change of `average` if a term is replaced.

    In units of `largest`, rounding the terms to the grid adds at most eps / 2, and each of the two
    averages has an error of at most 2 eps. So 5 eps are enough, unless `largest` is so small that
    `_LEAST_EXPONENT` determines the grid. For this case, the bound has a second term, `grid`. It
    covers the rounding of the terms.
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


# Rounded numbers are clamped to [-2^61, 2^61], or to [-2^93, 2^93] for `Wide` integers, so that
# adding noise does not wrap around.
_BOUND_BITS = 61
WIDE_BOUND_BITS = 93
# Exponents are clamped to [-2^13, 2^13]: beyond this range, every float rounds to 0 or is clamped.
# Sums of clamped exponents do not overflow int32.
_FARTHEST = 2**13


def power_of_two(exponent: int | jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns 2^exponent exactly, computed from its bits, if it is a normal float of this dtype.

    A traced exponent out of range gives NaN. A Python integer out of range raises ValueError.
    """
    info = float_limits(jax.dtypes.canonicalize_dtype(dtype))
    least, most = info.minexp, info.maxexp - 1
    if isinstance(exponent, (int, np.integer)) and not least <= exponent <= most:
        raise ValueError(f"exponent must be in [{least}, {most}] for {info.dtype}, got {exponent}")
    exponent = jnp.asarray(exponent, jnp.int32)
    normal = (exponent >= least) & (exponent <= most)
    unsigned = jnp.dtype(f"uint{info.bits}")
    biased = jnp.where(normal, exponent - (least - 1), 1).astype(unsigned)
    power = lax.bitcast_convert_type(biased << unsigned.type(info.nmant), info.dtype)
    return jnp.where(normal, power, info.dtype.type(np.nan))


def round_to_grid(x: jax.Array, exponent: int | jax.Array, bits: int = _BOUND_BITS) -> Limbs:
    """Returns floor(x / 2^exponent + 1/2) exactly: x in steps of a grid, rounded to an integer.

    Halves are rounded up, not to even. So it makes no difference whether a whole number of steps is
    added before or after rounding. Two numbers that are d steps apart round to integers at most
    ceil(d) apart. Results are clamped to [-2^bits, 2^bits], where bits is from 31 to 61. NaN
    becomes 0, and uint64 saturates at 2^63 - 1.
    """
    short, shift, infinite = _take_apart(jnp.asarray(x), exponent)
    significand = _as_limbs(short)
    end = _limbs.constant(2**bits)
    end = _limbs.where(_limbs.is_negative(significand), _limbs.negate(end), end)
    if isinstance(short, Limbs):
        beyond = infinite | _reaches(bits, short, shift)
        return _limbs.where(beyond, end, _scale_and_round(short, shift).rest)
    # A significand of at most 24 bits needs 64 bits only if it is shifted left.
    beyond = infinite | (jnp.abs(short) >> jnp.clip(bits - shift, 0, 31) != 0)
    coarser = ((short >> jnp.clip(-shift - 1, 0, 31)) + 1) >> 1
    finer = _limbs.shift_left(significand, jnp.clip(shift, 0, 63).astype(jnp.uint32))
    rounded = _limbs.where(shift < 0, _limbs.from_integers(coarser), finer)
    return _limbs.where(beyond, end, rounded)


def round_widely(x: jax.Array, exponent: int | jax.Array) -> Wide:
    """Returns the same as `round_to_grid`, but clamped to [-2^93, 2^93]."""
    short, shift, infinite = _take_apart(jnp.asarray(x), exponent)
    significand = _as_limbs(short)
    units = _scale_and_round(significand, shift)
    beyond = infinite | _reaches(WIDE_BOUND_BITS, significand, shift)
    end = 2 ** (WIDE_BOUND_BITS - 64)
    top = jnp.where(_limbs.is_negative(significand), np.uint32(2**32 - end), np.uint32(end))
    rest = _limbs.where(beyond, _limbs.constant(0), units.rest)
    return Wide(jnp.where(beyond, top, units.top), rest)


def round_modulo(x: jax.Array, exponent: int | jax.Array) -> Limbs:
    """Returns the same as `round_to_grid` modulo 2^64, unclamped; x must be finite.

    Use it for numbers with small differences: the differences of the results are exact.
    """
    short, shift, _ = _take_apart(jnp.asarray(x), exponent)
    return _scale_and_round(_as_limbs(short), shift).rest


def _as_limbs(x: Limbs | jax.Array) -> Limbs:
    return x if isinstance(x, Limbs) else _limbs.from_integers(x)


def _take_apart(
    x: jax.Array, exponent: int | jax.Array
) -> tuple[Limbs | jax.Array, jax.Array, jax.Array]:
    """Returns integers s and t with x = s * 2^(t + exponent), and whether x is infinite.

    For floats of at most 32 bits, s is an int32 array with |s| < 2^24. Otherwise, s is a `Limbs`.
    """
    if isinstance(exponent, (int, np.integer)):
        exponent = max(-_FARTHEST, min(int(exponent), _FARTHEST))
    exponent = jnp.clip(jnp.asarray(exponent, jnp.int32), -_FARTHEST, _FARTHEST)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        scale = jnp.zeros(x.shape, jnp.int32) - exponent
        return _limbs.from_integers(x), scale, jnp.zeros(x.shape, bool)
    info = float_limits(compute_dtype(x.dtype))
    unsigned = jnp.dtype(f"uint{info.bits}").type
    if x.dtype == jnp.bfloat16:
        # The bits of a bfloat16 are the upper half of a float32. They are shifted as integers,
        # because a cast to float32 may flush subnormal numbers.
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    else:
        bits = lax.bitcast_convert_type(x.astype(info.dtype), unsigned)
    fraction = bits & unsigned(2**info.nmant - 1)
    biased = ((bits << unsigned(1)) >> unsigned(info.nmant + 1)).astype(jnp.int32)
    implicit = jnp.where(biased > 0, unsigned(2**info.nmant), unsigned(0))
    special = biased == info.maxexp - info.minexp + 1
    is_nan = special & (fraction != 0)
    magnitude = jnp.where(is_nan, unsigned(0), fraction | implicit)
    negative = bits >> unsigned(info.bits - 1) == 1
    if info.bits == 64:
        limbs = _limbs.from_integers(magnitude)
        significand = _limbs.where(negative, _limbs.negate(limbs), limbs)
    else:
        short = magnitude.astype(jnp.int32)
        significand = jnp.where(negative, -short, short)
    scale = jnp.maximum(biased, 1) + np.int32(info.minexp - 1 - info.nmant)
    return significand, scale - exponent, special & (fraction == 0)


def _scale_and_round(x: Limbs, shift: jax.Array) -> Wide:
    """Returns floor(x * 2^shift + 1/2) modulo 2^96.

    For shift = -t < 0, this equals floor((floor(x / 2^(t - 1)) + 1) / 2), because of the rule
    floor(floor(y) / 2) = floor(y / 2). For t >= 64 the result is 0, because x has at most 63 bits.
    """
    one = Limbs(jnp.uint32(0), jnp.uint32(1))
    down = jnp.clip(-shift - 1, 0, 63).astype(jnp.uint32)
    coarser = _limbs.halve(_limbs.add(_limbs.shift_right(x, down), one))

    places = jnp.clip(shift, 0, 127).astype(jnp.uint32)
    far, within = places >= 64, places & np.uint32(63)
    shifted = _limbs.shift_left(x, within)
    # The bits that leave the lower 64 bits are shifted right in two steps. For `within` = 0, a
    # single shift would be by 64 places, which is undefined.
    carried = _limbs.halve(_limbs.shift_right(x, np.uint32(63) - within))
    finer = Wide(
        jnp.where(far, shifted.low, carried.low),
        _limbs.where(far, _limbs.constant(0), shifted),
    )
    coarser = _limbs.widen(coarser)
    return Wide(
        jnp.where(shift < 0, coarser.top, finer.top),
        _limbs.where(shift < 0, coarser.rest, finer.rest),
    )


def _reaches(bits: int, x: Limbs, shift: jax.Array) -> jax.Array:
    """Whether |x| * 2^shift is 2^bits or more."""
    room = bits - shift
    magnitude = _limbs.where(_limbs.is_negative(x), _limbs.negate(x), x)
    beyond = _limbs.shift_right(magnitude, jnp.clip(room, 0, 62).astype(jnp.uint32))
    return (room < 63) & ((beyond.high | beyond.low) != 0)
