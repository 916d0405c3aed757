"""Keys: how to make them, which ones are accepted, and the keys that draw databases.

Sampling holds no secret, so databases are drawn under threefry, which is fast.
"""

import secrets
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax.random._chacha20 import CHACHA20, KEY_WORDS, SEEDED_CHACHA20, bits_of_child_on_host

_THREEFRY = "threefry2x32"
_SAMPLING = 2**32 - 1  # Folded into a key to draw databases with the result.


def secure_key() -> jax.Array:
    """A key from the operating system's entropy, for anything that is published.

    Returns:
        A typed JAX key of the chacha20 implementation, with 256 random bits.

    Raises:
        NotImplementedError: where the operating system offers no source of entropy.

    Formal guarantees:
        The key is uniform over 2^256 values if the operating system's source is uniform. Nobody can
        tell draws from uniform bits without breaking ChaCha20. Anyone who sees the key's words can
        remove the noise, and JAX prints the words of a key: never leave a key as the last line of
        a notebook's cell or in a log. A key is not pickled. Store `jax.random.key_data(key)`, which
        is as secret, and restore it as in the example. JAX knows the implementation by this object,
        not by a name. Use it only for data that came from such a key.

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
        seed: an integer in [0, 2^256), whatever the size of JAX's integers.

    Returns:
        A typed JAX key with the bits of chacha20, of an implementation of its own. Keys derived
        from it have this implementation too, and every release under one says "seeded key".

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it is out of range.

    Formal guarantees:
        None: anyone who guesses the seed can remove the noise, and a search finds seeds.

    Source:
        RFC 8439; the seed is the key, least significant word first.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
    """
    bits = _checks.integer("seed", seed, least=0, most=2 ** (32 * KEY_WORDS) - 1)
    return _wrap(bits, SEEDED_CHACHA20)


def is_seeded(key: jax.Array) -> bool:
    """Whether a chacha20 key came from a seed."""
    return jax.random.key_impl(key) == SEEDED_CHACHA20


def check_key(key: object) -> jax.Array:
    """Accepts one typed key of the chacha20 implementation, for releases."""
    key = _one_key(key)
    if (implementation := jax.random.key_impl(key)) not in (CHACHA20, SEEDED_CHACHA20):
        raise TypeError(
            f"key must be of the chacha20 implementation to release anything, got {implementation}:"
            " its output can be searched or predicted; make one by dpjax.random.secure_key()"
        )
    return key


def check_sampling_key(key: object) -> jax.Array:
    """Accepts a key that draws databases: it need not be secret, but `vmap` must keep its bits."""
    key = _one_key(key)
    if (implementation := jax.random.key_impl(key)) not in (CHACHA20, SEEDED_CHACHA20, _THREEFRY):
        raise TypeError(
            f"key must be of the implementation chacha20 or {_THREEFRY}, got {implementation};"
            " make one by dpjax.random.secure_key()"
        )
    return key


def sampling_key(key: jax.Array) -> jax.Array:
    """A threefry key itself, and from a key of another kind a derived threefry key.

    Oracles that draw by rejection take 19 times as long under ChaCha20.
    """
    if jax.random.key_impl(check_sampling_key(key)) == _THREEFRY:
        return key
    data = jax.random.key_data(key)
    words = _derived(key) if _checks.is_traced(data) else _derived_on_host(data)
    return jax.random.wrap_key_data(words, impl=_THREEFRY)


def _one_key(key: object) -> jax.Array:
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        # Without its contents, which may be the words of a key.
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
    data = jnp.asarray(np.array(words, np.uint32))
    return jax.random.wrap_key_data(data, impl=implementation)


def _derived(key: jax.Array) -> jax.Array:
    return jax.random.bits(jax.random.fold_in(key, _SAMPLING), (2,), jnp.uint32)


def _derived_on_host(data: jax.Array) -> jax.Array:
    """The same words, without a program to compile."""
    words = bits_of_child_on_host(np.asarray(data), _SAMPLING)[:2]
    return jax.device_put(words, data.sharding if data.committed else None)
