"""Sums of numbers that are clamped to public bounds."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._numbers import check_numbers
from dpjax._core._types import Database
from dpjax._core._values import NeighboringRelation
from dpjax.queries._integer_query import IntegerQuery
from dpjax.queries._integer_sums import coarse, coarsening, ends_in_units, sum_of_integers, to_units
from dpjax.queries._query import Query
from dpjax.targets._bounds import VectorNorm, norm_up
from dpjax.targets._interval import check_interval, clamp

# The bits of the largest record in units of the fine grid.
FINE_BITS = 30
_LARGEST_CAPACITY = 2**31 - 1


def sum_query(*, lower: float, upper: float, capacity: int, dims: int | None = None) -> Query:
    """The sum of records, each clamped to public bounds.

    Inside, records are rounded to a grid of 2^-30 of the larger bound and added up exactly. The
    total is rounded to about capacity / 2^30 of the larger bound, or 2^-14 of it, and gets integer
    noise there.

    Args:
        lower: a finite number, public. NaN counts as lower.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.
        capacity: the number of records up to which nothing overflows, public. Take n if it is
            public.
        dims: d, if records are vectors; None if they are numbers.

    Returns:
        A `Query` of shape () or (d,): takes an array of shape (n,) or (n, d) to sums, as floats.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, the bounds are out of order, or the larger one
            in magnitude is not from 2^-90 to 2^90; on a database, if it has another shape.

    Formal guarantees:
        In every coordinate one record moves the sum by at most upper - lower under replace-one, and
        by max(|lower|, |upper|) under add-or-remove-one. For d coordinates it is d times this in
        the norm l1, and sqrt(d) times this in l2. All are attained. What the rounding of totals
        adds, less than one step of their grid, makes the noise larger by as much. The total of more
        than `capacity` records may be clamped: it is private all the same, but it is wrong. With
        probability 1 - beta all coordinates are within b ln(d / beta) of the truth, for Laplace
        noise of scale b, and two steps of the grid for rounding: `error`.

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
    low, high = check_interval(lower, upper)
    capacity = _checks.integer("capacity", capacity, least=1, most=_LARGEST_CAPACITY)
    if dims is not None:
        dims = _checks.integer("dims", dims, least=1)
    shape = () if dims is None else (dims,)
    exponent, bits = fine_exponent(max(abs(low), abs(high))), coarsening(capacity, bits=FINE_BITS)
    ends = ends_in_units(low, high, exponent)

    def total(records: Database, present: jax.Array) -> jax.Array:
        check_numbers("database", records, (*present.shape, *shape))
        units = to_units(clamp(records, low, high), exponent, ends)
        there = present.reshape(-1, *(1 for _ in shape))
        return coarse(sum_of_integers(jnp.where(there, units, 0)), bits)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        replaced = relation is NeighboringRelation.REPLACE_ONE
        farthest = ends[1] - ends[0] if replaced else max(abs(ends[0]), abs(ends[1]))
        # Rounded, totals that differ by this are at most so many units apart.
        return norm_up([Fraction(math.ceil(Fraction(farthest, 2**bits)))] * (dims or 1), norm)

    def moves(norm: VectorNorm, relation: NeighboringRelation) -> float:
        replaced = relation is NeighboringRelation.REPLACE_ONE
        lower, upper = Fraction(low), Fraction(high)
        farthest = upper - lower if replaced else max(abs(lower), abs(upper))
        return norm_up([farthest] * (dims or 1), norm)

    return Query(
        IntegerQuery(
            total=total,
            shape=shape,
            reach=reach,
            moves=moves,
            unit=math.ldexp(1.0, exponent + bits),
            rounding=1.0,
            largest=capacity * max(abs(low), abs(high)),
        )
    )


def fine_exponent(largest: float) -> int:
    """The exponent of a grid on which numbers up to `largest` are integers of at most 2^30."""
    if not 2.0**-90 <= largest <= 2.0**90:
        raise ValueError(f"the larger bound must be from 2^-90 to 2^90, got {largest:g}")
    significand, exponent = math.frexp(largest)
    return exponent - FINE_BITS - (significand == 0.5)
