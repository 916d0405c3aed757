"""Sums of numbers between public bounds, and exact sums of integers.

Records are rounded to a fine grid, so their rounding errors stay small when they add up. They are
added up exactly, in 64 bits. Totals are rounded to a coarser grid, so that 32 bits are enough for a
total with noise. Both grids are public. The second rounding adds one unit to the sensitivity of
each coordinate.
"""

import functools
import math
from fractions import Fraction
from typing import Literal

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._columns import check_numbers
from dpjax._core._types import Database
from dpjax._core._values import NeighboringRelation
from dpjax._exact import _limbs
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import round_up
from dpjax.queries._groups import of_complete
from dpjax.queries._padded_records import drops_missing
from dpjax.queries._query import IntegerQuery, Query
from dpjax.queries._totals import Addend, Totals, cells_of_present, saturated
from dpjax.targets._clamping import check_interval, clamp, middle_and_half
from dpjax.targets._known_sensitivity import VectorNorm, norm_up, sqrt_up

LARGEST_TOTAL_BITS = 30
# The number of bits of the largest record on the coarse grid. Totals have 30 bits, so the noise may
# be up to 2^14 times as large as the sensitivity.
_MOST_BITS = 16
# The number of bits of the largest record in units of the fine grid.
FINE_BITS = 30
_LARGEST_CAPACITY = 2**31 - 1


def sum_query(
    *,
    lower: float,
    upper: float,
    capacity: int,
    dims: int | None = None,
    missing: Literal["drop", "lower"] = "drop",
) -> Query:
    """The sum of records, each clamped to public bounds.

    Let M be the larger bound in magnitude. Records are rounded to a grid of 2^-30 M, and added up
    exactly. The total is rounded to a coarser grid, and gets integer noise on this grid. The step
    of the coarser grid is about M capacity / 2^30 or 2^-16 M, whichever is larger.

    Args:
        lower: a finite number, public.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.
        capacity: the number of records up to which nothing overflows, public. Use n if it is
            public.
        dims: d, if records are vectors; None if they are numbers.
        missing: "drop" leaves out a record with a missing number (NaN). "lower" replaces a missing
            number by `lower`.

    Returns:
        A `Query` of shape () or (d,): maps an array of shape (n,) or (n, d) to sums, as floats.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, the bounds are out of order, or the larger one
            in magnitude is not from 2^-90 to 2^90; on a database, if it has another shape.

    Formal guarantees:
        In every coordinate one record changes the sum by at most max(|lower|, |upper|) under
        add-or-remove-one. Under replace-one it changes the sum by at most upper - lower, or by
        max(|lower|, |upper|) if that is more, because a record may be replaced by one with a
        missing number, which is left out. With `missing="lower"` the bound is upper - lower. For d
        coordinates the bound is d times this in the norm l1, and sqrt(d) times this in l2. Some
        records attain each bound. The rounding of totals adds less than one step of their grid, and
        the noise grows accordingly. The total of more than `capacity` records may be clamped: then
        it is wrong, but still private. With Laplace noise of scale b and probability 1 - beta, all
        coordinates are within b ln(d / beta), plus two steps of the grid for rounding, of the true
        sums; see `error`.

    Source:
        Dwork, McSherry, Nissim and Smith (2006); Casacuberta, Shoemate, Vadhan and Wagaman (2022),
        on sums of floats.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import queries
        >>> hours = queries.sum_query(lower=0, upper=24, capacity=1000)
        >>> float(hours(jnp.array([7.5, 8.25, 99.0])))
        39.75
        >>> hours.sensitivity().value
        24.0
    """
    drops = drops_missing(missing, "lower")
    low, high = check_interval(lower, upper)
    capacity = _checks.integer("capacity", capacity, least=1, most=_LARGEST_CAPACITY)
    if dims is not None:
        dims = _checks.integer("dims", dims, least=1)
    shape = () if dims is None else (dims,)
    exponent, bits = fine_exponent(max(abs(low), abs(high))), coarsening(capacity, bits=FINE_BITS)
    step = Fraction(2) ** exponent
    ends = round(Fraction(low) / step), round(Fraction(high) / step)

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        check_numbers("database", records, (*present.shape, *shape))
        units = to_units(clamp(records, low, high), exponent, ends)
        return [Addend(cells_of_present(present), 1, units.reshape(len(present), -1))]

    def finish(totals: Totals) -> jax.Array:
        return coarse(totals[0], bits).reshape(shape)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        # The rounded totals of neighboring databases differ by at most this many units.
        farthest = _farthest(Fraction(ends[0]), Fraction(ends[1]), relation)
        apart = math.ceil(farthest / 2**bits)
        return norm_up([Fraction(apart)] * (dims or 1), norm)

    def moves(norm: VectorNorm, relation: NeighboringRelation) -> float:
        return norm_up([_farthest(Fraction(low), Fraction(high), relation)] * (dims or 1), norm)

    query = IntegerQuery(
        addends=addends,
        finish=finish,
        shape=shape,
        reach=reach,
        moves=moves,
        unit=math.ldexp(1.0, exponent + bits),
        rounding=1.0,
        largest=capacity * max(abs(low), abs(high)),
    )
    return Query(of_complete(query) if drops else query)


