"""Remembers which keys were used, so that none is used twice."""

import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpjax import _checks
from dpjax.random._keys import check_key


class KeyLedger:
    """Fingerprints of the keys that releases have used; a key that comes again is refused.

    `dpjax.privatize(target, mechanism, ledger=ledger)` claims the key of every release. Two
    releases under one key share their noise, and their difference gives the values away.

    Attributes:
        path: where the fingerprints are kept; None for memory only.

    Formal guarantees:
        A key is claimed once in the lifetime of the file, also by several processes. Keys derived
        from it are other keys: claim the one that a release is given. A fingerprint is a SHA-256
        of 256 random bits and tells nothing about the key.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Opens or creates a ledger.

        Args:
            path: of an SQLite file; None keeps the ledger in memory.
        """
        self.path = path
        self._connection = sqlite3.connect(":memory:" if path is None else path)
        with self._connection:
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS used_keys (fingerprint TEXT PRIMARY KEY)"
            )

    def claim(self, key: jax.Array) -> None:
        """Records a key as used.

        Args:
            key: a typed key of the chacha20 implementation, outside of `jit` and `vmap`.

        Raises:
            TypeError: if the key is traced or of another kind.
            ValueError: if the key was claimed before.
        """
        check_key(key)
        _checks.host_only("KeyLedger.claim", key, "jax.debug_key_reuse")
        fingerprint = _fingerprint(key)
        try:
            with self._connection:
                self._connection.execute("INSERT INTO used_keys VALUES (?)", (fingerprint,))
        except sqlite3.IntegrityError as error:
            raise ValueError(
                f"key {fingerprint[:12]} was used for a release before: its noise would be the"
                " same; take a fresh one, by jax.random.split or dpjax.random.secure_key()"
            ) from error

    def __len__(self) -> int:
        return self._connection.execute("SELECT COUNT(*) FROM used_keys").fetchone()[0]

    def __contains__(self, key: Any) -> bool:
        query = "SELECT 1 FROM used_keys WHERE fingerprint = ?"
        return self._connection.execute(query, (_fingerprint(key),)).fetchone() is not None


def _fingerprint(key: jax.Array) -> str:
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()
