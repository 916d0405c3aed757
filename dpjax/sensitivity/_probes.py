"""Probes: checks of the sampler's assumptions about a target, on a few random databases.

The sampled distances are valid under three assumptions:

- the target ignores the order of the records;
- the value of a database is the same alone, as in a release, and in the sampler's batch;
- the shortcut for sums computes the same distances as the target.

The probes test each assumption. If an assumption is violated by no more than rounding can explain,
the estimate is increased by the observed difference. If it is violated by more, the target is
refused.

The test of order rotates the records by a random number of places. Rotations suffice if the sampler
replaces only the last record: a rotation can bring any position to the end, and the oracle's
records are exchangeable. A rotation may change the values of both databases of a pair, so twice the
largest change is added to the estimate. docs/proofs/sampled-sensitivity.md bounds how often a
rotation changes a value by more than half of the added amount. A target that passes, such as a sum
over neighbors in a ring, may still depend on reversals, exchanges of two records and odd
permutations. But such a target treats all positions alike.

The oracle's records may not be exchangeable. So the probes also replace the last record of the
rotated database, which comes from a random position. A rank test refuses the oracle if these
distances are larger than the distances at the last position.

The probes use the databases of the first pairs, which are also used for the estimate. The
statements about the probes and about the estimate both remain true, because each is about
independent draws, and a refusal returns nothing (docs/proofs/shorter.md). Only sums are probed on
separate databases, because the sampler never draws the whole databases of a sum.
"""

import json
import math
import operator
from collections.abc import Callable
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
from dpjax.sensitivity._chunks import (
    LEAST_ALONE,
    NOTHING,
    Block,
    Finished,
    Probed,
    Seen,
    moved_if_finite,
    probing_of,
    spread_chunks,
)
from dpjax.sensitivity._norms import difference, distance, length
from dpjax.sensitivity._pairs import RandomPair, neighboring_pair, random_rotations, rotated
from dpjax.sensitivity._plan import Plan, size_of_parts

# Rounding may change a value if its terms are added in another order, or in a batch of another
# size. These are the largest changes that the probes accept as rounding: a number of units in the
# last place, and a fraction of the change that a replaced record causes.
_ROUNDED_UNITS, _ROUNDED_SHARE = 16, 2**-8
# If a defect occurs on a fraction gamma of all databases, then 5 / gamma probes miss it with a
# probability of at most (1 - gamma)^(5 / gamma) < exp(-5) < 1 / 148.
_LEAST_PROBES, _PROBES_TIMES_GAMMA = 32, 5
# The largest number of databases on which a sum is probed. These probes only measure the rounding
# of the sum. More of them would take more time than the shortcut for sums saves.
_MOST_SUM_PROBES = 4096
# `refuse_places` refuses independent records with a probability of at most 10^-8.
_CERTAIN = math.log(1e8)
# Three tests check that an oracle's records are exchangeable. Each has this false-alarm rate.
_CHANCE = 3e-7


class Findings(NamedTuple):
    """The results of all probes. Each number is the maximum over all probed databases.

    Attributes:
        resolution: the norm of one unit in the last place of the value.
        permuted: the change of the value when the records are rotated.
        replaced: the finite change of the value when a record is replaced, at any sampled position.
        disagreement: the difference between the distance by the shortcut for sums and the distance
            computed from two databases.
        alone: the difference between the values of a database alone and in a batch.
        largest: the change of the value when the last record is replaced; NaN counts as infinite.
        elsewhere: maps the number of a chunk, as a string, to one number for each probed database
            of the chunk: the change of the value when the record at a random position is replaced.
    """

    resolution: float = 0.0
    permuted: float = 0.0
    replaced: float = 0.0
    disagreement: float = 0.0
    alone: float = 0.0
    largest: float = 0.0
    elsewhere: dict[str, tuple[float, ...]] = {}  # noqa: RUF012, it is never written to

    def __or__(self, other: "Findings") -> "Findings":  # type: ignore[override]
        *numbers, elsewhere = self
        *others, more = other
        return Findings(*map(max, numbers, others), elsewhere=elsewhere | more)

    def is_rounding(self, moved: float, resolution: float) -> bool:
        """Whether rounding alone could change a value by this distance."""
        return moved <= max(_ROUNDED_UNITS * resolution, _ROUNDED_SHARE * self.replaced)

    def of_all(self, team: Team) -> "Findings":
        """Combines the findings of all processes."""
        found = self
        for text in team.meet(json.dumps(self)):
            found |= Findings(*json.loads(text))
        return found


