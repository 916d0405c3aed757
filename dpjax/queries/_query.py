"""Queries: targets with integer values and a known sensitivity."""

import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, KnowsAccuracy
from dpjax._core._numbers import as_arrays, in_64_bits
from dpjax._core._types import Database, Value
from dpjax._core._values import NeighboringRelation
from dpjax.mechanisms._coordinatewise import CoordinatewiseMechanism
from dpjax.queries._padded_records import present_records
from dpjax.targets._bounds import VectorNorm
from dpjax.targets._known_sensitivity import KnownSensitivity

_RANGE: Any = "range"  # A norm beside those of vectors.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Query(KnownSensitivity, KnowsAccuracy):
    """A target with a known sensitivity, whose value is integers in units of a public grid.

    `query(database)` takes a pytree of arrays with leading axis n, or a `PaddedRecords`, and
    `dpjax.privatize(query, mechanism)` releases it.

    Attributes:
        total: takes records, and a boolean for each that says whether it is present, to the value,
            int32.
        shape: the shape of the value.
        reach: takes a norm and a neighboring relation to how far one record moves the value,
            rounded up.
        unit: the number that the integer 1 stands for.
        rounding: a bound on the rounding error of the value, in units.
        clipping: a bound on what clipping adds to it, where it moves records at the edge too far.
        one_way: whether an added record lowers no number, as with counts.

    Formal guarantees:
        `reach` bounds ||f(D) - f(D')|| for all neighbors D and D', and for the computed value:
        integers are added, and their sum has the same bits in any order. The bound holds whatever a
        record contains.
    """

    total: Callable[[Database, jax.Array], jax.Array]
    shape: tuple[int, ...]
    reach: Callable[[VectorNorm, NeighboringRelation], float]
    unit: float = 1.0
    rounding: float = 0.0
    clipping: float = 0.0
    one_way: bool = False

    norms = (*KnownSensitivity.norms, _RANGE)
    relations = tuple(NeighboringRelation)
    reads = "numbers"

    def __call__(self, database: Database) -> jax.Array:
        """The value on a database."""
        # A jit cache may hold a stale closure of a predicate, so releases bypass it.
        of_present = self.of_present if _checks.is_staging() else compiled(self.of_present)
        return of_present(*present_records(database))

    def of_present(self, records: Database, present: jax.Array) -> jax.Array:
        """The value on the records that are present in slots."""
        with in_64_bits(records):
            return self.total(as_arrays(records), present)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        del n, dtype  # Values are integers, and the bound holds for any number of records.
        if norm != _RANGE:
            return self.reach(norm, relation)
        # Of numbers that all go up by 0 to r the range is r; else one may go up, and another down.
        added = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        return self.reach("linf", relation) * (1 if added and self.one_way else 2)

    def _accuracy_of(
        self, noise: Accuracy, relation: NeighboringRelation, value: Value, database: Database
    ) -> Accuracy:
        del relation, value, database  # Integers and their noise do not depend on n.
        return noise.having(unit=self.unit, rounding=self.rounding + self.clipping)

    def estimate(self, value: jax.Array | np.ndarray) -> np.ndarray:
        """The value of a release in the units of the records, computed exactly on the host.

        Args:
            value: integers, as they were released; not traced, because JAX's floats may round them.

        Returns:
            float64, of the same shape; NaN where a traced parameter was bad.

        Raises:
            TypeError: if the value is traced.
        """
        _checks.host_only("estimate", value, "the value times query.unit, in floats that round it")
        value = np.asarray(value)
        return np.where(value == np.iinfo(value.dtype).min, np.nan, value * self.unit)

    def error(self, mechanism: CoordinatewiseMechanism, *, confidence: float = 0.95) -> float:
        """A bound on the distance of an `estimate` from the truth, in all coordinates at once.

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
        confidence = _checks.fraction("confidence", confidence)
        value = jax.ShapeDtypeStruct(self.shape, jnp.int32)
        error = mechanism.error(confidence=confidence, like=value, simultaneous=True)
        return (float(error) + self.rounding + self.clipping) * self.unit


_P = ParamSpec("_P")
T = TypeVar("T")


def compiled(function: Callable[_P, T], *, static: str | None = None) -> Callable[_P, T]:
    """`jax.jit` with the types of the function, which `jax.jit` forgets."""
    return jax.jit(function, static_argnames=static)


def rounded_estimate(query: Query, value: jax.Array) -> jax.Array:
    """Like `Query.estimate`, but jit-able: in JAX's default float, which may round it."""
    return in_units_of(query.unit, value)


@compiled
def in_units_of(unit: float, value: jax.Array) -> jax.Array:
    """A noisy total in the units of the records, as floats; a failure is NaN."""
    floats = value.astype(jnp.result_type(float)) * unit
    return jnp.where(value == jnp.iinfo(value.dtype).min, jnp.nan, floats)
