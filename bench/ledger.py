"""What a debit of the ledger costs beside the disk's own syncs, and beside a commit of SQLite."""

import os
import pathlib
import sqlite3
import tempfile

import dpjax
from harness import RESULTS, Race, Row, record

DEBITS, BLOCK = 100, 4096
PROMISE = dpjax.Guarantee(1e-6)


def run(rounds: int = 5) -> None:
    """On the disk of the repository: a temporary folder may lie in memory."""
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
        _race(pathlib.Path(folder), rounds)


def _race(folder: pathlib.Path, rounds: int) -> None:
    ledger = dpjax.Ledger(folder / "ledger.db", epsilon=10)
    plain = sqlite3.connect(folder / "plain.db", isolation_level=None)
    plain.execute("PRAGMA journal_mode = WAL")
    plain.execute("PRAGMA synchronous = FULL")
    plain.execute("CREATE TABLE rows (x TEXT)")
    descriptor = os.open(folder / "block", os.O_CREAT | os.O_RDWR)
    counts = {"debit": 0}

    def debit() -> None:
        for _ in range(DEBITS):
            ledger.charge(PROMISE)
        counts["debit"] += DEBITS

    def sync() -> None:
        for i in range(DEBITS):
            os.pwrite(descriptor, bytes([i]) * BLOCK, i * BLOCK)
            os.fsync(descriptor)

    def commit() -> None:
        for _ in range(DEBITS):
            plain.execute("INSERT INTO rows VALUES (?)", ("x" * 500,))

    race = Race({"debit": debit, "fsync": sync, "commit": commit}, rounds=rounds)
    assert len(ledger.history()) == counts["debit"]
    job, ours = f"{DEBITS} durable debits of a ledger", race.seconds["debit"]
    record(
        "ledger",
        [
            # A debit syncs twice: the log, then a new file for the high-water mark.
            Row(job, "fsync, as many blocks", ours, race.seconds["fsync"]),
            Row(job, "SQLite, as many commits of 500 bytes", ours, race.seconds["commit"]),
        ],
        race=race,
        sizes={"debits": DEBITS, "block": BLOCK},
        results=counts,
    )
    plain.close()
    os.close(descriptor)


if __name__ == "__main__":
    run()
