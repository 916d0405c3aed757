"""The file of a ledger: crowds, crashes and corruption never leave more budget than there was."""

import gc
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dpjax._files import _ledger_file
from dpjax._files._ledger_file import BudgetExceededError, LedgerError, LedgerFile
from dpjax.random import KeyLedger
from tables import for_each

WORKER = Path(__file__).with_name("ledger_worker.py")
BUDGET = (1000, 50)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


def beside(path, end):
    return path.with_name(path.name + end)


def files(path):
    """Those of a ledger that are there."""
    return [file for end in ("", "-wal", ".mark") if (file := beside(path, end)).exists()]


def pay(file, times=1, **details):
    for _ in range(times):
        file.debit((1, 0), neighbors="n", key=None, **details)


def worker(path, budget, count, *more):
    command = [sys.executable, WORKER, path, str(budget), str(count), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return output.count("paid")


# One process.


def test_debits_add_up_and_stay(path):
    file = LedgerFile(path, BUDGET)
    assert file.debit((3, 2), neighbors="n", key="a", what="x") == 1
    assert file.debit((4, 0), neighbors="n", key=None) == 2
    again = LedgerFile(path, BUDGET)
    again.update()
    assert again.chain.spent == (7, 2)
    assert [entry.body.get("what") for entry in again.chain.debits()] == ["x", None]


@pytest.mark.parametrize("cost", [(999, 0), (0, 50), (10**30, 10**30)])
def test_no_debit_exceeds_what_is_left(cost, path):
    file = LedgerFile(path, BUDGET)
    file.debit((2, 1), neighbors="n", key=None)
    with pytest.raises(BudgetExceededError, match=r"has epsilon 0\.000000000998 and .* left"):
        file.debit(cost, neighbors="n", key=None)
    file.debit((998, 49), neighbors="n", key=None)
    with pytest.raises(BudgetExceededError):
        file.debit((0, 1), neighbors="n", key=None)


def test_a_budget_never_grows_by_a_debit(path):
    with pytest.raises(ValueError, match="negative"):
        LedgerFile(path, BUDGET).debit((-1, 0), neighbors="n", key=None)


def test_a_key_pays_once(path):
    LedgerFile(path, BUDGET).debit((1, 0), neighbors="n", key="a")
    file = LedgerFile(path, BUDGET)
    with pytest.raises(ValueError, match="fingerprint a was used"):
        file.debit((1, 0), neighbors="n", key="a")
    assert file.chain.spent == (1, 0)


def test_one_kind_of_neighbors(path):
    LedgerFile(path, BUDGET).debit((1, 0), neighbors="replace-one", key=None)
    with pytest.raises(ValueError, match=r"differ by replace-one.*for add-or-remove"):
        LedgerFile(path, BUDGET).debit((1, 0), neighbors="add-or-remove", key=None)


def test_what_was_stored_first_is_read_back(path):
    file = LedgerFile(path, BUDGET)
    assert file.stored("a") is None
    file.store("a", b"one", what="x")
    LedgerFile(path, BUDGET).store("a", b"two")
    body, payload = LedgerFile(path, BUDGET).stored("a")
    assert (payload, body["what"]) == (b"one", "x")
    assert file.chain.spent == (0, 0)


# Several.


def test_threads_share_a_connection(path):
    file = LedgerFile(path, (60, 0))
    refused = []

    def run():
        for _ in range(10):
            try:
                pay(file)
            except BudgetExceededError:
                refused.append(1)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.update()
    assert (file.chain.spent, len(refused)) == ((60, 0), 20)


@pytest.mark.parametrize(
    ("processes", "debits", "budget"),
    [(4, 20, 50), pytest.param(8, 500, 3000, marks=pytest.mark.slow)],
)
def test_many_processes_never_overspend(processes, debits, budget, path):
    """They make the ledger together, too."""
    crowd = [worker(path, budget, debits) for _ in range(processes)]
    assert sum(map(finish, crowd)) == budget
    file = LedgerFile(path, (budget, 0))
    file.update()
    assert file.chain.spent == (budget, 0)


def test_a_ledger_that_another_makes_meanwhile_opens(path, monkeypatch):
    """Between the looks at its tables and at its header."""
    connect, looks = sqlite3.connect, []

    class Overtaken(sqlite3.Connection):
        def execute(self, statement, *more):
            looks.append("application_id" in statement or "sqlite_master" in statement)
            if looks[-1] and sum(looks) == 2:
                monkeypatch.undo()
                pay(LedgerFile(path, BUDGET))
            return super().execute(statement, *more)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **b: connect(*a, factory=Overtaken, **b))
    assert LedgerFile(path, BUDGET).chain.spent == (1, 0)
    assert sum(looks) >= 2


