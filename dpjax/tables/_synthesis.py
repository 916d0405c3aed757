"""Synthetic rows of a table."""

import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax._core._accuracy import Accuracy
from dpjax._core._labels import Labels
from dpjax._core._types import Key
from dpjax._core._values import Release
from dpjax.tables._asked_table import AskedTable
from dpjax.tables._bounds import Bounds
from dpjax.tables._cells import Buckets
from dpjax.tables._synthetic import Workload, cells_of_rows, plan_of_cells, table_like, workload_of
from dpjax.tables._where import Where

_OF_MODEL = Accuracy.of(
    "", {"why": "its rows are drawn from a model, and no row is a real person's"}
)


class SynthesisOfTable(AskedTable):
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
            columns: the names of the columns; None for all columns in `keys`, `bounds` and
                `buckets`, and all columns of booleans.
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
            ValueError: if a column has no public cells, a number is out of range, or no noise fits
                into the budget.

        Formal guarantees:
            (epsilon, delta)-DP under the relation, by docs/proofs/synthetic.md. Rows are in cells,
            which are public. An added row changes one cell of a marginal by 1. Let k be the number
            of rows of a person that count, and 1 without `person`. A person changes a marginal by
            at most k in l1 and l2, or by 2 k and sqrt(2) k under replace-one. The score of a
            marginal is its integer distance from the model in l1, minus a public number, times its
            public weight w. So scores change by at most the largest w times the change in l1. The
            exponential mechanism costs epsilon'^2 / 8 in zCDP and Gaussian noise (sensitivity /
            sigma)^2 / 2. A filter accepts each of them before it is drawn, and all together cost no
            more than the budget. The model and its rows are post-processing.

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