class Probes:
    """The probes of one sampling.

    If the target is a sum of records, the constructor starts the probes, so that devices run the
    probes before they draw pairs.

    Attributes:
        chunks: the chunks whose compiled program both draws and probes.
        probing: how many databases of a chunk this program probes.
    """

    def __init__(self, plan: Plan, *, progress: bool = False):
        pair, layout = plan.pair, plan.layout
        self._pair, self._layout, self._count = pair, layout, probed_pairs(pair, plan.point)
        self._sum: _ProbesOfSum | None = None
        if pair.sums is not None:
            self.chunks, self.probing = range(0), NOTHING
            self._sum = _ProbesOfSum(plan, _databases(pair, plan.point), progress=progress)
            return
        needed = -(-self._count // layout.size)
        # If there are few chunks, all of them run the program with probes. This takes less time
        # than compiling a second program without probes.
        few = not pair.calls_host and layout.chunks <= 2 * needed
        self.chunks = range(layout.chunks if few else needed)
        self.probing = probing_of(pair, layout.size, self._count)
        self._rotations = random_rotations(plan.words, pair.n, self._count)

    def rotations(self, chunks: list[int | None]) -> np.ndarray:
        """Returns by how many places each probed database is rotated, for all devices.

        `chunks` contains the chunk of each device.
        """
        starts = np.array([self._layout.size * (chunk or 0) for chunk in chunks])[:, None]
        indices = starts + np.arange(self.probing.rows)
        return self._rotations[np.minimum(indices, self._count - 1)].reshape(-1)

    def look(self, chunks: list[int | None], probed: Probed) -> list[Seen]:
        """Collects the results of each device's chunk. Evaluates some databases one at a time."""
        rows, kept = self.probing.rows, self.probing.kept
        permuted = np.asarray(probed.permuted).reshape(len(chunks), rows)
        elsewhere = _as_sampled(np.asarray(probed.elsewhere)).reshape(len(chunks), rows)
        # If no operation mixes the lanes of a `vmap`, computing a value in a batch changes only its
        # rounding. Such a change affects nearly every value, so testing the databases of the first
        # chunk is enough.
        looks_alone = kept > LEAST_ALONE or 0 in chunks
        databases, values = jax.tree.map(np.asarray, probed[2:]) if looks_alone else (None, None)
        found = list[Seen]()
        for device, chunk in enumerate(chunks):
            count = 0 if chunk is None else self._in(chunk)
            alone, start = 0.0, device * kept
            if looks_alone and count:
                here = slice(start, start + min(kept, count))
                first = jax.tree.map(lambda x, here=here: x[here], (databases, values))
                alone = _moved_alone(self._pair, *first)
            moved = elsewhere[device, : min(count, self.probing.rotated)].tolist()
            furthest = float(permuted[device, :count].max(initial=0.0))
            found.append(Seen(count, furthest, alone, tuple(moved)))
        return found

    def sufficient(self, finished: dict[int, Finished]) -> dict[int, Finished]:
        """Returns the chunks of a checkpoint, except those with too few probes for this call."""
        return {
            chunk: x
            for chunk, x in finished.items()
            if chunk not in self.chunks or x.seen.probes >= self._in(chunk)
        }

    def findings(self, finished: dict[int, Finished]) -> Findings:
        """Combines the findings of finished chunks."""
        found = Findings()
        for chunk, (row, resolution, seen) in finished.items():
            if count := self._in(chunk):
                distances = self._distances(row, count)
                found |= Findings(
                    resolution,
                    seen.permuted,
                    _largest_finite(distances),
                    alone=seen.alone,
                    largest=float(_as_sampled(distances).max()),
                    elsewhere={str(chunk): seen.elsewhere[:count]},
                )
        return found

    def at_another_position(self, block: Block) -> Findings:
        """Returns the largest finite change of a value, when records at one position change."""
        layout, found = self._layout, Findings()
        for place, d in enumerate(layout.local):
            for chunk in layout.chunks_of(d):
                if count := self._in(chunk):
                    row = place * (layout.block + 1) + chunk - d * layout.block
                    moved = self._distances(np.asarray(block.distances[row]), count)
                    found |= Findings(replaced=_largest_finite(moved))
        return found

    def judged(self, found: Findings) -> Findings:
        """Adds the findings about the sum, if the target is one. Raises an error if a test fails.

        Raises:
            ValueError: if the target or the oracle breaks an assumption of the sampler.
            RuntimeError: if the shortcut for sums disagrees with the target.
        """
        if self._sum is not None:
            found |= self._sum.findings()
        needed = -(-self._count // self._layout.size)
        if len(found.elsewhere) >= needed and self._pair.positions_sampled == 1:
            self.rounding(found)
            if self._sum is None:
                limit = found.largest + _rounded_apart(found)
                refuse_last(_all(found), limit, m=self._count, k=self._count)
        return found

    def rounding(self, found: Findings) -> float:
        """Returns the amount to add to the estimate for rounding; see `rounding_of_releases`."""
        return rounding_of_releases(found, is_sum=self._sum is not None)

    @staticmethod
    def _distances(row: np.ndarray, count: int) -> np.ndarray:
        """Returns the distances of the first `count` pairs of a chunk, in the first norm."""
        return row[:count].reshape(count, -1)[:, 0]

    def _in(self, chunk: int) -> int:
        """Returns the number of probed pairs in a chunk."""
        return min(max(self._count - chunk * self._layout.size, 0), self._layout.size)


def probed_pairs(pair: RandomPair, point: OperatingPoint) -> int:
    """Returns how many sampled pairs are probed.

    For a sum, the result is 0, because its probes draw databases of their own.
    """
    return 0 if pair.sums else _databases(pair, point)


def _databases(pair: RandomPair, point: OperatingPoint) -> int:
    """Returns the number of databases that are probed."""
    if not (pair.sums or pair.positions == "last" or touching(pair.target.jaxpr)):
        return min(point.m, LEAST_ALONE)
    wanted = max(_LEAST_PROBES, math.ceil(_PROBES_TIMES_GAMMA / point.gamma))
    return min(point.m, wanted, point.m if pair.sums is None else _MOST_SUM_PROBES)


def _as_sampled(distances: np.ndarray) -> np.ndarray:
    """Replaces NaN and negative distances by infinity, as the order statistic does."""
    return np.where(distances >= 0, distances, np.inf)


def _largest_finite(distances: np.ndarray) -> float:
    return float(distances[np.isfinite(distances)].max(initial=0.0))


# The following functions compare the value of a database alone with its value in a batch.


def _moved_alone(pair: RandomPair, databases: Database, values: Value) -> float:
    """Returns the largest distance between a database's value in a batch and its value alone."""
    if pair.positions == "last":
        refuse_places(databases)
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
    """Returns where two arrays are equal. NaN counts as equal to NaN."""
    return (x == y) | ((x != x) & (y != y))


@kept_jit("norm")
def _compiled_distances(values: Value, others: Value, equal: PyTree, *, norm: Program) -> jax.Array:
    def moved(value: Value, other: Value, equal: PyTree) -> jax.Array:
        apart = difference(value, other)
        # The difference of two equal infinities would be NaN, so equal entries are replaced by 0.
        return length(norm, jax.tree.map(lambda e, x: jnp.where(e, 0, x), equal, apart))

    return jax.vmap(moved)(values, others, equal)


# The following class probes sums. It uses separate databases, because the sampler never draws whole
# databases for a sum.


class _ProbesOfSum:
    """Runs the probes of a sum, chunk by chunk on the devices of this host."""

    def __init__(self, plan: Plan, count: int, *, progress: bool):
        """Starts the first chunk on every device."""
        pair, layout = plan.pair, plan.layout
        # No operation of a sum mixes the lanes of a `vmap`. So the chunks of the probes may have
        # another size than the chunks of the sampler.
        device = layout.devices[0]
        most = fitting(pair.bytes_of_a_database(device), device)
        self._plan, self._count, self._progress = plan, count, progress
        self._size = size_of_parts(pair, count, min(layout.size, most))
        self._devices = tuple(layout.local.values())
        self._rotations = random_rotations(plan.words, pair.n, count).astype(np.uint32)
        self._found: Findings | None = None
        self._first = self._started(0)
        if pair.calls_host:  # Code on the host must run for one program at a time.
            self.findings()

    @host_errors()
    def _started(self, start: int) -> tuple[dict[str, jax.Array], Database, Value]:
        """Starts a chunk on every device, without waiting for the results."""
        starts = start + self._size * np.arange(len(self._devices), dtype=np.uint32)
        indices = starts[:, None] + np.arange(self._size, dtype=np.uint32)
        indices = np.minimum(indices, self._count - 1)  # The last chunk repeats the last database.
        with within(row_of(self._devices)):
            return _compiled_probes(
                self._plan.key,
                np.stack([indices, self._rotations[indices]], axis=1),
                pair=self._plan.pair,
                kept=LEAST_ALONE,
                devices=self._devices,
            )

    @host_errors()
    def findings(self) -> Findings:
        """Computes the remaining chunks, and combines the findings of all chunks."""
        if self._found is not None:
            return self._found
        plan, together = self._plan, self._size * len(self._devices)
        found, elsewhere = Findings(), list[float]()
        with counting("probes", self._count, shown=self._progress) as done:
            for start in range(0, self._count, together):
                numbers, *kept = self._started(start) if start else self._first
                wait_for(
                    numbers["resolution"], plan.pair.programs, self._devices[0], plan.team.look
                )
                left = self._count - start
                elsewhere += (
                    _as_sampled(np.asarray(numbers.pop("elsewhere"))).reshape(-1)[:left].tolist()
                )
                largest = {name: float(np.asarray(x).max()) for name, x in numbers.items()}
                found |= Findings()._replace(**largest)
                if start < LEAST_ALONE:
                    first = slice(min(LEAST_ALONE - start, left))
                    # The reshape joins the axes of devices and chunks.
                    rows = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), kept)
                    alone = _moved_alone(plan.pair, *jax.tree.map(operator.itemgetter(first), rows))
                    found |= Findings(alone=alone)
                done(min(left, together))
        if plan.pair.positions != "last" or plan.pair.two_records is not None:
            elsewhere = []  # A sum treats all positions alike, so the positions need no test.
        self._found = found._replace(elsewhere={"sum": tuple(elsewhere)})
        return self._found


