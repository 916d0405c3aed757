"""Chunks: the unit of work, of memory and of reproducibility."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._running._layout import Device, Layout, devices_of
from dpjax._running._memory import fitting
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._probed_chunks import NOTHING, Probed, Probing, probed_distances

# Code on the host runs for long. So chunks are small: progress and checkpoints count in chunks.
_LEAST_HOST_CHUNKS, _LEAST_HOST_PAIRS = 16, 64
_STEPS = 32  # Sizes of one of several chunks, at most: each is a program.


def pairs_in_a_chunk(
    pair: RandomPair, m: int, chunk_size: int | None, device: Device | None
) -> int:
    """Pairs in a chunk: a function of programs, m, shapes and device alone, never more than m."""
    if chunk_size is not None:
        most = _checks.integer("chunk_size", chunk_size, least=1)
        return size_of_parts(pair, m, most)
    most = fitting(pair.bytes_of_a_pair(device), device)
    if pair.calls_host:
        most = min(most, max(_LEAST_HOST_PAIRS, -(-m // _LEAST_HOST_CHUNKS)))
        return size_of_parts(pair, m, most)
    # Few chunks are nearly even, so that little of the last one is padding; many are all the same.
    step = max(1, most // _STEPS)
    return min(m, -(-_even_part(m, most) // step) * step)


def layout_of(pair: RandomPair, m: int, chunk_size: int | None, mesh: Mesh | None) -> Layout:
    """The chunks of m pairs, on the devices of a mesh."""
    devices = devices_of(mesh, calls_host=pair.calls_host)
    layout = Layout(devices, m, pairs_in_a_chunk(pair, m, chunk_size, devices[0]))
    if len(layout.devices) > 1 and any(program.is_spread for program in pair.programs):
        raise ValueError(
            "mesh must be None or one device for a target, oracle or norm that calls jax.shard_map:"
            f" it spreads its own work, and pairs cannot be spread too, over {len(devices)} devices"
        )
    return layout


def size_of_parts(pair: RandomPair, count: int, most: int) -> int:
    """As many as possible; on the host, where padding costs whole evaluations, in even parts."""
    if pair.calls_host:
        return _even_part(count, most)
    return min(count, most)


def _even_part(count: int, most: int) -> int:
    return -(-count // -(-count // most))


def chunk_distances(
    key: jax.Array,
    start: jax.Array,
    position: jax.Array,
    rotations: jax.Array | None = None,
    *,
    pair: RandomPair,
    size: int,
    probing: Probing = NOTHING,
) -> tuple[jax.Array, jax.Array, Probed | None]:
    """Distances and resolutions of the pairs start, ..., start + size - 1; what was probed."""
    # Numbers of pairs, not places in the chunk: pair i must not depend on the chunks. In the last
    # one they run past m, and the caller masks those distances.
    indices = start + jnp.arange(size, dtype=jnp.uint32)
    if rotations is not None:
        return probed_distances(key, indices, position, rotations, pair=pair, probing=probing)
    return *jax.vmap(pair.distance, in_axes=(None, 0, None))(key, indices, position), None
