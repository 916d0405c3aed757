"""Chunks: the unit of work, of memory and of reproducibility."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax.sensitivity._pairs import PairSampler

# On a CPU the fastest chunk fits the cache; on an accelerator memory decides.
_CHUNK_BYTES = {"cpu": 2 * 2**20}
_ACCELERATOR_CHUNK_BYTES = 256 * 2**20
_LEAST_PAIRS = 2  # XLA compiles a batch of one to a program of its own, with other roundings.
_CHUNKS_IN_FLIGHT = 2


def chunk_size(sampler: PairSampler, m: int, batch_size: int | None) -> int:
    """Pairs in a chunk: a function of programs, shapes and backend alone, never more than m."""
    if batch_size is not None:
        return min(m, _checks.integer("batch_size", batch_size, least=1))
    budget = _CHUNK_BYTES.get(jax.default_backend(), _ACCELERATOR_CHUNK_BYTES)
    pair = max(1, sampler.oracle.largest_array(), sampler.target.largest_array())
    fitting = max(_LEAST_PAIRS, budget // pair)
    return min(m, 2 ** (fitting.bit_length() - 1))


def chunk_distances(
    key: jax.Array, start: jax.Array, position: jax.Array, *, sampler: PairSampler, size: int
) -> tuple[jax.Array, jax.Array]:
    """Distances and resolutions of the pairs start, ..., start + size - 1."""
    indices = start + jnp.arange(size, dtype=jnp.uint32)
    return jax.vmap(sampler.distance, in_axes=(None, 0, None))(key, indices, position)


@partial(jax.jit, static_argnames=("sampler", "size"))
def _compiled_chunk(
    key: jax.Array, start: jax.Array, position: jax.Array, *, sampler: PairSampler, size: int
) -> tuple[jax.Array, jax.Array]:
    distances, resolutions = chunk_distances(key, start, position, sampler=sampler, size=size)
    return distances, jnp.max(resolutions)


def collect_distances(
    key: jax.Array, sampler: PairSampler, *, m: int, size: int, position: int, progress: bool
) -> tuple[np.ndarray, float]:
    """The m distances, and the largest resolution, chunk by chunk in bounded memory."""
    distances = np.empty(m, np.float32)
    largest = 0.0
    for start, (chunk, resolution) in _chunks(key, sampler, m, size, position, progress):
        if start == 0:
            distances = distances.astype(chunk.dtype)
        kept = min(size, m - start)  # The last chunk is padded.
        distances[start : start + kept] = np.asarray(chunk)[:kept]
        largest = max(largest, float(resolution))
    return distances, largest


def _chunks(
    key: jax.Array, sampler: PairSampler, m: int, size: int, position: int, progress: bool
) -> Iterator[tuple[int, tuple[jax.Array, jax.Array]]]:
    """Starts a few chunks ahead, so that the device never waits for the host."""
    in_flight: deque[tuple[int, tuple[jax.Array, jax.Array]]] = deque()
    place = np.uint32(position)
    for start in _with_progress(range(0, m, size), m, size, progress):
        outputs = _compiled_chunk(key, np.uint32(start), place, sampler=sampler, size=size)
        in_flight.append((start, outputs))
        if len(in_flight) > _CHUNKS_IN_FLIGHT:
            yield in_flight.popleft()
    yield from in_flight


def _with_progress(starts: range, m: int, size: int, progress: bool) -> Iterable[int]:
    if not progress:
        yield from starts
        return
    tqdm = _checks.extra("tqdm", "progress").tqdm
    with tqdm(total=m, unit="pairs", unit_scale=True) as bar:
        for start in starts:
            yield start
            bar.update(min(size, m - start))
