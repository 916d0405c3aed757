"""Finished chunks on disk, so that an interrupted run goes on where it was."""

import os
import pathlib
import re
import time
from collections.abc import Iterable

import jax
import numpy as np

from dpjax._files._chunk_files import check_run, read_chunks, write_chunks
from dpjax._files._durable import Json, check_folder

_KIND = "checkpoint"
# Writing takes at most a twentieth of the time.
_SHARE = 20


class Checkpoint:
    """The finished chunks of one run, in one file for each host.

    Attributes:
        path: of the file; with several hosts each has its own, "PATH.0-of-2" and so on.
    """

    def __init__(self, path: str | os.PathLike[str], run: Json) -> None:
        """Reads the files of any number of hosts; refuses files of another run."""
        named = pathlib.Path(os.fspath(path))
        hosts = jax.process_count()
        self.path = named
        if hosts > 1:
            self.path = named.with_name(f"{named.name}.{jax.process_index()}-of-{hosts}")
        check_folder(named, _KIND)
        if named.is_dir():
            raise ValueError(f"checkpoint {named} must be a file, and is a folder")
        self._run = run
        self._found: dict[tuple[int, int], tuple[np.ndarray, float]] = {}
        names = rf"{re.escape(named.name)}(\.\d+-of-\d+)?"
        for file in read_chunks(named.parent, names, _KIND):
            check_run(file, run, f"checkpoint {file.path}", place="file")
            keys, resolutions, rows = file.arrays
            places = map(tuple, keys.tolist())
            chunks = zip(rows, resolutions.tolist(), strict=True)
            self._found.update(zip(places, chunks, strict=True))
        self._unsaved = 0
        self._next_save = time.monotonic()

    def found(self, position: int) -> dict[int, tuple[np.ndarray, float]]:
        """Distances and resolution of the finished chunks of a position."""
        return {chunk: x for (place, chunk), x in self._found.items() if place == position}

    @property
    def chunks(self) -> Iterable[tuple[int, int]]:
        """Position and number of every finished chunk."""
        return self._found

    def add(
        self, position: int, chunks: list[int | None], rows: np.ndarray, resolutions: np.ndarray
    ) -> None:
        """Adds finished chunks, and saves all if the last time was long enough ago."""
        for chunk, row, resolution in zip(chunks, rows, resolutions.tolist(), strict=True):
            if chunk is not None:
                self._found[position, chunk] = (row, resolution)
                self._unsaved += 1
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Writes all finished chunks."""
        if not self._unsaved:
            return
        start = time.monotonic()
        rows, resolutions = zip(*self._found.values(), strict=True)
        keys = np.array(list(self._found), np.uint32)
        arrays = [keys, np.array(resolutions, np.float64), np.stack(rows)]
        write_chunks(self.path, _KIND, {"run": self._run}, arrays)
        self._unsaved = 0
        end = time.monotonic()
        self._next_save = end + _SHARE * (end - start)
