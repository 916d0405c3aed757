"""Random pairs for several releases: each pair's relative distance, and the loss of one release.

The *relative distance* of a pair is the distance of its values divided by the distance to which the
noise is calibrated (docs/proofs/privacy-profile.md).
"""

import dataclasses
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from dpjax._core._losses import LogPmf, PairLoss
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Norm, OperatingPoint, Oracle, Positions, Target
from dpjax._running._devices import outside_any_mesh
from dpjax._running._processes import together
from dpjax._tracing._programs import Program
from dpjax.sensitivity._chunks import all_distances
from dpjax.sensitivity._loop import sample_block
from dpjax.sensitivity._norms import NORMS, difference, distance
from dpjax.sensitivity._pairs import RandomPair, position_key
from dpjax.sensitivity._plan import Plan, layout_of, layout_that_fits
from dpjax.sensitivity._probes import Probes, probed_pairs, refuse_other_places
from dpjax.sensitivity._sums import Summable

# A bound on the relative error of the noise scale, which is rounded to float32.
_SCALE_ERROR = 2.0**-20
# These numbers are folded into the key, so that a profile never uses the pairs from which a
# sensitivity was sampled.
_DOMAIN = 2**32 - 1, 0x70726F66


Sum: TypeAlias = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _Sums(Summable):
    """Several sums over records as one target. Each sum has its own statistic and `finish`."""

    parts: tuple[Summable, ...] = ()

    def __call__(self, database: Database) -> Value:
        return [part(database) for part in self.parts]

    def finish_sum(self, total: PyTree, n: int) -> Value:
        return [part.finish_sum(x, n) for part, x in zip(self.parts, total, strict=True)]


@dataclasses.dataclass(frozen=True)
class Joint:
    """Several releases about one database.

    Attributes:
        targets: the targets of the releases.
        losses: the privacy loss of each release on a pair.
        pure: the sum of the epsilons of the releases without Gaussian noise.
        deviations: the l2 norm of the ratios of sensitivity to standard deviation, over the
            Gaussian releases.
        positions: "last" if all sensitivities are for a change of the last record, or "average" for
            a change at a random position.
        records: shapes and dtypes of the records that sensitivities were sampled from.
    """

    targets: tuple[Target, ...]
    losses: tuple[PairLoss, ...]
    pure: float
    deviations: float
    positions: Positions
    records: tuple[TreeSpec, ...] = ()

    @property
    def target(self) -> Target:
        """Returns one target that contains all released arrays; a sum if all targets are sums."""
        releases = list(zip(self.targets, self.losses, strict=True))
        sums = [t for t, loss in releases if isinstance(t, Summable) and loss.arrays is None]
        if len(sums) == len(releases):
            parts = tuple(sums)
            return _Sums(lambda x: [part.statistic(x) for part in parts], list, False, None, parts)
        return lambda database: [
            target(database) if loss.arrays is None else loss.arrays(target(database))
            for target, loss in releases
        ]

    def check_records(self, drawn: TreeSpec) -> None:
        """Raises an error if an oracle's arrays differ from the sampled arrays."""
        for sampled in self.records:
            if sampled != drawn:
                raise ValueError(
                    f"oracle must draw records like those that were sampled, {sampled}, got {drawn}"
                )

    def relative_distance(self, moved: PyTree) -> jax.Array:
        """Returns the relative distance of a pair, given the differences `moved` of its values."""
        parts = list(zip(self.losses, moved, strict=True))
        pure = [loss.shift(x) for loss, x in parts if loss.family != "gaussian"]
        normal = [loss.shift(x) for loss, x in parts if loss.family == "gaussian"]
        return self._worse(pure, normal, NORMS["l1"], NORMS["l2"], NORMS["linf"])

    @property
    def rounding(self) -> float:
        """Bounds how much a relative distance grows if all values are rounded to grids."""
        pure = [loss.rounding for loss in self.losses if loss.family != "gaussian"]
        normal = [loss.rounding for loss in self.losses if loss.family == "gaussian"]
        return float(self._worse(pure, normal, np.sum, np.linalg.norm, np.max))

    def _worse(self, pure: list[Any], normal: list[Any], l1: Sum, l2: Sum, largest: Sum) -> Any:
        found = [l1(pure) / self.pure] if pure else []
        return largest([*found, l2(normal) / self.deviations] if normal else found)


