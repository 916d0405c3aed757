"""A private table, and its statistics by the names of columns."""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._labels import Axis, Labels
from dpjax._core._open_ledgers import Account
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NeighboringRelation, Release
from dpjax._tracing._programs import Unchanging
from dpjax.accounting._ledger import Ledger
from dpjax.mechanisms._additive import discrete_laplace
from dpjax.queries._counts import histogram_query
from dpjax.queries._k_means import private_k_means
from dpjax.queries._linear_regression import _line_query
from dpjax.queries._moments import (
    _centered_sums,
    _directions,
    _mean_and_covariance,
    private_mean,
    private_variance,
)
from dpjax.queries._private_quantiles import exact_probabilities, private_quantiles
from dpjax.queries._private_release import Terms, released
from dpjax.queries._second_moments import second_moments_query
from dpjax.queries._sums import sum_query
from dpjax.release._privatize import privatize
from dpjax.tables._asked_table import AskedTable, identity
from dpjax.tables._bounds import Bounds, End, bounds_of
from dpjax.tables._box import box_of
from dpjax.tables._cells import Buckets
from dpjax.tables._cost import Cost
from dpjax.tables._distinct import CELL, WORDS, DistinctCount, words_of
from dpjax.tables._fits import CORRELATION, correlation, facts_of_line, line
from dpjax.tables._groups import By, Cells, buckets_of, codes_of, keys_of
from dpjax.tables._large_frame import LargeFrame, frame_of, structure_of
from dpjax.tables._people import people_of
from dpjax.tables._question import Question
from dpjax.tables._range import BUCKETS, powers_of, range_of
from dpjax.tables._synthetic import (
    Workload,
    cells_of_rows,
    plan_of_cells,
    table_like,
    workload_of,
)
from dpjax.tables._where import Where

_OF_MODEL = Accuracy.of(
    "", {"why": "its rows are drawn from a model, and no row is a real person's"}
)
_NO_INTERVAL = "its ends are powers of two, and most numbers of the column lie between them"
Probabilities = float | Fraction | Sequence[float | Fraction]


_PARTS = 4  # With bounds=None, one of this many equal parts of epsilon is spent on finding bounds.


class Asked(NamedTuple):
    """A statistic of one column, ready to be drawn and paid for.

    Attributes:
        question: the rows and groups that it is about.
        draw: releases it under a key.
        axes: of the arrays of its value, beside the axes of groups.
    """

    question: Question
    draw: Callable[[Key], Release]
    axes: Mapping[str, tuple[Axis, ...]] = types.MappingProxyType({})


