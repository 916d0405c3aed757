"""Closes files before a fork; parent and child each open their own afterwards.

SQLite keeps a list of its locks in the memory of the process. A child inherits the memory but not
the locks: other processes could remove its log while it writes.
"""

import os
import threading
import weakref
from typing import Protocol


class Suspended(Protocol):
    """A file that can be closed for a while."""

    def suspend(self) -> None:
        """Closes the file, and lets no other thread open it."""

    def resume(self) -> None:
        """Lets it be opened when it is used."""


_OPEN: "weakref.WeakSet[Suspended]" = weakref.WeakSet()


class _Held(threading.local):
    """The files that this thread closed for its fork; another thread may fork meanwhile."""

    def __init__(self) -> None:
        self.files: list[Suspended] = []


_HELD = _Held()


def close_before_forks(file: Suspended) -> None:
    """Closes a file before this process forks."""
    _OPEN.add(file)


def _suspend() -> None:
    # In one order, so that two threads that fork do not wait for each other.
    for file in sorted(_OPEN, key=id):
        file.suspend()
        _HELD.files.append(file)


def _resume() -> None:
    while _HELD.files:
        _HELD.files.pop().resume()


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(before=_suspend, after_in_parent=_resume, after_in_child=_resume)
