"""Powers of two and exact rounding to a grid of them, in integer arithmetic only.

Nothing here computes with floats: their bits are taken apart. So it makes no difference whether a
device flushes subnormal numbers to zero, fuses a product into a sum, or has float64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax import _limbs
from dpjax._limbs import Limbs
from dpjax._numerics import compute_dtype

# Units are clamped here, so that no sum with noise wraps.
BOUND = 2**61
# Beyond it every float is 0 or out of range, and sums of exponents cannot wrap.
_FARTHEST = 2**13


def power_of_two(exponent: int | jax.Array, dtype: Any) -> jax.Array:
    """2^exponent exactly, from its bits.

    Args:
        exponent: an integer or integer array, traced or not, in the range of normal numbers.
        dtype: a float dtype.

    Returns:
        An array of the dtype; NaN where a traced exponent is out of range.

    Raises:
        ValueError: if a Python integer is out of range.
    """
    info = jnp.finfo(jax.dtypes.canonicalize_dtype(dtype))
    least, most = info.minexp, info.maxexp - 1
    if isinstance(exponent, (int, np.integer)) and not least <= exponent <= most:
        raise ValueError(f"exponent must be in [{least}, {most}] for {info.dtype}, got {exponent}")
    exponent = jnp.asarray(exponent, jnp.int32)
    normal = (exponent >= least) & (exponent <= most)
    unsigned = jnp.dtype(f"uint{info.bits}")
    biased = jnp.where(normal, exponent - (least - 1), 1).astype(unsigned)
    power = lax.bitcast_convert_type(biased << unsigned.type(info.nmant), info.dtype)
    return jnp.where(normal, power, info.dtype.type(np.nan))


def round_to_grid(x: jax.Array, exponent: int | jax.Array) -> Limbs:
    """floor(x / 2^exponent + 1/2) exactly, for every float and every exponent.

    Halves go up, never to the even neighbor: then it commutes with shifts by grid points, and two
    numbers at distance d are at most ceil(d) apart, in units of the grid.

    Args:
        x: an array of floats or integers; uint64 saturates at 2^63 - 1.
        exponent: of the grid, a Python integer or an int32 scalar or array, traced or not.

    Returns:
        Units of the grid, clamped to [-2^61, 2^61]; 0 for NaN.
    """
    significand, scale, infinite = _take_apart(jnp.asarray(x))
    if isinstance(exponent, (int, np.integer)):
        exponent = max(-_FARTHEST, min(int(exponent), _FARTHEST))
    exponent = jnp.clip(jnp.asarray(exponent, jnp.int32), -_FARTHEST, _FARTHEST)
    return _scale_and_round(significand, scale - exponent, infinite)


def _take_apart(x: jax.Array) -> tuple[Limbs, jax.Array, jax.Array]:
    """Significand and scale of x = significand * 2^scale, and whether x is infinite."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _limbs.from_integers(x), jnp.zeros(x.shape, jnp.int32), jnp.zeros(x.shape, bool)
    info = jnp.finfo(compute_dtype(x.dtype))
    unsigned = jnp.dtype(f"uint{info.bits}").type
    bits = lax.bitcast_convert_type(_widen(x), unsigned)
    fraction = bits & unsigned(2**info.nmant - 1)
    biased = ((bits << unsigned(1)) >> unsigned(info.nmant + 1)).astype(jnp.int32)
    implicit = jnp.where(biased > 0, unsigned(2**info.nmant), unsigned(0))
    magnitude = _limbs.from_integers(fraction | implicit)
    special = biased == info.maxexp - info.minexp + 1
    nothing = Limbs(jnp.zeros_like(magnitude.high), jnp.zeros_like(magnitude.low))
    magnitude = _limbs.where(special & (fraction != 0), nothing, magnitude)
    negative = bits >> unsigned(info.bits - 1) == 1
    significand = _limbs.where(negative, _limbs.negate(magnitude), magnitude)
    scale = jnp.maximum(biased, 1) + np.int32(info.minexp - 1 - info.nmant)
    return significand, scale, special & (fraction == 0)


def _widen(x: jax.Array) -> jax.Array:
    """bfloat16 and float16 as float32, without arithmetic that might flush subnormals."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(bits << np.uint32(16), jnp.float32)
    return x.astype(compute_dtype(x.dtype))


def _scale_and_round(x: Limbs, shift: jax.Array, infinite: jax.Array) -> Limbs:
    """floor(x * 2^shift + 1/2), clamped.

    With t = -shift > 0 it is floor((floor(x / 2^(t - 1)) + 1) / 2), and 0 from t = 64 on.
    """
    one = Limbs(jnp.uint32(0), jnp.uint32(1))
    down = jnp.clip(-shift - 1, 0, 63).astype(jnp.uint32)
    coarser = _limbs.halve(_limbs.add(_limbs.shift_right(x, down), one))
    finer = _limbs.shift_left(x, jnp.clip(shift, 0, 61).astype(jnp.uint32))
    units = _limbs.where(shift < 0, coarser, finer)

    negative = _limbs.is_negative(x)
    room = jnp.clip(61 - shift, 0, 62).astype(jnp.uint32)
    beyond = _limbs.shift_right(_limbs.where(negative, _limbs.negate(x), x), room)
    too_large = (shift >= -1) & ((beyond.high | beyond.low) != 0)
    end = _limbs.where(negative, _limbs.constant(-BOUND), _limbs.constant(BOUND))
    return _limbs.where(too_large | infinite, end, units)
