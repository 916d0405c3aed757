"""Oracles whose records are independent draws."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax.base import Oracle


@dataclasses.dataclass(frozen=True, eq=False)
class IndependentRecords:
    """An oracle that can draw some of its records without the others.

    Attributes:
        record: takes a key to one record.
    """

    record: Callable[[jax.Array], Any]

    def __call__(self, key: jax.Array, n: int) -> Any:
        """The first n records."""
        return self.at(key, jnp.arange(n, dtype=jnp.uint32))

    def at(self, key: jax.Array, numbers: jax.Array) -> Any:
        """The records of these numbers, the same ones that any database of the key has there."""
        return jax.vmap(lambda number: self.record(jax.random.fold_in(key, number)))(numbers)


def independent(record: Callable[[jax.Array], Any]) -> Oracle:
    """An oracle that says that its records are independent: each is drawn with a key of its own.

    Record i of a database is `record(fold_in(key, i))`, whatever their number. So the sampler can
    draw two records without the others, and does where no more is needed: for
    `dpjax.targets.summable` targets whose `finish` is affine, a pair costs two records instead of
    n + 1. For other targets an oracle that draws all records in one call is faster, for it makes
    do with one key.

    Args:
        record: `record(key)` draws one record from public knowledge, a pytree of arrays.

    Returns:
        An `Oracle`: `oracle(key, n)` draws a database of n independent records.

    Raises:
        TypeError: if record is not a function.

    Formal guarantees:
        Records are independent and identically distributed, as far as keys are: what exchangeable
        records, groups and `dpjax.accounting.transfer` ask for. Two records drawn without the
        others are those that the whole database would have, and the sampler compares the distances
        from both on random databases.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, for P a product of one distribution.

    Example:
        >>> import jax
        >>> import dpjax
        >>> oracle = dpjax.oracles.independent(lambda key: jax.random.exponential(key))
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5,)
    """
    _checks.function("record", record)
    return IndependentRecords(record)
