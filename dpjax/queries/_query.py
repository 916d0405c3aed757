"""Queries: targets with a known sensitivity, whose values are computed as exact integer sums."""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, KnowsAccuracy
from dpjax._core._columns import as_arrays, in_64_bits
from dpjax._core._guarantee import RECORD
from dpjax._core._records import Parts, Summed, Unsummed
from dpjax._core._types import Database, Value
from dpjax._core._values import Inside, Mechanism, NeighboringRelation
from dpjax._exact._numerics import round_up
from dpjax._tracing._programs import QuickJit
from dpjax.mechanisms._above_threshold import AboveThreshold
from dpjax.mechanisms._noisy_arrays import CoordinatewiseMechanism
from dpjax.mechanisms._selection import SelectionMechanism
from dpjax.queries._padded_records import present_records
from dpjax.queries._totals import Addend, OfParts, Totals, totals_of
from dpjax.targets._known_sensitivity import KnownSensitivity, VectorNorm

_RANGE: Any = "range"  # This stands for a norm, but it is not a `VectorNorm`.

Reach = Callable[[VectorNorm, NeighboringRelation], float]
"""Maps a norm and a neighboring relation to the largest change by one record, rounded up."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IntegerQuery(OfParts, KnownSensitivity):
    """A target whose value is an array of integers, in units of a public grid.

    Attributes:
        addends: maps records, and booleans that say which are present, to an `Addend` for each
            table of counts or sums in the query.
        finish: maps the totals of these tables to the value, int32, for example by a clamp or a
            rounding. A record changes the value by at most `reach`.
        shape: the shape of the value.
        reach: the largest change of the integers by one record.
        unit: the number that the integer 1 represents, a power of two.
        moves: how much one record can change the numbers before they are rounded to the grid; None
            if nothing is rounded. Mechanisms are calibrated to this bound, and their noise is then
            increased for the rounding.
        rounding: a bound on the rounding error of the value, in units.
        clipping: a bound on the error that arises because records at the edge of a ball are shrunk,
            in units.
        largest: a bound on the magnitude of the value, for the rounding of its floats.
        one_way: whether adding a record never lowers a number, as for counts.
        as_given: whether `addends` receives records in the form that the caller passed, instead of
            arrays. Keys of groups must be compared before integers become floats.
        privacy_unit: the unit in which neighboring databases differ.
        notes: other facts that a guarantee must mention.

    Formal guarantees:
        `reach` bounds ||f(D) - f(D')|| for all neighbors D and D', and for the computed value:
        integers are added, and their sum has the same bits in any order. The bound is valid for any
        content of a record. Let the records be split into parts, on batches, processes or devices.
        Add up their `partial` totals by `added`, and apply `finish`: the result has the same bits
        as for all records at once. The totals of parts are private data, like the records
        themselves.
    """

    addends: Callable[[Database, jax.Array], Sequence[Addend]]
    finish: Callable[[Totals], jax.Array]
    shape: tuple[int, ...]
    reach: Reach
    unit: float = 1.0
    moves: Reach | None = None
    rounding: float = 0.0
    clipping: float = 0.0
    largest: float = 0.0
    one_way: bool = False
    as_given: bool = False
    privacy_unit: str = RECORD
    notes: tuple[str, ...] = ()

    norms = (*KnownSensitivity.norms, _RANGE)

    def __call__(self, database: Database) -> jax.Array:
        """Returns the integers of the query for a database."""
        # A predicate may use variables whose values have changed since `jit` traced it. So releases
        # do not use the cache of `jit`.
        if isinstance(database, Summed) or _checks.is_staging():
            return super().__call__(database)
        return compiled(self.of_present)(*present_records(database))

    def of_present(self, records: Database, present: jax.Array) -> jax.Array:
        """Returns the integers of the query for the records that are present."""
        return self.finish(self.partial(records, present))

    def partial(self, records: Database, present: jax.Array) -> Totals:
        """Returns the exact totals of some of the records.

        Totals of disjoint parts may be added.
        """
        return totals_of(self.addends_of(records, present))

    def addends_of(self, records: Database, present: jax.Array) -> Sequence[Addend]:
        """Returns the addends of each record, from records in the form that the caller passed."""
        if self.as_given:
            return self.addends(records, present)
        with in_64_bits(records):
            return self.addends(as_arrays(records), present)

    def with_reach(self, of_reach: Callable[[Reach], Reach], **fields: Any) -> "IntegerQuery":
        """Returns a copy whose bounds are converted by `of_reach`, with other `fields` replaced."""
        moves = self.moves and of_reach(self.moves)
        return dataclasses.replace(self, reach=of_reach(self.reach), moves=moves, **fields)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        # Values are integers, and the bound is valid for any number of records.
        return self._in_norm(self.reach, norm, relation)

    def in_units_of_records(self, norm: VectorNorm, relation: NeighboringRelation) -> float:
        """Returns the largest change by one record, in units of the records, not of the grid."""
        if self.moves is None:
            return self._in_norm(self.reach, norm, relation) * self.unit
        return self._in_norm(self.moves, norm, relation)

    def _in_norm(self, reach: Reach, norm: VectorNorm, relation: NeighboringRelation) -> float:
        if norm != _RANGE:
            return reach(norm, relation)
        # If a record changes every number by 0 to r, the range of the change is at most r. If it
        # may raise one number by r and lower another by r, the range is at most 2 r.
        added = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        return reach("linf", relation) * (1 if added and self.one_way else 2)

    def error(
        self, mechanism: CoordinatewiseMechanism, *, confidence: float, simultaneous: bool
    ) -> float:
        """Returns a bound on the distance of a release from the true value, in units of records."""
        value = jax.ShapeDtypeStruct(self.shape, jnp.int32)
        error = mechanism.error(confidence=confidence, like=value, simultaneous=simultaneous)
        return (float(error) + self.rounding + self.clipping) * self.unit


_P = ParamSpec("_P")
T = TypeVar("T")


def compiled(function: Callable[_P, T]) -> Callable[_P, T]:
    """Compiles a function by `jax.jit`, and preserves its type for type checkers."""
    return QuickJit(function)


@compiled
def in_units_of(unit: float, value: jax.Array) -> jax.Array:
    """Converts a noisy total to floats in units of the records; NaN marks invalid parameters."""
    floats = value.astype(jnp.result_type(float)) * unit
    return jnp.where(value == jnp.iinfo(value.dtype).min, jnp.nan, floats)


@dataclasses.dataclass(frozen=True, eq=False)
class Query(KnownSensitivity, KnowsAccuracy):
    """A target with a known sensitivity, in the units of the records.

    `query(database)` takes a pytree of arrays with leading axis n, or a `PaddedRecords`, and
    `dpjax.privatize(query, mechanism)` releases it. Counts are integers. Sums are floats:
    internally, they are integers on a public grid, and noise is added to these integers.

    Formal guarantees:
        `sensitivity` bounds how much a record changes the numbers, for any content of the record. A
        release by `dpjax.privatize` adds integer noise to exact integers, so the guarantee is valid
        for the actual computation. The noise also covers the rounding to the grid.
    """

    _integers: IntegerQuery

    norms = IntegerQuery.norms
    relations = IntegerQuery.relations
    reads = IntegerQuery.reads

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._integers.shape

    def __call__(self, database: Database) -> jax.Array:
        """The value on a database, without noise."""
        return self._in_units(self._integers(database))

    def over(self, parts: Parts) -> Unsummed:
        """A single pass over parts of the records, which adds up the totals of the parts."""
        return self._integers.over(parts)

    def _in_units(self, value: Value) -> Value:
        if not self._is_rounded:
            return value
        return jax.tree.map(partial(in_units_of, self._integers.unit), value)

    def _whole(self, value: Value) -> Value:
        """Recovers the integers that a released value represents, up to the rounding of floats."""
        return jax.tree.map(lambda x: jnp.round(x / self._integers.unit).astype(jnp.int32), value)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        # The bound is valid for any number of records.
        return self._integers.in_units_of_records(norm, relation)

    @property
    def _is_rounded(self) -> bool:
        # The unit does not tell whether numbers are rounded: a rounded sum may also have unit 1.
        return self._integers.moves is not None

    def _inside(self, mechanism: Mechanism) -> Inside:
        if not self._is_rounded or mechanism.sensitivity.records is not None:
            # A sampled or proved bound is a bound for the floats. So noise is added to the floats,
            # and not to the integers.
            return Inside(self, mechanism)
        if isinstance(mechanism, CoordinatewiseMechanism):
            on_integers = self._on_integers(mechanism)
            return Inside(self._integers, on_integers, self._in_units, self._whole)
        if isinstance(mechanism, (SelectionMechanism, AboveThreshold)):
            return Inside(self._integers, self._on_integers(mechanism))
        raise TypeError(
            "mechanism must add noise to the sums, or make a selection with the sums as scores,"
            f" got {type(mechanism).__name__}"
        )

    def _on_integers(self, mechanism: Any) -> Any:
        """Returns the mechanism for the integers.

        Its noise is larger, because rounding to the grid may increase a sensitivity. "Sums on a
        grid" in docs/proofs/shorter.md has the proof.
        """
        inside, sensitivity = self._integers, mechanism.sensitivity
        norm, relation = sensitivity.norm, sensitivity.relation
        reach = Fraction(inside._bound(norm, relation, None, np.float32))
        known = Fraction(inside.in_units_of_records(norm, relation))
        larger = max(1.0, round_up(reach * Fraction(inside.unit) / known))
        return mechanism._in_units_of(inside.unit, larger)

    def _accuracy_of(
        self, noise: Accuracy, relation: NeighboringRelation, value: Value, database: Database
    ) -> Accuracy:
        # The error of integers with noise does not depend on the number of records.
        inside, facts = self._integers, noise.facts
        if not self._is_rounded or noise.kind != "noise":
            return noise
        # Noise on integers is rounded to integers, with an error of at most half a unit.
        step = (0.5 + inside.rounding + inside.clipping) * inside.unit
        arrays = [
            {
                "scale": (np.asarray(one["scale"]) * inside.unit).tolist(),
                "step": step,
                "whole": False,
            }
            for one in facts["arrays"]
        ]
        return noise.having(arrays=arrays)

    def error(
        self,
        mechanism: CoordinatewiseMechanism,
        *,
        confidence: float = 0.95,
        simultaneous: bool = True,
    ) -> float:
        """A bound on the distance of a release from the true value.

        Args:
            mechanism: a mechanism with additive noise, such as `dpjax.laplace(query.sensitivity(),
                epsilon)`.
            confidence: the probability that the bound is correct, in (0, 1).
            simultaneous: whether it covers all coordinates at once, or each coordinate alone.

        Returns:
            A number in the units of the records. With probability at least `confidence`, every
            coordinate is within this distance of the exact value on the clamped records.

        Raises:
            TypeError: if the confidence is not a number.
            ValueError: if the confidence is out of range.
        """
        noise = self._on_integers(mechanism) if self._is_rounded else mechanism
        off = self._integers.error(noise, confidence=confidence, simultaneous=simultaneous)
        if not self._is_rounded:
            return off
        # The second term covers the rounding of the release to a float.
        half = float(jnp.finfo(jnp.result_type(float)).eps) / 2
        return off + half * (self._integers.largest + off)
