"""Finished chunks on disk, so that an interrupted run goes on where it was."""

import os
import pathlib
import re
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from dpjax._files import _durable

_KIND = "checkpoint"
# A twentieth of the time goes into writing, at most.
_SHARE = 20


class Checkpoint:
    """The finished chunks of one run, in one file for each host.

    A file is replaced as a whole. It starts with what the run is, and with a hash of all that
    follows. What runs that were killed while they wrote have left beside it is removed.

    Attributes:
        path: of the file; with several hosts each has its own, "PATH.0-of-2" and so on.
    """

    def __init__(self, path: Any, run: dict[str, Any]):
        """Reads what is there, from any number of hosts; refuses files that are not of this run."""
        named = pathlib.Path(os.fspath(path))
        hosts = jax.process_count()
        self.path = named
        if hosts > 1:
            self.path = named.with_name(f"{named.name}.{jax.process_index()}-of-{hosts}")
        _durable.check_folder(named, _KIND)
        if named.is_dir():
            raise ValueError(f"checkpoint {named} must be a file, and is a folder")
        of_hosts = re.escape(named.name) + r"\.\d+-of-\d+"
        _durable.remove_abandoned(named.parent, rf"{re.escape(named.name)}|{of_hosts}")
        self._run = run
        self._found: dict[tuple[int, int], tuple[np.ndarray, float]] = {}
        others = [file for file in named.parent.iterdir() if re.fullmatch(of_hosts, file.name)]
        for file in [named, *sorted(others)]:
            if file.exists():
                self._found.update(_read(file, run))
        self._unsaved = 0
        self._next_save = time.monotonic()

    def found(self, position: int) -> dict[int, tuple[np.ndarray, float]]:
        """Distances and resolution of the chunks of a position that are finished."""
        return {chunk: x for (place, chunk), x in self._found.items() if place == position}

    @property
    def chunks(self) -> Iterable[tuple[int, int]]:
        """Position and number of every chunk that is finished."""
        return self._found

    def add(self, position: int, chunk: int, distances: np.ndarray, resolution: float) -> None:
        """Adds a finished chunk, and saves if the last time is long enough ago."""
        self._found[position, chunk] = (distances, resolution)
        self._unsaved += 1
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Writes all finished chunks."""
        if not self._unsaved:
            return
        start = time.monotonic()
        _durable.write(self.path, _KIND, *_encoded(self._run, self._found))
        self._unsaved = 0
        end = time.monotonic()
        self._next_save = end + _SHARE * (end - start)


def _encoded(
    run: dict[str, Any], found: dict[tuple[int, int], tuple[np.ndarray, float]]
) -> tuple[dict[str, Any], list[bytes]]:
    keys = np.array(list(found), np.uint32).reshape(-1, 2)
    resolutions = np.array([resolution for _, resolution in found.values()], np.float64)
    dtype = next(iter(found.values()))[0].dtype.name
    body = [keys.tobytes(), resolutions.tobytes(), *(x.tobytes() for x, _ in found.values())]
    return {"run": run, "chunks": len(found), "dtype": dtype}, body


def _read(
    path: pathlib.Path, run: dict[str, Any]
) -> dict[tuple[int, int], tuple[np.ndarray, float]]:
    header, body = _durable.read(path, _KIND)
    theirs, count = header["run"], header["chunks"]
    differing = [name for name in {**run, **theirs} if run.get(name) != theirs.get(name)]
    if differing:
        raise ValueError(
            f"checkpoint {path} is of another run, with another {', '.join(differing)}: name"
            " another file, or delete this one"
        )
    keys = np.frombuffer(body[: 8 * count], np.uint32).reshape(-1, 2).tolist()
    resolutions = np.frombuffer(body[8 * count : 16 * count], np.float64).tolist()
    rows = np.frombuffer(body[16 * count :], np.dtype(header["dtype"])).reshape(count, -1)
    return {
        (position, chunk): (row, resolution)
        for (position, chunk), resolution, row in zip(keys, resolutions, rows, strict=True)
    }
