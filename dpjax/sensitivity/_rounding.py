"""Rounding of the releases, which distances do not show, seen on random databases: probes.

They also show what the distances assume: that the target ignores the order of the records, and
that the shortcut for sums computes the same.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._origins import failures_in_short
from dpjax.base import OperatingPoint
from dpjax.sensitivity._chunks import probes_at_once
from dpjax.sensitivity._devices import Device, Layout, spread_chunks, within
from dpjax.sensitivity._pairs import PairSampler

# What a rotation of the records may move a target by: rounding error of a sum in another order, in
# units in the last place of the value, or a share of what replacing a record moves it by.
_REORDERED_UNITS = 16
_REORDERED_SHARE = 2**-8
# With 5 / gamma databases, a dependence that shows on a share gamma of them escapes 1 time in 150.
_LEAST_PROBES, _PROBES_TIMES_GAMMA = 32, 5
# Probes of a sum measure its rounding, and would cost more than the shortcut saves.
_MOST_SUM_PROBES = 4096


@failures_in_short()
def rounding_of_releases(
    key: jax.Array, sampler: PairSampler, point: OperatingPoint, layout: Layout
) -> float:
    """What the estimate must be raised by for rounding that the distances do not show.

    Where records count by position, nothing: the resolution of the values covers it. Else how far
    rotating the records of random databases moves the target, at most; for a sum, see below.

    Refuses a target that rotating moves by more than rounding error: replacing the last record says
    nothing about the others then. Compared with what replacing moves on the same databases, for in
    heavy tails the estimate is far above what most databases show.
    """
    if sampler.sums is not None:
        return _of_sums(key, sampler, point, layout)
    if sampler.positions != "last":
        return 0.0
    count = min(point.m, _probes(point))
    probe = partial(_largest, key, sampler=sampler, count=count, layout=layout)
    moved, resolution = probe(("moved_by_rotation",))
    if moved <= _REORDERED_UNITS * resolution:
        return moved
    replaced, _ = probe(("moved_by_replacing",))
    if moved > _REORDERED_SHARE * replaced:
        raise ValueError(
            f"target depends on the order of the records: of {count} databases, permuting the"
            f" records moved its value by up to {moved:.3g}, and replacing the last record by up to"
            f" {replaced:.3g}. Records at other positions may move it further: ask for"
            ' positions="average" or positions="each", or, if this is rounding error, compute in'
            " float64"
        )
    return moved


def _of_sums(key: jax.Array, sampler: PairSampler, point: OperatingPoint, layout: Layout) -> float:
    """The rounding of two values of a sum, and how far the shortcut is from the target at most."""
    count = min(point.m, _probes(point), _MOST_SUM_PROBES)
    moved, resolution, replaced, disagreement = _largest(
        key,
        ("moved_by_rotation", "moved_by_replacing"),
        sampler=sampler,
        count=count,
        layout=layout,
    )
    rounding = 2 * max(moved, resolution)
    if not disagreement <= max(_REORDERED_UNITS * rounding, _REORDERED_SHARE * replaced):
        raise RuntimeError(
            "the shortcut for sums over records disagrees with the target by"
            f" {disagreement:.3g} on {count} random databases: sums may overflow, or `finish`"
            " enlarges rounding errors. Pass `lambda database: target(database)` to do without it"
        )
    return rounding + disagreement


def _probes(point: OperatingPoint) -> int:
    return max(_LEAST_PROBES, math.ceil(_PROBES_TIMES_GAMMA / point.gamma))


def _largest(
    key: jax.Array,
    measures: tuple[str, ...],
    *,
    sampler: PairSampler,
    count: int,
    layout: Layout,
) -> list[float]:
    """The largest of what these methods of the sampler return on so many databases."""
    with within(layout.local_mesh()):
        found = _compiled_probes(
            key,
            sampler=sampler,
            measures=measures,
            count=count,
            size=probes_at_once(sampler, count, layout.size),
            devices=tuple(layout.local.values()),
        )
    return np.asarray(found).tolist()


@partial(jax.jit, static_argnames=("sampler", "measures", "count", "size", "devices"))
def _compiled_probes(
    key: jax.Array,
    *,
    sampler: PairSampler,
    measures: tuple[str, ...],
    count: int,
    size: int,
    devices: tuple[Device | None, ...],
) -> jax.Array:
    def measured(index: jax.Array) -> jax.Array:
        found = (getattr(sampler, name)(key, index) for name in measures)
        return jnp.stack([x.astype(sampler.distance_dtype) for pair in found for x in pair])

    def chunk(start: jax.Array) -> jax.Array:
        # The last one is filled up with the last database: chunks do not depend on the devices.
        indices = jnp.minimum(start + jnp.arange(size, dtype=jnp.uint32), np.uint32(count - 1))
        return jnp.max(jax.vmap(measured)(indices), axis=0)

    starts = jnp.arange(-(-count // size), dtype=jnp.uint32) * np.uint32(size)
    return jnp.max(spread_chunks(chunk, starts, devices), axis=0)
