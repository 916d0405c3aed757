"""Base classes of targets with a known sensitivity, and exact arithmetic for bounds."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Database, Value
from dpjax._core._values import KnowsSensitivity, NeighboringRelation, Sensitivity, Target
from dpjax._exact._numerics import compute_dtype, round_up
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity
from dpjax.sensitivity._sums import Summable


def running_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Returns the dtype in which a target computes, float32 or float64, for records of `dtype`.

    If x64 is disabled, JAX converts float64 of NumPy to float32.
    """
    found = np.dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"dtype must be a dtype of floats, got {found}")
    return compute_dtype(jax.dtypes.canonicalize_dtype(found))


def unit(dtype: np.dtype) -> Fraction:
    """Returns eps, the distance from 1 to the next float, as an exact fraction."""
    return Fraction(float(np.finfo(dtype).eps))


VectorNorm = Literal["l1", "l2", "linf"]


def norm_up(magnitudes: Sequence[Fraction], norm: VectorNorm) -> float:
    """Returns the least float64 that is at least the norm of a vector of these magnitudes."""
    _checks.choice("norm", norm, get_args(VectorNorm))
    if norm == "l1":
        return round_up(sum(magnitudes, Fraction(0)))
    if norm == "l2":
        return sqrt_up(sum((x**2 for x in magnitudes), Fraction(0)))
    return round_up(max(magnitudes))


def sqrt_up(exact: Fraction) -> float:
    """Returns the least float64 that is at least the square root of an exact rational number."""
    # With this `shift`, the integer square root has more bits than a float64.
    shift = 128 + max(0, exact.denominator.bit_length() - exact.numerator.bit_length())
    scaled = exact * 4**shift
    root = math.isqrt(math.ceil(scaled))
    root += root**2 < scaled
    return round_up(Fraction(root, 2**shift))


# A function of n (None if not given) and the dtype of the computation. It returns bounds on the
# change of each coordinate of a value. If the target has a bound in only one norm, the function may
# return this bound as the only number.
Bound = Callable[[int | None, np.dtype], Sequence[Fraction]]


class KnownSensitivity(KnowsSensitivity):
    """A target with a method `sensitivity`, which returns a proven bound.

    Attributes:
        norms: the norms in which a bound is known. The first one is the default of `sensitivity`.
        relations: the neighboring relations under which a bound is known.

    Formal guarantees:
        `sensitivity` bounds ||f(D) - f(D')|| for all neighbors D and D', rounding included.
    """

    norms: tuple[VectorNorm, ...] = get_args(VectorNorm)
    relations: tuple[NeighboringRelation, ...] = (NeighboringRelation.REPLACE_ONE,)

    @abc.abstractmethod
    def __call__(self, database: Database) -> Value:
        """The value on a database."""

    def sensitivity(
        self,
        norm: VectorNorm | None = None,
        *,
        relation: NeighboringRelation | None = None,
        n: int | None = None,
        dtype: DTypeLike = "float32",
    ) -> Sensitivity:
        """The bound for a mechanism, as in `dpjax.laplace(target.sensitivity(), epsilon)`.

        Args:
            norm: one of `norms`; None for the first one.
            relation: which databases are neighbors: one of `relations`. None takes the relation of
                an open ledger, or replace-one if no ledger is open.
            n: the number of records. If it is given, a release refuses databases of another size.
                Averages need it. Under add-or-remove-one it is the number of slots.
            dtype: the float dtype of the records. A bound for float32 is also valid for float64.

        Returns:
            A `Sensitivity` in the units of the value, with gamma 0.

        Raises:
            TypeError: if the bound needs n and n is not an integer, or if the dtype is not a float
                dtype.
            ValueError: if no bound is known in this norm, under this relation or for this n, or if
                no record can change the value.
        """
        norm = self.norms[0] if norm is None else norm
        _checks.choice("norm", norm, self.norms)
        relation = relation_or_inherited(relation)
        if relation not in self.relations:
            known = " or ".join(map(str, self.relations))
            raise ValueError(
                f"relation must be {known}, got {relation}: no bound is known under {relation}"
            )
        n = None if n is None else _checks.integer("n", n, least=1)
        bound = self._bound(norm, relation, n, dtype)
        if bound == 0:
            raise ValueError(
                f"no record can change the value under {relation}: publish it without a mechanism"
            )
        made = assume_sensitivity(bound, norm=norm, n=n, relation=relation)
        return dataclasses.replace(
            made,
            method="known",
            known_by=type(self).__name__,
            inside=self._is_rounded,
            privacy_unit=self.privacy_unit,
            notes=self.notes,
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _WithBound(KnownSensitivity):
    bound: Bound
    norms: tuple[VectorNorm, ...] = get_args(VectorNorm)

    reads = "floats"

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        del relation  # The relation is replace-one, because `sensitivity` refuses other relations.
        return norm_up(self.bound(n, running_dtype(dtype)), norm)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundedTarget(_WithBound):
    """A function of a database, with a bound on its sensitivity under replace-one."""

    function: Target

    def __call__(self, database: Database) -> Value:
        return self.function(database)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundedSum(Summable, _WithBound):
    """A function of a sum over records, with a bound on its sensitivity under replace-one.

    If `largest` is given, statistics are floats in [-largest, largest] and their sum is exact.
    """


def dims_or_none(dims: int | None) -> int | None:
    """Checks the number of coordinates of a record, if it was given, and returns it."""
    return None if dims is None else _checks.integer("dims", dims, least=1)


def check_dims(dims: int | None, found: int) -> None:
    """Raises an error if records do not have the number of coordinates that a bound assumes."""
    if dims not in (None, found):
        raise ValueError(f"records must have dims={dims} coordinates, got {found}")


def known_dims(dims: int | None) -> int:
    """Returns the number of coordinates, which a bound needs.

    Raises an error if the number was not given to the target.
    """
    if dims is None:
        raise ValueError("dims must be given to the target, because its bound depends on it")
    return dims
