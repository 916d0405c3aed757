"""What a query is: a target that knows how far one record moves it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._values import NeighboringRelation
from dpjax.mechanisms._coordinatewise import CoordinatewiseMechanism
from dpjax.queries._padded_records import present_records
from dpjax.targets._bounds import VectorNorm
from dpjax.targets._known_sensitivity import KnownSensitivity


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Query(KnownSensitivity):
    """A target whose value is integers, in units of a public grid, and whose sensitivity is known.

    `query(database)` takes a pytree of arrays with leading axis n, or a `PaddedRecords`, and
    `dpjax.privatize(query, mechanism)` releases it.

    Attributes:
        total: takes records, and booleans that say which of them are there, to the value: int32.
        shape: of the value.
        reach: how far one record moves the value, by norm and neighboring relation, rounded up.
        unit: what an integer of the value stands for.
        rounding: how far rounding takes the value from the truth at most, in units.

    Formal guarantees:
        `reach` bounds ||f(D) - f(D')|| for all neighbors D and D', for what is computed: integers
        are added, in any order to the same bits. Whatever a record holds is within the bound.
    """

    total: Callable[[Any, jax.Array], jax.Array]
    shape: tuple[int, ...]
    reach: Callable[[VectorNorm, NeighboringRelation], float]
    unit: float = 1.0
    rounding: float = 0.0

    relations = tuple(NeighboringRelation)

    def __call__(self, database: Any) -> jax.Array:
        """The value on a database."""
        # JAX keeps what it has traced, whatever a predicate closes over by now: not in a release.
        total = self.total if _checks.is_staging() else jax.jit(self.total)
        return total(*present_records(database))

    def _bound(
        self,
        norm: VectorNorm,
        relation: NeighboringRelation,
        n: int | None,
        dtype: jax.typing.DTypeLike,
    ) -> float:
        del n, dtype  # Integers, of any number of records.
        return self.reach(norm, relation)

    def estimate(self, value: Any) -> np.ndarray:
        """The value of a release in the units of the records: exactly, on the host.

        Args:
            value: integers, as they were released; not traced, for JAX's floats may round them.

        Returns:
            float64, of the same shape; NaN where a traced parameter was bad.

        Raises:
            TypeError: if the value is traced.
        """
        _checks.host_only("estimate", value, "the value times query.unit, in floats that round it")
        value = np.asarray(value)
        return np.where(value == np.iinfo(value.dtype).min, np.nan, value * self.unit)

    def error(self, mechanism: CoordinatewiseMechanism, *, beta: float) -> float:
        """How far an `estimate` may lie from the truth, in all coordinates at once.

        Args:
            mechanism: with additive noise, as `dpjax.laplace(query.sensitivity(), epsilon)`.
            beta: in (0, 1).

        Returns:
            A number in the units of the records, which no coordinate exceeds with probability at
            least 1 - beta. The truth is the real value on the records as they are clamped.

        Raises:
            TypeError: if beta is not a number.
            ValueError: if beta is out of range.
        """
        beta = _checks.fraction("beta", beta)
        value = jax.ShapeDtypeStruct(self.shape, jnp.int32)
        error = mechanism.error(confidence=1 - beta, like=value, simultaneous=True)
        return (float(error) + self.rounding) * self.unit


def rounded_estimate(query: Query, value: jax.Array) -> jax.Array:
    """As `Query.estimate`, jit-able, in JAX's default float, which may round it."""
    floats = value.astype(jnp.result_type(float)) * query.unit
    return jnp.where(value == jnp.iinfo(value.dtype).min, jnp.nan, floats)
