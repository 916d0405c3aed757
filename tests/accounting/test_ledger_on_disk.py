"""Where a ledger is, what is on the disk, and when."""

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

import dpjax
from dpjax._files._ledger_file import LedgerError, LedgerFile

BUDGET = (1000, 50)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.mark.parametrize(
    "open_ledger", [lambda x: dpjax.Ledger(x, epsilon=1), dpjax.random.KeyLedger]
)
@pytest.mark.parametrize(
    ("path", "error"),
    [
        *[
            (word, ValueError)
            for word in (":memory:", "", ":shared:", "file::memory:", "FILE:x.db")
        ],
        *[(Path(word), ValueError) for word in (":memory:", "/dev/null", ".")],
        *[(word, ValueError) for word in ("/", "..", "folder")],
        *[(other, TypeError) for other in (b"ledger.db", 3, ("ledger.db",))],
    ],
    ids=repr,
)
def test_a_ledger_is_in_a_file(path, error, open_ledger, tmp_path):
    """A file called ":memory:" would be a surprise, and memory forgets what was paid."""
    (tmp_path / "folder").mkdir()
    with contextlib.chdir(tmp_path), pytest.raises(error, match="path must be the path of a file"):
        open_ledger(path)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_path_may_be_strange(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a #b?c%41&mode=memory.db", "x.db", "memory"):
        dpjax.Ledger(name, epsilon=1).charge(dpjax.Guarantee(0.5))
        assert (tmp_path / name).is_file()
        assert len(dpjax.Ledger(tmp_path / name, epsilon=1).history()) == 1


def test_a_forged_release_in_a_closed_file_is_refused(path):
    """In the log the checksums of SQLite would tell: here nothing but the hash of the payload does.

    What else a release is made of (dtypes, shapes, the guarantee) is in the entry, which is hashed
    with all before it.
    """
    file = LedgerFile(path, BUDGET)
    file.store("a", b"what was released")
    file.close()
    assert not path.with_name("ledger.db-wal").exists()
    for forged in (b"what was invented", b"", "what was released", None):
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE entries SET payload = ? WHERE number = 1", (forged,))
        connection.close()
        file = LedgerFile(path, BUDGET)
        with pytest.raises(LedgerError, match="the release in entry 1 was changed"):
            file.stored("a")
        file.close()


def test_sqlite_waits_for_the_disk(path):
    file = LedgerFile(path, BUDGET)
    settings = {"synchronous": 2, "fullfsync": 1, "trusted_schema": 0, "journal_mode": "wal"}
    for setting, value in settings.items():
        assert file._connection.execute(f"PRAGMA {setting}").fetchone() == (value,), setting


@pytest.fixture
def events(path, monkeypatch):
    """What is forced to the disk, renamed and committed, in order."""
    seen, sync, replace, connect = [], os.fsync, os.replace, sqlite3.connect

    class Watched(sqlite3.Connection):
        def execute(self, statement, *more):
            if statement in ("COMMIT", "ROLLBACK"):
                seen.append(statement)
            return super().execute(statement, *more)

    def watched_sync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        size = os.fstat(descriptor).st_size
        seen.append(f"sync {name}" if name == path.parent.name else f"sync {name}: {size > 64}")
        return sync(descriptor)

    def watched_replace(source, target):
        seen.append(f"rename to {Path(target).name}")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **b: connect(*a, factory=Watched, **b))
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors have no names here")
def test_the_disk_has_everything_in_order(path, events):
    """A new mark is complete on the disk before it has its name; files before they are relied on.

    A mark whose name lasts and whose content does not would refuse a sound ledger; a file whose
    name does not last would be made anew, with the whole budget.
    """
    mark = ["sync ledger.db.mark.new: True", "rename to ledger.db.mark"]
    file = LedgerFile(path, BUDGET)
    born = [*mark, f"sync {path.parent.name}", "COMMIT"]
    assert events == [*born, *mark, "COMMIT"]  # The second mark shows that it can be written.
    events.clear()
    file.debit((1, 0), neighbors="n", key=None)
    assert events == ["COMMIT", *mark, "COMMIT"]  # Of the debit, then of its mark.
