"""Reads frames larger than memory in batches, for statistics of totals that add up."""

import contextlib
import copy
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import as_text
from dpjax._core._frames import Batches, Table, batches_of, texts_of
from dpjax._core._records import PaddedRecords, Parts
from dpjax.tables._frame import Column, Frame
from dpjax.tables._groups import as_int64, index_of_words

T = TypeVar("T")
# The public number of rows in a batch. Larger batches would hardly be faster.
ROWS = 2**18


class _Batch(Frame):
    """One batch, which refuses columns of another kind than in the first batch.

    If a reader infers dtypes, one row may change the dtype of a whole column of the batch. Then
    this row would change all other rows of the batch.
    """

    def __init__(self, columns: Table, most_rows: int, kinds: Mapping[str, str]) -> None:
        """Keeps the kinds of the columns that will be used."""
        super().__init__(columns, most_rows)
        self._kinds = kinds

    def __getitem__(self, name: str) -> Column:
        """Returns a column, if it is of the same kind as in the first batch."""
        kind = _kind(self, name)
        if kind != self._kinds[name]:
            raise TypeError(
                f"column {_checks.shown(name)} must have one dtype in all batches, got"
                f" {self._kinds[name]} and {kind}: cast it where the batches are made"
            )
        return super().__getitem__(name)


def _kind(frame: Frame, name: str) -> str:
    """Describes the dtype of a column, including whether it allows missing entries."""
    column, moments = Frame.__getitem__(frame, name), frame.kind_of(name)
    if column.is_text:
        return "texts"
    nullable = column.may_miss and column.entries.dtype.kind != "f"
    return moments or f"{'nullable ' * nullable}{column.entries.dtype}"


class LargeFrame(Frame):
    """A frame that is read in batches, and raises an error if a whole column is used.

    Attributes:
        batches: the source of batches.
        of_batch: one batch as a frame, for the names and dtypes of its columns.
    """

    def __init__(self, batches: Batches, most_rows: int) -> None:
        """Reads the names and dtypes of columns."""
        self.batches, rows = batches, min(ROWS, most_rows)
        self.of_batch = Frame(batches.first(rows), rows)
        self.columns = self.of_batch.columns

    def check_ordered(self) -> None:
        """Refuses partitions, because no process reads their rows in the order of the table."""
        if self.batches.on_partitions is not None:
            raise ValueError(
                "frame must have batches in a fixed order if person= is given, got partitions. "
                "Partitions are read in any order, and the rows of a person may be in several of "
                "them. Pass a function that returns the batches, such as "
                "lambda: (frame.get_partition(i).compute() for i "
                "in range(frame.npartitions)) for Dask, or lambda: "
                "dataset.iter_batches(batch_format='pyarrow') for Ray"
            )

    def __getitem__(self, name: str) -> NoReturn:
        """Raises an error for a statistic that cannot read batches."""
        raise TypeError(
            f"frame must fit into memory for this statistic of column {name!r}, got batches of "
            f"{_checks.shown(list(self.columns))}: load the columns that it needs into a frame "
            "in memory"
        )


def frame_of(frame: Any, most_rows: int) -> Frame:
    """Returns a frame in memory, or a frame that is read in batches."""
    batches = batches_of("frame", frame)
    return Frame(frame, most_rows) if batches is None else LargeFrame(batches, most_rows)


def structure_of(frame: Frame) -> Frame:
    """Returns a frame with the same column names and dtypes, without reading all rows."""
    return frame.of_batch if isinstance(frame, LargeFrame) else frame


def in_parts(table: T, large: LargeFrame, make: Callable[[T], PaddedRecords]) -> Parts:
    """Applies `make` to the table of each batch, and returns the records of all batches.

    Other processes may compute the parts, so a part contains neither the ledger nor the source of
    batches.
    """
    bare: Any = copy.copy(table)
    bare._ledger = bare._given = bare._frame = None
    rows, slots, people = large.of_batch.slots, bare.most_rows, bare._people

    def of_batch(batch: Frame) -> PaddedRecords:
        one = copy.copy(bare)
        one._frame = batch
        return make(one)

    def of_batches(
        function: Callable[[Iterator[PaddedRecords]], Any], batches: Iterator[Table]
    ) -> Any:
        frames = (_Batch(batch, rows, kinds) for batch in batches)
        if people is None:
            return function(map(of_batch, frames))
        # The iterator is closed even after an error. Otherwise the traceback would keep files open
        # that contain private rows.
        with contextlib.closing(
            frames_of_people(frames, structure, used, people.person, slots)
        ) as whole:
            return function(map(of_batch, whole))

    structure = Frame(large.columns, rows)
    like = of_batch(structure)
    # If no column is used, one column is read to count the rows.
    used = structure.used or list(large.columns)[:1]
    kinds = {name: _kind(structure, name) for name in used}

    def each(function: Callable[[Iterator[PaddedRecords]], Any]) -> Iterator[Any]:
        return large.batches.each(used, rows, functools.partial(of_batches, function))

    return Parts(each, like, slots, holds_whole_people=people is not None)


