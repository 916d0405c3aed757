"""A private table, and its statistics by the names of columns."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from dpjax._core import _checks
from dpjax._core._labels import Axis, Labels
from dpjax._core._open_ledgers import Account, told
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NeighboringRelation, Release
from dpjax._tracing._programs import Unchanging
from dpjax.accounting._ledger import Ledger
from dpjax.mechanisms._several_selections import top_k
from dpjax.queries._moments import _centered_sums, private_mean, private_variance
from dpjax.queries._private_quantiles import private_quantiles
from dpjax.queries._query import IntegerQuery
from dpjax.queries._second_moments import second_moments_query
from dpjax.queries._sums import sum_query
from dpjax.random._keys import secure_key
from dpjax.release._privatize import privatize
from dpjax.tables._bounds import Bounds, bounds_of
from dpjax.tables._cost import Cost, cost_of
from dpjax.tables._frame import Frame
from dpjax.tables._groups import By, Cells, buckets_of, cells_by, codes_of, keys_of
from dpjax.tables._question import Question, cells_query, question_name
from dpjax.tables._where import Where, rows_where

Probabilities = float | Fraction | Sequence[float | Fraction]


class PrivateTable:
    """A table of private rows, and differentially private statistics of its columns.

        with dpjax.Ledger("study.db", epsilon=1.0, delta=1e-6) as ledger:
            table = dpjax.PrivateTable(frame, ledger=ledger, most_rows=100_000)
            table.mean("age", bounds=(18, 90), by={"ward": ["A", "B"]}, epsilon=0.2)

    Arguments that many statistics take:

    - `by`: columns and their public keys, as {"ward": ["A", "B"]}, for every combination of keys. A
      release by `keys` may stand for the keys of its column. Rows with other keys count nowhere.
    - `where`: a public predicate on one row, as `lambda row: row["age"] >= 18`, in JAX. It sees
      texts, which compare with a text, and numbers, where a missing one is NaN.
    - `epsilon`, or `share` of the epsilon of the ledger's budget, or `error`, the half-width of the
      95% interval of each number: exactly one of them. For an error the table takes the least
      epsilon.
    - `delta`: None takes as large a part of the ledger's delta as of its epsilon. Where there is a
      delta, noise is Gaussian if that is smaller.
    - `bounds`: the ends that numbers are clipped to, public. They are a guess of what is possible,
      not the least and the largest number of this table. For several columns it is a dict.
    - `key`: None draws a key from the operating system; give one in tests.

    Args:
        frame: a table of pandas, polars or Arrow, or a dict of columns. Only columns that a
            statistic uses are converted.
        most_rows: a number that is public, and known to be enough for the rows of every table.
        ledger: with the budget that pays for all statistics; None leaves it to a ledger that is
            open, if there is one.
        relation: which tables are neighbors: by default those that differ in one row that is added,
            so that the number of rows is private.
        missing: "drop" leaves out rows that miss an entry in a column of the statistic. "lower"
            counts a missing number as the lower end of its bounds.
        name: of these rows, for a ledger that pays for several tables.

    Attributes:
        most_rows: as given.
        relation: which tables are neighbors.

    Raises:
        TypeError: if the frame is no table, or an argument has another type.
        ValueError: if there are more rows than `most_rows`, columns differ in length, the ledger is
            under another relation, or it knows another table by this name.

    Formal guarantees:
        Every statistic is (epsilon, delta)-DP under the relation, for the delta that its release
        shows. Whether a row counts, and in which group, depends on that row alone: on its missing
        entries, `where`, and its keys. So a row that is added moves a statistic by no more than
        the query behind it may move. Under replace-one a row may come to count, or cease to, which
        the sensitivity covers. Names of columns, dtypes, keys, bounds and predicates are public.

        In a ledger a statistic has a name: statistic, columns, and a fingerprint of everything that
        was asked. The same question, also of a later run of the same program, returns what was paid
        for. The entries of the table are never looked at for that: give the ledger another
        `version` after they change.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> frame = {"ward": np.array(["A", "B", "A"] * 900), "age": np.arange(2700) % 50 + 20}
        >>> table = dpjax.PrivateTable(frame, most_rows=10_000)
        >>> counts = table.count(by={"ward": ["A", "B"]}, epsilon=1.0)
        >>> bool(abs(counts.value[0] - 1800) < 30)
        True
    """

    def __init__(
        self,
        frame: Any,
        *,
        most_rows: int,
        ledger: Ledger | None = None,
        relation: NeighboringRelation | None = None,
        missing: Literal["drop", "lower"] = "drop",
        name: str = "",
    ) -> None:
        self.most_rows = _checks.integer("most_rows", most_rows, least=1, most=2**31 - 2)
        self.relation = NeighboringRelation(relation or NeighboringRelation.ADD_OR_REMOVE_ONE)
        if ledger is not None and not isinstance(ledger, Account):
            raise TypeError(f"ledger must be a dpjax.Ledger, got {_checks.shown(ledger)}")
        self._missing = _checks.choice("missing", missing, ("drop", "lower"))
        self._name, self._given, self._ledger = name, frame, ledger
        self._frame = Frame(frame, self.most_rows)
        self._payer()

    def __repr__(self) -> str:
        columns = _checks.shown(list(self._frame.columns))
        return f"PrivateTable({columns}, most_rows={self.most_rows}, under {self.relation})"

    def count(
        self,
        *,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """How many rows there are, in all or in each group.

        Args:
            by: see `PrivateTable`; so are the other arguments.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each count, instead.
            delta: of the guarantee.
            key: for tests.

        Returns:
            A `Release` of integers, with an axis for each column of `by`.
        """
        asked = self._asked("count", (), by=by, where=where)
        cost = self._cost(epsilon, share, error, delta=delta)
        return self._counted(asked, asked.cells, cost, key)

    def crosstab(
        self,
        columns: Sequence[str],
        *,
        keys: Mapping[str, Any],
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """A contingency table: how many rows have each combination of keys of some columns.

        Args:
            columns: by name, in the order of the axes of the table.
            keys: of each column, public.
            where: see `PrivateTable`; so are the other arguments.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each count, instead.
            delta: of the guarantee.
            key: for tests.

        Returns:
            A `Release` of integers, with an axis for each column.
        """
        if isinstance(columns, str) or set(columns) != set(keys):
            raise ValueError(
                f"keys must be given for each of the columns {_checks.shown(columns)}, and for no"
                f" other, got {_checks.shown(list(keys))}"
            )
        asked = self._asked("crosstab", (), by={name: keys[name] for name in columns}, where=where)
        cost = self._cost(epsilon, share, error, delta=delta)
        return self._counted(asked, asked.cells, cost, key)

    def histogram(
        self,
        column: str,
        buckets: Sequence[float],
        *,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """How many numbers of a column are in each bucket, in all or in each group.

        Args:
            column: of numbers, by name.
            buckets: increasing edges, public; a bucket holds its lower edge, the last one also its
                upper edge. Numbers outside are not counted; the first edge may be -inf, the last
                one inf.
            by: see `PrivateTable`; so are the other arguments.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each count, instead.
            delta: of the guarantee.
            key: for tests.

        Returns:
            A `Release` of integers; buckets are the last axis.
        """
        labels, codes = buckets_of(self._frame[column], buckets)
        asked = self._asked("histogram", [column], by=by, where=where, about=labels)
        cost = self._cost(epsilon, share, error, delta=delta)
        return self._counted(asked, asked.cells.split(column, labels, codes), cost, key)

    def sum(
        self,
        column: str,
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The sum of a column, each number clipped to public bounds, in all or in each group.

        Args:
            column: of numbers, by name.
            bounds: see `PrivateTable`; so are the other arguments.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each sum, instead.
            delta: of the guarantee.
            key: for tests.

        Returns:
            A `Release` of one number for each group.
        """
        low, high = bounds_of(column, bounds)
        asked = self._asked("sum", [column], by=by, where=where, about=(low, high))
        cost = self._cost(epsilon, share, error, delta=delta)
        query = sum_query(lower=low, upper=high, capacity=self.most_rows)
        grouped = asked.in_groups(query)
        private = privatize(Unchanging("sum", grouped), cost.cheapest(grouped))
        database = asked.database(self._leaf(column))
        return self._released(asked, lambda key: private(key, database, name=asked.name), key)

    def mean(
        self,
        column: str,
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The average of a column, each number clipped to public bounds, in all or in each group.

        Args:
            column: of numbers, by name.
            bounds: see `PrivateTable`; so are the other arguments.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: for tests.

        Returns:
            A `Release` of one number for each group, between the bounds.
        """
        low, high = bounds_of(column, bounds)
        asked = self._asked("mean", [column], by=by, where=where, about=(low, high))
        cost = self._cost(epsilon, share, delta=delta)
        terms = self._terms(asked, cost, _centered_sums(low, high, self.most_rows, 1))
        database = asked.database(self._leaf(column))
        return self._released(
            asked, lambda key: private_mean(key, database, lower=low, upper=high, **terms), key
        )

    def variance(
        self,
        column: str,
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The average and the variance of a column, in all or in each group.

        Args:
            column: of numbers, by name.
            bounds: see `PrivateTable`; so are the other arguments.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: for tests.

        Returns:
            A `Release` of {"mean": ..., "variance": ...}.
        """
        low, high = bounds_of(column, bounds)
        asked = self._asked("variance", [column], by=by, where=where, about=(low, high))
        cost = self._cost(epsilon, share, delta=delta)
        query = second_moments_query(_identity, dims=1, capacity=self.most_rows)
        terms = self._terms(asked, cost, query)
        database = asked.database(self._leaf(column))
        return self._released(
            asked, lambda key: private_variance(key, database, lower=low, upper=high, **terms), key
        )

    def quantiles(
        self,
        column: str,
        probabilities: Probabilities,
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Quantiles of a column, in all or in each group.

        Args:
            column: of numbers, by name.
            probabilities: of the quantiles, each from 0 to 1.
            bounds: between which quantiles are looked for; see `PrivateTable`.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            key: for tests.

        Returns:
            A `Release` of numbers; quantiles are the last axis.
        """
        low, high = bounds_of(column, bounds)
        wanted = tuple(np.atleast_1d(np.asarray(probabilities, object)).tolist())
        words = tuple(map(str, wanted))
        asked = self._asked("quantiles", [column], by=by, where=where, about=(low, high, words))
        price = self._cost(epsilon, share, delta=None).price()
        ask = functools.partial(
            private_quantiles,
            database=asked.database(self._leaf(column)),
            probabilities=wanted,
            lower=low,
            upper=high,
            epsilon=price.epsilon,
            relation=self.relation,
            name=asked.name,
            by=asked.by,
        )
        axis = ("quantile", tuple(map(float, wanted)))
        return self._released(asked, ask, key, {"": (axis,)})

    def top(
        self,
        column: str,
        k: int,
        *,
        keys: Any = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The k most frequent keys of a column, the most frequent first.

        Args:
            column: by name.
            k: how many, at least 1.
            keys: those that may be among them, public.
            where: see `PrivateTable`; so are the other arguments.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            key: for tests.

        Returns:
            A `Release` of a tuple of keys.
        """
        known = keys_of(column, keys)
        asked = self._asked("top", [column], where=where, about=known)
        price = self._cost(epsilon, share, delta=None).price()
        query = cells_query((len(known),))
        # A row that is added raises counts alone, and then this norm halves the noise.
        norm: Any = "range"
        sensitivity = query.sensitivity(norm, relation=self.relation)
        private = privatize(Unchanging("top", query), top_k(sensitivity, price.epsilon, k=k))
        database = PaddedRecords(codes_of(self._frame[column], known), asked.present)  # pyright: ignore[reportArgumentType]
        found = self._paid(lambda key: private(key, database, name=asked.name), key)
        value = tuple(known[int(place)] for place in np.asarray(found.value))
        return Release(value, found.guarantee, labels=Labels(asked.statistic))

    # How every statistic is asked, paid for and labeled.

    def _asked(
        self,
        statistic: str,
        columns: Sequence[str],
        *,
        by: By | None = None,
        where: Where | None = None,
        about: object = (),
    ) -> Question:
        """The rows that a statistic of some columns counts, and its name."""
        frame, words, program = self._frame, statistic, ""
        used = [frame[name] for name in columns]
        present = np.arange(frame.slots) < frame.rows
        if self._missing == "drop":
            present = functools.reduce(np.logical_and, [column.known for column in used], present)
        if where is not None:
            satisfying, program = rows_where(where, frame)
            present = present & satisfying
        cells = cells_by(by, frame)
        words += f" of {' and '.join(columns)}" if columns else ""
        words += f" by {' and '.join(name for name, _ in cells.axes)}" if cells.axes else ""
        words += " where" if where else ""
        kinds = tuple((column.name, column.entries.dtype.str, column.is_text) for column in used)
        asked = kinds, cells.axes, program, about, self._missing, str(self.relation)
        prefix = f"{self._name}: " if self._name else ""
        return Question(words, question_name(prefix + words, *asked), cells, present, self.relation)

    def _leaf(self, column: str) -> PyTree:
        """A column of numbers as a query takes it."""
        found = self._frame[column]
        found.numbers()  # Refuses texts.
        return found.leaf() if self._missing == "drop" else found.with_gaps()

    def _payer(self) -> Account | None:
        """The ledger that pays, under the relation of the table; refused under another one."""
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

    def _terms(self, asked: Question, cost: Cost, query: IntegerQuery) -> dict[str, Any]:
        """What a private statistic of this query is asked with."""
        epsilon, delta = cost.buys(query)
        terms = {"epsilon": epsilon, "delta": delta, "relation": self.relation}
        return {**terms, "name": asked.name, "by": asked.by}

    def _paid(self, ask: Callable[[Key], Release], key: Key | None) -> Release:
        """A release that the ledger of the table pays for."""
        with self._ledger or contextlib.nullcontext():
            return ask(secure_key() if key is None else key)

    def _released(
        self,
        asked: Question,
        ask: Callable[[Key], Release],
        key: Key | None,
        axes: Mapping[str, tuple[Axis, ...]] = types.MappingProxyType({}),
    ) -> Release:
        return asked.labeled(self._paid(ask, key), axes)

    def _counted(self, asked: Question, cells: Cells, cost: Cost, key: Key | None) -> Release:
        """The number of rows that count in each cell."""
        query = cells_query(cells.shape)
        private = privatize(Unchanging("count", query), cost.cheapest(query))
        database = PaddedRecords(cells.codes, asked.present)  # pyright: ignore[reportArgumentType]
        release = self._paid(lambda key: private(key, database, name=asked.name), key)
        return dataclasses.replace(release, labels=Labels(asked.statistic, cells.axes))


def _identity(records: PyTree) -> PyTree:
    return records
