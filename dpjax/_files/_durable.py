"""Durable writes: `replace` writes a file atomically. Also locks between processes."""

import contextlib
import os
import pathlib
import platform
import re
import secrets
from collections.abc import Generator, Iterable
from typing import IO, Any, TypeAlias

try:
    import fcntl
except ImportError:  # Windows has no fcntl.
    fcntl = None

Json: TypeAlias = dict[str, Any]
"""An object of JSON."""


def replace(
    path: pathlib.Path, parts: Iterable[bytes | memoryview], *, secret: bool = False
) -> None:
    """Replaces a file atomically: at every moment, either the old or the new contents exist.

    If `secret` is true, only the owner of the file can read it.
    """
    with _new_file(path, 0o600 if secret else 0o666) as file:
        try:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows cannot rename an open file.
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    sync_folder(path.parent)


def database_file(path: object, *, instead: str) -> pathlib.Path:
    """Returns the resolved path of an SQLite file, which need not exist yet.

    Refuses ":memory:", "" and URIs, which SQLite would not treat as paths of files.
    """
    words = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(words, str):
        raise TypeError(f"path must be the path of a file, as a string or a Path, got {path!r}")
    if not words or words.startswith(":") or words.lower().startswith("file:"):
        raise ValueError(f"path must be the path of a file, got {words!r}: {instead}")
    resolved = pathlib.Path(words).resolve()
    if resolved.exists() and not resolved.is_file():
        raise ValueError(
            f"path must be the path of a file, got {words!r}, which is a folder or device"
        )
    return resolved


def check_folder(path: pathlib.Path, kind: str) -> None:
    """Raises an error if the folder of a path is missing or cannot be written to."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"{kind} {path} must be in a folder that exists and can be written to: create it, or"
            " name another"
        )


def remove_abandoned(folder: pathlib.Path, names: str) -> None:
    """Removes partial files that this host has left and that no process is still writing.

    A lock shows whether a process is still writing a file, because the operating system releases
    the lock however the process ends. A process number would not show this: numbers are reused, and
    each container has its own. Hosts may not see each other's locks, so partial files of other
    hosts are not removed. `names` is a regular expression for the final names of the files.
    """
    if fcntl is None:
        return
    of_host = rf"(?:{names})\.{re.escape(_host())}\.[0-9a-f]+\.partial"
    for file in folder.iterdir():
        if re.fullmatch(of_host, file.name):
            # An OSError means that another process is writing the file or has removed it, or that
            # the file system has no locks. In each case the file is left alone.
            with contextlib.suppress(OSError), open(file, "rb+") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Generator[None]:
    """A context that only one process at a time can be in; other processes wait.

    The file system must support locks.
    """
    with open(path, "ab") as file:
        _lock(file)
        yield


@contextlib.contextmanager
def alone(path: pathlib.Path, refusal: str) -> Generator[None]:
    """A context that raises `ValueError(refusal)` if another process is in it.

    The file system must support locks.
    """
    with open(path, "ab") as file:
        if not try_lock(file):
            raise ValueError(refusal)
        yield


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Locks an open file; returns False if another process has locked it.

    If the file system does not support locks, this returns True. The lock is released when the file
    is closed or the process ends.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # The file system has no locks.
    return True


def sync_folder(folder: pathlib.Path) -> None:
    """Waits until a renaming in a folder is on the disk, if the system can open folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_file(path: pathlib.Path, mode: int) -> IO[bytes]:
    """Opens a new partial file, which only this writer uses and which is locked while open.

    The name of the file is random. A process number would not be unique, because threads share it,
    and so may processes in two containers.
    """

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    while True:
        partial = path.with_name(f"{path.name}.{_host()}.{secrets.token_hex(8)}.partial")
        file = open(partial, "xb", opener=opened)  # noqa: SIM115
        _lock(file)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # Another process removed the file before it was locked, so try again.


def _lock(file: IO[bytes]) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def _host() -> str:
    return re.sub(r"[^\w-]", "_", platform.node())
