"""Limits the rows of each person: selects the first rows by sorting integers.

docs/proofs/people.md has the proofs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._columns import Numbers, Texts
from dpjax._core._frames import columns
from dpjax._core._records import PaddedRecords, exact_records
from dpjax._core._types import Database
from dpjax.queries._groups import (
    check_name,
    columns_of,
    exact_numbers,
    integer_keys,
    keys_of,
    without,
)
from dpjax.queries._padded_records import check_capacity
from dpjax.targets._clamping import comparable

_MOST_ROWS = 2**20
Name: TypeAlias = str | int


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Limits on the rows of a person that are used.

    Which rows are used depends only on the rows of this person and their order.

    Attributes:
        person: the column of ids.
        rows: how many rows are used in each of the person's groups.
        groups: pairs (column, m). A person's rows are used in at most m groups of this column.
        order: the first rows of a person are those with the smallest numbers in this column; None
            for the order of the table.
        called: the name of the column of ids in the text of a guarantee; None for `person` itself.
    """

    person: Name
    rows: int
    groups: tuple[tuple[Name, int], ...] = ()
    order: Name | None = None
    called: str | None = None

    def kept(self, records: Database, present: jax.Array) -> tuple[jax.Array, "Cells"]:
        """Returns which rows are used, and the person and the groups of each row."""
        ids, known = codes_of(keys_of(self.person, records))
        present, order = present & known, self._order(records)
        columns: list[jax.Array] = []
        for column, _ in self.groups:
            codes, known = codes_of(keys_of(column, records))
            columns.append(codes)
            present &= known
        for codes, (_, most) in zip(columns, self.groups, strict=True):
            present &= _number_of_group(ids, codes, present, order) < most
        cells = Cells((ids, *columns), order)
        return present & (cells.rank(present) < self.rows), cells

    def kept_once(self, records: Database, present: jax.Array, *entries: jax.Array) -> jax.Array:
        """Returns a mask of the rows that are used.

        `entries` are integer codes of the rows. If a person has several rows with equal codes, only
        the first of these rows can be used.
        """
        ids, known = codes_of(keys_of(self.person, records))
        present &= known
        first = Cells((ids, *entries), self._order(records)).rank(present) == 0
        return self.kept(records, present & first)[0]

    def _order(self, records: Database) -> tuple[jax.Array, ...]:
        if self.order is None:
            return ()
        column = keys_of(self.order, records)
        if isinstance(column, Texts):
            raise TypeError(f"order must be a column of numbers, got texts in {self.order!r}")
        return (_increasing(column),)

    @property
    def unit(self) -> str:
        """Returns the text of the privacy unit: all rows of a person."""
        return f"person ({self.person if self.called is None else self.called})"

    @property
    def note(self) -> str:
        """Returns the phrase that states the limits on rows and groups in a guarantee."""
        groups = "".join(f", in {most} of {column}" for column, most in self.groups)
        return f"at most {self.rows} row{'s' * (self.rows > 1)} each{groups}"


@dataclasses.dataclass(frozen=True)
class Cells:
    """Assigns each row to a cell: the combination of its person and its groups.

    Attributes:
        codes: integer codes of each row, for its person and for its groups. Two rows are in the
            same cell if all their codes are equal.
        order: the numbers by which the rows of a cell are sorted. If there are none, rows keep the
            order of the table.
    """

    codes: tuple[jax.Array, ...]
    order: tuple[jax.Array, ...]

    def rank(self, present: jax.Array) -> jax.Array:
        """Returns the position of each present row among the rows of its cell."""
        return _ranks((~present, *self.codes), self.order)

    def totals(self, numbers: jax.Array, kept: jax.Array, rows: int) -> jax.Array:
        """Sums the kept rows of each cell in order. Stores a sum at its first kept row.

        The operations of a sum do not depend on the rows of other cells. So other people do not
        affect the rounding of the sum.
        """
        n = kept.size
        at = jnp.arange(n, dtype=jnp.int32)
        starts, order = _sorted((~kept, *self.codes), self.order)
        start = lax.cummax(jnp.where(starts, at, 0))
        in_order = jnp.where(kept, numbers, 0)[order]

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            place = jnp.minimum(at + j, n - 1)
            ours = (at + j < n) & (start[place] == at)
            return total + jnp.where(ours, in_order[place], jnp.zeros_like(in_order))

        totals = lax.fori_loop(1, min(rows, n), add, in_order)
        return jnp.zeros_like(numbers).at[order].set(totals)


def codes_of(column: jax.Array | Numbers | Texts) -> tuple[jax.Array, jax.Array]:
    """Returns integer codes of the entries, and a mask that is false at missing entries.

    Two codes are equal if and only if their entries are equal.
    """
    if isinstance(column, Texts):
        return codes_of_words(column.words), jnp.any(jnp.asarray(column.words) != 0, axis=-1)
    with jax.enable_x64(True):
        keys, known = integer_keys(column)
        return _codes((keys,)), known


def codes_of_words(words: ArrayLike) -> jax.Array:
    """Returns integer codes of rows of uint32 words, equal if and only if the rows are equal."""
    return _codes(tuple(jnp.asarray(words).T))


def _codes(keys: tuple[jax.Array, ...]) -> jax.Array:
    starts, order = _sorted(keys, ())
    numbers = jnp.cumsum(starts, dtype=jnp.int32)
    return jnp.zeros_like(numbers).at[order].set(numbers)


def _increasing(column: jax.Array | Numbers) -> jax.Array:
    """Returns integer codes that sort like the numbers of a column. Missing numbers sort last."""
    with jax.enable_x64(True):
        numbers, known = exact_numbers(column)
        if jnp.issubdtype(numbers.dtype, jnp.floating):
            numbers = comparable(numbers)
            known &= ~jnp.isnan(numbers)
        numbers = jnp.where(known, numbers, jnp.zeros_like(numbers))
        return _codes((~known, numbers))


