"""Divides a column into public cells (its categories), and draws entries from cells."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from dpjax._core import _checks
from dpjax._core._frames import moments_of
from dpjax._core._values import Release
from dpjax.tables._bounds import Bounds, End, bounds_of
from dpjax.tables._counts import LEAST
from dpjax.tables._frame import Column, Frame
from dpjax.tables._groups import codes_of, keys_of
from dpjax.targets._clamping import increasing

Buckets: TypeAlias = int | Mapping[str, int | Sequence[End]]
"""The number of buckets of a column of numbers, or the edges of its buckets."""

_BUCKETS = 16
_DRAWN_BITS = 32


@dataclasses.dataclass(frozen=True)
class Categories:
    """The cells of a column of categories with public keys: one cell for each key.

    Attributes:
        name: the name of the column.
        keys: the public keys.
        missing: whether the last cell is for missing entries.
    """

    name: str
    keys: tuple[Any, ...]
    missing: bool

    @property
    def size(self) -> int:
        """The number of cells."""
        return len(self.keys) + self.missing

    def codes(self, column: Column, missing: Literal["drop", "lower"]) -> np.ndarray:
        """Returns the cell of each entry, from this entry alone; -1 for no cell."""
        del missing  # This argument only matters for numbers, which have a lower bound.
        found = codes_of(column, self.keys)
        return np.where(column.known, found, len(self.keys)) if self.missing else found

    def entries(self, cells: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns an entry for each cell, and which of these entries are not missing."""
        del drawn
        known = cells < len(self.keys)
        keys = np.array(self.keys, object if isinstance(self.keys[0], str) else None)
        return keys[np.where(known, cells, 0)], known


