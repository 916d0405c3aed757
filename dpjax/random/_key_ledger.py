"""Remembers the keys that releases used, so that no key is used twice."""

import sqlite3
import threading
from pathlib import Path

import jax

from dpjax._core._open_ledgers import (
    Drawing,
    OpenLedger,
    Request,
    fingerprint_of_key,
    refuse_traced,
)
from dpjax._core._values import Guarantee
from dpjax._files._durable import database_file
from dpjax.random._keys import check_key


class KeyLedger(OpenLedger):
    """Fingerprints of the keys that releases have used; a key that comes again is refused.

    `with ledger:` claims the key of every release inside, by a mechanism or a private function.
    `dpjax.privatize(target, mechanism, ledger=ledger)` claims the keys of one private function. Two
    releases under one key share their noise, so their difference reveals the values' difference.
    `dpjax.Ledger` does the same, and holds a budget.

    Attributes:
        path: of the file with the fingerprints; None for memory only.

    Formal guarantees:
        Each key is claimed at most once in the lifetime of the file, also by several processes. The
        ledger claims the key that a release gets; keys derived from it are other keys. It refuses a
        release inside `jit` or `vmap`, whose keys are unknown.

        `with` covers all threads of the process while the block is open. Code tells the ledgers of
        the blocks around it; tasks of asyncio start with those around their creator. If there is
        none around it, as in a thread of its own, it tells the ledgers that are open elsewhere in
        the process. It does not cover programs that were compiled ahead of time
        (`jit(f).lower(...).compile()`), other processes, and `mechanism.unpaid_draw`.

        A fingerprint is a SHA-256 of 256 random bits and reveals nothing about the key. The
        fingerprint of a seeded key can be searched, as the key can.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Opens or creates a ledger.

        Args:
            path: of an SQLite file; None keeps the ledger in memory.

        Raises:
            TypeError: if the path is of another type.
            ValueError: if the path is not that of a file, as ":memory:", "" and URIs.
        """
        if path is not None:
            path = database_file(path, instead="pass None to keep the ledger in memory")
        self.path = path
        self._lock = threading.Lock()  # A refusal would roll back what another thread inserts.
        self._connection = sqlite3.connect(
            ":memory:" if path is None else path, check_same_thread=False
        )
        with self._connection:
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS used_keys (fingerprint TEXT PRIMARY KEY)"
            )

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()

    def claim(self, key: jax.Array) -> None:
        """Records a key as used.

        Args:
            key: a typed key of the chacha20 implementation, outside of `jit` and `vmap`.

        Raises:
            TypeError: if the key is traced or of another kind.
            ValueError: if the key was claimed before.
        """
        check_key(key)
        refuse_traced(key)
        claimed = fingerprint_of_key(key)
        try:
            with self._lock, self._connection:
                self._connection.execute("INSERT INTO used_keys VALUES (?)", (claimed,))
        except sqlite3.IntegrityError as error:
            raise ValueError(
                f"key {claimed[:12]} was used for a release before: its noise would be the"
                " same; take a fresh one, by jax.random.split or dpjax.random.secure_key()"
            ) from error

    def record(
        self,
        key: jax.Array,
        guarantee: Guarantee,
        what: str,
        request: Request | None,
        drawing: Drawing | None = None,
    ) -> None:
        """Claims the key of a release."""
        del guarantee, what, request, drawing
        self.claim(key)

    def __len__(self) -> int:
        return self._connection.execute("SELECT COUNT(*) FROM used_keys").fetchone()[0]

    def __contains__(self, key: jax.Array) -> bool:
        query = "SELECT 1 FROM used_keys WHERE fingerprint = ?"
        return self._connection.execute(query, (fingerprint_of_key(key),)).fetchone() is not None
