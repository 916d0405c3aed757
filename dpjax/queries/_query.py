"""Queries: targets with a known sensitivity, whose integers stay inside."""

import dataclasses
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core._accuracy import Accuracy, KnowsAccuracy
from dpjax._core._types import Database, Value
from dpjax._core._values import Inside, Mechanism, NeighboringRelation
from dpjax._exact._numerics import round_up
from dpjax.mechanisms._above_threshold import AboveThreshold
from dpjax.mechanisms._coordinatewise import CoordinatewiseMechanism
from dpjax.mechanisms._selection import SelectionMechanism
from dpjax.queries._integer_query import IntegerQuery, in_units_of
from dpjax.targets._bounds import VectorNorm
from dpjax.targets._known_sensitivity import KnownSensitivity


@dataclasses.dataclass(frozen=True, eq=False)
class Query(KnownSensitivity, KnowsAccuracy):
    """A target with a known sensitivity, in the units of the records.

    `query(database)` takes a pytree of arrays with leading axis n, or a `PaddedRecords`, and
    `dpjax.privatize(query, mechanism)` releases it. Counts are integers. Sums are floats: inside,
    they are integers on a public grid, and noise is drawn for these.

    Formal guarantees:
        `sensitivity` bounds how far a record moves the numbers, whatever it contains. A release by
        `dpjax.privatize` adds integer noise to exact integers, so the guarantee holds for what is
        computed. What rounding to the grid adds, the noise covers.
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

    def _in_units(self, value: Value) -> Value:
        if not self._is_rounded:
            return value
        return jax.tree.map(partial(in_units_of, self._integers.unit), value)

    def _whole(self, value: Value) -> Value:
        """The integers of a released value, up to the rounding of floats."""
        return jax.tree.map(lambda x: jnp.round(x / self._integers.unit).astype(jnp.int32), value)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        del n, dtype  # The bound holds for any number of records.
        return self._integers.in_units_of_records(norm, relation)

    @property
    def _is_rounded(self) -> bool:
        # The unit of a sum may be 1.
        return self._integers.moves is not None

    def _inside(self, mechanism: Mechanism) -> Inside:
        if not self._is_rounded or mechanism.sensitivity.records is not None:
            return Inside(self, mechanism)  # What was sampled or proved is of the floats.
        if isinstance(mechanism, CoordinatewiseMechanism):
            on_integers = self._on_integers(mechanism)
            return Inside(self._integers, on_integers, self._in_units, self._whole)
        if isinstance(mechanism, (SelectionMechanism, AboveThreshold)):
            return Inside(self._integers, self._on_integers(mechanism))
        raise TypeError(
            f"mechanism must add noise to sums, or select by them, got {type(mechanism).__name__}"
        )

    def _on_integers(self, mechanism: Any) -> Any:
        """The mechanism for integers: its noise grows by what rounding adds to a sensitivity.

        "Sums on a grid" in docs/proofs/shorter.md has the proof.
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
        del relation, value, database  # Integers and their noise do not depend on n.
        inside, facts = self._integers, noise.facts
        if not self._is_rounded or noise.kind != "noise":
            return noise
        # Noise on integers is rounded to them: by half a unit.
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

    def error(self, mechanism: CoordinatewiseMechanism, *, confidence: float = 0.95) -> float:
        """A bound on the distance of a release from the truth, in all coordinates at once.

        Args:
            mechanism: with additive noise, as `dpjax.laplace(query.sensitivity(), epsilon)`.
            confidence: the probability that the bound holds, in (0, 1).

        Returns:
            A number in the units of the records. With probability at least `confidence`, no
            coordinate is further from the truth: the real value on the clamped records.

        Raises:
            TypeError: if the confidence is not a number.
            ValueError: if the confidence is out of range.
        """
        if not self._is_rounded:
            return self._integers.error(mechanism, confidence=confidence)
        off = self._integers.error(self._on_integers(mechanism), confidence=confidence)
        # A release is a float.
        half = float(jnp.finfo(jnp.result_type(float)).eps) / 2
        return off + half * (self._integers.largest + off)
