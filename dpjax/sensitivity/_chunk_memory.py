"""Chunks that fit into the memory of the device, by what their compiled program says of itself."""

import dataclasses

import jax

from dpjax._running._layout import Layout, placed
from dpjax._running._memory import LEAST, share_of_memory
from dpjax.sensitivity._blocks import bytes_of_a_chunk
from dpjax.sensitivity._chunks import size_of_parts
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._probed_chunks import probing_of

# What XLA says where a program cannot fit: for a TPU it compiles no such program.
_TOO_LARGE, _SMALLER = "RESOURCE_EXHAUSTED", 1 / 8


def layout_that_fits(key: jax.Array, pair: RandomPair, layout: Layout, probes: int = 0) -> Layout:
    """The layout, with smaller chunks if a chunk takes more than its share of memory.

    The size comes from shapes, and XLA may need several times as much. Nearly always it fits. Then
    the program is the one that will run, and nothing is compiled twice. Otherwise smaller ones are
    compiled until one fits. Chunks never grow: another program would cost more than it gains. If
    some pairs are probed, their program runs first, and takes more than that of the others.
    """
    if layout.size <= LEAST:
        return layout
    probing = probing_of(pair, layout.size, probes)
    spec = _spec(placed(key, layout))
    try:
        used = bytes_of_a_chunk(spec, layout=layout, pair=pair, probing=probing)
    except jax.errors.JaxRuntimeError as error:
        if _TOO_LARGE not in str(error):
            raise
        return layout_that_fits(key, pair, _smaller(layout, pair, _SMALLER), probes)
    room = share_of_memory(layout.local.values())
    if used <= room:
        return layout
    # Half of the room is for what does not shrink with the chunk; it may take more.
    return layout_that_fits(key, pair, _smaller(layout, pair, room / used / 2), probes)


def _spec(key: jax.Array) -> jax.ShapeDtypeStruct:
    # Where a key is committed, its program is compiled for that device.
    sharding = key.sharding if key.committed else None
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding)


def _smaller(layout: Layout, pair: RandomPair, share: float) -> Layout:
    size = max(LEAST, int(layout.size * share))
    size = size_of_parts(pair, layout.m, 2 ** (size.bit_length() - 1))
    return dataclasses.replace(layout, size=size)
