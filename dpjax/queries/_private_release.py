"""What private statistics share: a query, its mechanism, and a public or private n."""

from typing import Any

import jax
import jax.numpy as jnp

from dpjax._records import check_padded
from dpjax.base import NeighboringRelation, Release
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.mechanisms._gaussian import gaussian
from dpjax.mechanisms._laplace import laplace
from dpjax.mechanisms._privatize import privatize
from dpjax.queries._padded_records import present_records
from dpjax.queries._query import Query


def slots_of(database: Any, relation: NeighboringRelation) -> int:
    """The public number of slots of a database: its records, where their number is public."""
    if NeighboringRelation(relation) is NeighboringRelation.ADD_OR_REMOVE_ONE:
        check_padded(database)
    return len(present_records(database)[1])


def public_count(database: Any, relation: NeighboringRelation) -> jax.Array | None:
    """n, where the neighboring relation makes it public."""
    if NeighboringRelation(relation) is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return None
    _, present = present_records(database)
    return jnp.sum(present, dtype=jnp.int32).astype(float)


def mechanism_for(
    query: Query, *, epsilon: float, delta: float | None, relation: NeighboringRelation
) -> AdditiveMechanism:
    """Laplace noise, or Gaussian noise where there is a delta."""
    if delta is None:
        return laplace(query.sensitivity("l1", relation=relation), epsilon)
    return gaussian(query.sensitivity("l2", relation=relation), epsilon, delta)


def released(
    key: jax.Array,
    database: Any,
    query: Query,
    mechanism: AdditiveMechanism,
    *,
    what: str,
    name: str | None,
) -> Release:
    """A release of a query, under another name in the history of ledgers."""

    def target(records: Any) -> jax.Array:
        return query(records)

    target.__name__ = what
    return privatize(target, mechanism)(key, database, name=name)
