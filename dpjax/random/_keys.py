"""Random keys: `secure_key`, `seeded_key`, checks of keys, and ledgers of used keys."""

import secrets
import sqlite3
import threading
import weakref
from collections.abc import Hashable
from pathlib import Path

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._core import _checks
from dpjax._core._open_ledgers import OpenLedger, Payment, fingerprint_of_key, refuse_traced
from dpjax._core._types import PyTree, Value
from dpjax._files._durable import database_file
from dpjax._files._ledger_file import used_before
from dpjax._tracing import _shards
from dpjax.random import _chacha20
from dpjax.random._chacha20 import CHACHA20, KEY_WORDS, SEEDED_CHACHA20

_THREEFRY = "threefry2x32"
# The number that is folded into a key to derive the key for drawing databases.
_SAMPLING = 2**32 - 1


def secure_key() -> jax.Array:
    """A key from the operating system's entropy, for anything that is published.

    Returns:
        A typed JAX key of the chacha20 implementation, with 256 random bits.

    Raises:
        NotImplementedError: if the operating system has no source of entropy.

    Formal guarantees:
        The key is uniform over 2^256 values if the operating system's source is uniform. Nobody can
        distinguish draws from uniform bits without breaking ChaCha20. Anyone who sees the key's
        words can remove the noise. JAX prints the words of a key, so never print a key in a
        notebook or a log. Keys cannot be pickled. Store `jax.random.key_data(key)`, which is as
        secret as the key, and restore it as in the example. For this, pass the object
        `dpjax.random.CHACHA20` as `impl`, because JAX does not know this implementation by name.
        Use it only for data that came from such a key.

    Source:
        Python's `secrets` module; RFC 8439.

    Example:
        >>> import jax
        >>> import dpjax
        >>> key = dpjax.random.secure_key()
        >>> key_sample, key_release = jax.random.split(key)
        >>> stored = jax.random.key_data(key)
        >>> restored = jax.random.wrap_key_data(stored, impl=dpjax.random.CHACHA20)
        >>> bool(restored == key)
        True
    """
    return _wrap(secrets.randbits(32 * KEY_WORDS), CHACHA20)


def seeded_key(seed: int) -> jax.Array:
    """A key from a seed, for reproducible research and tests; never for anything published.

    Args:
        seed: an integer in [0, 2^256), also without x64.

    Returns:
        A typed JAX key. It draws the same bits as chacha20, but has another implementation name.
        Keys derived from it have this implementation, too, and the guarantee of every release with
        such a key says "seeded key".

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if the seed is out of range.

    Formal guarantees:
        None: anyone who guesses the seed can remove the noise, and a search can find it.

    Source:
        RFC 8439; the seed is the key, least significant word first.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
    """
    bits = _checks.integer("seed", seed, least=0, most=2 ** (32 * KEY_WORDS) - 1)
    return _wrap(bits, SEEDED_CHACHA20)


def is_seeded(key: jax.Array) -> bool:
    """Whether a key was derived from a seed."""
    return jax.random.key_impl(key) == SEEDED_CHACHA20


def check_key(key: object) -> jax.Array:
    """Checks that a key can be used for releases: one typed key of the chacha20 implementation."""
    key = _one_key(key)
    if (implementation := jax.random.key_impl(key)) not in (CHACHA20, SEEDED_CHACHA20):
        raise TypeError(
            f"key must be of the chacha20 implementation to release anything, got {implementation},"
            " whose bits can be searched or predicted: make one by dpjax.random.secure_key()"
        )
    return key


def check_sampling_key(key: object) -> jax.Array:
    """Checks that a key can draw databases.

    Such a key need not be secret, but its implementation must work under `vmap`.
    """
    key = _one_key(key)
    if (implementation := jax.random.key_impl(key)) not in (CHACHA20, SEEDED_CHACHA20, _THREEFRY):
        raise TypeError(
            f"key must be of the implementation chacha20 or {_THREEFRY}, got {implementation}:"
            " make one by dpjax.random.secure_key()"
        )
    return key


