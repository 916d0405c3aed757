"""The key of a cell: a function of the base key, its coordinates and its repeat, and no more."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax.random._facade import check_sampling_key
from dpjax.sweeps._canonical import fingerprint_of_value

WORDS = 5  # Four of what a cell's coordinates are, one of its repeat.
MOST_REPEATS = 2**32 - 1


def cell_key(key: jax.Array, coordinates: Mapping[str, Any], *, repeat: int = 0) -> jax.Array:
    """The key that `dpjax.sweep` gives to a cell, so that one cell can be run alone.

    Args:
        key: of the sweep.
        coordinates: the value of every parameter, traced and static, by name; of a static
            parameter that was given as a dict, the name of the value.
        repeat: which repeat, from 0.

    Returns:
        A key of the same implementation.

    Raises:
        TypeError: if the key is not a typed key, or a value is not one that a sweep takes.
        ValueError: if the repeat is out of range, or a value is NaN.

    Formal guarantees:
        Names and values are hashed to 128 bits, which are folded into the key, and then the repeat:
        distinct cells have distinct keys, but for collisions among 128 bits, or among the 64 of a
        threefry2x32 key.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
        >>> one = dpjax.cell_key(key, {"epsilon": 1, "n": 100})
        >>> bool(one == dpjax.cell_key(key, {"n": 100, "epsilon": 1.0}))
        True
    """
    check_sampling_key(key)
    repeat = _checks.integer("repeat", repeat, least=0, most=MOST_REPEATS)
    cell = fingerprint_of_cell(fingerprint_of_value(*item) for item in sorted(coordinates.items()))
    return cell_keys(key, words_of_cells([cell], np.array([repeat])))[0]


def fingerprint_of_cell(fingerprints: Iterable[bytes]) -> bytes:
    """128 bits for the coordinates of a cell, from those of its parameters in order of name."""
    return hashlib.sha256(b"".join(fingerprints)).digest()[:16]


def words_of_cells(cells: list[bytes], repeats: np.ndarray) -> np.ndarray:
    """What is folded into the key, uint32 of shape (cells * repeats, 5): all repeats of a cell."""
    of_cells = np.frombuffer(b"".join(cells), ">u4").astype(np.uint32).reshape(len(cells), -1)
    words = np.repeat(of_cells, len(repeats), axis=0)
    return np.column_stack([words, np.tile(repeats.astype(np.uint32), len(cells))])


@jax.jit
def cell_keys(key: jax.Array, words: jax.Array) -> jax.Array:
    """The keys of cells, from words of shape (cells, 5)."""
    words = jnp.asarray(words)

    def fold(keys: jax.Array, data: jax.Array) -> tuple[jax.Array, None]:
        return jax.vmap(jax.random.fold_in)(keys, data), None

    keys, _ = lax.scan(fold, jnp.broadcast_to(key, words.shape[:1]), words.T)
    return keys
