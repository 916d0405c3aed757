"""Files that last: replaced as a whole, and refused where they are damaged.

A file starts with its kind, then come a line of JSON and bytes. The line holds a hash of both.
Nothing is ever unpickled.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Iterator
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has none.
    fcntl = None

_LONGEST_HEADER = 2**20


def write(path: pathlib.Path, kind: str, header: dict[str, Any], body: list[bytes]) -> None:
    """Replaces a file: written under another name, forced to disk, renamed."""
    header = {**header, "bytes": sum(map(len, body))}
    line = json.dumps({**header, "sha256": _sha256(header, body)}).encode() + b"\n"
    _replace(path, iter((_magic(kind), line, *body)))


def read(path: pathlib.Path, kind: str) -> tuple[dict[str, Any], memoryview]:
    """What `write` has written; what is damaged, or of another kind, is refused."""
    magic, data = _magic(kind), memoryview(path.read_bytes())
    if data[: len(magic)] != magic:
        raise ValueError(f"{kind} {path} is not a {kind} of this version of dpjax")
    line = bytes(data[len(magic) : len(magic) + _LONGEST_HEADER]).split(b"\n", 1)[0]
    body = data[len(magic) + len(line) + 1 :]
    try:
        header = json.loads(line)
        expected, length = header.pop("sha256"), int(header["bytes"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged(path, kind, "is corrupted: its header cannot be read") from None
    if len(body) < length:
        raise _damaged(path, kind, "is truncated")
    if len(body) > length or _sha256(header, [body]) != expected:
        raise _damaged(path, kind, "is corrupted")
    return header, body


def database_file(path: Any, *, instead: str) -> pathlib.Path:
    """The path of an SQLite file, which need not be there; SQLite's other words are refused."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path must be that of a file, as a text or a Path, got {path!r}")
    words = os.fspath(path)
    if not words or words.startswith(":") or words.lower().startswith("file:"):
        raise ValueError(f"path must be that of a file, got {words!r}: {instead}")
    resolved = pathlib.Path(words).resolve()
    if resolved.exists() and not resolved.is_file():
        raise ValueError(f"path must be that of a file, got {words!r}, which is a folder or device")
    return resolved


def check_folder(path: pathlib.Path, kind: str) -> None:
    """Refuses a path that nothing can be written at."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{kind} {path} lies in no folder that can be written to")


def remove_abandoned(folder: pathlib.Path, names: str) -> None:
    """Removes partial files of this host that no process is writing.

    A lock tells: the system frees it when a process ends, however that happens. A process number
    does not, for there are new processes of old numbers, and containers see only their own. Nor is
    a lock seen by other hosts everywhere, so theirs are left alone.

    Args:
        folder: where they are.
        names: a regular expression for the names of the files that were to be replaced.
    """
    if fcntl is None:
        return
    of_host = rf"(?:{names})\.{re.escape(_host())}\.\d+\.partial"
    for file in folder.iterdir():
        if re.fullmatch(of_host, file.name):
            # Someone is writing, or was faster, or the file system has no locks.
            with contextlib.suppress(OSError), open(file, "rb+") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()


@contextlib.contextmanager
def alone(path: pathlib.Path, refusal: str) -> Iterator[None]:
    """Refuses where another process is inside; where there are no locks, none is refused."""
    with open(path, "ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(refusal) from None
            except OSError:
                pass  # The file system has none.
        yield


def sync_folder(folder: pathlib.Path) -> None:
    """Makes a renaming last, where the system lets folders be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _magic(kind: str) -> bytes:
    return f"dpjax {kind} 2\n".encode()


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
    sync_folder(path.parent)


def _lock(file: Any) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _host() -> str:
    return re.sub(r"[^\w-]", "_", platform.node())


def _damaged(path: pathlib.Path, kind: str, how: str) -> ValueError:
    return ValueError(f"{kind} {path} {how}: delete it to start anew")
