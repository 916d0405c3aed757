"""Sums over records as sums of integers, in a program that a release runs.

The rounding error of a float sum grows with the number of its terms, because a compiler may choose
any order. The proof knows a range for each term. So each term is rounded to a grid whose step is
the range times a power of two. Sums of integers are exact in any order, and the total is rounded
once.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._exact._fixed_point import bits_of_a_digit, digits_of
from dpjax._exact._numerics import float_limits
from dpjax.proving import _rounding as rounding
from dpjax.proving._reductions import axes_after, total_over
from dpjax.proving._value import Abstract, Difference, Moves, Pending, RefusalError, erring, make

_NAME = "exact_sum"
# The exponents of ranges that are supported, so that floats can represent all powers of two in this
# file.
EXPONENTS = range(-60, 61)
FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
# To split a term into digits, it is multiplied by powers of 2, up to 2 to this exponent.
_BITS_OF_DIGITS = 52
# An exact matrix product stores its terms in memory: at most this many for each record.
_MOST_PRODUCTS = 2**10
# A sum stays a sum of floats if its rounding error is smaller than this fraction of a term.
_WORTH_IT = 2.0**-7
# All columns share one grid. If the ranges of two columns differ by more than this factor, the
# smaller column would lose digits, so the sum stays a sum of floats.
_MOST_UNLIKE = 16.0
# The relative error of a few operations in float64. It is tiny compared with the rounding of
# float32.
OF_FLOAT64 = 16 * 2.0**-53


@dataclasses.dataclass(frozen=True)
class ExactSum:
    """A sum of terms within [-2^exponent, 2^exponent], divided by a number above 0.

    It computes 2^exponent S / divisor, where S is the sum of the terms rounded to a grid, an
    integer number of steps. The terms are split into digits, so short that sums of digits fit into
    integers. The total is computed in float64, with an error of a few units in the last place, and
    rounded to the dtype of the terms.
    """

    axes: tuple[int, ...]
    exponent: int
    divisor: float = 1.0
    title = "exact sum"

    @property
    def name(self) -> str:
        """A name that encodes all fields."""
        axes = "_".join(map(str, self.axes))
        return f"{_NAME}_{axes}_at_{self.exponent - EXPONENTS[0]}_by_{hexed(self.divisor)}"

    @staticmethod
    def named(name: str) -> "ExactSum | None":
        """Returns the sum that a name encodes; None if the name encodes none."""
        try:
            axes, _, rest = name.removeprefix(f"{_NAME}_").partition("_at_")
            exponent, _, divisor = rest.partition("_by_")
            places = tuple(map(int, axes.split("_")))
            found = ExactSum(places, int(exponent) + EXPONENTS[0], of_hex(divisor))
        except ValueError:
            return None
        return found if found.name == name else None

    def count(self, shape: Sequence[int]) -> int:
        return math.prod(shape[k] for k in self.axes)

    def __call__(self, terms: jax.Array) -> jax.Array:
        def exact_sum(terms: jax.Array) -> jax.Array:
            total = total_of_digits(terms, self.exponent, self.axes) / self.divisor
            return lax.convert_element_type(total, terms.dtype)

        exact_sum.__name__ = self.name
        with jax.enable_x64(True):
            return jax.jit(exact_sum)(terms)


def total_of_digits(terms: jax.Array, exponent: int, axes: Sequence[int]) -> jax.Array:
    """Returns the sum of terms in [-2^exponent, 2^exponent] over axes, in float64.

    Sums of digits are exact. Adding these sums in float64 has an error of a few units in the last
    place of the largest one.
    """
    digits, bits = digits_of(terms, math.prod(terms.shape[k] for k in axes), exponent)
    zeros = tuple(np.zeros((), x.dtype) for x in digits)
    sums = lax.reduce(
        tuple(digits), zeros, lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True)), axes
    )
    total: Any = 0.0
    for digit_sum in reversed(sums):
        total = (total + lax.convert_element_type(digit_sum, jnp.float64)) * 2.0**-bits
    return total * 2.0**exponent


def hexed(number: float) -> str:
    """Returns the bits of a float in hexadecimal, for use in a name."""
    return f"{int(np.float64(number).view(np.uint64)):016x}"


def of_hex(bits: str) -> float:
    """Returns the float with these bits, given in hexadecimal."""
    return float(np.uint64(int(bits, 16)).view(np.float64))


def worth_it(count: int, dtype: np.dtype) -> bool:
    """Whether the error of a float sum of `count` terms may exceed a small fraction of a term."""
    return dtype in FLOATS and count * rounding.sum_units(count, dtype) >= _WORTH_IT


def summed_exactly(x: Abstract, kind: ExactSum) -> Abstract:
    """Returns the abstract value of an exact sum.

    Rounding to the grid changes a term by at most half a step. So if a term changes by d, its
    integer changes by at most d + step, in units of the terms, and a term that does not change has
    the same integer. If `apart` is above 0, a compiler may compute a term again for each digit, and
    round it differently. Then a digit may differ by 1. The total is rounded once, to the nearest
    float.
    """
    count, (shape, axis) = kind.count(x.shape), axes_after(x, kind.axes)
    if x.nan or x.pending.coarse or not kind.divisor > 0:
        raise RefusalError("the terms of an exact sum must be finite numbers within its range")
    off = most_off(x, count, kind.exponent)
    scale, room = 1 / kind.divisor, 1 + (count + 100) * 2.0**-52
    low, high = (total_over(end, x.shape, kind.axes) for end in (x.low, x.high))
    slack = count * off + (room - 1) * total_over(x.magnitude, x.shape, kind.axes)
    low, high = rounding.widened(low - slack, high + slack, np.zeros(()))
    low, high = low * scale, high * scale
    largest = np.maximum(np.maximum(np.abs(low), np.abs(high)), 2.0**-500)
    final = OF_FLOAT64 * count * 2.0**kind.exponent * scale + 4 * rounding.tiny(x.dtype)
    if x.dtype == np.float32:
        final = final + nearest(largest, rounding.unit(x.dtype))
    final = rounding.up(final)
    width = math.prod(x.shape[k] for k in kind.axes if k != x.axis)
    rest = x.n - 1 if x.axis in kind.axes else 0
    short = [1 if k == x.axis else size for k, size in enumerate(x.shape)]

    def moved(*both: Difference) -> Moves:
        (e1, a1, b1), (e2, a2, b2) = (
            erring((d.each, d.l1, d.l2), off, x.shape, x.axis) for d in both
        )
        l1, l2 = a1 + rest * a2, math.sqrt(width) * (b1 + rest * b2)
        each = total_over(e1, short, kind.axes) + rest * total_over(e2, short, kind.axes)
        each = rounding.up(np.minimum(each * room, l1) * scale)
        l1, l2 = float(rounding.up(l1 * scale)), float(rounding.up(l2 * scale))
        return erring((each, l1, l2), final, shape, axis)

    low, high = rounding.widened(low, high, final)
    if (x.low >= 0).all():
        low = np.maximum(low, 0.0)
    changed, others = moved(x.changed, x.others), moved(x.others, x.others)
    apart = count * 2 * off * scale if x.apart else 0.0
    return make(
        shape, x.dtype, low, high, axis, changed, changed if axis is None else others,
        pending=Pending().having(**Pending.flags([x.pending])),
        apart=float(rounding.up(apart + 2 * float(final.max()))),
    )  # fmt: skip


def most_off(x: Abstract, count: int, exponent: int) -> float:
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
            "the product of the public factors in an exact sum may overflow: rescale the records"
        )
    bits = bits_of_a_digit(count, x.dtype)
    length = bits * math.ceil((float_limits(x.dtype).nmant + 2) / bits)
    off = 2.0 ** (exponent - length - 1)
    if x.apart:
        off += x.apart + 2 * 2.0 ** (exponent - bits)
    return off


def nearest(largest: np.ndarray, unit: float) -> np.ndarray:
    """Returns the largest distance from a number of magnitude up to `largest` to a float.

    Numbers up to 2^e are within 2^(e - 1) u of the nearest float, and larger numbers within 2^e u.
    A number just above 2^e is rounded to 2^e.
    """
    power = np.exp2(np.frexp(largest)[1] - 1.0)  # The largest power of 2 that is at most `largest`.
    return np.minimum(np.maximum(power * unit / 2, largest - power), power * unit)


def planned(x: Abstract, axes: Sequence[int]) -> int | None:
    """Returns the exponent of the range of a sum over records; None if it stays a float sum."""
    if x.axis is None or x.axis not in axes or x.is_public or x.nan or x.pending.coarse:
        return None
    return exponent_of_range(x, axes, math.prod(x.shape[k] for k in axes))


def exponent_of_range(x: Abstract, axes: Sequence[int], count: int) -> int | None:
    """Returns the exponent of the range of a sum's terms; None if it stays a float sum."""
    return _exponent(*_largest(x, axes), count, x.dtype)