def relative_distances(
    key: Key, joint: Joint, oracle: Oracle, *, n: int, point: OperatingPoint
) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Bounds, for each pair, its relative distance and the loss of a simulated release.

    Returns:
        The relative distances; the losses, or None if the distances determine the exact curve; and
        the fingerprint of the sampling. Distances without losses are sorted.
    """
    sampled, hidden, plan = sampled_distances(
        key,
        joint.target,
        oracle,
        n=n,
        norm=joint.relative_distance,
        positions=joint.positions,
        point=point,
        released=partial(_with_releases, joint),
    )
    # Sorting float32 is much faster than sorting float64.
    sampled, losses = sampled.T if sampled.ndim > 1 else (np.sort(sampled), None)
    # The computation of the norm adds a rounding error for each coordinate.
    coordinates = sum(leaf.size for leaf in jax.tree.leaves(plan.pair.target.outputs.tree()))
    relative = float(jnp.finfo(plan.pair.distance_dtype).eps) * (coordinates + 16) + _SCALE_ERROR
    absolute = hidden + joint.rounding
    values = (np.asarray(sampled, np.float64) + absolute) * (1 + relative)
    if losses is not None:
        losses = _raised(losses, values, absolute, relative, joint)
    return values, losses, plan.identity


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
    """Returns distances of fresh pairs, a bound on their rounding errors, and the plan."""
    key = other_pairs(key)
    with together(None) as team:
        pair = RandomPair.trace(key, target, oracle, n=n, norm=norm, positions=positions)
        drawn = pair if released is None else released(pair)
        layout = layout_of(drawn, point.m, None, None)
        layout = layout_that_fits(key, drawn, layout, probed_pairs(drawn, point))
        plan = Plan.of(key, pair, layout, team, point, point.confidence)
        probes = Probes(plan)
        block, found = sample_block(dataclasses.replace(plan, pair=drawn), probes=probes)
        found = found.of_all(team)
        rounding = probes.rounding(found)
        sampled = np.asarray(all_distances(block, layout=layout))
        ordered = np.sort(sampled.reshape(point.m, -1)[:, 0])
        refuse_other_places(found, lambda k: float(ordered[k - 1]), point)
    return sampled, max(rounding, float(np.max(np.asarray(block.resolution)))), plan


def other_pairs(key: Key) -> Key:
    """Derives a key whose pairs differ from the pairs of the given key."""
    for word in _DOMAIN:
        key = jax.random.fold_in(key, word)
    return key


# Every sampled pair of databases has a key. This number is folded into the pair's key to draw the
# noise of a simulated release. Other numbers are folded in to draw the pair's position and
# rotation.
_NOISE = 2
# [0, 1] is divided into this many equal cells. Uniform numbers are the upper ends of cells, which
# float32 represents exactly.
_CELLS = 2**24
# Bounds on the relative and the absolute error of a device's logarithm.
LOG_ERROR = 2.0**-16, 2.0**-18
# A bound on the error of a normal quantile z that a device computes, relative to 1 + |z|.
QUANTILE_ERROR = 2.0**-14
# An upper bound on the finite normal quantiles at the ends of cells.
_LARGEST_NORMAL = 6.0
# Options are selected with probabilities that are multiples of 2^-30. An option with a probability
# below e^-40 is rare.
_UNIT, _RARE = 2.0**30, 40.0
# With K options, the error of a log probability p is at most _LOGIT_ERROR (2 + |p| + K / _OPTIONS).
_LOGIT_ERROR, _OPTIONS = 2.0**-14, 2**6
# The bound with `_LOGIT_ERROR` is valid only if the largest logit is at least this number. If all
# logits are smaller, rounding errors are large relative to the differences that are computed.
_LEAST_LOGIT = -16.0
# The distance that `PairLoss.shift` returns has a relative error and an absolute error. Each is at
# most this number.
_SHIFT_ERROR = 2.0**-10


@dataclasses.dataclass(frozen=True)
class ReleasedPair(RandomPair):
    """A random pair of databases, and one simulated release of the first database.

    Attributes:
        loss: maps a key, and the two values of the pair or their difference, to the privacy loss of
            the release.
    """

    loss: Program | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns (2,): `distance` returns two numbers, the relative distance and the loss."""
        return (2,)

    def distance(
        self, key: Key, index: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns two numbers of pair `index`, and the rounding step of the target's value.

        The two numbers are the relative distance and the privacy loss.
        """
        if self.sums is None:
            return super().distance(key, index, position)
        loss, noise = self._release(key, index)

        def of_difference(moved: PyTree) -> jax.Array:
            return jnp.stack([self.norm(moved), loss(moved, noise)])

        released = dataclasses.replace(self, norm=of_difference)
        found, resolution = RandomPair.distance(released, key, index, position)
        return found, resolution[0]

    def between(self, key: Key, index: jax.Array, value: Value, other: Value) -> jax.Array:
        """Returns the relative distance and the loss of pair `index`, given its two values."""
        loss, noise = self._release(key, index)
        return jnp.stack([distance(self.norm, value, other), loss(value, other, noise)])

    def _release(self, key: Key, index: jax.Array) -> tuple[Program, Key]:
        assert self.loss is not None
        return self.loss, jax.random.fold_in(position_key(key, index), _NOISE)


def _with_releases(joint: Joint, pair: RandomPair) -> RandomPair:
    """Adds a simulated release to a pair, unless the distance determines the exact divergence."""
    joint.check_records(pair.target.inputs.argument(0))
    if _independent_parts(joint, pair) < 2:
        return pair
    value, key = pair.target.outputs.tree(), pair.oracle.inputs.argument(0).tree()
    if pair.sums is None:
        loss = Program.trace("loss", partial(_loss_of_values, joint), value, value, key)
    else:
        moved = pair.norm.inputs.argument(0).tree()
        loss = Program.trace("loss", partial(joint_loss, joint), moved, key)
    fields = {field.name: getattr(pair, field.name) for field in dataclasses.fields(pair)}
    return ReleasedPair(**fields, loss=loss)


def _independent_parts(joint: Joint, pair: RandomPair) -> int:
    """Counts how many independent losses add up. Releases with at least two are simulated.

    A selection with known `logits` counts twice, so that it is always simulated. The reason: the
    distance between its scores on two neighbors does not determine the distribution of its loss.
    """
    parts = 0
    for loss, arrays in zip(joint.losses, pair.target.outputs.tree(), strict=True):
        if loss.family != "gaussian":
            size = sum(x.size for x in jax.tree.leaves(arrays))
            parts += size if loss.shifts else 1 + (loss.logits is not None)
    return parts + (joint.deviations > 0)


def _loss_of_values(joint: Joint, value: PyTree, other: PyTree, key: Key) -> jax.Array:
    pairs = list(zip(value, other, strict=True))
    return joint_loss(joint, difference(value, other), key, pairs)


def joint_loss(
    joint: Joint, moved: PyTree, key: Key, values: list[tuple[PyTree, PyTree]] | None = None
) -> jax.Array:
    """Returns the joint privacy loss of one draw of all releases.

    The result has no margin for errors of the distances. `_raised` adds this margin.

    Args:
        joint: the releases.
        moved: for each release, the differences of its arrays.
        key: the key of the noise.
        values: for each release, its arrays. Without values, selections get their largest loss.
    """
    parts = list(enumerate(zip(joint.losses, moved, strict=True)))
    exact = [i for i, (loss, _) in parts if loss.logits is not None and values is not None]
    shifts = [jnp.ravel(a) for _, (loss, x) in parts if loss.shifts for a in loss.shifts(x)]
    pure = [
        loss.shift(x)[None]
        for i, (loss, x) in parts
        if loss.family in ("range", "pure") and i not in exact
    ]
    normal = [loss.shift(x)[None] for _, (loss, x) in parts if loss.family == "gaussian"]
    groups = [(_of_laplace, shifts), (_of_randomized_response, pure), (_of_gaussian, normal)]
    terms: list[jax.Array] = []
    for number, (of_shifts, found) in enumerate(groups):
        if found:
            a = jnp.abs(jnp.concatenate(found))
            terms.append(jnp.sum(of_shifts(jax.random.fold_in(key, number), a)))
    for i in exact:
        loss, each = joint.losses[i], jax.random.fold_in(key, len(groups) + i)
        assert loss.logits is not None
        assert values is not None
        first, second = map(loss.logits, values[i])
        shift = loss.shift(moved[i])
        terms.append(_of_selection(each, loss.log_pmf, first, second, shift))
    return reduce(jnp.add, terms)


def _of_selection(
    key: Key, log_pmf: LogPmf, first: jax.Array, second: jax.Array, shift: jax.Array
) -> jax.Array:
    """Draws one option by probabilities in multiples of 2^-30, and returns its privacy loss."""
    one, other = log_pmf(first), log_pmf(second)
    ends = jnp.cumsum(chances_of(one), dtype=jnp.uint32)
    place = jax.random.randint(key, (), 0, ends[-1], jnp.uint32)
    option = jnp.sum(ends <= place, dtype=jnp.int32)
    p, q = one[option], other[option]
    off = _LOGIT_ERROR * (2 + jnp.abs(p) + jnp.abs(q) + first.size / _OPTIONS)
    # The shift bounds the loss of every option. For rare options, no smaller bound is known.
    known = jnp.minimum(jnp.max(first), jnp.max(second)) >= _LEAST_LOGIT
    return jnp.where(known & (p > -_RARE), jnp.minimum(p - q + off, shift), shift)


def chances_of(log_probabilities: jax.Array) -> jax.Array:
    """Converts log probabilities to integers in units of 2^-30, rounded up so that none is 0."""
    return jnp.floor(jnp.exp(log_probabilities) * _UNIT).astype(jnp.uint32) + 1


def _uniforms(key: Key, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws uniform numbers in (0, 1], rounded up to multiples of 1 / `_CELLS`, and fair coins."""
    bits = jax.random.bits(key, like.shape, jnp.uint32)
    return ((bits >> 8) + 1).astype(like.dtype) / _CELLS, (bits & 1) == 1


def _of_laplace(key: Key, a: jax.Array) -> jax.Array:
    """Draws the loss |z + a| - |z| of Laplace noise z.

    The loss is a for z > 0. For z < 0, it decreases from a to -a as z decreases.
    """
    uniform, above = _uniforms(key, a)
    relative, absolute = LOG_ERROR
    depth = jnp.maximum(-jnp.log(uniform) * (1 - relative) - absolute, 0)
    return jnp.where(above, a, jnp.maximum(a - 2 * depth, -a))


def _of_randomized_response(key: Key, a: jax.Array) -> jax.Array:
    uniform, _ = _uniforms(key, a)
    likely = jax.nn.sigmoid(a * (1 + _SHIFT_ERROR) + _SHIFT_ERROR) + 2.0**-20
    return jnp.where(uniform - 1 / _CELLS < likely, a, -a)


def _of_gaussian(key: Key, distances: jax.Array) -> jax.Array:
    mu = jnp.sqrt(jnp.sum(jnp.square(distances), keepdims=True))
    uniform, _ = _uniforms(key, mu)
    z = ndtri(uniform)
    return mu * (z + QUANTILE_ERROR * (1 + jnp.abs(z))) + mu * mu / 2


def log_of_chances(joint: Joint) -> float:
    """Bounds the rounding errors of log probabilities, summed over all selections.

    Each selection has one bound, for the log probability of any option.
    """
    # The factor 2 covers two errors: the error of a probability, and the error of the sum of all
    # probabilities.
    return sum(
        2 * (_LOGIT_ERROR * (2 + _RARE + loss.options / _OPTIONS) + _SHIFT_ERROR)
        for loss in joint.losses
        if loss.logits
    )


def _raised(
    losses: np.ndarray, distances: np.ndarray, absolute: float, relative: float, joint: Joint
) -> np.ndarray:
    """Adds a margin to sampled losses, for the errors of the distances from which they come.

    Losses and relative distances are in the order of the pairs.
    """
    losses = np.asarray(losses, np.float64)
    if max(relative, absolute * joint.pure) > _SHIFT_ERROR:
        return np.full_like(losses, np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        pure, normal = distances * joint.pure, distances * joint.deviations
        off = relative * pure + absolute * joint.pure
        normal_off = relative * normal + absolute * joint.deviations
        return losses + 2 * off + 2 * normal_off * (_LARGEST_NORMAL + normal)