@pytest.mark.parametrize("how", ["forked", "outlived"])
def test_a_fork_opens_the_file_anew(how, path):
    """Nor is its log taken away when the process that it came from closes the file."""
    assert finish(worker(path, 100, 10, how)) == 20
    file = LedgerFile(path, (100, 0))
    file.update()
    assert file.chain.spent == (20, 0)


def test_threads_that_fork_at_once_open_only_what_they_closed(monkeypatch):
    """A thread released the lock of another: its file stayed locked, and the program hung."""
    monkeypatch.setattr(_ledger_file, "_OPEN", set())
    both, first = threading.Event(), threading.Event()

    class File:
        lock = threading.RLock()

        def suspend(self):
            self.lock.acquire()
            self.owner = threading.get_ident()

        def resume(self):
            assert self.owner == threading.get_ident()
            self.lock.release()
            assert both.wait(30)

    def fork():
        _ledger_file._suspend()
        both.set()
        assert first.wait(30)
        _ledger_file._resume()

    file = File()
    _ledger_file._OPEN.add(file)
    _ledger_file._suspend()
    other = threading.Thread(target=fork)
    other.start()
    _ledger_file._resume()
    first.set()
    other.join(30)
    assert not other.is_alive()
    assert file.lock.acquire(timeout=1)


# Crashes.


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_process_loses_budget_at_most(kills, path):
    """Whatever was relied on is there, and the ledger goes on."""
    moments, relied, known = random.Random(14), 0, 0
    for _ in range(kills):
        process = worker(path, 10**6, 10**6)
        assert process.stdout.readline() == "open\n"
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        # `communicate` alone loses what came in one piece with the first line.
        relied += process.stdout.read().count("paid")
        process.communicate(timeout=600)
        file = LedgerFile(path, (10**6, 0))
        file.update()
        # In flight was one debit of each killed process.
        assert max(relied, known) <= file.chain.spent[0] <= relied + kills
        known = file.chain.spent[0]
        del file
    assert known > 0


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_ledger_that_was_killed_at_birth_opens(kills, tmp_path):
    moments = random.Random(15)
    for i in range(kills):
        path = tmp_path / f"{i}.db"
        process = worker(path, 10**6, 10**6)
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.01))
        process.kill()
        paid = process.communicate(timeout=600)[0].count("paid")
        file = LedgerFile(path, (10**6, 0))
        file.update()
        assert file.chain.spent[0] >= paid


# Files that cannot be trusted.


def states(folder):
    """Ledgers of 40 debits: in the log, in the file, and in both."""
    for name, before in (("log", 0), ("file", 40), ("both", 20)):
        path = folder / name / "ledger.db"
        path.parent.mkdir()
        file = LedgerFile(path, BUDGET)
        pay(file, before, what="x" * 100)
        file.close()
        file = LedgerFile(path, BUDGET)
        file.store("release", bytes(range(256)) * 20)
        pay(file, 40 - before, what="x" * 100)
        kept = folder / f"{name} as it is"
        kept.mkdir()
        for part in files(path):
            shutil.copy(part, kept)
        file.close()
        yield kept / path.name


def corrupt(file, chance):
    """Flips a bit, cuts the end off, or fills a part with zeros or with another."""
    data = bytearray(file.read_bytes())
    start = chance.randrange(len(data))
    part = slice(start, start + chance.choice((1, 100, 512, 4096)))
    match chance.choice(("flip", "flip", "cut", "zero", "copy")):
        case "flip":
            data[start] ^= 1 << chance.randrange(8)
        case "cut":
            del data[start:]
        case "zero":
            data[part] = bytes(len(data[part]))
        case "copy":
            other = chance.randrange(len(data))
            data[part] = data[other : other + len(data[part])]
    file.write_bytes(data)


