"""Sums of products of Bernstein polynomials of the coordinates of records.

A record divides one unit among cells: its shares are products of one Bernstein polynomial for each
coordinate. Shares are at least 0 and sum to 1. So all sums together move by at most 1 in the norm
l1, however many cells there are. Counts, sums, and sums of squares and products are linear
combinations of these sums.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import Database, Scalar
from dpjax._core._values import NeighboringRelation
from dpjax._exact._limbs import Limbs
from dpjax.queries._groups import By, groups_of
from dpjax.queries._people import RowsOfPeople, groups_alone
from dpjax.queries._query import IntegerQuery
from dpjax.queries._second_moments import (
    CENTER,
    RADIUS_BITS,
    Moments,
    as_cube,
    averages,
    edge_of_ball,
    in_ball,
    second_moments_query,
    upper_triangle,
)
from dpjax.queries._sums import FINE_BITS, coarse, coarse_reach, coarsening
from dpjax.queries._totals import Addend, Totals, cells_of_present
from dpjax.targets._known_sensitivity import VectorNorm, sqrt_up

# The coefficients of 1, x and x^2 in the Bernstein polynomials of each degree on [-1, 1]. Degree 1
# has no x^2.
_POWERS = {1: ((1, 1), (-1, 1), (0, 0)), 2: ((1, 1, 1), (-1, 0, 1), (1, -1, 1))}
# Each record adds 1 in total. A share is the part of this 1 that is added to one cell. Each step of
# `_shares` increases the error of a share by at most this much, in units of 2^-30.
_ERROR = 385
# For more coordinates of a cube or of a ball, sums of products have less noise: each of them would
# add up the noise of too many cells.
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

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        inside = [clipped(part, present, bits=RADIUS_BITS) for part in parts(records)]
        shares = _shares(jnp.concatenate(inside, axis=1), degrees)
        return [Addend(cells_of_present(present), 1, shares, FINE_BITS)]

    def finish(totals: Totals) -> jax.Array:
        return coarse(Limbs(*(limb.reshape(count) for limb in totals[0])), bits)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        far = _moved(norm, relation)
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


def _moved(norm: VectorNorm, relation: NeighboringRelation) -> Fraction:
    """Returns the largest distance, in the norm, between the sums of two neighbors."""
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return Fraction(1)
    moved = {"l1": Fraction(2), "l2": Fraction(sqrt_up(Fraction(2))), "linf": Fraction(1)}
    return moved[norm]


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
    """Returns the matrix that maps so many released sums to the upper triangle of z z^T.

    Without "degrees" in the public facts, the triangle itself is released.
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

    These are Bernstein polynomials where their noise is the smaller one: for Laplace noise and few
    coordinates, unless a replaced record stays in one group. "Variances" in docs/proofs/shorter.md
    compares the noise.

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

    A replaced record leaves one of several groups and enters another. If it can only stay or be
    left out, this returns False.
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