class PrivateTable(AskedTable):
    """A table of private rows, and differentially private statistics of its columns.

        with dpjax.Ledger("study.db", epsilon=1.0, delta=1e-6) as ledger:
            table = dpjax.PrivateTable(frame, ledger=ledger, most_rows=100_000)
            table.mean("age", bounds=(18, 90), by={"ward": ["A", "B"]}, epsilon=0.2)

    Arguments that many statistics take:

    - `by`: columns and their public keys, as {"ward": ["A", "B"]}, for every combination of keys.
      Instead of a list of keys you may pass a release of `keys`. Rows with other keys are not
      counted.
    - `where`: a public predicate on one row, written in JAX, such as `lambda row: row["age"] >=
      18`. It gets texts, which can be compared with a text, and numbers, where a missing number is
      NaN.
    - `epsilon`, or `share` of the epsilon of the ledger's budget, or `error`, the half-width of the
      95% interval of each number: exactly one of them. If you give an error, the table computes the
      least epsilon that reaches it.
    - `delta`: None takes the same part of the ledger's delta as of its epsilon. If there is a
      delta, the noise is Gaussian when that is smaller.
    - `bounds`: public bounds to which numbers are clipped. Choose them by what is possible, not by
      the least and the largest number of this table. For several columns, give a dict.
    - `key`: None draws a key from the operating system; give one in tests.

    Args:
        frame: a table of pandas, polars or Arrow, or a dict of columns. Only columns that a
            statistic uses are converted.
        most_rows: a public number that no table's number of rows can exceed.
        ledger: with the budget that pays for all statistics; None uses the open ledger, if there is
            one.
        relation: which tables are neighbors. By default one table has one row more than the other,
            so the number of rows is private.
        missing: "drop" leaves out rows that miss an entry in a column of the statistic. "lower"
            counts a missing number as the lower end of its bounds.
        name: of these rows, for a ledger that pays for several tables.
        person: the column of ids, if a person may have several rows: neighbors differ in all rows
            of a person. None protects a row. A row without an id is not counted.
        rows: how many rows of a person count, public; needed with `person`. The first of the rows
            that a statistic asks about count.
        groups: maps a column to the public number of its groups in which a person counts, in a
            statistic by this column. In each of these groups, `rows` rows of the person count.
        order: a column of numbers that orders the rows, the least first. None takes the order of
            the table.

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
        entries, `where`, and its keys. So an added row moves a statistic by at most the sensitivity
        of its query. Under replace-one the old row may count and the new row not, or the other way
        around; the sensitivity covers that. With `person`, whether a row counts also depends on the
        other rows of the same person, and all rows of a person move a statistic by at most the
        bound in docs/proofs/people.md. Names of columns, dtypes, keys, bounds and predicates are
        public.

        In a ledger each release has a name: the statistic, its columns, and a fingerprint of all
        arguments. The same question, also in a later run of the same program, returns the release
        that was paid for. The name does not depend on the entries of the table: give the ledger
        another `version` after they change.

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
        self._missing = missing
        self._name, self._given, self._ledger = name, frame, ledger
        self._frame = frame_of(frame, self.most_rows)
        self._people = people_of(person, rows, groups, order)
        if self._people is not None and isinstance(self._frame, LargeFrame):
            self._frame.check_ordered()
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
        """The number of rows, in all or in each group.

        Args:
            by: see `PrivateTable`; so are the other arguments.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each count, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of integers, with an axis for each column of `by`.
        """
        asked = self._asked("count", (), by=by, where=where)
        cost = self._cost(epsilon, share, error, delta=delta)
        return self._counted(asked, asked.cells.axes, lambda _, asked: asked.cells, cost, key)

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
            key: a typed key for tests; None draws a new one.

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
        return self._counted(asked, asked.cells.axes, lambda _, asked: asked.cells, cost, key)

    def histogram(
        self,
        column: str,
        buckets: Sequence[End],
        *,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The number of entries of a column in each bucket, in all or in each group.

        Args:
            column: of numbers, by name.
            buckets: public, increasing edges. A bucket includes its lower edge, and the last bucket
                also its upper edge. Numbers outside are not counted; the first edge may be -inf,
                the last one inf.
            by: see `PrivateTable`; so are the other arguments.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each count, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of integers; buckets are the last axis.
        """
        structure = structure_of(self._frame)
        edges = [structure.number(column, edge) for edge in buckets]
        labels, _ = buckets_of(structure[column], edges)
        asked = self._asked("histogram", [column], by=by, where=where, about=labels)
        cost = self._cost(epsilon, share, error, delta=delta)
        axes = (*asked.cells.axes, (column, labels))

        def cells_of(table: AskedTable, asked: Question) -> Cells:
            return asked.cells.split(column, *buckets_of(table._frame[column], edges))

        return self._counted(asked, axes, cells_of, cost, key)

    def sum(
        self,
        column: str,
        *,
        bounds: Bounds | None,
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
            bounds: see `PrivateTable`; so are the other arguments. None takes a quarter of the
                epsilon to find some, by `bounds`; the label says which.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each sum, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of one number for each group.
        """
        cost = self._cost(epsilon, share, error, delta=delta)

        def ask(low: float, high: float, cost: Cost) -> Asked:
            asked = self._asked("sum", [column], by=by, where=where, about=(low, high))
            query = sum_query(lower=low, upper=high, capacity=self.most_rows, missing=self._missing)
            grouped = asked.in_groups(query)
            private = privatize(Unchanging("sum", grouped), cost.cheapest(grouped))
            database = self._records(asked, lambda t, asked: asked.database(t._leaf(column)))
            return Asked(asked, lambda key: private(key, database, name=asked.name))

        return self._within(column, bounds, where, cost, key, ask)

    def mean(
        self,
        column: str,
        *,
        bounds: Bounds | None,
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
            bounds: see `PrivateTable`; so are the other arguments. None takes a quarter of the
                epsilon to find some, by `bounds`; the label says which.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of one number for each group, between the bounds.
        """
        cost = self._cost(epsilon, share, delta=delta)

        def ask(low: float, high: float, cost: Cost) -> Asked:
            asked = self._asked("mean", [column], by=by, where=where, about=(low, high))
            terms = self._terms(asked, cost, _centered_sums(low, high, self.most_rows, 1))
            how = {**terms, "lower": low, "upper": high, "missing": self._missing}
            database = self._records(asked, lambda t, asked: asked.database(t._leaf(column)))
            return Asked(asked, lambda key: private_mean(key, database, **how))

        return self._within(column, bounds, where, cost, key, ask)

    def variance(
        self,
        column: str,
        *,
        bounds: Bounds | None,
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
            bounds: see `PrivateTable`; so are the other arguments. None takes a quarter of the
                epsilon to find some, by `bounds`; the label says which.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"mean": ..., "variance": ...}.
        """
        cost = self._cost(epsilon, share, delta=delta)

        def ask(low: float, high: float, cost: Cost) -> Asked:
            asked = self._asked("variance", [column], by=by, where=where, about=(low, high))
            query = second_moments_query(identity, dims=1, capacity=self.most_rows, in_cube=True)
            terms = self._terms(asked, cost, query)
            how = {**terms, "lower": low, "upper": high, "missing": self._missing}
            database = self._records(asked, lambda t, asked: asked.database(t._leaf(column)))
            return Asked(asked, lambda key: private_variance(key, database, **how))

        return self._within(column, bounds, where, cost, key, ask)

    def quantiles(
        self,
        column: str,
        probabilities: Probabilities,
        *,
        bounds: Bounds | None,
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
            bounds: the range in which quantiles are searched; see `PrivateTable`. None takes a
                quarter of the epsilon to find some, by `bounds`; the label says which.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of numbers; quantiles are the last axis.
        """
        cost = self._cost(epsilon, share, delta=None)
        wanted = tuple(np.atleast_1d(np.asarray(probabilities, object)).tolist())
        exact_probabilities(wanted)  # Refuses a wrong one before bounds are paid for.

        def ask(low: float, high: float, cost: Cost) -> Asked:
            about = low, high, tuple(map(str, wanted))
            asked = self._asked("quantiles", [column], by=by, where=where, about=about)
            how = {
                "lower": low,
                "upper": high,
                "epsilon": cost.price().epsilon,
                "relation": self.relation,
                "name": asked.name,
                "by": asked.by,
                "missing": self._missing,
            }
            database = self._records(asked, lambda t, asked: asked.database(t._leaf(column)))
            axes = {"": (("quantile", tuple(map(float, wanted))),)}
            return Asked(asked, lambda key: private_quantiles(key, database, wanted, **how), axes)

        return self._within(column, bounds, where, cost, key, ask)

    def count_distinct(
        self,
        column: str,
        *,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """How many different entries a column has, in all or in each group.

        Args:
            column: of texts or numbers, by name. Missing entries are not counted.
            by: see `PrivateTable`; so are the other arguments.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            error: of each count, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of integers, with an axis for each column of `by`.
        """
        asked = self._asked("count_distinct", [column], by=by, where=where)
        cells, target = asked.cells, DistinctCount(asked.cells.shape)
        records = {CELL: cells.codes, WORDS: words_of(self._frame[column])}
        known = asked.present & self._frame[column].known
        mechanism = self._cost(epsilon, share, error, delta=delta).cheapest(target)
        private = privatize(target, mechanism)
        database = PaddedRecords(records, known)  # pyright: ignore[reportArgumentType]
        release = self._paid(lambda key: private(key, database, name=asked.name), key)
        return dataclasses.replace(release, labels=Labels(asked.statistic, cells.axes))

    def top(
        self,
        column: str,
        k: int,
        *,
        keys: Any = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The k most frequent keys of a column, the most frequent first.

        Args:
            column: of texts or integers, by name.
            k: how many, at least 1.
            keys: the public keys to choose from. None finds the keys that occur in enough rows, as
                `keys` does, and needs a delta; then there may be fewer than k.
            where: see `PrivateTable`; so are the other arguments.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of a tuple of keys.
        """
        k = _checks.integer("k", k, least=1)
        if keys is None:
            asked = self._asked("top", [column], where=where)
            found = self._known_groups(asked, column, self._cost(epsilon, share, delta=delta), key)
            known, counts = found.value
        else:
            known = keys_of(column, keys)
            asked = self._asked("top", [column], where=where, about=known)
            axes = ((column, known),)

            def cells_of(table: AskedTable, asked: Question) -> Cells:
                del asked
                return Cells(axes, codes_of(table._frame[column], known))

            found = self._counted(
                asked, axes, cells_of, self._cost(epsilon, share, delta=delta), key
            )
            counts = np.asarray(found.value)
        # Each row is in one cell, so all noisy counts together cost one epsilon, and their order
        # costs nothing. Selecting the k keys one by one would split epsilon into k parts.
        places = np.argsort(-counts, kind="stable")[:k]
        value = tuple(known[int(place)] for place in places)
        return Release(value, found.guarantee, labels=Labels(asked.statistic))

    def keys(
        self,
        column: str,
        *,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The keys that occur in enough rows of a column, if the list of keys is private.

        Args:
            column: of texts or integers, by name.
            where: see `PrivateTable`; so are the other arguments.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee, needed where no ledger has one.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of a tuple of keys in increasing order, for `by=`; see
            `dpjax.queries.group_keys`.
        """
        asked = self._asked("keys", [column], where=where)
        found = self._known_groups(asked, column, self._cost(epsilon, share, delta=delta), key)
        return Release(found.value[0], found.guarantee, labels=Labels(asked.statistic))

    def covariance(
        self,
        columns: Sequence[str],
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The averages and the covariances of some columns, in all or in each group.

        Args:
            columns: of numbers, by name.
            bounds: of each column; see `PrivateTable`.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"mean": ..., "covariance": ...}.
        """
        box = box_of(columns, bounds, structure_of(self._frame))
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("covariance", columns, by=by, where=where, about=box.facts)
        facts, words = {**box.facts, "scalar": False}, tuple(columns)
        axes = {
            "mean": (("column", words),),
            "covariance": (("column", words), ("with", words)),
        }

        def ask(key: Key) -> Release:
            return self._of_moments(
                asked, box, cost, key, lambda m: _mean_and_covariance(m, facts), facts
            )

        return self._released(asked, ask, key, axes)

    def correlation(
        self,
        x: str,
        y: str,
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The correlation of two columns, in all or in each group.

        Args:
            x: a column of numbers, by name.
            y: another column of numbers, by name.
            bounds: of each column; see `PrivateTable`.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of numbers in [-1, 1]. Its interval is simulated. It is [-1, 1] if the noise
            could hide that a column is constant.
        """
        box = box_of((x, y), bounds, structure_of(self._frame))
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("correlation", (x, y), by=by, where=where, about=box.facts)
        facts = {**box.facts, "statistic": CORRELATION, "simulated": True}

        def ask(key: Key) -> Release:
            return self._of_moments(asked, box, cost, key, correlation, facts, "bootstrap")

        return self._released(asked, ask, key)

    def pca(
        self,
        columns: Sequence[str],
        *,
        components: int,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Principal components of some columns: directions of the largest variances.

        Args:
            columns: of numbers, by name.
            components: how many, at most as many as columns.
            bounds: of each column; see `PrivateTable`.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"mean": ..., "components": ..., "variances": ...}, where the component
            of the largest variance comes first. Intervals are simulated. If two variances are
            nearly equal, the directions of their components are uncertain, and so their intervals
            are wide.
        """
        box, words = box_of(columns, bounds, structure_of(self._frame)), tuple(columns)
        count = _checks.integer("components", components, least=1, most=len(words))
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("pca", columns, by=by, where=where, about=(box.facts, count))
        facts: dict[str, Any] = {**box.facts, "scalar": False, "statistic": "pca"}
        facts |= {"components": count, "simulated": True}
        each = ("component", tuple(range(1, count + 1)))
        axes = {
            "mean": (("column", words),),
            "components": (each, ("column", words)),
            "variances": (each,),
        }

        def ask(key: Key) -> Release:
            return self._of_moments(
                asked, box, cost, key, lambda m: _directions(m, facts)[0], facts, "bootstrap"
            )

        return self._released(asked, ask, key, axes)

    def regression(
        self,
        y: str,
        x: Sequence[str],
        *,
        bounds: Bounds,
        regularization: float = 0.0,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Least squares with an intercept, in all or in each group.

        Args:
            y: the column that is explained, by name.
            x: the columns that explain it.
            bounds: of y and of each x; see `PrivateTable`.
            regularization: at least 0; the average of x x^T plus this multiple of the identity is
                inverted, in units of the bounds.
            by: columns and their keys.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"weights": ..., "intercept": ...}, in units of the columns. Intervals
            are simulated.
        """
        of_x, of_y = (
            box_of(x, bounds, structure_of(self._frame), in_ball=True),
            box_of([y], bounds, structure_of(self._frame), in_ball=True),
        )
        facts = facts_of_line(of_x, of_y, _checks.non_negative("regularization", regularization))
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("regression", [y, *x], by=by, where=where, about=facts)
        database = self._records(
            asked,
            lambda table, asked: asked.database(
                {"x": of_x.vectors(table._frame), "y": of_y.vectors(table._frame)}
            ),
        )
        query = _line_query(_parts, dims=len(of_x.columns), capacity=self.most_rows)
        terms = Terms(**self._terms(asked, cost, query))
        about: dict[str, Any] = {"what": "linear regression", "kind": "bootstrap", "facts": facts}

        def ask(key: Key) -> Release:
            return released(
                key,
                database,
                lambda _: query,
                lambda query, value, n, scale: line(query, value, n, scale, facts),
                terms=terms,
                **about,
            )

        return self._released(asked, ask, key, {"weights": (("column", tuple(x)),)})

    def k_means(
        self,
        columns: Sequence[str],
        *,
        clusters: int,
        bounds: Bounds,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Centers of clusters of rows, by k-means on numbers in units of their bounds.

        Args:
            columns: of numbers, by name.
            clusters: how many.
            bounds: of each column; see `PrivateTable`.
            where: a predicate.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee, needed where no ledger has one.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"centers": ..., "counts": ...}, see `dpjax.queries.private_k_means`.
        """
        box = box_of(columns, bounds, structure_of(self._frame), in_ball=True)
        price = self._cost(epsilon, share, delta=delta).price()
        if price.delta is None:
            raise ValueError(
                "delta must be above 0 for k-means: give a delta, or a ledger with a delta"
            )
        asked = self._asked("k_means", columns, where=where, about=(box.facts, clusters))
        database = PaddedRecords(box.vectors(self._frame), asked.present)  # pyright: ignore[reportArgumentType]
        how = {"clusters": clusters, "radius": 1.0, "relation": self.relation, "name": asked.name}

        def ask(key: Key) -> Release:
            return private_k_means(
                key, database, epsilon=price.epsilon, delta=price.delta or 0.0, **how
            )

        found = self._paid(ask, key)
        centers = box.middle + box.size * np.asarray(found.value["centers"], np.float64)
        value = {**found.value, "centers": centers.astype(found.value["centers"].dtype)}
        number = ("cluster", tuple(range(1, clusters + 1)))
        axes = (("centers", (number, ("column", tuple(columns)))), ("counts", (number,)))
        labels, accuracy = Labels(asked.statistic, (), axes), found.accuracy
        if accuracy.kind:
            accuracy = accuracy.having(**box.facts)
        return Release(value, found.guarantee, accuracy, labels)

    def synthetic(
        self,
        columns: Sequence[str] | None = None,
        *,
        rows: int,
        keys: Mapping[str, Any] = types.MappingProxyType({}),
        bounds: Bounds | None = None,
        buckets: Buckets = 16,
        workload: Workload = 2,
        keeps_missing: bool = False,
        most_cells: int = 2**20,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """A synthetic table: rows of people who do not exist, with marginals close to the table's.

        AIM measures marginals with noise. A model that fits them chooses the next ones, where it is
        far off. At last rows are drawn from the model.

        Args:
            columns: by name; None for all in `keys`, `bounds` and `buckets`, and all of booleans.
            rows: how many rows to draw, public; any number, at no cost.
            keys: of columns of categories, public, or by a release of keys. Rows with other keys
                count nowhere.
            bounds: of columns of numbers, dates or times; see `PrivateTable`.
            buckets: into how many cells of equal width bounds are divided; or {column: how many} or
                {column: increasing edges}, in place of its bounds. A drawn number is uniform in its
                cell, and whole in a column of integers or dates.
            workload: which marginals are to be near: all of so many columns, or sets of columns, or
                {set: weight}.
            keeps_missing: whether a missing entry is a cell of its own, in columns whose dtype
                allows some. If not, missing entries count as the table says.
            most_cells: of the tables of the model, which bound its memory and time.
            where: a predicate; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            delta: of the guarantee, needed where no ledger has one.
            key: for tests.

        Returns:
            A `Release` of a table of the library of the frame, or of a dict of arrays for a dict.
            Categories come as what they hold, and decimals as floats.

        Raises:
            ValueError: if a column has no public cells, a number is out of range, or no noise fits
                the budget.

        Formal guarantees:
            (epsilon, delta)-DP under the relation, by docs/proofs/synthetic.md. Rows are in cells,
            which are public. A row that is added moves one cell of a marginal by 1. Let a person
            have k rows that count, and 1 without `person`. They move a marginal by at most k in l1
            and l2, or by 2 k and sqrt(2) k under replace-one. The score of a marginal is its
            integer distance from the model in l1, less a public number, times its public weight w.
            So scores move by at most the largest w times that. The exponential mechanism costs
            epsilon'^2 / 8 in zCDP and Gaussian noise (sensitivity / sigma)^2 / 2. A filter admits
            each before it is drawn, and all together cost no more than the budget. The model and
            its rows are post-processing.

        Source:
            McKenna, Mullins, Sheldon and Miklau, "AIM: an adaptive and iterative mechanism for
            differentially private synthetic data" (2022).
        """
        frame, cells = self._frame, self._cells(columns, keys, bounds, buckets, keeps_missing)
        price = self._cost(epsilon, share, delta=delta).price()
        if price.delta is None:
            raise ValueError(
                "delta must be above 0 for a synthetic table: give one, or a ledger with one"
            )
        names = [one.name for one in cells]
        about = (cells, workload_of(names, workload), most_cells)
        asked = self._asked(
            "synthetic", names, where=where, about=about, keeps_missing=keeps_missing
        )
        plan = plan_of_cells(cells, workload, most_cells, asked)
        codes = {
            one.name: np.where(asked.present, one.codes(frame[one.name], self._missing), -1)
            for one in cells
        }

        def ask(key: Key) -> Release:
            how = {"epsilon": price.epsilon, "delta": price.delta or 0.0, "name": asked.name}
            return cells_of_rows(key, codes, plan, rows=rows, **how)

        drawn = self._paid(ask, key)
        value = table_like(frame, cells, drawn.value)
        return Release(value, drawn.guarantee, _OF_MODEL, Labels(asked.statistic))

    def bounds(
        self,
        column: str,
        *,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """A range of a column that holds nearly all of its numbers, between powers of two.

        Numbers are counted between powers of two and their negatives, with noise. The range goes
        from the first to the last bucket whose noisy count exceeds what noise alone would give an
        empty bucket.

        Args:
            column: of numbers, by name.
            where: a predicate; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: of the ledger's epsilon, instead.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of the lower and the upper end; NaN if there are too few numbers to tell.

        Formal guarantees:
            Those of a histogram. With probability .999 the first and the last bucket of the range
            both hold a number. Numbers may lie outside the range: with k buckets, about ln(1000 k)
            / epsilon of them at either end.

        Source:
            Wilson, Zhang, Lam, Desfontaines, Simmons-Marengo and Gipson, "Differentially private
            SQL with bounded user contribution" (2020), for approximate bounds.
        """
        asked = self._asked("bounds", [column], where=where)
        price = self._cost(epsilon, share, delta=None).price()
        query = asked.of_people(histogram_query(BUCKETS))
        sensitivity = query.sensitivity("l1", relation=self.relation)
        mechanism = discrete_laplace(sensitivity, price.epsilon)
        private = privatize(Unchanging("bounds", query), mechanism)
        database = self._records(
            asked,
            lambda table, asked: PaddedRecords(powers_of(table._frame[column]), asked.present),  # pyright: ignore[reportArgumentType]
        )
        counts = self._paid(lambda key: private(key, database, name=asked.name), key)
        ends = jnp.asarray(range_of(np.asarray(counts.value), mechanism), float)
        axes = (("", (("end", ("lower", "upper")),)),)
        labels = Labels(asked.statistic, (), axes, asked.moments)
        return Release(ends, counts.guarantee, Accuracy.of("", {"why": _NO_INTERVAL}), labels)

    def _within(
        self,
        column: str,
        bounds: Bounds | None,
        where: Where | None,
        cost: Cost,
        key: Key | None,
        ask: Callable[[float, float, Cost], Asked],
    ) -> Release:
        """A statistic of numbers that are clipped to bounds, which are found first if not given."""
        if bounds is not None:
            question, draw, axes = ask(*bounds_of(column, bounds, structure_of(self._frame)), cost)
            return self._released(question, draw, key, axes)
        if cost.epsilon is None:
            raise ValueError("bounds must be given for an error: the noise depends on them")
        part, rest = cost.split(_PARTS)
        ask(0.0, 1.0, rest)  # Refuses a statistic that cannot be asked, before bounds are paid for.
        self._check_left("bounds=None", self._asked("bounds", [column], where=where), cost.epsilon)
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        found = self.bounds(column, where=where, epsilon=part, key=keys[0])
        low, high = np.asarray(found.value, np.float64).tolist()
        if not low < high:
            raise ValueError(
                f"bounds=None found no range of column {column!r} at epsilon={part:g}, because too"
                " few rows count: give bounds"
            )
        question, draw, axes = ask(low, high, rest)
        return self._released(question, draw, keys[1], axes, before=found)


def _parts(records: PyTree) -> tuple[Any, Any]:
    """The vectors x and y of a row, whose products a regression line needs."""
    return records["x"], records["y"]