def sampling_key(key: jax.Array) -> jax.Array:
    """Returns the key if it is a threefry key; otherwise a threefry key derived from it.

    Oracles that use rejection sampling take 19 times as long with ChaCha20 keys.
    """
    if jax.random.key_impl(check_sampling_key(key)) == _THREEFRY:
        return key
    data = jax.random.key_data(key)
    if _checks.is_traced(data):
        words = jax.random.bits(jax.random.fold_in(key, _SAMPLING), (2,), jnp.uint32)
    else:  # NumPy computes the same words without compilation.
        on_host = _chacha20.bits_of_child_on_host(np.asarray(data), _SAMPLING)[:2]
        words = jax.device_put(on_host, data.sharding if data.committed else None)
    return jax.random.wrap_key_data(words, impl=_THREEFRY)


def _one_key(key: object) -> jax.Array:
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        # The message must not show the contents of `key`, which may be the words of a key.
        got = repr(key) if key is None or isinstance(key, int) else f"a {type(key).__name__}"
        if (dtype := getattr(key, "dtype", None)) is not None:
            got = f"a raw {dtype} array"
        raise TypeError(
            f"key must be a typed JAX key, got {got}; make one by"
            " dpjax.random.secure_key(), or restore a stored one by jax.random.wrap_key_data(data,"
            " impl=dpjax.random.CHACHA20)"
        )
    if key.shape != ():
        raise ValueError(f"key must be one key, got shape {key.shape}; use jax.vmap for a batch")
    return key


def _wrap(bits: int, implementation: Hashable) -> jax.Array:
    words = [bits >> 32 * i & 0xFFFFFFFF for i in range(KEY_WORDS)]
    data = jax.device_put(np.array(words, np.uint32))  # `device_put` needs no compilation.
    return jax.random.wrap_key_data(data, impl=implementation)


def split_on_host(key: jax.Array, count: int) -> list[jax.Array]:
    """Returns the same keys as `jax.random.split`, for a chacha20 key that is not traced.

    NumPy computes the words of the new keys without compilation.
    """
    data = jax.random.key_data(key)
    children = _chacha20.children_on_host(np.asarray(data), count)
    place = data.sharding if data.committed else None
    implementation = jax.random.key_impl(key)
    return [
        jax.random.wrap_key_data(jax.device_put(child, place), impl=implementation)
        for child in children
    ]


class KeyLedger(OpenLedger):
    """Records the keys of releases, and refuses a key that was used before.

    In a block `with ledger:`, the ledger records the key of every release.
    `dpjax.privatize(target, mechanism, ledger=ledger)` makes a private function whose keys are
    recorded. If two releases use the same key, they share their noise, so their difference reveals
    the difference of the values. `dpjax.Ledger` records keys, too, and also has a budget.

    Attributes:
        path: the path of the file with the fingerprints; None for memory only.

    Formal guarantees:
        Each key can be recorded at most once in the lifetime of the file, also by several
        processes. The ledger records the key that is passed to a release, not keys derived from
        this key. It refuses releases inside of `jit` or `vmap`, because their keys are unknown.

        While a `with` block is open, it covers all threads of the process. A release notifies the
        ledgers of the blocks around it. An asyncio task starts with the blocks around the code that
        created it. A release outside of any block, such as in a new thread, notifies all ledgers
        that are open elsewhere in the process. The ledger does not cover programs that were
        compiled ahead of time (`jit(f).lower(...).compile()`), other processes, and
        `mechanism.unpaid_draw`.

        A fingerprint is the SHA-256 of 256 random bits, and reveals nothing about the key. But the
        fingerprint of a seeded key can be found by trying seeds.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Opens or creates a ledger.

        Args:
            path: the path of an SQLite file; None keeps the ledger in memory.

        Raises:
            TypeError: if the path is of another type.
            ValueError: if the path names no file, such as ":memory:", "" and URIs.
        """
        if path is not None:
            path = database_file(path, instead="pass None to keep the ledger in memory")
        self.path = path
        # Without the lock, an error in one thread could roll back the insertion of another thread.
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            ":memory:" if path is None else path, check_same_thread=False
        )
        # If this ledger is part of a reference cycle, Python may finalize the connection before the
        # ledger. So `weakref.finalize` closes the connection: Python calls `close` before it
        # finalizes any object of the cycle. At exit, the connection stays open for the caller's own
        # exit functions.
        weakref.finalize(self, self._connection.close).atexit = False
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
        refuse_traced(key)
        claimed = fingerprint_of_key(key)
        try:
            with self._lock, self._connection:
                self._connection.execute("INSERT INTO used_keys VALUES (?)", (claimed,))
        except sqlite3.IntegrityError as error:
            raise used_before(claimed) from error

    def record(self, release: Payment) -> None:
        """Records the key of a release as used."""
        assert release.key is not None  # Every release that dpjax draws has a key.
        self.claim(release.key)

    def __len__(self) -> int:
        return self._connection.execute("SELECT COUNT(*) FROM used_keys").fetchone()[0]

    def __contains__(self, key: jax.Array) -> bool:
        query = "SELECT 1 FROM used_keys WHERE fingerprint = ?"
        return self._connection.execute(query, (fingerprint_of_key(key),)).fetchone() is not None


