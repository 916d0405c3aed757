"""Groups of rows: maps each row to a group by the public keys of one or several columns."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import fingerprints
from dpjax._core._frames import moments_of
from dpjax._core._labels import Axis
from dpjax._core._moments import is_moment
from dpjax._core._records import PaddedRecords
from dpjax._core._values import Release
from dpjax.queries._group_keys import words_of_integers
from dpjax.queries._groups import groups
from dpjax.queries._totals import LARGEST
from dpjax.tables._frame import Column, Frame, numpy_of
from dpjax.targets._clamping import increasing

By: TypeAlias = Mapping[str, Any]
"""Columns by name, each with its public keys, or with a release of keys."""


@dataclasses.dataclass(frozen=True)
class Cells:
    """Groups of rows, called cells: one for each combination of keys; one if no column is given.

    Attributes:
        axes: the columns with their keys.
        codes: the cell of every slot; -1 if the slot is in no cell.
    """

    axes: tuple[Axis, ...]
    codes: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the number of keys of each column."""
        return tuple(len(keys) for _, keys in self.axes)

    @property
    def size(self) -> int:
        """Returns the number of cells."""
        return math.prod(self.shape)

    @property
    def groups(self) -> list[Any]:
        """Returns the key of each cell, or a tuple of its keys for several columns."""
        every = list(itertools.product(*(keys for _, keys in self.axes)))
        return [one[0] for one in every] if len(self.axes) == 1 else every

    def split(self, name: str, labels: tuple[Any, ...], codes: np.ndarray) -> "Cells":
        """Divides each cell along another axis.

        `codes` contains the index of every slot on the new axis.
        """
        inside, xp = (self.codes >= 0) & (codes >= 0), numpy_of(codes)
        wide = self.codes.astype(np.int64) if xp is np else self.codes
        deeper = xp.where(inside, wide * len(labels) + codes, -1)
        if self.size * len(labels) > LARGEST:
            raise ValueError(
                f"keys must make at most {LARGEST} cells, got {self.size} x {len(labels)} cells: "
                "use fewer keys, or group by fewer columns"
            )
        return Cells((*self.axes, (name, labels)), deeper.astype(np.int32))


def cells_by(by: By | None, frame: Frame) -> Cells:
    """Returns the cells for the groups `by`. The first column is the outermost axis."""
    found = Cells((), np.zeros(frame.slots, np.int32))
    if by is None:
        return found
    if not isinstance(by, Mapping) or not by:
        raise TypeError(
            'by must be a dict from columns to public keys, as {"cut": ["Fair", "Ideal"]}, got'
            f" {_checks.shown(by)}"
        )
    for name, given in by.items():
        keys = keys_of(name, given, frame)
        found = found.split(name, labels_of(name, keys, frame), codes_of(frame[name], keys))
    return found


def words_in_groups(cells: Cells, column: Column, present: np.ndarray) -> PaddedRecords:
    """Returns words that identify the entry of each row, and its group if there are groups.

    The words of a row depend on this row alone. Rows without an entry or a group do not count.
    """
    if column.is_text:
        words, known = column.entries, column.known
    else:
        numbers, known = as_int64(column)
        words = words_of_integers(numbers)
    if cells.axes:
        words = np.concatenate([cells.codes[:, None].astype(np.uint32), words], axis=1)
    return PaddedRecords(words, present & known & (cells.codes >= 0))  # pyright: ignore[reportArgumentType]


def keys_in_groups(
    cells: Cells, found: tuple[Sequence[str], np.ndarray], are_texts: bool
) -> dict[Any, tuple[tuple[Any, ...], np.ndarray]]:
    """Returns the keys of each group and their counts.

    `found` contains texts and their counts. Each text is the index of a group, a space and a key.
    """
    pairs = {group: list[tuple[Any, int]]() for group in cells.groups}
    for text, count in zip(*found, strict=True):
        code, _, entry = text.partition(" ")
        pairs[cells.groups[int(code)]].append((entry if are_texts else int(entry), int(count)))
    ordered = {group: sorted(each) for group, each in pairs.items()}
    return {
        group: (tuple(key for key, _ in each), np.array([n for _, n in each], np.int32))
        for group, each in ordered.items()
    }


def keys_of(name: str, given: Any, frame: Frame) -> tuple[int, ...] | tuple[str, ...]:
    """Returns the public keys of a column, given as a list or a release. Dates become integers."""
    keys = given.value if isinstance(given, Release) else given
    if frame.kind_of(name) or (isinstance(keys, (list, tuple)) and any(map(is_moment, keys))):
        keys = [_whole_key(name, frame.number(name, key)) for key in keys]
    return groups(name, keys).keys