def texts_of_words(frame: Frame, name: str, words: np.ndarray) -> list[str | None]:
    """Returns the texts of a column whose fingerprints are `words`.

    A text that is not found is None. All batches of a large frame are read.
    """
    if len(words) == 0:
        return []

    def of_frames(frames: Iterable[Frame]) -> dict[int, str | None]:
        found: dict[int, str | None] = {}
        for one in frames:
            at = index_of_words(one[name].entries[: one.rows], words)
            here, first = np.unique(at, return_index=True)
            if new := [(i, row) for i, row in zip(here, first, strict=True) if i >= 0]:
                texts = texts_of(one.columns[name])
                found |= {int(i): as_text(texts[row]) for i, row in new}
        return found

    def of_tables(tables: Iterator[Table]) -> dict[int, str | None]:
        return of_frames(Frame(table, rows) for table in tables)

    if isinstance(frame, LargeFrame):
        rows = frame.of_batch.slots
        results = list(frame.batches.each([name], rows, of_tables))
    else:
        results = [of_frames([frame])]
    found = {i: text for each in results for i, text in each.items()}
    return [found.get(i) for i in range(len(words))]


# The following code is for frames larger than memory. It groups their rows by person, in temporary
# files.


# The largest number of files that one pass writes.
_MOST_BUCKETS = 2**10
# Multiplying an id by this number distributes consecutive integers over the buckets.
_ODD = np.uint64(0x9E3779B97F4A7C15)


class _Bucket(Frame):
    """The rows of the people in one bucket, in the order of the table."""

    def __init__(self, like: Frame, names: Sequence[str], rows: np.ndarray) -> None:
        """Reads the rows that were written to the file of one bucket."""
        self.columns: Mapping[str, object] = like.columns
        self.rows = len(rows)
        # The number of slots is a power of two, so that buckets share compiled programs.
        self.slots = max(like.slots, 2 ** max(0, self.rows - 1).bit_length())
        padded = np.zeros(self.slots, rows.dtype)
        padded[: self.rows] = rows
        self._converted: dict[str, Column] = {}
        for name in names:
            part = padded[f"column {name}"]
            entries, known = part["entries"].copy(), part["known"].copy()
            self._converted[name] = dataclasses.replace(like[name], entries=entries, known=known)


def frames_of_people(
    batches: Iterator[Frame], like: Frame, names: Sequence[str], person: str, most_rows: int
) -> Generator[Frame]:
    """Regroups rows into frames, each of which contains all rows of its people, in their order.

    The rows of each batch are written to several files, which are chosen by the ids of the rows.
    The files are in a folder that only this user may read, and are deleted at the end.
    """
    buckets = min(_MOST_BUCKETS, -(-most_rows // like.slots))
    kinds = [(f"column {name}", like[name].entries) for name in names]
    record = np.dtype(
        [(name, [("entries", x.dtype, x.shape[1:]), ("known", bool)]) for name, x in kinds]
    )
    with tempfile.TemporaryDirectory(prefix="dpjax-") as folder:
        files = [pathlib.Path(folder) / str(bucket) for bucket in range(buckets)]
        for file in files:
            file.touch()
        for batch in batches:
            rows = np.zeros(batch.rows, record)
            for name in names:
                column, part = batch[name], rows[f"column {name}"]
                part["entries"] = column.entries[: batch.rows]
                part["known"] = column.known[: batch.rows]
            bucket = _bucket_of(batch[person], buckets)[: batch.rows]
            order = np.argsort(bucket, kind="stable")
            ends = np.searchsorted(bucket[order], np.arange(buckets + 1))
            for place, file in enumerate(files):
                with open(file, "ab") as opened:
                    rows[order[ends[place] : ends[place + 1]]].tofile(opened)
        for file in files:
            yield _Bucket(like, names, np.fromfile(file, record))


def _bucket_of(column: Column, buckets: int) -> np.ndarray:
    """Returns a bucket for each id. Equal ids are in the same bucket."""
    if column.is_text:
        return column.entries[:, 0].astype(np.int64) % buckets
    ids, _ = as_int64(column)
    mixed = (ids.view(np.uint64) * _ODD) >> np.uint64(33)
    return mixed.astype(np.int64) % buckets
