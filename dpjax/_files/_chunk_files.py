"""Reads and writes files of finished chunks: a JSON header that identifies the run, and arrays.

A file starts with its kind and format version. The next line is a JSON header, which includes a
SHA-256 hash of header and arrays. The bytes of the arrays follow. Damaged files and files of
another run raise errors, and nothing is ever unpickled. A file is first written under a temporary
name and then renamed, so it is complete even if the process is killed.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpjax._files._durable import Json, remove_abandoned, replace

_FORMAT = 3
_LONGEST_HEADER = 2**20


class ChunkFile(NamedTuple):
    """The contents of one file of chunks: its path, header and arrays."""

    path: Path
    header: Json
    arrays: list[np.ndarray]


def write_chunks(
    path: Path, kind: str, header: Json, arrays: Sequence[np.ndarray], *, secret: bool = False
) -> None:
    """Replaces the file at `path` by a header and arrays.

    The header's entry "run" describes everything that determines the arrays.
    """
    body = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    described = [[array.dtype.name, array.shape] for array in arrays]
    header = {**header, "arrays": described, "bytes": sum(map(len, body))}
    line = json.dumps({**header, "sha256": _sha256(header, body)}).encode() + b"\n"
    replace(path, [_magic(kind), line, *body], secret=secret)


def read_chunks(folder: Path, names: str, kind: str) -> list[ChunkFile]:
    """Reads every matching file in a folder, and removes partial files of killed processes."""
    remove_abandoned(folder, names)
    files = sorted(file for file in folder.iterdir() if re.fullmatch(names, file.name))
    return [read_chunk(file, kind) for file in files]


def check_run(
    file: ChunkFile, run: Json, owner: str, *, place: str, at: str = "", free: Iterable[str] = ()
) -> None:
    """Raises an error if a file was written by a run that differs from `run`.

    Entries of the run whose names are in `free` may differ.

    A run describes everything that determines the bits of the chunks. The error message starts with
    `owner`, says in which part (`at`) the runs differ, and asks for another `place`.
    """
    found = file.header["run"]
    names = [name for name in {**run, **found} if name not in free]
    if differing := [name for name in names if run.get(name) != found.get(name)]:
        raise ValueError(
            f"{owner} belongs to another run, with a different {', '.join(differing)}{at}: name"
            f" another {place}, or delete this {place}"
        )


def read_chunk(path: Path, kind: str) -> ChunkFile:
    """Reads the file at `path`, and raises an error if it is damaged or of another kind."""

    def damaged(how: str) -> ValueError:
        return ValueError(f"{kind} {path} {how}: delete it to start anew")

    magic, data = _magic(kind), memoryview(path.read_bytes())
    if data[: len(magic)].tobytes() != magic:
        raise ValueError(f"{kind} {path} is not a {kind} of this version of dpjax")
    line = bytes(data[len(magic) : len(magic) + _LONGEST_HEADER]).split(b"\n", 1)[0]
    body = data[len(magic) + len(line) + 1 :]
    try:
        header = json.loads(line)
        expected, length = header.pop("sha256"), int(header["bytes"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise damaged("is corrupted: its header cannot be read") from None
    if len(body) < length:
        raise damaged("is truncated")
    if len(body) > length or _sha256(header, [body]) != expected:
        raise damaged("is corrupted")
    arrays, start = list[np.ndarray](), 0
    for name, shape in header["arrays"]:
        # The hash detects accidental damage, not forgery. If a forged header named a dtype of
        # Python objects, bytes of the file would be used as pointers.
        if (dtype := np.dtype(name)).hasobject:
            raise damaged("is corrupted")
        arrays.append(np.ndarray(shape, dtype, body, start))
        start += arrays[-1].nbytes
    return ChunkFile(path, header, arrays)


def _magic(kind: str) -> bytes:
    return f"dpjax {kind} {_FORMAT}\n".encode()


def _sha256(header: Json, body: Iterable[memoryview]) -> str:
    sha = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for part in body:
        sha.update(part)
    return sha.hexdigest()