@dataclasses.dataclass(frozen=True)
class Ranges:
    """The cells of a column of numbers: intervals between edges, including the lower edge.

    Attributes:
        name: the name of the column.
        edges: the public edges. If numbers are whole, every cell excludes its upper edge.
        whole: whether the dtype contains only whole numbers.
        missing: whether the last cell is for missing entries.
    """

    name: str
    edges: tuple[float, ...]
    whole: bool
    missing: bool

    @property
    def size(self) -> int:
        """The number of cells."""
        return len(self.edges) - 1 + self.missing

    def codes(self, column: Column, missing: Literal["drop", "lower"]) -> np.ndarray:
        """Returns the cell of each entry, or -1 for no cell. Numbers beyond the edges are clipped.

        Each cell is computed from its entry alone. A missing entry is in a separate cell, in the
        first cell, or in no cell.
        """
        ranges = len(self.edges) - 1
        found = np.searchsorted(self.edges, column.numbers(), side="right") - 1
        unknown = ranges if self.missing else (0 if missing == "lower" else -1)
        return np.where(column.known, np.clip(found, 0, ranges - 1), unknown).astype(np.int32)

    def entries(self, cells: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a number from each cell, and a mask that is false where it is missing.

        `drawn` determines the position of the number in its cell.
        """
        known = cells < len(self.edges) - 1
        edges = np.array(self.edges)
        low, high = (edges[np.where(known, cells + at, at)] for at in (0, 1))
        share = drawn / 2.0**_DRAWN_BITS
        if self.whole:
            return np.minimum(low + np.floor(share * (high - low)), high - 1), known
        return low * (1 - share) + high * share, known


AnyCells: TypeAlias = Categories | Ranges


def cells_of(
    name: str,
    frame: Frame,
    keys: Mapping[str, Any],
    bounds: Bounds | None,
    buckets: Buckets,
    missing: bool,
) -> AnyCells:
    """Returns the public cells of a column, from its keys, bounds, edges, or dtype."""
    column = frame[name]
    missing = missing and column.may_miss
    if name in keys:
        return Categories(name, keys_of(name, keys[name], frame), missing)
    if holds_booleans(column):
        return Categories(name, (0, 1), missing)
    if (listed := keys_of_dtype(frame, name)) is not None:
        return Categories(name, listed, missing)
    column.numbers()  # Refuses texts, whose cells must be given as keys.
    whole = column.entries.dtype.kind in "iu" or _are_days(frame, name)
    chosen = buckets.get(name, _BUCKETS) if isinstance(buckets, Mapping) else buckets
    if isinstance(chosen, Sequence):
        edges = increasing(
            f"buckets of column {name!r} must be at least 2 increasing edges",
            [frame.number(name, edge) for edge in chosen],
            least=2,
        ).tolist()
        if not np.all(np.isfinite(edges)):
            raise ValueError(
                f"buckets of column {name!r} must have finite edges, because synthetic numbers "
                f"are drawn between them, got {edges}"
            )
        return Ranges(name, _whole_edges(edges) if whole else tuple(edges), whole, missing)
    low, high = bounds_of(name, bounds or {}, frame)
    count = _checks.integer(f"buckets of column {name!r}", chosen, least=1, most=2**16)
    if not math.isfinite(high - low):
        raise ValueError(
            f"bounds of column {name!r} must differ by less than the largest float, got"
            f" {(low, high)}: use a narrower range, or pass the edges of buckets"
        )
    edges = [low + (high - low) * (j / count) for j in range(count)] + [high]
    return Ranges(name, _whole_edges(edges) if whole else tuple(edges), whole, missing)


def keys_of_dtype(frame: Frame, name: str) -> tuple[str, ...] | None:
    """Returns the keys that a column's dtype lists, as Enum does in polars; None for other dtypes.

    The categories of pandas and Arrow are not used, because these libraries collect them from the
    entries, which are private.
    """
    column = frame.columns[name]
    if not hasattr(column, "to_native") or not column.implementation.is_polars():
        return None
    found = getattr(column.dtype, "categories", None)
    return tuple(found) if found else None


def holds_booleans(column: Column) -> bool:
    """Whether the dtype of a column is boolean."""
    return not column.is_text and column.entries.dtype.kind == "b"


def has_cells(
    column: Column, frame: Frame, keys: Mapping[str, Any], bounds: Bounds | None, buckets: Buckets
) -> bool:
    """Whether the cells of a column are public, because they are given or listed by its dtype."""
    name = column.name
    edges = isinstance(buckets, Mapping) and isinstance(buckets.get(name), Sequence)
    within = bounds is not None and (not isinstance(bounds, Mapping) or name in bounds)
    of_numbers = not column.is_text and (edges or within)
    listed = holds_booleans(column) or keys_of_dtype(frame, name) is not None
    return name in keys or listed or of_numbers


def ends_of(bounds: Release) -> tuple[float, float] | None:
    """Returns the ends of the range that `bounds` found; None if it found no range."""
    low, high = np.asarray(bounds.value, np.float64).tolist()
    # If all the numbers that were found are closer to 0 than `LEAST`, both ends are 0.
    return (low - LEAST, high + LEAST) if low == high else (low, high) if low < high else None


def found_in(name: str, found: Release) -> str:
    """Returns a sentence that states which keys or bounds of a column were found."""
    if isinstance(found.value, tuple):
        return f"{name} in {_checks.shown(found.value)}" if found.value else f"no {name} found"
    if ends_of(found) is None or found.labels is None:
        return f"no {name} found"
    low, high = found.labels.texts(np.asarray(found.value, np.float64))
    return f"{name} in [{low}, {high}]"


def _are_days(frame: Frame, name: str) -> bool:
    moments = moments_of(frame.columns[name])
    return moments is not None and moments.kind == "dates"


def _whole_edges(edges: Sequence[float]) -> tuple[float, ...]:
    """Returns the edges of cells of whole numbers, without cells that contain no whole number.

    A cell excludes its upper edge, except that the last cell includes the last given edge.
    """
    low_to_high = {math.ceil(edge) for edge in edges[:-1]} | {math.floor(edges[-1]) + 1}
    found = sorted(edge for edge in low_to_high if edge <= math.floor(edges[-1]) + 1)
    if len(found) < 2:
        raise ValueError(
            f"bounds must have a whole number between them, got {_checks.shown(edges)}"
        )
    return tuple(map(float, found))
