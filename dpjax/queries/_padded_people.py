"""People with several rows as records: each record has up to k rows, and a mask of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._frames import columns
from dpjax._core._records import PaddedRecords, exact_records
from dpjax._core._types import Database
from dpjax.queries._groups import _columns as columns_of
from dpjax.queries._truncation import Name, checked_truncation

ROWS, THERE = "rows", "there"


def padded_people(
    database: Database, *, person: Name, rows: int, capacity: int, order: Name | None = None
) -> PaddedRecords:
    """A database whose records are people, made from a table with several rows for each.

    Targets, losses and oracles can use it like any database. A record is a dict: "rows" holds the
    other columns with a leading axis of k rows, and "there" says which of these rows exist.

    Args:
        database: a table, a dict of columns, or an array of shape (n, d).
        person: the column of ids, as for `by_person`. Rows without an id are left out.
        rows: k, how many rows of a person are used: the first ones. Public.
        capacity: the number of slots for people, public. It must be known to be enough for every
            database.
        order: as for `by_person`.

    Returns:
        A `PaddedRecords` of {"rows": ..., "there": booleans of shape (slots, k)}. People stand in
        the order of their first rows; a row that is not there is 0.

    Raises:
        TypeError: if an argument or a column has another type.
        ValueError: if a number is out of range, a column is missing, or there are more people than
            slots, which were then not known to be enough.

    Formal guarantees:
        The record of a person depends on that person's rows alone, so tables that differ in all
        rows of a person become databases that differ in one record. A guarantee for one record of
        this database is a guarantee per person. It says so if you set the unit: by
        `dataclasses.replace(sensitivity, privacy_unit="person (id)")`, or by `learning.fit`. The
        time that this function takes depends on the database.

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
    capacity = _checks.integer("capacity", capacity, least=1)
    found = columns("database", database)
    exact, n = exact_records("database", found)
    kept, cells = truncation.kept(exact, jnp.ones(n, bool))
    kept, rank, who = (np.asarray(x) for x in (kept, cells.rank(kept), cells.codes[0]))
    _, first, place = np.unique(who[kept], return_index=True, return_inverse=True)
    if len(first) > capacity:
        raise ValueError(
            f"capacity must be enough for every database, got {capacity} for {len(first)} people"
        )
    place = np.argsort(np.argsort(first))[place.ravel()]
    rank = rank[kept]

    def spread(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        slots = np.zeros((capacity, truncation.rows, *array.shape[1:]), array.dtype)
        slots[place, rank] = array[kept]
        return slots

    there = spread(np.ones(n, bool))
    return PaddedRecords(
        {ROWS: jax.tree.map(spread, _others(found, person)), THERE: there},
        jnp.asarray(there[:, 0]),
    )


def _others(found: Database, person: Name) -> Database:
    """All columns except that of people. A single other column becomes an array."""
    rest = {name: x for name, x in columns_of(found).items() if name != person}
    if isinstance(found, np.ndarray) and len(rest) > 1:
        return np.stack([*rest.values()], axis=-1)
    return next(iter(rest.values())) if len(rest) == 1 else rest
