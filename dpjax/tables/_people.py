"""Limits the rows of each person that a statistic of a table counts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import Numbers
from dpjax._core._records import exact_records
from dpjax._core._types import Database
from dpjax.queries._people import Contribution, PerPerson, contribution, exact_totals
from dpjax.queries._truncation import Truncation, checked_truncation, codes_of_words
from dpjax.tables._distinct import words_of
from dpjax.tables._frame import Column, Frame
from dpjax.tables._question import Question

# The statistics that scale their noise by `Question.people`. All other statistics are refused,
# including any that are added later.
_OF_PEOPLE = (
    *("count", "crosstab", "histogram", "top", "sum", "mean", "variance", "quantiles", "bounds"),
    *("covariance", "correlation", "pca", "regression", "synthetic"),
    *("count_distinct", "keys", "k_means"),
)


@dataclasses.dataclass(frozen=True)
class People:
    """The column of people's ids in a table, and how many of their rows count.

    Attributes:
        truncation: decides which rows count. For a column, it may limit the number of groups in
            which a person's rows count. This limit applies to statistics grouped by this column.
    """

    truncation: Truncation

    @property
    def person(self) -> str:
        """Returns the name of the column of ids."""
        return str(self.truncation.person)

    def rows(self, question: Question, frame: Frame) -> Question:
        """Restricts a question to as many rows of each person as the limits allow."""
        here, sizes = self._here(question)
        kept, _ = here.kept(*self._inside(here, question, frame))
        return _restricted(question, kept, contribution(here, sizes))

    def sums(self, question: Question, frame: Frame, column: Column) -> Question:
        """Merges the rows of each person in each cell into one row, with the sum of `column`."""
        column.numbers()  # Refuses texts.
        here, sizes = self._here(question)
        records, inside = self._inside(here, question, frame)
        kept, cells = here.kept(records, inside)
        ids = cells.codes[0]
        cells = dataclasses.replace(cells, codes=(ids, jnp.asarray(question.cells.codes)))
        numbers, _ = exact_records("frame", column.with_gaps())
        total = exact_totals(numbers, kept, cells, here.rows)
        first = kept & (cells.rank(kept) == 0)
        people = contribution(here, sizes, per_person="sum")
        return dataclasses.replace(
            _restricted(question, first, people), sums=_column_of(column, total)
        )

    def once(self, question: Question, frame: Frame, column: Column) -> Question:
        """Restricts a question to one row for each different entry of a person in a column.

        For each person, a limited number of different entries is used. If this column has a limit
        on groups, that limit applies. Otherwise the limit on rows applies. For the column of ids,
        the limit is 1.
        """
        here, sizes = self._here(question)
        most = {self.person: 1, **dict(self.truncation.groups)}
        here = dataclasses.replace(here, rows=most.get(column.name, here.rows))
        records, inside = self._inside(here, question, frame)
        codes = jnp.asarray(question.cells.codes), codes_of_words(words_of(column))
        kept = here.kept_once(records, inside & jnp.asarray(column.known), *codes)
        return _restricted(question, kept, contribution(here, sizes))

    def _here(self, question: Question) -> tuple[Truncation, dict[str, int]]:
        """Returns the limits on people's rows that apply to a question.

        Also returns the number of keys of each column of groups in the question.
        """
        sizes = {name: len(keys) for name, keys in question.cells.axes}
        groups = tuple(one for one in self.truncation.groups if one[0] in sizes)
        return dataclasses.replace(self.truncation, groups=groups), sizes

    def _inside(
        self, here: Truncation, question: Question, frame: Frame
    ) -> tuple[Database, jax.Array]:
        """Returns the columns that decide which rows count, and the rows that are in a cell.

        Whether a row is in a cell depends on that row alone.
        """
        names = {here.person, *(name for name, _ in here.groups), here.order} - {None}
        records, _ = exact_records("frame", {name: frame[str(name)].with_gaps() for name in names})
        return records, jnp.asarray(question.present & (question.cells.codes >= 0))


def _restricted(question: Question, kept: jax.Array, people: Contribution) -> Question:
    present = kept if _checks.is_traced(kept) else np.asarray(kept)
    return dataclasses.replace(question, present=present, people=people)


def _column_of(like: Column, total: Numbers) -> Column:
    """Returns a column of sums, none of which is missing."""
    entries: Any
    if _checks.is_traced(total.held):
        dtype = jnp.result_type(float)
        with jax.enable_x64(True):
            entries = total.array().astype(dtype)
    else:
        entries, _ = total.on_host()
    return Column(like.name, entries, np.ones(entries.shape, bool), False, False)


def people_of(
    person: str | None, rows: int | None, groups: Mapping[str, int] | None, order: str | None
) -> People | None:
    """Checks the arguments, and returns the `People` of a table; None if each row is a person."""
    if person is None:
        given = {"rows": rows, "groups": groups, "order": order}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise TypeError(f"person must name the column of people's ids if {named[0]} is given")
        return None
    if rows is None:
        raise TypeError(
            f"rows must be given together with person={person!r}: it limits how many rows of each "
            "person are used"
        )
    return People(checked_truncation(person, rows, groups, order))


def check_of_people(people: People | None, statistic: str) -> None:
    """Refuses a statistic without a known bound on the effect of a person with several rows."""
    if people is not None and statistic not in _OF_PEOPLE:
        raise ValueError(
            f"{statistic} is not supported for a table with person=, because no bound is known "
            f"on how much all rows of a person change it: use a table without person="
        )


def people_to_sum(
    people: People | None, missing: str, frame: Frame, column: str, per_person: PerPerson
) -> People:
    """Returns `people`, after checking that a column has a sum for each person."""
    _checks.choice("per_person", per_person, get_args(PerPerson))
    wanted = f"per_person={per_person!r}"
    if people is None:
        raise ValueError(
            f"{wanted} needs the column of people's ids: make the table with person= and rows="
        )
    if missing != "drop":
        raise ValueError(
            f'{wanted} needs a table with missing="drop", got missing={missing!r}: the bounds are '
            "for a person's sum, so the lower bound cannot replace a missing number in a row"
        )
    if (kind := frame.kind_of(column)) in ("dates", "times"):
        raise TypeError(f"{wanted} adds up numbers, but column {column!r} has {kind}: leave it out")
    return people
