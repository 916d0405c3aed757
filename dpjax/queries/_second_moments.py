"""Sums of products of coordinates, for records clipped to a ball or to a cube.

Averages and covariances are computed from noisy sums: either from sums of products themselves, or
from sums of Bernstein polynomials, whichever has less noise.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._types import Database, Scalar
from dpjax._core._values import NeighboringRelation
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype
from dpjax.queries._counts import reach_of_tables
from dpjax.queries._groups import By, groups_of
from dpjax.queries._people import RowsOfPeople, groups_alone
from dpjax.queries._query import IntegerQuery, compiled
from dpjax.queries._sums import FINE_BITS, coarse, coarse_reach, coarsening
from dpjax.queries._totals import Addend, Totals, cells_of_present
from dpjax.targets._known_sensitivity import VectorNorm, sqrt_up

# A record is rounded to a vector of integers in a ball of radius 2^20, or of a smaller radius if
# sums of products would overflow otherwise.
RADIUS_BITS = 20
# If coordinates are clipped to [-1, 1] (a cube), squares are in [0, 1]. Then this number is
# subtracted from each square, so that an added record changes a sum of squares by at most 1/2.
CENTER = 0.5
_LEAST_EXPONENT = -60  # Vectors whose norm is below about 2^-60 become 0.


class Moments(NamedTuple):
    """Noisy averages of clipped records and of their products, in units of the radius.

    Attributes:
        mean: shape (d,).
        second: the average of x x^T, shape (d, d).
        noise: the scale of the noise on averages.
    """

    mean: jax.Array
    second: jax.Array
    noise: jax.Array


def second_moments_query(
    vectors: Callable[[Database], jax.Array], *, dims: int, capacity: int, in_cube: bool = False
) -> IntegerQuery:
    """Returns the query of the sum of z z^T, where z = (1, x) and x is clipped to the unit ball.

    Its value is the upper triangle of this matrix: the number of records, their sum, and the sums
    of products of two coordinates. Records become integer vectors in a ball. The norm is checked in
    integers, so rounding cannot move a record out of the ball.

    In units of the squared radius and in the norm l2, an added record changes the triangle by at
    most sqrt(1 + |x|^2 + |x|^4) <= sqrt(3). Now let y replace x, and let s = <x, y>. The squared
    distance is at most |x - y|^2 + |x x^T - y y^T|^2 = |x|^2 + |y|^2 + |x|^4 + |y|^4 - 2 s - 2 s^2,
    hence at most 4 + 1/2. In one dimension the squared distance is (x - y)^2 (1 + (x + y)^2), which
    is at most 4, because |x - y| + |x + y| <= 2.

    In a cube, x_i^2 is in [0, 1], and 1/2 is subtracted from it, so that an added record changes
    the sum of squares by at most 1/2. docs/proofs/learners.md proves how much a record changes the
    triangle.

    Args:
        vectors: maps the records to a float array of shape (n, dims).
        dims: d.
        capacity: the number of records up to which nothing overflows.
        in_cube: whether each coordinate is clipped to [-1, 1] by itself, and squares are centered,
            instead of records being clipped to the unit ball.
    """
    moved = functools.partial(_moved_in_cube if in_cube else _moved, dims)
    return products_query(
        lambda records: [vectors(records)],
        upper_triangle(1 + dims),
        moved,
        capacity=capacity,
        in_cube=in_cube,
    )


def products_query(
    parts: Callable[[Database], Sequence[jax.Array]],
    entries: tuple[np.ndarray, ...],
    moved: Callable[[NeighboringRelation], dict[VectorNorm, Fraction]],
    *,
    weight: Fraction = Fraction(1),
    capacity: int,
    in_cube: bool = False,
) -> IntegerQuery:
    """Returns the query of some entries of the sum of z z^T, for z = (weight, x, y, ...).

    Args:
        parts: maps the records to x, y, ...: float arrays of shape (n, d), where d may differ. Each
            is clipped to the unit ball.
        entries: the rows and columns of the entries.
        moved: maps a relation to the largest change of these entries by one record, in each norm.
        weight: the first coordinate of z, at most 1.
        capacity: a bound on the number of records. The sums of this many records do not overflow.
        in_cube: as for `second_moments_query`; the weight is 1 then.
    """
    radius_bits = radius_bits_for(capacity)
    bits = coarsening(capacity, bits=2 * radius_bits)
    count, radius = len(entries[0]), 2.0**radius_bits
    # The vector z starts with the weight, at index 0. The vectors that are clipped to balls follow.
    # So the dimension of each of these vectors is at most the largest index.
    edge = 0 if in_cube else edge_of_ball(int(np.max(entries)), radius_bits) * radius
    is_square = (entries[0] == entries[1]) & (entries[0] > 0)
    clipped = as_cube if in_cube else in_ball

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        inside = [clipped(part, present, bits=radius_bits) for part in parts(records)]
        first = jnp.full((len(present), 1), int(weight * 2**radius_bits), jnp.int32)
        z = jnp.concatenate([first, *inside], axis=1)
        return [Addend(cells_of_present(present), 1, z, radius_bits, entries)]

    def finish(totals: Totals) -> jax.Array:
        triangle = Limbs(*(limb.reshape(count) for limb in totals[0]))
        # In a cube, 1/2 is subtracted from each squared coordinate of each record. So half of the
        # number of records is subtracted from each sum of squares. Entry 0 of the triangle is the
        # number of records times a power of 4, so it is even.
        if in_cube:
            half = _limbs.halve(Limbs(triangle.high[0], triangle.low[0]))
            triangle = _limbs.where(is_square, _limbs.subtract(triangle, half), triangle)
        return coarse(triangle, bits)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        far = moved(relation)[norm]
        return coarse_reach(far, dims=count, bits=bits - 2 * radius_bits, norm=norm)

    return IntegerQuery(
        addends=addends,
        finish=finish,
        shape=(count,),
        reach=reach,
        unit=math.ldexp(1.0, bits - 2 * radius_bits),
        # The error of a coordinate is at most 1, so the error of a product is at most 2 radius + 1.
        # Rounding the total adds 1/2.
        rounding=1.5 + math.ldexp(capacity, radius_bits + 1 - bits),
        clipping=math.ldexp(capacity * edge * (2 * radius + edge), -bits),
    )


def radius_bits_for(capacity: int) -> int:
    """Returns the largest b, up to `RADIUS_BITS`, such that `capacity` * (2^b)^2 <= 2^62."""
    return min(RADIUS_BITS, (62 - (capacity - 1).bit_length()) // 2)


def in_ball(x: jax.Array, present: jax.Array, *, bits: int = RADIUS_BITS) -> jax.Array:
    """Converts vectors to integers in units of 2^-bits, clipped to the unit ball.

    Vectors outside the ball are scaled, with a margin for rounding. If an integer vector is still
    outside, it becomes 0. So the result is in the ball, however floats are rounded. Empty slots and
    vectors that are not finite become 0, too.

    The integers do not depend on the slot of a vector, because squares are added up as integers.
    Floats are only multiplied, divided and square-rooted, and IEEE 754 defines the result of each
    such operation. A sum of products in floats could be fused in one slot but not in another.
    """
    x = x.astype(compute_dtype(x.dtype))
    dims, radius = x.shape[1], 2**bits
    finite = jnp.all(jnp.isfinite(x), axis=1, keepdims=True) & present[:, None]
    x = jnp.where(finite, x, 0)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=1, keepdims=True))
    exponent = jnp.maximum(exponent, _LEAST_EXPONENT)
    # 2^-exponent may overflow a float, so `x` is multiplied by two factors instead.
    half = exponent // 2
    direction = x * power_of_two(-half, x.dtype) * power_of_two(half - exponent, x.dtype)
    squared_length = _limbs.to_float(_squared_lengths(_in_units(direction, radius)), x.dtype)
    margin = margin_in_units(dims) / radius
    # Without the barrier, XLA fuses the square root and the division into an approximate `rsqrt`.
    longest = (1 - margin) * radius / lax.optimization_barrier(jnp.sqrt(squared_length))
    length = power_of_two(jnp.minimum(exponent, 2), x.dtype)
    units = _in_units(direction * jnp.minimum(length, longest[:, None]), radius)
    inside = ~_limbs.less(_limbs.constant(radius**2), _squared_lengths(units))
    return jnp.where(inside[:, None], units, 0)


def as_cube(x: jax.Array, present: jax.Array, *, bits: int = RADIUS_BITS) -> jax.Array:
    """Converts vectors to integers in units of 2^-bits, each coordinate clipped to [-1, 1].

    Empty slots and vectors that are not finite become 0.
    """
    x = x.astype(compute_dtype(x.dtype))
    finite = jnp.all(jnp.isfinite(x), axis=1, keepdims=True) & present[:, None]
    return _in_units(jnp.where(finite, x, 0), 2**bits)


def _in_units(x: jax.Array, radius: int) -> jax.Array:
    return jnp.round(jnp.clip(x, -1, 1) * radius).astype(jnp.int32)


def _squared_lengths(units: jax.Array) -> Limbs:
    """Returns the exact squared norms of the rows of `units`."""
    wide = _limbs.from_integers(units.T)
    return _limbs.total(_limbs.multiply(wide, wide))


@compiled
def averages(
    triangle: jax.Array,
    n: jax.Array | None,
    noise: Scalar,
    *,
    weight: float = 1.0,
    center: float = 0.0,
) -> Moments:
    """Computes averages from a noisy triangle of floats and the scale of its noise.

    The triangle is the upper triangle of the sum of z z^T, and the first coordinate of every z is
    `weight`. `center` is the number that was subtracted from each square before the release: 0 if
    records are clipped to a ball, and `CENTER` if each coordinate is clipped to [-1, 1] (a cube).
    """
    size = (math.isqrt(1 + 8 * len(triangle)) - 1) // 2
    sums = jnp.zeros((size, size)).at[upper_triangle(size)].set(triangle)
    sums = jnp.where(jnp.arange(size)[:, None] <= jnp.arange(size)[None], sums, sums.T)
    count = jnp.maximum(sums[0, 0] / weight**2 if n is None else n, 1)
    second = sums[1:, 1:] / count + center * jnp.eye(size - 1)
    return Moments(sums[0, 1:] / (weight * count), second, noise / count)


def edge_of_ball(dims: int, bits: int) -> float:
    """Returns the most that `in_ball` changes a coordinate of a vector in the unit ball."""
    return (margin_in_units(dims) + 2) / 2**bits


def margin_in_units(dims: int) -> float:
    """Returns how far vectors at the edge are moved inward, to stay in the ball when rounded."""
    return math.sqrt(dims) + 2 * dims + 16


def upper_triangle(size: int) -> tuple[np.ndarray, ...]:
    """Returns the rows and columns of the upper triangle, in int32 with and without x64."""
    return tuple(np.asarray(np.triu_indices(size), np.int32))


def _moved(d: int, relation: NeighboringRelation) -> dict[VectorNorm, Fraction]:
    root = Fraction(sqrt_up(Fraction(d)))
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return {
            "l1": 1 + root + Fraction(d + 1, 2),
            "l2": Fraction(sqrt_up(Fraction(3))),
            "linf": Fraction(1),
        }
    if d == 1:
        return {"l1": Fraction(9, 4), "l2": Fraction(2), "linf": Fraction(2)}
    return {
        "l1": largest_by_angle(away=math.sqrt(2 * d), both=moved_products(d)),
        "l2": Fraction(sqrt_up(Fraction(9, 2))),
        "linf": Fraction(2),
    }


def moved_products(d: int) -> float:
    """Returns c such that replacing x by y changes x x^T by at most c sqrt(1 - s^2).

    Here s is the inner product of x and y, which are unit vectors. The change is measured in the
    norm l1 of the upper triangle.
    """
    return math.sqrt(d * (d + 3) / 2)


def largest_by_angle(*, away: float, both: float, toward: float = 0.0) -> Fraction:
    """Bounds `away` sqrt(1 - s) + `toward` sqrt(1 + s) + `both` sqrt(1 - s^2) from above.

    The bound is valid for all s in [-1, 1]. Here s is the inner product of two unit vectors. The
    sum is concave in s, so each of its tangents is an upper bound.
    """

    def slope(s: float) -> float:
        falls = away / (2 * math.sqrt(1 - s)) + both * s / math.sqrt(1 - s * s)
        return toward / (2 * math.sqrt(1 + s)) - falls

    low, high = -1 + 2.0**-20, 1 - 2.0**-20
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    value = away * math.sqrt(1 - low) + toward * math.sqrt(1 + low) + both * math.sqrt(1 - low**2)
    # The factor covers the rounding errors of this computation.
    return Fraction(value + 2 * abs(slope(low))) * (1 + Fraction(1, 2**40))


def _moved_in_cube(d: int, relation: NeighboringRelation) -> dict[VectorNorm, Fraction]:
    """Returns how much a record changes the value of `second_moments_query` with `in_cube`.

    docs/proofs/learners.md has the proof.
    """
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return {
            "l1": 1 + d + Fraction(d * d, 2),
            "l2": Fraction(sqrt_up(1 + d + Fraction(d, 4) + Fraction(d * (d - 1), 2))),
            "linf": Fraction(1),
        }
    return {
        "l1": Fraction(d * (d + 2) ** 2, 2 * (d + 1)),
        "l2": Fraction(sqrt_up(Fraction(4 * ((d + 1) ** 2 // 4)))),
        "linf": Fraction(2),
    }


# The following functions sum products of Bernstein polynomials of the coordinates. A record adds a
# share to each cell. This share is a product of polynomials, one for each coordinate. Shares are at
# least 0 and sum to 1. So an added record changes all sums together by at most 1 in the norm l1,
# for any number of cells. Counts, sums, and sums of squares and products are linear combinations of
# these sums.


# The coefficients of 1, x and x^2 in the Bernstein polynomials of each degree on [-1, 1]. Degree 1
# has no x^2.
_POWERS = {1: ((1, 1), (-1, 1), (0, 0)), 2: ((1, 1, 1), (-1, 0, 1), (1, -1, 1))}
# Each record adds 1 in total. A share is the part of this 1 that is added to one cell. Each step of
# `_shares` increases the error of a share by at most this much, in units of 2^-30.
_ERROR = 385
# Up to this many coordinates, sums of products may be computed from cells. With more coordinates,
# sums computed from cells would contain the noise of too many cells. So noise is added directly to
# the sums of products instead.
_MOST_IN_CUBE, _MOST_IN_BALL = 3, 2


def bernstein_query(
    parts: Callable[[Database], Sequence[jax.Array]],
    *,
    degrees: Sequence[int],
    capacity: int,
    in_cube: bool,
) -> IntegerQuery:
    """Returns the query that sums all products of Bernstein polynomials over the records.

    A product has one polynomial for each coordinate. "Bernstein polynomials" in
    docs/proofs/shorter.md has the proof.

    Args:
        parts: maps the records to float arrays of shape (n, d), whose columns are the coordinates.
        degrees: the degree of the polynomials of each coordinate. The value has a cell for each
            product, in row-major order.
        capacity: a bound on the number of records. The sums of this many records do not overflow.
        in_cube: whether each coordinate is clipped to [-1, 1] by itself, instead of each part being
            clipped to the unit ball.
    """
    count, bits = math.prod(degree + 1 for degree in degrees), coarsening(capacity, bits=FINE_BITS)
    clipped = as_cube if in_cube else in_ball
    edge = 0.0 if in_cube else edge_of_ball(len(degrees), RADIUS_BITS)
    # A record changes the sums by at most as much as it changes a table of counts, in any norm.
    of_cells = reach_of_tables([count])

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        inside = [clipped(part, present, bits=RADIUS_BITS) for part in parts(records)]
        shares = _shares(jnp.concatenate(inside, axis=1), degrees)
        return [Addend(cells_of_present(present), 1, shares, FINE_BITS)]

    def finish(totals: Totals) -> jax.Array:
        return coarse(Limbs(*(limb.reshape(count) for limb in totals[0])), bits)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        far = Fraction(of_cells(norm, relation))
        return coarse_reach(far, dims=count, bits=bits - FINE_BITS, norm=norm)

    return IntegerQuery(
        addends=addends,
        finish=finish,
        shape=(count,),
        reach=reach,
        unit=math.ldexp(1.0, bits - FINE_BITS),
        rounding=0.5 + math.ldexp(_ERROR * sum(degrees) * capacity, -bits),
        clipping=math.ldexp(edge * len(degrees) * capacity, FINE_BITS - bits),
        one_way=True,
    )


def _shares(units: jax.Array, degrees: Sequence[int]) -> jax.Array:
    """Divides 2^30 among the cells of each record, in integers that sum to 2^30.

    Each step uses one coordinate x in [-1, 1]. It divides every share w into an upper part of about
    w (1 + x) / 2, and a lower part, the rest. For degree 2, a second step with the same x divides
    both parts again. Of the four parts, the two in the middle are added, so three shares remain.
    Floats are only multiplied, and integers are added. So no compiler fuses a float addition in one
    slot but not in another, and a record has the same shares in every slot.
    """
    shares = jnp.full((len(units), 1), 2**FINE_BITS, jnp.int32)
    places = (units + 2**RADIUS_BITS).astype(jnp.float32) * np.float32(0.5**RADIUS_BITS / 2)
    for column, degree in enumerate(degrees):
        split = shares[:, :, None]
        for _ in range(degree):
            above = jnp.round(split.astype(jnp.float32) * places[:, column, None, None])
            above = jnp.minimum(above.astype(jnp.int32), split)
            below = jnp.pad(split - above, ((0, 0), (0, 0), (0, 1)))
            split = below + jnp.pad(above, ((0, 0), (0, 0), (1, 0)))
        shares = split.reshape(len(units), -1)
    return shares


@functools.cache
def _combinations(degrees: tuple[int, ...]) -> np.ndarray:
    """Returns the matrix that maps the value of `bernstein_query` to sums of products.

    The sums of products are the upper triangle of the sum of z z^T, where z = (1, x). If a
    coordinate has degree 1, the value does not determine the sum of its squares. The matrix then
    has zeros in the row of this sum.
    """

    def combination(i: int, j: int) -> np.ndarray:
        powers = [(i, j).count(k) for k in range(1, 1 + len(degrees))]
        factors = [_POWERS[degree][power] for degree, power in zip(degrees, powers, strict=True)]
        return functools.reduce(np.kron, map(np.asarray, factors))

    rows, columns = upper_triangle(1 + len(degrees))
    return np.stack([combination(i, j) for i, j in zip(rows, columns, strict=True)])


def combinations_of(facts: dict[str, Any], released: int) -> np.ndarray:
    """Returns the matrix that maps the released sums to sums of products.

    The sums of products are the upper triangle of the sum of z z^T, where z = (1, x). Without
    "degrees" in the public facts, they are released themselves, and their number is `released`.
    """
    return _combinations(tuple(facts["degrees"])) if "degrees" in facts else np.eye(released)


def sums_of_moments(
    dims: int,
    relation: NeighboringRelation,
    by: By | RowsOfPeople | None,
    *,
    in_cube: bool,
    delta: float | None = None,
) -> dict[str, Any]:
    """Returns public facts about the sums from which averages of products are computed.

    Bernstein polynomials are summed if this needs less noise than sums of products: for Laplace
    noise, few coordinates, and groups whose sizes differ between neighbors. "Variances" in
    docs/proofs/shorter.md compares the noise.

    Args:
        dims: the number of coordinates.
        relation: which databases are neighbors.
        by: the groups.
        in_cube: whether each coordinate is clipped by itself, or records are clipped to a ball.
        delta: the delta of Gaussian noise; None for Laplace noise.
    """
    most = _MOST_IN_CUBE if in_cube else _MOST_IN_BALL
    if delta is None and sizes_differ(relation, by) and dims <= most:
        return {"degrees": [2] * dims}
    return {"center": CENTER if in_cube else 0.0}


def sizes_differ(relation: NeighboringRelation, by: By | RowsOfPeople | None) -> bool:
    """Returns whether a group may have different sizes in neighboring databases.

    Sizes differ under add-or-remove-one. They also differ if there are several groups, because a
    replaced record may move from one to another. Sizes may also differ because records are left
    out, for example if a number is missing. This function does not consider that.
    """
    groups = math.prod(len(one.keys) for one in groups_of(groups_alone(by)))
    return groups > 1 or NeighboringRelation(relation) is NeighboringRelation.ADD_OR_REMOVE_ONE


def moments_query(
    vectors: Callable[[Database], jax.Array],
    sums: dict[str, Any],
    *,
    dims: int,
    capacity: int,
    in_cube: bool,
) -> IntegerQuery:
    """Returns the query of the sums that `sums_of_moments` chose."""
    if "degrees" not in sums:
        return second_moments_query(vectors, dims=dims, capacity=capacity, in_cube=in_cube)
    return bernstein_query(
        lambda records: [vectors(records)],
        degrees=sums["degrees"],
        capacity=capacity,
        in_cube=in_cube,
    )


def moments_of(
    sums: jax.Array, n: jax.Array | None, noise: Scalar, facts: dict[str, Any]
) -> Moments:
    """Computes noisy averages from the noisy sums of `bernstein_query` or of `products_query`.

    Args:
        sums: the noisy sums, in units of records.
        n: the number of records; None if it is private.
        noise: the scale of the noise on the sums.
        facts: the public facts about the query. For Bernstein polynomials: their "degrees". For
            products: the "weight", which is the first coordinate of z; "left_out", how many entries
            at the end of the upper triangle of z z^T are not released; and the "center", which was
            subtracted from squares.
    """
    if "degrees" not in facts:
        triangle = jnp.append(sums, jnp.zeros(facts.get("left_out", 0), sums.dtype))
        shape = {name: facts[name] for name in ("weight", "center") if name in facts}
        return averages(triangle, n, noise, **shape)
    matrix = _combinations(tuple(facts["degrees"]))
    # Accelerators compute a product of matrices with fewer digits.
    triangle = jnp.sum(jnp.asarray(matrix, sums.dtype) * sums[None], axis=-1)
    return averages(triangle, n, noise * float(np.linalg.norm(matrix, axis=-1).max()))


# The following functions choose and sum the products from which a regression line is computed.


# `_line_query` sums the products of the coordinates of z = (3/4, x, y). If the first coordinate is
# smaller, z is shorter, so all entries get less noise. But the sums of x and y are multiplied by
# the first coordinate, so their relative noise grows. Noise on products matters more: the
# regression divides products by the variance of x, and this variance is usually much smaller than
# the square of the radius.
_WEIGHT = Fraction(3, 4)
# If x has at most this many columns and the noise is Laplace, sums of Bernstein polynomials are
# more accurate than sums of products. More columns would have too many polynomials.
_MOST_COLUMNS = 3


def sums_of_line(columns: int | None) -> dict[str, Any]:
    """Returns public facts about the sums from which a regression is computed; see `moments_of`.

    Args:
        columns: the number of columns of x if the noise is Laplace. None if the noise is Gaussian,
            because then the number does not matter.
    """
    if columns is not None and columns <= _MOST_COLUMNS:
        return {"degrees": [2] * columns + [1]}
    return {"weight": float(_WEIGHT), "left_out": 1}


def line_query(
    parts: Callable[[Database], tuple[jax.Array, jax.Array]],
    sums: dict[str, Any],
    *,
    dims: int,
    capacity: int,
    in_cube: bool = False,
) -> IntegerQuery:
    """Returns the query of the sums that `sums_of_line` chose."""
    if "degrees" not in sums:
        return _line_query(parts, dims=dims, capacity=capacity)
    return bernstein_query(parts, degrees=sums["degrees"], capacity=capacity, in_cube=in_cube)


def _line_query(
    parts: Callable[[Database], tuple[jax.Array, jax.Array]], *, dims: int, capacity: int
) -> IntegerQuery:
    """Returns the query of the upper triangle of the sum of z z^T, for z = (3/4, x, y).

    The query leaves out the last entry, the sum of y^2.
    """
    rows, others = upper_triangle(2 + dims)
    moved, entries = functools.partial(_moved_by_line, dims), (rows[:-1], others[:-1])
    return products_query(parts, entries, moved, weight=_WEIGHT, capacity=capacity)


def _moved_by_line(d: int, relation: NeighboringRelation) -> dict[VectorNorm, Fraction]:
    """Returns how much a record changes the value of `_line_query`.

    "Lines" in docs/proofs/shorter.md has the proof.
    """
    h, root = _WEIGHT, Fraction(sqrt_up(Fraction(d)))
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return {
            "l1": h**2 + h * root + h + Fraction(d + 1, 2) + root,
            "l2": Fraction(sqrt_up((1 + h**2) ** 2 + 1)),
            "linf": Fraction(1),
        }
    squared = 4 + 4 * h**2 if d == 1 else 4 + 6 * h**2 + (1 - h**2) ** 2 / 2
    return {
        "l1": _moved_in_l1(d) if d > 1 else (1 + h) * (9 + h) / 4,
        "l2": Fraction(sqrt_up(squared)),
        "linf": Fraction(2),
    }


def _moved_in_l1(d: int) -> Fraction:
    """Returns the l1 bound of `_moved_by_line` for a replaced record and d > 1.

    The bound is the maximum of two cases: y keeps its sign, or y changes its sign.
    """
    h, root, both = _WEIGHT, math.sqrt(2 * d), moved_products(d)
    kept = largest_by_angle(away=(1 + float(h)) * root, both=both)
    return max(kept, 2 * h + largest_by_angle(away=float(h) * root, both=both, toward=root))
