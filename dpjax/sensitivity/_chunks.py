"""Compiled programs that compute distances chunk by chunk, on one or several devices.

Each device computes the chunks of its own block of pairs, and keeps their distances in its memory.
To select the order statistic, devices exchange only counts of distances. The first pairs of a
sampling are also probed: their chunks also evaluate the target on rotated records, and return some
databases and values.

Finished chunks can be stored on disk, so that an interrupted run can continue.
"""

import dataclasses
import functools
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._files._chunk_files import check_run, read_chunks, write_chunks
from dpjax._files._durable import Json, check_folder
from dpjax._running._devices import AXIS, Device, Layout, platform_of, row_of, within
from dpjax._tracing._host_calls import Role, sampled
from dpjax._tracing._lanes import touching
from dpjax._tracing._programs import kept_jit
from dpjax.sensitivity._norms import distance
from dpjax.sensitivity._order_statistics import select, select_on_host
from dpjax.sensitivity._pairs import RandomPair, rotated_pair

_KIND = "checkpoint"
# After a save, the loop waits at least this many times as long as the save took, and then saves
# again. So writing checkpoints takes at most a twentieth of the time.
_SHARE = 20


class Seen(NamedTuple):
    """The measurements of the probes (the checks in `_probes.py`) on one chunk.

    Attributes:
        probes: the number of probed pairs, which are the first pairs of the chunk.
        permuted: the largest change of a value when the records of its database are rotated.
        alone: the largest difference between the value of a database that is evaluated alone, and
            the value of the same database in the batch.
        elsewhere: for each probed pair, how much the value changes when the record at a random
            position is replaced.
    """

    probes: int = 0
    permuted: float = 0.0
    alone: float = 0.0
    elsewhere: tuple[float, ...] = ()


class Finished(NamedTuple):
    """The distances of a finished chunk, and the results of its probes."""

    distances: np.ndarray
    resolution: float
    seen: Seen = Seen()


