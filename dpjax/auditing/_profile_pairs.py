"""How far random pairs stretch the releases of one database, all together."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._pair_loss import PairLoss
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Norm, OperatingPoint, Oracle, Positions, Target
from dpjax._running._layout import outside_any_mesh
from dpjax._running._processes import together
from dpjax.sensitivity._blocks import all_distances
from dpjax.sensitivity._chunk_memory import layout_that_fits
from dpjax.sensitivity._chunks import layout_of
from dpjax.sensitivity._loop import sample_block
from dpjax.sensitivity._norms import NORMS
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._plan import Plan
from dpjax.sensitivity._probes import Probes, probed_pairs
from dpjax.sensitivity._sum_targets import Summable

# The scale that is drawn is known in float32.
_SCALE_ERROR = 2.0**-20
# Pairs of a profile never are those that a sensitivity was sampled from.
_DOMAIN = 2**32 - 1, 0x70726F66


Sum: TypeAlias = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _Sums(Summable):
    """Several sums over records as one; each has its own way to add up and to finish."""

    parts: tuple[Summable, ...] = ()

    @classmethod
    def of(cls, parts: tuple[Summable, ...]) -> "_Sums":
        return cls(
            lambda record: [part.statistic(record) for part in parts], list, False, None, parts
        )

    def __call__(self, database: Database) -> Value:
        return [part(database) for part in self.parts]

    def finish_sum(self, total: PyTree, n: int) -> Value:
        return [part.finish_sum(x, n) for part, x in zip(self.parts, total, strict=True)]


@dataclasses.dataclass(frozen=True)
class Joint:
    """Several releases about one database.

    Attributes:
        targets: their targets.
        losses: what each loses on a pair.
        pure: the sum of the epsilons of those without Gaussian noise.
        deviations: of the others, the distance of their sensitivities in standard deviations.
        positions: which record changes: "last" if all sensitivities say so.
        records: those that sensitivities were sampled from.
    """

    targets: tuple[Target, ...]
    losses: tuple[PairLoss, ...]
    pure: float
    deviations: float
    positions: Positions
    records: tuple[TreeSpec, ...] = ()

    @property
    def target(self) -> Target:
        """All arrays that are released, as one target; sums over records stay one sum."""
        releases = list(zip(self.targets, self.losses, strict=True))
        sums = [t for t, loss in releases if isinstance(t, Summable) and loss.arrays is None]
        if len(sums) == len(releases):
            return _Sums.of(tuple(sums))
        return lambda database: [
            target(database) if loss.arrays is None else loss.arrays(target(database))
            for target, loss in releases
        ]

    def check_records(self, drawn: TreeSpec) -> None:
        """Refuses an oracle of other records than those of the sensitivities."""
        for sampled in self.records:
            if sampled != drawn:
                raise ValueError(
                    f"oracle must draw records like those that were sampled, {sampled}, got {drawn}"
                )

    def stretch(self, moved: PyTree) -> jax.Array:
        """How often a difference of values spends what the releases were calibrated to."""
        parts = list(zip(self.losses, moved, strict=True))
        pure = [loss.shift(x) for loss, x in parts if loss.family != "gaussian"]
        normal = [loss.shift(x) for loss, x in parts if loss.family == "gaussian"]
        return self._worse(pure, normal, NORMS["l1"], NORMS["l2"], NORMS["linf"])

    @property
    def rounding(self) -> float:
        """How much the grids of all releases add to a stretch."""
        pure = [loss.rounding for loss in self.losses if loss.family != "gaussian"]
        normal = [loss.rounding for loss in self.losses if loss.family == "gaussian"]
        return float(self._worse(pure, normal, np.sum, np.linalg.norm, np.max))

    def _worse(self, pure: list[Any], normal: list[Any], l1: Sum, l2: Sum, largest: Sum) -> Any:
        found = [l1(pure) / self.pure] if pure else []
        return largest([*found, l2(normal) / self.deviations] if normal else found)


@dataclasses.dataclass(frozen=True, eq=False)
class Stretches:
    """The stretch of every pair.

    Attributes:
        values: with all that rounding may hide; in the order of the pairs, where losses are known.
        absolute: so much did grids and the rounding of the target add to each.
        relative: this share of each did the rounding of the norm add.
        losses: of one release about each pair, without these; None where it says nothing more.
        identity: names the sampling.
    """

    values: np.ndarray
    absolute: float
    relative: float
    losses: np.ndarray | None
    identity: str


def sampled_stretches(
    key: Key,
    joint: Joint,
    oracle: Oracle,
    *,
    n: int,
    point: OperatingPoint,
    released: Callable[[RandomPair], RandomPair],
) -> Stretches:
    """The stretch of every pair, and what `released` adds to a pair."""
    sampled, hidden, plan = sampled_distances(
        key,
        joint.target,
        oracle,
        n=n,
        norm=joint.stretch,
        positions=joint.positions,
        point=point,
        released=released,
    )
    # Half as many bytes are sorted much faster.
    sampled, losses = sampled.T if sampled.ndim > 1 else (np.sort(sampled), None)
    # The norm rounds once for each coordinate.
    coordinates = sum(leaf.size for leaf in jax.tree.leaves(plan.pair.target.outputs.tree()))
    error = float(jnp.finfo(plan.pair.distance_dtype).eps) * (coordinates + 16) + _SCALE_ERROR
    absolute = hidden + joint.rounding
    values = (np.asarray(sampled, np.float64) + absolute) * (1 + error)
    return Stretches(values, absolute, error, losses, plan.identity)


@outside_any_mesh
def sampled_distances(
    key: Key,
    target: Target,
    oracle: Oracle,
    *,
    n: int,
    norm: Norm,
    positions: Positions,
    point: OperatingPoint,
    released: Callable[[RandomPair], RandomPair] | None = None,
) -> tuple[np.ndarray, float, Plan]:
    """Distances of pairs that no sensitivity was sampled from, and what rounding may add to one."""
    key = other_pairs(key)
    with together(None) as team:
        pair = RandomPair.trace(key, target, oracle, n=n, norm=norm, positions=positions)
        drawn = pair if released is None else released(pair)
        layout = layout_of(drawn, point.m, None, None)
        layout = layout_that_fits(key, drawn, layout, probed_pairs(drawn, point))
        plan = Plan.of(key, pair, layout, team, point, point.confidence)
        probes = Probes(plan)
        block = sample_block(dataclasses.replace(plan, pair=drawn), probes=probes)
        rounding = probes.rounding(team)
        sampled = np.asarray(all_distances(block, layout=layout))
        ordered = np.sort(sampled.reshape(point.m, -1)[:, 0])
        probes.refuse_last(lambda k: float(ordered[k - 1]), point)
    return sampled, max(rounding, float(np.max(np.asarray(block.resolution)))), plan


def other_pairs(key: Key) -> Key:
    """A key whose pairs no sensitivity is sampled from under the key itself."""
    for word in _DOMAIN:
        key = jax.random.fold_in(key, word)
    return key
