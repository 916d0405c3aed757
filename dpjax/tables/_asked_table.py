"""The base class of `PrivateTable`: selects rows, checks costs, and pays by a ledger."""

import contextlib
import dataclasses
import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._labels import FOUND, Axis, Labels
from dpjax._core._open_ledgers import Account, simulation, told
from dpjax._core._records import PaddedRecords, Parts
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NeighboringRelation, Release
from dpjax._files._ledger_file import BudgetExceededError
from dpjax._tracing._programs import Unchanging
from dpjax.accounting._composition import compose
from dpjax.accounting._ledger import Ledger
from dpjax.queries._counts import histogram_query
from dpjax.queries._group_keys import WithCounts, group_keys, integers_of
from dpjax.queries._people import PerPerson
from dpjax.queries._query import IntegerQuery
from dpjax.queries._second_moments import moments_query, sums_of_moments
from dpjax.random._keys import secure_key
from dpjax.random._release import resized
from dpjax.release._privatize import privatize
from dpjax.tables._frame import Column
from dpjax.tables._groups import By, Cells, cells_by, codes_of, keys_in_groups, words_in_groups
from dpjax.tables._large_frame import LargeFrame, frame_of, in_parts, structure_of, texts_of_words
from dpjax.tables._people import check_of_people, people_of, people_to_sum
from dpjax.tables._question import Cost, Question, cost_of, question_name
from dpjax.tables._where import Where, rows_where

_IN_UNITS_OF_COLUMN = ("mean", "quantiles", "bounds")