class Checkpoint:
    """The finished chunks of one run, in one file for each host.

    Attributes:
        path: the path of this host's file. With several hosts, the files are called "PATH.0-of-2",
            "PATH.1-of-2" and so on.
    """

    def __init__(self, path: str | os.PathLike[str], run: Json) -> None:
        """Reads the files that any number of hosts have written. Refuses files of another run."""
        named = pathlib.Path(os.fspath(path))
        hosts = jax.process_count()
        self.path = named
        if hosts > 1:
            self.path = named.with_name(f"{named.name}.{jax.process_index()}-of-{hosts}")
        check_folder(named, _KIND)
        if named.is_dir():
            raise ValueError(f"checkpoint {named} must be a file, but is a folder")
        self._run = run
        self._found: dict[tuple[int, int], Finished] = {}
        names = rf"{re.escape(named.name)}(\.\d+-of-\d+)?"
        for file in read_chunks(named.parent, names, _KIND):
            check_run(file, run, f"checkpoint {file.path}", place="file")
            keys, resolutions, moved, elsewhere, rows = file.arrays
            places = map(tuple, keys.tolist())
            chunks = map(Finished, rows, resolutions.tolist(), _seen(moved, elsewhere))
            self._found.update(zip(places, chunks, strict=True))
        self._unsaved = 0
        self._next_save = time.monotonic()

    def found(self, position: int) -> dict[int, Finished]:
        """Returns the finished chunks for one position of the changed record."""
        return {chunk: x for (place, chunk), x in self._found.items() if place == position}

    @property
    def chunks(self) -> Iterable[tuple[int, int]]:
        """Returns (position of the changed record, index of the chunk) for all finished chunks."""
        return self._found

    def add(self, position: int, chunks: dict[int, Finished]) -> None:
        """Adds finished chunks, and saves all chunks if the last save was long enough ago."""
        self._found.update(((position, chunk), finished) for chunk, finished in chunks.items())
        self._unsaved += len(chunks)
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Writes all finished chunks to the file of this host."""
        if not self._unsaved:
            return
        start = time.monotonic()
        rows, resolutions, seen = zip(*self._found.values(), strict=True)
        keys = np.array(list(self._found), np.uint32)
        arrays = [keys, np.array(resolutions, np.float64), *_arrays(seen), np.stack(rows)]
        write_chunks(self.path, _KIND, {"run": self._run}, arrays)
        self._unsaved = 0
        end = time.monotonic()
        self._next_save = end + _SHARE * (end - start)


def _arrays(seen: Sequence[Seen]) -> tuple[np.ndarray, np.ndarray]:
    """Converts probe results to arrays: three numbers per chunk, and rows of distances.

    Rows are padded with NaN.
    """
    moved = np.array([x[:3] for x in seen], np.float64)
    elsewhere = np.full((len(seen), max(len(x.elsewhere) for x in seen)), np.nan)
    for row, x in zip(elsewhere, seen, strict=True):
        row[: len(x.elsewhere)] = x.elsewhere
    return moved, elsewhere


def _seen(moved: np.ndarray, elsewhere: np.ndarray) -> list[Seen]:
    distances = (tuple(row[~np.isnan(row)].tolist()) for row in elsewhere)
    rows = zip(moved.tolist(), distances, strict=True)
    return [Seen(int(count), *x, elsewhere=far) for (count, *x), far in rows]


P = ParamSpec("P")
T = TypeVar("T")

SPREAD, SHARED = PartitionSpec(AXIS), PartitionSpec()
# If there are at most this many distances, the host selects the order statistic, even if an
# accelerator computed the distances. In this case, no program for the selection needs to be
# compiled.
_FEW = 2**16
# This many databases are evaluated twice, in a batch and alone, and the two values are compared. If
# no operation mixes the lanes of a `vmap`, the values differ only by rounding. Rounding changes the
# values of nearly all databases, so this many are enough to measure the difference.
LEAST_ALONE = 8


@dataclasses.dataclass(frozen=True)
class Probing:
    """How many pairs of a chunk are probed. These are the first pairs of the chunk.

    Attributes:
        rotated: the number of pairs that are also evaluated with rotated records.
        kept: the number of pairs whose database and value are returned to the host.
    """

    rotated: int = 0
    kept: int = 0

    @property
    def rows(self) -> int:
        """Returns `rotated`, but at least 1, because a sharded array must not be empty."""
        return max(self.rotated, 1)


class Probed(NamedTuple):
    """The measurements of the probes on the first pairs of a chunk.

    Attributes:
        permuted: how much the value changes when the records are rotated.
        elsewhere: how much the value changes when the record at a random position is replaced.
        databases: the databases D of the first pairs.
        values: the target's values on these databases, computed in the batch of the chunk.
    """

    permuted: jax.Array
    elsewhere: jax.Array
    databases: Database
    values: Value


NOTHING = Probing()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """The distances that the devices of this host have computed.

    Attributes:
        distances: shape (devices * (chunks of a device + 1), size). Each chunk of a device has a
            row. Each device also has a spare row, to which it writes when it has no chunk left.
            Entries without a pair are infinite, so that selection ignores them. There is a third
            axis if each pair yields several distances.
        resolution: shape (devices,), the coarsest resolution of a value so far on each device.
    """

    distances: jax.Array
    resolution: jax.Array


def probing_of(pair: RandomPair, size: int, count: int) -> Probing:
    """Returns how many pairs of a chunk of `size` pairs are probed.

    `count` is the number of probed pairs in all chunks together.
    """
    most = min(size, count)
    kept = most if touching(pair.target.jaxpr) else min(most, LEAST_ALONE)
    return Probing(most if pair.positions == "last" else 0, kept)


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
    """Returns distances and resolutions of the pairs from `start` on, and the results of probes.

    The resolution of a pair is the norm of one unit in the last place of each coordinate of f(D).
    """
    # Indices count pairs over all chunks, because pair i must not depend on the chunk size. In the
    # last chunk, indices may exceed m, and the caller masks the distances of these pairs.
    indices = start + jnp.arange(size, dtype=jnp.uint32)
    if rotations is None:
        return *jax.vmap(pair.distance, in_axes=(None, 0, None))(key, indices, position), None

    def one(index: jax.Array) -> tuple[jax.Array, jax.Array, PyTree]:
        database, neighbor = pair.databases(key, index, position)
        value, other = pair.values(index, database, neighbor)
        found = pair.between(key, index, value, other)
        spare = jax.tree.map(lambda leaf: leaf[-1:], neighbor)
        return found, pair.resolution(value), (database, value, spare)

    distances, resolutions, drawn = jax.vmap(one)(indices)
    moved = elsewhere = jnp.zeros(probing.rows, pair.distance_dtype)
    if probing.rotated:
        first = jax.tree.map(lambda x: x[: probing.rotated], (indices, *drawn))
        moved, elsewhere = jax.vmap(partial(_at_two_positions, pair))(rotations, *first)
    kept = jax.tree.map(lambda x: x[: probing.kept], drawn[:2])
    return distances, resolutions, Probed(moved, elsewhere, *kept)


def _at_two_positions(
    pair: RandomPair,
    steps: jax.Array,
    index: jax.Array,
    database: Database,
    value: Value,
    spare: Database,
) -> tuple[jax.Array, jax.Array]:
    """Returns how much the value changes if the records are rotated, and then the last is replaced.

    The rotation moves a record from a random position to the last position, where it is replaced.
    So the second change is that of replacing a record at a random position.
    """
    records = jax.tree.map(lambda *x: jnp.concatenate(x), database, spare)
    target = partial(pair.target, origin=sampled(Role.PERMUTED, index))
    # With `vmap`, the program contains the target once for both values. With two copies,
    # compilation would take twice as long.
    values = jax.vmap(target)(rotated_pair(records, steps))
    other, neighbor = (jax.tree.map(lambda x, i=i: x[i], values) for i in (0, 1))
    elsewhere = distance(pair.norm, other, neighbor).astype(pair.distance_dtype)
    return moved_if_finite(pair, value, other), elsewhere


def moved_if_finite(pair: RandomPair, value: Value, other: Value) -> jax.Array:
    """Returns the distance between two values, or 0 if the first value is not finite."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(value)]
    moved = distance(pair.norm, value, other)
    # If a value is not finite, the sampler already counts its distance as infinite.
    return jnp.where(jnp.all(jnp.stack(finite)), moved, 0).astype(pair.distance_dtype)


