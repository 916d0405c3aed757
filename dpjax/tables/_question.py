"""A question to a table: the rows that a statistic counts, their groups, and its public name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dpjax._core._accuracy import Accuracy
from dpjax._core._labels import Axis, Labels
from dpjax._core._records import PaddedRecords
from dpjax._core._types import PyTree
from dpjax._core._values import NeighboringRelation, Release
from dpjax._tracing._fingerprints import digest
from dpjax.accounting._ledger import FINGERPRINT
from dpjax.queries._groups import By, by
from dpjax.queries._people import Contribution, RowsOfPeople
from dpjax.queries._query import Query
from dpjax.tables._frame import Column
from dpjax.tables._groups import Cells

GROUP, VALUE = "group", "value"


@dataclasses.dataclass(frozen=True)
class Question:
    """The rows that a statistic counts, its groups, and its name.

    Attributes:
        what: the name of the statistic without the columns, such as "mean".
        statistic: the name with columns, such as "mean of price".
        name: `statistic` with a fingerprint of all arguments, for a ledger.
        cells: the groups.
        present: which slots contain a row that counts; whether a row counts depends on it alone.
        relation: which tables are neighbors.
        again: asks the same question of another `PrivateTable`.
        people: how many rows of a person count; None if neighbors differ in one row.
        moments: "dates", "times" or "durations" if the answer is of that kind, else "".
        sums: the sums of people's numbers, in place of the column of the statistic.

    Formal guarantees:
        An added row changes a query of the rows that count by at most the reach of the query. A
        replaced row may start or stop counting. So under replace-one the rows that count are
        treated as a group: the reach of a grouped query covers rows that enter or leave a group.
    """

    what: str
    statistic: str
    name: str
    cells: Cells
    present: np.ndarray
    relation: NeighboringRelation
    again: Callable[[Any], "Question"]
    people: Contribution | None = None
    moments: str = ""
    sums: Column | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether the statistic is computed by group."""
        return (
            bool(self.cells.axes)
            or self.relation is NeighboringRelation.REPLACE_ONE
            or self.people is not None
        )

    @property
    def by(self) -> By | RowsOfPeople | None:
        """Returns the groups in the form that the functions of `dpjax.queries` accept."""
        if not self.is_grouped:
            return None
        groups: By = {GROUP: range(self.cells.size)}
        return groups if self.people is None else RowsOfPeople(groups, self.people)

    def of_people(self, query: Query) -> Query:
        """Returns the query on rows that count, with a sensitivity for all rows of a person."""
        return query if self.people is None else self.people.query(query)

    def database(self, value: PyTree) -> PaddedRecords:
        """Returns the database of a query: the columns, the groups, and which rows count."""
        if not self.is_grouped:
            return PaddedRecords(value, self.present)  # pyright: ignore[reportArgumentType]
        columns = value if isinstance(value, dict) else {VALUE: value}
        return PaddedRecords({**columns, GROUP: self.cells.codes}, self.present)  # pyright: ignore[reportArgumentType]

    def in_groups(self, query: Query) -> Query:
        """Applies a query of one column to each group."""
        if not self.is_grouped:
            return query
        return self.of_people(by(query, column=GROUP, keys=range(self.cells.size), of=VALUE))

    def labeled(self, release: Release, axes: Mapping[str, tuple[Axis, ...]]) -> Release:
        """Returns the release with one axis per column of groups, and with labels for its numbers.

        `axes` maps the name of each array in the value to its axes besides those of groups.
        """
        labels = Labels(self.statistic, self.cells.axes, tuple(axes.items()), self.moments)
        if not self.is_grouped:
            return dataclasses.replace(release, labels=labels)
        accuracy = Accuracy(
            release.accuracy.kind,
            release.accuracy.public,
            jax.tree.map(self._by_column, release.accuracy.measured),
        )
        value = jax.tree.map(self._by_column, release.value)
        return Release(value, release.guarantee, accuracy, labels)

    def _by_column(self, array: Any) -> Any:
        return array.reshape((*self.cells.shape, *array.shape[1:]))


def question_name(statistic: str, *asked: object) -> str:
    """Returns the name of a statistic in a ledger, with a fingerprint of all its arguments."""
    return f"{statistic}{FINGERPRINT}{digest(statistic, asked)[:16]}"
