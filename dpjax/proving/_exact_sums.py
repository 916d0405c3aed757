"""Sums over records as sums of integers, in a program that a release runs.

The rounding error of a float sum grows with the number of its terms, because a compiler may choose
any order. The proof knows a range for each term. So each term is rounded to a grid whose step is
the range times a power of two. Sums of integers are exact in any order, and the total is rounded
once.
"""

import ast
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._exact._fixed_point import bits_of_a_digit, digits_in, digits_of
from dpjax._exact._numerics import float_limits
from dpjax.proving import _rounding as rounding
from dpjax.proving._reductions import Sums, sum_over
from dpjax.proving._rows import as_dense
from dpjax.proving._value import Abstract, Difference, Moves, Pending, RefusalError, erring, make

# The exponents of supported ranges. For these, floats represent all powers of two in this file.
EXPONENTS = range(-60, 61)
FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
# Splitting a term into digits multiplies it by powers of 2, up to 2 to this exponent.
_BITS_OF_DIGITS = 52
# An exact matrix product stores its terms in memory: at most this many for each record.
_MOST_PRODUCTS = 2**10
# A sum stays a sum of floats if its rounding error is smaller than this fraction of a term.
_WORTH_IT = 2.0**-7
# All columns share one grid. If the ranges of two columns differ by more than this factor, the
# smaller column would lose digits, so the sum stays a sum of floats.
_MOST_UNLIKE = 16.0
# A compiler may compute a term again for each of its digits, and round it differently. If this may
# change a sum by more than this fraction of the range of a term, the sum is `wide`.
_MOST_MISMATCH = 2.0**-8
# The relative error of a few operations in float64. It is tiny compared with the rounding of
# float32.
OF_FLOAT64 = 16 * 2.0**-53


class Named:
    """A program whose name encodes its fields, so that a walk recognizes it."""

    @property
    def name(self) -> str:
        """A name that encodes all fields."""
        fields = tuple(getattr(self, x.name) for x in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}_{repr(fields).encode().hex()}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Returns the program that a name encodes; None if the name encodes none."""
        kind, _, fields = name.partition("_")
        if kind != cls.__name__:
            return None
        try:
            found = cls(*ast.literal_eval(bytes.fromhex(fields).decode()))
        except (ValueError, TypeError, SyntaxError):
            return None
        return found if found.name == name else None


@dataclasses.dataclass(frozen=True)
class ExactSums(Named):
    """Sums of terms within [-2^exponent, 2^exponent], divided by a number above 0.

    They compute 2^exponent S / divisor. Here S is the sum of the terms divided by 2^exponent, each
    rounded to an integer number of small steps (a grid). Each term is split into digits that are so
    short that sums of digits fit into integers. The total is computed in float64, with an error of
    a few units in the last place, and rounded to the dtype of the terms. Subclasses say which terms
    are added.

    If a compiler computes a term again for each digit, digits of different copies may not fit
    together. A `wide` sum has a single digit of 64 bits, which takes up to five times as long.
    """

    exponent: int
    divisor: float = 1.0
    wide: bool = False
    title: ClassVar = "exact sum"

    def count(self, shape: Sequence[int]) -> int:
        """Returns the largest number of terms in a sum."""
        raise NotImplementedError

    def added(self, digits: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns the exact sums of digits, for one array of digits per position."""
        raise NotImplementedError

    def of_floats(self, x: Abstract, sums_of: "SumsOf") -> Abstract:
        """Returns the abstract value of the same sums, with the rounding errors from `sums_of`."""
        raise NotImplementedError

    def check(self, x: Abstract) -> None:
        """Refuses terms for which XLA miscompiles these sums."""

    def __call__(self, terms: jax.Array) -> jax.Array:
        def exact_sums(terms: jax.Array) -> jax.Array:
            count, precision = self.count(terms.shape), None
            if self.wide:
                precision = bits_of_a_digit(count, np.dtype(np.float64))
            total = total_of_digits(terms, self.exponent, count, self.added, precision)
            return lax.convert_element_type(total / self.divisor, terms.dtype)

        exact_sums.__name__ = self.name
        with jax.enable_x64(True):
            return jax.jit(exact_sums)(terms)


SumsOf = Callable[[Abstract, int, np.ndarray], Sums]


@dataclasses.dataclass(frozen=True)
class ExactSum(ExactSums):
    """A sum over axes."""

    axes: tuple[int, ...] = (0,)

    def count(self, shape: Sequence[int]) -> int:
        return math.prod(shape[k] for k in self.axes)

    def added(self, digits: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return sums_over(digits, self.axes)

    def of_floats(self, x: Abstract, sums_of: SumsOf) -> Abstract:
        return sum_over(x, self.axes, sums_of)


def sums_over(digits: Sequence[jax.Array], axes: Sequence[int]) -> Sequence[jax.Array]:
    """Returns the sums of several arrays over axes, in one loop."""
    zeros = tuple(np.zeros((), x.dtype) for x in digits)
    add = lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True))  # noqa: E731
    return lax.reduce(tuple(digits), zeros, add, tuple(axes))