def empty_block(
    layout: Layout,
    found: dict[int, Finished],
    dtype: np.dtype,
    numbers: tuple[int, ...] = (),
) -> Block:
    """Makes a block that contains the known distances and resolutions, given by chunk."""
    shape = layout.block + 1, layout.size, *numbers
    distances, resolutions = [], []
    for d, device in layout.local.items():
        rows = jnp.full(shape, jnp.inf, dtype, device=device)
        known = [chunk for chunk in layout.chunks_of(d) if chunk in found]
        if known:
            places = np.array(known) - d * layout.block
            rows = rows.at[places].set(np.stack([found[chunk].distances for chunk in known]))
        coarsest = np.array([max((found[chunk].resolution for chunk in known), default=0.0)], dtype)
        distances.append(rows)
        resolutions.append(jax.device_put(coarsest, device))
    mesh = layout.local_mesh
    return Block(_joined(distances, mesh), _joined(resolutions, mesh))


def compute_chunks(
    block: Block,
    key: jax.Array,
    position: int,
    chunks: list[int | None],
    *,
    layout: Layout,
    pair: RandomPair,
    probing: Probing = NOTHING,
    rotations: np.ndarray | None = None,
) -> tuple[Block, jax.Array, jax.Array, Probed | None]:
    """Computes one chunk on every device of this host.

    Args:
        block: the distances so far; its buffers are donated.
        key: the key of the sampling.
        position: the changed record, for positions="each".
        chunks: the number of each device's chunk; None for a device that has no chunk left.
        layout: which device computes which chunks.
        pair: draws a pair and computes its distance.
        probing: how much to probe.
        rotations: the number of places by which to rotate the records of each probed database.

    Returns:
        The updated block; the chunks' distances, shape (devices, size); their resolutions; and the
        results of the probes, concatenated over devices.
    """
    # A device without a chunk computes chunk 0 again, and writes it to its spare row. So all
    # devices run the same program in every step, and no device waits for another.
    work = [
        (0, 0, layout.block)
        if chunk is None
        else (chunk * layout.size, layout.pairs_in(chunk), chunk - d * layout.block)
        for d, chunk in zip(layout.local, chunks, strict=True)
    ]
    with within(layout.local_mesh):
        work = np.array(work, np.uint32)
        settings = _settings(layout, pair, probing)
        return _compiled_step(block, key, np.uint32(position), work, rotations, **settings)


def _settings(layout: Layout, pair: RandomPair, probing: Probing) -> dict[str, Any]:
    """Returns the static arguments of `_compiled_step`."""
    return {"pair": pair, "size": layout.size, "mesh": layout.local_mesh, "probing": probing}


@functools.lru_cache(128)
def bytes_of_a_chunk(
    key: jax.ShapeDtypeStruct, *, layout: Layout, pair: RandomPair, probing: Probing = NOTHING
) -> int:
    """Returns how many bytes a device needs to compute a chunk, besides the block of distances.

    This function compiles the program of `compute_chunks` with the same arguments. So
    `compute_chunks` does not compile it again.
    """
    mesh, count = layout.local_mesh, len(layout.local)
    device = next(iter(layout.local.values()))
    if mesh is not None:
        sharding = NamedSharding(mesh, SPREAD)
    else:
        sharding = None if device is None else SingleDeviceSharding(device)
    spec = partial(jax.ShapeDtypeStruct, dtype=pair.distance_dtype, sharding=sharding)
    rows: Any = spec((count * (layout.block + 1), layout.size, *pair.numbers))
    resolutions: Any = spec((count,))
    rotations = np.zeros(count * probing.rows, np.int32) if probing.kept else None
    with within(mesh):
        arrays = Block(rows, resolutions), key, np.uint32(0), np.zeros((count, 3), np.uint32)
        lowered = _compiled_step.lower(*arrays, rotations, **_settings(layout, pair, probing))
        memory: Any = lowered.compile().memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + kept


