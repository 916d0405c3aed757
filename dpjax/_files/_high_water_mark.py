"""A high-water mark: the last entry of a ledger that a caller relied on, in a file of its own."""

import os
from pathlib import Path
from typing import NamedTuple

from dpjax._files._ledger_chain import sha256
from dpjax._files._ledger_errors import LedgerError


class Mark(NamedTuple):
    """Number and hash of an entry."""

    number: int
    digest: str


class HighWaterMark:
    """A mark on the disk, in the file `path`."""

    def __init__(self, path: Path) -> None:
        """A mark in a file, which need not exist."""
        self.path = path

    def read(self) -> Mark | None:
        """The mark; None without a file."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        content, _, checksum = text.rstrip(b"\n").rpartition(b" ")
        if sha256(content).encode() != checksum:
            raise LedgerError(f"{self.path}, a ledger's high-water mark, is corrupted")
        number, digest = content.decode().split()
        return Mark(int(number), digest)

    def write(self, mark: Mark) -> None:
        """Replaces the mark. The caller ensures that one process at a time writes."""
        content = f"{mark.number} {mark.digest}".encode()
        fresh = self.path.with_name(self.path.name + ".new")
        with open(fresh, "wb") as file:
            file.write(content + f" {sha256(content)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        # The folder is not synced: after a power failure the old mark may be back. It covers less
        # and refuses nothing wrongly.
        os.replace(fresh, self.path)
