"""Synthetic tables: rows drawn from a model that is fitted to noisy marginals."""

import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._frames import moments_of
from dpjax._core._guarantee import Guarantee
from dpjax._core._labels import Labels
from dpjax._core._open_ledgers import Request
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key
from dpjax._core._values import Release
from dpjax._tracing._fingerprints import digest
from dpjax.accounting._adaptive import PrivacyFilter
from dpjax.accounting._composition import compose
from dpjax.queries._aim import Columns, Estimator, Plan, aim, check_budget, plan_of
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.tables._cells import AnyCells, Buckets, cells_of
from dpjax.tables._counts import LEAST, CountsOfTable
from dpjax.tables._frame import Bounds, Frame
from dpjax.tables._question import Cost, Question
from dpjax.tables._where import Where

Workload: TypeAlias = int | Sequence[Sequence[str]] | Mapping[Sequence[str], float]
"""Sets of columns whose marginals matter, perhaps with weights; or k for all sets of k columns."""

_MOST_COLUMNS = 50
CELLS, BITS = "cells", "bits"

_OF_MODEL = Accuracy.of(
    "", {"why": "its rows are drawn from a model, and no row is a real person's"}
)


class SynthesisOfTable(CountsOfTable):
    """Adds `synthetic` to a table."""

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

        AIM measures marginals with noise. It fits a model to the measurements, and next measures
        marginals where this model has a large error. At the end, rows are drawn from the model.

        Args:
            columns: the names of the columns; None for all but the ids of people. The cells of a
                column are known if `keys`, `bounds` or `buckets` give them, or if its dtype lists
                its keys, such as booleans or an Enum of polars. For all other columns, a quarter of
                epsilon and delta pays for finding keys or bounds. The label of the release lists
                the keys and bounds. If none are found, a column's entries are missing in all rows.
            rows: how many rows to draw; any public number, at no cost.
            keys: the public keys of columns of categories, which may come from a release of keys.
                Rows with other keys are not counted.
            bounds: the bounds of columns of numbers, dates or times; see `PrivateTable`.
            buckets: the number of cells of equal width between the bounds; or a dict that maps a
                column to its number of cells, or to increasing edges that replace its bounds. A
                drawn number is uniform in its cell, and whole in a column of integers or dates.
            workload: which marginals should be accurate: k for all sets of k columns, or a list of
                sets of columns, or {set: weight}.
            keeps_missing: whether a missing entry is a separate cell, in columns whose dtype allows
                missing entries. If not, the argument `missing` of the table applies.
            most_cells: the largest number of cells in all tables of the model. It limits memory and
                time.
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
            releases of keys and bounds. The cells of rows are public or were released before. An
            added row changes one cell of a marginal by 1. Let k be the number of rows of a person
            that count, and 1 without `person`. A person changes a marginal by at most k in l1 and
            l2, or by 2 k and sqrt(2) k under replace-one. The score of a marginal is its integer
            distance from the model in l1, minus a public number, times its public weight w. So
            scores change by at most the largest w times the change in l1. The exponential mechanism
            costs epsilon'^2 / 8 in zCDP and Gaussian noise (sensitivity / sigma)^2 / 2. A privacy
            filter accepts each selection and each measurement before it is drawn, so all of them
            together cost no more than the budget. The model and its rows are post-processing.

        Source:
            McKenna, Mullins, Sheldon and Miklau, "AIM: an adaptive and iterative mechanism for
            differentially private synthetic data" (2022).
        """
        frame, names = self._frame, self._names(columns)
        cost, wanted = self._cost(epsilon, share, delta=delta), workload_of(names, workload)
        cost.with_delta("for a synthetic table")
        rows = _checks.integer("rows", rows, least=1, most=2**31 - 1)
        made = functools.partial(cells_of, frame=frame, buckets=buckets, missing=keeps_missing)
        known = {name: made(name, keys=keys, bounds=bounds) for name in names}
        unknown = [name for name, cells in known.items() if cells is None]
        found, rest, key = self._cells_found(unknown, where, cost, key)
        sentences: list[str] = []
        for name, release in found.items():
            given, sentence = _found(name, release)
            known[name] = made(name, **given) if given else None
            sentences.append(sentence)
        cells = [one for one in known.values() if one is not None]
        if not cells:
            raise ValueError(
                "columns must have keys or bounds, but none were given, and too few rows are used "
                "to find them privately: give keys or bounds for some of "
                f"{_checks.shown(names)}"
            )
        here = [one.name for one in cells]
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

        epsilon, delta = rest.with_delta("for a synthetic table")
        drawn = self._paid(
            lambda key: cells_of_rows(
                key, codes, plan, rows=rows, epsilon=epsilon, delta=delta, name=asked.name
            ),
            key,
        )
        value = table_like(frame, names, cells, drawn.value)
        paid = [one.guarantee for one in found.values()]
        guarantee = compose(*paid, drawn.guarantee) if paid else drawn.guarantee
        words = "; ".join([asked.statistic, *sentences])
        return Release(value, guarantee, _OF_MODEL, Labels(words))

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        """Returns the columns of a synthetic table, without the ids of people."""
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
        """Finds missing keys or bounds privately. Returns them, the remaining cost, and a new key.

        Columns of texts are searched first. So if their keys cannot be found at all, the error is
        raised before any payment.
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


