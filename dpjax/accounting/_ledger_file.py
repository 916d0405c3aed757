"""A budget in a file: what is spent is on the disk before anyone relies on it, and stays there.

Entries form a chain: each holds the hash of all before it, the first holds the budget. Beside the
file lies its high-water mark, the number and hash of the last debit that was relied on; a file that
does not reach its mark is older than what was published. Sums are integers, computed by every
process from the entries that it has verified itself.

Nothing here, nor in what it imports, needs more than the standard library.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dpjax._durable import sync_folder
from dpjax.accounting._forks import close_before_forks
from dpjax.accounting._high_water_mark import HighWaterMark, Mark
from dpjax.accounting._ledger_errors import BudgetExceededError, LedgerError

EPSILON_DIGITS, DELTA_DIGITS = 12, 24  # Budgets are in units of 10^-12 and 10^-24.
_APPLICATION = 0x64704A4C  # "dpJL", in the header of the file
_FORMAT = 1
# Inherited by a fork that Python does not know of: to be neither used nor closed.
_INHERITED: list[sqlite3.Connection | None] = []


class Entry(NamedTuple):
    """One link of the chain, verified."""

    number: int
    digest: str
    body: dict[str, Any]


class LedgerFile:
    """Debits of one budget of (epsilon, delta), in integers.

    Attributes:
        path: of the SQLite file, links resolved.
        budget: of epsilon and delta, in units.
        spent: sums over the entries.
        entries: those that this process has verified; the first holds the budget.
    """

    def __init__(self, path: str | Path, budget: tuple[int, int], *, patience: float = 60.0):
        """Opens a ledger, or makes one where there is neither a file nor a mark.

        Args:
            path: of the file.
            budget: of epsilon and delta, in units.
            patience: seconds to wait for other processes.
        """
        self.path = Path(path).resolve()
        self.budget = budget
        self._mark = HighWaterMark(self.path.with_name(self.path.name + ".mark"))
        self._patience = patience
        self._start()
        close_before_forks(self)
        with self._alone():
            self._connected()

    def _start(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self.entries: list[Entry] = []
        self.spent = (0, 0)
        self._keys: set[str] = set()
        self._releases: dict[str, int] = {}
        self._neighbors: str | None = None

    # What callers do.

    def debit(
        self, cost: tuple[int, int], *, neighbors: str, key: str | None, **details: Any
    ) -> int:
        """Takes a cost from the budget; on return the entry has reached the disk.

        Args:
            cost: of epsilon and delta, in units.
            neighbors: what kind of neighboring databases this is about, one for a whole ledger.
            key: a fingerprint, which no other debit may have.
            **details: JSON, for the history.

        Returns:
            The number of the entry.
        """
        with self._writing() as connection:
            self._refuse(cost, neighbors, key)
            body = {"epsilon": str(cost[0]), "delta": str(cost[1]), "neighbors": neighbors}
            number = self._append(connection, {**body, "key": key, **details})
        self._raise_mark(number)
        return number

    def store(self, request: str, payload: bytes, **details: Any) -> None:
        """Keeps what was released; of several releases under one request the first.

        Args:
            request: names it.
            payload: bytes.
            **details: JSON.
        """
        with self._writing() as connection:
            if request not in self._releases:
                body = {"release": request, "payload": _digest(payload)}
                self._append(connection, {**body, **details}, payload)

    def stored(self, request: str) -> tuple[dict[str, Any], bytes] | None:
        """Details and payload of a release, None where there is none."""
        with self._reading() as connection:
            number = self._releases.get(request)
            if number is None:
                return None
            query = "SELECT payload FROM entries WHERE number = ?"
            body, row = self.entries[number].body, connection.execute(query, (number,)).fetchone()
            payload = row[0] if row else None
            if not isinstance(payload, bytes) or _digest(payload) != body["payload"]:
                raise self._corrupted(f"what entry {number} has released")
            return body, payload

    def update(self) -> None:
        """Takes notice of what other processes have written."""
        with self._reading():
            pass

    def debits(self) -> list[Entry]:
        """The entries that cost, in order, as far as they are known here."""
        return [entry for entry in self.entries if "neighbors" in entry.body]

    def has_release(self, request: str | None) -> bool:
        """Whether a release under this request is known here."""
        return request in self._releases

    def _refuse(self, cost: tuple[int, int], neighbors: str, key: str | None) -> None:
        if min(cost) < 0:
            raise ValueError(f"cost must not be negative, got {cost}")
        if key in self._keys:
            raise ValueError(
                f"key {str(key)[:12]} was used for a release before: its noise would be the same;"
                " take a fresh one, by jax.random.split or dpjax.random.secure_key()"
            )
        if neighbors != (self._neighbors or neighbors):
            raise ValueError(
                f"guarantee is for databases that differ by {neighbors}, the ledger's are for"
                f" {self._neighbors}: they do not add up"
            )
        left = [budget - spent for budget, spent in zip(self.budget, self.spent, strict=True)]
        if any(price > rest for price, rest in zip(cost, left, strict=True)):
            raise BudgetExceededError(
                f"this costs {decimals(cost)}, and of the budget of {self.path.name},"
                f" {decimals(self.budget)}, there is left {decimals(tuple(left))}"
            )

    # Transactions.

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Alone among all processes; what was appended is on the disk at the end."""
        with self._alone():
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._catch_up(connection, self._mark.read())
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._alone():
            connection = self._connected()
            mark = self._mark.read()  # First: the entries that are read next must reach it.
            connection.execute("BEGIN")
            try:
                self._catch_up(connection, mark)
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time; what goes wrong with a file is a `LedgerError`."""
        if self._process != os.getpid():
            # A fork: neither lock nor connection is of use here.
            _INHERITED.append(self._connection)
            self._start()
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{self.path}: {error}; nothing was released") from error

    def _append(
        self, connection: sqlite3.Connection, body: dict[str, Any], payload: bytes | None = None
    ) -> int:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        number, last = len(self.entries), self.entries[-1].digest if self.entries else ""
        text = json.dumps({"time": now, **body}, sort_keys=True)
        row = (number, text, payload, _link(last, text))
        connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", row)
        return number

    # Verification.

    def _catch_up(self, connection: sqlite3.Connection, mark: Mark | None) -> None:
        """Verifies what is new, and that nothing old is gone."""
        query = "SELECT number, body, hash FROM entries WHERE number >= ? ORDER BY number"
        rows = connection.execute(query, (max(0, len(self.entries) - 1),)).fetchall()
        if self.entries and (not rows or rows.pop(0)[2] != self.entries[-1].digest):
            raise self._corrupted("an entry that was there before")
        for number, text, digest in rows:
            last = self.entries[-1].digest if self.entries else ""
            if number != len(self.entries) or _link(last, str(text)) != digest:
                raise self._corrupted(f"entry {len(self.entries)}")
            self._take_in(Entry(number, digest, json.loads(text)))
        if not self.entries:
            raise LedgerError(f"{self.path} holds no budget: it is no ledger, or has lost it")
        if mark is None:
            raise LedgerError(f"{self._mark.path}, the ledger's high-water mark, is missing")
        if mark.number >= len(self.entries) or self.entries[mark.number].digest != mark.digest:
            raise LedgerError(
                f"{self.path} is older than what was released, or another ledger: its high-water"
                f" mark {self._mark.path.name} knows of {mark.number} entries, here are"
                f" {len(self.entries) - 1}"
            )

    def _take_in(self, entry: Entry) -> None:
        body = entry.body
        if entry.number == 0:
            budget = (int(body["epsilon"]), int(body["delta"]))
            if body["format"] != _FORMAT or budget != self.budget:
                raise ValueError(
                    f"budget must be the one that {self.path.name} was made with, which never"
                    f" changes: {decimals(budget)}, got {decimals(self.budget)}"
                )
        elif "release" in body:
            self._releases.setdefault(body["release"], entry.number)
        else:
            epsilon, delta = self.spent
            self.spent = (epsilon + int(body["epsilon"]), delta + int(body["delta"]))
            self._keys.update(filter(None, [body["key"]]))
            self._neighbors = body["neighbors"]
        self.entries.append(entry)

    def _corrupted(self, what: str) -> LedgerError:
        return LedgerError(f"{self.path} is corrupted: {what} is not what was written")

    def _raise_mark(self, number: float) -> None:
        """Makes the mark cover an entry; it only ever rises, for its writers are alone."""
        with self._writing():
            mark = self._mark.read()
            if mark is None or mark.number < number:
                self._mark.write(Mark(self.entries[-1].number, self.entries[-1].digest))

    # The connection.

    def close(self) -> None:
        """Closes the file; the last process moves what is in the log to it. Use opens it again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def suspend(self) -> None:
        """Closes the file, and keeps other threads from it."""
        self._lock.acquire()
        self.close()

    def resume(self) -> None:
        """Lets the file be opened again, by this process and by its fork."""
        self._process = os.getpid()
        self._lock.release()

    # When Python ends, what modules held may be gone.
    def __del__(self, process: Callable[[], int] = os.getpid) -> None:
        if hasattr(self, "_connection") and self._process == process():
            self.close()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connect()
        elif self._identity() != self._opened:
            raise LedgerError(f"{self.path} was replaced while it was open")
        assert self._connection is not None
        return self._connection

    def _identity(self) -> tuple[int, int]:
        status = os.stat(self.path)
        if status.st_nlink > 1:
            raise LedgerError(f"{self.path} has other names, by hard links: each has its own log")
        return status.st_dev, status.st_ino

    def _connect(self) -> None:
        mark, exists = self._mark.read(), self.path.exists()
        relied_on = mark is not None and mark.number > 0
        if relied_on and not exists:
            raise LedgerError(f"{self.path} is gone, but not its high-water mark")
        if exists and not os.stat(self.path).st_mode & 0o222:
            raise LedgerError(f"{self.path} is read-only")  # To the superuser nothing is.
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
        self._raise_mark(math.inf)  # Which also shows that it can be written.

    def _make_or_refuse(self, connection: sqlite3.Connection, relied_on: bool) -> None:
        """A file of another program is left as it is.

        SQLite looks at the header: to close a second descriptor of a file drops its locks.
        """
        tables = connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        # After the tables: whoever makes them in between writes both at once.
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        if application == 0 and tables is None and not relied_on:
            self._make(connection)
        elif application != _APPLICATION:
            raise LedgerError(f"{self.path} is not a ledger, or corrupted")

    def _make(self, connection: sqlite3.Connection) -> None:
        """In one transaction of the file itself, so that its header says at once whose it is.

        Its mark comes first: a ledger without one has lost it.
        """
        connection.execute("BEGIN IMMEDIATE")
        try:
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(
                    "CREATE TABLE entries (number INTEGER PRIMARY KEY, body TEXT NOT NULL,"
                    " payload BLOB, hash TEXT NOT NULL)"
                )
                epsilon, delta = map(str, self.budget)
                body = {"format": _FORMAT, "epsilon": epsilon, "delta": delta}
                self._append(connection, {**body, "identity": secrets.token_hex(16)})
                (digest,) = connection.execute("SELECT hash FROM entries").fetchone()
                self._mark.write(Mark(0, digest))
                sync_folder(self.path.parent)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _write_ahead(self, connection: sqlite3.Connection) -> None:
        """Turns write-ahead logging on, for which SQLite does not wait."""
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
                raise LedgerError(f"{self.path}: its file system has no write-ahead logging")
            return


def decimals(amount: tuple[int, ...]) -> str:
    """An amount of budget, for messages: exactly."""
    epsilon, delta = map(decimal, amount, (EPSILON_DIGITS, DELTA_DIGITS))
    return f"epsilon {epsilon}" + (f" and delta {delta}" if amount[1] else "")


def decimal(units: int, digits: int) -> str:
    """A multiple of 10^-digits, with all of its digits."""
    text = f"{units:0{digits + 1}d}"
    fraction = text[-digits:].rstrip("0")
    return text[:-digits] + ("." + fraction if fraction else "")


def _link(last: str, text: str) -> str:
    return _digest(f"{last}\n{text}".encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
