"""Records with missing numbers: left out, or counted with a public number instead.

Whether a column may contain missing numbers is decided by its dtype alone, never by its values,
which are private.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Database
from dpjax.queries._groups import reach_by_group
from dpjax.queries._query import IntegerQuery
from dpjax.queries._totals import Addend


def drops_missing(missing: str, other: str) -> bool:
    """Whether `missing` is "drop".

    `other` is the other allowed value, which counts incomplete records.
    """
    _checks.choice("missing", missing, ("drop", other))
    return missing == "drop"


def may_miss(records: Database) -> bool:
    """Whether the dtypes of some numbers allow missing numbers."""
    leaves = jax.tree.leaves(records, is_leaf=lambda x: hasattr(x, "dtype"))
    return any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def complete(records: Database) -> jax.Array:
    """Which records have no missing number."""
    missing = [
        jnp.any(jnp.isnan(x).reshape(len(x), -1), axis=1)
        for x in jax.tree.leaves(records)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return ~functools.reduce(jnp.logical_or, missing, jnp.zeros((), bool))


@functools.lru_cache(maxsize=64)  # Cached, so that equal queries are traced only once.
def of_complete(query: IntegerQuery) -> IntegerQuery:
    """A query of the records without missing numbers. Other records count as absent.

    Complete records form one group. A replaced record may enter or leave this group.
    """

    def addends(records: Database, present: jax.Array) -> Sequence[Addend]:
        return query.addends(records, present & complete(records))

    reach = reach_by_group(query.reach, 1)
    moves = query.moves and reach_by_group(query.moves, 1)
    return dataclasses.replace(query, addends=addends, reach=reach, moves=moves)
