"""Pairs spread over devices: each computes the chunks of a block of its own.

Devices work on their own until the end, when an order statistic adds up counts over all of them;
the distances stay where they were computed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax import _checks
from dpjax.order_statistics import select
from dpjax.sensitivity._chunks import chunk_distances
from dpjax.sensitivity._pairs import PairSampler

P = ParamSpec("P")
T = TypeVar("T")

AXIS = "pairs"
Device = Any  # jax.Device, which type checkers do not know.
_SPREAD, _SHARED = PartitionSpec(AXIS), PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which device computes which chunks.

    Attributes:
        devices: all of them, on all hosts; device d has the d-th block of consecutive chunks. None
            stands for the default device, which commits its arrays to nothing.
        m: number of pairs.
        size: pairs in a chunk.
    """

    devices: tuple[Device | None, ...]
    m: int
    size: int

    @property
    def chunks(self) -> int:
        """Number of chunks; the last one is padded."""
        return -(-self.m // self.size)

    @property
    def block(self) -> int:
        """Chunks of a device, the last devices may have fewer."""
        return -(-self.chunks // len(self.devices))

    @functools.cached_property
    def local(self) -> dict[int, Device | None]:
        """The devices of this host, by their place among all."""
        here = jax.process_index()
        return {d: x for d, x in enumerate(self.devices) if x is None or x.process_index == here}

    @property
    def spans_hosts(self) -> bool:
        """Whether other processes have some of the devices."""
        return len(self.local) < len(self.devices)

    def chunks_of(self, d: int) -> range:
        """The chunks of device d."""
        return range(min(d * self.block, self.chunks), min((d + 1) * self.block, self.chunks))

    def local_mesh(self) -> Mesh | None:
        """The devices of this host, where there are several."""
        return _row(tuple(self.local.values()))

    def mesh(self) -> Mesh | None:
        """All devices, where there are several."""
        return _row(self.devices)


def _row(devices: tuple[Any, ...]) -> Mesh | None:
    return Mesh(np.array(devices), (AXIS,)) if len(devices) > 1 else None


def devices_of(mesh: Mesh | None, sampler: PairSampler) -> tuple[Device | None, ...]:
    """The devices of a mesh, whatever its axes are called and however they are typed.

    One for each process, where a CPU that plays several devices would call the host: the call waits
    in the pool of threads that they share, so no more than one for each core runs at a time.
    """
    if mesh is None:
        return (None,)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    devices = tuple(mesh.devices.flat)
    processes = {x.process_index for x in devices}
    if jax.process_index() not in processes:
        raise ValueError(f"mesh must have devices of every process, got none of this one: {mesh}")
    if devices[0].platform == "cpu" and sampler.calls_host:
        return tuple({x.process_index: x for x in reversed(devices)}.values())[::-1]
    return devices


def placed(key: jax.Array, layout: Layout) -> jax.Array:
    """The key where this host's devices can use it, wherever it was."""
    if layout.devices == (None,):
        return key
    data: Any = np.asarray(jax.random.key_data(key))
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    devices = list(layout.local.values())
    return key if len(devices) > 1 else jax.device_put(key, devices[0])


def outside_any_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Runs a function on the host as if no `jax.set_mesh` were around it.

    Explicit axes of such a mesh would become part of the types of all arrays, a target's too.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.sharding.get_abstract_mesh().empty or _checks.is_staging():
            return function(*args, **kwargs)
        mesh, device = kwargs.get("mesh"), jax.local_devices()[0]
        if isinstance(mesh, Mesh) and mesh.devices.size == 1:
            device = mesh.devices.item()
        with jax.set_mesh(Mesh(np.array(device), ())):
            return function(*args, **kwargs)

    return alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """What the devices of this host have found.

    Attributes:
        distances: shape (devices * (chunks of a device + 1), size): a row for each chunk of the
            block, and one to spare, for devices that have nothing to do. Infinite where there is
            no pair, so that selection takes them as they are.
        resolution: shape (devices,), the coarsest so far.
    """

    distances: jax.Array
    resolution: jax.Array


def empty_block(layout: Layout, found: dict[int, tuple[np.ndarray, float]], dtype: Any) -> Block:
    """A block that holds what is known already: distances and resolution by chunk."""
    distances, resolutions = [], []
    for d, device in layout.local.items():
        rows = jnp.full((layout.block + 1, layout.size), jnp.inf, dtype, device=device)
        known = [chunk for chunk in layout.chunks_of(d) if chunk in found]
        if known:
            places = np.array(known) - d * layout.block
            rows = rows.at[places].set(np.stack([found[chunk][0] for chunk in known]))
        coarsest = np.array([max((found[chunk][1] for chunk in known), default=0.0)], dtype)
        distances.append(rows)
        resolutions.append(jax.device_put(coarsest, device))
    mesh = layout.local_mesh()
    return Block(_joined(distances, mesh), _joined(resolutions, mesh))


def compute_chunks(
    block: Block,
    key: jax.Array,
    position: int,
    chunks: list[int | None],
    *,
    layout: Layout,
    sampler: PairSampler,
) -> tuple[Block, jax.Array, jax.Array]:
    """One chunk on every device of this host; None for a device that has nothing left.

    Returns:
        The block, the chunks' distances, shape (devices, size), and their resolutions. The block
        that was passed is used up.
    """
    places = [
        layout.block if chunk is None else chunk - d * layout.block
        for d, chunk in zip(layout.local, chunks, strict=True)
    ]
    starts = [0 if chunk is None else chunk * layout.size for chunk in chunks]
    counts = [
        0 if chunk is None else min(layout.size, layout.m - start)
        for chunk, start in zip(chunks, starts, strict=True)
    ]
    mesh = layout.local_mesh()
    with within(mesh):
        return _compiled_step(
            block,
            key,
            np.uint32(position),
            np.array(starts, np.uint32),
            np.array(counts, np.int32),
            np.array(places, np.int32),
            sampler=sampler,
            size=layout.size,
            mesh=mesh,
        )


@functools.partial(jax.jit, static_argnames=("sampler", "size", "mesh"), donate_argnums=0)
def _compiled_step(
    block: Block,
    key: jax.Array,
    position: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    places: jax.Array,
    *,
    sampler: PairSampler,
    size: int,
    mesh: Mesh | None,
) -> tuple[Block, jax.Array, jax.Array]:
    def step(
        block: Block,
        key: jax.Array,
        position: jax.Array,
        start: jax.Array,
        count: jax.Array,
        place: jax.Array,
    ) -> tuple[Block, jax.Array, jax.Array]:
        distances, resolutions = chunk_distances(
            key, start[0], position, sampler=sampler, size=size
        )
        new = jnp.where(jnp.arange(size, dtype=jnp.int32) < count[0], distances, jnp.inf)[None]
        coarsest = jnp.max(resolutions)[None]
        rows = lax.dynamic_update_slice_in_dim(block.distances, new, place[0], 0)
        return Block(rows, jnp.maximum(block.resolution, coarsest)), new, coarsest

    in_specs = (_SPREAD, _SHARED, _SHARED, _SPREAD, _SPREAD, _SPREAD)
    return _on_every(mesh, step, in_specs)(block, key, position, starts, counts, places)


def kth_distance(block: Block, k: int, *, layout: Layout) -> tuple[float, float]:
    """The k-th smallest of all distances, over all hosts, and the coarsest resolution."""
    mesh = layout.mesh()
    everywhere = jax.tree.map(functools.partial(_over_all_hosts, layout=layout, mesh=mesh), block)
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

    return _on_every(mesh, step, (_SPREAD, _SHARED), _SHARED)(found, k)


def all_distances(block: Block, *, layout: Layout) -> jax.Array:
    """The distances in the order of the pairs, shape (m,)."""
    mesh = layout.mesh()
    everywhere = _over_all_hosts(block.distances, layout=layout, mesh=mesh)
    with within(mesh):
        rows = everywhere.reshape(len(layout.devices), layout.block + 1, layout.size)
        return rows[:, : layout.block].reshape(-1)[: layout.m]


def spread_chunks(
    chunk: Callable[[jax.Array], Any], chunks: jax.Array, devices: tuple[Device | None, ...]
) -> Any:
    """Maps a function of what a chunk is over devices, within a larger program."""
    count = len(chunks)
    each = -(-count // len(devices))
    padded = jnp.pad(chunks, [(0, each * len(devices) - count)] + [(0, 0)] * (chunks.ndim - 1))
    mapped = _on_every(_row(devices), functools.partial(lax.map, chunk), _SPREAD)
    return jax.tree.map(lambda x: x[:count], mapped(padded))


def _on_every(
    mesh: Mesh | None, function: Callable[..., Any], in_specs: Any, out_specs: Any = _SPREAD
) -> Callable[..., Any]:
    if mesh is None:
        return function
    # What varies over devices is not checked: a target's own loops were not written for it.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def within(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The mesh in whose context a program is called that spreads over it."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _joined(shards: list[jax.Array], mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return shards[0]
    shape = (sum(len(x) for x in shards), *shards[0].shape[1:])
    sharding = NamedSharding(mesh, _SPREAD)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _over_all_hosts(x: jax.Array, *, layout: Layout, mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return x
    shape = (len(x) // len(layout.local) * len(layout.devices), *x.shape[1:])
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, _SPREAD), shards)


def check_same_on_all_hosts(fingerprint: str) -> None:
    """Refuses where the processes of a run were not called alike, for none would notice."""
    mine = np.frombuffer(bytes.fromhex(fingerprint), np.uint8)
    theirs = np.asarray(multihost_utils.process_allgather(mine))
    if (theirs != mine).any():
        raise ValueError(
            "processes must make the same call, with one key, target, oracle and size, and compile"
            " it alike, for one model of processor or device, with one XLA_FLAGS and one version of"
            " JAX: at least two of them differ. Make the key from one seed, or broadcast it"
        )
