"""Sums over records as sums of integers, in a program that a release runs.

The rounding error of a float sum grows with the number of its terms, because a compiler may choose
any order. The proof knows a range for each term. So each term is rounded to a grid whose step is
the range times a power of two. Sums of integers are exact in any order, and the total is rounded
once.

The sums are over all records, over the records with one index (`jax.ops.segment_sum`), cumulative,
or over windows. If one record changes, all later cumulative sums change, and so do the sums of all
windows that contain the record. Each of them changes by as much as the integer of the record.
"""

import ast
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._exact._grid import bits_of_a_digit, nearest_integers
from dpjax.proving import _rounding as rounding
from dpjax.proving._places import check_scatter, moved_rows
from dpjax.proving._reductions import (
    Sums,
    SumsOf,
    check_surrounded,
    cumulative_sum,
    sum_over,
)
from dpjax.proving._value import Abstract, Difference, Moves, Pending, RefusalError, erring, make
from dpjax.proving._windows import pooled_sum

# The terms of an exact sum are in [-2^e, 2^e], where e is one of these exponents. The exponents are
# near 0, so floats represent every power of two that this file computes.
EXPONENTS = range(-60, 61)
FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
FLOAT64 = np.dtype(np.float64)
# If terms are at most 2^exponent, the step of the grid is at least 2^(exponent - _MOST_BITS).
_MOST_BITS = 52
# A sum is split into at most this many parts. Different threads may add up different parts.
_PARTS = 32
# An exact matrix product stores its terms in memory: at most this many for each record.
_MOST_PRODUCTS = 2**10
# An exact sum does not replace a sum of floats whose rounding error is below this fraction of the
# largest term.
_WORTH_IT = 2.0**-7
# All columns share one grid, so small numbers have fewer bits on the grid than large numbers. For
# terms of 4 or 8 bytes, the numbers of every column need at least this many bits. Otherwise the sum
# stays a sum of floats.
_LEAST_BITS = {4: 26, 8: 38}
# Columns whose ranges differ by at most this factor have an exact sum, even if one of them has
# fewer bits than `_LEAST_BITS`.
_ALIKE = 16.0
# The relative error of a few operations in float64. It is tiny compared with the rounding of
# float32.
OF_FLOAT64 = 16 * 2.0**-53


