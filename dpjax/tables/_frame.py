"""The columns of a frame, padded to a public number of slots.

A column is converted when it is used for the first time.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import Numbers, Texts, check_usable, is_column
from dpjax._core._frames import dtype_of, exact_column, moments_of, table_of_columns
from dpjax._core._moments import is_moment
from dpjax._core._records import PaddedRecords
from dpjax._core._types import PyTree
from dpjax.targets._clamping import check_interval

End: TypeAlias = float | datetime.date | datetime.timedelta | np.datetime64 | np.timedelta64
"""A number; or a date, time or duration, for a column of that kind."""

Bounds: TypeAlias = tuple[End, End] | Mapping[str, tuple[End, End]]
"""The bounds of one column, or a dict of the bounds of several columns."""


def numpy_of(*arrays: Any) -> Any:
    """Returns `numpy`, or `jax.numpy` for the columns of simulated tables, which are traced."""
    return jnp if any(map(_checks.is_traced, arrays)) else np


@dataclasses.dataclass(frozen=True)
class Column:
    """One column, padded to the slots of its table.

    Attributes:
        name: the name of the column.
        entries: numbers of shape (slots,); or fingerprints of texts, four words each, of shape
            (slots, 4).
        known: which slots contain an entry that is not missing.
        is_text: whether entries are texts.
        may_miss: whether the dtype of the column allows missing entries.
    """

    name: str
    entries: np.ndarray
    known: np.ndarray
    is_text: bool
    may_miss: bool

    def with_gaps(self) -> PyTree:
        """Returns the column in the form that predicates accept, where a missing number is NaN."""
        if self.is_text:
            return Texts(self.entries)
        if self.entries.dtype.kind == "f" or not self.may_miss:
            return self.entries
        return Numbers.of(self.entries, self.known)

    def numbers(self) -> np.ndarray:
        """Returns the entries in float64. Refuses texts."""
        if self.is_text:
            raise TypeError(
                f"column {self.name!r} must hold numbers for this statistic, got texts: convert "
                "the column to numbers, or count its texts by passing the column and its keys as "
                "by=. A pandas column of dtype object counts as texts, too: convert it by "
                'pandas.to_numeric, pandas.to_datetime or .astype("boolean")'
            )
        if _checks.is_traced(self.entries):
            return self.entries.astype(jnp.result_type(float))
        return self.entries.astype(np.float64)

    def numbers_or_nan(self) -> np.ndarray:
        """Returns the entries in float64, with NaN for missing entries. Refuses texts."""
        return numpy_of(self.known).where(self.known, self.numbers(), np.nan)


class Frame:
    """A frame of any library, or a dict of columns. Columns are converted when they are used."""

    _filled: Any = None  # Which slots contain a row, if the frame is a `PaddedRecords`.

    def __init__(self, frame: Any, most_rows: int) -> None:
        """Reads the names and lengths of columns, but no entries."""
        records = frame.records if isinstance(frame, PaddedRecords) else frame
        self.columns: Mapping[str, Any] = table_of_columns("frame", records)
        self.slots = most_rows
        lengths = {name: _length(name, leaf) for name, leaf in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"frame must have columns of one length, got {_checks.shown(lengths)}")
        self.rows = next(iter(lengths.values()))
        if self.rows > most_rows:
            raise ValueError(
                f"most_rows must be enough for every possible table, got {most_rows} for "
                f"{self.rows} rows"
            )
        self._filled = frame.present if isinstance(frame, PaddedRecords) else None
        self._converted: dict[str, Column] = {}

    def number(self, name: str, moment: Any) -> float:
        """Converts a public bound, which may be a date, time or duration, to a number.

        Raises:
            TypeError: if the bound is of another kind than the column.
        """
        if isinstance(moment, (int, float)) or name not in self.columns:
            return moment
        moments = moments_of(self.columns[name])
        if moments is not None:
            return moments.number(moment)
        if is_moment(moment):
            raise TypeError(
                f"column {name!r} must hold dates, times or durations to be compared with "
                f"{moment!r}, got the dtype {dtype_of(self.columns[name])}: convert it by "
                "pandas.to_datetime or pandas.to_timedelta, or by the cast of your library"
            )
        return moment

    def kind_of(self, name: str) -> str:
        """Returns "dates", "times" or "durations" for a column of these, and "" for others."""
        moments = moments_of(self._as_given(name))
        return "" if moments is None else moments.kind

    @property
    def present(self) -> Any:
        """Which slots contain a row."""
        if self._filled is None:
            return np.arange(self.slots) < self.rows
        xp = numpy_of(self._filled)
        return xp.pad(xp.asarray(self._filled), (0, self.slots - self.rows))

    @property
    def used(self) -> list[str]:
        """Returns the names of the columns that have been used."""
        return list(self._converted)

    def __getitem__(self, name: str) -> Column:
        """Returns the column of this name, and converts it if it was not used before."""
        if name not in self._converted:
            self._converted[name] = self._padded(name)
        return self._converted[name]

    def _as_given(self, name: str) -> Any:
        """Returns a column of the frame without converting it.

        Refuses a name that the frame does not have.
        """
        if name not in self.columns:
            raise ValueError(
                f"column must be one of the frame's {_checks.shown(list(self.columns))}, got"
                f" {_checks.shown(name)}"
            )
        return self.columns[name]

    def _padded(self, name: str) -> Column:
        entries, found = _exact(f"column {name!r}", self._as_given(name))
        xp = numpy_of(entries)
        known = np.ones(entries.shape, bool) if found is None else found
        if known.shape != (self.rows,):
            raise ValueError(
                f"column {name!r} must hold one entry for each row, got the shape {known.shape}"
            )
        empty = self.slots - self.rows
        padded = xp.concatenate([entries, np.zeros((empty, *entries.shape[1:]), entries.dtype)])
        there = xp.concatenate([known, np.zeros(empty, bool)])
        return Column(name, padded, there, entries.ndim > 1, found is not None)


def _length(name: str, leaf: Any) -> int:
    try:
        return leaf.shape[0] if is_column(leaf) else len(leaf)
    except TypeError as error:
        raise TypeError(
            f"column {name!r} must be an array or a column of a table, got"
            f" {_checks.described(leaf)}"
        ) from error


def _exact(place: str, leaf: Any) -> tuple[Any, Any]:
    """Returns a column's entries on the host, and a mask of those that are not missing.

    The mask is None if the dtype has no missing entries.
    """
    # NumPy would choose the dtype of a list by its entries, which are private.
    if isinstance(leaf, (list, tuple)):
        raise TypeError(
            f"{place} must be an array with a dtype, got a {type(leaf).__name__}: make an array "
            "by numpy.array(entries, dtype=...), with a float dtype if entries may be missing"
        )
    found = exact_column(place, leaf)
    check_usable(found)
    if isinstance(found, Texts):
        words = found.words if _checks.is_traced(found.words) else np.asarray(found.words)
        return words, numpy_of(words).any(words != 0, axis=-1)
    if _checks.is_traced(found):
        return found, ~jnp.isnan(found) if jnp.issubdtype(found.dtype, jnp.floating) else None
    if isinstance(found, Numbers):
        numbers, known = found.on_host()
    else:
        _checks.refuse_foreign_dtype(place, found)
        numbers, known = np.asarray(found), None
    if isinstance(found, jax.Array) and numbers.dtype.kind == "V":  # Such as bfloat16.
        numbers = numbers.astype(np.float32)
    if numbers.dtype.kind not in "iufb":
        raise TypeError(f"{place} must hold numbers or texts, got the dtype {numbers.dtype}")
    if numbers.dtype.kind == "f":
        known = ~np.isnan(numbers)
    return numbers.astype(numbers.dtype.newbyteorder("=")), known


def bounds_of(column: str, bounds: Bounds, frame: Frame) -> tuple[float, float]:
    """Returns the bounds of one column, which may be dates, times or durations, as numbers."""
    if isinstance(bounds, Mapping):
        if column not in bounds:
            raise ValueError(
                f"bounds must contain bounds of column {column!r}, got bounds of "
                f"{_checks.shown(list(bounds))}"
            )
        bounds = bounds[column]
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(
            f"bounds of column {column!r} must be its lower and its upper end, as (0, 100), got"
            f" {_checks.shown(bounds)}"
        )
    low, high = (frame.number(column, end) for end in bounds)
    check_interval(low, high)
    return float(low), float(high)
