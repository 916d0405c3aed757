"""`LedgerFile`: a budget in a file. A debit is durable on the disk before `debit` returns.

Entries form a hash chain (`Chain`). A second file contains the high-water mark: the number and hash
of the newest entry on which a release may already depend. If a ledger does not have this entry, it
is an old copy, in which debits are missing. Each process adds up only entries that it has verified
itself.

This module and its imports need only the standard library.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

from dpjax._files._durable import Json, sync_folder

# Budgets are integers, in units of 10^-12 for epsilon and 10^-24 for delta.
EPSILON_DIGITS, DELTA_DIGITS = 12, 24
FORMATS = 1, 2  # Ledgers in format 1 do not state which databases are neighbors.


class LedgerError(RuntimeError):
    """A ledger cannot be trusted or cannot be written. Nothing is released.

    Attributes:
        args: a message with the file and the problem.

    Formal guarantees:
        Raised before noise is drawn, or before the drawn value is returned. Whether it is raised
        depends only on the ledger's files, never on private data.
    """


class BudgetExceededError(RuntimeError):
    """A release would cost more than the rest of the budget.

    Attributes:
        args: a message with the cost and the remaining budget.

    Formal guarantees:
        Nothing was debited and no noise was drawn. Whether it is raised depends only on the ledger
        and the guarantee, never on private data.
    """


class Entry(NamedTuple):
    """A verified entry of the chain."""

    number: int
    digest: str
    body: Json


class Chain:
    """The entries of a ledger that this process has verified, and sums over these entries.

    Attributes:
        path: the path of the ledger, for messages.
        budget: epsilon and delta of the budget, in units of 10^-12 and 10^-24.
        spent: epsilon and delta that the entries have spent, in the same units.
        entries: the entries in order. The first entry states the budget.
        releases: maps the name of a request to the number of the entry with its release.
        relation: which databases are neighbors, from the first entry, or else from the first debit.
    """

    def __init__(self, path: Path, budget: tuple[int, int], relation: str | None = None) -> None:
        """Makes a chain without entries. If `relation` is given, the file must state it, too."""
        self.path = path
        self.budget = budget
        self.relation: str | None = None
        self._asked = relation
        self.spent = (0, 0)
        self.entries: list[Entry] = []
        self.releases: dict[str, int] = {}
        self._keys: set[str] = set()
        self._neighbors: str | None = None

    @property
    def last_digest(self) -> str:
        """The hash of the last entry, which covers all entries; empty before the first entry."""
        return self.entries[-1].digest if self.entries else ""

    def debits(self) -> list[Entry]:
        """Returns the entries that spend budget, in order."""
        return [entry for entry in self.entries if "neighbors" in entry.body]

    def refuse(self, cost: tuple[int, int], neighbors: str, key: str | None) -> None:
        """Raises an error if the ledger cannot pay for another debit of this cost.

        `neighbors` states which databases are neighbors. All debits must have the same `neighbors`.
        `key` is the fingerprint of a random key. No two debits may have the same `key`.
        """
        if min(cost) < 0:
            raise ValueError(f"cost must not be negative, got {cost}")
        if key in self._keys:
            raise used_before(str(key))
        if neighbors != (self._neighbors or neighbors):
            raise ValueError(
                f"guarantee must be for databases that differ by {_shown(str(self._neighbors))}, "
                "like the other guarantees of the ledger, got a guarantee for "
                f"{_shown(neighbors)}: the two kinds do not add up"
            )
        left = [budget - spent for budget, spent in zip(self.budget, self.spent, strict=True)]
        if any(price > rest for price, rest in zip(cost, left, strict=True)):
            raise BudgetExceededError(
                f"this release costs {decimals(cost)}, but {self.path.name} has "
                f"{decimals(tuple(left))} left of its budget of {decimals(self.budget)}"
            )

    def link(self, body: Json) -> tuple[int, str, str]:
        """Returns the number, text and hash of the next entry, if its content is `body`."""
        text = json.dumps(body, sort_keys=True)
        return len(self.entries), text, _link(self.last_digest, text)

    def extend(self, rows: Iterable[tuple[int, str, str]]) -> None:
        """Verifies new entries, given by number, text and hash, and appends them to the chain."""
        for number, text, digest in rows:
            if number != len(self.entries) or _link(self.last_digest, str(text)) != digest:
                raise self.corrupted(f"entry {len(self.entries)}")
            self._add(Entry(number, digest, json.loads(text)))

    def corrupted(self, part: str) -> LedgerError:
        """Returns the error for a part of the file that was changed after it was written."""
        return LedgerError(f"{self.path} is corrupted: {part} was changed after it was written")

    def _add(self, entry: Entry) -> None:
        body = entry.body
        if entry.number == 0:
            budget = (int(body["epsilon"]), int(body["delta"]))
            if body["format"] not in FORMATS or budget != self.budget:
                raise ValueError(
                    f"budget must be the one that {self.path.name} was made with. That budget is"
                    f" {decimals(budget)}, and cannot change. Got {decimals(self.budget)}"
                )
            self._be_under(body.get("relation"))
        elif "release" in body:
            self.releases.setdefault(body["release"], entry.number)
        else:
            epsilon, delta = self.spent
            self.spent = (epsilon + int(body["epsilon"]), delta + int(body["delta"]))
            self._keys.update(filter(None, [body["key"]]))
            self._neighbors = body["neighbors"]
            if self.relation is None:
                self._be_under(body["neighbors"].partition(",")[0])
        self.entries.append(entry)

    def _be_under(self, relation: str | None) -> None:
        if relation is not None and self._asked not in (None, relation):
            raise ValueError(
                f"relation must be the one that {self.path.name} was made with. That relation is"
                f" {relation}, and cannot change. Got {self._asked}"
            )
        self.relation = relation


def used_before(key: str) -> ValueError:
    """Returns the error for a random key that was used before. `key` is its fingerprint."""
    return ValueError(
        f"key must be new, but the key with fingerprint {key[:12]} was used for a release before,"
        " so both releases would have the same noise: make a new key by jax.random.split or"
        " dpjax.random.secure_key()"
    )


def _shown(neighbors: str) -> str:
    """Returns a readable description of which databases are neighbors.

    Debits do not store the privacy unit if it is "record", so it is added here.
    """
    return neighbors if ", per " in neighbors else f"{neighbors}, per record"


def decimals(amount: tuple[int, ...]) -> str:
    """Returns the exact decimal text of an amount (epsilon, delta), for messages."""
    epsilon, delta = map(decimal, amount, (EPSILON_DIGITS, DELTA_DIGITS))
    return f"epsilon {epsilon}" + (f" and delta {delta}" if amount[1] else "")


def decimal(units: int, digits: int) -> str:
    """Returns the exact decimal text of `units` times 10^-digits."""
    text = f"{units:0{digits + 1}d}"
    fraction = text[-digits:].rstrip("0")
    return text[:-digits] + ("." + fraction if fraction else "")


def sha256(data: bytes) -> str:
    """Returns the SHA-256 hash of `data` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _link(last: str, text: str) -> str:
    return sha256(f"{last}\n{text}".encode())