@pytest.mark.parametrize("corruptions", [99, pytest.param(300, marks=pytest.mark.slow)])
def test_no_corruption_leaves_more_to_spend(corruptions, tmp_path):
    chance, refused = random.Random(16), 0
    kept = list(states(tmp_path))
    for i in range(corruptions):
        path = tmp_path / str(i) / "ledger.db"
        shutil.copytree(kept[i % 3].parent, path.parent)
        corrupt(chance.choice(files(path)), chance)
        try:
            file = LedgerFile(path, BUDGET, patience=1)
            file.update()
            assert file.chain.spent == (40, 0)
            with pytest.raises(BudgetExceededError):
                file.debit((961, 0), neighbors="n", key=None)
            stored = file.stored("release")
            assert stored is None or stored[1] == bytes(range(256)) * 20
            file.close()
        except LedgerError:
            refused += 1
    assert corruptions / 2 < refused < corruptions


@for_each("opened", [lambda path: LedgerFile(path, BUDGET), lambda path: KeyLedger(f"{path}.keys")])
def test_a_ledger_in_a_reference_cycle_is_closed(opened, path):
    # Since Python 3.13, a connection warns if it is finalized before it is closed. Here, the first
    # collection makes the next one finalize the connection before the ledger.
    files = [opened(path)]
    connection = files[0]._connection
    gc.collect()
    files[0].itself = files[0]
    files.clear()
    del connection
    gc.collect()
    # If the connection outlives the ledger, it is closed, too.
    file = opened(path)
    connection, file.itself = file._connection, file
    del file
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_a_ledger_pays_while_python_exits(path):
    # Exit functions run in reverse order, so this one runs after the ledger was closed.
    code = """
import atexit, sys
files = []
atexit.register(lambda: pay(files[0]))
from ledger_worker import LedgerFile, pay
files.append(LedgerFile(sys.argv[1], (9, 0)))
pay(files[0])
"""
    command = [sys.executable, "-c", code, path]
    pipe = subprocess.PIPE
    assert finish(subprocess.Popen(command, cwd=WORKER.parent, stdout=pipe, text=True)) == 2
    assert LedgerFile(path, (9, 0)).chain.spent == (2, 0)


@pytest.fixture
def used(path):
    """A ledger with three debits that no process has open, and how it was after one."""
    file = LedgerFile(path, BUDGET)
    pay(file)
    file.close()
    old = {part: part.read_bytes() for part in files(path)}
    file = LedgerFile(path, BUDGET)
    pay(file, 2)
    file.close()
    return path, old


def test_an_older_file_is_refused(used):
    path, old = used
    path.write_bytes(old[path])
    with pytest.raises(LedgerError, match="older than a release"):
        LedgerFile(path, BUDGET)
    # The docstring of dpjax.Ledger says so: what is restored as a whole looks like what it was.
    mark = beside(path, ".mark")
    mark.write_bytes(old[mark])
    file = LedgerFile(path, BUDGET)
    file.update()
    assert file.chain.spent == (1, 0)


def test_a_lost_log_is_refused(path, tmp_path):
    file = LedgerFile(path, BUDGET)
    pay(file, 2)
    copy = tmp_path / "copy"
    copy.mkdir()
    for part in (path, beside(path, ".mark")):
        shutil.copy(part, copy)
    with pytest.raises(LedgerError, match="older than a release"):
        LedgerFile(copy / path.name, BUDGET)


def test_a_copy_without_its_mark_is_refused(path, tmp_path):
    """The debits may all be in the log that stayed behind."""
    file = LedgerFile(path, BUDGET)
    pay(file, 2)
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    with pytest.raises(LedgerError, match=r"high-water mark, .*, is missing"):
        LedgerFile(copy, BUDGET)


def test_a_file_of_two_names_is_refused(path, tmp_path):
    """Each name would have a log and a mark of its own."""
    file = LedgerFile(path, BUDGET)
    pay(file)
    other = tmp_path / "other.db"
    other.hardlink_to(path)
    for use in (lambda: LedgerFile(other, BUDGET), lambda: LedgerFile(path, BUDGET), file.update):
        with pytest.raises(LedgerError, match="several names"):
            use()
    assert not beside(other, ".mark").exists()
    other.unlink()
    pay(file)
    link = tmp_path / "symbolic.db"
    link.symlink_to(path)
    pay(LedgerFile(link, BUDGET))
    assert LedgerFile(path, BUDGET).chain.spent == (3, 0)


