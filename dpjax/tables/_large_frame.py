"""A frame larger than memory. Statistics made of sums read it in batches; others refuse it."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from dpjax._core import _checks
from dpjax._core._frames import Batches, Table, batches_of
from dpjax._core._records import PaddedRecords, Parts
from dpjax.tables._frame import Frame
from dpjax.tables._rows_of_people import frames_of_people

T = TypeVar("T")
# The public number of rows in a batch. Longer batches are hardly faster.
ROWS = 2**18


class LargeFrame(Frame):
    """A frame that is read in batches, and refuses every use of a whole column.

    Attributes:
        batches: the source of batches.
        of_batch: one batch as a frame, for the names and dtypes of its columns.
    """

    def __init__(self, batches: Batches, most_rows: int) -> None:
        """Reads names and dtypes of columns."""
        self.batches, rows = batches, min(ROWS, most_rows)
        self.of_batch = Frame(batches.first(rows), rows)
        self.columns = self.of_batch.columns

    def check_ordered(self) -> None:
        """Refuses partitions, because no process sees their rows in the order of the table."""
        if self.batches.on_partitions is not None:
            raise ValueError(
                "frame must give its batches in order where person= is given, got partitions, and"
                " rows of a person may be in several: pass a function of batches, as lambda:"
                " (frame.get_partition(i).compute() for i in range(frame.npartitions))"
            )

    def __getitem__(self, name: str) -> NoReturn:
        """Refuses a statistic that cannot read batches."""
        raise TypeError(
            f"frame must fit into memory for this statistic of column {name!r}, got batches of"
            f" {_checks.shown(list(self.columns))}: give the columns that it needs as a frame"
        )


def frame_of(frame: Any, most_rows: int) -> Frame:
    """A frame in memory, or a frame that is read in batches."""
    batches = batches_of("frame", frame)
    return Frame(frame, most_rows) if batches is None else LargeFrame(batches, most_rows)


def structure_of(frame: Frame) -> Frame:
    """A frame with the names and dtypes of the columns."""
    return frame.of_batch if isinstance(frame, LargeFrame) else frame


def in_parts(table: T, large: LargeFrame, make: Callable[[T], PaddedRecords]) -> Parts:
    """The records that `make` takes from a table, for each batch of its frame.

    Parts may be made in other processes, so they contain neither the ledger nor the source.
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
        frames = (Frame(batch, rows) for batch in batches)
        if people is None:
            return function(map(of_batch, frames))
        # Closed after an error too: otherwise the traceback would keep the files of private rows.
        with contextlib.closing(
            frames_of_people(frames, structure, used, people.person, slots)
        ) as whole:
            return function(map(of_batch, whole))

    structure = Frame(large.columns, rows)
    like = of_batch(structure)
    # To count all rows, any column is enough.
    used = structure.used or list(large.columns)[:1]

    def each(function: Callable[[Iterator[PaddedRecords]], Any]) -> Iterator[Any]:
        return large.batches.each(used, rows, functools.partial(of_batches, function))

    return Parts(each, like, slots, holds_whole_people=people is not None)
