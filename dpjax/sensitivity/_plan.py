"""Plans a sampling: traces its programs, and determines operating point, chunk size and identity.

A chunk is a number of pairs that a device computes at once. The bits of the distances are
reproducible.
"""

import dataclasses
import functools
from typing import Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._core._values import Method, OperatingPoint
from dpjax._running._devices import (
    LEAST,
    Device,
    Layout,
    compilation,
    devices_of,
    fitting,
    placed,
    share_of_memory,
)
from dpjax._running._processes import Team
from dpjax._tracing._fingerprints import digest
from dpjax.sensitivity._chunks import bytes_of_a_chunk, probing_of
from dpjax.sensitivity._operating_points import confidence_of_each, operating_point
from dpjax.sensitivity._pairs import MOST_SAMPLED_PAIRS, RandomPair

# If only gamma is given, the default m is this many times the least feasible m. With the least m,
# the estimate would be the largest of all sampled distances, and the noise would be larger.
PAIRS_OVER_LEAST = 10
# Code on the host is slow, so its chunks are small. Then progress bars advance and checkpoints are
# written often.
_LEAST_HOST_CHUNKS, _LEAST_HOST_PAIRS = 16, 64
_STEPS = 32  # The largest number of chunk sizes, because every size compiles another program.
# XLA's error contains `_TOO_LARGE` if a program does not fit into memory. On a TPU, the error is
# raised by the compilation. Then chunks are made smaller by the factor `_SMALLER`.
_TOO_LARGE, _SMALLER = "RESOURCE_EXHAUSTED", 1 / 8


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """A sampling: the pairs to draw on the devices of one or several processes.

    Attributes:
        key: a threefry key, placed where this host's devices can use it.
        pair: draws a random pair of databases, and computes the distance of the target's values.
        layout: which device computes which pairs.
        team: the processes that sample together.
    """

    key: jax.Array
    pair: RandomPair
    layout: Layout
    team: Team

    @classmethod
    def of(
        cls, key: jax.Array, pair: RandomPair, layout: Layout, team: Team, *more: object
    ) -> Self:
        """Makes a sampling, and places its key on the devices.

        Raises an error if the processes made different calls. Otherwise, they would combine chunks
        of different samplings without noticing it.
        """
        made = cls(placed(key, layout), pair, layout, team, *more)
        if len(layout.local) < len(layout.devices) and len(team.meet(digest(made.run))) > 1:
            raise ValueError(
                "processes must make the same call, with the same key, target, oracle and size."
                " They must also compile the call in the same way: on the same model of processor"
                " or device, with the same XLA_FLAGS and the same version of JAX. At least two"
                " processes differ. Make the key from the same seed in all processes, or broadcast"
                " the key"
            )
        return made

    @functools.cached_property
    def words(self) -> np.ndarray:
        """Returns the words of the key, on the host."""
        return np.asarray(jax.random.key_data(self.key))

    @functools.cached_property
    def run(self) -> dict[str, str | int]:
        """Returns all facts that determine the bits of distances. A checkpoint must match them."""
        return {
            "key": digest(self.words),
            "target": self.pair.target.fingerprint,
            "oracle": self.pair.oracle.fingerprint,
            "norm": self.pair.norm.fingerprint,
            "positions": self.pair.positions,
            "shortcut": self.pair.shortcut,
            "probes": "at two positions",  # Older versions stored the results of different probes.
            "n": self.pair.n,
            "m": self.layout.m,
            "chunk size": self.layout.size,
            **compilation(self.layout.devices),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(Sampling):
    """A sampling from which one distance is selected.

    Attributes:
        point: the operating point of each position.
        confidence: the confidence of the statement about all positions together; None for the
            marginal statement.
    """

    point: OperatingPoint
    confidence: float | None

    @functools.cached_property
    def identity(self) -> str:
        """Returns a hash. It is equal for samplings with equal pairs and operating points."""
        programs = (program.fingerprint for program in self.pair.programs)
        return digest(self.words, *programs, self.pair.positions, self.point)


def point_of_each(
    positions: int,
    *,
    m: int | None,
    gamma: float | None,
    method: Method,
    confidence: float | Literal["default"] | None,
    over_least: int = PAIRS_OVER_LEAST,
    most: int = MOST_SAMPLED_PAIRS,
) -> tuple[OperatingPoint, float | None]:
    """Returns the operating point of each position, and the confidence of all of them together."""
    stated = operating_point(m=m, gamma=gamma, method=method, confidence=confidence).confidence
    # By a union bound, the statements about all positions hold simultaneously, with the stated
    # confidence. So the statement about the worst position holds, too.
    each = confidence_of_each(stated, positions)
    point = operating_point(m=m, gamma=gamma, method=method, confidence=each)
    if m is None:
        m = max(point.m, min(over_least * point.m, most))
        point = operating_point(m=m, gamma=gamma, method=method, confidence=each)
    if point.m > MOST_SAMPLED_PAIRS:
        raise ValueError(f"m must be at most {MOST_SAMPLED_PAIRS} to be sampled, got {point.m}")
    return point, stated


def pairs_in_a_chunk(
    pair: RandomPair, m: int, chunk_size: int | None, device: Device | None
) -> int:
    """Returns the number of pairs in a chunk.

    The number depends only on the programs of the pair, m, `chunk_size` and the device.
    """
    if chunk_size is not None:
        most = _checks.integer("chunk_size", chunk_size, least=1)
        return size_of_parts(pair, m, most)
    most = fitting(pair.bytes_of_a_pair(device), device)
    if pair.calls_host:
        most = min(most, max(_LEAST_HOST_PAIRS, -(-m // _LEAST_HOST_CHUNKS)))
        return size_of_parts(pair, m, most)
    # If there are few chunks, their sizes are nearly equal, so that the last chunk needs little
    # padding. Sizes are multiples of a step, so that calls with many chunks use the same size and
    # the same compiled program.
    step = max(1, most // _STEPS)
    return min(m, -(-_even_part(m, most) // step) * step)


def layout_of(pair: RandomPair, m: int, chunk_size: int | None, mesh: Mesh | None) -> Layout:
    """Returns the layout of m pairs in chunks, on the devices of a mesh."""
    devices = devices_of(mesh, calls_host=pair.calls_host)
    layout = Layout(devices, m, pairs_in_a_chunk(pair, m, chunk_size, devices[0]))
    if len(layout.devices) > 1 and any(program.is_spread for program in pair.programs):
        raise ValueError(
            "mesh must be None or one device for a target, oracle or norm that calls "
            "jax.shard_map: it shards its own work, so dpjax cannot also shard the pairs, got a "
            f"mesh of {len(devices)} devices"
        )
    return layout


def size_of_parts(pair: RandomPair, count: int, most: int) -> int:
    """Returns the size of the chunks into which `count` pairs are split, at most `most`.

    For code on the host, the chunks are nearly equal. Otherwise the last chunk may be small.
    """
    if pair.calls_host:
        return _even_part(count, most)
    return min(count, most)


def _even_part(count: int, most: int) -> int:
    return -(-count // -(-count // most))


def layout_that_fits(key: jax.Array, pair: RandomPair, layout: Layout, probes: int = 0) -> Layout:
    """Returns the layout, with smaller chunks if a chunk takes too much memory.

    The first chunk size is an estimate from shapes. It nearly always fits, and then the program
    compiled here is the one that will run. Sometimes XLA needs several times as much memory. Then
    programs with smaller chunks are compiled until one fits. Chunks never grow, because compiling
    another program takes more time than a larger chunk saves. If pairs are probed, the memory of
    the program with probes is measured, because it needs the most memory and runs first.
    """
    if layout.size <= LEAST:
        return layout
    probing = probing_of(pair, layout.size, probes)
    key = placed(key, layout)
    # If the key is committed to a device, the program must be compiled for that device.
    sharding = key.sharding if key.committed else None
    spec = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding)
    try:
        used = bytes_of_a_chunk(spec, layout=layout, pair=pair, probing=probing)
    except jax.errors.JaxRuntimeError as error:
        if _TOO_LARGE not in str(error):
            raise
        return layout_that_fits(key, pair, _smaller(layout, pair, _SMALLER), probes)
    room = share_of_memory(layout.local.values())
    if used <= room:
        return layout
    # Some of the memory does not depend on the chunk size. So the next attempt aims at half of the
    # free memory.
    return layout_that_fits(key, pair, _smaller(layout, pair, room / used / 2), probes)


def _smaller(layout: Layout, pair: RandomPair, share: float) -> Layout:
    size = max(LEAST, int(layout.size * share))
    size = size_of_parts(pair, layout.m, 2 ** (size.bit_length() - 1))
    return dataclasses.replace(layout, size=size)
