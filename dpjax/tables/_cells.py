"""Divides a column into public cells (its categories), and draws entries from cells."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from dpjax._core import _checks
from dpjax.tables._frame import Bounds, Column, End, Frame, bounds_of
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
) -> AnyCells | None:
    """Returns the public cells of a column, from its keys, bounds, edges, or dtype.

    Returns None if no cells are given for the column, and its dtype lists none.
    """
    column = frame[name]
    missing = missing and column.may_miss
    if name in keys:
        return Categories(name, keys_of(name, keys[name], frame), missing)
    if not column.is_text and column.entries.dtype.kind == "b":
        return Categories(name, (0, 1), missing)
    if (listed := keys_of_dtype(frame, name)) is not None:
        return Categories(name, listed, missing)
    if column.is_text:
        return None  # The cells of texts must be given as keys.
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
    elif bounds is None or (isinstance(bounds, Mapping) and name not in bounds):
        return None
    else:
        low, high = bounds_of(name, bounds, frame)
        count = _checks.integer(f"buckets of column {name!r}", chosen, least=1, most=2**16)
        if not math.isfinite(high - low):
            raise ValueError(
                f"bounds of column {name!r} must differ by less than the largest float, got"
                f" {(low, high)}: use a narrower range, or pass the edges of buckets"
            )
        edges = [low + (high - low) * (j / count) for j in range(count)] + [high]
    whole = column.entries.dtype.kind in "iu" or frame.kind_of(name) == "dates"
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
