"""Releases one noisy query, from which a private statistic is computed as post-processing."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._columns import check_numbers
from dpjax._core._records import Parts, check_padded
from dpjax._core._types import Database, Key, Scalar, Value
from dpjax._core._values import NeighboringRelation, Release
from dpjax._tracing._programs import Unchanging
from dpjax.accounting._composition import post_process
from dpjax.mechanisms._additive import AdditiveMechanism, gaussian, laplace
from dpjax.queries._groups import By, each_group, inside_groups
from dpjax.queries._missing import may_miss, of_complete
from dpjax.queries._padded_records import number_of_records, records_and_slots
from dpjax.queries._people import RowsOfPeople, groups_alone, integers_by
from dpjax.queries._query import IntegerQuery
from dpjax.release._privatize import privatize


def slots_of(database: Database, relation: NeighboringRelation) -> int:
    """Returns the public number of slots: the number of records n, unless n is private."""
    is_private = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if is_private and not isinstance(database, Parts):
        check_padded(database)
    return records_and_slots(database)[1]


def shape_of_record(
    database: Database, *wanted: Literal["(n,)", "(n, d)"], by: By | RowsOfPeople | None = None
) -> tuple[int, ...]:
    """Returns the shape of a record. Refuses a database that is not one array of a wanted shape.

    With `by`, the database also contains the columns that define groups.
    """
    records = inside_groups(records_and_slots(database)[0], groups_alone(by))
    shapes = {"(n,)": (None,), "(n, d)": (None, None)}
    name = "database, apart from the columns of groups," if by else "database"
    check_numbers(name, records, *(shapes[x] for x in wanted))
    return records.shape[1:]


class Terms(NamedTuple):
    """The arguments that a user passes to a private statistic and that its release needs."""

    epsilon: float
    delta: float | None
    relation: NeighboringRelation
    name: str | None
    by: By | RowsOfPeople | None = None
    drops: bool = False  # Whether records with missing numbers are dropped.


def _private(
    query: IntegerQuery,
    what: str,
    epsilon: float,
    delta: float | None,
    relation: NeighboringRelation,
) -> tuple[AdditiveMechanism, Callable[..., Release]]:
    """Returns the mechanism for a query, and the private function made from both."""
    if delta is None:
        mechanism = laplace(query.sensitivity("l1", relation=relation), epsilon)
    else:
        mechanism = gaussian(query.sensitivity("l2", relation=relation), epsilon, delta)
    return mechanism, privatize(Unchanging(what, query), mechanism)


# This function is cached so that equal queries are prepared only once. It does not depend on a
# database.
_kept_private = functools.lru_cache(maxsize=64, typed=True)(_private)


def released(
    key: Key,
    database: Database,
    make_query: Callable[[int], IntegerQuery],
    finish: Callable[[IntegerQuery, jax.Array, jax.Array | None, Scalar], Value],
    *,
    terms: Terms,
    what: str,
    kind: str,
    facts: dict[str, object],
) -> Release:
    """Releases a statistic that is computed from one noisy query. Ledgers list it as `what`.

    `make_query` maps the number of slots to the query. `finish` maps the query, its noisy value,
    the number of records n (None if it is private) and the noise scale to the statistic. With
    groups, `finish` is called for each group. `kind` and the public facts determine how intervals
    are computed.
    """
    relation, by = terms.relation, groups_alone(terms.by)
    query = make_query(slots_of(database, relation))
    asked = query
    if drops := terms.drops and may_miss(inside_groups(records_and_slots(database)[0], by)):
        asked = of_complete(asked)
    asked = integers_by(asked, terms.by)
    known = isinstance(terms.epsilon, (int, float)) and isinstance(terms.delta, float | None)
    private = _kept_private if known and not _checks.is_staging() else _private
    mechanism, ask = private(asked, what, terms.epsilon, terms.delta, relation)
    n = None
    # A replaced record may change its group or have a missing number, so the sizes of groups are
    # private.
    if relation is NeighboringRelation.REPLACE_ONE and not by and not drops:
        n = number_of_records(database)

    release = ask(key, database, name=terms.name)
    statistic = each_group(lambda value: finish(query, value, n, mechanism.scale), by)
    finished = post_process(release, statistic)
    if release.accuracy.kind != "noise":
        return finished
    about = {**release.accuracy.facts, **facts, "unit": query.unit, "rounding": query.rounding}
    accuracy = Accuracy.of(kind, about, {"sums": release.value, "n": n})
    return dataclasses.replace(finished, accuracy=accuracy)