def _found(name: str, release: Release) -> tuple[dict[str, Any] | None, str]:
    """Returns the keys or bounds that a release found for a column, and a phrase that states them.

    The keys or bounds are None if nothing was found.
    """
    if isinstance(release.value, tuple):
        if release.value:
            keys = {name: release.value}
            return {"keys": keys, "bounds": None}, f"{name} in {_checks.shown(release.value)}"
    else:
        ends = np.asarray(release.value, np.float64)
        low, high = ends.tolist()
        if low <= high:
            # If all the numbers that were found are closer to 0 than `LEAST`, both ends are 0.
            wider = LEAST if low == high else 0.0
            texts = (release.labels or Labels("")).texts(ends)
            given = {"keys": {}, "bounds": {name: (low - wider, high + wider)}}
            return given, f"{name} in [{', '.join(texts)}]"
    return None, f"no {name} found"


def workload_of(columns: Sequence[str], workload: Workload) -> dict[Columns, float]:
    """Returns the column sets of a workload, in the order of `columns`, with their weights."""
    if isinstance(workload, int):
        degree = _checks.integer("workload", workload, least=1, most=4)
        degree = min(degree, len(columns))
        return dict.fromkeys(itertools.combinations(columns, degree), 1.0)
    weights = (
        workload if isinstance(workload, Mapping) else dict.fromkeys(map(tuple, workload), 1.0)
    )
    found = dict[Columns, float]()
    for given, weight in weights.items():
        one = (given,) if isinstance(given, str) else tuple(given)
        if not one or len({*one} & {*columns}) < len(one):
            raise ValueError(
                f"workload must hold sets of the columns {_checks.shown(list(columns))}, got"
                f" {_checks.shown(given)}"
            )
        ordered = tuple(name for name in columns if name in one)
        found[ordered] = found.get(ordered, 0.0) + _checks.positive("weight of a workload", weight)
    if not found:
        raise ValueError("workload must contain at least one set of columns, got none")
    return found


def restricted(wanted: Mapping[Columns, float], columns: Sequence[str]) -> dict[Columns, float]:
    """Removes all columns that are not in `columns` from the sets of a workload."""
    found = dict[Columns, float]()
    for given, weight in wanted.items():
        if one := tuple(name for name in given if name in columns):
            found[one] = found.get(one, 0.0) + weight
    return found or {(name,): 1.0 for name in columns}