def _whole_key(name: str, number: Any) -> Any:
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"keys of column {name!r} must be whole days or seconds, got {number}")
    return int(number) if isinstance(number, float) else number


def labels_of(name: str, keys: tuple[Any, ...], frame: Frame) -> tuple[Any, ...]:
    """Returns the printed labels of groups: their keys, with dates and times as texts."""
    moments = moments_of(frame.columns[name]) if frame.kind_of(name) else None
    if moments is None or moments.kind == "durations":
        return keys
    unit = "D" if moments.kind == "dates" else "s"
    return tuple(np.datetime_as_string(moments.moments(keys), unit=unit).tolist())


def codes_of(column: Column, keys: tuple[int, ...] | tuple[str, ...]) -> np.ndarray:
    """Returns the index of each entry in `keys`, or -1 if it is not there.

    The keys are public. The index of an entry does not depend on other entries.
    """
    if isinstance(keys[0], str) != column.is_text:
        kind = "texts" if column.is_text else "numbers"
        raise TypeError(
            f"keys of column {column.name!r} must be {kind}, as in the column, got"
            f" {_checks.shown(keys)}"
        )
    if _checks.is_traced(column.entries):
        return _traced_codes(column, keys)
    if column.is_text:
        # Fingerprints are compared as bytes. Equal fingerprints count as equal texts.
        found = index_of_words(column.entries, fingerprints(keys))
        known = column.known
    else:
        groups(column.name, keys)._check_held_by(column.entries.dtype)
        entries, known = as_int64(column)
        found = _index_of(entries, np.array(keys, np.int64))
    return np.where(known, found, -1).astype(np.int32)


def index_of_words(entries: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the index of each text of `entries` in `wanted`, or -1 if it is not there.

    Both arrays contain the fingerprints of texts.
    """
    return _index_of(_as_bytes(entries), _as_bytes(wanted))


def _index_of(entries: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    order = np.argsort(wanted)
    place = np.minimum(np.searchsorted(wanted[order], entries), len(wanted) - 1)
    return np.where(wanted[order[place]] == entries, order[place], -1)


def _traced_codes(column: Column, keys: tuple[int, ...] | tuple[str, ...]) -> Any:
    """Returns the codes of a simulated (traced) column, by comparing entries with every key."""
    if column.is_text:
        words = jnp.asarray(fingerprints(keys))
        equal = jnp.all(column.entries[:, None, :] == words[None], axis=-1)
    else:
        groups(column.name, keys)._check_held_by(column.entries.dtype)
        equal = column.entries[:, None] == jnp.asarray(keys, column.entries.dtype)[None]
    found = equal & column.known[:, None]
    return jnp.where(jnp.any(found, axis=1), jnp.argmax(found, axis=1), -1).astype(jnp.int32)


def _as_bytes(words: np.ndarray) -> np.ndarray:
    """Views each fingerprint as one array entry of bytes, so that fingerprints can be compared."""
    ordered = np.ascontiguousarray(words, ">u4")
    return ordered.view("S16")[:, 0] if len(words) else np.zeros(0, "S16")


def as_int64(column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Converts numbers to int64 keys, and returns which are whole and in the range of int64."""
    numbers = column.entries
    if numbers.dtype.kind == "f":
        largest = 2.0 ** (np.finfo(numbers.dtype).nmant + 1)
        with np.errstate(invalid="ignore"):
            whole = column.known & (np.abs(numbers) < largest) & (numbers == np.floor(numbers))
        return np.where(whole, numbers, 0).astype(np.int64), whole
    inside = column.known
    if numbers.dtype == np.uint64:
        inside = inside & (numbers <= np.uint64(2**63 - 1))
    return np.where(inside, numbers, 0).astype(np.int64), inside


def buckets_of(column: Column, buckets: Sequence[float]) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns a label for each bucket between increasing edges, and each entry's bucket, or -1.

    The last bucket includes its upper edge, as in NumPy.
    """
    public = increasing("buckets must be at least 2 increasing edges", buckets, least=2)
    numbers, last = column.numbers(), len(public) - 2
    xp = numpy_of(numbers)
    edges = xp.asarray(public, numbers.dtype)
    found = xp.searchsorted(edges, numbers, side="right") - 1
    found = xp.where(numbers == edges[-1], last, found)
    inside = column.known & (found >= 0) & (found <= last)
    ends = [f"{edge:g}" if float(f"{edge:g}") == edge else repr(float(edge)) for edge in public]
    labels = [f"[{low}, {high})" for low, high in itertools.pairwise(ends)]
    labels[-1] = labels[-1][:-1] + "]"
    return tuple(labels), xp.where(inside, found, -1).astype(np.int32)