def _farthest(low: Fraction, high: Fraction, relation: NeighboringRelation) -> Fraction:
    """Returns the largest amount by which one record between these bounds can change a sum."""
    replaced = relation is NeighboringRelation.REPLACE_ONE
    return high - low if replaced else max(abs(low), abs(high))


@functools.lru_cache(maxsize=64, typed=True)
def centered_sums(
    low: float, high: float, capacity: int, dims: int, from_ends: bool = False
) -> IntegerQuery:
    """Returns the query of a scaled count and of sums around the middle of [low, high].

    The count is multiplied by half of the interval's length, so that adding a record changes the
    count by as much as a sum.

    `from_ends` is for one sum S. Let C be the scaled count. Then the query returns C - S and C + S
    instead of C and S. These are the sums of distances from the upper and from the lower end. In
    the norm l1, an added record changes (C, S) by at most the length of the interval, and
    (C - S, C + S) by exactly this length. So Laplace noise is the same for both pairs. But if C and
    S are computed from the noisy C - S and C + S, their noise variance is only half as large.
    """
    middle, half = middle_and_half(low, high)
    exponent, bits = fine_exponent(half), coarsening(capacity, bits=FINE_BITS) + from_ends
    weight = math.ceil(math.ldexp(half, -exponent))

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        numbers = clamp(records, low, high).reshape(len(present), dims)
        units = to_units(numbers - middle, exponent, (-weight, weight))
        cell = cells_of_present(present)
        return [Addend(cell, 1), Addend(cell, 1, units)]

    def finish(totals: Totals) -> jax.Array:
        count, sums = (Limbs(*(limb[0] for limb in total)) for total in totals)
        counted = _limbs.multiply(_limbs.constant(weight), count)
        if from_ends:
            counted, sums = _limbs.subtract(counted, sums), _limbs.add(counted, sums)
        return coarse(Limbs(*map(jnp.append, counted, sums)), bits)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        half = Fraction(weight, 2**bits)
        if relation is NeighboringRelation.REPLACE_ONE:
            # The count does not change. With `from_ends`, one sum grows by as much as the other
            # one falls.
            return norm_up([Fraction(math.ceil(2 * half))] * (2 if from_ends else dims), norm)
        if from_ends:
            return coarse_reach(Fraction(2 * weight), dims=2, bits=bits, norm=norm)
        return norm_up([Fraction(math.ceil(half))] * (1 + dims), norm)

    return IntegerQuery(
        addends=addends,
        finish=finish,
        shape=(1 + dims,),
        reach=reach,
        unit=math.ldexp(1.0, exponent + bits),
        rounding=1.0,
    )


def fine_exponent(largest: float) -> int:
    """Returns the exponent of a unit in which `largest` is above 2^29 and at most 2^30."""
    if not 2.0**-90 <= largest <= 2.0**90:
        raise ValueError(f"the larger bound must be from 2^-90 to 2^90, got {largest:g}")
    significand, exponent = math.frexp(largest)
    return exponent - FINE_BITS - (significand == 0.5)


def coarsening(capacity: int, *, bits: int) -> int:
    """Returns how many low bits `coarse` removes from a total.

    The total is a sum of `capacity` numbers of `bits` bits.
    """
    needed = max((capacity - 1).bit_length(), LARGEST_TOTAL_BITS - _MOST_BITS)
    return bits - LARGEST_TOTAL_BITS + needed


# These functions are jitted so that JAX reuses their traces if a query is traced again.
@functools.partial(jax.jit, static_argnums=(1, 2))
def to_units(x: jax.Array, exponent: int, ends: tuple[int, int]) -> jax.Array:
    """Converts floats to int32 in units of 2^exponent, clipped to `ends` (at most 2^30)."""
    units = jnp.round(jnp.clip(x * 2.0**-exponent, -(2.0**30), 2.0**30)).astype(jnp.int32)
    return jnp.clip(units, *ends)


@functools.partial(jax.jit, static_argnums=1)
def coarse(total: Limbs, bits: int) -> jax.Array:
    """Returns round(total / 2^bits) as int32, clamped to +-(2^31 - 2)."""
    half = _limbs.constant(2**bits >> 1)
    rounded = _limbs.shift_right(_limbs.add(total, half), jnp.uint32(bits))
    return saturated(rounded)


def coarse_reach(moved: Fraction, *, dims: int, bits: int, norm: VectorNorm) -> float:
    """Bounds the distance between two totals after `coarse` rounds them.

    Before rounding, the distance is at most `moved`. In each coordinate, rounding adds less than 1
    to the difference. So rounding adds at most the norm of the vector of ones to the distance.
    """
    ones = {"l1": Fraction(dims), "l2": Fraction(sqrt_up(Fraction(dims))), "linf": Fraction(1)}
    return round_up(moved / Fraction(2) ** bits + ones[norm])