@kept_jit("pair", "size", "mesh", "probing", donate=(0,))
def _compiled_step(
    *arrays: Any, pair: RandomPair, size: int, mesh: Mesh | None, probing: Probing
) -> tuple[Block, jax.Array, jax.Array, Probed | None]:
    """Computes one chunk on every device of a mesh.

    Block, work and rotations are sharded over the mesh. The work of a device is three integers: the
    index of the chunk's first pair, the number of pairs in the chunk, and the row of the block to
    which the distances are written.
    """

    def step(
        block: Block, key: Key, position: jax.Array, work: jax.Array, rotations: jax.Array | None
    ) -> tuple[Block, jax.Array, jax.Array, Probed | None]:
        start, count, place = work[0]
        distances, resolutions, probed = chunk_distances(
            key, start, position, rotations, pair=pair, size=size, probing=probing
        )
        # Every chunk has the same size, even the last one. Another size would need another compiled
        # program, which may round differently.
        places = jnp.arange(size, dtype=jnp.uint32).reshape(-1, *(1 for _ in pair.numbers))
        new = jnp.where(places < count, distances, jnp.inf)[None]
        coarsest = jnp.max(resolutions)[None]
        rows = lax.dynamic_update_slice_in_dim(block.distances, new, place, 0)
        return Block(rows, jnp.maximum(block.resolution, coarsest)), new, coarsest, probed

    return on_every(mesh, step, (SPREAD, SHARED, SHARED, SPREAD, SPREAD))(*arrays)


def kth_distance(block: Block, k: int, *, layout: Layout) -> tuple[float, float]:
    """Returns the k-th smallest distance over all hosts, and the coarsest resolution."""
    quick = block.distances.size <= _FEW or platform_of(layout.devices[0]) == "cpu"
    if quick and len(layout.local) == len(layout.devices):
        selected = select_on_host(np.asarray(block.distances), k)
        return float(selected), float(np.asarray(block.resolution).max())
    mesh = row_of(layout.devices)
    everywhere = jax.tree.map(
        lambda x: _joined([shard.data for shard in x.addressable_shards], mesh), block
    )
    with within(mesh):
        distance, resolution = _compiled_selection(everywhere, np.uint32(k), mesh=mesh)
    return float(distance), float(resolution)


@functools.partial(jax.jit, static_argnames="mesh")
def _compiled_selection(
    found: Block, k: jax.Array, *, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array]:
    axis = None if mesh is None else AXIS

    def step(found: Block, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        resolution = jnp.max(found.resolution)
        resolution = resolution if axis is None else lax.pmax(resolution, axis)
        return select(found.distances, k, axis=axis), resolution

    return on_every(mesh, step, (SPREAD, SHARED), SHARED)(found, k)


def all_distances(block: Block, *, layout: Layout) -> jax.Array:
    """Returns the distances in the order of the pairs.

    The shape is (m,), or (m, q) if each pair has q distances, as for several norms.
    """
    mesh = row_of(layout.devices)
    everywhere = _joined([shard.data for shard in block.distances.addressable_shards], mesh)
    with within(mesh):
        numbers = everywhere.shape[2:]
        rows = everywhere.reshape(len(layout.devices), layout.block + 1, layout.size, *numbers)
        return rows[:, : layout.block].reshape(-1, *numbers)[: layout.m]


def spread_chunks(
    chunk: Callable[[jax.Array], T], chunks: jax.Array, devices: tuple[Device | None, ...]
) -> T:
    """Maps a function of one chunk over chunks and devices. Call it inside a larger program."""
    # All devices run the same program, so each device computes the same number of chunks. Chunks
    # are padded to this number, and the results of the padding are dropped at the end.
    count = len(chunks)
    each = -(-count // len(devices))
    padded = jnp.pad(chunks, [(0, each * len(devices) - count)] + [(0, 0)] * (chunks.ndim - 1))
    mapped = on_every(row_of(devices), partial(lax.map, chunk), SPREAD)
    return jax.tree.map(lambda x: x[:count], mapped(padded))


def on_every(
    mesh: Mesh | None,
    function: Callable[P, T],
    in_specs: PartitionSpec | tuple[PartitionSpec, ...],
    out_specs: PartitionSpec = SPREAD,
) -> Callable[P, T]:
    """Runs a function on every device of a mesh, each of which gets its own shard of the arrays."""
    if mesh is None:
        return function
    # `check_vma` is disabled, because it would reject a target with a loop whose initial carry does
    # not vary over devices.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _joined(shards: list[jax.Array], mesh: Mesh | None) -> jax.Array:
    """Joins the shards of this host, which are on the devices of a mesh, into one array."""
    if mesh is None:
        return shards[0]
    shape = (len(shards[0]) * mesh.size, *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, SPREAD), shards)
