"""The records of a database: which slots hold one, and which records miss a number.

A private number of records is stored in a public number of slots.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._frames import columns
from dpjax._core._records import PaddedRecords as PaddedRecords
from dpjax._core._records import Parts, exact_records
from dpjax._core._types import Database


def padded_records(database: Database, *, capacity: int) -> PaddedRecords:
    """A database in a public number of slots. Its n records are in the first slots.

    Args:
        database: a pytree of arrays with leading axis n, or a table; n may be 0.
        capacity: the number of slots, public. It must be known to be enough for every database.

    Returns:
        A `PaddedRecords`, which queries accept as a database.

    Raises:
        TypeError: if the database does not contain real numbers.
        ValueError: if its arrays have no common leading axis, or n exceeds the capacity. You must
            choose a capacity that is enough for every possible database.

    Formal guarantees:
        Under add-or-remove-one the number of records is private. A plain array reveals it by its
        shape, by memory and by running time; an empty array reveals it by an error. `PaddedRecords`
        do not reveal the number, for databases of at most `capacity` records. But the running time
        of this function depends on the number of records and on their texts.

    Source:
        The argument above.

    Example:
        >>> import numpy as np
        >>> from dpjax import queries
        >>> queries.padded_records(np.array([3.0, 1.0]), capacity=4).present.tolist()
        [True, True, False, False]
    """
    found = columns("database", database)
    n = _checks.count_records("database", found)
    capacity = check_capacity(capacity, n)

    def padded(leaf: ArrayLike) -> np.ndarray:
        _checks.refuse_foreign_dtype("database", leaf)
        array = np.asarray(leaf)
        return np.concatenate([array, np.zeros((capacity - n, *array.shape[1:]), array.dtype)])

    records = jax.tree.map(padded, found)
    exact_records("database", records)
    return PaddedRecords(records, jnp.arange(capacity) < n)


def check_capacity(capacity: int, n: int, what: str = "records") -> int:
    """Returns `capacity`, the number of slots, and refuses it if n records do not fit."""
    capacity = _checks.integer("capacity", capacity, least=1)
    if n > capacity:
        raise ValueError(
            f"capacity must be enough for every database, got capacity={capacity} for {n} {what}"
        )
    return capacity


def records_and_slots(database: Database) -> tuple[Database, int]:
    """Returns the arrays of a database, padded or not, and the number of their slots.

    For records in batches, the arrays are those of one batch, which show the structure.
    """
    if isinstance(database, Parts):
        return records_and_slots(database.like)[0], database.slots
    records, n = exact_records("database", database)
    return (records.records if isinstance(records, PaddedRecords) else records), n


def number_of_records(database: Database) -> jax.Array:
    """Returns the number of records of a database. For unpadded arrays, it is a static shape."""
    records, n = exact_records("database", database)
    if isinstance(records, PaddedRecords):
        return jnp.sum(records.present, dtype=jnp.int32).astype(float)
    return jnp.asarray(n, float)


def present_records(database: Database) -> tuple[Database, jax.Array]:
    """Returns the arrays of a database, padded or not, and whether each slot contains a record."""
    records, n = exact_records("database", database)
    if isinstance(records, PaddedRecords):
        return records.records, records.present
    return records, jnp.ones(n, bool)


# Records with missing numbers are dropped, or a public number replaces the missing ones. Whether a
# column may contain missing numbers is decided by its dtype alone, never by its values, which are
# private.


def drops_missing(missing: str, other: str) -> bool:
    """Whether `missing` is "drop".

    The other allowed value of the argument is `other`. With it, incomplete records are counted.
    """
    _checks.choice("missing", missing, ("drop", other))
    return missing == "drop"


def may_miss(records: Database) -> bool:
    """Whether some numbers in `records` have a dtype that can represent missing numbers."""
    leaves = jax.tree.leaves(records, is_leaf=lambda x: hasattr(x, "dtype"))
    return any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def complete(records: Database) -> jax.Array:
    """Returns a boolean for each record: whether none of its numbers is missing."""
    missing = [
        jnp.any(jnp.isnan(x).reshape(len(x), -1), axis=1)
        for x in jax.tree.leaves(records)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return ~functools.reduce(jnp.logical_or, missing, jnp.zeros((), bool))
