"""Chunks whose first pairs are probed: their databases were drawn, and one more is evaluated."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._running._layout import Layout
from dpjax._tracing._lanes import touching
from dpjax._tracing._origins import Role, sampled
from dpjax.sensitivity._neighbors import rotated, rotated_pair
from dpjax.sensitivity._norms import distance
from dpjax.sensitivity._pairs import RandomPair

# If lanes do not touch, `vmap` changes roundings alone, and they differ on nearly all databases.
LEAST_ALONE = 8


@dataclasses.dataclass(frozen=True)
class Probing:
    """What a chunk computes beside its distances.

    Attributes:
        rotated: of so many first pairs, the target is evaluated on D with its records rotated, too.
        kept: of so many first pairs, D and the target's value on it are handed to the host.
    """

    rotated: int = 0
    kept: int = 0

    def __bool__(self) -> bool:
        return self.kept > 0

    @property
    def rows(self) -> int:
        """Rotations of a chunk, at least one: arrays over devices have a first axis."""
        return max(self.rotated, 1)


class Probed(NamedTuple):
    """What was found on the first pairs of a chunk.

    Attributes:
        permuted: how far rotating the records moves the value.
        elsewhere: how far replacing the record at a random position does.
        databases: of the first pairs.
        values: of these databases, in the batch of the chunk.
    """

    permuted: jax.Array
    elsewhere: jax.Array
    databases: Database
    values: Value


NOTHING = Probing()


def probing_of(pair: RandomPair, size: int, count: int) -> Probing:
    """What the chunks of so many pairs compute, where `count` pairs are probed."""
    most = min(size, count)
    kept = most if touching(pair.target.jaxpr) else min(most, LEAST_ALONE)
    return Probing(most if pair.positions == "last" else 0, kept)


def probed_chunks(pair: RandomPair, layout: Layout, count: int) -> range:
    """The chunks that are drawn by a program that probes; only the first `count` pairs count."""
    needed = -(-count // layout.size)
    # Two programs would be compiled. It takes less time to probe a few chunks too many.
    few = not pair.calls_host and layout.chunks <= 2 * needed
    return range(layout.chunks if few else needed)


def probed_distances(
    key: Key,
    indices: jax.Array,
    position: jax.Array,
    rotations: jax.Array,
    *,
    pair: RandomPair,
    probing: Probing,
) -> tuple[jax.Array, jax.Array, Probed]:
    """Distances and resolutions of pairs, and what was found on the first ones."""

    def one(index: jax.Array) -> tuple[jax.Array, jax.Array, PyTree]:
        database, neighbor = pair.databases(key, index, position)
        value, other = pair.values(index, database, neighbor)
        found = pair.between(key, index, value, other)
        spare = jax.tree.map(lambda leaf: leaf[-1:], neighbor)
        return found, pair.resolution(value), (database, value, spare)

    distances, resolutions, drawn = jax.vmap(one)(indices)
    moved = elsewhere = jnp.zeros(probing.rows, pair.distance_dtype)
    if probing.rotated:
        moved, elsewhere = jax.vmap(partial(_at_two_positions, pair))(
            rotations, *_first(probing.rotated, (indices, *drawn))
        )
    databases, values, _ = drawn
    kept = _first(probing.kept, (databases, values))
    return distances, resolutions, Probed(moved, elsewhere, *kept)


def _at_two_positions(
    pair: RandomPair,
    steps: jax.Array,
    index: jax.Array,
    database: Database,
    value: Value,
    spare: Database,
) -> tuple[jax.Array, jax.Array]:
    """As `permuted`; and how far replacing the record that a rotation puts last moves the value."""
    records = jax.tree.map(lambda *x: jnp.concatenate(x), database, spare)
    target = partial(pair.target, origin=sampled(Role.PERMUTED, index))
    # One copy of the target, for two would take twice as long to compile.
    values = jax.vmap(target)(rotated_pair(records, steps))
    other, neighbor = (jax.tree.map(lambda x, i=i: x[i], values) for i in (0, 1))
    elsewhere = distance(pair.norm, other, neighbor).astype(pair.distance_dtype)
    return _moved(pair, value, other), elsewhere


def permuted(
    pair: RandomPair, steps: jax.Array, index: jax.Array, database: Database, value: Value
) -> jax.Array:
    """How far a rotation of its records moves the value of a database."""
    other = rotated(database, steps)
    return _moved(pair, value, pair.target(other, origin=sampled(Role.PERMUTED, index)))


def _moved(pair: RandomPair, value: Value, other: Value) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(value)]
    moved = distance(pair.norm, value, other)
    # Values that are not finite make infinite distances, so the sampler sees them.
    return jnp.where(jnp.all(jnp.stack(finite)), moved, 0).astype(pair.distance_dtype)


def _first(count: int, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[:count], tree)