def plan_of_cells(
    cells: Sequence[AnyCells], wanted: Mapping[Columns, float], most_cells: int, asked: Question
) -> Plan:
    """Returns the `Plan` of AIM: the marginals that it may measure for a synthetic table."""
    sizes = {one.name: one.size for one in cells}
    if len(sizes) > _MOST_COLUMNS:
        raise ValueError(f"columns must be at most {_MOST_COLUMNS}, got {len(sizes)}")
    most_cells = _checks.integer("most_cells", most_cells, least=1, most=2**27)
    if (largest := max(sizes.values())) > most_cells:
        raise ValueError(
            f"most_cells must be at least {largest}, the largest number of cells of a column, got"
            f" {most_cells}"
        )
    return plan_of(sizes, wanted, most_cells, asked.relation, asked.of_people)


def cells_of_rows(
    key: Key,
    codes: Mapping[str, np.ndarray],
    plan: Plan,
    *,
    rows: int,
    epsilon: float,
    delta: float,
    name: str,
) -> Release:
    """Releases the cells of synthetic rows, and random bits that determine positions in cells.

    `codes` maps each column to the cells of the private rows, where -1 means no cell. A row counts
    if all of its entries have cells.
    """
    budget = PrivacyFilter(
        epsilon=epsilon, delta=delta, dims=plan.most_drawn, relation=plan.relation
    )
    check_budget(plan, budget)
    like = plan.reach(next(iter(plan.weights)), "l1")
    promised = Guarantee(
        epsilon, delta, relation=plan.relation, notes=like.notes, privacy_unit=like.privacy_unit
    )
    counts = _counts_of(codes, plan)

    def draw() -> dict[str, np.ndarray]:
        model_key, rows_key = jax.random.split(key)
        model = aim(model_key, counts, plan, budget, Estimator(plan.sizes))
        # The model is public (it is post-processing of noisy counts), so a NumPy generator may draw
        # from it.
        seed = np.asarray(jax.random.bits(rows_key, (8,), np.uint32))
        rng = np.random.default_rng(seed.tolist())
        found = model.rows(rng, rows)
        bits = rng.integers(2**32, size=(rows, len(plan.sizes)), dtype=np.uint32)
        return {CELLS: np.stack([found[one] for one in plan.sizes], axis=1), BITS: bits}

    shape = (rows, len(plan.sizes))
    outputs = {
        CELLS: jax.ShapeDtypeStruct(shape, jnp.int32),
        BITS: jax.ShapeDtypeStruct(shape, jnp.uint32),
    }
    about = (str(plan.relation), epsilon, delta, like.privacy_unit, shape)
    request = Request(name, digest("synthetic table", name, about), TreeSpec.of(outputs))
    return pay_and_draw(
        draw,
        key,
        (),
        guarantee=guarantee_under(key, promised),
        what="synthetic table",
        name=name,
        request=lambda _: request,
    )


def _counts_of(codes: Mapping[str, np.ndarray], plan: Plan) -> Callable[[Columns], np.ndarray]:
    """Returns a function that computes exact counts of marginals, each only once."""
    counted = np.all([one >= 0 for one in codes.values()], axis=0)
    kept = {name: one[counted].astype(np.int64) for name, one in codes.items()}

    @functools.cache
    def counts(columns: Columns) -> np.ndarray:
        shape = tuple(plan.sizes[name] for name in columns)
        flat = np.ravel_multi_index([kept[name] for name in columns], shape)
        return np.bincount(flat, minlength=math.prod(shape)).reshape(shape)

    return counts


