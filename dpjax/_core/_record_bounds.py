"""Checks and conversions of bounds on records, and of the shapes of records."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import Texts
from dpjax._core._proof import (
    Ball,
    Bound,
    Categories,
    Interval,
    PaddedRecordBounds,
    RecordBounds,
    is_tiny,
)
from dpjax._core._records import PaddedRecords, shapes_of_columns
from dpjax._core._types import Database, PyTree

# Beyond this magnitude, XLA might rewrite a program such that it overflows although the original
# does not.
LARGEST = 2.0**60


def record_specs(records: Database, n: int | None) -> Database:
    """Returns the shapes and dtypes of records; `n` replaces the length of their leading axis."""
    specs = _checks.real_shapes("records", shapes_of_columns("records", records))
    if isinstance(specs.records if isinstance(specs, PaddedRecords) else specs, Texts):
        raise TypeError(
            "records must be numbers, got texts. Replace each text by its index in a public list, "
            "for example with pandas.Index(public).get_indexer(column)"
        )
    leaves = jax.tree.leaves(specs)
    sizes = {x.shape[:1] for x in leaves}
    if () in sizes or (len(sizes) != 1 and (n is None or not leaves)):
        raise ValueError(
            f"records must be arrays with a common leading axis, got {_checks.described(specs)}"
        )
    if n is None:
        return specs
    n = _checks.integer("n", n, least=1)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), specs)


def record_bounds(bounds: PyTree, specs: Database) -> RecordBounds:
    """Returns one bound for each array, as numbers that the array's dtype can represent."""
    leaves, structure = jax.tree.flatten(specs)
    if _is_bound(bounds):
        found: Sequence[object] = [bounds] * len(leaves)
    else:
        found, given = jax.tree.flatten(bounds, is_leaf=_is_bound)
        if given != structure:
            raise ValueError(
                "bounds must be (low, high), or a tree like the records, with one bound for each "
                f"array of {_checks.described(specs)}, got {_checks.shown(bounds)}"
            )
    pairs = zip(found, leaves, strict=True)
    return RecordBounds(tuple(_bound(b, np.dtype(x.dtype)) for b, x in pairs))


def padded_record_bounds(bounds: PyTree, specs: Database) -> PaddedRecordBounds:
    """Returns bounds on padded records. Whether a slot contains a record is private."""
    if not isinstance(specs, PaddedRecords):
        raise TypeError(
            "under add-or-remove-one, records must be dpjax.queries.PaddedRecords(records, present)"
            f" of arrays or shapes, got {_checks.described(specs)}"
        )
    present: Any = specs.present
    if present.dtype != bool or len(present.shape) != 1:
        raise ValueError(
            f"present must be one boolean for each slot, got {_checks.described(present)}"
        )
    return PaddedRecordBounds((*record_bounds(bounds, specs.records).leaves, Interval(0.0, 1.0)))


def _is_bound(value: Any) -> bool:
    if isinstance(value, (Ball, Interval, Categories)):
        return True
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(np.ndim(x) == 0 and not isinstance(x, (tuple, list, dict)) for x in value)


def _bound(bound: Any, dtype: np.dtype) -> Bound:
    if isinstance(bound, Ball):
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"bounds may be a Ball only for float records, got {dtype}")
        radius = _checks.positive("radius", bound.radius)
        if not 2.0**-40 <= radius <= 2.0**40:
            raise ValueError(
                f"radius of a Ball must be in [2^-40, 2^40], got {radius:g}. Rescale the records"
            )
        return Ball(_number(radius, dtype))
    if isinstance(bound, Categories):
        values = tuple(dict.fromkeys(_number(x, dtype) for x in bound.values))
        if not values:
            raise ValueError("bounds must be Categories of at least one number, got none")
        return Categories(values)
    missing = isinstance(bound, Interval) and bound.missing
    if missing and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            "bounds with missing=True need a float dtype, because missing numbers are NaN, got "
            f"{dtype}. Convert the records to floats"
        )
    if isinstance(bound, Interval):
        bound = bound.low, bound.high
    if not _is_bound(bound):
        raise TypeError(f"bounds must be (low, high), a Ball or Categories, got {bound!r}")
    low, high = (_number(x, dtype) for x in bound)
    if not low < high:
        raise ValueError(f"bounds must have low below high, got {low:g} and {high:g}")
    return Interval(low, high, missing=missing)


def _number(value: Any, dtype: np.dtype) -> float:
    """Returns a public number, rounded to the dtype."""
    if isinstance(value, (bool, np.bool_)) and dtype.kind == "b":
        return float(value)
    number = _checks.finite("bounds", float(value))
    if dtype.kind != "f":
        limits = (0, 1) if dtype.kind == "b" else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        if not number.is_integer() or not limits[0] <= number <= limits[1] or abs(number) > 2**52:
            raise ValueError(
                f"bounds of {dtype} records must be integers in the range of {dtype}, got "
                f"{number:g}. Use float records for other numbers"
            )
        return number
    held = float(np.asarray(number, dtype))
    if not math.isfinite(held) or is_tiny(held, dtype) or abs(held) > LARGEST:
        raise ValueError(
            f"bounds must be 0 or normal (not subnormal) numbers of {dtype} up to 2^60, got "
            f"{number:g}"
        )
    return held
