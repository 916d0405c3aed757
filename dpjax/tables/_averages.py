"""Statistics of one column of a table: sums, averages, variances and quantiles."""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, TypedDict

import jax
import numpy as np

from dpjax._core._records import PaddedRecords, Parts
from dpjax._core._types import Key
from dpjax._core._values import Release
from dpjax.queries._moments import private_mean, private_variance
from dpjax.queries._people import PerPerson
from dpjax.queries._private_quantiles import exact_probabilities, private_quantiles
from dpjax.queries._second_moments import sizes_differ
from dpjax.queries._sums import centered_sums, sum_query
from dpjax.tables._counts import CountsOfTable
from dpjax.tables._float64 import in_float64, mean_of, quantiles_of, sums_in_float64, variance_of
from dpjax.tables._frame import Bounds, bounds_of
from dpjax.tables._groups import By
from dpjax.tables._large_frame import structure_of
from dpjax.tables._question import PARTS, Cost, Question
from dpjax.tables._where import Where

Probabilities = float | Fraction | Sequence[float | Fraction]


class Rows(TypedDict):
    """The arguments of a statistic that say what is counted in which groups."""

    by: By | None
    where: Where | None
    per_person: PerPerson | None


Draw: TypeAlias = Callable[[Key, PaddedRecords | Parts], Release]
"""Releases a statistic of a database."""