class Named:
    """A program whose name encodes its fields, so that the fields can be read from a jaxpr.

    Attributes:
        value: computes the abstract value of the result from those of the operands.
        compute: computes the result. It is called with x64 enabled.
    """

    value: Callable[..., Abstract]
    compute: Callable[..., jax.Array]

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        def exact(*arrays: jax.Array) -> jax.Array:
            return self.compute(*arrays)

        exact.__name__ = self.name
        with jax.enable_x64(True):
            return jax.jit(exact)(*arrays)

    @property
    def name(self) -> str:
        """A name that encodes all fields."""
        fields = tuple(getattr(self, x.name) for x in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}_{repr(fields).encode().hex()}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Returns the program that a name encodes; None if the name encodes none."""
        fields = name.removeprefix(f"{cls.__name__}_")
        try:
            found = cls(*ast.literal_eval(bytes.fromhex(fields).decode()))
        except (ValueError, TypeError, SyntaxError):
            return None
        return found if found.name == name else None


@dataclasses.dataclass(frozen=True)
class ExactSums(Named):
    """Sums of terms within [-2^exponent, 2^exponent], divided by a number above 0.

    Each term is rounded to an integer number of steps of a grid. The steps are so long that sums of
    these integers fit into 64 bits. The quotient is computed in float64, with an error of a few
    units in the last place, and rounded to the dtype of the terms. Subclasses say which terms are
    added.
    """

    exponent: int
    divisor: float = 1.0
    title: ClassVar = "exact sum"

    @property
    def summed(self) -> Sequence[int]:
        """The axes along which terms are added."""
        raise NotImplementedError

    def count(self, shape: Sequence[int]) -> int:
        """Returns the largest number of terms in a sum."""
        return math.prod(shape[k] for k in self.summed)

    def added(self, integers: jax.Array) -> jax.Array:
        """Returns the sums of integers."""
        raise NotImplementedError

    def of_floats(self, x: Abstract, sums_of: "SumsOf") -> Abstract:
        """Returns the value by the rule of float sums, but with rounding errors from `sums_of`."""
        raise NotImplementedError

    def compute(self, terms: jax.Array) -> jax.Array:
        count = self.count(terms.shape)
        sums = self.added(steps_of(terms, self.exponent, count))
        total = total_of_steps(sums, self.exponent, count)
        return lax.convert_element_type(total / self.divisor, terms.dtype)

    def value(self, x: Abstract) -> Abstract:
        """Returns the abstract value of exact sums.

        An exact sum adds up terms that are rounded to a grid, and then rounds the total to the
        nearest float. Rounding to the grid changes a term by at most half a step. So if a term
        changes by d, the rounded term changes by at most d + step; if the term does not change,
        neither does the rounded one.
        """
        count = self.count(x.shape)
        if x.nan or x.pending.coarse or not self.divisor > 0:
            raise RefusalError("the terms of an exact sum must be finite numbers within its range")

        def sums_of(terms: Abstract, count: int, sizes: np.ndarray) -> Sums:
            host, scale = (count + 100) * 2.0**-52, 1 / self.divisor
            largest = np.maximum(sizes * (1 + host), 2.0**-500)
            final = OF_FLOAT64 * count * 2.0**self.exponent * scale + 4 * rounding.tiny(x.dtype)
            if x.dtype == np.float32:
                final = final + nearest(largest, rounding.unit(x.dtype))
            return Sums(False, 0.0, rounding.up(final), sizes, host, terms.pending)

        # `x` is checked here, before its entries are rounded to the grid. `of_floats` repeats the
        # check after the rounding, but then the ranges are too wide to show that a term is 0.
        if not isinstance(self, ExactSum):
            check_surrounded(x, self.summed, 0.0)
        off = most_off(x, count, self.exponent)
        found = self.of_floats(_on_the_grid(x, off, self.divisor), sums_of)
        return dataclasses.replace(found, off=None)


@dataclasses.dataclass(frozen=True)
class ExactSum(ExactSums):
    """A sum over axes."""

    axes: tuple[int, ...] = (0,)

    @property
    def summed(self) -> Sequence[int]:
        return self.axes

    def added(self, integers: jax.Array) -> jax.Array:
        (found,) = sums_over([integers], self.axes)
        return found

    def of_floats(self, x: Abstract, sums_of: SumsOf) -> Abstract:
        return sum_over(x, self.axes, sums_of)


def sums_over(arrays: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    """Returns the sums of several arrays of integers over axes, in one vectorized loop.

    XLA:CPU sums a single array in several passes over memory, but several arrays in one loop. So
    each array is split into two halves, and one loop sums both halves. An array of odd length
    cannot be halved, so the loop sums it twice, and one of the two equal sums is dropped.

    XLA:CPU divides the entries of a result among threads. So the sum of each half is computed in up
    to `_PARTS` / 2 parts, and the sums of these parts are added at the end.
    """
    axis = min(axes)
    parts = math.gcd(arrays[0].shape[axis], _PARTS)

    def sides(x: jax.Array) -> Sequence[jax.Array]:
        if parts == 1:
            return x, x
        x = x.reshape(*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
        return lax.split(x, [parts // 2] * 2, axis)

    halves = [half for x in arrays for half in sides(x)]
    zeros = tuple(np.zeros((), x.dtype) for x in halves)
    add = lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True))  # noqa: E731
    found = lax.reduce(tuple(halves), zeros, add, [k + (parts > 1) for k in axes])
    pairs = zip(found[::2], found[1::2], strict=True)
    if parts == 1:
        return [lax.max(a, b) for a, b in pairs]
    return [lax.reduce(a + b, np.zeros((), a.dtype), lax.add, (axis,)) for a, b in pairs]


def step_of(exponent: int, count: int) -> float:
    """Returns the step of the grid of a sum of up to `count` terms in [-2^exponent, 2^exponent]."""
    return 2.0 ** (exponent - bits_of_a_digit(count, FLOAT64))


def steps_of(terms: jax.Array, exponent: int, count: int) -> jax.Array:
    """Rounds terms to the grid, and returns them as integer multiples of the step.

    The sum of up to `count` of these integers does not overflow.
    """
    inverse = 1 / step_of(exponent, count)
    return nearest_integers(lax.convert_element_type(terms, FLOAT64) * inverse)


def total_of_steps(sums: jax.Array, exponent: int, count: int) -> jax.Array:
    """Returns sums of steps in float64, with an error of half a unit in the last place."""
    return lax.convert_element_type(sums, FLOAT64) * step_of(exponent, count)


def worth_it(count: int, dtype: np.dtype) -> bool:
    """Whether the error of a float sum of `count` terms may exceed a small fraction of a term."""
    return dtype in FLOATS and count * rounding.sum_units(count, dtype) >= _WORTH_IT


def _on_the_grid(x: Abstract, off: float, divisor: float) -> Abstract:
    """Returns the abstract value of terms that are rounded to the grid and then divided.

    A term that is always 0 is on the grid, so it is not rounded.
    """
    scale, off_grid = 1 / divisor, np.where(x.magnitude > 0, off, 0.0)
    low, high = rounding.widened(x.low - off_grid, x.high + off_grid, np.zeros(()))

    def moved(d: Difference) -> Moves:
        moves = erring((d.each, d.l1, d.l2), off, x.shape, x.axis, d.count)
        each, l1, l2 = (rounding.up(y * scale) for y in moves)
        return each, float(l1), float(l2)

    return make(
        x.shape, x.dtype, low * scale, high * scale, x.axis, moved(x.changed), moved(x.others),
        pending=Pending().having(**Pending.flags([x.pending])),
        apart=float(rounding.up((x.apart + 2 * off) * scale)) if x.apart else 0.0,
        counts=(x.changed.count, x.others.count),
    )  # fmt: skip


def most_off(x: Abstract, count: int, exponent: int) -> float:
    """Returns the largest distance of a term from its rounded value, in a sum of `count` terms.

    Raises:
        RefusalError: if a term may be outside of the range.
    """
    if not float(x.magnitude.max()) <= 2.0**exponent:
        raise RefusalError("the terms of an exact sum must be finite numbers within its range")
    # Terms are divided by the step, a power of 2. A compiler may combine this division with a
    # multiplication by public factors.
    if x.pending.bits + abs(exponent) + _MOST_BITS > rounding.most_bits(x.dtype):
        raise RefusalError(
            "the public numbers that multiply the terms of an exact sum have a product that may "
            "overflow. Rescale the records"
        )
    return step_of(exponent, count) / 2


def nearest(largest: np.ndarray, unit: float) -> np.ndarray:
    """Bounds the distance of a number to the nearest float, for magnitudes up to `largest`.

    Let u be the unit roundoff, and 2^e the largest power of two up to `largest`. A number up to 2^e
    is within 2^(e - 1) u of the nearest float. A larger number x is within 2^e u of the nearest
    float, and also within x - 2^e, because 2^e is a float.
    """
    power = np.exp2(np.frexp(largest)[1] - 1.0)  # The largest power of 2 that is at most `largest`.
    return np.minimum(np.maximum(power * unit / 2, largest - power), power * unit)


_Kind = TypeVar("_Kind", bound=ExactSums)


def is_over_records(x: Abstract, axes: Sequence[int]) -> bool:
    """Whether a sum over axes adds up terms of several records."""
    return not x.is_public and (x.axis is None or x.axis in axes)


def _planned(kind: _Kind, x: Abstract) -> _Kind | None:
    """Returns exact sums with the range of their terms; None if float sums are accurate enough.

    Raises:
        RefusalError: if integers cannot represent the terms.
    """
    if not is_over_records(x, kind.summed):
        return None
    exponent = _exponent(*_largest(x, kind.summed), kind.count(x.shape), x)
    return None if exponent is None else dataclasses.replace(kind, exponent=exponent)


def planned_sum(x: Abstract, axes: Sequence[int], **_: Any) -> ExactSum | None:
    """Returns the exact form of a sum over the records; None if a float sum is accurate enough."""
    return _planned(ExactSum(0, axes=tuple(sorted(axes))), x)


def planned_product(
    first: Abstract, second: Abstract, dimension_numbers: Any,
    preferred_element_type: Any = None, **_: Any,
) -> ExactSum | None:  # fmt: skip
    """Returns the exact sum of the products in a `dot_general` that sums over the records.

    The axes of the products are ordered: free axes of both operands, then the summed axes.
    """
    (ca, cb), (ba, _) = dimension_numbers
    pairs = ((first, ca), (second, cb))
    free = [x.shape[k] for x, summed in pairs for k in range(len(x.shape)) if k not in summed]
    count = math.prod(first.shape[k] for k in ca)
    by_record = [pair for pair in pairs if pair[0].axis is not None]
    over = any(is_over_records(x, summed) for x, summed in by_record or pairs)
    if not over or not worth_it(count, first.dtype):
        return None
    dtypes = {first.dtype, second.dtype, preferred_element_type or first.dtype}
    if len(set(map(np.dtype, dtypes))) > 1 or ba or math.prod(free) > _MOST_PRODUCTS:
        raise RefusalError(
            "an exact sum of products needs operands of one dtype, without batch axes, and at "
            f"most {_MOST_PRODUCTS} products for each record. Use fewer columns, for example"
        )
    (largest_a, least_a), (largest_b, least_b) = (_largest(x, summed) for x, summed in pairs)
    # This margin covers the rounding of each product.
    largest, least = largest_a * largest_b * (1 + 2.0**-18), least_a * least_b
    exponent = _exponent(largest, least, count, first, second)
    axes = tuple(range(len(free), len(free) + len(ca)))
    return None if exponent is None else ExactSum(exponent, axes=axes)


def _largest(x: Abstract, axes: Sequence[int]) -> tuple[float, float]:
    """Returns the largest and the smallest size of a column.

    The size of a column is the largest magnitude of its entries. Columns of size 0 do not count for
    the smallest size.
    """
    columns = np.max(x.magnitude, axis=tuple(axes))
    moving = columns[columns > 0]
    return float(columns.max()), float(moving.min(initial=math.inf))


def _exponent(largest: float, least: float, count: int, *xs: Abstract) -> int | None:
    """Returns the exponent of the range of terms; None if the sum stays a sum of floats.

    Args:
        largest: the largest magnitude of a term.
        least: the smallest, over all columns, of the largest magnitude in a column.
        count: the number of terms.
        *xs: the arrays that contain the terms or their factors.
    """
    dtype, exponent = xs[0].dtype, math.frexp(largest)[1]
    if not worth_it(count, dtype) or largest == 0:
        return None
    if any(x.nan or x.pending.coarse for x in xs):
        raise RefusalError(
            "an exact sum needs terms that cannot be NaN and are computed in at least 32 bits"
        )
    if exponent not in EXPONENTS:
        raise RefusalError(
            f"the terms of an exact sum may be as large as {largest:.3g}, which is outside of the "
            "supported range. Rescale them"
        )
    try:
        bits = bits_of_a_digit(count, FLOAT64)
    except ValueError:
        raise RefusalError(f"{count} terms are too many for an exact sum in {dtype}") from None
    if largest / least > max(_ALIKE, 2.0 ** (bits - _LEAST_BITS[dtype.itemsize])):
        raise RefusalError(
            f"the terms of one column may be {largest / least:.3g} times as large as those of "
            "another column. Sum these columns separately, or rescale them"
        )
    return exponent


@dataclasses.dataclass(frozen=True)
class ExactCumulative(ExactSums):
    """Cumulative sums along an axis, from its end if `reverse`."""

    axis: int = 0
    reverse: bool = False
    title = "exact cumulative sum"

    @property
    def summed(self) -> Sequence[int]:
        return (self.axis,)

    def added(self, integers: jax.Array) -> jax.Array:
        return lax.cumsum(integers, self.axis, self.reverse)

    def of_floats(self, x: Abstract, sums_of: SumsOf) -> Abstract:
        return cumulative_sum(x, self.axis, self.reverse, sums_of)


@dataclasses.dataclass(frozen=True)
class ExactWindows(ExactSums):
    """Sums over windows. The fields of this class are the parameters of `lax.reduce_window`."""

    sizes: tuple[int, ...] = (1,)
    strides: tuple[int, ...] = (1,)
    padding: tuple[tuple[int, int], ...] = ((0, 0),)
    gaps: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    title = "exact sums of windows"

    @property
    def summed(self) -> Sequence[int]:
        return [k for k, size in enumerate(self.sizes) if size > 1]

    def count(self, shape: Sequence[int]) -> int:
        return math.prod(self.sizes)

    def added(self, integers: jax.Array) -> jax.Array:
        parameters = self.sizes, self.strides, self.padding, self.gaps, self.dilation
        return lax.reduce_window(integers, np.zeros((), integers.dtype), lax.add, *parameters)

    def of_floats(self, x: Abstract, sums_of: SumsOf) -> Abstract:
        return pooled_sum(
            x, sums_of, window_dimensions=self.sizes, window_strides=self.strides,
            padding=self.padding, base_dilation=self.gaps, window_dilation=self.dilation,
        )  # fmt: skip


def planned_cumulative(x: Abstract, axis: int, reverse: bool, **_: Any) -> ExactCumulative | None:
    """Returns the exact form of a cumulative sum; None if a float sum is accurate enough."""
    return _planned(ExactCumulative(0, axis=axis, reverse=bool(reverse)), x)


def planned_windows(
    x: Abstract, *, window_dimensions: Any, window_strides: Any, padding: Any, base_dilation: Any,
    window_dilation: Any, **_: Any,
) -> ExactWindows | None:  # fmt: skip
    """Returns the exact form of sums over windows; None if float sums are accurate enough."""
    of_integers = [window_dimensions, window_strides, base_dilation, window_dilation]
    sizes, strides, gaps, dilation = (tuple(map(int, numbers)) for numbers in of_integers)
    pads = tuple((int(a), int(b)) for a, b in padding)
    return _planned(ExactWindows(0, 1.0, sizes, strides, pads, gaps, dilation), x)


_MODES = tuple(lax.GatherScatterMode)


@dataclasses.dataclass(frozen=True)
class ExactScatter(Named):
    """A scatter-add of rows of records, whose entries are within [-2^exponent, 2^exponent].

    The entries are rounded to integer numbers of steps, whose sums do not depend on the order of
    records. The total is computed from these sums in float64. `mode` is an index into `_MODES`, the
    modes of a scatter in JAX.
    """

    exponent: int
    mode: int
    title: ClassVar = "exact sums by place"

    def numbers(self, places: Any, updates: Any) -> lax.ScatterDimensionNumbers:
        """Returns the dimension numbers of a scatter of one row for each record."""
        axes = tuple(range(places.shape[-1]))
        return lax.ScatterDimensionNumbers(tuple(range(1, len(updates.shape))), axes, axes)

    def compute(self, start: jax.Array, places: jax.Array, updates: jax.Array) -> jax.Array:
        steps = steps_of(updates, self.exponent, len(updates))
        zeros = lax.full(start.shape, 0, steps.dtype)
        numbers = self.numbers(places, steps)
        sums = lax.scatter_add(zeros, places, steps, numbers, mode=_MODES[self.mode])
        total = total_of_steps(sums, self.exponent, len(updates))
        total = total + lax.convert_element_type(start, jnp.float64)
        return lax.convert_element_type(total, start.dtype)

    def value(self, start: Abstract, places: Abstract, updates: Abstract) -> Abstract:
        """Returns the abstract value of an exact scatter.

        Each number of a record is rounded to a grid, and the resulting integers are added up at the
        index of the record. If a record changes, only the sums at its old and its new index change.
        So at most two rows change, and only these two are rounded differently.
        """
        numbers = self.numbers(places, updates)
        size, _ = check_scatter(start, places, updates, numbers, _MODES[self.mode])
        if updates.nan or updates.pending.coarse or not start.is_finite or start.pending.coarse:
            raise RefusalError(
                "an exact scatter needs finite updates and a public array to add to. Start with "
                "zeros, for example"
            )
        n, dtype = updates.shape[0], start.dtype
        off = most_off(updates, n, self.exponent)
        axes, first = len(start.shape) - len(size), float(start.magnitude.max())
        each, l1, l2 = moved_rows(places, updates, size, off)
        room = 1 + (n + 100) * 2.0**-52
        low, high = updates.low.min(axis=0, keepdims=True), updates.high.max(axis=0, keepdims=True)
        row = (1,) * axes
        low = start.low + n * (np.minimum(low, 0.0) * room - off).reshape(row + low.shape[1:])
        high = start.high + n * (np.maximum(high, 0.0) * room + off).reshape(row + high.shape[1:])
        largest = np.asarray(max(float(np.abs(low).max()), float(np.abs(high).max()), 2.0**-500))
        final = OF_FLOAT64 * (n * 2.0**self.exponent + first) + 4 * rounding.tiny(dtype)
        final = float(rounding.up(final + nearest(largest, rounding.unit(dtype))))
        entries = 2 * math.prod(size)
        moved = (
            rounding.up(np.where(each > 0, each + 2 * final, 0.0)).reshape(row + each.shape[1:]),
            float(rounding.up(l1 + 2 * final * entries)),
            float(rounding.up(l2 + 2 * final * math.sqrt(entries))),
        )
        low, high = rounding.widened(low, high, np.asarray(final))
        apart = n * (updates.apart + 2 * off) if updates.apart else 2 * off
        pending = Pending().having(**Pending.flags([updates.pending]))
        return make(
            start.shape, dtype, low, high, None, moved, moved, counts=[float(entries)] * 2,
            pending=pending.having(single=n == 1),
            apart=math.inf if places.apart else float(rounding.up(apart + 2 * final)),
        )  # fmt: skip


def planned_scatter(
    start: Abstract, places: Abstract, updates: Abstract, dimension_numbers: Any, mode: Any,
    **_: Any,
) -> ExactScatter | None:  # fmt: skip
    """Returns the exact form of a scatter of records; None if float sums are accurate enough.

    Raises:
        RefusalError: if an exact scatter cannot replace the scatter.
    """
    whole, count = start.whole and updates.whole, updates.shape[0] if updates.shape else 1
    over = is_over_records(updates, [0]) or not places.is_public
    if whole or not over or not worth_it(count, updates.dtype):
        return None
    mode = lax.GatherScatterMode.from_any(mode)
    check_scatter(start, places, updates, dimension_numbers, mode)
    if not start.is_finite:
        raise RefusalError(
            "an exact scatter needs a public array to add to. Start with zeros, for example"
        )
    exponent = _exponent(*_largest(updates, (0,)), count, updates)
    return None if exponent is None else ExactScatter(exponent, _MODES.index(mode))
