"""Counts the distinct entries of a column in each cell."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpjax._core._guarantee import RECORD
from dpjax._core._records import Parts, Summed, Unsummed
from dpjax._core._types import Database
from dpjax._core._values import NeighboringRelation
from dpjax.queries._group_keys import distinct_in_parts
from dpjax.queries._padded_records import present_records
from dpjax.queries._people import Contribution
from dpjax.tables._frame import Column
from dpjax.targets._known_sensitivity import KnownSensitivity, VectorNorm, norm_up

CELL, WORDS = "cell", "words"


@dataclasses.dataclass(frozen=True, eq=False)
class DistinctCount(KnownSensitivity):
    """A query whose value is the number of distinct entries in each cell.

    Attributes:
        shape: the shape of the array of cells.
        people: the largest number of different entries that are counted for each person; None if
            neighbors differ in one row.
        privacy_unit: the unit in which neighbors differ.
        notes: describe which entries of a person count.

    Formal guarantees:
        An added row changes the count of its cell by 1 or 0. A replaced row may remove the only row
        with its old entry, and may bring a new entry, so two cells change by at most 1 each. If
        there is a single cell, these changes have opposite signs, so its count changes by at most
        1. For people, docs/proofs/people.md has the bound.
    """

    shape: tuple[int, ...]
    people: Contribution | None = None
    privacy_unit: str = RECORD
    notes: tuple[str, ...] = ()

    relations = tuple(NeighboringRelation)
    reads = "numbers"

    def __call__(self, database: Database) -> jax.Array:
        """Returns the number of distinct entries in each cell. Sorts rows by cell and entry."""
        if isinstance(database, Summed):
            return database.totals.reshape(self.shape)
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

    def over(self, parts: Parts) -> Unsummed:
        """Returns the computation that reads all parts once, and counts distinct entries."""

        def compute() -> Summed:
            words, _ = distinct_in_parts(parts, _words_in_cells)
            cells = words[:, 0].view(np.int32)
            counts = np.bincount(cells[cells >= 0], minlength=size)
            return Summed(counts.astype(np.int32), parts.slots)

        size = math.prod(self.shape)
        shapes = Summed(jax.ShapeDtypeStruct((size,), jnp.int32), parts.slots)
        return Unsummed(shapes, compute)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        del n, dtype  # Counts are integers, and the bound is valid for any number of rows.
        if self.people is None:
            return self._of_rows(norm, relation)
        return self.people.reach(self._of_rows, norm, relation)

    def _of_rows(self, norm: VectorNorm, relation: NeighboringRelation) -> float:
        replaced = relation is NeighboringRelation.REPLACE_ONE
        cells = min(2, math.prod(self.shape)) if replaced else 1
        return norm_up([Fraction(1)] * cells, norm)


def _words_in_cells(records: Database) -> np.ndarray:
    """Returns, for each row, its cell as one word, and then the words of its entry.

    A cell is an int32, and is negative for a row outside of all cells.
    """
    cells = np.asarray(records[CELL]).astype(np.int32).view(np.uint32)
    return np.concatenate([cells[:, None], np.asarray(records[WORDS])], axis=1)


def words_of(column: Column) -> np.ndarray:
    """Returns uint32 words of shape (slots, words), equal if and only if entries are equal."""
    entries = column.entries
    if column.is_text:
        return entries
    if entries.dtype.kind == "f":
        # Converts -0.0 to 0.0, because they are the same entry.
        wide = entries.astype(np.float64) + 0.0
    else:
        wide = entries.astype(np.uint64 if entries.dtype.kind == "u" else np.int64)
    return np.ascontiguousarray(wide).view(np.uint32).reshape(len(entries), 2)
