"""Exact 64-bit sums of the integers that records add to the cells of a table.

Totals have 64 bits. They add up to the same bits in any order, including totals of separate parts
of the records. Memory and time grow with the number of records plus cells, not with their product.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._records import PaddedRecords, Parts, Summed, Unsummed
from dpjax._core._types import Database
from dpjax._core._values import NeighboringRelation
from dpjax._exact import _limbs
from dpjax._exact._limbs import Limbs
from dpjax.queries._padded_records import present_records

Totals: TypeAlias = tuple[Limbs, ...]
"""The totals of each table, of shape (cells, d)."""

# This many digits of 10 bits can be added in int32 without overflow.
_ROWS = 2**20
_DIGIT = 10
# Numbers are split into digits, and added in blocks of rows. All numbers of a block together have
# at most this many digits. Exception: a block may always have one row per cell of the table.
_MOST_DIGITS = 2**22
# The largest number of cells, and the largest value that gets noise.
LARGEST = 2**31 - 2
# In `gram`, sums of products of digits have at most this many bits.
_SUM_BITS = 30


class Addend(NamedTuple):
    """The contributions of records to one table: each record adds a row of integers to one cell.

    Attributes:
        cell: int32 of shape (n,), the cell of each record; below 0 if it adds nothing.
        cells: the number of cells.
        weights: int32 of shape (n, d), in [-2^bits, 2^bits]; None if every record adds a single 1.
        bits: the number of bits of the weights, at most 30; at most 20 with `products`.
        products: pairs of coordinates. If they are given, a record adds the products of these pairs
            of weights instead of the weights.
    """

    cell: jax.Array
    cells: int
    weights: jax.Array | None = None
    bits: int = 30
    products: tuple[np.ndarray, ...] | None = None


def cells_of_present(present: jax.Array) -> jax.Array:
    """Returns the cell of each record in a table of one cell: 0 if it is present, else below 0."""
    return jnp.where(present, 0, -1).astype(jnp.int32)


def totals_of(addends: Sequence[Addend]) -> Totals:
    """Returns the exact totals of each table."""
    return tuple(map(_total_of, addends))


@jax.jit
def added(first: Totals, second: Totals) -> Totals:
    """Adds the totals of two disjoint parts of the records. Sums below 2^63 are exact."""
    return tuple(map(_limbs.add, first, second))


def in_groups(addend: Addend, group: jax.Array, groups: int) -> Addend:
    """Concatenates one copy of the table for every group.

    Records with a group below 0 add nothing.
    """
    if (cells := groups * addend.cells) > LARGEST:
        raise ValueError(
            f"keys must make at most {LARGEST} cells, got {groups} groups of {addend.cells} cells"
        )
    inside = (group >= 0) & (addend.cell >= 0)
    cell = jnp.where(inside, group * np.int32(addend.cells) + addend.cell, -1)
    return addend._replace(cell=cell, cells=cells)


def of_each_group(totals: Totals, groups: int) -> Totals:
    """Reshapes totals made by `in_groups`, so that groups have a leading axis of their own."""
    return jax.tree.map(lambda x: x.reshape(groups, -1, x.shape[1]), totals)


def saturated(total: Limbs) -> jax.Array:
    """Converts totals to int32, clamped to +-(2^31 - 2)."""
    return _limbs.to_integers(_limbs.clip(total, LARGEST), jnp.int32)


def _total_of(addend: Addend) -> Limbs:
    if addend.weights is None:
        return _limbs.from_integers(_counts(addend.cell, addend.cells)[:, None])
    if addend.cells > 1:
        return _sums_of_cells(addend)
    rows = jnp.where((addend.cell >= 0)[:, None], addend.weights, 0)
    if addend.products is None:
        total = sum_of_integers(rows)
    else:
        whole = gram(rows, bits=addend.bits)
        total = Limbs(*(limb[addend.products] for limb in whole))
    return Limbs(*(limb[None] for limb in total))


def _counts(cell: jax.Array, cells: int) -> jax.Array:
    """Returns the number of records in each cell."""
    if cells == 1:
        return jnp.sum(cell >= 0, dtype=jnp.int32)[None]
    place = jnp.where(cell >= 0, cell, cells)
    return jnp.zeros(cells, jnp.int32).at[place].add(1, mode="drop")


def _sums_of_cells(addend: Addend) -> Limbs:
    """Returns the sum of the weights of the records in each cell.

    Entries are split into digits of 10 bits. Digits are added up in int32, in blocks with few
    enough rows that no sum overflows.
    """
    weights, cells, products = addend.weights, addend.cells, addend.products
    assert weights is not None
    entries = weights.shape[1] if products is None else len(products[0])
    digits = math.ceil(addend.bits * (1 if products is None else 2) / _DIGIT)
    size = min(_ROWS, max(_MOST_DIGITS // (entries * digits), cells, 1), len(weights))
    missing = -len(weights) % size
    rows = jnp.pad(weights, ((0, missing), (0, 0))).reshape(-1, size, weights.shape[1])
    place = jnp.where(addend.cell >= 0, addend.cell, cells)
    place = jnp.pad(place, (0, missing), constant_values=cells).reshape(-1, size)

    def of_block(rows: jax.Array, place: jax.Array) -> Limbs:
        split = jnp.concatenate(_digits(_entries(rows, products), digits), axis=1)
        sums = jnp.zeros((cells, split.shape[1]), jnp.int32).at[place].add(split, mode="drop")
        parts = jnp.split(sums, digits, axis=1)
        return functools.reduce(
            _limbs.add, [_shifted(_limbs.from_integers(x), _DIGIT * i) for i, x in enumerate(parts)]
        )

    def step(total: Limbs, block: tuple[jax.Array, jax.Array]) -> tuple[Limbs, None]:
        return _limbs.add(total, of_block(*block)), None

    if len(rows) == 1:
        return of_block(rows[0], place[0])
    zeros = jnp.zeros((cells, entries), jnp.uint32)
    return lax.scan(step, Limbs(zeros, zeros), (rows, place))[0]


def _entries(rows: jax.Array, products: tuple[np.ndarray, ...] | None) -> Limbs:
    if products is None:
        return _limbs.from_integers(rows)
    first, second = (_limbs.from_integers(rows[:, x]) for x in products)
    return _limbs.multiply(first, second)


def _digits(x: Limbs, count: int) -> list[jax.Array]:
    """Splits integers into `count` digits of 10 bits, lowest first. The last digit has the sign."""
    parts = [_limbs.shift_right(x, jnp.uint32(_DIGIT * i)).low for i in range(count)]
    return [
        (part if i == count - 1 else part & np.uint32(2**_DIGIT - 1)).astype(jnp.int32)
        for i, part in enumerate(parts)
    ]


def _shifted(x: Limbs, by: int) -> Limbs:
    return _limbs.shift_left(x, jnp.uint32(by))


@jax.jit
def sum_of_integers(x: jax.Array) -> Limbs:
    """Sums int32 numbers exactly over the leading axis."""
    return _limbs.total(_limbs.from_integers(x))


def gram(x: jax.Array, *, bits: int) -> Limbs:
    """Returns the sum of x_i x_i^T over the rows of an int32 matrix, entries in [-2^bits, 2^bits].

    Digits are multiplied and added in int32, in blocks with few enough rows that no sum overflows.
    Low digits are nonnegative and may have fewer bits, so that only the products of high digits
    limit the length of a block.
    """
    low_bits = bits // 2
    high_bits = bits - low_bits
    block = 2 ** (_SUM_BITS - 2 * high_bits)
    rows = math.ceil(len(x) / block) * block
    blocks = jnp.pad(x, ((0, rows - len(x)), (0, 0))).reshape(-1, block, x.shape[1])
    high, low = blocks >> low_bits, blocks & (2**low_bits - 1)

    def products(a: jax.Array, b: jax.Array) -> Limbs:
        sums = jnp.einsum("bni,bnj->bij", a, b, preferred_element_type=jnp.int32)
        return sum_of_integers(sums)

    mixed = products(high, low)
    mixed = _limbs.add(mixed, Limbs(mixed.high.T, mixed.low.T))
    ends = _limbs.add(_shifted(products(high, high), 2 * low_bits), products(low, low))
    return _limbs.add(ends, _shifted(mixed, low_bits))


# The following code computes queries of records that are stored in several parts. The totals of
# each part are exact integers, which can be added in any order.


class OfParts:
    """A query that accepts `Parts` and `Summed` instead of records.

    Formal guarantees:
        Totals are integers that add up to the same bits in any order. So the value on parts is bit
        for bit the value on all records at once, and both have the same sensitivity.
    """

    relations = tuple(NeighboringRelation)
    reads = "numbers"
    partial: Callable[..., Totals]
    finish: Callable[[Totals], Any]

    def __call__(self, database: Database) -> Any:
        """The value on a database, from the totals of its records or of its parts."""
        if isinstance(database, Summed):
            return self.finish(database.totals)
        return self.finish(self.partial(*present_records(database)))

    def check_size(self, n: int) -> None:
        """Raises an error if n is more records than the query can count."""

    def over(self, parts: Parts) -> Unsummed:
        """Returns the computation that reads these parts once, and adds up their totals."""
        self.check_size(parts.slots)
        shapes = jax.eval_shape(self.partial, *present_records(parts.like))
        return Unsummed(
            Summed(shapes, parts.slots),
            lambda: Summed(total_of_parts(self.partial, parts), parts.slots),
        )


def total_of_parts(
    partial: Callable[[Any, jax.Array], Totals], parts: Parts, *, is_compiled: bool = True
) -> Totals:
    """Returns the totals of all parts. Refuses more records than the public number of slots.

    `partial` computes the totals of one part. With `is_compiled`, it is compiled as one program.
    Otherwise it runs operation by operation, and its floats are rounded as if there were no parts.
    """

    def of_several(several: Iterator[PaddedRecords]) -> tuple[Any, int]:
        # This runs in the process that stores the parts. The lambda is new at each call, because
        # JAX may cache old closures.
        of_one = partial
        if is_compiled:
            of_one = jax.jit(lambda records, present: partial(records, present))
        total, n = nothing, 0
        for part in several:
            n += int(np.count_nonzero(part.present))
            total = added(total, of_one(*present_records(part)))
            jax.block_until_ready(total)  # Without this wait, queued batches would fill the memory.
        return jax.device_get(total), n

    shapes = jax.eval_shape(partial, *present_records(parts.like))
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    total, n = nothing, 0
    for found, count in parts.each(of_several):
        total, n = added(total, found), n + count
    parts.check_count(n)
    return total
