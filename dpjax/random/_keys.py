"""Where keys come from, and which keys are accepted."""

import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks

IMPLEMENTATION = "threefry2x32"


def secure_key() -> jax.Array:
    """A key from the operating system's entropy, for anything that is published.

    Returns:
        A typed JAX key of the threefry2x32 implementation, with 64 random bits.

    Raises:
        NotImplementedError: where the operating system offers no source of entropy.

    Formal guarantees:
        The key is uniform over 2^64 values. That is out of reach of the search that finds the
        32-bit seeds of `jax.random.key(seed)`, but threefry2x32 is not a cryptographic generator.

    Source:
        Python's `secrets` module.

    Example:
        >>> import jax
        >>> import dpjax
        >>> key_sample, key_release = jax.random.split(dpjax.random.secure_key())
    """
    return _wrap(secrets.randbits(64))


def seeded_key(seed: int) -> jax.Array:
    """A key from a seed, for reproducible research and tests; never for anything published.

    Args:
        seed: an integer in [0, 2^64). Below 2^32 the key is that of `jax.random.key(seed)`.

    Returns:
        A typed JAX key of the threefry2x32 implementation.

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it is out of range.

    Formal guarantees:
        None: whoever guesses the seed removes the noise.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
    """
    return _wrap(_checks.integer("seed", seed, least=0, most=2**64 - 1))


def check_key(key: Any) -> jax.Array:
    """Accepts one typed key of an implementation whose bits do not depend on the batch."""
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        shown = f"a raw {key.dtype} array" if isinstance(key, jax.Array) else repr(key)
        raise TypeError(
            f"key must be a typed JAX key, got {shown}; make one by dpjax.random.secure_key()"
        )
    if key.shape != ():
        raise ValueError(f"key must be one key, got shape {key.shape}; use jax.vmap for a batch")
    implementation = str(jax.random.key_impl(key))
    if implementation != IMPLEMENTATION:
        raise TypeError(
            f"key must be of the implementation {IMPLEMENTATION}, got {implementation!r};"
            " make one by dpjax.random.secure_key()"
        )
    return key


def _wrap(bits: int) -> jax.Array:
    words = np.array([bits >> 32, bits & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=IMPLEMENTATION)
