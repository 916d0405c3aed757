"""Sums of records that were rounded to integers: exact in 64 bits, then rounded once to 32.

Records are rounded to a fine grid, so their rounding errors stay small when they add up. Totals are
rounded to a coarser grid, where 32 bits are enough for total and noise. Both grids are public. The
second rounding costs one unit of sensitivity in each coordinate.
"""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp

from dpjax._exact import _limbs
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import round_up
from dpjax.targets._bounds import VectorNorm, sqrt_up

LARGEST_TOTAL_BITS = 30
# The bits of the largest record in units of the coarse grid. So noise of 2^14 sensitivities fits.
_MOST_BITS = 16
_LARGEST = 2**31 - 2
# The number of digits of 10 bits that add up in int32.
_ROWS = 2**20


def coarsening(capacity: int, *, bits: int) -> int:
    """The number of bits to round off totals of `capacity` records of at most so many bits."""
    needed = max((capacity - 1).bit_length(), LARGEST_TOTAL_BITS - _MOST_BITS)
    return bits - LARGEST_TOTAL_BITS + needed


# JAX keeps the traces of these: a query is traced anew at every release.
@functools.partial(jax.jit, static_argnums=(1, 2))
def to_units(x: jax.Array, exponent: int, ends: tuple[int, int]) -> jax.Array:
    """Floats in units of 2^exponent, as int32 between two ends of at most 2^30."""
    units = jnp.round(jnp.clip(x * 2.0**-exponent, -(2.0**30), 2.0**30)).astype(jnp.int32)
    return jnp.clip(units, *ends)


def ends_in_units(low: float, high: float, exponent: int) -> tuple[int, int]:
    """The ends of an interval in units of 2^exponent, rounded to integers."""
    return round(Fraction(low) / Fraction(2) ** exponent), round(
        Fraction(high) / Fraction(2) ** exponent
    )


@functools.partial(jax.jit, static_argnums=1)
def coarse(total: Limbs, bits: int) -> jax.Array:
    """round(total / 2^bits) as int32, clamped to +-(2^31 - 2)."""
    half = _limbs.constant(2**bits >> 1)
    rounded = _limbs.shift_right(_limbs.add(total, half), jnp.uint32(bits))
    return _limbs.to_integers(_limbs.clip(rounded, _LARGEST), jnp.int32)


@jax.jit
def sum_of_integers(x: jax.Array) -> Limbs:
    """The sum of int32 over the leading axis."""
    return _limbs.total(_limbs.from_integers(x))


@functools.partial(jax.jit, static_argnums=1)
def multiple(count: jax.Array, weight: int) -> Limbs:
    """Counts times an integer, below 2^63."""
    return _limbs.multiply(_limbs.constant(weight), _limbs.from_integers(count))


def sums_by_group(x: jax.Array, group: jax.Array, groups: int) -> Limbs:
    """The sums of the rows of each group; entries are in [-2^20, 2^20].

    Rows of a group beyond the last are left out. Each of two digits of 10 bits is added up in
    int32, in blocks of rows that do not wrap.
    """
    digit, size = 10, min(_ROWS, len(x))
    missing = -len(x) % size
    rows = jnp.pad(x, ((0, missing), (0, 0)))
    of_row = jnp.pad(group, (0, missing), constant_values=groups)

    def add_up(part: jax.Array) -> Limbs:
        def of_block(part: jax.Array, of_row: jax.Array) -> jax.Array:
            return jnp.zeros((groups, x.shape[1]), jnp.int32).at[of_row].add(part, mode="drop")

        blocks = part.reshape(-1, size, x.shape[1])
        return sum_of_integers(jax.vmap(of_block)(blocks, of_row.reshape(-1, size)))

    high, low = add_up(rows >> digit), add_up(rows & (2**digit - 1))
    return _limbs.add(_limbs.shift_left(high, jnp.uint32(digit)), low)


def coarse_reach(moved: Fraction, *, dims: int, bits: int, norm: VectorNorm) -> float:
    """How far two `coarse` totals may be apart, if the totals are apart by `moved`, in a norm.

    Rounding adds less than 1 in each coordinate, so at most the norm of the vector of ones.
    """
    ones = {"l1": Fraction(dims), "l2": Fraction(sqrt_up(Fraction(dims))), "linf": Fraction(1)}
    return round_up(moved / Fraction(2) ** bits + ones[norm])


def gram(x: jax.Array, *, bits: int) -> Limbs:
    """The sum of x_i x_i^T over the rows of an int32 matrix, entries in [-2^bits, 2^bits].

    Digits are multiplied and added in int32, in blocks of rows that do not wrap. A low digit is at
    least 0 and may be shorter, so blocks are as long as products of high digits allow.
    """
    low_bits = bits // 2
    high_bits = bits - low_bits
    block = 2 ** (LARGEST_TOTAL_BITS - 2 * high_bits)
    rows = math.ceil(len(x) / block) * block
    blocks = jnp.pad(x, ((0, rows - len(x)), (0, 0))).reshape(-1, block, x.shape[1])
    high, low = blocks >> low_bits, blocks & (2**low_bits - 1)

    def products(a: jax.Array, b: jax.Array) -> Limbs:
        sums = jnp.einsum("bni,bnj->bij", a, b, preferred_element_type=jnp.int32)
        return sum_of_integers(sums)

    def shifted(x: Limbs, by: int) -> Limbs:
        return _limbs.shift_left(x, jnp.uint32(by))

    mixed = products(high, low)
    mixed = _limbs.add(mixed, Limbs(mixed.high.T, mixed.low.T))
    ends = _limbs.add(shifted(products(high, high), 2 * low_bits), products(low, low))
    return _limbs.add(ends, shifted(mixed, low_bits))
