"""Probes: how a target behaves on a few random databases, which distances do not show.

Distances rest on three facts, up to rounding. The target ignores the order of the records. A
database alone, as a release evaluates it, has the value that it has in the sampler's batch. The
shortcut for sums computes what the target computes. Here each fact is tested. If rounding is all
that breaks it, the estimate is raised by that much. Otherwise the target is refused.

Order is probed by rotations, each drawn uniformly. That is enough to replace the last record only:
a rotation takes any position to the last one, and the records of an oracle are exchangeable. Both
databases of a pair may move, so twice what rotations move them is added, and what counts is how
often they move by more than half of it. docs/proofs/sampled-sensitivity.md has the proof.

The databases are those of the first pairs of the sample. So a pair counts in the estimate and in
the probes. Both statements hold: each is about independent draws, and a refusal returns nothing.
docs/proofs/shorter.md says what that means. Only sums are probed on databases of their own.

Rotations do not show everything: reversals, exchanges of two records and odd permutations may still
move a target that passes, such as a sum over neighbors in a ring. All positions of such a target
are alike.

Records of the oracle may not be exchangeable, though. So the last record of the rotated database is
replaced, too: that is a record at a random position. Its distances must not be larger than those at
the last position, by a test of ranks (dpjax/sensitivity/_probes.py).
"""

import json
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax

from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import OperatingPoint
from dpjax._running._devices import Device, fitting, row_of, within
from dpjax._running._processes import Team
from dpjax._running._progress import counting, wait_for
from dpjax._tracing._host_calls import Role, host_errors, sampled
from dpjax._tracing._lanes import touching
from dpjax._tracing._programs import Program, evaluate_alone, kept_jit
from dpjax.sensitivity._checkpoint import Finished, Seen
from dpjax.sensitivity._chunks import (
    LEAST_ALONE,
    Block,
    Probed,
    permuted,
    probed_chunks,
    probing_of,
    spread_chunks,
)
from dpjax.sensitivity._norms import difference, distance, length
from dpjax.sensitivity._pairs import RandomPair, neighboring_pair, random_rotations
from dpjax.sensitivity._plan import Plan, size_of_parts

# Records that may change places: the last one must stand for all of them.


# Independent records are refused by chance in at most one of so many samplings.
_CERTAIN = math.log(1e8)
# The chance to refuse distances of exchangeable records at one of the three looks at them.
_CHANCE = 3e-7


def refuse_places(databases: Database) -> None:
    """Refuses columns that each record has by its place, such as labels, in several databases.

    Independent records have the same numbers, not all alike, in all of k databases with probability
    n / (e n)^k at most: then each database has one mark, with probability 1 / n for each record.
    """
    for path, leaf in jax.tree.leaves_with_path(databases):
        k, n = leaf.shape[:2]
        if k * (1 + math.log(n)) - math.log(n) < _CERTAIN:
            continue
        columns = leaf.reshape(k, n, -1)
        fixed = np.all(_same(columns, columns[:1]), axis=(0, 1))
        if np.any(fixed & ~np.all(_same(columns[0], columns[0, :1]), axis=0)):
            raise ValueError(
                "oracle must draw records that may change places, for positions='last', got numbers"
                f" at {jax.tree_util.keystr(path) or 'its only leaf'} that are the same in every"
                " database and differ from record to record: the last record, which changes, would"
                " get nearly the same number again. Shuffle all records by jax.random.permutation,"
                " or ask for positions='average' or 'each'"
            )


