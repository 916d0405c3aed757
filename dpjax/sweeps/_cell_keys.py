"""The key of a cell: a function of only the base key, its coordinates and its repeat."""

import hashlib
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Key
from dpjax.random._facade import check_sampling_key
from dpjax.sweeps._canonical import fingerprint_of_value

WORDS = 5  # Four for the coordinates of a cell, one for its repeat.
MOST_REPEATS = 2**32 - 1


def cell_key(key: Key, coordinates: Mapping[str, object], *, repeat: int = 0) -> Key:
    """The key of one cell of a `dpjax.sweep`, to run the cell alone.

    Args:
        key: of the sweep.
        coordinates: the value of every parameter, traced and static, by name. If a static parameter
            was given as a dict, use the name of the value.
        repeat: the number of the repeat, from 0.

    Returns:
        A key of the same implementation.

    Raises:
        TypeError: if the key is not a typed key, or a sweep does not take a value.
        ValueError: if the repeat is out of range, or a value is NaN.

    Formal guarantees:
        A hash of 128 bits of names and values is folded into the key, and then the repeat. Distinct
        cells have distinct keys, up to collisions among 128 bits, or among the 64 bits of a
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
    """128 bits for the coordinates of a cell, from those of its parameters, sorted by name."""
    return hashlib.sha256(b"".join(fingerprints)).digest()[:16]


def words_of_cells(cells: list[bytes], repeats: np.ndarray) -> np.ndarray:
    """The words to fold into the key, uint32 of shape (cells * repeats, 5), cell by cell."""
    of_cells = np.frombuffer(b"".join(cells), ">u4").astype(np.uint32).reshape(len(cells), -1)
    words = np.repeat(of_cells, len(repeats), axis=0)
    return np.column_stack([words, np.tile(repeats.astype(np.uint32), len(cells))])


@jax.jit
def cell_keys(key: Key, words: jax.Array) -> Key:
    """The keys of cells, from words of shape (cells, 5)."""
    words = jnp.asarray(words)

    def fold(keys: Key, data: jax.Array) -> tuple[Key, None]:
        return jax.vmap(jax.random.fold_in)(keys, data), None

    keys, _ = lax.scan(fold, jnp.broadcast_to(key, words.shape[:1]), words.T)
    return keys