def total_of_digits(
    terms: jax.Array,
    exponent: int,
    count: int,
    added: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
    precision: int | None = None,
) -> jax.Array:
    """Returns sums of up to `count` terms in [-2^exponent, 2^exponent], in float64.

    Sums of digits are exact. Adding these sums in float64 has an error of a few units in the last
    place of the largest one. If a precision is given, the terms are first converted to float64.
    """
    if precision is not None:
        terms = lax.convert_element_type(terms, jnp.float64)
    digits, bits = digits_of(terms, count, exponent, precision)
    total: Any = 0.0
    for digit_sum in reversed(added(digits)):
        total = (total + lax.convert_element_type(digit_sum, jnp.float64)) * 2.0**-bits
    return total * 2.0**exponent


def worth_it(count: int, dtype: np.dtype) -> bool:
    """Whether the error of a float sum of `count` terms may exceed a small fraction of a term."""
    return dtype in FLOATS and count * rounding.sum_units(count, dtype) >= _WORTH_IT


def summed_exactly(x: Abstract, kind: ExactSums) -> Abstract:
    """Returns the abstract value of exact sums.

    An exact sum adds up terms that are rounded to a grid, and then rounds the total to the nearest
    float. Rounding to the grid changes a term by at most half a step. So if a term changes by d,
    the rounded term changes by at most d + step; if the term does not change, neither does the
    rounded one.

    If `apart` is above 0, a compiler may compute a term again for each digit and round it
    differently. Then a digit may differ by 1.
    """
    count = kind.count(x.shape)
    if x.nan or x.pending.coarse or not kind.divisor > 0:
        raise RefusalError("the terms of an exact sum must be finite numbers within its range")

    def sums_of(terms: Abstract, count: int, sizes: np.ndarray) -> Sums:
        host, scale = (count + 100) * 2.0**-52, 1 / kind.divisor
        largest = np.maximum(sizes * (1 + host), 2.0**-500)
        final = OF_FLOAT64 * count * 2.0**kind.exponent * scale + 4 * rounding.tiny(x.dtype)
        if x.dtype == np.float32:
            final = final + nearest(largest, rounding.unit(x.dtype))
        return Sums(False, 0.0, rounding.up(final), sizes, host, terms.pending)

    kind.check(x)
    off = most_off(x, count, kind.exponent, wide=kind.wide)
    found = kind.of_floats(_on_the_grid(x, kind, off), sums_of)
    return dataclasses.replace(found, off=None)


def _on_the_grid(x: Abstract, kind: ExactSums, off: float) -> Abstract:
    """Returns the abstract value of the terms on the grid, divided by the divisor.

    A term that is always 0 is on the grid, so it has no error.
    """
    scale, off_grid = 1 / kind.divisor, np.where(x.magnitude > 0, off, 0.0)
    low, high = rounding.widened(x.low - off_grid, x.high + off_grid, np.zeros(()))

    def moved(d: Difference) -> Moves:
        moves = erring((d.each, d.l1, d.l2), off, x.shape, x.axis, d.count)
        each, l1, l2 = (rounding.up(y * scale) for y in moves)
        return each, float(l1), float(l2)

    return make(
        x.shape, x.dtype, low * scale, high * scale, x.axis, moved(x.changed), moved(x.others),
        pending=Pending().having(**Pending.flags([x.pending])),
        apart=float(rounding.up(2 * off * scale)) if x.apart else 0.0,
        counts=(x.changed.count, x.others.count),
    )  # fmt: skip


def most_off(x: Abstract, count: int, exponent: int, *, wide: bool = False) -> float:
    """Returns the largest distance of a term from its rounded value, in a sum of `count` terms.

    Raises:
        RefusalError: if a term may be outside of the range.
    """
    if not float(x.magnitude.max()) <= 2.0**exponent:
        raise RefusalError("the terms of an exact sum must be finite numbers within its range")
    # Terms are multiplied by powers of 2 to form digits. A compiler may combine these powers of 2
    # with public factors.
    if x.pending.bits + abs(exponent) + _BITS_OF_DIGITS > rounding.most_bits(x.dtype):
        raise RefusalError(
            "the product of the public factors in an exact sum may overflow. Rescale the records"
        )
    dtype = np.dtype(np.float64) if wide else x.dtype
    bits = bits_of_a_digit(count, dtype)
    step = 2.0 ** (exponent - bits * (1 if wide else digits_in(bits, dtype)))
    if wide:
        return step / 2
    # Two different floats of magnitude m differ by at least m 2^-(nmant + 1). So if two copies of a
    # term differ by much less than step 2^-nmant, either they are equal, or both are far below one
    # step and all of their digits are 0.
    differ = x.apart * 2.0 ** (float_limits(x.dtype).nmant + 4) > step
    return step / 2 + (_mismatch(x, exponent, bits) if differ else 0.0)


