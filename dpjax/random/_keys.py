"""Where keys come from, and which keys are accepted."""

import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax.random._chacha20 import CHACHA20, KEY_WORDS, SEEDED_CHACHA20

_THREEFRY = "threefry2x32"


def secure_key() -> jax.Array:
    """A key from the operating system's entropy, for anything that is published.

    Returns:
        A typed JAX key of the chacha20 implementation, with 256 random bits.

    Raises:
        NotImplementedError: where the operating system offers no source of entropy.

    Formal guarantees:
        The key is uniform over 2^256 values, as far as the operating system's source is. What is
        drawn from it is indistinguishable from uniform bits to whoever cannot break ChaCha20.
        Whoever sees its words removes the noise, and printing a key shows them, as JAX prints all
        keys: never leave one as the last line of a cell of a notebook, nor in a log. It is stored
        as `jax.random.key_data(key)`, a secret, and restored as in the example: JAX does not know
        its implementation by a name, and the object is for data that such a key had and no other.

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
        A typed JAX key of an implementation of its own, with the bits of chacha20. So have all keys
        that are derived from it, and every release under one of them says "seeded key".

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it is out of range.

    Formal guarantees:
        None: whoever guesses the seed removes the noise, and seeds are found by search.

    Source:
        RFC 8439; the seed is the key, least significant word first.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
    """
    bits = _checks.integer("seed", seed, least=0, most=2 ** (32 * KEY_WORDS) - 1)
    return _wrap(bits, SEEDED_CHACHA20)


def is_seeded(key: jax.Array) -> bool:
    """Whether a key of one of the implementations here came from a seed."""
    return jax.random.key_impl(key) == SEEDED_CHACHA20


def check_key(key: Any) -> jax.Array:
    """Accepts one typed key of the chacha20 implementation: what is published hangs on it."""
    implementation = _implementation_of(key)
    if implementation not in (CHACHA20, SEEDED_CHACHA20):
        raise TypeError(
            f"key must be of the chacha20 implementation to release anything, got {implementation}:"
            " its output can be searched or predicted; make one by dpjax.random.secure_key()"
        )
    return key


def check_sampling_key(key: Any) -> jax.Array:
    """Accepts a key to sample databases with: no secret, but bits that no batch changes."""
    implementation = _implementation_of(key)
    if implementation not in (CHACHA20, SEEDED_CHACHA20, _THREEFRY):
        raise TypeError(
            f"key must be of the implementation chacha20 or {_THREEFRY}, got {implementation};"
            " make one by dpjax.random.secure_key()"
        )
    return key


def _implementation_of(key: Any) -> Any:
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"key must be a typed JAX key, got {_without_words(key)}; make one by"
            " dpjax.random.secure_key(), or restore a stored one by jax.random.wrap_key_data(data,"
            " impl=dpjax.random.CHACHA20)"
        )
    if key.shape != ():
        raise ValueError(f"key must be one key, got shape {key.shape}; use jax.vmap for a batch")
    return jax.random.key_impl(key)


def _without_words(value: Any) -> str:
    """What was given for a key; never its contents, which may be the words of one."""
    if hasattr(value, "dtype"):
        return f"a raw {value.dtype} array"
    return repr(value) if value is None or isinstance(value, int) else f"a {type(value).__name__}"


def _wrap(bits: int, implementation: Any) -> jax.Array:
    words = [bits >> 32 * i & 0xFFFFFFFF for i in range(KEY_WORDS)]
    data = jnp.asarray(np.array(words, np.uint32))
    return jax.random.wrap_key_data(data, impl=implementation)
