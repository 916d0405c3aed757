"""Finished chunks on disk, so that an interrupted run goes on where it was."""

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

try:
    import fcntl
except ImportError:  # Windows has none.
    fcntl = None

_MAGIC = b"dpjax checkpoint 1\n"
# A twentieth of the time goes into writing, at most.
_SHARE = 20


class Checkpoint:
    """The finished chunks of one run, in one file for each host.

    A file is replaced as a whole: written under another name, forced to disk, renamed. It starts
    with what the run is, and with a hash of all that follows. What runs that were killed while they
    wrote have left beside it is removed.

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
        if not named.parent.is_dir() or not os.access(named.parent, os.W_OK):
            raise ValueError(f"checkpoint {named} lies in no folder that can be written to")
        if named.is_dir():
            raise ValueError(f"checkpoint {named} must be a file, and is a folder")
        _remove_abandoned(named)
        self._run = run
        self._found: dict[tuple[int, int], tuple[np.ndarray, float]] = {}
        of_hosts = re.compile(re.escape(named.name) + r"\.\d+-of-\d+")
        others = [file for file in named.parent.iterdir() if of_hosts.fullmatch(file.name)]
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
        _replace(self.path, _encoded(self._run, self._found))
        self._unsaved = 0
        end = time.monotonic()
        self._next_save = end + _SHARE * (end - start)


def _encoded(
    run: dict[str, Any], found: dict[tuple[int, int], tuple[np.ndarray, float]]
) -> Iterator[bytes]:
    keys = np.array(list(found), np.uint32).reshape(-1, 2)
    resolutions = np.array([resolution for _, resolution in found.values()], np.float64)
    dtype = next(iter(found.values()))[0].dtype.name
    body = [keys.tobytes(), resolutions.tobytes(), *(x.tobytes() for x, _ in found.values())]
    header = {"run": run, "chunks": len(found), "dtype": dtype}
    yield _MAGIC
    yield json.dumps({**header, "sha256": _sha256(header, body)}).encode() + b"\n"
    yield from body


def _sha256(header: dict[str, Any], body: Iterable[Any]) -> str:
    sha = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for part in body:
        sha.update(part)
    return sha.hexdigest()


def _replace(path: pathlib.Path, parts: Iterator[bytes]) -> None:
    partial = path.with_name(f"{path.name}.{_host()}.{os.getpid()}.partial")
    with open(partial, "wb") as file:
        _lock(file)
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        if fcntl is None:
            file.close()  # Windows renames no open file.
        os.replace(partial, path)
    _sync_folder(path.parent)


def _remove_abandoned(path: pathlib.Path) -> None:
    """Removes partial files of this host that no process is writing.

    A lock tells: the system frees it when a process ends, however that happens. A process number
    does not, for there are new processes of old numbers, and containers see only their own. Nor is
    a lock seen by other hosts everywhere, so theirs are left alone.
    """
    if fcntl is None:
        return
    of_host = rf"{re.escape(path.name)}(\.\d+-of-\d+)?\.{re.escape(_host())}\.\d+\.partial"
    for file in path.parent.iterdir():
        if re.fullmatch(of_host, file.name):
            # Someone is writing, or was faster, or the file system has no locks.
            with contextlib.suppress(OSError), open(file, "rb+") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()


def _lock(file: Any) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _host() -> str:
    return re.sub(r"[^\w-]", "_", platform.node())


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes a renaming last, where the system lets folders be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(
    path: pathlib.Path, run: dict[str, Any]
) -> dict[tuple[int, int], tuple[np.ndarray, float]]:
    data = memoryview(path.read_bytes())
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"checkpoint {path} is not a checkpoint of this version of dpjax")
    head = bytes(data[len(_MAGIC) : len(_MAGIC) + 2**16]).split(b"\n", 1)[0]
    body = data[len(_MAGIC) + len(head) + 1 :]
    try:
        header = json.loads(head)
        expected, theirs, count = header.pop("sha256"), header["run"], header["chunks"]
        dtype = np.dtype(header["dtype"])
        length = count * (16 + theirs["chunk size"] * dtype.itemsize)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged(path, "is corrupted: its header cannot be read") from None
    if len(body) < length:
        raise _damaged(path, "is truncated")
    if len(body) > length or _sha256(header, [body]) != expected:
        raise _damaged(path, "is corrupted")
    differing = [name for name in {**run, **theirs} if run.get(name) != theirs.get(name)]
    if differing:
        raise ValueError(
            f"checkpoint {path} is of another run, with another {', '.join(differing)}: name"
            " another file, or delete this one"
        )
    keys = np.frombuffer(body[: 8 * count], np.uint32).reshape(-1, 2).tolist()
    resolutions = np.frombuffer(body[8 * count : 16 * count], np.float64).tolist()
    rows = np.frombuffer(body[16 * count :], dtype).reshape(count, -1)
    return {
        (position, chunk): (row, resolution)
        for (position, chunk), resolution, row in zip(keys, resolutions, rows, strict=True)
    }


def _damaged(path: pathlib.Path, how: str) -> ValueError:
    return ValueError(f"checkpoint {path} {how}: delete it to start anew")
