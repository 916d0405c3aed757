"""Synthetic rows of a table."""

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._labels import Labels
from dpjax._core._types import Key
from dpjax._core._values import Release
from dpjax.accounting._composition import compose
from dpjax.tables._bounds import Bounds
from dpjax.tables._cells import Buckets, cells_of, ends_of, found_in, has_cells
from dpjax.tables._cost import Cost
from dpjax.tables._counts import CountsOfTable
from dpjax.tables._synthetic import (
    Workload,
    cells_of_rows,
    plan_of_cells,
    restricted,
    table_like,
    workload_of,
)
from dpjax.tables._where import Where

_OF_MODEL = Accuracy.of(
    "", {"why": "its rows are drawn from a model, and no row is a real person's"}
)


class SynthesisOfTable(CountsOfTable):
    """Synthetic tables."""

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

        AIM measures marginals with noise. A model that fits the measurements chooses the next
        marginals where the model has a large error. At the end, rows are drawn from the model.

        Args:
            columns: the names of the columns; None for all but the ids of people. A quarter of
                epsilon and delta finds keys or bounds of columns that have none here, unless their
                dtype lists them, as for booleans and an Enum of polars. The label says what was
                found. If nothing is found of a column, it is missing in all rows.
            rows: how many rows to draw; any public number, at no cost.
            keys: the public keys of columns of categories, which may come from a release of keys.
                Rows with other keys are not counted.
            bounds: the bounds of columns of numbers, dates or times; see `PrivateTable`.
            buckets: how many cells of equal width the bounds are divided into; or {column: how
                many} or {column: increasing edges}, instead of its bounds. A drawn number is
                uniform in its cell, and whole in a column of integers or dates.
            workload: which marginals should be accurate: k for all sets of k columns, or a list of
                sets of columns, or {set: weight}.
            keeps_missing: whether a missing entry is a separate cell, in columns whose dtype allows
                missing entries. If not, missing entries count as the table says.
            most_cells: the most cells of the tables of the model, which limits memory and time.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee, required if the ledger has none.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of a table of the frame's library, or of a dict of arrays for a dict.
            Categories become plain values, and decimals become floats.

        Raises:
            ValueError: if no column has cells, a number is out of range, or no noise fits into the
                budget.

        Formal guarantees:
            (epsilon, delta)-DP under the relation, by docs/proofs/synthetic.md, together with the
            releases of keys and bounds. Rows are in cells, which are public or released before. An
            added row changes one cell of a marginal by 1. Let k be the number of rows of a person
            that count, and 1 without `person`. A person changes a marginal by at most k in l1 and
            l2, or by 2 k and sqrt(2) k under replace-one. The score of a marginal is its integer
            distance from the model in l1, minus a public number, times its public weight w. So
            scores change by at most the largest w times the change in l1. The exponential mechanism
            costs epsilon'^2 / 8 in zCDP and Gaussian noise (sensitivity / sigma)^2 / 2. A filter
            accepts each of them before it is drawn, and all together cost no more than the budget.
            The model and its rows are post-processing.

        Source:
            McKenna, Mullins, Sheldon and Miklau, "AIM: an adaptive and iterative mechanism for
            differentially private synthetic data" (2022).
        """
        frame, names = self._frame, self._names(columns)
        cost, wanted = self._cost(epsilon, share, delta=delta), workload_of(names, workload)
        if cost.price().delta is None:
            raise ValueError(
                "delta must be above 0 for a synthetic table: give one, or a ledger with one"
            )
        _checks.integer("rows", rows, least=1, most=2**31 - 1)
        made = functools.partial(cells_of, frame=frame, buckets=buckets, missing=keeps_missing)
        known = {
            name: made(name, keys=keys, bounds=bounds)
            for name in names
            if has_cells(frame[name], frame, keys, bounds, buckets)
        }
        found, rest, key = self._cells_found([x for x in names if x not in known], where, cost, key)
        for name, release in found.items():
            if (given := _given_by(name, release)) is not None:
                known[name] = made(name, **given)
        cells = [known[name] for name in names if name in known]
        if not cells:
            raise ValueError(
                "columns must have keys or bounds, because too few rows count to find any: give"
                f" some of {_checks.shown(names)}"
            )
        here, price = [one.name for one in cells], rest.price()
        wanted = restricted(wanted, here)
        asked = self._asked(
            "synthetic",
            here,
            where=where,
            about=(names, cells, wanted, most_cells),
            keeps_missing=keeps_missing,
        )
        plan = plan_of_cells(cells, wanted, most_cells, asked)
        codes = {
            one.name: np.where(asked.present, one.codes(frame[one.name], self._missing), -1)
            for one in cells
        }

        def ask(key: Key) -> Release:
            how = {"epsilon": price.epsilon, "delta": price.delta or 0.0, "name": asked.name}
            return cells_of_rows(key, codes, plan, rows=rows, **how)

        drawn = self._paid(ask, key)
        value = table_like(frame, names, cells, drawn.value)
        paid = [one.guarantee for one in found.values()]
        guarantee = compose(*paid, drawn.guarantee) if paid else drawn.guarantee
        words = "; ".join([asked.statistic, *map(found_in, found, found.values())])
        return Release(value, guarantee, _OF_MODEL, Labels(words))

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        """The columns of a synthetic table, without the ids of people."""
        person = None if self._people is None else self._people.person
        names = [x for x in self._frame.columns if x != person] if columns is None else columns
        if isinstance(names, str) or not names or len({*names}) < len(names):
            raise ValueError(
                "columns must be distinct names, at least one of them, got"
                f" {_checks.shown(columns)}"
            )
        return list(names)

    def _cells_found(
        self, columns: Sequence[str], where: Where | None, cost: Cost, key: Key | None
    ) -> tuple[dict[str, Release], Cost, Key | None]:
        """Keys or bounds of columns without, found privately; the cost that is left, and a key.

        Texts come first: if their keys cannot be found at all, that is said before any payment.
        """
        if not columns:
            return {}, cost, key
        texts_first = sorted(columns, key=lambda name: not self._frame[name].is_text)
        each, rest = cost.to_find(len(columns))
        price = each.price()
        first = "keys" if self._frame[texts_first[0]].is_text else "bounds"
        question = self._asked(first, texts_first[:1], where=where)
        self._check_left("columns without keys or bounds", question, cost.price().epsilon)
        found = dict[str, Release]()
        for name in texts_first:
            own = None
            if key is not None:
                key, own = jax.random.split(key)
            if self._frame[name].is_text:
                how = {"epsilon": price.epsilon, "delta": price.delta, "key": own}
                found[name] = self.keys(name, where=where, **how)
            else:
                found[name] = self.bounds(name, where=where, epsilon=price.epsilon, key=own)
        return found, rest, key


def _given_by(name: str, found: Release) -> dict[str, Any] | None:
    """The keys or the bounds that were found for a column; None if there are none."""
    if isinstance(found.value, tuple):
        return {"keys": {name: found.value}, "bounds": None} if found.value else None
    ends = ends_of(found)
    return None if ends is None else {"keys": {}, "bounds": {name: ends}}
