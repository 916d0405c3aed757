"""The release of a query, which private statistics then turn into what they estimate."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._records import check_padded
from dpjax._core._types import Database, Key, Scalar, Value
from dpjax._core._values import NeighboringRelation, Release
from dpjax.accounting._composition import post_process
from dpjax.mechanisms._gaussian import gaussian
from dpjax.mechanisms._laplace import laplace
from dpjax.queries._padded_records import present_records
from dpjax.queries._query import Query
from dpjax.release._privatize import privatize


def slots_of(database: Database, relation: NeighboringRelation) -> int:
    """The number of slots of a database, which is public: n, unless n is private."""
    if NeighboringRelation(relation) is NeighboringRelation.ADD_OR_REMOVE_ONE:
        check_padded(database)
    return len(present_records(database)[1])


def shape_of_record(database: Database, *wanted: Literal["(n,)", "(n, d)"]) -> tuple[int, ...]:
    """The shape of a record; refuses a database that is not one array of a wanted shape."""
    records, _ = present_records(database)
    shapes = {1: "(n,)", 2: "(n, d)"}
    if not isinstance(records, jax.Array) or shapes.get(records.ndim) not in wanted:
        raise ValueError(
            f"database must be one array of shape {' or '.join(wanted)}, got"
            f" {_checks.described(records)}"
        )
    return records.shape[1:]


class Terms(NamedTuple):
    """The arguments of a private statistic that its release needs."""

    epsilon: float
    delta: float | None
    relation: NeighboringRelation
    name: str | None


def released(
    key: Key,
    database: Database,
    make_query: Callable[[int], Query],
    finish: Callable[[Query, jax.Array, jax.Array | None, Scalar], Value],
    *,
    terms: Terms,
    what: str,
    kind: str,
    facts: dict[str, object],
) -> Release:
    """A statistic computed from one noisy query, called `what` in the history of ledgers.

    `make_query` takes the number of slots. `finish` takes the query, its noisy value, n (None if it
    is private) and the scale of the noise. Kind and public facts say how its intervals are made.
    """
    epsilon, delta, relation, name = terms
    relation = NeighboringRelation(relation)
    query = make_query(slots_of(database, relation))
    if delta is None:
        mechanism = laplace(query.sensitivity("l1", relation=relation), epsilon)
    else:
        mechanism = gaussian(query.sensitivity("l2", relation=relation), epsilon, delta)
    n = None
    if relation is NeighboringRelation.REPLACE_ONE:
        n = jnp.sum(present_records(database)[1], dtype=jnp.int32).astype(float)

    def target(records: Database) -> jax.Array:
        return query(records)

    target.__name__ = what
    release = privatize(target, mechanism)(key, database, name=name)
    finished = post_process(release, lambda value: finish(query, value, n, mechanism.scale))
    if release.accuracy.kind != "noise":
        return finished
    about = {**release.accuracy.facts, **facts, "unit": query.unit, "rounding": query.rounding}
    accuracy = Accuracy.of(kind, about, {"sums": release.value, "n": n})
    return dataclasses.replace(finished, accuracy=accuracy)
