"""Queries for every group at once."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, KnowsAccuracy
from dpjax._core._columns import columns
from dpjax._core._types import Database, Value
from dpjax._core._values import Inside, Mechanism, NeighboringRelation
from dpjax.mechanisms._several_selections import SeveralSelections, sum_of_group_maxima
from dpjax.queries._groups import Column, Groups, groups
from dpjax.queries._integer_query import IntegerQuery, Reach
from dpjax.queries._padded_records import PaddedRecords, padded_records, present_records
from dpjax.queries._quantiles import QuantileScores, accuracy_of_quantiles
from dpjax.queries._query import Query
from dpjax.targets._bounds import VectorNorm, norm_up
from dpjax.targets._known_sensitivity import KnownSensitivity

_BY_GROUP: Any = sum_of_group_maxima  # A norm beside those of vectors.


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedQuery(Query):
    """A query for every group at once, made by `by`; its norm may be `sum_of_group_maxima`.

    Attributes:
        keys: of the groups, in order; the first axis of the value.

    Formal guarantees:
        The guarantees of `by`.
    """

    keys: tuple[int, ...] | tuple[str, ...]

    norms = (*Query.norms, _BY_GROUP)


class GroupedIntegers(IntegerQuery):
    """The integers of a query for every group at once."""

    def of_present(self, records: Database, present: jax.Array) -> jax.Array:
        """The integers of all groups, whose keys are compared before they become floats."""
        return self.total(records, present)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GroupedScores(KnownSensitivity, KnowsAccuracy):
    """Scores of quantiles for every group at once; made by `by`.

    Attributes:
        scores: of one group.
        groups: the groups.

    Formal guarantees:
        The guarantees of `by`.
    """

    scores: QuantileScores
    groups: Groups

    norms = (_BY_GROUP,)
    relations = tuple(NeighboringRelation)
    reads = "numbers"

    @property
    def keys(self) -> tuple[int, ...] | tuple[str, ...]:
        """The keys of the groups, in order."""
        return self.groups.keys

    def __call__(self, database: Database) -> jax.Array:
        """Scores of shape (groups, quantiles, candidates)."""
        inside, members = self.groups.split(*present_records(database))
        return jax.vmap(lambda here: self.scores.of_present(inside, here))(members)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
            return self.scores._bound(norm, relation, n, dtype)  # pyright: ignore

        return _reach_by_group(reach, norm, relation)

    def _accuracy_of(
        self, noise: Accuracy, relation: NeighboringRelation, value: Value, database: Database
    ) -> Accuracy:
        del relation, database  # The sizes of groups are private.
        return accuracy_of_quantiles(self.scores, noise, value, None)

    def _inside(self, mechanism: Mechanism) -> Inside:
        return dataclasses.replace(self.scores._inside(mechanism), target=self)

    def error(self, mechanism: SeveralSelections, *, confidence: float = 0.95) -> float:
        """A bound on how many ranks the released numbers are worse than the best, in all groups.

        Args:
            mechanism: made by `select_each`.
            confidence: the probability that the bound holds for all groups at once, in (0, 1).

        Returns:
            A number of ranks, as `QuantileScores.error`.

        Raises:
            TypeError: if the confidence is not a number.
            ValueError: if the confidence is out of range.
        """
        confidence = _checks.fraction("confidence", confidence)
        shape = (len(self.keys), len(self.scores.numerators), self.scores.grid.size)
        like = jax.ShapeDtypeStruct(shape, jnp.result_type(int))
        gap = mechanism.score_gap(confidence=confidence, like=like, simultaneous=True)
        return float(gap) / self.scores.denominator


@overload
def by(
    query: Query,
    *,
    column: Column,
    keys: Sequence[int] | Sequence[str],
    of: str | int | None = None,
) -> GroupedQuery: ...


@overload
def by(
    query: QuantileScores,
    *,
    column: Column,
    keys: Sequence[int] | Sequence[str],
    of: str | int | None = None,
) -> GroupedScores: ...


def by(
    query: Query | QuantileScores,
    *,
    column: Column,
    keys: Sequence[int] | Sequence[str],
    of: str | int | None = None,
) -> GroupedQuery | GroupedScores:
    """A query for every group at once: a leading axis of groups, one for each public key.

    Args:
        query: any `Query`, or the scores of quantiles; also a query that is by group already.
        column: holds the key of each record: the name of a column of a table, the index of a column
            of an array of shape (n, d) or of a tuple, or a function of one record. Texts of a table
            compare with texts, and in a column of objects a whole number counts as its digits.
            Integers compare exactly, and floats that are whole with them. A function must give an
            integer, a boolean or a text; `counting_query` says how it runs.
        keys: of the groups, public: integers of 64 bits or texts, distinct. A record with another
            key, or none, is in no group.
        of: the name or index of the column that the query sees; None for all columns but that of
            the groups, and one that is left alone as it is. With a function it sees all of them.

    Returns:
        A `GroupedQuery`, which `dpjax.privatize` releases. For scores of quantiles a
        `GroupedScores`, for `select_each` with the count of one group. For a `TopK` ask a grouped
        histogram for its sensitivity in the norm `sum_of_group_maxima`.

    Raises:
        TypeError: if an argument has another type, such as keys that are floats; on a database, if
            the column holds texts and the keys are numbers, or the other way around.
        ValueError: if keys repeat or are out of range; on a database, if a column is missing, or
            its dtype is of floats that do not tell a key from other integers.

    Formal guarantees:
        The groups are disjoint, whatever records contain. Under add-or-remove-one a record moves
        one group, so the reach is the query's own in every norm. Under replace-one it may change
        within a group, or leave one and enter another. Let A and R be the query's reach under
        add-or-remove-one and replace-one: the reach is max(R, 2 A) in the norm l1, max(R, sqrt(2)
        A) in l2, and max(R, A) in linf. docs/proofs/groups.md has the proof. `error` holds for all
        groups at once. The size of a group is private under both relations, so never divide by it.

    Source:
        McSherry (2009), Theorem 4, for parallel composition.

    Example:
        >>> import numpy as np
        >>> from dpjax import queries
        >>> diamonds = {"cut": np.array(["Fair", "Ideal", "Ideal"]), "price": np.array([4, 2, 3])}
        >>> total = queries.sum_query(lower=0, upper=10, capacity=100)
        >>> prices = queries.by(total, column="cut", keys=["Ideal", "Good", "Fair"])
        >>> prices(diamonds).tolist()
        [5.0, 0.0, 4.0]
    """
    which = groups(column, keys, of)
    if isinstance(query, QuantileScores):
        return GroupedScores(scores=query, groups=which)
    if not isinstance(query, Query):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "query must be a Query, such as a count, a sum or a histogram, or scores of quantiles,"
            f" got {_checks.shown(query)}; release anything else for one group after the other,"
            " inside `with ledger.parallel()`"
        )
    return GroupedQuery(integers_by_group(query._integers, which), which.keys)


def integers_by_group(query: IntegerQuery, which: Groups) -> GroupedIntegers:
    """The integers of a query in every group at once."""

    def total(records: Database, present: jax.Array) -> jax.Array:
        inside, members = which.split(records, present)
        return jax.vmap(lambda here: query.of_present(inside, here))(members)

    def by_group(reach: Reach) -> Reach:
        return lambda norm, relation: _reach_by_group(reach, norm, relation)

    of_groups = {
        "total": total,
        "shape": (len(which.keys), *query.shape),
        "reach": by_group(query.reach),
        "moves": query.moves and by_group(query.moves),
    }
    return GroupedIntegers(**vars(query) | of_groups)


def split_by(
    database: Database,
    *,
    column: Column,
    keys: Sequence[int] | Sequence[str],
    of: str | int | None = None,
    capacity: int | None = None,
) -> dict[int | str, PaddedRecords]:
    """The records of each group in all slots of the database, for what `by` cannot do at once.

    Args:
        database: a `PaddedRecords`; or a pytree of arrays or a table, with a capacity.
        column: as for `by`.
        keys: as for `by`.
        of: as for `by`.
        capacity: the number of slots, public, as for `padded_records`; None if the database has its
            slots already.

    Returns:
        A dict from each key to a `PaddedRecords`, whose shape shows neither the size of the group
        nor that of the database.

    Raises:
        TypeError: as `by` does.
        ValueError: as `by` does; or if arrays come without a capacity, or `PaddedRecords` with one.

    Formal guarantees:
        The parts are disjoint, by the proof of `by`. So releases about them, under
        add-or-remove-one, cost their maximum: `ledger.parallel`. As many slots as a table has
        records would show that number, by the grid and the noise of a sum already.

    Source:
        The argument above.

    Example:
        >>> import numpy as np
        >>> from dpjax import queries
        >>> table = {"sex": np.array([0, 1, 1]), "age": np.array([40, 50, 60])}
        >>> found = queries.split_by(table, column="sex", keys=[0, 1], capacity=4)
        >>> {key: part.present.tolist() for key, part in found.items()}
        {0: [True, False, False, False], 1: [False, True, True, False]}
    """
    if isinstance(database, PaddedRecords) != (capacity is None):
        raise ValueError(
            "capacity must be a public number of slots, where the database is a table or arrays,"
            f" whose shape shows the number of records; only there, got {capacity} and"
            f" {type(database).__name__}"
        )
    if capacity is not None:
        database = padded_records(database, capacity=capacity)
    which = groups(column, keys, of)
    _, members = which.split(*present_records(database))
    inside = which.inside(columns("database", database.records))  # Not yet as the device has them.
    return {key: PaddedRecords(inside, here) for key, here in zip(which.keys, members, strict=True)}


def _reach_by_group(
    reach: Reach,
    norm: VectorNorm,
    relation: NeighboringRelation,
) -> float:
    """How far a record moves the values of all groups, from how far it moves that of one."""
    # A norm of the norms of groups. docs/proofs/groups.md has the proof.
    across, within = ("l1", "linf") if norm is _BY_GROUP else (norm, norm)
    added = reach(within, NeighboringRelation.ADD_OR_REMOVE_ONE)
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return added
    return max(reach(within, relation), norm_up([Fraction(added)] * 2, across))
