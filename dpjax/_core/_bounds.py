"""Bounds on records that proofs assume: their clamps, their checks, and the shapes of records."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._columns import Texts
from dpjax._core._records import PaddedRecords, shapes_of_columns
from dpjax._core._types import Database, PyTree, Value

# Beyond this magnitude, XLA might rewrite a program such that it overflows although the original
# does not.
LARGEST = 2.0**60


@dataclasses.dataclass(frozen=True)
class Interval:
    """A bound on records: every coordinate is in [low, high], or missing.

    Attributes:
        low: a public number that the dtype of the array can represent.
        high: a public number above `low`.
        missing: whether a coordinate may also be NaN. If so, NaN is passed to the target, which
            must handle missing numbers, for example by `jnp.nansum`. Otherwise NaN becomes `low`.

    Formal guarantees:
        A release with a proved sensitivity clamps each number to [low, high]. Neighboring databases
        may differ by a NaN in place of a number. A target whose value may be NaN is refused.
    """

    low: float
    high: float
    missing: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest number of a coordinate."""
        return self.low, self.high

    @property
    def empty(self) -> float:
        """The public number, within the bounds, that fills empty slots."""
        return min(max(0.0, self.low), self.high)

    def clamp(self, x: jax.Array) -> jax.Array:
        """Clamps numbers to [low, high]. Subnormal numbers become 0, and NaN becomes `low`.

        If numbers may be missing, every NaN becomes JAX's default NaN instead, so that the payload
        bits of the old NaN are lost.
        """
        if x.dtype == bool:
            return (x & bool(self.high)) | bool(self.low)
        low, high = (jnp.asarray(end, x.dtype) for end in (self.low, self.high))
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        least = low
        if floats and self.low >= 0:
            least = jnp.maximum(low, jnp.asarray(np.finfo(x.dtype).tiny, x.dtype))
        # If x is NaN, `x >= least` is false, so the result is `low`.
        inside = jnp.where(x >= least, x, low)
        inside = jnp.where(inside <= high, inside, high)
        if floats and self.low < 0:
            inside = jnp.where(_is_normal(inside), inside, jnp.zeros((), x.dtype))
        if not self.missing:
            return inside
        return jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), inside)


def _is_normal(x: jax.Array) -> jax.Array:
    """Whether a float is neither 0 nor subnormal: some bit of its exponent is set."""
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")
    exponent = np.array(np.inf, x.dtype).view(integers)
    return (lax.bitcast_convert_type(x, integers) & exponent) != 0


@dataclasses.dataclass(frozen=True)
class Ball:
    """A bound on records: in each array, the l2 norm of a record is at most a radius.

    Attributes:
        radius: a public number from 2^-40 to 2^40.

    Formal guarantees:
        A release with a proved sensitivity scales longer records down to the radius. The proof
        covers the rounding error of the scaling. NaN becomes 0.
    """

    radius: float
    empty = 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value that a coordinate can have."""
        return -self.radius, self.radius

    def clamp(self, x: jax.Array) -> jax.Array:
        """Scales each record whose norm exceeds the radius to the radius. NaN becomes 0."""
        x = jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x)
        x = Interval(-self.radius, self.radius).clamp(x)
        axes = tuple(range(1, x.ndim))
        radius = jnp.asarray(self.radius, x.dtype)
        length = jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True))
        return Interval(-self.radius, self.radius).clamp(x * (radius / jnp.maximum(length, radius)))


@dataclasses.dataclass(frozen=True)
class Categories:
    """A bound on records: every coordinate is one of a few numbers.

    Attributes:
        values: public numbers that the dtype of the records can represent.

    Formal guarantees:
        A release with a proved sensitivity replaces any other number, including NaN, by the first
        of these values.
    """

    values: tuple[float, ...]

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest of the values."""
        return min(self.values), max(self.values)

    @property
    def empty(self) -> float:
        """The number that fills empty slots: 0 if it is one of the values, else the first value."""
        return 0.0 if 0.0 in self.values else self.values[0]

    def clamp(self, x: jax.Array) -> jax.Array:
        values = [jnp.asarray(value, x.dtype) for value in self.values]
        out = jnp.broadcast_to(values[0], x.shape)
        for value in values[1:]:
            out = jnp.where(x == value, value, out)
        return out


Bound = Interval | Ball | Categories


@dataclasses.dataclass(frozen=True)
class RecordBounds:
    """Bounds on the records of a database, one for each of its arrays.

    It is hashable, so that it can be a static argument of `jit`.

    Formal guarantees:
        `clamp` maps any database of the right structure, even with NaN or infinities, to a database
        within the bounds. It maps each record separately.
    """

    leaves: tuple[Bound, ...]

    def clamp(self, database: Database) -> Database:
        """Returns the database with every record clamped to the bounds."""
        leaves, structure = jax.tree.flatten(database)
        clamped = [b.clamp(x) for b, x in zip(self.leaves, leaves, strict=True)]
        return jax.tree.unflatten(structure, clamped)

    def enforced_on(self, target: Callable[[Database], Value]) -> Callable[[Database], Value]:
        """Returns the target composed with `clamp`.

        The proof is about the composed function, and releases evaluate this function, too.
        """

        @functools.wraps(target, updated=())
        def clamped_target(database: Database) -> Value:
            return target(jax.jit(self.clamp)(database))

        return clamped_target


@dataclasses.dataclass(frozen=True)
class PaddedRecordBounds(RecordBounds):
    """Bounds on `PaddedRecords`. The last entry of `leaves` is the bound on `present`.

    Formal guarantees:
        `clamp` also fills every empty slot with the same public row, so the old contents of the
        slot have no effect.
    """

    @property
    def empty_row(self) -> tuple[float, ...]:
        """The number that fills an empty slot, for each array."""
        return tuple(b.empty for b in self.leaves)

    def clamp(self, database: Database) -> Database:
        """Returns the database within the bounds, with public numbers in its empty slots."""
        leaves, structure = jax.tree.flatten(super().clamp(database))
        present = leaves[-1]
        filled = [
            jnp.where(present.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.asarray(number, x.dtype))
            for x, number in zip(leaves, self.empty_row, strict=True)
        ]
        return jax.tree.unflatten(structure, filled)


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
    if held != 0 and not float(np.finfo(dtype).tiny) <= abs(held) <= LARGEST:
        raise ValueError(
            f"bounds must be 0 or normal (not subnormal) numbers of {dtype} up to 2^60, got "
            f"{number:g}"
        )
    return held
