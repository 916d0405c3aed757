"""Databases whose number of records is private: a public number of slots, and who is there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax._records import PaddedRecords as PaddedRecords
from dpjax._records import columns_of_a_table, record_arrays


def padded_records(database: Any, *, capacity: int) -> PaddedRecords:
    """A database in a public number of slots, of which the first n hold its records.

    Args:
        database: a pytree of arrays with leading axis n, or a table; n may be 0.
        capacity: the number of slots: public, and known to be enough whatever n is.

    Returns:
        A `PaddedRecords`, which queries take for a database.

    Raises:
        TypeError: if the database does not hold real numbers.
        ValueError: if its arrays have no common leading axis, or n exceeds the capacity: then that
            it is enough was not known.

    Formal guarantees:
        Under add-or-remove-one the number of records is private, and a plain array shows it by its
        shape to whoever sees shapes, memory or time, and, as an empty one is refused, by a refusal.
        This does not, for databases of at most `capacity` records.

    Source:
        The two lines above.

    Example:
        >>> import numpy as np
        >>> from dpjax import queries
        >>> queries.padded_records(np.array([3.0, 1.0]), capacity=4).present.tolist()
        [True, True, False, False]
    """
    capacity = _checks.integer("capacity", capacity, least=1)
    columns = jax.tree.map(columns_of_a_table, database)
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(columns)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "database must be arrays with a common leading axis of n records, got"
            f" {_checks.described(columns)}"
        )
    ((n,),) = sizes
    if n > capacity:
        raise ValueError(f"capacity must be enough for every database, got {capacity} for {n}")

    def padded(leaf: Any) -> Any:
        _checks.refuse_foreign_dtype("database", leaf)
        array = np.asarray(leaf)
        return np.concatenate([array, np.zeros((capacity - n, *array.shape[1:]), array.dtype)])

    records, _ = record_arrays("database", jax.tree.map(padded, columns))
    return PaddedRecords(records, jnp.arange(capacity) < n)


def present_records(database: Any) -> tuple[Any, jax.Array]:
    """The arrays of a database, padded or not, and which of its slots hold a record."""
    records, n = record_arrays("database", database)
    if isinstance(records, PaddedRecords):
        return records.records, records.present.astype(bool)
    return records, jnp.ones(n, bool)
