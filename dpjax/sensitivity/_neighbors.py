"""Neighboring databases under replace-one: alike except for one record."""

import jax
import jax.numpy as jnp

from dpjax._core._types import Database


def neighboring_pair(
    records: Database, position: jax.Array | int | None = None
) -> tuple[Database, Database]:
    """Splits n + 1 records into two databases of n that differ in one position.

    Algorithm 1 of Rubinstein and Aldà (2017): D = (x_1, ..., x_n), and D' is D with the record at
    `position` replaced by x_(n+1).

    Args:
        records: a pytree of arrays with leading axis n + 1, from one call of the oracle.
        position: index of the replaced record, from 0; None for the last, as in the paper.

    Returns:
        D and D', pytrees with leading axis n.
    """
    database = jax.tree.map(lambda leaf: leaf[:-1], records)

    def replaced(leaf: jax.Array) -> jax.Array:
        index = leaf.shape[0] - 2 if position is None else position
        return leaf[:-1].at[index].set(leaf[-1])

    return database, jax.tree.map(replaced, records)


def rotated(database: Database, steps: jax.Array) -> Database:
    """The same database with its records moved along by some steps, the last ones to the front."""
    return jax.tree.map(lambda leaf: jnp.roll(leaf, steps, axis=0), database)
