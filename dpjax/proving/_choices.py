"""Rules of comparisons, logic, selections, and changes of dtype."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import lipschitz, steps
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    RefusalError,
    aligned,
    constant,
    make,
    over,
    stretched,
)

BOOL = np.dtype(bool)
# Takes two intervals and a gap. Says where the answer is sure to be true, and where false. Numbers
# closer than the gap may both be flushed to 0.
Sure = Callable[[Abstract, Abstract, float], tuple[np.ndarray, np.ndarray]]


def less(a: Abstract, b: Abstract, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """A < b. In the total order -0 lies below 0; there the gap leaves both answers open."""
    return a.high + gap < b.low, a.low >= b.high + gap


def equal(a: Abstract, b: Abstract, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """A == b."""
    apart = (a.high + gap < b.low) | (a.low > b.high + gap)
    return (a.low == a.high) & (b.low == b.high) & (a.low == b.low), apart


def compare(
    sure: Sure, first: Abstract, second: Abstract, *, swapped: bool = False, negated: bool = False,
    total_order: bool = False, **_: Any,
) -> Abstract:  # fmt: skip
    """The answer may change where an input moves. A change is one bit.

    `swapped` and `negated` make a > b, a >= b and a <= b from b < a, and a != b from a == b.

    An array is never NaN, so it equals itself. Take answers `x == c_j` to distinct constants c_j,
    with x the same along that axis. At most one is true, so the row of answers moves by 2 in l1.
    """
    if first is second and first.is_finite and not first.pending.coarse:
        return everywhere((sure is not less) != negated, first.shape)
    a, b = aligned(first, second)
    gap = 2 * max(rounding.tiny(a.dtype), rounding.tiny(b.dtype))
    true, false = sure(b, a, gap) if swapped else sure(a, b, gap)
    if negated:
        true, false = false, true
    l1 = l2 = math.inf
    if sure is equal and not negated and (fibers := one_true(a, b)):
        l1, l2 = 2.0 * fibers, math.sqrt(2.0 * fibers) * (1 + 2.0**-40)
    # x * 0 does not move, but it may be 0 for one database and -0 for its neighbor.
    zeros = (_least(a) <= gap) & (_least(b) <= gap) if total_order else np.array(False)

    def answers(x: Difference, y: Difference) -> Moves:
        return np.where((x.each > 0) | (y.each > 0) | zeros, 1.0, 0.0), l1, l2

    still = a.apart == b.apart == 0 and not zeros.any()
    return make(
        a.shape, BOOL, np.where(true, 1.0, 0.0), np.where(false, 0.0, 1.0), a.axis,
        answers(a.changed, b.changed), answers(a.others, b.others), whole=True,
        apart=0.0 if still else math.inf,
    )  # fmt: skip


def _least(a: Abstract) -> np.ndarray:
    """The least magnitude that a value may have."""
    return np.maximum(np.maximum(a.low, -a.high), 0.0)


def everywhere(answer: bool, shape: Sequence[int]) -> Abstract:
    """A public boolean at every place."""
    return stretched(constant(np.full((1,) * len(shape), answer)), shape)


def one_true(a: Abstract, b: Abstract) -> int:
    """The number of groups of answers a == b with at most one true answer; 0 if none is known."""
    for x, levels in ((a, b), (b, a)):
        # Other digits at another place of the axis could equal another level.
        if x.pending.coarse or not levels.is_known or not np.isfinite(levels.low).all():
            continue
        long = [k for k, size in enumerate(levels.low.shape) if size > 1]
        if len(long) == 1 and long[0] in x.tied and long[0] != a.axis:
            values = np.sort(levels.low.ravel())
            if np.diff(values).min() > 4 * rounding.tiny(levels.dtype) + x.apart * (not x.whole):
                return math.prod(s for k, s in enumerate(x.shape) if k not in (a.axis, long[0]))
    return 0


def _check_booleans(*inputs: Abstract) -> None:
    if any(x.dtype != BOOL for x in inputs):
        raise RefusalError("logic of integers has no rule: use booleans")


def negation(x: Abstract, **_: Any) -> Abstract:
    """`not` of booleans."""
    _check_booleans(x)
    return lipschitz((x,), (1 - x.high, 1 - x.low), (1.0,), whole=True)


def logic(
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
    first: Abstract, second: Abstract, **_: Any,
) -> Abstract:  # fmt: skip
    """and, or, xor of booleans. `combine` takes ends of two ranges to an end of the result's."""
    _check_booleans(first, second)
    a, b = aligned(first, second)
    ends = np.zeros((1,) * len(a.shape)), np.ones((1,) * len(a.shape))
    if combine is not None:
        ends = combine(a.low, b.low), combine(a.high, b.high)
    return lipschitz((a, b), ends, (1.0, 1.0), whole=True)


