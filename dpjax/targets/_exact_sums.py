"""Exact sums of clamped records, whose sensitivity is that of the real sum.

A sum of floats depends on the order of its terms: that of 10^7 float32 in [0, 1] moves by 1.0
under permutation, so its sensitivity is not that of the real sum. Here every record becomes an
integer, in units of a grid, and integers are added: in any order the sum has the same bits.
"""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._values import NeighboringRelation
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_to_grid
from dpjax._exact._limbs import Limbs

__all__ = [
    "ExactSum",
    "exact_sum",
    "sum_sensitivity",
]

_LARGEST_TOTAL = 2**62
_LARGEST_EXPONENT = 126


@frozen_pytree
class ExactSum:
    """A sum in units of a grid.

    Attributes:
        units: the sum as 64-bit integers of two uint32 limbs, `units.high` and `units.low`.
        exponent: of the grid, which is 2^exponent.

    Formal guarantees:
        Those of `exact_sum`.
    """

    units: Limbs
    exponent: int = static()

    def to_float(self, dtype: Any = None) -> jax.Array:
        """The sum as floats: exact where it fits the significand, else one of its two neighbors.

        Rounding is post-processing only after noise: add integer noise to `units` first.

        Args:
            dtype: a float dtype; JAX's default float if None.

        Returns:
            An array of the shape of a record.
        """
        dtype = jnp.result_type(float) if dtype is None else dtype
        return _limbs.to_float(self.units, dtype) * power_of_two(self.exponent, dtype)


def exact_sum(records: Any, *, lower: float, upper: float, grid: float) -> ExactSum:
    """The exact sum of records, each clamped to public bounds and rounded to a public grid.

    A record x counts as floor(x / grid + 1/2) units, clamped to those of `lower` and `upper`;
    NaN counts as 0 does. Jit-able and vmap-able, with and without x64.

    Args:
        records: an array whose leading axis is the n records: floats, integers or booleans. What
            is not a JAX array is converted to JAX's dtypes first, saturating: float64 to float32
            without x64. uint64 saturates at 2^63 - 1.
        lower: a finite number, public.
        upper: a finite number, public, not below `lower`.
        grid: a power of two from 2^-126 to 2^126, public.

    Returns:
        An `ExactSum` over the leading axis.

    Raises:
        TypeError: if the records are not real numbers or a bound is not a number.
        ValueError: if the records are not one array of at least one, the bounds are out of order,
            the grid is not a power of two, or n times the larger bound might reach 2^62 units. It
            depends on shapes and bounds alone, never on what the records are.

    Formal guarantees:
        The result is the sum of integers, exactly; it does not depend on the order of the records,
        on the backend or on x64. Between neighbors it differs, in every coordinate, by at most
        `sum_sensitivity(lower=lower, upper=upper, grid=grid)` units.

    Source:
        Mironov, "On significance of the least significant bits for differential privacy" (2012),
        for the grid; Casacuberta, Shoemate, Vadhan and Wagaman, "Widespread underestimation of
        sensitivity in differentially private libraries and how to fix it" (2022), for sums.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> ages = jnp.array([31.0, 62.5, jnp.nan, 1e9])
        >>> total = dpjax.exact_sum(ages, lower=0, upper=100, grid=0.25)
        >>> float(total.to_float())
        193.5
    """
    exponent = _exponent(grid)
    low, high = _units(lower, upper, grid)
    records = _checks.real_arrays("records", records)
    if not isinstance(records, jax.Array) or records.ndim == 0:
        raise ValueError("records must be one array with a leading axis of records")
    n, largest = len(records), max(abs(low), abs(high))
    if max(n, 2) * largest >= _LARGEST_TOTAL:
        raise ValueError(
            "n * max(|lower|, |upper|) / grid must be below 2^62, got"
            f" {n} * {largest} = 2^{math.log2(n * largest):.1f}: take a coarser grid"
        )
    limits = _limbs.constant(low), _limbs.constant(high)
    return ExactSum(_sum_of_units(records, jnp.int32(exponent), *limits), exponent)


def sum_sensitivity(
    *,
    lower: float,
    upper: float,
    grid: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
) -> int:
    """How far the `exact_sum` of neighbors may differ in one coordinate, in units of the grid.

    Args:
        lower: as for `exact_sum`.
        upper: as for `exact_sum`.
        grid: as for `exact_sum`.
        relation: which databases are neighbors.

    Returns:
        A whole number of units. By replace-one, upper less lower, both rounded to the grid; by
        add-or-remove-one, the larger of their magnitudes.

    Raises:
        TypeError: if a bound is not a number.
        ValueError: if the bounds are out of order or the grid is not a power of two.

    Formal guarantees:
        An attained bound: it is the largest difference over all pairs of neighbors. For d
        coordinates the L1 distance is at most d times, the L2 distance sqrt(d) times as large.

    Source:
        Dwork, McSherry, Nissim and Smith, "Calibrating noise to sensitivity in private data
        analysis" (2006), for sums; here all roundings are part of the function.

    Example:
        >>> import dpjax
        >>> dpjax.sum_sensitivity(lower=0, upper=100, grid=0.25)
        400
    """
    low, high = _units(lower, upper, grid)
    if NeighboringRelation(relation) is NeighboringRelation.REPLACE_ONE:
        return high - low
    return max(abs(low), abs(high))


def _exponent(grid: float) -> int:
    step = _number("grid", grid)
    exponent = step.numerator.bit_length() - step.denominator.bit_length()
    if step != Fraction(2) ** exponent or abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(
            f"grid must be a power of two from 2^-126 to 2^126, got {_checks.shown(grid)}"
        )
    return exponent


def _units(lower: float, upper: float, grid: float) -> tuple[int, int]:
    """The bounds in units of the grid, rounded as records are: rounding and clamping commute."""
    step = Fraction(2) ** _exponent(grid)
    low, high = _number("lower", lower), _number("upper", upper)
    if low > high:
        raise ValueError(f"lower must not be above upper, got {lower!r} and {upper!r}")
    return math.floor(low / step + Fraction(1, 2)), math.floor(high / step + Fraction(1, 2))


def _number(name: str, value: Any) -> Fraction:
    """A concrete finite number, exactly."""
    if _checks.is_traced(value):
        raise TypeError(f"{name} must be known before tracing, got {value}")
    if isinstance(value, (bool, np.bool_, str)) or value is None or np.ndim(value) != 0:
        raise TypeError(f"{name} must be a finite number, got {_checks.shown(value)}")
    number = int(value) if isinstance(value, (int, np.integer)) else float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {_checks.shown(value)}")
    return Fraction(number)


@jax.jit
def _sum_of_units(x: jax.Array, exponent: jax.Array, low: Limbs, high: Limbs) -> Limbs:
    units = round_to_grid(x, exponent)
    units = _limbs.where(_limbs.less(units, low), low, units)
    return _limbs.total(_limbs.where(_limbs.less(high, units), high, units))


def __dir__() -> list[str]:
    return __all__
