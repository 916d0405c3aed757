"""Stores finished chunks of distances on disk, so that an interrupted run can continue."""

import os
import pathlib
import re
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dpjax._files._chunk_files import check_run, read_chunks, write_chunks
from dpjax._files._durable import Json, check_folder

_KIND = "checkpoint"
# The loop saves again when this many times the duration of the last save has passed. So writing
# checkpoints takes at most a twentieth of the time.
_SHARE = 20


class Seen(NamedTuple):
    """The measurements of the probes (the checks in `_probes.py`) on one chunk.

    Attributes:
        probes: the number of probed pairs, which are the first pairs of the chunk.
        permuted: the largest change of a value when the records of its database are rotated.
        alone: the largest difference between the value of a database that is evaluated alone, and
            the value of the same database in the batch.
        elsewhere: for each probed pair, how much the value changes when the record at a random
            position is replaced.
    """

    probes: int = 0
    permuted: float = 0.0
    alone: float = 0.0
    elsewhere: tuple[float, ...] = ()


class Finished(NamedTuple):
    """The distances of a finished chunk, and the results of its probes."""

    distances: np.ndarray
    resolution: float
    seen: Seen = Seen()


class Checkpoint:
    """The finished chunks of one run, in one file for each host.

    Attributes:
        path: the path of this host's file. With several hosts, the files are called "PATH.0-of-2",
            "PATH.1-of-2" and so on.
    """

    def __init__(self, path: str | os.PathLike[str], run: Json) -> None:
        """Reads the files that any number of hosts have written. Refuses files of another run."""
        named = pathlib.Path(os.fspath(path))
        hosts = jax.process_count()
        self.path = named
        if hosts > 1:
            self.path = named.with_name(f"{named.name}.{jax.process_index()}-of-{hosts}")
        check_folder(named, _KIND)
        if named.is_dir():
            raise ValueError(f"checkpoint {named} must be a file, but is a folder")
        self._run = run
        self._found: dict[tuple[int, int], Finished] = {}
        names = rf"{re.escape(named.name)}(\.\d+-of-\d+)?"
        for file in read_chunks(named.parent, names, _KIND):
            check_run(file, run, f"checkpoint {file.path}", place="file")
            keys, resolutions, moved, elsewhere, rows = file.arrays
            places = map(tuple, keys.tolist())
            chunks = map(Finished, rows, resolutions.tolist(), _seen(moved, elsewhere))
            self._found.update(zip(places, chunks, strict=True))
        self._unsaved = 0
        self._next_save = time.monotonic()

    def found(self, position: int) -> dict[int, Finished]:
        """Returns the finished chunks for one position of the changed record."""
        return {chunk: x for (place, chunk), x in self._found.items() if place == position}

    @property
    def chunks(self) -> Iterable[tuple[int, int]]:
        """Returns the position and the number of every finished chunk."""
        return self._found

    def add(self, position: int, chunks: dict[int, Finished]) -> None:
        """Adds finished chunks, and saves all chunks if the last save was long enough ago."""
        self._found.update(((position, chunk), finished) for chunk, finished in chunks.items())
        self._unsaved += len(chunks)
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Writes all finished chunks to the file of this host."""
        if not self._unsaved:
            return
        start = time.monotonic()
        rows, resolutions, seen = zip(*self._found.values(), strict=True)
        keys = np.array(list(self._found), np.uint32)
        arrays = [keys, np.array(resolutions, np.float64), *_arrays(seen), np.stack(rows)]
        write_chunks(self.path, _KIND, {"run": self._run}, arrays)
        self._unsaved = 0
        end = time.monotonic()
        self._next_save = end + _SHARE * (end - start)


def _arrays(seen: Sequence[Seen]) -> tuple[np.ndarray, np.ndarray]:
    """Converts probe results to arrays: three numbers per chunk, and rows of distances.

    Rows are padded with NaN.
    """
    moved = np.array([x[:3] for x in seen], np.float64)
    elsewhere = np.full((len(seen), max(len(x.elsewhere) for x in seen)), np.nan)
    for row, x in zip(elsewhere, seen, strict=True):
        row[: len(x.elsewhere)] = x.elsewhere
    return moved, elsewhere


def _seen(moved: np.ndarray, elsewhere: np.ndarray) -> list[Seen]:
    distances = (tuple(row[~np.isnan(row)].tolist()) for row in elsewhere)
    rows = zip(moved.tolist(), distances, strict=True)
    return [Seen(int(count), *x, elsewhere=far) for (count, *x), far in rows]
