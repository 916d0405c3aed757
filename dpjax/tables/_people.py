"""Limits the rows of each person that a statistic of a table counts."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._records import exact_records
from dpjax.queries._people import contribution
from dpjax.queries._truncation import Truncation, checked_truncation
from dpjax.tables._frame import Frame
from dpjax.tables._question import Question

# The statistics that scale their noise by `Question.people`. All other statistics are refused,
# including any that are added later.
_OF_PEOPLE = (
    *("count", "crosstab", "histogram", "top", "sum", "mean", "variance", "quantiles", "bounds"),
    *("covariance", "correlation", "pca", "regression", "synthetic"),
)


@dataclasses.dataclass(frozen=True)
class People:
    """The column of people's ids in a table, and how many of their rows count.

    Attributes:
        truncation: decides which rows count. A limit on the groups of a column applies to
            statistics that are grouped by this column.
    """

    truncation: Truncation

    @property
    def person(self) -> str:
        """Returns the name of the column of ids."""
        return str(self.truncation.person)

    def asked(self, question: Question, frame: Frame) -> Question:
        """Restricts a question to the rows of each person that count."""
        by = dict(question.cells.axes)
        groups = tuple(one for one in self.truncation.groups if one[0] in by)
        here = dataclasses.replace(self.truncation, groups=groups)
        names = {here.person, *(name for name, _ in groups), here.order} - {None}
        columns = {name: frame[str(name)] for name in names}
        records = {name: column.with_gaps() for name, column in columns.items()}
        exact, _ = exact_records("frame", records)
        # The rows of a person that count are chosen among the rows in a cell. Whether a row is in a
        # cell depends on that row alone.
        inside = question.present & (question.cells.codes >= 0)
        kept, _ = here.kept(exact, jnp.asarray(inside))
        cells = {name: len(keys) for name, keys in by.items()}
        kept = kept if _checks.is_traced(kept) else np.asarray(kept)
        return dataclasses.replace(question, present=kept, people=contribution(here, cells))


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
            f"rows must be given together with person={person!r}: the largest number of rows of "
            "each person that are used"
        )
    return People(checked_truncation(person, rows, groups, order))


def check_of_people(people: People | None, statistic: str) -> None:
    """Refuses a statistic without a known bound on the effect of a person with several rows."""
    if people is not None and statistic not in _OF_PEOPLE:
        instead = "give public keys" if "keys" in statistic else "use a table without person="
        raise ValueError(
            f"{statistic} is not supported for a table with person=, because no bound is known "
            f"on how much all rows of a person change it: {instead}"
        )