def table_like(
    frame: Frame, names: Sequence[str], cells: Sequence[AnyCells], drawn: Mapping[str, Any]
) -> Any:
    """Converts synthetic rows to a table of the frame's library, or to a dict of arrays.

    All entries of a column without cells are missing.
    """
    found = dict[str, Any]()
    for place, one in enumerate(cells):
        chosen, bits = (np.asarray(drawn[part])[:, place] for part in (CELLS, BITS))
        entries, known = one.entries(chosen, bits)
        found[one.name] = _in_dtype(frame, one.name, entries, known, missing=one.missing)
    rows = len(drawn[CELLS])
    found = {name: found.get(name, _all_missing(frame, name, rows)) for name in names}
    if not all(hasattr(frame.columns[name], "to_native") for name in found):
        return found
    nw = _checks.extra("narwhals", "table")
    series = [_series(nw, frame.columns[name], name, array) for name, array in found.items()]
    return nw.concat([one.to_frame() for one in series], how="horizontal").to_native()


def _all_missing(frame: Frame, name: str, rows: int) -> np.ndarray:
    """Returns `rows` missing entries for a column. They are NaN if its dtype has none."""
    column = frame[name]
    if column.is_text or column.may_miss or moments_of(frame.columns[name]) is not None:
        return _in_dtype(frame, name, np.zeros(rows), np.zeros(rows, bool), missing=True)
    return np.full(rows, np.nan)


def _in_dtype(
    frame: Frame, name: str, entries: np.ndarray, known: np.ndarray, *, missing: bool
) -> np.ndarray:
    """Converts entries to the dtype of their column if NumPy has it, or else to objects."""
    column = frame[name]
    if column.is_text:
        return np.where(known, entries, np.array(None, object))
    if (moments := moments_of(frame.columns[name])) is not None:
        found = moments.moments(np.where(known, entries.astype(np.float64), np.nan))
        dtype = getattr(frame.columns[name], "dtype", None)
        return found.astype(dtype) if isinstance(dtype, np.dtype) else found
    dtype = column.entries.dtype
    if dtype.kind == "f":
        largest = np.finfo(dtype).max
        return np.where(known, np.clip(entries, -largest, largest), np.nan).astype(dtype)
    if dtype.kind in "iu":
        entries = np.clip(entries, np.iinfo(dtype).min, np.iinfo(dtype).max)
    whole = entries.astype(dtype)
    return np.where(known, whole.astype(object), np.array(None, object)) if missing else whole


def _series(nw: Any, like: Any, name: str, array: np.ndarray) -> Any:
    """Converts an array to a column in the library and dtype of `like`, except for categoricals."""
    library, dtype = like.implementation, like.dtype
    if dtype in (nw.Categorical, nw.Enum) or dtype.is_decimal():
        dtype = None
    if library.is_pandas():
        return nw.from_native(_pandas_series(like.to_native(), name, array), series_only=True)
    if array.dtype.kind == "O":
        of_texts = dtype is None or dtype == nw.Object
        return nw.new_series(
            name, array.tolist(), nw.String if of_texts else dtype, backend=library
        )
    if array.dtype.kind not in "mM":
        return nw.new_series(name, array, dtype, backend=library)
    if (unit := getattr(dtype, "time_unit", None)) is not None:
        # Conversion to a coarser unit rounds down.
        array = array.astype(f"{array.dtype.kind}8[{unit}]")
    found = nw.new_series(name, array.astype(f"{array.dtype.kind}8[us]"), backend=library)
    if (zone := getattr(dtype, "time_zone", None)) is not None:
        found = found.dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    return found if dtype is None else found.cast(dtype)


def _pandas_series(like: Any, name: str, array: np.ndarray) -> Any:
    pandas, dtype = _checks.extra("pandas", "sweep"), like.dtype
    without_missing = isinstance(dtype, np.dtype) and dtype.kind in "iub"
    if isinstance(dtype, pandas.CategoricalDtype) or (without_missing and array.dtype.kind == "f"):
        dtype = None
    if array.dtype.kind == "M" and (zone := getattr(dtype, "tz", None)) is not None:
        return (
            pandas.Series(array, name=name).dt.tz_localize("UTC").dt.tz_convert(zone).astype(dtype)
        )
    return pandas.Series(array, name=name, dtype=dtype)
