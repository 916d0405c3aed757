"""Closes files before a fork; parent and child each open their own afterwards.

SQLite keeps a list of its locks in the memory of the process. A child inherits the memory but not
the locks: other processes could remove its log while it writes.
"""

import os
import weakref
from typing import Protocol


class Suspended(Protocol):
    """A file that can be closed for a while."""

    def suspend(self) -> None:
        """Closes the file, and lets no other thread open it."""

    def resume(self) -> None:
        """Lets it be opened when it is used."""


_OPEN: "weakref.WeakSet[Suspended]" = weakref.WeakSet()
_HELD: list[Suspended] = []


def close_before_forks(file: Suspended) -> None:
    """Closes a file before this process forks."""
    _OPEN.add(file)


def _suspend() -> None:
    for file in list(_OPEN):
        file.suspend()
        _HELD.append(file)


def _resume() -> None:
    while _HELD:
        _HELD.pop().resume()


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(before=_suspend, after_in_parent=_resume, after_in_child=_resume)
