"""Remembers which keys were used, so that none is used twice."""

import contextlib
import contextvars
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from dpjax import _checks
from dpjax.random._keys import check_key

_LEDGERS: contextvars.ContextVar[tuple["KeyLedger", ...]] = contextvars.ContextVar(
    "open ledgers", default=()
)
# Programs that were compiled while no ledger was open release without a claim: under this context
# JAX traces them anew, and the release refuses.
_CLAIMING = jax.make_user_context(False)


class KeyLedger:
    """Fingerprints of the keys that releases have used; a key that comes again is refused.

    `with ledger:` claims the key of every release inside, by a mechanism or a private function;
    `dpjax.privatize(target, mechanism, ledger=ledger)` claims those of one private function. Two
    releases under one key share their noise, and their difference gives the values away.

    Attributes:
        path: where the fingerprints are kept; None for memory only.

    Formal guarantees:
        A key is claimed once in the lifetime of the file, also by several processes. Keys derived
        from it are other keys: claimed is the one that a release is given. A release inside `jit`
        or `vmap`, whose keys are not known, is refused; but a program that was compiled ahead of
        time (`jit(f).lower(...).compile()`), another thread, and compiled programs of coroutines
        that take turns inside `with` are not covered by it. A fingerprint is a SHA-256 of 256
        random bits and tells nothing about the key; that of a seeded key can be searched like the
        key.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Opens or creates a ledger.

        Args:
            path: of an SQLite file; None keeps the ledger in memory.
        """
        self.path = path
        self._opened: list[contextlib.ExitStack] = []
        self._connection = sqlite3.connect(":memory:" if path is None else path)
        with self._connection:
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS used_keys (fingerprint TEXT PRIMARY KEY)"
            )

    def __enter__(self) -> Self:
        opened = contextlib.ExitStack()
        opened.enter_context(_open((*_LEDGERS.get(), self)))
        self._opened.append(opened)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.pop().close()

    def claim(self, key: jax.Array) -> None:
        """Records a key as used.

        Args:
            key: a typed key of the chacha20 implementation, outside of `jit` and `vmap`.

        Raises:
            TypeError: if the key is traced or of another kind.
            ValueError: if the key was claimed before.
        """
        check_key(key)
        _refuse_traced(key)
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


@contextlib.contextmanager
def claimed(key: jax.Array, used: Any, ledger: KeyLedger | None = None) -> Iterator[None]:
    """Claims the key of a release in every open ledger; inside none is open: it counts once.

    Args:
        key: a typed key.
        used: what else the release is made of; where it is traced the key may serve many times.
        ledger: another one to claim it in.
    """
    ledgers = dict.fromkeys(_LEDGERS.get() if ledger is None else (*_LEDGERS.get(), ledger))
    if not ledgers:
        yield
        return
    _refuse_traced((key, used))
    for one in ledgers:
        one.claim(key)
    with _open(()):
        yield


@contextlib.contextmanager
def _open(ledgers: tuple[KeyLedger, ...]) -> Iterator[None]:
    token = _LEDGERS.set(ledgers)
    try:
        with _CLAIMING(bool(ledgers)):
            yield
    finally:
        _LEDGERS.reset(token)


def _refuse_traced(used: Any) -> None:
    if _checks.is_staging() or any(map(_checks.is_traced, jax.tree.leaves(used))):
        raise TypeError(
            "a KeyLedger claims keys on the host, not inside jit or vmap, where one key may serve"
            " many releases: there, use jax.debug_key_reuse"
        )


def _fingerprint(key: jax.Array) -> str:
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()
