"""The number of distinct entries of a column in each cell."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpjax._core._types import Database
from dpjax._core._values import NeighboringRelation
from dpjax.queries._padded_records import present_records
from dpjax.tables._frame import Column
from dpjax.targets._known_sensitivity import KnownSensitivity, VectorNorm, norm_up

CELL, WORDS = "cell", "words"


@dataclasses.dataclass(frozen=True, eq=False)
class DistinctCount(KnownSensitivity):
    """A query for the number of distinct entries in each cell.

    Attributes:
        shape: the shape of the array of cells.

    Formal guarantees:
        An added row changes the count of its cell by 1 or 0. A replaced row may remove the only row
        with its old entry, and may bring a new entry, so two cells change by at most 1 each. If
        there is a single cell, these two changes have opposite signs, so it changes by at most 1.
    """

    shape: tuple[int, ...]

    relations = tuple(NeighboringRelation)
    reads = "numbers"

    def __call__(self, database: Database) -> jax.Array:
        """Counts the distinct entries of each cell, after sorting the rows by cell and entry."""
        records, present = present_records(database)
        cells, words = records[CELL], records[WORDS]
        absent = (~(present & (cells >= 0))).astype(jnp.uint32)
        columns = (absent, cells.astype(jnp.uint32), *words.T)
        ordered = jnp.stack(lax.sort(columns, num_keys=len(columns)))
        is_first = jnp.any(ordered != jnp.roll(ordered, 1, axis=1), axis=0)
        is_first |= jnp.arange(present.size) == 0
        size = math.prod(self.shape)
        place = jnp.where(is_first & (ordered[0] == 0), ordered[1], jnp.uint32(size))
        counts = jnp.zeros(size, jnp.int32).at[place].add(1, mode="drop")
        return counts.reshape(self.shape)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        del n, dtype  # Counts are integers, and the bound holds for any number of rows.
        replaced = relation is NeighboringRelation.REPLACE_ONE
        cells = min(2, math.prod(self.shape)) if replaced else 1
        return norm_up([Fraction(1)] * cells, norm)


def words_of(column: Column) -> np.ndarray:
    """Words that are equal if and only if entries are equal: uint32, shape (slots, words)."""
    entries = column.entries
    if column.is_text:
        return entries
    if entries.dtype.kind == "f":
        wide = entries.astype(np.float64) + 0.0  # Turns -0 into 0, because both are the same entry.
    else:
        wide = entries.astype(np.uint64 if entries.dtype.kind == "u" else np.int64)
    return np.ascontiguousarray(wide).view(np.uint32).reshape(len(entries), 2)
