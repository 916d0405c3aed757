"""Handles records with missing numbers: drops them, or replaces missing numbers by a public one.

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


@functools.lru_cache(maxsize=64)  # Cached, so that equal queries are traced only once.
def of_complete(query: IntegerQuery) -> IntegerQuery:
    """Returns `query` restricted to records without missing numbers. Other records count as absent.

    The complete records are treated as a group. A record that is replaced may enter or leave this
    group. So the sensitivity is that of the query for a single group.
    """

    def addends(records: Database, present: jax.Array) -> Sequence[Addend]:
        return query.addends(records, present & complete(records))

    reach = reach_by_group(query.reach, 1)
    moves = query.moves and reach_by_group(query.moves, 1)
    return dataclasses.replace(query, addends=addends, reach=reach, moves=moves)