@kept_jit("pair", "kept", "devices")
def _compiled_probes(
    key: Key,
    work: np.ndarray,
    *,
    pair: RandomPair,
    kept: int,
    devices: tuple[Device | None, ...],
) -> tuple[dict[str, jax.Array], Database, Value]:
    """Probes a chunk of pairs on every device.

    `work` contains the indices of the pairs, and the number of places by which each database is
    rotated.

    Returns:
        The measured numbers of every pair, by name; the first `kept` databases of each device; and
        the target's values on all databases.
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
        # The barrier makes the program return the same bits that the target received. Without it,
        # XLA would draw the databases a second time, possibly with different rounding.
        databases = lax.optimization_barrier(databases)
        return numbers, jax.tree.map(lambda x: x[:kept], databases), values

    return spread_chunks(probe_chunk, jnp.asarray(work), devices)


def permuted(
    pair: RandomPair, steps: jax.Array, index: jax.Array, database: Database, value: Value
) -> jax.Array:
    """Returns how much the value of a database changes when its records are rotated."""
    other = pair.target(rotated(database, steps), origin=sampled(Role.PERMUTED, index))
    return moved_if_finite(pair, value, other)


# The following functions test the findings. If a test fails, they raise an error about the target
# or the oracle.


def rounding_of_releases(found: Findings, *, is_sum: bool) -> float:
    """Returns the amount to add to the estimate for rounding that sampled distances do not include.

    The result is twice the largest change of a value, because both values of a pair may have
    changed. The value of a database may change when the database is evaluated alone instead of in a
    batch. If the target ignores the order, the value may also change when records are permuted.

    For a sum, distances are computed by a shortcut. Then the result is at least twice the
    resolution, plus the largest error of the shortcut: the difference between a distance that the
    shortcut computes and the same distance computed with the target.

    Raises:
        ValueError: if a value changes by more than rounding explains, either when records are
            permuted, or when a database is evaluated alone instead of in a batch. If permutations
            change values, distances at the last position say nothing about other positions. Each of
            these changes is compared with `found.replaced`: how much values of the same databases
            change when a record is replaced. A comparison with the estimate would be weaker: if
            distances have heavy tails, the estimate is far above most distances.
        RuntimeError: if the shortcut for sums disagrees with the target.
    """
    moved = max(found.permuted, found.alone)
    if not found.is_rounding(found.alone, found.resolution):
        raise ValueError(
            "target computes different values for many databases at once, as the sampler runs it,"
            " and for one database alone, as a release runs it: values differ by up to"
            f" {found.alone:.3g}, and replacing a record changes them by up to"
            f" {found.replaced:.3g}. The target may be a host function that is not deterministic."
            " If rounding is the cause, compute in float64"
        )
    if not is_sum:
        if not found.is_rounding(found.permuted, found.resolution):
            raise ValueError(
                "target depends on the order of the records, or is not converged: on random "
                "databases, permuting the records changed its value by up to "
                f"{found.permuted:.3g}, and replacing one record changed it by up to "
                f"{found.replaced:.3g}. If the order is meant to matter, ask for "
                'positions="average" or positions="each": records at other positions may change '
                "the value more. If a solver's tolerance or rounding is the cause, let the "
                "solver converge further (tol= of scikit-learn), or compute in float64"
            )
        return 2 * moved
    rounding = 2 * max(moved, found.resolution)
    if not found.is_rounding(found.disagreement, rounding):
        raise RuntimeError(
            "the shortcut for sums over records disagrees with the target by"
            f" {found.disagreement:.3g} on random databases: sums may overflow, or `finish` may"
            " amplify rounding errors. To turn the shortcut off, pass `lambda database:"
            " target(database)` as target"
        )
    return rounding + found.disagreement


def refuse_rounding(found: Findings) -> None:
    """Refuses a target whose estimate is 0 although a probe changed its value."""
    moved = max(found.permuted, found.alone)
    if moved > 0:
        raise ValueError(
            "the estimated sensitivity is 0, but the value of the target moves by up to"
            f" {moved:.3g} when records are permuted, or when a database is evaluated alone instead"
            " of in a batch: round the value to a grid, or ask for"
            ' positions="average" or positions="each"'
        )


def refuse_places(databases: Database) -> None:
    """Refuses columns that depend only on a record's position, such as labels in a fixed order.

    The test looks for a column that is equal in all k databases, and not constant. If the n records
    of each database are independent, this happens with probability at most n / (e n)^k. The worst
    case is a boolean column that is true for each record with probability 1 / n. The test refuses
    this column if it is true for the same single record in all databases.
    """
    for path, leaf in jax.tree.leaves_with_path(databases):
        k, n = leaf.shape[:2]
        if k * (1 + math.log(n)) - math.log(n) < _CERTAIN:
            continue
        columns = leaf.reshape(k, n, -1)
        fixed = np.all(_equal(columns, columns[:1]), axis=(0, 1))
        if np.any(fixed & ~np.all(_equal(columns[0], columns[0, :1]), axis=0)):
            raise ValueError(
                "oracle must draw records in random order for positions='last', which replaces the"
                " last record, but the numbers at"
                f" {jax.tree_util.keystr(path) or 'its only leaf'} depend only on the position of"
                " a record: they differ between records, and are the same in every database."
                " Shuffle all records by jax.random.permutation, or ask for positions='average' or"
                " 'each'"
            )


def refuse_other_places(
    found: Findings, kth: Callable[[int], float], point: OperatingPoint, *, looks: int = 1
) -> None:
    """Refuses an oracle if replacing other records changes values more than replacing the last.

    Args:
        found: the findings of all processes.
        kth: maps k to the k-th smallest of all sampled distances.
        point: the operating point, for m and gamma.
        looks: an upper bound on the number of sample sizes at which sampling could have ended.
    """
    elsewhere = _all(found)
    if len(elsewhere):
        for k in sorted({point.m, math.ceil((1 - point.gamma) * point.m)}):
            refuse_last(elsewhere, kth(k) + _rounded_apart(found), m=point.m, k=k, looks=looks)


def _all(found: Findings) -> np.ndarray:
    return np.array([x for moved in found.elsewhere.values() for x in moved])


def _rounded_apart(found: Findings) -> float:
    """Bounds how much a distance may differ between two compiled programs, due to rounding."""
    return 2 * max(found.permuted, _ROUNDED_UNITS * found.resolution)


def refuse_last(elsewhere: np.ndarray, limit: float, *, m: int, k: int, looks: int = 1) -> None:
    """Refuses an oracle if too many of the changes in `elsewhere` exceed `limit`.

    Args:
        elsewhere: for each probed database, the change of the value when the record at a random
            position is replaced.
        limit: the k-th smallest of the m changes of values when the last record is replaced, or any
            larger number.
        m: number of databases.
        k: rank of the limit.
        looks: an upper bound on the number of tests, which share the false-alarm rate.
    """
    beyond = int(np.sum(elsewhere > limit))
    if chance_of_as_many(beyond, len(elsewhere), m, k) < _CHANCE / looks:
        raise ValueError(
            "oracle must draw exchangeable records for positions='last'. Replacing a record at a "
            f"random position changed the target by more than {limit:.3g} on {beyond} of "
            f"{len(elsewhere)} databases. Replacing the last record changed the target by more "
            f"than {limit:.3g} on at most {m - k} of {m} databases. Sorted records, time series, "
            "and classes one after the other are not exchangeable: ask for positions='average' or "
            "'each', or shuffle all records by jax.random.permutation"
        )


def chance_of_as_many(beyond: int, probed: int, m: int, k: int) -> float:
    """Bounds the p-value of the rank test in `refuse_last`.

    The limit is the k-th smallest of m distances at the last position. The p-value is the
    probability that `beyond` or more of the distances at random positions exceed the limit. The
    bound is valid for exchangeable records and any target (docs/proofs/shorter.md). Distances equal
    to the limit are not counted, which can only make the probability smaller.

    Args:
        beyond: how many distances at random positions exceed the limit.
        probed: number of distances at random positions: one for each of the first `probed` pairs.
        m: number of pairs.
        k: rank of the limit.
    """
    by_signs = float(scipy.special.bdtr(min(m - k, beyond), beyond, 0.5))
    top = m - k + beyond
    # The second condition means that `beyond` is at most its expected value, probed * top / m.
    if k <= probed or beyond * m <= probed * top:
        return by_signs
    of_top = np.arange(max(beyond, probed - (m - top)), min(probed, top) + 1)
    logs = _log_choose(top, of_top) + _log_choose(m - top, probed - of_top)
    by_ranks = np.sum(np.exp(logs - _log_choose(m, np.array(probed))))
    return min(by_signs, float(by_ranks))


def _log_choose(n: int, k: np.ndarray) -> np.ndarray:
    return -np.log1p(n) - scipy.special.betaln(k + 1.0, n - k + 1.0)
