"""What queries compute inside: integers on a public grid, which add up exactly in any order."""

import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._numbers import as_arrays, in_64_bits
from dpjax._core._types import Database
from dpjax._core._values import NeighboringRelation
from dpjax.mechanisms._coordinatewise import CoordinatewiseMechanism
from dpjax.queries._padded_records import present_records
from dpjax.targets._bounds import VectorNorm
from dpjax.targets._known_sensitivity import KnownSensitivity

_RANGE: Any = "range"  # A norm beside those of vectors.

Reach = Callable[[VectorNorm, NeighboringRelation], float]
"""Takes a norm and a neighboring relation to how far one record moves a value, rounded up."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class IntegerQuery(KnownSensitivity):
    """A target whose value is integers, in units of a public grid.

    Attributes:
        total: takes records, and a boolean for each that says whether it is present, to the value,
            int32.
        shape: the shape of the value.
        reach: of the integers.
        unit: the number that the integer 1 stands for, a power of two.
        moves: how far the numbers would move if nothing were rounded to the grid; None where
            nothing is. Noise for this is made larger by what rounding adds.
        rounding: a bound on the rounding error of the value, in units.
        clipping: a bound on what clipping adds to it, where it moves records at the edge too far.
        largest: a bound on the numbers of all records together, for the rounding of a float.
        one_way: whether an added record lowers no number, as with counts.

    Formal guarantees:
        `reach` bounds ||f(D) - f(D')|| for all neighbors D and D', and for the computed value:
        integers are added, and their sum has the same bits in any order. The bound holds whatever a
        record contains.
    """

    total: Callable[[Database, jax.Array], jax.Array]
    shape: tuple[int, ...]
    reach: Reach
    unit: float = 1.0
    moves: Reach | None = None
    rounding: float = 0.0
    clipping: float = 0.0
    largest: float = 0.0
    one_way: bool = False

    norms = (*KnownSensitivity.norms, _RANGE)
    relations = tuple(NeighboringRelation)
    reads = "numbers"

    def __call__(self, database: Database) -> jax.Array:
        """The integers of a database."""
        # A jit cache may hold a stale closure of a predicate, so releases bypass it.
        of_present = self.of_present if _checks.is_staging() else compiled(self.of_present)
        return of_present(*present_records(database))

    def of_present(self, records: Database, present: jax.Array) -> jax.Array:
        """The integers of the records that are present in slots."""
        with in_64_bits(records):
            return self.total(as_arrays(records), present)

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        del n, dtype  # Values are integers, and the bound holds for any number of records.
        return self._in_norm(self.reach, norm, relation)

    def in_units_of_records(self, norm: VectorNorm, relation: NeighboringRelation) -> float:
        """How far one record moves the numbers that the integers stand for."""
        if self.moves is None:
            return self._in_norm(self.reach, norm, relation) * self.unit
        return self._in_norm(self.moves, norm, relation)

    def _in_norm(self, reach: Reach, norm: VectorNorm, relation: NeighboringRelation) -> float:
        if norm != _RANGE:
            return reach(norm, relation)
        # Of numbers that all go up by 0 to r the range is r; else one may go up, and another down.
        added = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        return reach("linf", relation) * (1 if added and self.one_way else 2)

    def estimate(self, value: jax.Array | np.ndarray) -> np.ndarray:
        """The numbers that integers stand for, float64; NaN where a traced parameter was bad."""
        value = np.asarray(value)
        return np.where(value == np.iinfo(value.dtype).min, np.nan, value * self.unit)

    def error(self, mechanism: CoordinatewiseMechanism, *, confidence: float = 0.95) -> float:
        """A bound on the distance of an `estimate` from the truth, in all coordinates at once."""
        confidence = _checks.fraction("confidence", confidence)
        value = jax.ShapeDtypeStruct(self.shape, jnp.int32)
        error = mechanism.error(confidence=confidence, like=value, simultaneous=True)
        return (float(error) + self.rounding + self.clipping) * self.unit


_P = ParamSpec("_P")
T = TypeVar("T")


def compiled(function: Callable[_P, T], *, static: str | None = None) -> Callable[_P, T]:
    """`jax.jit` with the types of the function, which `jax.jit` forgets."""
    return jax.jit(function, static_argnames=static)


@compiled
def in_units_of(unit: float, value: jax.Array) -> jax.Array:
    """A noisy total in the units of the records, as floats; a failure is NaN."""
    floats = value.astype(jnp.result_type(float)) * unit
    return jnp.where(value == jnp.iinfo(value.dtype).min, jnp.nan, floats)
