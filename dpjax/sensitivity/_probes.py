"""Probes: what a target does on a few random databases, and distances do not show.

Distances stand on three things: that the target ignores the order of the records, that one database
alone, as a release evaluates it, gives what the batch of the sampler gives, and that the shortcut
for sums computes the same. Where they hold but for rounding, that is what the estimate is raised
by; where they do not, nothing may be released.

Order is probed by rotations, each drawn uniformly. That is enough to replace the last record only:
a rotation takes any position to the last one, and the records of an oracle are exchangeable. It is
also enough for every position, for any rotation is one random rotation after another: what fails on
a share g of databases and random rotations fails under no rotation on more than 4 g of databases.
So targets pass that ignore rotations and nothing else: what a reversal, an exchange of two records
or an odd permutation changes, as sums over neighbors in a ring do. Their positions are all alike.

docs/proofs/shorter.md has the proofs.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._values import OperatingPoint
from dpjax._running._layout import Device, within
from dpjax._running._progress import counting
from dpjax._running._waiting import wait_for
from dpjax._tracing._lanes import touching
from dpjax._tracing._origins import Role, host_errors, sampled
from dpjax._tracing._programs import evaluate_alone
from dpjax.sensitivity._blocks import spread_chunks
from dpjax.sensitivity._chunks import probes_at_once
from dpjax.sensitivity._neighbors import neighboring_pair, rotated
from dpjax.sensitivity._norms import difference, distance, length
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._plan import Plan

# How far rounding errors may move a target, by a sum in another order or a batch of another size:
# in units in the last place of the value, or a share of what replacing a record moves it by.
_ROUNDED_UNITS = 16
_ROUNDED_SHARE = 2**-8
# With 5 / gamma databases, what shows on a share gamma of them escapes 1 time in 150.
_LEAST_PROBES, _PROBES_TIMES_GAMMA = 32, 5
# Probes of a sum measure its rounding, and would cost more than the shortcut saves.
_MOST_SUM_PROBES = 4096
# Where lanes do not touch, `vmap` only reorders roundings, which shows on any database.
_LEAST_ALONE = 8


@dataclasses.dataclass(frozen=True)
class _Found:
    """The largest, over the probes, of the value's resolution and of what moves the value.

    Attributes:
        resolution: a unit in the last place of the value.
        permuted: by rotating the records.
        replaced: by replacing a record at a random position.
        disagreement: between the shortcut for sums and what it stands for.
        alone: by evaluating the database alone instead of in a batch.
    """

    resolution: float = 0.0
    permuted: float = 0.0
    replaced: float = 0.0
    disagreement: float = 0.0
    alone: float = 0.0

    def is_rounding(self, moved: float, resolution: float) -> bool:
        """Whether a value moves by no more than rounding errors could."""
        return moved <= max(_ROUNDED_UNITS * resolution, _ROUNDED_SHARE * self.replaced)


@host_errors()
def rounding_of_releases(plan: Plan, *, progress: bool = False) -> float:
    """What the estimate must be raised by for rounding that the distances do not show.

    Both values of a pair may be off, so it is twice how far evaluating a database alone moves the
    target, at most, or permuting its records, unless they count by position; for a sum, twice the
    resolution at least, and how far the shortcut is from the target.

    Raises:
        ValueError: if permuting moves the target by more than rounding errors: replacing the last
            record says nothing about the others then. Compared with what replacing moves on the
            same databases, for in heavy tails the estimate is far above what most databases show.
            Or if a database alone has another value than in a batch.
        RuntimeError: if the shortcut for sums computes something else.
    """
    is_sum = plan.pair.sums is not None
    find = partial(_find, plan, count=_probes(plan.pair, plan.point), progress=progress)
    found = find(permute=is_sum or plan.pair.positions == "last", replace=is_sum, alone=True)
    moved = max(found.permuted, found.alone)
    if not (is_sum or found.is_rounding(moved, found.resolution)):
        more = find(permute=False, replace=True, alone=False)
        found = dataclasses.replace(found, replaced=more.replaced)
    _refuse_a_batch_of_its_own(found)
    if not is_sum:
        _refuse_an_order(found)
        return 2 * moved
    rounding = 2 * max(moved, found.resolution)
    if not found.is_rounding(found.disagreement, rounding):
        raise RuntimeError(
            "the shortcut for sums over records disagrees with the target by"
            f" {found.disagreement:.3g} on random databases: sums may overflow, or `finish`"
            " enlarges rounding errors. Pass `lambda database: target(database)` to do without it"
        )
    return rounding + found.disagreement


def _refuse_a_batch_of_its_own(found: _Found) -> None:
    if not found.is_rounding(found.alone, found.resolution):
        raise ValueError(
            "target computes something else for many databases at once, as the sampler runs it,"
            f" than for one alone, as a release does: values differ by up to {found.alone:.3g}, and"
            f" replacing a record moves them by up to {found.replaced:.3g}. A rule for jax.vmap of"
            " its own (custom_vmap) may be wrong, a host function may not return the"
            " same twice, or, if this is rounding error, compute in float64"
        )


def _refuse_an_order(found: _Found) -> None:
    if not found.is_rounding(found.permuted, found.resolution):
        raise ValueError(
            "target depends on the order of the records, or is not converged: of random databases,"
            f" permuting the records moved its value by up to {found.permuted:.3g}, and replacing"
            f" one by up to {found.replaced:.3g}. If the order is meant to count, ask"
            ' for positions="average" or positions="each": records at other positions may move it'
            " further. If this is a solver's tolerance or rounding error, let it converge further"
            " (scikit-learn's tol=, say), or compute in float64"
        )


def _probes(pair: RandomPair, point: OperatingPoint) -> int:
    """Databases to look at."""
    if not (pair.sums or pair.positions == "last" or _lanes_may_touch(pair)):
        return min(point.m, _LEAST_ALONE)
    wanted = max(_LEAST_PROBES, math.ceil(_PROBES_TIMES_GAMMA / point.gamma))
    return min(point.m, wanted, point.m if pair.sums is None else _MOST_SUM_PROBES)


def _lanes_may_touch(pair: RandomPair) -> bool:
    return touching(pair.target.jaxpr) is not None


def _find(
    plan: Plan, *, count: int, permute: bool, replace: bool, alone: bool, progress: bool
) -> _Found:
    """Chunk by chunk on the devices of this host; chunks do not depend on how many there are."""
    pair, layout = plan.pair, plan.layout
    touch = _lanes_may_touch(pair)
    # What lanes do to each other may depend on how many there are: it is seen at what chunks have.
    size = layout.size if touch else probes_at_once(pair, count, layout.size)
    devices = tuple(layout.local.values())
    left_alone = (count if touch else _LEAST_ALONE) if alone else 0
    found = []
    with counting("probes", count, shown=progress) as done:
        for start in range(0, count, size * len(devices)):
            starts = start + size * np.arange(len(devices), dtype=np.uint32)
            with within(layout.local_mesh()):
                numbers, databases, values = _compiled_probes(
                    plan.key,
                    # What is left over is filled up with the last database.
                    np.minimum(starts[:, None] + np.arange(size, dtype=np.uint32), count - 1),
                    pair=pair,
                    permute=permute,
                    replace=replace,
                    devices=devices,
                )
            wait_for(numbers["resolution"], pair.programs, devices[0], plan.team.look)
            found.append({name: float(np.asarray(x).max()) for name, x in numbers.items()})
            if start < left_alone:
                most = left_alone - start
                found[-1]["alone"] = _moved_alone(pair, databases, values, most)
            done(min(count - start, size * len(devices)))
    names = {name for numbers in found for name in numbers}
    return _Found(**{name: max(numbers.get(name, 0.0) for numbers in found) for name in names})


@partial(jax.jit, static_argnames=("pair", "permute", "replace", "devices"))
def _compiled_probes(
    key: jax.Array,
    indices: jax.Array,
    *,
    pair: RandomPair,
    permute: bool,
    replace: bool,
    devices: tuple[Device | None, ...],
) -> tuple[dict[str, jax.Array], Any, Any]:
    """What there is to see on a chunk for every device, its databases, and their values."""
    probe = partial(_probe, pair, permute=permute, replace=replace)
    return spread_chunks(jax.vmap(partial(probe, key)), indices, devices)


def _probe(
    pair: RandomPair, key: jax.Array, index: jax.Array, *, permute: bool, replace: bool
) -> tuple[dict[str, jax.Array], Any, Any]:
    place = pair.random_position(key, index)
    database, neighbor = neighboring_pair(pair.records_of(key, index), place)
    value = pair.target(database, origin=sampled(Role.DATABASE, index))
    numbers = {"resolution": pair.resolution(value)}
    if permute:
        other = rotated(database, pair.random_rotation(key, index))
        other = pair.target(other, origin=sampled(Role.PERMUTED, index))
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(value)]
        moved = distance(pair.norm, value, other)
        # What is not finite shows in the distances.
        numbers["permuted"] = jnp.where(jnp.all(jnp.stack(finite)), moved, 0)
    if replace:
        other = pair.target(neighbor, origin=sampled(Role.NEIGHBOR, index))
        moved = distance(pair.norm, value, other)
        shortcut = moved if pair.sums is None else pair.distance_by_sums(key, index, place)
        numbers["replaced"] = jnp.where(jnp.isfinite(moved), moved, 0)
        numbers["disagreement"] = jnp.where(moved == shortcut, 0, jnp.abs(moved - shortcut))
    numbers = {name: x.astype(pair.distance_dtype) for name, x in numbers.items()}
    return numbers, database, value


def _moved_alone(pair: RandomPair, databases: Any, values: Any, most: int) -> float:
    """How far values in a batch are from those of the same databases alone, as in a release."""
    databases, values = (
        jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:])[:most], tree)
        for tree in (databases, values)
    )
    leaves, structure = jax.tree.flatten(databases)
    alone = [
        evaluate_alone(jax.tree.unflatten(structure, database), program=pair.target)
        for database in zip(*leaves, strict=True)
    ]
    together = jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *alone)
    equal = jax.tree.map(_equal, values, together)
    if all(np.all(x) for x in jax.tree.leaves(equal)):
        return 0.0
    moved = _compiled_distances(values, together, equal, norm=pair.norm)
    return float(np.asarray(moved).max())


def _equal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where two arrays agree; a NaN agrees with a NaN."""
    return (x == y) | ((x != x) & (y != y))


@partial(jax.jit, static_argnames="norm")
def _compiled_distances(values: Any, others: Any, equal: Any, *, norm: Any) -> jax.Array:
    def moved(value: Any, other: Any, equal: Any) -> jax.Array:
        apart = difference(value, other)
        return length(norm, jax.tree.map(lambda e, x: jnp.where(e, 0, x), equal, apart))

    return jax.vmap(moved)(values, others, equal)
