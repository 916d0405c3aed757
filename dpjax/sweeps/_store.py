"""Finished chunks of a sweep on disk, one file each, with the cells that they hold."""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Generator, Sequence

import numpy as np

from dpjax._files._chunk_files import ChunkFile, check_run, read_chunks, write_chunks
from dpjax._files._durable import Json, alone, check_folder, sync_folder
from dpjax.sweeps._cell_keys import WORDS

_KIND = "chunk"
_ROW = 4 * WORDS
# Parts may differ in these names of their runs.
_OF_A_PART = ("function", "traced", "chunk size")


class Store:
    """The chunks of one sweep, in a folder.

    A part of the sweep is one choice of its static parameters. Chunks of parts that a call does not
    ask for stay in the folder.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Makes the folder where there is none."""
        self.path = pathlib.Path(os.fspath(path))
        # An existing folder may be a mounted disk: then only itself must be writable.
        check_folder(self.path / "lock" if self.path.is_dir() else self.path, "sweep")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"sweep {self.path} must be a folder, and is a file")
        self.path.mkdir(exist_ok=True)
        sync_folder(self.path.parent)
        self._chunks: dict[str, list[ChunkFile]] = {}

    @contextlib.contextmanager
    def opened(self) -> Generator["Store"]:
        """Reads all chunks, while no other process writes any."""
        refusal = f"sweep {self.path} is being computed by another process: wait until it has ended"
        with alone(self.path / "lock", refusal):
            for chunk in read_chunks(self.path, r"\w+\.chunk", _KIND):
                self._chunks.setdefault(chunk.header["part"], []).append(chunk)
            yield self

    def chunk_size(self, part: str) -> int | None:
        """Cells in a chunk of a part, if there is one."""
        return next((x.header["run"].get("chunk size") for x in self._chunks.get(part, ())), None)

    def check(self, runs: dict[str, Json], named: dict[str, str]) -> None:
        """Refuses chunks of another sweep.

        Args:
            runs: everything that decides the bits, for every part.
            named: names of the parts for messages.
        """
        for part, chunks in self._chunks.items():
            # A part that this call does not ask for: only the rest of its run is known.
            run = runs.get(part) or next(iter(runs.values()))
            free = () if part in runs else _OF_A_PART
            at = f" at {named[part]}" if named.get(part) else ""
            for chunk in chunks:
                check_run(chunk, run, f"sweep {self.path}", place="folder", at=at, free=free)

    def found(self, part: str, words: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
        """Fills in the values of the cells on disk, and says which cells they are."""
        rows = {row: i for i, row in enumerate(_rows(words))}
        there = np.zeros(len(words), bool)
        for chunk in self._chunks.get(part, ()):
            stored_words, *stored_values = chunk.arrays
            pairs = [(rows[row], j) for j, row in enumerate(_rows(stored_words)) if row in rows]
            if pairs:
                cells, places = map(list, zip(*pairs, strict=True))
                there[cells] = True
                for array, stored in zip(values, stored_values, strict=True):
                    array[cells] = stored[places]
        return there

    def add(
        self,
        part: str,
        run: Json,
        words: np.ndarray,
        values: Sequence[np.ndarray],
    ) -> None:
        """Writes a chunk."""
        name = hashlib.sha256(part.encode() + words.tobytes()).hexdigest()[:32]
        header = {"part": part, "run": run}
        write_chunks(self.path / f"{name}.chunk", _KIND, header, [words, *values])


def _rows(words: np.ndarray) -> list[bytes]:
    data = words.astype("<u4").tobytes()
    return [data[start : start + _ROW] for start in range(0, len(data), _ROW)]
