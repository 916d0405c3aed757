"""How far a file once was, kept beside it: a small file that is replaced as a whole."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from dpjax._files._ledger_errors import LedgerError


class Mark(NamedTuple):
    """The last entry that was relied on."""

    number: int
    digest: str


class HighWaterMark:
    """A mark on the disk.

    Attributes:
        path: of its file.
    """

    def __init__(self, path: Path) -> None:
        """A mark in a file, which need not be there."""
        self.path = path

    def read(self) -> Mark | None:
        """The mark, None where there is no file."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        content, _, checksum = text.rstrip(b"\n").rpartition(b" ")
        if _digest(content) != checksum:
            raise LedgerError(f"{self.path}, a ledger's high-water mark, is corrupted")
        number, digest = content.decode().split()
        return Mark(int(number), digest)

    def write(self, mark: Mark) -> None:
        """Replaces the mark. One process at a time: all use one name for the new file."""
        content = f"{mark.number} {mark.digest}".encode()
        fresh = self.path.with_name(self.path.name + ".new")
        with open(fresh, "wb") as file:
            file.write(content + b" " + _digest(content) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        # After a power failure the old mark may be back: it covers less, and refuses nothing.
        os.replace(fresh, self.path)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