def planned_product(first: Abstract, second: Abstract, parameters: Any) -> int | None:
    """Returns the same as `planned`, for a `dot_general` that sums over the records."""
    (ca, cb), (ba, _) = parameters["dimension_numbers"]
    pairs = ((first, ca), (second, cb))
    free = [x.shape[k] for x, summed in pairs for k in range(len(x.shape)) if k not in summed]
    if not (first.axis in ca or second.axis in cb) or ba or math.prod(free) > _MOST_PRODUCTS:
        return None
    dtypes = {first.dtype, second.dtype, parameters.get("preferred_element_type") or first.dtype}
    if len(set(map(np.dtype, dtypes))) > 1 or any(x.nan or x.pending.coarse for x, _ in pairs):
        return None
    (largest_a, least_a), (largest_b, least_b) = (_largest(x, summed) for x, summed in pairs)
    # This margin covers the rounding of each product.
    largest, least = largest_a * largest_b * (1 + 2.0**-18), least_a * least_b
    return _exponent(largest, least, math.prod(first.shape[k] for k in ca), first.dtype)


def _largest(x: Abstract, axes: Sequence[int]) -> tuple[float, float]:
    """Returns the largest and the smallest, over columns, of a column's largest magnitude.

    Columns of zeros are ignored.
    """
    columns = np.max(x.magnitude, axis=tuple(axes))
    moving = columns[columns > 0]
    return float(columns.max()), float(moving.min(initial=math.inf))


def _exponent(largest: float, least: float, count: int, dtype: np.dtype) -> int | None:
    """Returns the exponent of the range of terms; None if the sum stays a sum of floats.

    Args:
        largest: the largest magnitude of a term.
        least: the largest magnitude of a term in the column with the smallest terms.
        count: the number of terms.
        dtype: the dtype of the terms.
    """
    if not worth_it(count, dtype) or not 0 < largest < 2.0 ** EXPONENTS[-1]:
        return None
    if largest > _MOST_UNLIKE * least or math.frexp(largest)[1] < EXPONENTS[0]:
        return None
    try:
        bits_of_a_digit(count, dtype)
    except ValueError:
        return None
    return math.frexp(largest)[1]