def _mismatch(x: Abstract, exponent: int, bits: int) -> float:
    """Bounds the error if each digit of a term is computed from another copy of the term."""
    return x.apart + 2 * 2.0 ** (exponent - bits)


def needs_width(x: Abstract, axes: Sequence[int], exponent: int, count: int) -> bool:
    """Whether a sum over axes must be `wide`, because the copies of its terms may differ."""
    if x.dtype != np.float32 or not x.apart:
        return False
    by_record = x.axis in axes and x.others.is_zero
    one = math.prod(x.shape[k] for k in axes if not (by_record and k == x.axis))
    moving = min(one, as_dense(x).others.count)
    bits = bits_of_a_digit(count, x.dtype)
    return moving * _mismatch(x, exponent, bits) > _MOST_MISMATCH * 2.0**exponent


def nearest(largest: np.ndarray, unit: float) -> np.ndarray:
    """Bounds the distance of a number to the nearest float, for magnitudes up to `largest`.

    Let 2^e be the largest power of two up to `largest`. Numbers up to 2^e are within 2^(e - 1) u of
    the nearest float. Larger numbers are within 2^e u, but a number just above 2^e is rounded to
    2^e.
    """
    power = np.exp2(np.frexp(largest)[1] - 1.0)  # The largest power of 2 that is at most `largest`.
    return np.minimum(np.maximum(power * unit / 2, largest - power), power * unit)


def is_over_records(x: Abstract, axes: Sequence[int]) -> bool:
    """Whether a sum over axes adds up terms of several records."""
    return not x.is_public and (x.axis is None or x.axis in axes)


def exponent_of_range(x: Abstract, axes: Sequence[int], count: int) -> int | None:
    """Returns the exponent of the range of a sum's terms; None if floats are as accurate.

    Raises:
        RefusalError: if integers cannot represent the terms.
    """
    return _exponent(*_largest(x, axes), count, x)


def grid_of(x: Abstract, axes: Sequence[int], count: int) -> dict[str, Any] | None:
    """Returns the exponent of an exact sum, and whether it is wide; None if floats are as good."""
    exponent = exponent_of_range(x, axes, count)
    if exponent is None:
        return None
    return {"exponent": exponent, "wide": needs_width(x, axes, exponent, count)}


def planned_sum(x: Abstract, axes: Sequence[int], **_: Any) -> ExactSum | None:
    """Returns the exact form of a sum over the records; None if floats are as accurate."""
    axes = tuple(sorted(axes))
    if not is_over_records(x, axes):
        return None
    grid = grid_of(x, axes, math.prod(x.shape[k] for k in axes))
    return None if grid is None else ExactSum(**grid, axes=axes)


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
    if exponent is None:
        return None
    # Two copies of a product differ by their own rounding and by the differences of their factors.
    apart = first.apart * largest_b + second.apart * largest_a + 8 * rounding.unit(first.dtype)
    wide = any(
        needs_width(dataclasses.replace(x, apart=apart), axes, exponent, count)
        for x, axes in pairs
        if not x.is_public
    )
    axes = tuple(range(len(free), len(free) + len(ca)))
    return ExactSum(exponent, wide=wide, axes=axes)


def _largest(x: Abstract, axes: Sequence[int]) -> tuple[float, float]:
    """Returns the maximum and the minimum over columns of the largest magnitude in a column.

    The minimum ignores columns of zeros.
    """
    columns = np.max(x.magnitude, axis=tuple(axes))
    moving = columns[columns > 0]
    return float(columns.max()), float(moving.min(initial=math.inf))


def _exponent(largest: float, least: float, count: int, *xs: Abstract) -> int | None:
    """Returns the exponent of the range of terms; None if the sum stays a sum of floats.

    Args:
        largest: the largest magnitude of a term.
        least: the largest magnitude of a term in the column with the smallest terms.
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
    if largest > _MOST_UNLIKE * least:
        raise RefusalError(
            f"the terms of one column may be {largest / least:.3g} times as large as those of "
            "another column. Sum these columns separately, or rescale them"
        )
    try:
        bits_of_a_digit(count, dtype)
    except ValueError:
        raise RefusalError(f"{count} terms are too many for an exact sum in {dtype}") from None
    return exponent
