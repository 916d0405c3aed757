"""`Store`: the finished chunks of a sweep, stored in one file each."""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Generator, Sequence
from typing import IO

import numpy as np

from dpjax._files._chunk_files import ChunkFile, check_run, read_chunk, read_chunks, write_chunks
from dpjax._files._durable import Json, check_folder, locked, sync_folder, try_lock

_KIND, _RUN = "chunk", "run"
# The entries of a run's description that may differ between the parts of one run.
_OF_A_PART = ("function", "traced", "chunk size")


class Store:
    """The chunks of one sweep, in a folder that several processes may share.

    A part of the sweep is one choice of its static parameters. If a call needs only some of the
    parts, the chunks of the other parts are kept. While a process computes a chunk, it has a lock
    on the chunk. If the process ends early, the operating system releases the lock, and another
    process computes the chunk. Results do not depend on locks: any two processes compute the same
    bits, and a file is always replaced as a whole.

    Attributes:
        path: the path of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Makes the folder if it does not exist."""
        self.path = pathlib.Path(os.fspath(path))
        # `check_folder` checks the parent of its argument. If the folder exists, the folder and not
        # its parent must be checked: it may be the root of a mounted disk, whose parent need not be
        # writable. So a path inside of the folder is passed.
        check_folder(self.path / "lock" if self.path.is_dir() else self.path, "sweep")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"sweep {self.path} must be a folder, got a file")
        self.path.mkdir(exist_ok=True)
        sync_folder(self.path.parent)
        self._found: dict[str, list[ChunkFile]] = {}
        self._claims: dict[pathlib.Path, IO[bytes]] = {}

    @contextlib.contextmanager
    def in_use(self) -> Generator["Store"]:
        """Opens the folder, and shows other processes that this process uses it."""
        with open(self.path / "users", "ab") as self._users:
            try:
                yield self
            finally:
                for claim in self._claims.values():
                    claim.close()
                with locked(self.path / "lock"):
                    self._forget_runs()
                    self._users.close()

    @contextlib.contextmanager
    def agreement(self) -> Generator[None]:
        """Reads the folder. Until the block ends, other processes wait before they read it."""
        with locked(self.path / "lock"):
            self._forget_runs()
            try_lock(self._users, shared=True)
            chunks = read_chunks(self.path, r"\w+\.chunk", _KIND)
            for chunk in (*chunks, *read_chunks(self.path, r"\w+\.run", _RUN)):
                self._found.setdefault(chunk.header["part"], []).append(chunk)
            for claim in self.path.glob("*.claim"):
                if claim.with_suffix(".chunk").exists():
                    claim.unlink(missing_ok=True)
            yield

    def _forget_runs(self) -> None:
        """Deletes descriptions of runs that are over, if no other process uses the folder."""
        if try_lock(self._users):
            for file in self.path.glob("*.run"):
                file.unlink()

    def say(self, part: str, run: Json) -> None:
        """Writes a description of the run of a part, before the part's first chunk.

        Runs with equal descriptions compute the same bits. So other processes compare the
        descriptions of their own runs with this one.
        """
        if part not in self._found:
            write_chunks(self.path / f"{part}.run", _RUN, {"part": part, "run": run}, [])

    def chunk_size(self, part: str) -> int | None:
        """Returns the number of cells in a chunk of a part, if it is known."""
        return next((x.header["run"].get("chunk size") for x in self._found.get(part, ())), None)

    def check(self, runs: dict[str, Json], named: dict[str, str]) -> None:
        """Raises an error if the folder contains chunks of another sweep.

        Args:
            runs: for each part, all facts that determine the bits of its results.
            named: for each part, its name in messages.
        """
        for part, chunks in self._found.items():
            # If this call does not ask for the part, only the entries that are equal for all parts
            # are compared.
            run = runs.get(part) or next(iter(runs.values()))
            free = () if part in runs else _OF_A_PART
            at = f" at {named[part]}" if named.get(part) else ""
            for chunk in chunks:
                check_run(chunk, run, f"sweep {self.path}", place="folder", at=at, free=free)

    def found(self, part: str, words: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
        """Fills in the values of the cells that are on disk, and returns which cells these are."""
        rows = {row: i for i, row in enumerate(map(tuple, words.tolist()))}
        there = np.zeros(len(words), bool)
        for chunk in self._found.get(part, ()):
            if chunk.arrays:
                stored_words, *stored_values = chunk.arrays
                cells = np.array([rows.get(row, -1) for row in map(tuple, stored_words.tolist())])
                known = cells >= 0
                there[cells[known]] = True
                for array, stored in zip(values, stored_values, strict=True):
                    array[cells[known]] = stored[known]
        return there

    def claim(self, part: str, words: np.ndarray) -> bool:
        """Whether to compute a chunk: False if another process computes or has computed it."""
        path = self._file(part, words)
        claim = open(path.with_suffix(".claim"), "ab")  # noqa: SIM115
        if try_lock(claim) and not path.exists():
            self._claims[path] = claim
            return True
        claim.close()
        return False

    def add(self, part: str, run: Json, words: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Writes a chunk that this process has claimed."""
        path = self._file(part, words)
        write_chunks(path, _KIND, {"part": part, "run": run}, [words, *values])
        self._claims.pop(path).close()
        path.with_suffix(".claim").unlink(missing_ok=True)

    def read(self, part: str, run: Json, words: np.ndarray) -> list[np.ndarray] | None:
        """Returns the values of a chunk if another process has written it by now, or else None."""
        path = self._file(part, words)
        if not path.exists():
            return None
        chunk = read_chunk(path, _KIND)
        check_run(chunk, run, f"sweep {self.path}", place="folder")
        return chunk.arrays[1:]

    def _file(self, part: str, words: np.ndarray) -> pathlib.Path:
        name = hashlib.sha256(part.encode() + words.tobytes()).hexdigest()[:32]
        return self.path / f"{name}.chunk"