class AskedTable:
    """A table with the ledger that pays for its statistics. Subclasses define the statistics."""

    def __init__(
        self,
        frame: Any,
        *,
        most_rows: int,
        ledger: Ledger | None = None,
        relation: NeighboringRelation | None = None,
        missing: Literal["drop", "lower"] = "drop",
        name: str = "",
        person: str | None = None,
        rows: int | None = None,
        groups: Mapping[str, int] | None = None,
        order: str | None = None,
    ) -> None:
        self.most_rows = _checks.integer("most_rows", most_rows, least=1, most=2**31 - 2)
        self.relation = NeighboringRelation(relation or NeighboringRelation.ADD_OR_REMOVE_ONE)
        if ledger is not None and not isinstance(ledger, Account):
            raise TypeError(f"ledger must be a dpjax.Ledger, got {_checks.shown(ledger)}")
        _checks.choice("missing", missing, ("drop", "lower"))
        self._missing: Literal["drop", "lower"] = missing
        self._name, self._given, self._ledger = name, frame, ledger
        self._frame = frame_of(frame, self.most_rows)
        self._people = people_of(person, rows, groups, order)
        if self._people is not None and isinstance(self._frame, LargeFrame):
            self._frame.check_ordered()
        self._payer()

    def __repr__(self) -> str:
        columns = _checks.shown(list(self._frame.columns))
        return f"PrivateTable({columns}, most_rows={self.most_rows}, under {self.relation})"

    def _query_of_moments(self, asked: Question, dims: int) -> IntegerQuery:
        """Returns the query of the sums from which averages of products are computed."""
        sums = sums_of_moments(dims, self.relation, asked.by, in_cube=True)
        return moments_query(identity, sums, dims=dims, capacity=self.most_rows, in_cube=True)

    def _asked(
        self,
        statistic: str,
        columns: Sequence[str],
        *,
        by: By | None = None,
        where: Where | None = None,
        about: object = (),
        keeps_missing: bool = False,
        per_person: PerPerson | None = None,
        once: bool = False,
        among: tuple[Any, ...] | None = None,
    ) -> Question:
        """Returns the `Question` of a statistic: which rows it counts, its groups, and its name.

        With `per_person`, it counts the sum of each person's numbers in the column. With `once`,
        rows of a person with equal entries in the column count once. With `among`, only rows with
        one of these keys in the column count.
        """

        def of(table: AskedTable) -> Question:
            check_of_people(table._people, statistic)
            frame, words, program = structure_of(table._frame), statistic, ""
            used = [frame[name] for name in columns]
            present = frame.present
            if table._missing == "drop" and not keeps_missing:
                present = functools.reduce(operator.and_, [one.known for one in used], present)
            if among is not None:
                present = present & (codes_of(used[0], among) >= 0)
            if where is not None:
                satisfying, program = rows_where(where, frame)
                present = present & satisfying
            cells = cells_by(by, frame)
            words += f" of {' and '.join(columns)}" if columns else ""
            words += " per person" if per_person else ""
            words += f" by {' and '.join(name for name, _ in cells.axes)}" if cells.axes else ""
            words += " where" if where else ""
            kinds = tuple((one.name, one.entries.dtype.str, one.is_text) for one in used)
            terms = table._missing, str(table.relation), table._people
            prefix = f"{table._name}: " if table._name else ""
            name = question_name(prefix + words, kinds, cells.axes, program, about, *terms)
            moments = frame.kind_of(columns[0]) if statistic in _IN_UNITS_OF_COLUMN else ""
            question = Question(
                statistic, words, name, cells, present, table.relation, of, moments=moments
            )
            if per_person is not None:
                people = people_to_sum(table._people, table._missing, frame, columns[0], per_person)
                return people.sums(question, frame, used[0])
            if table._people is None:
                return question
            if once:
                return table._people.once(question, frame, used[0])
            return table._people.rows(question, frame)

        return of(self)

    def _records(
        self, asked: Question, make: Callable[["AskedTable", Question], PaddedRecords]
    ) -> PaddedRecords | Parts:
        """Returns the records of a statistic, from the frame or from each batch of a large one."""
        if not isinstance(self._frame, LargeFrame):
            return make(self, asked)
        again = asked.again
        return in_parts(self, self._frame, lambda table: make(table, again(table)))

    def _column(self, asked: Question, name: str) -> Column:
        """Returns the column `name` or, with `per_person`, a column with one sum per person."""
        return asked.sums or self._frame[name]

    def _leaf(self, asked: Question, column: str) -> PyTree:
        """Returns a column of numbers in the form that a query accepts. Refuses texts.

        If missing numbers are dropped, the query uses no entry whose number is missing.
        """
        found = self._column(asked, column)
        found.numbers()  # Refuses texts.
        return found.entries if self._missing == "drop" else found.with_gaps()

    def _payer(self) -> Account | None:
        """Returns the ledger that pays, after checking that its relation is that of the table."""
        if simulation() is not None:
            return None
        accounts = [one for one in told(self._ledger) if isinstance(one, Account)]
        account = accounts[0] if len(accounts) == 1 else self._ledger
        if isinstance(account, Ledger):
            account._pays_under(self.relation)
            account._knows_records(self._name, self._given)
        return account

    def _cost(
        self,
        epsilon: float | None,
        share: float | None,
        error: float | None = None,
        *,
        delta: float | None,
    ) -> Cost:
        payer = self._payer()
        budget = payer.budget if isinstance(payer, Ledger) else (Decimal(0), Decimal(0))
        return cost_of(epsilon, share, error, delta=delta, budget=budget, relation=self.relation)

    def _check_left(self, what: str, first: Question, epsilon: float) -> None:
        """Raises an error if both payments of a statistic together exceed the remaining budget."""
        payer = self._payer()
        if not isinstance(payer, Ledger) or any(x["name"] == first.name for x in payer.history()):
            return  # The first payment was already made, and will not be made again.
        left, _ = payer.remaining
        if Decimal(repr(epsilon)) > left:
            raise BudgetExceededError(
                f"{what} needs an extra release to find bounds or keys. All releases together cost "
                f"epsilon={epsilon:g}, but the ledger has only {left:f} left. Take a smaller "
                "epsilon, or give public bounds or keys"
            )

    def _terms(self, asked: Question, cost: Cost, query: IntegerQuery) -> dict[str, Any]:
        """Returns the keyword arguments for a private statistic of this query."""
        epsilon, delta = cost.buys(query if asked.people is None else asked.people.integers(query))
        terms = {"epsilon": epsilon, "delta": delta, "relation": self.relation}
        return {**terms, "name": asked.name, "by": asked.by}

    def _paid(self, ask: Callable[[Key], Release], key: Key | None) -> Release:
        """Makes a release by `ask`, and lets the ledger of the table pay for it."""
        pays = None if simulation() is not None else self._ledger
        with pays or contextlib.nullcontext():
            return ask(secure_key() if key is None else key)

    def _released(
        self,
        asked: Question,
        ask: Callable[[Key], Release],
        key: Key | None,
        axes: Mapping[str, tuple[Axis, ...]] = types.MappingProxyType({}),
        *,
        before: Release | None = None,
    ) -> Release:
        """Makes a labeled release. If `before` searched for bounds, the guarantee covers both."""
        release = asked.labeled(self._paid(ask, key), axes)
        if before is None or release.labels is None:
            return release
        together = compose(before.guarantee, release.guarantee)
        low, high = release.labels.texts(np.asarray(before.value, np.float64))
        words = f"{release.labels.statistic}{FOUND}[{low}, {high}]"
        labels = dataclasses.replace(release.labels, statistic=words)
        return dataclasses.replace(release, guarantee=together, labels=labels)

    def _known_groups(self, asked: Question, column: str, cost: Cost, key: Key | None) -> Release:
        """Releases the keys that occur in enough rows of each group, and their noisy counts."""
        purpose = f"to find the private keys of column {column!r}, unless public keys are given"
        epsilon, delta = cost.with_delta(purpose)
        is_public = self.relation is NeighboringRelation.REPLACE_ONE and asked.people is None
        how = {"epsilon": epsilon, "delta": delta, "relation": self.relation, "name": asked.name}
        cells, is_text = asked.cells, structure_of(self._frame)[column].is_text

        def make(table: AskedTable, asked: Question) -> PaddedRecords:
            found = words_in_groups(asked.cells, table._frame[column], asked.present)
            public = table._frame.rows if is_public else None
            return jax.tree.map(lambda slots: slots[:public], found)

        def named(words: np.ndarray) -> list[Any]:
            of_keys = words[:, 1:] if cells.axes else words
            keys = texts_of_words(self._frame, column, of_keys) if is_text else integers_of(of_keys)
            if not cells.axes:
                return keys
            of_groups = zip(words[:, 0], keys, strict=True)
            return [key if key is None else f"{code} {key}" for code, key in of_groups]

        are_numbers = not (is_text or cells.axes)
        counted: Any = WithCounts(self._records(asked, make), named, are_numbers, asked.people)
        capacity = None if is_public else self.most_rows
        found = self._paid(lambda key: group_keys(key, counted, capacity=capacity, **how), key)
        value = keys_in_groups(cells, found.value, is_text) if cells.axes else {(): found.value}
        return dataclasses.replace(found, value=value)

    def _counted(
        self,
        asked: Question,
        axes: tuple[Axis, ...],
        cells_of: Callable[["AskedTable", Question], Cells],
        cost: Cost,
        key: Key | None,
    ) -> Release:
        """Counts the rows of a question in each cell, and releases the noisy counts.

        `axes` are the axes of `cells_of` besides those of groups.
        """
        axes = (*asked.cells.axes, *axes)
        shape = tuple(len(keys) for _, keys in axes)
        query = asked.of_people(histogram_query(math.prod(shape)))
        private = privatize(Unchanging("count", query), cost.cheapest(query))
        database = self._records(
            asked,
            lambda table, asked: PaddedRecords(cells_of(table, asked).codes, asked.present),  # pyright: ignore[reportArgumentType]
        )
        release = self._paid(lambda key: private(key, database, name=asked.name), key)
        value = resized(release.value, shape)
        labels = Labels(asked.statistic, axes)
        return dataclasses.replace(release, value=value, labels=labels)


def identity(records: PyTree) -> PyTree:
    """Returns `records` unchanged, for records that are single vectors."""
    return records