def is_finite(x: Abstract, **_: Any) -> Abstract:
    """Arrays here are finite."""
    if not x.is_finite:
        raise RefusalError("is_finite of a constant that is not finite has no rule")
    return everywhere(True, x.shape)


def select(which: Abstract, *cases: Abstract, **_: Any) -> Abstract:
    """Where `which` does not move, one case moves. Elsewhere the value moves within its range."""
    if which.is_known and (which.low == which.low.flat[0]).all():
        place = int(which.low.flat[0])
        if 0 <= place < len(cases):
            shape = np.broadcast_shapes(*(x.shape for x in (which, *cases)))
            return stretched(cases[place], shape)
    choice, *values = aligned(which, *cases)
    low = np.minimum.reduce(np.broadcast_arrays(*(x.low for x in values)))
    high = np.maximum.reduce(np.broadcast_arrays(*(x.high for x in values)))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise RefusalError("a case may be infinite or NaN")
    width = rounding.up(over(high - low, choice.axis))
    whole = all(x.whole for x in values)
    flush = 0.0 if whole else 4 * rounding.tiny(values[0].dtype)

    def moved(c: Difference, ds: Sequence[Difference]) -> Moves:
        largest = np.maximum.reduce(np.broadcast_arrays(*(d.each for d in ds)))
        each = np.where(c.each > 0, width, np.where(largest > 0, largest + flush, 0.0))
        if not c.is_zero or flush:
            return each, math.inf, math.inf
        l2 = rounding.norm2([d.l2 for d in ds])
        return each, float(rounding.up(sum(d.l1 for d in ds))), float(rounding.up(l2))

    apart = max(x.apart for x in values) + flush if choice.apart == 0 else math.inf
    return make(
        choice.shape, values[0].dtype, low, high, choice.axis,
        moved(choice.changed, [x.changed for x in values]),
        moved(choice.others, [x.others for x in values]), whole=whole, apart=apart,
    )  # fmt: skip


def convert(x: Abstract, new_dtype: np.dtype, **_: Any) -> Abstract:
    """Exact where the new dtype holds the number; else rounded, or truncated to an integer."""
    dtype, ends = np.dtype(new_dtype), (x.low, x.high)
    if dtype == x.dtype:
        return x
    if not x.is_finite:
        if x.is_known and dtype.kind == x.dtype.kind == "f" and dtype.itemsize >= 4:
            # A compiler may drop a change to float32 and back. Then nothing is rounded.
            rounded = x.low.astype(dtype).astype(float)
            ends = np.minimum(x.low, rounded), np.maximum(x.low, rounded)
            return dataclasses.replace(x, dtype=dtype, low=ends[0], high=ends[1])
        raise RefusalError("a number that is not finite changes its dtype")
    if rounding.NARROW.intersection((dtype, x.dtype)):
        return _narrow(x, dtype)
    if dtype == BOOL:
        return compare(equal, x, constant(np.zeros((), x.dtype)), negated=True)
    if dtype.kind in "iu":
        if x.whole:
            found = lipschitz((x,), ends, (1.0,), dtype=dtype, whole=True)
        else:
            found = steps(np.trunc, x, dtype=dtype)
        pending = found.pending.having(cut=not x.whole)
        return dataclasses.replace(found, tied=x.tied, pending=pending)
    if dtype.kind != "f":
        raise RefusalError(f"a change to {dtype} has no rule")
    held = x.whole and float(x.magnitude.max()) <= rounding.exact_integers(dtype)
    exact = held or (x.dtype.kind == "f" and dtype.itemsize >= x.dtype.itemsize)
    theta = 0.0 if exact else 2 * rounding.unit(dtype)
    found = lipschitz(
        (x,), ends, (1.0,), dtype=dtype, relative=theta, whole=x.whole and exact
    )  # fmt: skip
    return dataclasses.replace(found, tied=x.tied)  # Copies along a tied axis change alike.


def _narrow(x: Abstract, dtype: np.dtype) -> Abstract:
    """To or from 16 bits. A compiler may drop a change to 16 bits and back, and round nothing.

    If it does round, it takes the nearest number, and the error is at most u. Either way, an entry
    that does not move is rounded alike on both databases.
    """
    if not rounding.is_float(dtype):
        raise RefusalError(f"a change from {x.dtype} to {dtype} has no rule: go by float32")
    exact_in = min(rounding.exact_integers(y) for y in (x.dtype, dtype))
    held = x.whole and float(x.magnitude.max()) <= exact_in
    # A number of 16 bits may still have all digits of the number before, and lose them only here.
    theta = 0.0 if held else rounding.unit(dtype) * (1 + 2.0**-6)
    found = lipschitz((x,), (x.low, x.high), (1.0,), dtype=dtype, relative=theta, whole=held)
    return dataclasses.replace(found, tied=x.tied, pending=x.pending.having(coarse=True))
