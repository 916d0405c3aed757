"""Rules of comparisons, logic, selections, and changes of dtype."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _nan as nans
from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import lipschitz, nearest_to_zero, steps
from dpjax.proving._rows import aligned, stretched
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    RefusalError,
    Source,
    constant,
    over,
    result_of,
)

BOOL = np.dtype(bool)
# sure(a, b, gap) returns, for each entry, whether a comparison is certainly true, and whether it is
# certainly false. A device may flush tiny numbers to 0. So two numbers that are closer than `gap`
# may compare as equal.
Sure = Callable[[Abstract, Abstract, float], tuple[np.ndarray, np.ndarray]]


def less(a: Abstract, b: Abstract, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each entry whether a < b is certainly true, and whether it is certainly false.

    If a and b may be closer than `gap`, neither is certain: a device may flush them to -0 and 0,
    and the total order of floats puts -0 before 0.
    """
    return a.high + gap < b.low, a.low >= b.high + gap


def equal(a: Abstract, b: Abstract, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Compares a == b."""
    apart = (a.high + gap < b.low) | (a.low > b.high + gap)
    return (a.low == a.high) & (b.low == b.high) & (a.low == b.low), apart


def compare(
    sure: Sure, first: Abstract, second: Abstract, *, swapped: bool = False, negated: bool = False,
    total_order: bool = False, **_: Any,
) -> Abstract:  # fmt: skip
    """Returns the value of a comparison. Where an operand changes, the answer (0 or 1) may change.

    `swapped` and `negated` turn a < b into the comparisons a > b, a >= b and a <= b. `negated`
    turns a == b into a != b.

    Without NaN, an array equals itself. A comparison with NaN is false, except that a != b is true.

    In a one-hot encoding x == c_j with distinct constants c_j, at most one answer is true. So the
    l1 norm of the change of a row of answers is at most 2.
    """
    if first is second and first.is_finite and not first.pending.coarse and not first.nan:
        return everywhere((sure is not less) != negated, first.shape)
    a, b = aligned(first, second)
    gap = 2 * max(rounding.tiny(a.dtype), rounding.tiny(b.dtype))
    one, other = (b, a) if swapped else (a, b)
    true, false = sure(one, other, gap)
    if sure is less and not total_order:  # Flushing two numbers to 0 does not reverse their order.
        false = false | ((one.low >= 0) & (other.high <= 0))
    if negated:
        true, false = false, true
    nan, unequal = a.nan | b.nan, sure is equal and negated
    if nan and total_order:
        raise RefusalError(
            "proofs do not support comparisons by total order of numbers that may be NaN. Compare "
            "with < or == instead"
        )
    # With NaN, == and < are false, and != is true. So if NaN is possible, == and < are never
    # certainly true, and != is never certainly false.
    if nan:
        true, false = (true & unequal, false & (not unequal))
    l1 = l2 = row = math.inf
    if sure is equal and not negated and (fibers := one_true(a, b)):
        row = float(fibers)
        l1, l2 = 2.0 * fibers, math.sqrt(2.0 * fibers) * (1 + 2.0**-40)
    # In total order, 0 and -0 differ. So the answer may change although the numbers compare as
    # equal: x * 0 may be 0 on a database and -0 on its neighbor.
    near = [nearest_to_zero(x.low, x.high) <= gap for x in (a, b)]
    zeros = near[0] & near[1] if total_order else np.array(False)

    def answers(x: Difference, y: Difference) -> Moves:
        return np.where((x.each > 0) | (y.each > 0) | zeros, 1.0, 0.0), l1, l2

    still = a.apart == b.apart == 0 and not zeros.any()
    ends = np.where(true, 1.0, 0.0), np.where(false, 0.0, 1.0)
    apart = 0.0 if still else math.inf
    kept: Any = {"dtype": BOOL, "whole": True, "apart": apart, "l1_of_row": row}
    kept |= {"l2_of_row": float(rounding.up(math.sqrt(row)))}
    found = result_of((a, b), *ends, answers, **kept)
    return dataclasses.replace(found, answers=frozenset((source, unequal) for source in nan))


def everywhere(number: bool | np.generic, shape: Sequence[int]) -> Abstract:
    """Returns an array in which every entry is the same public number or boolean."""
    return stretched(constant(np.full((1,) * len(shape), number)), shape)


def one_true(a: Abstract, b: Abstract) -> int:
    """Returns how many entries of each row of a == b may be true; 0 if a == b is not one-hot.

    a == b is one-hot along an axis if one array has distinct constants along this axis, and the
    other array does not vary along it. Then at most one entry along this axis is true.
    """
    for x, levels in ((a, b), (b, a)):
        # If x is `coarse`, a compiler may round the same entry of x differently in each comparison.
        # Then this entry may equal two of the constants in `levels`.
        if x.pending.coarse or not levels.is_known or not np.isfinite(levels.low).all():
            continue
        long = [k for k, size in enumerate(levels.low.shape) if size > 1]
        if len(long) == 1 and long[0] in x.tied and long[0] != a.axis:
            values = np.sort(levels.low.ravel())
            if np.diff(values).min() > 4 * rounding.tiny(levels.dtype) + x.apart * (not x.whole):
                return math.prod(s for k, s in enumerate(x.shape) if k not in (a.axis, long[0]))
    return 0


def check_booleans(*inputs: Abstract) -> None:
    """Refuses integers, whose bits have no rules."""
    if any(x.dtype != BOOL for x in inputs):
        raise RefusalError(
            "proofs do not support bitwise operations on integers. Use booleans instead"
        )


def negation(x: Abstract, **_: Any) -> Abstract:
    """Returns the value of `not`, for booleans."""
    check_booleans(x)
    found = lipschitz((x,), (1 - x.high, 1 - x.low), (1.0,), whole=True)
    opposite = frozenset((source, not answer) for source, answer in x.answers)
    return dataclasses.replace(found, answers=opposite)


def logic(
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
    first: Abstract, second: Abstract, **_: Any,
) -> Abstract:  # fmt: skip
    """Returns the value of and, or, xor, for booleans.

    `combine` computes the endpoints of the result's range from those of the two operands. It is
    None for xor.
    """
    check_booleans(first, second)
    a, b = aligned(first, second)
    ends = np.zeros((1,) * len(a.shape)), np.ones((1,) * len(a.shape))
    if combine is not None:
        ends = combine(a.low, b.low), combine(a.high, b.high)
    both = zip((a.l1_of_row, a.l2_of_row), (b.l1_of_row, b.l2_of_row), strict=True)
    rows = [min(pair) if combine is np.minimum else math.inf for pair in both]
    found = lipschitz((a, b), ends, (1.0, 1.0), whole=True, rows=(rows[0], rows[1]))
    # One true operand makes `or` true, and one false operand makes `and` false. An answer that has
    # this effect is decisive.
    decisive = {np.maximum: True, np.minimum: False}.get(combine)
    every = frozenset((a.answers | b.answers) if decisive is not None else ())
    kept = [pair for pair in every if pair[1] is decisive or pair in a.answers & b.answers]
    return dataclasses.replace(found, answers=frozenset(kept))


def is_finite(x: Abstract, **_: Any) -> Abstract:
    """Returns the value of `isfinite`: true except for NaN, because all ranges are finite."""
    if not x.is_finite:
        raise RefusalError(
            "proofs do not support is_finite of a constant that contains NaN or infinity"
        )
    # The range is finite, so an entry is finite unless it is NaN. An entry is NaN if it does not
    # equal itself.
    if x.nan:
        return compare(equal, x, x)
    return everywhere(True, x.shape)


def select(which: Abstract, *cases: Abstract, **_: Any) -> Abstract:
    """Returns the value of a `select`.

    If `which` does not change, an entry changes like one of the cases; otherwise it may change
    within its range.
    """
    if which.is_known and (which.low == which.low.flat[0]).all():
        place = int(which.low.flat[0])
        if 0 <= place < len(cases):
            shape = np.broadcast_shapes(*(x.shape for x in (which, *cases)))
            return stretched(cases[place], shape)
    choice, *values = aligned(which, *cases)
    # A case that is certainly not chosen is ignored.
    left = [(choice.low > k) | (choice.high < k) for k in range(len(values))]
    lows = [np.where(out, math.inf, x.low) for out, x in zip(left, values, strict=True)]
    highs = [np.where(out, -math.inf, x.high) for out, x in zip(left, values, strict=True)]
    low = np.minimum.reduce(np.broadcast_arrays(*lows))
    high = np.maximum.reduce(np.broadcast_arrays(*highs))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise RefusalError("the value that this operation selects may be infinite or NaN")
    width = rounding.up(over(high - low, choice.axis))
    whole = all(x.whole for x in values)
    flush = 0.0 if whole else 4 * rounding.tiny(values[0].dtype)

    def moved(c: Difference, *ds: Difference) -> Moves:
        largest = np.maximum.reduce(np.broadcast_arrays(*(d.each for d in ds)))
        each = np.where(c.each > 0, width, np.where(largest > 0, largest + flush, 0.0))
        if not c.is_zero or flush:
            return each, math.inf, math.inf
        l2 = rounding.norm2([d.l2 for d in ds])
        return each, float(rounding.up(sum(d.l1 for d in ds))), float(rounding.up(l2))

    apart = max(x.apart for x in values) + flush if choice.apart == 0 else math.inf
    kept: Any = {"dtype": values[0].dtype, "whole": whole, "apart": apart}
    kept |= {"l1_of_row": float(rounding.up(sum(x.l1_of_row for x in values)))}
    kept |= {"l2_of_row": float(rounding.up(rounding.norm2([x.l2_of_row for x in values])))}
    found = result_of((choice, *values), low, high, moved, **kept)
    if all(_never_chosen(choice, x.nan, k, len(values)) for k, x in enumerate(values)):
        return found
    found = dataclasses.replace(found, nan=Source.new(*values))
    return nans.checked(found, (choice, *values))


def _never_chosen(which: Abstract, nan: frozenset[Source], case: int, count: int) -> bool:
    """Whether `select` certainly chooses another case wherever this case is NaN."""
    other = case == 0
    return not nan or (count == 2 and all(source.says(other, which.answers) for source in nan))


def convert(x: Abstract, new_dtype: np.dtype, **_: Any) -> Abstract:
    """Returns the value of a cast, which may be exact, round, or truncate."""
    dtype, ends, rows = np.dtype(new_dtype), (x.low, x.high), (x.l1_of_row, x.l2_of_row)
    if dtype == x.dtype:
        return x
    if x.nan and not (x.dtype in rounding.USUAL and dtype in rounding.USUAL and dtype.kind == "f"):
        raise RefusalError(
            f"the operand may be NaN, which {dtype} cannot represent. Replace NaN before the cast, "
            "for example with jnp.where(jnp.isnan(x), 0, x)"
        )
    if not x.is_finite:
        if x.is_known and dtype.kind == x.dtype.kind == "f" and dtype.itemsize >= 4:
            # A compiler may drop a cast to float32 and back. Then the number is not rounded, so the
            # range must contain both the rounded and the original number.
            rounded = x.low.astype(dtype).astype(float)
            ends = np.minimum(x.low, rounded), np.maximum(x.low, rounded)
            return dataclasses.replace(x, dtype=dtype, low=ends[0], high=ends[1])
        raise RefusalError("proofs do not support casts of NaN or infinity")
    if rounding.NARROW.intersection((dtype, x.dtype)):
        return _narrow(x, dtype)
    if dtype == BOOL:
        return compare(equal, x, constant(np.zeros((), x.dtype)), negated=True)
    if dtype.kind in "iu":
        if x.whole:
            found = lipschitz((x,), ends, (1.0,), dtype=dtype, whole=True, rows=rows)
        else:
            found = steps(np.trunc, x, dtype=dtype)
        pending = found.pending.having(cut=not x.whole)
        return dataclasses.replace(found, tied=x.tied, pending=pending)
    held = x.whole and float(x.magnitude.max()) <= rounding.exact_integers(dtype)
    exact = held or (x.dtype.kind == "f" and dtype.itemsize >= x.dtype.itemsize)
    theta = 0.0 if exact else 2 * rounding.unit(dtype)
    found = lipschitz(
        (x,), ends, (1.0,), dtype=dtype, relative=theta, whole=x.whole and exact, rows=rows
    )  # fmt: skip
    # A cast keeps an array constant along its `tied` axes.
    return dataclasses.replace(found, tied=x.tied)


def _narrow(x: Abstract, dtype: np.dtype) -> Abstract:
    """Returns the value of a cast to or from 16 bits.

    A compiler may drop a cast to 16 bits and back, and then nothing is rounded. Otherwise the cast
    rounds to nearest, with a relative error of at most u. In both cases, an entry that does not
    change is rounded in the same way on both databases.
    """
    if not rounding.is_float(dtype):
        raise RefusalError(
            f"proofs do not support casts from {x.dtype} to {dtype}. Cast to float32 first"
        )
    exact_in = min(rounding.exact_integers(y) for y in (x.dtype, dtype))
    held = x.whole and float(x.magnitude.max()) <= exact_in
    # A cast from 16 bits may also round. A compiler may drop the earlier cast to 16 bits, and then
    # the number still has more than 16 bits.
    theta = 0.0 if held else rounding.unit(dtype) * (1 + 2.0**-6)
    found = lipschitz((x,), (x.low, x.high), (1.0,), dtype=dtype, relative=theta, whole=held)
    return dataclasses.replace(found, tied=x.tied, pending=x.pending.having(coarse=True))