def _same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Elementwise; NaN is the same as NaN."""
    return (x == y) | ((x != x) & (y != y))


def refuse_last(elsewhere: np.ndarray, limit: float, *, m: int, k: int, looks: int = 1) -> None:
    """Refuses records of which the last one moves the target less than others do.

    Args:
        elsewhere: how far replacing the record at a random position moves the target, on the first
            of m databases.
        limit: the k-th smallest distance at the last position, of all m; or a number above it.
        m: number of databases.
        k: rank of the limit.
        looks: at how many m, at most, this is asked.
    """
    beyond = int(np.sum(elsewhere > limit))
    if chance_of_as_many(beyond, len(elsewhere), m, k) < _CHANCE / looks:
        raise ValueError(
            "oracle must draw exchangeable records, for positions='last', but replacing a record at"
            f" a random position moved the target by more than {limit:.3g} on {beyond} of"
            f" {len(elsewhere)} databases, and replacing the last one on at most {m - k} of {m}."
            " Sorted records, time series, and classes one after the other are not exchangeable:"
            " ask for positions='average' or 'each', or shuffle all records by"
            " jax.random.permutation"
        )


def chance_of_as_many(beyond: int, probed: int, m: int, k: int) -> float:
    """Bounds the chance that so many distances at random positions exceed the k-th at the last one.

    For exchangeable records and any target; docs/proofs/shorter.md has the proof. A tie counts as
    not beyond, which lowers the chance.

    Args:
        beyond: how many do.
        probed: how many distances there are at random positions; one for each of the first pairs.
        m: number of pairs.
        k: rank of the distance at the last position, of all m pairs.
    """
    by_signs = float(scipy.special.bdtr(min(m - k, beyond), beyond, 0.5))
    top = m - k + beyond
    if k <= probed or beyond * m <= probed * top:  # The latter: no more than are expected.
        return by_signs
    of_top = np.arange(max(beyond, probed - (m - top)), min(probed, top) + 1)
    logs = _log_choose(top, of_top) + _log_choose(m - top, probed - of_top)
    by_ranks = np.sum(np.exp(logs - _log_choose(m, np.array(probed))))
    return min(by_signs, float(by_ranks))


def _log_choose(n: int, k: np.ndarray) -> np.ndarray:
    return -np.log1p(n) - scipy.special.betaln(k + 1.0, n - k + 1.0)


# How far rounding may move a target that sums in another order or a batch of another size: in units
# in the last place of the value, or as a share of the distance that replacing a record moves it.
_ROUNDED_UNITS = 16
_ROUNDED_SHARE = 2**-8
# A defect that shows on a share gamma of all databases escapes 5 / gamma probes with probability at
# most (1 - gamma)^(5 / gamma) < exp(-5) < 1 / 148.
_LEAST_PROBES, _PROBES_TIMES_GAMMA = 32, 5
# Probes of a sum only measure its rounding. More of them would cost more than the shortcut saves.
_MOST_SUM_PROBES = 4096


class _Found(NamedTuple):
    """The largest value, over all probes, of each distance below.

    Attributes:
        resolution: a unit in the last place of the value.
        permuted: how far rotating the records moves the value.
        replaced: how far replacing a record moves it; at any position, if each is sampled.
        disagreement: between the distance by the shortcut for sums and by two databases.
        alone: between the value of a database alone and in a batch.
    """

    resolution: float = 0.0
    permuted: float = 0.0
    replaced: float = 0.0
    disagreement: float = 0.0
    alone: float = 0.0

    def is_rounding(self, moved: float, resolution: float) -> bool:
        """Whether rounding could explain that a value moves this far."""
        return moved <= max(_ROUNDED_UNITS * resolution, _ROUNDED_SHARE * self.replaced)


class Probes:
    """What the probes of one sampling have found.

    Most are the first pairs of the sample: the sampler evaluates their databases anyway. For sums
    they are databases of their own, because the shortcut needs no whole ones.

    Attributes:
        chunks: those that a program has to draw that probes, too.
        probing: what it computes.
    """

    def __init__(self, plan: Plan, *, progress: bool = False):
        """Probes of a sum start here, and run while pairs are drawn."""
        pair, size = plan.pair, plan.layout.size
        self._pair, self._layout, self._size = pair, plan.layout, size
        self._found = _Found()
        self._count = probed_pairs(pair, plan.point)
        self._missing = set(range(-(-self._count // size)))
        # By chunk, for every probed database, how far replacing a record at a random position moves
        # it; and the largest distance at the last position.
        self._elsewhere: dict[str, tuple[float, ...]] = {}
        self._largest = 0.0
        self.chunks = probed_chunks(pair, plan.layout, self._count)
        self.probing = probing_of(pair, size, self._count)
        self._of_a_sum: _OfASum | None = None
        if pair.sums is None:
            self._rotations = random_rotations(plan.words, pair.n, self._count)
        else:
            self._of_a_sum = _OfASum(plan, _databases(pair, plan.point), progress=progress)
            if pair.calls_host:  # Nothing else does meanwhile.
                self._finish_a_sum()

    def known(self, finished: dict[int, Finished]) -> dict[int, Finished]:
        """Adds what was found in chunks; returns those that need no more probes."""
        enough = {
            chunk: x
            for chunk, x in finished.items()
            if chunk not in self.chunks or x.seen.probes >= self._in(chunk)
        }
        for chunk in self._missing & enough.keys():
            self._missing.remove(chunk)
            row, resolution, seen = enough[chunk]
            distances = self._distances(chunk, row)
            replaced = _largest_finite(distances)
            self._merge(_Found(resolution, seen.permuted, replaced, alone=seen.alone))
            self._elsewhere[str(chunk)] = seen.elsewhere[: self._in(chunk)]
            self._largest = max(self._largest, float(_as_sampled(distances).max()))
        return enough

    def compare(self, block: Block) -> None:
        """Adds how far replacing a record at another position moves the probed databases."""
        layout, count = self._layout, -(-self._count // self._size)
        for place, d in enumerate(layout.local):
            for chunk in layout.chunks_of(d)[: max(count - d * layout.block, 0)]:
                row = place * (layout.block + 1) + chunk - d * layout.block
                replaced = self._distances(chunk, np.asarray(block.distances[row]))
                self._merge(_Found(replaced=_largest_finite(replaced)))

    def _distances(self, chunk: int, row: np.ndarray) -> np.ndarray:
        """How far replacing a record moves the databases of a chunk that are probed."""
        return row[: self._in(chunk)].reshape(self._in(chunk), -1)[:, 0]

    def rotations(self, chunks: list[int | None]) -> np.ndarray:
        """By how much the chunk of each device moves the records of its first databases."""
        starts = np.array([self._size * (chunk or 0) for chunk in chunks])[:, None]
        indices = starts + np.arange(self.probing.rows)
        return self._rotations[np.minimum(indices, self._count - 1)].reshape(-1)

    def look(self, chunks: list[int | None], probed: Probed) -> list[Seen]:
        """What was probed in a chunk of each device."""
        permuted = np.asarray(probed.permuted).reshape(len(chunks), self.probing.rows)
        elsewhere = _as_sampled(np.asarray(probed.elsewhere)).reshape(permuted.shape).tolist()
        rotated = self.probing.rotated
        counts = [0 if chunk is None else self._in(chunk) for chunk in chunks]
        alone = [0.0] * len(chunks)
        if self.probing.kept > LEAST_ALONE or 0 in chunks:
            kept = jax.tree.map(np.asarray, (probed.databases, probed.values))
            alone = [self._alone(*x, kept) for x in zip(range(len(chunks)), counts, strict=True)]
        most = [
            float(x[:count].max(initial=0.0)) for x, count in zip(permuted, counts, strict=True)
        ]
        moved = [
            tuple(x[: min(count, rotated)]) for x, count in zip(elsewhere, counts, strict=True)
        ]
        return list(map(Seen, counts, most, alone, moved))

    def _alone(self, device: int, count: int, kept: tuple[Database, Value]) -> float:
        """How far values are from those alone, in the chunk of one of several devices."""
        start, most = device * self.probing.kept, min(self.probing.kept, count)
        here = jax.tree.map(lambda x: x[start : start + most], kept)
        if self._pair.positions == "last":
            refuse_places(here[0])
        return _moved_alone(self._pair, *here) if most else 0.0

    def refuse(self) -> None:
        """Refuses the target as soon as this process has seen all, at every position."""
        self._finish_a_sum()
        if not self._missing and self._pair.positions_sampled == 1:
            rounding_of_releases(self._found, is_sum=self._pair.sums is not None)
            if self._pair.sums is None:
                self._refuse_last(self._largest, m=self._count, k=self._count)

    def refuse_last(
        self, kth: Callable[[int], float], point: OperatingPoint, *, looks: int = 1
    ) -> None:
        """Refuses an oracle whose last record moves the target less than others do.

        Args:
            kth: the k-th smallest of all distances that were sampled.
            point: their number, and the share that may lie beyond an estimate.
            looks: at how many numbers of pairs, at most, this could have been asked.
        """
        if any(self._elsewhere.values()):
            for k in sorted({point.m, math.ceil((1 - point.gamma) * point.m)}):
                self._refuse_last(kth(k), m=point.m, k=k, looks=looks)

    def _refuse_last(self, limit: float, *, m: int, k: int, looks: int = 1) -> None:
        elsewhere = np.array([x for moved in self._elsewhere.values() for x in moved])
        # Two programs round the same distance differently.
        rounded = 2 * max(self._found.permuted, _ROUNDED_UNITS * self._found.resolution)
        refuse_last(elsewhere, limit + rounded, m=m, k=k, looks=looks)

    def rounding(self, team: Team) -> float:
        """What to add to the estimate, by what all processes have found."""
        self._finish_a_sum()
        for text in team.meet(json.dumps([self._found, self._elsewhere])):
            found, elsewhere = json.loads(text)
            self._merge(_Found(*found))
            self._elsewhere |= elsewhere
        return rounding_of_releases(self._found, is_sum=self._pair.sums is not None)

    def refuse_rounding(self) -> None:
        """Refuses a target whose estimate is 0, so that nothing is added for rounding.

        Raises:
            ValueError: if a probe moved its value at all.
        """
        moved = max(self._found.permuted, self._found.alone)
        if moved > 0:
            raise ValueError(
                "the estimated sensitivity is 0, but the value of the target moves by up to"
                f" {moved:.3g} when records are permuted or a database is evaluated alone: round it"
                ' to a grid, or ask for positions="average" or positions="each"'
            )

    def _in(self, chunk: int) -> int:
        """How many of the first pairs of a chunk count."""
        return min(max(self._count - chunk * self._size, 0), self._size)

    def _finish_a_sum(self) -> None:
        started, self._of_a_sum = self._of_a_sum, None
        if started is not None:
            found, elsewhere = started.found()
            self._merge(found)
            self._elsewhere["sum"] = elsewhere

    def _merge(self, found: _Found) -> None:
        self._found = _Found(*map(max, self._found, found))


def rounding_of_releases(found: _Found, *, is_sum: bool) -> float:
    """How much to add to the estimate for rounding that the distances do not show.

    Both values of a pair may be off. So this is twice the largest distance that the target moves
    when a database is evaluated alone, or when its records are permuted, unless positions count.
    For a sum it is at least twice the resolution, plus the disagreement of the shortcut.

    Raises:
        ValueError: if permuting moves the target further than rounding could: then replacing the
            last record says nothing about the others. Or if a database alone has another value than
            in a batch. Both are compared with how far replacing moves it on the same databases,
            because in heavy tails the estimate is far above what most databases show.
        RuntimeError: if the shortcut for sums computes something else.
    """
    moved = max(found.permuted, found.alone)
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
            f" replacing a record moves them by up to {found.replaced:.3g}. A host function"
            " may not return the same value twice. If rounding is the cause, compute in float64"
        )


def _refuse_an_order(found: _Found) -> None:
    if not found.is_rounding(found.permuted, found.resolution):
        raise ValueError(
            "target depends on the order of the records, or is not converged: on random databases,"
            f" permuting the records moved its value by up to {found.permuted:.3g}, and replacing"
            f" one by up to {found.replaced:.3g}. If the order is meant to count, ask"
            ' for positions="average" or positions="each": records at other positions may move it'
            " further. If a solver's tolerance or rounding is the cause, let it converge further"
            " (tol= of scikit-learn), or compute in float64"
        )


def probed_pairs(pair: RandomPair, point: OperatingPoint) -> int:
    """Pairs whose databases are looked at."""
    return 0 if pair.sums else _databases(pair, point)


def _databases(pair: RandomPair, point: OperatingPoint) -> int:
    """Databases to look at."""
    if not (pair.sums or pair.positions == "last" or _lanes_may_touch(pair)):
        return min(point.m, LEAST_ALONE)
    wanted = max(_LEAST_PROBES, math.ceil(_PROBES_TIMES_GAMMA / point.gamma))
    return min(point.m, wanted, point.m if pair.sums is None else _MOST_SUM_PROBES)


def _lanes_may_touch(pair: RandomPair) -> bool:
    return touching(pair.target.jaxpr) is not None


class _OfASum:
    """Probes chunk by chunk on the devices of this host; their number does not change chunks."""

    def __init__(self, plan: Plan, count: int, *, progress: bool):
        """Starts the first chunks."""
        pair, layout = plan.pair, plan.layout
        # The size is not that of the sampler: lanes of sums do not touch.
        device = layout.devices[0]
        most = fitting(pair.bytes_of_a_database(device), device)
        self._plan, self._count, self._progress = plan, count, progress
        self._size = size_of_parts(pair, count, min(layout.size, most))
        self._devices = tuple(layout.local.values())
        self._rotations = random_rotations(plan.words, pair.n, count).astype(np.uint32)
        self._first = self._started(0)

    @host_errors()
    def _started(self, start: int) -> tuple[dict[str, jax.Array], Database, Value]:
        """The results of a chunk for every device, on their way."""
        starts = start + self._size * np.arange(len(self._devices), dtype=np.uint32)
        # The last chunk is filled up with the last database.
        indices = starts[:, None] + np.arange(self._size, dtype=np.uint32)
        indices = np.minimum(indices, self._count - 1)
        with within(row_of(self._devices)):
            return _compiled_probes(
                self._plan.key,
                np.stack([indices, self._rotations[indices]], axis=1),
                pair=self._plan.pair,
                kept=LEAST_ALONE,
                devices=self._devices,
            )

    @host_errors()
    def found(self) -> tuple[_Found, tuple[float, ...]]:
        """What all chunks show; and how far replacing records at random positions moves the sum."""
        plan, together = self._plan, self._size * len(self._devices)
        found, elsewhere = _Found(), list[float]()
        last_counts = plan.pair.positions == "last" and plan.pair.two_records is None
        with counting("probes", self._count, shown=self._progress) as done:
            for start in range(0, self._count, together):
                numbers, databases, values = self._started(start) if start else self._first
                wait_for(
                    numbers["resolution"], plan.pair.programs, self._devices[0], plan.team.look
                )
                moved = _as_sampled(np.asarray(numbers.pop("elsewhere")).reshape(-1))
                elsewhere += moved[
                    : self._count - start
                ].tolist()  # The rest of a chunk are copies.
                largest = {name: float(np.asarray(x).max()) for name, x in numbers.items()}
                if start < LEAST_ALONE:
                    first = partial(_first_of_all, LEAST_ALONE - start)
                    kept = [jax.tree.map(first, tree) for tree in (databases, values)]
                    largest["alone"] = _moved_alone(plan.pair, *kept)
                    if plan.pair.positions == "last":
                        drawn = self._count - start
                        refuse_places(jax.tree.map(operator.itemgetter(slice(drawn)), kept[0]))
                found = _Found(*map(max, found, _Found(**largest)))
                done(min(self._count - start, together))
        return found, tuple(elsewhere if last_counts else ())


def _first_of_all(most: int, x: jax.Array) -> np.ndarray:
    """The first databases; all devices and chunks are in one axis."""
    return np.asarray(x).reshape(-1, *x.shape[2:])[:most]


@kept_jit("pair", "kept", "devices")
def _compiled_probes(
    key: Key,
    work: np.ndarray,
    *,
    pair: RandomPair,
    kept: int,
    devices: tuple[Device | None, ...],
) -> tuple[dict[str, jax.Array], Database, Value]:
    """The distances of a chunk for every device, its first databases, and the values of all.

    `work` has the numbers of pairs, and how far to rotate the records of each.
    """

    def probe(index: jax.Array, steps: jax.Array) -> tuple[dict[str, jax.Array], Database, Value]:
        place = pair.random_position(key, index)
        database, neighbor = neighboring_pair(pair.records_of(key, index), place)
        value = pair.target(database, origin=sampled(Role.DATABASE, index))
        other = pair.target(neighbor, origin=sampled(Role.NEIGHBOR, index))
        moved = distance(pair.norm, value, other)
        by_sums = pair.distance_by_sums(key, index, place)[0]
        numbers = {
            "resolution": pair.resolution(value),
            "permuted": permuted(pair, steps, index, database, value),
            "replaced": jnp.where(jnp.isfinite(moved), moved, 0),
            "disagreement": jnp.where(moved == by_sums, 0, jnp.abs(moved - by_sums)),
            "elsewhere": by_sums,
        }
        return {k: x.astype(pair.distance_dtype) for k, x in numbers.items()}, database, value

    def probe_chunk(work: jax.Array) -> tuple[dict[str, jax.Array], Database, Value]:
        numbers, databases, values = jax.vmap(probe)(work[0], work[1].astype(jnp.int32))
        # Whole databases first, as the target sees them: XLA would compute the slice by itself.
        databases = lax.optimization_barrier(databases)
        return numbers, jax.tree.map(lambda x: x[:kept], databases), values

    return spread_chunks(probe_chunk, jnp.asarray(work), devices)


def _as_sampled(distances: np.ndarray) -> np.ndarray:
    """As the order statistic takes distances: NaN and negative ones are infinite."""
    return np.where(distances >= 0, distances, np.inf)


def _largest_finite(distances: np.ndarray) -> float:
    return float(distances[np.isfinite(distances)].max(initial=0.0))


def _moved_alone(pair: RandomPair, databases: Database, values: Value) -> float:
    """How far values in a batch are from those of the same databases alone, as in a release."""
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


@kept_jit("norm")
def _compiled_distances(values: Value, others: Value, equal: PyTree, *, norm: Program) -> jax.Array:
    def moved(value: Value, other: Value, equal: PyTree) -> jax.Array:
        apart = difference(value, other)
        # Where both are infinite the difference is NaN, and yet they agree.
        return length(norm, jax.tree.map(lambda e, x: jnp.where(e, 0, x), equal, apart))

    return jax.vmap(moved)(values, others, equal)
