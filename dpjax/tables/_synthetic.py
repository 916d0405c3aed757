"""Synthetic tables: rows drawn from a model that is fitted to noisy marginals."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._frames import moments_of
from dpjax._core._guarantee import Guarantee
from dpjax._core._open_ledgers import Request
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key
from dpjax._core._values import Release
from dpjax._tracing._fingerprints import digest
from dpjax.accounting._adaptive import PrivacyFilter
from dpjax.queries._aim import Plan, aim, check_budget, plan_of
from dpjax.queries._graphical_model import Columns, Estimator
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.tables._cells import AnyCells, Categories
from dpjax.tables._frame import Frame
from dpjax.tables._question import Question

Workload: TypeAlias = int | Sequence[Sequence[str]] | Mapping[Sequence[str], float]
"""Sets of columns whose marginals matter, perhaps with weights; or k for all sets of k columns."""

_MOST_COLUMNS = 50
CELLS, BITS = "cells", "bits"


def workload_of(columns: Sequence[str], workload: Workload) -> dict[Columns, float]:
    """The sets of a workload, each in the order of the columns, with their weights."""
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
        raise ValueError("workload must hold at least one set of columns, got none")
    return found


def restricted(wanted: Mapping[Columns, float], columns: Sequence[str]) -> dict[Columns, float]:
    """A workload of fewer columns: each set without the others."""
    found = dict[Columns, float]()
    for given, weight in wanted.items():
        if one := tuple(name for name in given if name in columns):
            found[one] = found.get(one, 0.0) + weight
    return found or {(name,): 1.0 for name in columns}


def plan_of_cells(
    cells: Sequence[AnyCells], wanted: Mapping[Columns, float], most_cells: int, asked: Question
) -> Plan:
    """The marginals that a synthetic table may measure."""
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
    """Releases the cells of synthetic rows, and uniform bits that place entries within cells.

    `codes` contains for each column the cells of the private rows, and -1 for an entry without a
    cell. A row counts if all of its entries have cells.
    """
    rows = _checks.integer("rows", rows, least=1, most=2**31 - 1)
    budget = PrivacyFilter(
        epsilon=epsilon, delta=delta, dims=plan.most_drawn, relation=plan.relation
    )
    check_budget(plan, budget)
    like = plan.reach(next(iter(plan.weights)), "l1")
    promised = Guarantee(
        epsilon,
        delta,
        relation=plan.relation,
        notes=like.notes,
        privacy_unit=like.privacy_unit,
    )
    counts = _Counts(codes, plan)

    def draw() -> dict[str, np.ndarray]:
        model_key, rows_key = jax.random.split(key)
        model = aim(model_key, counts, plan, budget, Estimator(plan.sizes))
        # The model is not private, so a NumPy generator may draw from it.
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

    def request(name: str | None) -> Request | None:
        if name is None:
            return None
        return Request(name, digest("synthetic table", name, about), TreeSpec.of(outputs))

    return pay_and_draw(
        draw,
        key,
        (),
        guarantee=guarantee_under(key, promised),
        what="synthetic table",
        name=name,
        request=request,
    )


class _Counts:
    """The exact counts of marginals, each computed once."""

    def __init__(self, codes: Mapping[str, np.ndarray], plan: Plan) -> None:
        counted = np.all([one >= 0 for one in codes.values()], axis=0)
        self._codes = {name: one[counted].astype(np.int64) for name, one in codes.items()}
        self._plan, self._known = plan, dict[Columns, np.ndarray]()

    def __call__(self, columns: Columns) -> np.ndarray:
        if columns not in self._known:
            shape = tuple(self._plan.sizes[name] for name in columns)
            flat = np.ravel_multi_index([self._codes[name] for name in columns], shape)
            found = np.bincount(flat, minlength=math.prod(shape)).reshape(shape)
            self._known[columns] = found
        return self._known[columns]


def table_like(
    frame: Frame, names: Sequence[str], cells: Sequence[AnyCells], drawn: Mapping[str, Any]
) -> Any:
    """Synthetic rows as a table of the library of the frame, or as a dict of arrays.

    A column without cells is all missing.
    """
    found = dict[str, Any]()
    for place, one in enumerate(cells):
        chosen, bits = (np.asarray(drawn[part])[:, place] for part in (CELLS, BITS))
        entries, known = one.entries(chosen, bits)
        found[one.name] = _in_dtype(frame, one, entries, known)
    rows = len(drawn[CELLS])
    found = {name: found.get(name, _all_missing(frame, name, rows)) for name in names}
    if not all(hasattr(frame.columns[name], "to_native") for name in found):
        return found
    nw = _checks.extra("narwhals", "table")
    series = [_series(nw, frame.columns[name], name, array) for name, array in found.items()]
    return nw.concat([one.to_frame() for one in series], how="horizontal").to_native()


def _all_missing(frame: Frame, name: str, rows: int) -> np.ndarray:
    """Missing entries in the dtype of a column; floats, if it has none of integers or booleans."""
    column = frame[name]
    cells = Categories(name, (), True)
    entries, known = np.zeros(rows), np.zeros(rows, bool)
    if column.is_text or column.may_miss or moments_of(frame.columns[name]) is not None:
        return _in_dtype(frame, cells, entries, known)
    return np.full(rows, np.nan)


def _in_dtype(frame: Frame, cells: AnyCells, entries: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Entries in the dtype of their column, if NumPy has this dtype; otherwise as objects."""
    column = frame[cells.name]
    if column.is_text:
        return np.where(known, entries, np.array(None, object))
    if (moments := moments_of(frame.columns[cells.name])) is not None:
        found = moments.moments(np.where(known, entries.astype(np.float64), np.nan))
        dtype = getattr(frame.columns[cells.name], "dtype", None)
        return found.astype(dtype) if isinstance(dtype, np.dtype) else found
    dtype = column.entries.dtype
    if dtype.kind == "f":
        largest = np.finfo(dtype).max
        return np.where(known, np.clip(entries, -largest, largest), np.nan).astype(dtype)
    if dtype.kind in "iu":
        entries = np.clip(entries, np.iinfo(dtype).min, np.iinfo(dtype).max)
    whole = entries.astype(dtype)
    return np.where(known, whole.astype(object), np.array(None, object)) if cells.missing else whole


def _series(nw: Any, like: Any, name: str, array: np.ndarray) -> Any:
    """An array as a column in the library and dtype of `like`. Categories become plain values."""
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
        array = array.astype(f"{array.dtype.kind}8[{unit}]")  # A coarser unit rounds down.
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
