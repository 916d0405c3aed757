"""Queries about people who have several rows, and how much one person changes them.

docs/proofs/people.md has the proofs.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NotRequired, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, KnowsAccuracy
from dpjax._core._columns import Numbers
from dpjax._core._guarantee import RECORD
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database, Value
from dpjax._core._values import Inside, Mechanism, NeighboringRelation
from dpjax._exact._numerics import round_up
from dpjax.queries._groups import (
    By,
    GroupedQuery,
    GroupedScores,
    check_name,
    exact_numbers,
    groups_of,
    integers_by_group,
    picked,
    without,
)
from dpjax.queries._padded_records import present_records
from dpjax.queries._quantiles import QuantileScores
from dpjax.queries._query import IntegerQuery, Query, Reach
from dpjax.queries._totals import Addend
from dpjax.queries._truncation import Cells, Name, Truncation, checked_truncation
from dpjax.targets._clamping import comparable
from dpjax.targets._known_sensitivity import KnownSensitivity, VectorNorm, sqrt_up

PerPerson = Literal["sum"]


@dataclasses.dataclass(frozen=True)
class View:
    """Selects the rows and columns of a table of people that a query receives.

    Attributes:
        truncation: which rows count.
        of: the column that the query receives; None for all columns except the ids of people.
        names_columns: whether the query looks for columns by their names.
        per_person: "sum" if the query receives one row for each person and cell, with the sum of
            the person's rows.
    """

    truncation: Truncation
    of: Name | None
    names_columns: bool
    per_person: PerPerson | None

    def __call__(self, records: Database, present: jax.Array) -> tuple[Database, jax.Array]:
        kept, cells = self.truncation.kept(records, present)
        if self.per_person is None:
            return self.seen(records), kept
        return self._summed(records, kept, cells), kept & (cells.rank(kept) == 0)

    def seen(self, records: Database) -> Database:
        """Returns the column `of` if it is given, or else all columns except the ids of people."""
        person = self.truncation.person
        if self.of is not None:
            return picked(records, self.of)
        if self.names_columns and isinstance(records, Mapping):
            return {name: x for name, x in records.items() if name != person}
        return without(records, person)

    def _summed(self, records: Database, kept: jax.Array, cells: Cells) -> Database:
        """Returns the group columns, and a column in which sums per person replace the numbers."""
        names = [column for column, _ in self.truncation.groups]
        of = self.of
        if of is None:
            numbers = functools.reduce(without, [self.truncation.person, *names], records)
        else:
            numbers = picked(records, of)
        if not isinstance(numbers, (jax.Array, Numbers)) or numbers.shape != kept.shape:
            raise ValueError(
                'per_person="sum" adds up one column of numbers, got'
                f" {_checks.described(numbers)}: pass of= with the name of one column"
            )
        total = exact_totals(numbers, kept, cells, self.truncation.rows)
        if not names:
            return total
        return {**{name: picked(records, name) for name in names}, of or "sum": total}


def exact_totals(numbers: jax.Array | Numbers, kept: jax.Array, cells: Cells, rows: int) -> Numbers:
    """Sums the numbers of each person and cell in 64 bits. Missing numbers do not contribute."""
    with jax.enable_x64(True):
        held, known = exact_numbers(numbers)
        if jnp.issubdtype(held.dtype, jnp.floating):
            known &= ~jnp.isnan(held)
            # Infinite numbers are clipped before the sum, because infinities of both signs would
            # add up to NaN, which means missing.
            largest = jnp.finfo(jnp.float64).max / (2 * rows)
            wide = jnp.clip(comparable(held).astype(jnp.float64), -largest, largest)
        else:
            largest = (2**63 - 1) // rows
            wide = _checks.saturating_cast(held, jnp.int64).clip(-largest, largest)
        total = cells.totals(jnp.where(known, wide, jnp.zeros_like(wide)), kept, rows)
        words = lax.bitcast_convert_type(total, jnp.uint32)
        return Numbers(words, None, total.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class PeopleQuery(Query):
    """A query of people, made by `by_person`.

    Attributes:
        norms: the norms in which a bound is known.
        privacy_unit: the person.
        notes: describe which rows count.

    Formal guarantees:
        The guarantees of `by_person`.
    """

    norms: tuple[Any, ...]
    privacy_unit: str
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PeopleScores(KnownSensitivity, KnowsAccuracy):
    """Scores for quantiles, where a person may have several rows; made by `by_person`.

    Attributes:
        scores: the scores of rows.
        view: selects the rows that are scored.
        reach: maps a norm and a relation to the largest change of the scores by one person.
        norms: the norms in which a bound is known.
        privacy_unit: the person.
        notes: describe which rows count.

    Formal guarantees:
        The guarantees of `by_person`.
    """

    scores: QuantileScores
    view: View
    reach: Reach
    norms: tuple[Any, ...]
    privacy_unit: str
    notes: tuple[str, ...]

    relations = tuple(NeighboringRelation)
    reads = "numbers"

    def __call__(self, database: Database) -> jax.Array:
        """The scores of the selected rows."""
        return self.scores(PaddedRecords(*self.view(*present_records(database))))

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        # The bound is valid for any number of rows.
        return self.reach(norm, relation)

    def _accuracy_of(
        self, noise: Accuracy, relation: NeighboringRelation, value: Value, database: Database
    ) -> Accuracy:
        # Even under replace-one, the number of rows that are used is private. So intervals are
        # computed as under add-or-remove-one.
        added = NeighboringRelation.ADD_OR_REMOVE_ONE
        return self.scores._accuracy_of(noise, added, value, database)

    def _inside(self, mechanism: Mechanism) -> Inside:
        return dataclasses.replace(self.scores._inside(mechanism), target=self)


class _ByPerson(TypedDict):
    person: Name
    rows: int
    groups: NotRequired[Mapping[Any, int] | None]
    order: NotRequired[Name | None]
    of: NotRequired[Name | None]
    per_person: NotRequired[PerPerson | None]


@overload
def by_person(query: Query, **how: Unpack[_ByPerson]) -> PeopleQuery: ...


@overload
def by_person(query: QuantileScores, **how: Unpack[_ByPerson]) -> PeopleScores: ...


def by_person(
    query: Query | QuantileScores,
    *,
    person: Name,
    rows: int,
    groups: Mapping[Any, int] | None = None,
    order: Name | None = None,
    of: Name | None = None,
    per_person: PerPerson | None = None,
) -> PeopleQuery | PeopleScores:
    """A query that protects people with several rows: neighbors differ in all rows of a person.

    Args:
        query: any `Query` or scores of quantiles, also by group. It receives the selected rows.
        person: the column of ids, by name or index: texts, or integers of up to 64 bits. A row
            without an id, or with a number that is not whole, belongs to nobody and is left out.
        rows: how many rows of a person are used: the first rows. Public. With `groups`, up to this
            many rows are used in each of the person's groups.
        groups: maps a column to the largest number of its groups in which a person's rows are used,
            public. The first groups of the person are used. A row without a group is left out. Use
            the columns that the query is grouped `by`.
        order: a column of numbers that orders a person's rows, smallest first and missing numbers
            last. Rows with equal numbers stay in the order of the table. None keeps this order for
            all rows.
        of: the column that the query receives; None for all except the column of people. If only
            one column is left, the query receives it as an array, unless it looks up columns by
            name.
        per_person: None if the query receives rows. With "sum" it receives one number for each
            person, or for each person in each group: the sum over the selected rows. The bounds of
            the query, as in `sum_query`, clamp these sums. Missing numbers add nothing.

    Returns:
        A `PeopleQuery`, which `dpjax.privatize` releases, or `PeopleScores`. Its sensitivity is per
        person, and so is the guarantee of a release.

    Raises:
        TypeError: if an argument has another type, or the query is by person already; on a
            database, if `order` holds texts.
        ValueError: if a number is out of range; on a database, if a column is missing.

    Formal guarantees:
        Which rows of a person are selected depends only on that person's rows and their order. So
        adding or removing a person does not affect the selected rows of others. Let A and R be the
        most that one row changes the query under add-or-remove-one and under replace-one. Let a
        person have at most k rows in each of g groups, and let the query be by these groups. All
        rows of a person change it by at most k A in the norm linf, k sqrt(g) A in l2 and k g A in
        l1. If another person, with any number of rows, replaces this one, max(R, A) takes the place
        of A. If `groups` has columns that the query is not grouped by, their numbers of groups
        multiply k. With "sum", k is 1. All bounds are attained. The number of rows is private under
        both relations. docs/proofs/people.md has the proof.

    Source:
        Wilson, Zhang, Lam, Desfontaines, Simmons-Marengo and Gipson (2020), on bounded
        contributions.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> from dpjax import queries
        >>> visits = {"id": np.array([7, 7, 7, 8]), "ward": np.array(["A", "A", "B", "A"])}
        >>> by_ward = queries.by(queries.counting_query(), column="ward", keys=["A", "B"])
        >>> counts = queries.by_person(by_ward, person="id", rows=1, groups={"ward": 2})
        >>> counts(visits).tolist()
        [2, 1]
        >>> dpjax.laplace(counts.sensitivity(), epsilon=1.0).guarantee.privacy_unit
        'person (id)'
        >>> people = queries.by_person(queries.counting_query(), person="id", rows=1)
        >>> int(people(visits))
        2
    """
    if not isinstance(query, (Query, QuantileScores)) or query.privacy_unit != RECORD:
        raise TypeError(
            "query must be a Query or scores of quantiles, and not the result of by_person, got "
            f"{_checks.shown(query)}"
        )
    truncation = checked_truncation(person, rows, groups, order)
    by_group = isinstance(query, (GroupedQuery, GroupedScores))
    cells = dict(query.named_groups) if by_group else {}
    view = _view(truncation, of, per_person, cells)
    people = contribution(truncation, cells, per_person=per_person)
    if isinstance(query, Query):
        return people.query(query, view)
    of_rows = functools.partial(query._bound, n=None, dtype="float32")  # pyright: ignore
    reach = functools.partial(people.reach, of_rows)
    return PeopleScores(scores=query, view=view, reach=reach, norms=query.norms, **people.about)


def _view(
    truncation: Truncation, of: Name | None, per_person: PerPerson | None, cells: Mapping[str, int]
) -> View:
    """Checks the arguments, and returns the `View` of the query."""
    if of is not None:
        check_name("of", of)
        if per_person is None and cells:
            raise ValueError(
                f"of={of!r} must be left out here, because the query is by group: pass of= to "
                "queries.by instead"
            )
    if per_person is not None:
        _checks.choice("per_person", per_person, get_args(PerPerson))
        if missing := cells.keys() - dict(truncation.groups).keys():
            raise ValueError(
                "groups must name the columns that the query is grouped by, because "
                f'per_person="sum" makes a sum for each group: add {sorted(missing)} to groups'
            )
    return View(truncation, of, bool(cells), per_person)


@dataclasses.dataclass(frozen=True)
class Contribution:
    """How many rows of a person a query receives, from which the sensitivity follows.

    Attributes:
        rows: the number of a person's rows that may change the value of the same group.
        blocks: the number of groups whose values a person's rows may change.
        privacy_unit: the person.
        notes: phrases for the guarantee that say how many rows of a person were selected.
    """

    rows: int
    blocks: int
    privacy_unit: str
    notes: tuple[str, ...]

    @property
    def about(self) -> dict[str, Any]:
        """Returns the keyword arguments `privacy_unit` and `notes` for a query of people."""
        return {"privacy_unit": self.privacy_unit, "notes": self.notes}

    def reach(self, of_rows: Reach, norm: VectorNorm, relation: NeighboringRelation) -> float:
        """Returns how much all rows of a person change a value, given the reach of one row."""
        added = NeighboringRelation.ADD_OR_REMOVE_ONE
        # A person may be replaced by one with fewer rows or none. So the bound covers removed rows.
        moved = self.rows * max(Fraction(of_rows(norm, one)) for one in {added, relation})
        if norm == "l2":
            return sqrt_up(moved**2 * self.blocks)
        return round_up(moved * (1 if norm == "linf" else self.blocks))

    def integers(self, query: IntegerQuery, view: View | None = None) -> IntegerQuery:
        """Converts a query of rows to a query of people.

        The query receives the rows that `view` selects for each person. With `view=None`, it
        receives all rows, because rows were already selected.
        """

        def addends(records: Database, present: jax.Array) -> Sequence[Addend]:
            return query.addends_of(*(view(records, present) if view else (records, present)))

        return query.with_reach(
            lambda reach: functools.partial(self.reach, reach),
            addends=addends,
            as_given=True,
            **self.about,
        )

    def query(self, query: Query, view: View | None = None) -> PeopleQuery:
        """Converts a `Query` of rows to a `PeopleQuery`. For `view`, see `integers`."""
        integers = self.integers(query._integers, view)
        return PeopleQuery(integers, query.norms, **self.about)


def contribution(
    truncation: Truncation, cells: Mapping[Any, int], *, per_person: PerPerson | None = None
) -> Contribution:
    """Returns the `Contribution` of a person to a query after truncation.

    `cells` maps each group column of the query to its number of keys. It contains only columns that
    are given by name, because an index changes when the column of people is removed. With
    `per_person="sum"` the query receives one sum for each person and cell. If the truncation does
    not limit the groups of a column, each row of a person may be in another group. So the person is
    in at most as many groups as the person has rows.
    """
    if per_person is None:
        rows, blocks = truncation.rows, 1
    else:
        limited = dict(truncation.groups)
        unlimited = math.prod(size for column, size in cells.items() if column not in limited)
        rows, blocks = 1, min(truncation.rows, unlimited)
    for column, most in truncation.groups:
        if column in cells:
            blocks *= min(most, cells[column])
        else:
            rows *= most
    note = truncation.note
    if per_person is not None:
        note = f"one sum {'each' if blocks == 1 else 'in each group'}, {note}"
    return Contribution(rows, blocks, truncation.unit, (note,))


ONE_RECORD = Contribution(1, 1, RECORD, ())
"""The contribution of a person who has one record."""


@dataclasses.dataclass(frozen=True)
class RowsOfPeople:
    """The argument `by` of `private_mean` for a table in which a person may have several rows.

    It is not a mapping: functions that only support one row per person raise an error for it.

    Attributes:
        by: the groups, {column: keys}.
        contribution: how many rows of a person are used.
    """

    by: By
    contribution: Contribution


def groups_alone(by: By | RowsOfPeople | None) -> By | None:
    """Returns the groups in `by`, without the limits on people's rows."""
    return by.by if isinstance(by, RowsOfPeople) else by


def integers_by(query: IntegerQuery, by: By | RowsOfPeople | None) -> IntegerQuery:
    """Returns the query that computes the integers of `query` in each group, if there are groups.

    If `by` is a `RowsOfPeople`, neighbors of the returned query differ in all rows of one person.
    """
    for one in reversed(groups_of(groups_alone(by))):
        query = integers_by_group(query, one)
    return by.contribution.integers(query) if isinstance(by, RowsOfPeople) else query