# The largest number that can be folded into a key. Callers fold in numbers from 0 upward, and never
# reach it.
_LAST = np.uint32(2**32 - 1)


def key_for_each(key: jax.Array, value: Value) -> jax.Array:
    """Returns the key, after checking that a `vmap` over the value also maps over the key.

    Raises ValueError if `vmap` or `shard_map` maps over values but not over keys.

    If two values had the same key, they would have the same noise, which would reveal their
    difference. The noise must be drawn from the returned key, so that JAX cannot remove the check
    as dead code.
    """
    _shards.refuse_unchecked()
    # The returned key is a new object with the same words, so `jax.debug_key_reuse` would not
    # notice that the given key is used. This empty draw marks it as used.
    used = jax.random.bits(key, (0,))
    data = _checked(jax.random.key_data(key), used, value)
    if alone := _shards.varying_axes(value) - _shards.varying_axes(data):
        raise ValueError(_message(f"jax.shard_map shards values over {sorted(alone)}"))
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return _other_than_on_earlier_shards(key)


def _other_than_on_earlier_shards(key: jax.Array) -> jax.Array:
    """Returns the key, or a new key if an earlier shard has the same key.

    After `jax.lax.pcast`, the type of a key says that it varies over shards, although its bits are
    the same on all of them.
    """
    axes = tuple(sorted(_shards.varying_axes(key)))
    if not axes:
        return key
    data = jax.random.key_data(key)
    everywhere = lax.all_gather(data, axes)
    same = jnp.all(everywhere == data[None], axis=1)
    earlier = jnp.arange(len(everywhere)) < lax.axis_index(axes)
    repeated = jnp.sum(same & earlier, dtype=jnp.uint32)
    other = jax.random.fold_in(key, _LAST - repeated)
    return jnp.where(repeated == 0, key, other)


@jax.custom_jvp
def _checked(key_data: jax.Array, used: jax.Array, value: Value) -> jax.Array:
    return _mapped_alike(key_data, used, value)


@_checked.defjvp
def _without_derivative(
    primals: tuple[jax.Array, jax.Array, Value], tangents: PyTree
) -> tuple[jax.Array, PyTree]:
    """Defines the tangent of a key as zero, because JAX's own rule may recurse forever."""
    del tangents
    data = _checked(*primals)
    return data, np.zeros(data.shape, jax.dtypes.float0)


@custom_vmap
def _mapped_alike(key_data: jax.Array, used: jax.Array, value: Value) -> jax.Array:
    del used, value
    return key_data


@_mapped_alike.def_vmap
def _mapped(
    axis_size: int,
    mapped: tuple[bool, bool, PyTree],
    key_data: jax.Array,
    used: jax.Array,
    value: Value,
) -> tuple[jax.Array, bool]:
    del axis_size
    key_is_mapped, _, value_is_mapped = mapped
    if any(jax.tree.leaves(value_is_mapped)) and not key_is_mapped:
        raise ValueError(_message("jax.vmap maps over values"))
    return _mapped_alike(key_data, used, value), key_is_mapped


def forwards_key(equation: jex.JaxprEqn) -> bool:
    """Whether an operation is the check of `key_for_each`, which returns its first operand."""
    return getattr(equation.params.get("rule"), "rule", None) is _mapped


def _message(cause: str) -> str:
    return (
        f"key must be one for each value: {cause} and not over keys. With the same key, the exact"
        " differences of the values would be released: split the key, and map over both"
    )
