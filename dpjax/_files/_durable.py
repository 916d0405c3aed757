"""`replace`: writes a file under another name, forces it to disk and renames it; and locks."""

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
    """Replaces a file atomically: at every moment, either the old or the new file exists.

    A secret file can only be read by its owner.
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
    """The path of an SQLite file, which need not exist.

    Refuses ":memory:", "" and URIs, which SQLite does not read as paths.
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
    """Removes partial files of this host that no process is writing.

    A lock shows whether a process still writes a file, because the system releases it when the
    process ends in any way. A process number would not show whether the process still runs: numbers
    are reused, and a container has its own numbers. Hosts may not see each other's locks, so files
    of other hosts are not removed. `names` is a regular expression for the final names of the
    files.
    """
    if fcntl is None:
        return
    of_host = rf"(?:{names})\.{re.escape(_host())}\.[0-9a-f]+\.partial"
    for file in folder.iterdir():
        if re.fullmatch(of_host, file.name):
            # An OSError means that another process writes or has removed the file, or that the file
            # system has no locks.
            with contextlib.suppress(OSError), open(file, "rb+") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Generator[None]:
    """A block that one process at a time runs; others wait. The file system must have locks."""
    with open(path, "ab") as file:
        _lock(file)
        yield


@contextlib.contextmanager
def alone(path: pathlib.Path, refusal: str) -> Generator[None]:
    """A block that refuses to run if another process runs it. The file system must have locks."""
    with open(path, "ab") as file:
        if not try_lock(file):
            raise ValueError(refusal)
        yield


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Locks an open file, and returns False if another process has the lock.

    If the file system has no locks, it returns True. The lock is released when the file is closed
    or the process ends.
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
    """Forces a renaming in a folder to disk, if the system can open folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_file(path: pathlib.Path, mode: int) -> IO[bytes]:
    """A partial file for this writer only, locked while it is open.

    The name of the file is random, because threads share a process number, and so may processes of
    two containers.
    """

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    while True:
        partial = path.with_name(f"{path.name}.{_host()}.{secrets.token_hex(8)}.partial")
        file = open(partial, "xb", opener=opened)  # noqa: SIM115
        _lock(file)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # Another process removed it before it was locked.


def _lock(file: IO[bytes]) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def _host() -> str:
    return re.sub(r"[^\w-]", "_", platform.node())