@pytest.mark.parametrize("end", ["", ".mark"])
def test_a_lost_file_is_refused(end, used):
    path, _ = used
    beside(path, end).unlink()
    with pytest.raises(LedgerError, match=r"gone|missing"):
        LedgerFile(path, BUDGET)


@pytest.mark.parametrize("end", ["", ".mark"])
def test_an_emptied_file_is_refused(end, used):
    path, _ = used
    beside(path, end).write_bytes(b"")
    with pytest.raises(LedgerError, match="corrupted"):
        LedgerFile(path, BUDGET)


def test_the_file_of_another_ledger_is_refused(used, tmp_path):
    path, _ = used
    other = LedgerFile(tmp_path / "other.db", BUDGET)
    pay(other, 5)
    other.close()
    shutil.copy(tmp_path / "other.db", path)
    with pytest.raises(LedgerError, match="another ledger"):
        LedgerFile(path, BUDGET)


def test_another_budget_is_refused(used):
    path, _ = used
    with pytest.raises(ValueError, match="budget must be the one that"):
        LedgerFile(path, (BUDGET[0] + 1, BUDGET[1]))


def test_a_file_that_is_replaced_while_it_is_open_is_refused(used):
    path, old = used
    file = LedgerFile(path, BUDGET)
    path.rename(beside(path, ".away"))
    path.write_bytes(old[path])
    for use in (file.update, lambda: pay(file)):
        with pytest.raises(LedgerError, match="replaced"):
            use()


def test_an_entry_that_is_lost_while_the_file_is_open_is_refused(used):
    """With a mark that fits what is left, as after a restored backup of all files."""
    path, old = used
    file = LedgerFile(path, BUDGET)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM entries WHERE number > 1")
    connection.close()
    beside(path, ".mark").write_bytes(old[beside(path, ".mark")])
    LedgerFile(path, BUDGET)
    for use in (file.update, lambda: pay(file)):
        with pytest.raises(LedgerError, match="an entry that this process has read"):
            use()


def test_a_file_that_lost_its_budget_is_refused(used):
    path, _ = used
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM entries")
    connection.close()
    with pytest.raises(LedgerError, match="contains no budget"):
        LedgerFile(path, BUDGET)


def test_a_file_that_is_read_only_is_refused(used):
    path, _ = used
    path.chmod(0o444)
    with pytest.raises(LedgerError, match="read-only"):
        LedgerFile(path, BUDGET)


def test_a_mark_that_cannot_be_written_is_told_before_anything_is_paid(used):
    path, _ = used
    beside(path, ".mark.new").mkdir()
    with pytest.raises(LedgerError, match=r"Is a directory|denied"):
        LedgerFile(path, BUDGET)


def test_files_of_others_are_refused_and_left_alone(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()
    for content in (path.read_bytes(), b"some text, longer than the header of SQLite\n" * 100):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"not a ledger|not a database"):
            LedgerFile(path, BUDGET)
        assert path.read_bytes() == content
        assert not beside(path, ".mark").exists()


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(LedgerError, match="unable to open"):
        LedgerFile(tmp_path / "none" / "ledger.db", BUDGET)


def test_an_entry_that_was_changed_is_refused(used):
    """By hand, with a mark that fits."""
    path, _ = used
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE entries SET body = replace(body, '\"1\"', '\"0\"')")
    connection.close()
    with pytest.raises(LedgerError, match="entry 1 was changed after it was written"):
        LedgerFile(path, BUDGET)


def test_one_that_does_not_get_its_turn_is_told(path):
    file = LedgerFile(path, BUDGET)
    blocking = sqlite3.connect(path, isolation_level=None)
    blocking.execute("BEGIN IMMEDIATE")
    file._connection.execute("PRAGMA busy_timeout = 10")
    with pytest.raises(LedgerError, match="locked; nothing was released"):
        pay(file)
    blocking.close()
    pay(file)
