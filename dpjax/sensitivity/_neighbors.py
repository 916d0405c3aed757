"""Neighboring databases under replace-one: alike except for one record."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import Database
from dpjax._tracing._fingerprints import digest


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
        n = leaf.shape[0] - 1
        changed = jnp.asarray(n - 1 if position is None else position, jnp.int32)
        # A selection, because accelerators take a scatter apart from the steps around it.
        here = jnp.arange(n, dtype=jnp.int32) == changed
        return jnp.where(jnp.expand_dims(here, tuple(range(1, leaf.ndim))), leaf[-1], leaf[:-1])

    return database, jax.tree.map(replaced, records)


def random_rotations(words: np.ndarray, n: int, count: int) -> np.ndarray:
    """By how many places to move the records of each of some databases: never by none.

    They are drawn uniformly by the host, from the words of the key. A program that draws them takes
    twice as long to compile.
    """
    seed = int(digest("rotations", words), 16)
    drawn = np.random.Philox(key=seed).random_raw(count)
    return (1 + drawn % (max(n, 2) - 1)).astype(np.int32)


def rotated(database: Database, steps: jax.Array) -> Database:
    """The same database with its records moved along by some steps, the last ones to the front."""
    return jax.tree.map(lambda leaf: jnp.roll(leaf, steps, axis=0), database)


def rotated_pair(records: Database, steps: jax.Array) -> Database:
    """The rotated first n of n + 1 records, and the same with the last one replaced by the spare.

    They are stacked along a new axis. One gather makes both: on CPU, stacking takes as long as to
    draw the records.
    """

    def both(leaf: jax.Array) -> jax.Array:
        n = leaf.shape[0] - 1
        places = jnp.arange(n, dtype=jnp.int32)
        order = (places - steps) % n
        orders = jnp.stack([order, jnp.where(places == n - 1, n, order)])
        return jnp.take(leaf, orders, axis=0, mode="clip")

    return jax.tree.map(both, records)