def _sorted(
    keys: tuple[jax.Array, ...], order: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Sorts rows by keys, order and index.

    Returns whether each sorted row is the first with its keys, and the indices of the sorted rows.
    """
    n = keys[0].size
    at = jnp.arange(n, dtype=jnp.int32)
    *found, rows = lax.sort((*keys, *order, at), num_keys=len(keys) + len(order) + 1)
    starts = at == 0
    for key in found[: len(keys)]:
        starts |= jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]])
    return starts, rows


def _ranks(keys: tuple[jax.Array, ...], order: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the rank of each row among the rows with equal keys."""
    starts, rows = _sorted(keys, order)
    at = jnp.arange(rows.size, dtype=jnp.int32)
    return jnp.zeros_like(at).at[rows].set(at - lax.cummax(jnp.where(starts, at, 0)))


def _number_of_group(
    ids: jax.Array, codes: jax.Array, present: jax.Array, order: tuple[jax.Array, ...]
) -> jax.Array:
    """Numbers each person's groups from 0, and returns the number of each present row's group.

    A person's groups are in the order of their first present rows.
    """
    starts, rows = _sorted((~present, ids, codes), order)
    at = jnp.arange(rows.size, dtype=jnp.int32)
    opens = jnp.zeros(rows.size, bool).at[rows].set(starts) & present
    number = _ranks((~opens, ids), order)
    opener = lax.cummax(jnp.where(starts, at, 0))
    return jnp.zeros_like(at).at[rows].set(number[rows][opener])


def checked_truncation(
    person: Name, rows: int, groups: Mapping[Any, int] | None, order: Name | None
) -> Truncation:
    """Checks the arguments, and returns the `Truncation`."""
    check_name("person", person)
    rows = _checks.integer("rows", rows, least=1, most=_MOST_ROWS)
    if order is not None:
        check_name("order", order)
    if groups is not None and (not isinstance(groups, Mapping) or not groups):
        raise TypeError(
            "groups must map columns to the number of groups in which a person counts, as "
            f'{{"ward": 3}}, got {_checks.shown(groups)}'
        )
    most = {
        column: _checks.integer(f"groups[{column!r}]", number, least=1, most=_MOST_ROWS)
        for column, number in (groups or {}).items()
    }
    for column in most:
        check_name("groups", column)
        if column == person:
            raise ValueError(f"groups must not name the column of people, got {column!r}")
    return Truncation(person, rows, tuple(most.items()), order)


# Databases in which a record is a person with several rows: each record stores up to k rows, and a
# mask that says which of them exist.


ROWS, THERE = "rows", "there"


def padded_people(
    database: Database, *, person: Name, rows: int, capacity: int, order: Name | None = None
) -> PaddedRecords:
    """A database whose records are people, made from a table with several rows for each person.

    Targets, losses and oracles can use it like any database. A record is a dict: "rows" contains
    the other columns with a leading axis of k rows, and "there" says which of these rows exist.

    Args:
        database: a table, a dict of columns, or an array of shape (n, d).
        person: the column of ids, as for `by_person`. Rows without an id are left out.
        rows: k, a public number. The first k rows of each person are used.
        capacity: the number of slots for people, public. It must be known to be enough for every
            database.
        order: as for `by_person`.

    Returns:
        A `PaddedRecords` of {"rows": ..., "there": booleans of shape (slots, k)}. People are in
        the order of their first rows; a row that does not exist is 0.

    Raises:
        TypeError: if an argument or a column has another type.
        ValueError: if a number is out of range, a column is missing, or there are more people than
            slots. In the last case, the capacity was not enough for every database.

    Formal guarantees:
        The record of a person depends on that person's rows alone, so tables that differ in all
        rows of a person become databases that differ in one record. A guarantee for one record of
        this database is a guarantee per person. To make the guarantee state this unit, set it by
        `dataclasses.replace(sensitivity, privacy_unit="person (id)")`, or by `learning.fit`. The
        running time of this function depends on the database.

    Source:
        docs/proofs/people.md.

    Example:
        >>> import numpy as np
        >>> from dpjax import queries
        >>> visits = {"id": np.array([7, 8, 7, 7]), "cost": np.array([1.0, 2.0, 3.0, 4.0])}
        >>> people = queries.padded_people(visits, person="id", rows=2, capacity=3)
        >>> people.records["rows"].tolist()
        [[1.0, 3.0], [2.0, 0.0], [0.0, 0.0]]
        >>> people.present.tolist()
        [True, True, False]
    """
    truncation = checked_truncation(person, rows, None, order)
    capacity = check_capacity(capacity, 0)
    found = columns("database", database)
    exact, n = exact_records("database", found)
    kept, cells = truncation.kept(exact, jnp.ones(n, bool))
    kept, rank, who = (np.asarray(x) for x in (kept, cells.rank(kept), cells.codes[0]))
    _, first, place = np.unique(who[kept], return_index=True, return_inverse=True)
    check_capacity(capacity, len(first), "people")
    place = np.argsort(np.argsort(first))[place.ravel()]
    rank = rank[kept]

    def spread(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        slots = np.zeros((capacity, truncation.rows, *array.shape[1:]), array.dtype)
        slots[place, rank] = array[kept]
        return slots

    there = spread(np.ones(n, bool))
    others = without(found, person) if len(columns_of(found)) > 1 else {}
    found_rows = jax.tree.map(spread, others)
    return PaddedRecords({ROWS: found_rows, THERE: there}, jnp.asarray(there[:, 0]))
