"""Chunks: the unit of work, of memory and of reproducibility."""

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax.sensitivity._pairs import RandomPair

# On a CPU the fastest chunk fits the cache; on an accelerator memory decides.
_CHUNK_BYTES = {"cpu": 2 * 2**20}
_ACCELERATOR_CHUNK_BYTES = 256 * 2**20
_LEAST_PAIRS = 2  # XLA compiles a batch of one to a program of its own, with other roundings.


def chunk_size(pair: RandomPair, m: int, batch_size: int | None) -> int:
    """Pairs in a chunk: a function of programs, shapes and backend alone, never more than m."""
    if batch_size is not None:
        return min(m, _checks.integer("batch_size", batch_size, least=1))
    return min(m, _fitting(pair.bytes_of_a_pair))


def probes_at_once(pair: RandomPair, count: int, size: int) -> int:
    """Databases to evaluate the target itself on at a time."""
    return min(count, size, _fitting(pair.bytes_of_a_database))


def _fitting(each: int) -> int:
    budget = _CHUNK_BYTES.get(jax.default_backend(), _ACCELERATOR_CHUNK_BYTES)
    fitting = max(_LEAST_PAIRS, budget // max(1, each))
    return 2 ** (fitting.bit_length() - 1)


def chunk_distances(
    key: jax.Array, start: jax.Array, position: jax.Array, *, pair: RandomPair, size: int
) -> tuple[jax.Array, jax.Array]:
    """Distances and resolutions of the pairs start, ..., start + size - 1."""
    indices = start + jnp.arange(size, dtype=jnp.uint32)
    return jax.vmap(pair.distance, in_axes=(None, 0, None))(key, indices, position)