_APPLICATION = 0x64704A4C  # "dpJL" in ASCII, SQLite's application ID in the header of the file.
# If code forks a process without Python's fork hooks, the child inherits the parent's connections.
# If the child used or closed one of them, it would release the parent's locks. So this list keeps
# these connections open and unused.
_INHERITED: list[sqlite3.Connection] = []


class Mark(NamedTuple):
    """A high-water mark: the number and hash of the newest entry on which a release may depend.

    It has a file of its own. A ledger without this entry is an old copy or another ledger, and is
    not trusted.
    """

    number: int
    digest: str

    @classmethod
    def read(cls, path: Path) -> "Mark | None":
        """Returns the mark in a file, or None if the file does not exist."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        content, _, checksum = text.rstrip(b"\n").rpartition(b" ")
        if sha256(content).encode() != checksum:
            raise LedgerError(f"{path}, the file of a ledger's high-water mark, is corrupted")
        number, digest = content.decode().split()
        return cls(int(number), digest)

    def write(self, path: Path) -> None:
        """Replaces the mark in a file. The caller ensures that no other process writes it."""
        content = f"{self.number} {self.digest}".encode()
        fresh = path.with_name(path.name + ".new")
        with open(fresh, "wb") as file:
            file.write(content + f" {sha256(content)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        # The folder is not synced, so after a power failure the old mark may be back. The old mark
        # points to an earlier entry, so it never causes a false error.
        os.replace(fresh, path)


class LedgerFile:
    """A file with the debits of one budget (epsilon, delta), as integers.

    Attributes:
        path: the path of the SQLite file, with symbolic links resolved.
        chain: the entries that this process has verified, with their sums.
    """

    def __init__(
        self,
        path: str | Path,
        budget: tuple[int, int],
        *,
        relation: str | None = None,
        made_under: str | None = None,
        patience: float = 60.0,
    ) -> None:
        """Opens a ledger, or creates it if neither the ledger nor its high-water mark exists.

        `budget` is in units of 10^-12 and 10^-24. If the file exists and stores another relation
        than `relation`, it is refused. A new file stores the relation `made_under`. `patience` is
        how many seconds to wait for other processes.
        """
        self.path = Path(path).resolve()
        self._budget, self._relation, self._made_under = budget, relation, made_under
        self._mark = self.path.with_name(self.path.name + ".mark")
        self._patience = patience
        self._start()
        _OPEN.add(self)
        with self._alone():
            self._connected()

    def _start(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self.chain = Chain(self.path, self._budget, self._relation)

    # Public methods.

    def debit(
        self, cost: tuple[int, int], *, neighbors: str, key: str | None, **details: object
    ) -> int:
        """Debits a cost, and returns the number of the new entry once it is on the disk.

        `Chain.refuse` explains the arguments. `details` is stored as JSON, for the history.
        """
        with self._entries("BEGIN IMMEDIATE") as connection:
            self.chain.refuse(cost, neighbors, key)
            body = {"epsilon": str(cost[0]), "delta": str(cost[1]), "neighbors": neighbors}
            number = self._append(connection, {**body, "key": key, **details})
        self._raise_mark(number)
        return number

    def store(self, request: str, payload: bytes, **details: object) -> None:
        """Stores a release, with `details` as JSON, unless the request already has one."""
        with self._entries("BEGIN IMMEDIATE") as connection:
            if request not in self.chain.releases:
                body = {"release": request, "payload": sha256(payload)}
                self._append(connection, {**body, **details}, payload)

    def stored(self, request: str) -> tuple[Json, bytes] | None:
        """Returns the details and payload of the release for a request; None if there is none."""
        with self._entries("BEGIN") as connection:
            number = self.chain.releases.get(request)
            if number is None:
                return None
            query = "SELECT payload FROM entries WHERE number = ?"
            row = connection.execute(query, (number,)).fetchone()
            body, payload = self.chain.entries[number].body, row[0] if row else None
            if not isinstance(payload, bytes) or sha256(payload) != body["payload"]:
                raise self.chain.corrupted(f"the release in entry {number}")
            return body, payload

    def update(self) -> None:
        """Reads and verifies the entries that other processes have written."""
        with self._entries("BEGIN"):
            pass

    # Transactions.

    @contextlib.contextmanager
    def _entries(self, begin: str) -> Generator[sqlite3.Connection]:
        """A transaction in which the chain has all entries of the file.

        If `begin` is "BEGIN IMMEDIATE", no other process can write during the transaction, and the
        new entries are on the disk when it ends. If `begin` is "BEGIN", the caller must only read.
        """
        with self._alone():
            connection = self._connected()
            with _transaction(connection, begin):
                self._catch_up(connection)
                yield connection

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        """A context for one thread at a time, which converts errors of files to a `LedgerError`."""
        if self._process != os.getpid():
            # This process was forked by code that did not run Python's fork hooks. So a thread of
            # the parent may have held the lock, and the connection belongs to the parent. Start
            # with a new lock and connection.
            self._start()
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{self.path}: {error}; nothing was released") from error

    def _append(
        self, connection: sqlite3.Connection, body: Json, payload: bytes | None = None
    ) -> int:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        number, text, digest = self.chain.link({"time": now, **body})
        row = (number, text, payload, digest)
        connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", row)
        return number

    def _catch_up(self, connection: sqlite3.Connection) -> None:
        """Verifies the new entries, and that all entries that were read before still exist."""
        # The mark is read before the entries. So the entry that the mark names must be among them.
        # After "BEGIN", SQLite reads the entries only at the first query, which runs after the mark
        # is read. After "BEGIN IMMEDIATE", no other process can move the mark.
        mark, entries = Mark.read(self._mark), self.chain.entries
        query = "SELECT number, body, hash FROM entries WHERE number >= ? ORDER BY number"
        # The last verified entry is read again. If the file was replaced by an older copy, this
        # entry may be missing or differ.
        rows = connection.execute(query, (max(0, len(entries) - 1),)).fetchall()
        if entries and (not rows or rows.pop(0)[2] != self.chain.last_digest):
            raise self.chain.corrupted("an entry that this process has read")
        self.chain.extend(rows)
        if not entries:
            raise LedgerError(
                f"{self.path} contains no budget: the file is not a ledger, or has lost its budget"
            )
        if mark is None:
            raise LedgerError(f"the ledger's high-water mark, {self._mark}, is missing")
        if mark.number >= len(entries) or entries[mark.number].digest != mark.digest:
            raise LedgerError(
                f"{self.path} is older than a release that used it, or is another ledger: its"
                f" high-water mark {self._mark.name} counts {mark.number} entries, but"
                f" the file has {len(entries) - 1}"
            )

    def _raise_mark(self, number: float) -> None:
        """Moves the high-water mark up to an entry, unless it is already there or beyond."""
        with self._entries("BEGIN IMMEDIATE"):
            mark = Mark.read(self._mark)
            if mark is None or mark.number < number:
                last = self.chain.entries[-1]
                Mark(last.number, last.digest).write(self._mark)

    # The connection.

    def close(self) -> None:
        """Closes the file until the next call. The last process to close it merges SQLite's log."""
        if self._connection is not None:
            self._closing()
        self._connection = None

    def suspend(self) -> None:
        """Closes the file, and prevents other threads from opening it until `resume`."""
        self._lock.acquire()
        self.close()

    def resume(self) -> None:
        """Lets this process, or a fork of it, open the file again."""
        self._process = os.getpid()
        self._lock.release()

    def _connected(self) -> sqlite3.Connection:
        # When Python exits, it runs `_closing` before some of the caller's own exit functions.
        if self._connection is None or not self._closing.alive:
            return self._connect()
        if self._identity() != self._opened:
            raise LedgerError(f"{self.path} was replaced while it was open")
        return self._connection

    def _identity(self) -> tuple[int, int]:
        status = os.stat(self.path)
        if status.st_nlink > 1:
            raise LedgerError(
                f"{self.path} has several names (hard links), each of which would have its own log"
            )
        return status.st_dev, status.st_ino

    def _connect(self) -> sqlite3.Connection:
        mark, exists = Mark.read(self._mark), self.path.exists()
        relied_on = mark is not None and mark.number > 0
        if relied_on and not exists:
            raise LedgerError(
                f"{self.path} is missing, but its high-water mark {self._mark.name} shows that"
                " it has debits: restore the file"
            )
        if exists and not os.stat(self.path).st_mode & 0o222:
            # This is checked explicitly, because the superuser can write to read-only files.
            raise LedgerError(f"{self.path} is read-only")
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode={'rw' if exists else 'rwc'}",
            uri=True,
            timeout=self._patience,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._opened = self._identity()
            for setting in ("synchronous = FULL", "fullfsync = ON", "trusted_schema = OFF"):
                connection.execute(f"PRAGMA {setting}")
            self._make_or_refuse(connection, relied_on)
            self._write_ahead(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        # If this ledger is part of a reference cycle, Python may finalize the connection before the
        # ledger. So `weakref.finalize` closes the connection: Python calls `_close` before it
        # finalizes any object of the cycle.
        self._closing = weakref.finalize(self, _close, connection, os.getpid())
        # Moves the mark up to the last entry. If the mark cannot be written, the call fails here,
        # before any debit.
        self._raise_mark(math.inf)
        return connection

    def _make_or_refuse(self, connection: sqlite3.Connection, relied_on: bool) -> None:
        """Creates the ledger in an empty file, or refuses a file that another program wrote.

        SQLite reads the header, because this process must not open the file a second time: on
        POSIX, closing any descriptor of a file releases all locks of the process on it.
        """
        tables = connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        # The tables are read before the application ID. Suppose that another process creates the
        # ledger between the two reads. Then the ID is found, and the file is accepted. If the ID
        # were read first, tables would be found without an ID, and the file would be refused.
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        if application == 0 and tables is None and not relied_on:
            self._make(connection)
        elif application != _APPLICATION:
            raise LedgerError(f"{self.path} is not a ledger, or corrupted")

    def _make(self, connection: sqlite3.Connection) -> None:
        """Creates the table, the first entry and the header in one transaction.

        So another process sees all of them or none.

        The high-water mark is a separate file. It is written before the commit, because opening a
        ledger without a mark raises an error.
        """
        with _transaction(connection, "BEGIN IMMEDIATE"):
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(
                    "CREATE TABLE entries (number INTEGER PRIMARY KEY, body TEXT NOT NULL,"
                    " payload BLOB, hash TEXT NOT NULL)"
                )
                epsilon, delta = map(str, self._budget)
                body: Json = {"format": FORMATS[-1], "epsilon": epsilon, "delta": delta}
                if self._made_under is not None:
                    body["relation"] = self._made_under
                self._append(connection, {**body, "identity": secrets.token_hex(16)})
                (digest,) = connection.execute("SELECT hash FROM entries").fetchone()
                Mark(0, digest).write(self._mark)
                sync_folder(self.path.parent)

    def _write_ahead(self, connection: sqlite3.Connection) -> None:
        """Turns on write-ahead logging.

        Retries while the file is locked, because SQLite does not wait here.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue
            if mode != "wal":
                raise LedgerError(f"{self.path} must be on a file system with write-ahead logging")
            return


def _close(connection: sqlite3.Connection, process: int) -> None:
    """Closes a connection in the process that opened it. A fork must not release its locks."""
    if process == os.getpid():
        connection.close()
    else:
        _INHERITED.append(connection)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Generator[None]:
    """A transaction, which is committed on exit and rolled back after an error."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


# Forks. Ledgers are closed before a fork, and parent and child open them again afterwards. SQLite
# keeps a list of its locks in memory. A forked child inherits this list but not the locks, so other
# processes could remove the log while the child writes.

_OPEN = weakref.WeakSet[LedgerFile]()
# `_HELD.files` are the ledgers that the current thread has closed for a fork. They are local to the
# thread, because another thread may fork at the same time.
_HELD = threading.local()


def _suspend() -> None:
    # All threads close the files in the same order, so that two threads that fork at the same time
    # do not deadlock.
    _HELD.files = list[LedgerFile]()
    for file in sorted(_OPEN, key=id):
        file.suspend()
        _HELD.files.append(file)


def _resume() -> None:
    while _HELD.files:
        _HELD.files.pop().resume()


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(before=_suspend, after_in_parent=_resume, after_in_child=_resume)
