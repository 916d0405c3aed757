"""Sums of products of the coordinates of records, which are clipped to a ball."""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._values import NeighboringRelation
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._numerics import compute_dtype
from dpjax.queries._integer_sums import coarse, coarse_reach, coarsening, gram
from dpjax.queries._query import Query, rounded_estimate
from dpjax.targets._bounds import VectorNorm, sqrt_up

# A record is a vector of integers in a ball of radius 2^20, or less where products would wrap.
RADIUS_BITS = 20
_LEAST_EXPONENT = -60  # Shorter vectors are 0.


class Moments(NamedTuple):
    """What is known of records after a release, in units of the radius.

    Attributes:
        mean: shape (d,).
        second: the average of x x^T, shape (d, d).
        noise: the scale of the noise on averages.

    Formal guarantees:
        None of its own.
    """

    mean: jax.Array
    second: jax.Array
    noise: jax.Array


def second_moments_query(vectors: Callable[[Any], jax.Array], *, dims: int, capacity: int) -> Query:
    """The upper triangle of the sum of z z^T, where z = (1, x) and x is clipped to the unit ball.

    So it holds the number of records, their sum, and the sum of the products of their coordinates,
    each once. Records become integers in a ball, checked in integers, so that no rounding takes one
    further.

    In units of the squared radius, a record in the ball moves the triangle, in the norm l2, by at
    most sqrt(1 + |x|^2 + |x|^4) <= sqrt(3) where it is added. Where x is replaced by y, the squared
    distance is at most |x - y|^2 + |x x^T - y y^T|^2 = |x|^2 + |y|^2 + |x|^4 + |y|^4 - 2 s - 2 s^2
    with s = <x, y>, hence at most 4 + 1/2; on the line, where it is (x - y)^2 (1 + (x + y)^2) and
    |x - y| + |x + y| <= 2, at most 4.

    Args:
        vectors: takes the records to an array of shape (n, dims), of floats.
        dims: d.
        capacity: for so many records nothing overflows.
    """
    radius_bits = radius_bits_for(capacity)
    bits = coarsening(capacity, bits=2 * radius_bits)
    upper = _upper(1 + dims)

    def total(records: Any, present: jax.Array) -> jax.Array:
        x = in_ball(vectors(records), present, bits=radius_bits)
        weight = jnp.where(present, jnp.int32(2**radius_bits), 0)[:, None]
        products = gram(jnp.concatenate([weight, x], axis=1), bits=radius_bits)
        return coarse(_limbs.Limbs(products.high[upper], products.low[upper]), bits)

    return Query(
        total=total,
        shape=(len(upper[0]),),
        reach=functools.partial(_reach, dims, bits - 2 * radius_bits),
        unit=math.ldexp(1.0, bits - 2 * radius_bits),
        # Coordinates are off by 1 at most, in floats, products by 2 radius + 1; the total by 1/2.
        rounding=1.5 + math.ldexp(capacity, radius_bits + 1 - bits),
    )


def radius_bits_for(capacity: int) -> int:
    """Of the radius, so that products of so many records add up to at most 2^62."""
    return min(RADIUS_BITS, (62 - (capacity - 1).bit_length()) // 2)


def in_ball(x: jax.Array, present: jax.Array, *, bits: int = RADIUS_BITS) -> jax.Array:
    """Vectors as integers in units of 2^-bits, clipped to the ball of radius 1.

    Whatever floats do, what is not in the ball, as integers, counts as its center; and so do
    vectors that are not finite, and empty slots. The margin keeps rounding from leaving the ball.
    A vector makes the same integers in every slot: squares are added up as integers, and floats
    are only multiplied, divided and their roots taken, each rounded alone as by IEEE 754. A sum of
    products could be fused in one slot and not in another.
    """
    x = x.astype(compute_dtype(x.dtype))
    dims, radius = x.shape[1], 2**bits
    finite = jnp.all(jnp.isfinite(x), axis=1, keepdims=True) & present[:, None]
    x = jnp.where(finite, x, 0)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=1, keepdims=True))
    exponent = jnp.maximum(exponent, _LEAST_EXPONENT)
    # In two steps, because not every power is a float.
    half = exponent // 2
    direction = x * power_of_two(-half, x.dtype) * power_of_two(half - exponent, x.dtype)
    squared_length = _limbs.to_float(_squared_lengths(_in_units(direction, radius)), x.dtype)
    margin = (math.sqrt(dims) + 2 * dims + 16) / radius
    # Without the barrier XLA takes its approximate inverse root.
    longest = (1 - margin) * radius / lax.optimization_barrier(jnp.sqrt(squared_length))
    length = power_of_two(jnp.minimum(exponent, 2), x.dtype)
    units = _in_units(direction * jnp.minimum(length, longest[:, None]), radius)
    inside = ~_limbs.less(_limbs.constant(radius**2), _squared_lengths(units))
    return jnp.where(inside[:, None], units, 0)


def _in_units(x: jax.Array, radius: int) -> jax.Array:
    return jnp.round(jnp.clip(x, -1, 1) * radius).astype(jnp.int32)


def _squared_lengths(units: jax.Array) -> _limbs.Limbs:
    """Of the rows, exactly."""
    wide = _limbs.from_integers(units.T)
    return _limbs.total(_limbs.multiply(wide, wide))


def moments_of(query: Query, triangle: jax.Array, n: jax.Array | None, scale: Any) -> Moments:
    """Averages, from a release of the triangle with noise of a scale, and n where it is public."""
    size = (math.isqrt(1 + 8 * len(triangle)) - 1) // 2
    upper = _upper(size)
    sums = jnp.zeros((size, size)).at[upper].set(rounded_estimate(query, triangle))
    sums = jnp.where(jnp.arange(size)[:, None] <= jnp.arange(size)[None], sums, sums.T)
    count = jnp.maximum(sums[0, 0] if n is None else n, 1)
    return Moments(sums[0, 1:] / count, sums[1:, 1:] / count, scale * query.unit / count)


def _upper(size: int) -> tuple[np.ndarray, ...]:
    """Rows and columns of the upper triangle, of one dtype with and without x64."""
    return tuple(np.asarray(np.triu_indices(size), np.int32))


def _reach(d: int, bits: int, norm: VectorNorm, relation: NeighboringRelation) -> float:
    root = Fraction(sqrt_up(Fraction(d)))
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        moved = {
            "l1": 1 + root + Fraction(d + 1, 2),
            "l2": Fraction(sqrt_up(Fraction(3))),
            "linf": Fraction(1),
        }
    else:
        moved = {
            "l1": 2 * root + d + 1 if d > 1 else Fraction(9, 4),
            "l2": Fraction(sqrt_up(Fraction(9, 2))) if d > 1 else Fraction(2),
            "linf": Fraction(2),
        }
    entries = (d + 1) * (d + 2) // 2
    return coarse_reach(moved[norm], dims=entries, bits=bits, norm=norm)