class AveragesOfTable(CountsOfTable):
    """Statistics of one column of a table, whose numbers are first clipped to bounds."""

    def sum(
        self,
        column: str,
        *,
        bounds: Bounds | None,
        by: By | None = None,
        where: Where | None = None,
        per_person: PerPerson | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The sum of a column, each number clipped to public bounds, in total or in each group.

        Args:
            column: the name of a column of numbers.
            bounds: public bounds; `PrivateTable` explains all arguments. If None, the method
                `bounds` finds them first, which costs a quarter of epsilon. The label of the
                release shows them.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            per_person: "sum" for a sum of people's sums; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            error: the error of each sum, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of one number for each group.
        """
        cost = self._cost(epsilon, share, error, delta=delta)
        rows: Rows = {"by": by, "where": where, "per_person": per_person}

        def made(asked: Question, cost: Cost, clip: dict[str, Any]) -> Draw:
            query = sum_query(**clip, capacity=self.most_rows)
            private = sums_in_float64(grouped := asked.in_groups(query), cost.cheapest(grouped))
            return functools.partial(private, name=asked.name)

        return self._within("sum", column, bounds, rows, cost, key, made)

    def mean(
        self,
        column: str,
        *,
        bounds: Bounds | None,
        by: By | None = None,
        where: Where | None = None,
        per_person: PerPerson | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The average of a column, each number clipped to public bounds, in total or by group.

        Args:
            column: the name of a column of numbers.
            bounds: public bounds; `PrivateTable` explains all arguments. If None, the method
                `bounds` finds them first, which costs a quarter of epsilon. The label of the
                release shows them.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            per_person: "sum" for an average of people's sums; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of one number for each group, between the bounds.
        """
        cost = self._cost(epsilon, share, delta=delta)
        rows: Rows = {"by": by, "where": where, "per_person": per_person}

        def made(asked: Question, cost: Cost, clip: dict[str, Any]) -> Draw:
            from_ends = sizes_differ(self.relation, asked.by)
            ends = clip["lower"], clip["upper"]
            query = centered_sums(*ends, self.most_rows, 1, from_ends)
            how = {**self._terms(asked, cost, query), **clip}
            return lambda key, database: in_float64(private_mean(key, database, **how), mean_of)

        return self._within("mean", column, bounds, rows, cost, key, made)

    def variance(
        self,
        column: str,
        *,
        bounds: Bounds | None,
        by: By | None = None,
        where: Where | None = None,
        per_person: PerPerson | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The average and the variance of a column, in total or in each group.

        Args:
            column: the name of a column of numbers.
            bounds: public bounds; `PrivateTable` explains all arguments. If None, the method
                `bounds` finds them first, which costs a quarter of epsilon. The label of the
                release shows them.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            per_person: "sum" for the variance of people's sums; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"mean": ..., "variance": ...}.
        """
        cost = self._cost(epsilon, share, delta=delta)
        rows: Rows = {"by": by, "where": where, "per_person": per_person}

        def made(asked: Question, cost: Cost, clip: dict[str, Any]) -> Draw:
            how = {**self._terms(asked, cost, self._query_of_moments(asked, 1)), **clip}
            return lambda key, database: in_float64(
                private_variance(key, database, **how), variance_of
            )

        return self._within("variance", column, bounds, rows, cost, key, made)

    def quantiles(
        self,
        column: str,
        probabilities: Probabilities,
        *,
        bounds: Bounds | None,
        by: By | None = None,
        where: Where | None = None,
        per_person: PerPerson | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Quantiles of a column, in total or in each group.

        Args:
            column: the name of a column of numbers.
            probabilities: the probabilities of the quantiles, each from 0 to 1.
            bounds: the range in which quantiles are searched; see `PrivateTable`. If None, the
                method `bounds` finds it first, which costs a quarter of epsilon. The label of the
                release shows it.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            per_person: "sum" for quantiles of people's sums; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of numbers. The quantiles are along the last axis.
        """
        cost = self._cost(epsilon, share, delta=None)
        wanted = tuple(np.atleast_1d(np.asarray(probabilities, object)).tolist())
        exact_probabilities(wanted)  # Refuses invalid probabilities before paying for bounds.
        rows: Rows = {"by": by, "where": where, "per_person": per_person}

        def made(asked: Question, cost: Cost, clip: dict[str, Any]) -> Draw:
            how = {**clip, "epsilon": cost.price().epsilon, "relation": self.relation}
            how |= {"name": asked.name, "by": asked.by}
            return lambda key, database: in_float64(
                private_quantiles(key, database, wanted, **how), quantiles_of
            )

        return self._within("quantiles", column, bounds, rows, cost, key, made, wanted)

    def _within(
        self,
        statistic: str,
        column: str,
        bounds: Bounds | None,
        rows: Rows,
        cost: Cost,
        key: Key | None,
        made: Callable[[Question, Cost, dict[str, Any]], Draw],
        probabilities: tuple[float | Fraction, ...] = (),
    ) -> Release:
        """Releases a statistic of numbers clipped to bounds.

        If `bounds` is None, a part of the cost pays for a first release that finds bounds. `made`
        returns the function that draws the release, given a question, its cost, and the clipping
        arguments of its query.
        """
        axes = {"": (("quantile", tuple(map(float, probabilities))),)} if probabilities else {}
        texts = (tuple(map(str, probabilities)),) if probabilities else ()

        def ask(low: float, high: float, cost: Cost) -> tuple[Question, Callable[[Key], Release]]:
            asked = self._asked(statistic, [column], about=(low, high, *texts), **rows)
            clip = {"lower": low, "upper": high, "missing": self._missing}
            draw = made(asked, cost, clip)
            database = self._records(asked, lambda t, asked: asked.database(t._leaf(asked, column)))
            return asked, lambda key: draw(key, database)

        if bounds is not None:
            ends = bounds_of(column, bounds, structure_of(self._frame))
            return self._released(*ask(*ends, cost), key, axes)
        if cost.epsilon is None:
            raise ValueError(
                "bounds must be given if the cost is given by error=, because the noise depends "
                "on the bounds"
            )
        part, rest = cost.split(PARTS)
        ask(0.0, 1.0, rest)  # Refuses an invalid statistic before paying for bounds.
        # With `per_person`, there is a sum for each person and group. One range is searched for the
        # sums of all groups.
        if rows["per_person"] and rows["by"]:
            search = self._asked("bounds", [column], about="of all groups", **rows).pooled()
        else:
            search = self._asked("bounds", [column], **{**rows, "by": None})
        self._check_left("bounds=None", search, cost.epsilon)
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        found = self._range(search, column, self._cost(part, None, delta=None), keys[0])
        low, high = np.asarray(found.value, np.float64).tolist()
        if not low < high:
            raise ValueError(
                f"bounds=None found no range of column {column!r} at epsilon={part:g}, because "
                "too few rows are counted: give bounds for this column"
            )
        return self._released(*ask(low, high, rest), keys[1], axes, before=found)
