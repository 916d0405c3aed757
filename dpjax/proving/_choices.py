"""Rules of comparisons, logic, selections, and changes of dtype."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import exact, lipschitz, steps
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, Difference, aligned, constant, make, over, stretched

BOOL = np.dtype(bool)
_SURE = {  # Two intervals to whether the answer is sure to be true, and sure to be false.
    "lt": lambda a, b, gap: (a.high + gap < b.low, a.low >= b.high + gap),
    "gt": lambda a, b, gap: (a.low > b.high + gap, a.high + gap <= b.low),
    "le": lambda a, b, gap: (a.high + gap <= b.low, a.low > b.high + gap),
    "ge": lambda a, b, gap: (a.low >= b.high + gap, a.high + gap < b.low),
    # The order of all floats, in which -0 lies below 0: `gap` leaves both answers open there.
    "lt_to": lambda a, b, gap: (a.high + gap < b.low, a.low >= b.high + gap),
    "eq": lambda a, b, gap: (
        (a.low == a.high) & (b.low == b.high) & (a.low == b.low),
        (a.high + gap < b.low) | (a.low > b.high + gap),
    ),
}
COMPARISONS = (*_SURE, "ne")


def compare(name: str, first: Abstract, second: Abstract) -> Abstract:
    """The answer may change where an input does; else it is one bit of what is compared.

    An array is never NaN, so it equals itself. Of answers `x == c_j` with x the same along an axis
    and distinct constants c_j, at most one is true: then the row of answers moves by 2 in l1.
    """
    if first is second and first.is_finite and not first.pending.coarse:
        return _everywhere(name in ("eq", "le", "ge"), first.shape)
    (a, b), shape, axis = aligned(first, second)
    gap = 2 * max(rounding.tiny(a.dtype), rounding.tiny(b.dtype))
    true, false = _SURE["eq" if name == "ne" else name](a, b, gap)
    if name == "ne":
        true, false = false, true
    low, high = np.where(true, 1.0, 0.0), np.where(false, 0.0, 1.0)
    l1 = l2 = math.inf
    if name == "eq" and (fibers := _one_true(a, b, axis)):
        l1, l2 = 2.0 * fibers, math.sqrt(2.0 * fibers) * (1 + 2.0**-40)

    # x * 0 does not move, but may be 0 for one database and -0 for its neighbor.
    zeros = (_least(a) <= gap) & (_least(b) <= gap) if name == "lt_to" else np.array(False)

    def answers(x: Difference, y: Difference) -> tuple[np.ndarray, float, float]:
        moved = np.where((x.each > 0) | (y.each > 0) | zeros, 1.0, 0.0)
        return moved, l1, l2

    changed, others = answers(a.changed, b.changed), answers(a.others, b.others)
    still = a.apart == b.apart == 0 and not zeros.any()
    apart = 0.0 if still else math.inf
    return make(shape, BOOL, low, high, axis, changed, others, whole=True, apart=apart)


def _least(a: Abstract) -> np.ndarray:
    """The least magnitude that a value may have."""
    return np.maximum(np.maximum(a.low, -a.high), 0.0)


def _everywhere(answer: bool, shape: Sequence[int]) -> Abstract:
    found = constant(np.array(answer))
    full = np.full((1,) * len(shape), float(answer))
    none = Difference(np.zeros_like(full), 0.0, 0.0)
    return dataclasses.replace(
        found, shape=tuple(shape), low=full, high=full, changed=none, others=none
    )


def _one_true(a: Abstract, b: Abstract, axis: int | None) -> int:
    """The number of groups of answers of which at most one is true; 0 where nothing is known."""
    for x, levels in ((a, b), (b, a)):
        # Other digits at another place of the axis could equal another level.
        if x.pending.coarse or not levels.is_known or not np.isfinite(levels.low).all():
            continue
        long = [k for k, size in enumerate(levels.low.shape) if size > 1]
        if len(long) == 1 and long[0] in x.tied and long[0] != axis:
            values = np.sort(levels.low.ravel())
            if np.diff(values).min() > 4 * rounding.tiny(levels.dtype) + x.apart * (not x.whole):
                sizes = [s for k, s in enumerate(x.shape) if k not in (axis, long[0])]
                return math.prod(sizes)
    return 0


def logic(name: str, *inputs: Abstract) -> Abstract:
    """and, or, xor, not of booleans."""
    if any(x.dtype != BOOL for x in inputs):
        raise RefusalError("logic of integers has no rule: use booleans")
    if name == "not":
        (x,) = inputs
        return exact((x,), x.shape, x.axis, BOOL, (1 - x.high, 1 - x.low), (1.0,), whole=True)
    (a, b), shape, axis = aligned(*inputs)
    ends = np.zeros((1,) * len(shape)), np.ones((1,) * len(shape))
    if name == "and":
        ends = np.minimum(a.low, b.low), np.minimum(a.high, b.high)
    elif name == "or":
        ends = np.maximum(a.low, b.low), np.maximum(a.high, b.high)
    return exact((a, b), shape, axis, BOOL, ends, (1.0, 1.0), whole=True)


def is_finite(x: Abstract) -> Abstract:
    """Arrays here are finite."""
    if not x.is_finite:
        raise RefusalError("is_finite of a constant that is not finite has no rule")
    return _everywhere(True, x.shape)


def select(which: Abstract, *cases: Abstract) -> Abstract:
    """Where `which` does not move, one case moves; where it does, the value moves in its range."""
    if which.is_known and (which.low == which.low.flat[0]).all():
        place = int(which.low.flat[0])
        if 0 <= place < len(cases):
            shape = np.broadcast_shapes(*(x.shape for x in (which, *cases)))
            return stretched(cases[place], shape)
    (choice, *values), shape, axis = aligned(which, *cases)
    low = np.minimum.reduce(np.broadcast_arrays(*(x.low for x in values)))
    high = np.maximum.reduce(np.broadcast_arrays(*(x.high for x in values)))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise RefusalError("a case may be infinite or NaN")
    width = rounding.up(over(high - low, axis))
    whole = all(x.whole for x in values)
    flush = 0.0 if whole else 4 * rounding.tiny(values[0].dtype)

    def moved(c: Difference, ds: Sequence[Difference]) -> tuple[np.ndarray, float, float]:
        largest = np.maximum.reduce(np.broadcast_arrays(*(d.each for d in ds)))
        each = np.where(c.each > 0, width, np.where(largest > 0, largest + flush, 0.0))
        if not c.is_zero or flush:
            return each, math.inf, math.inf
        l2 = rounding.norm2([d.l2 for d in ds])
        return each, float(rounding.up(sum(d.l1 for d in ds))), float(rounding.up(l2))

    changed = moved(choice.changed, [x.changed for x in values])
    others = moved(choice.others, [x.others for x in values])
    apart = max(x.apart for x in values) + flush if choice.apart == 0 else math.inf
    return make(shape, values[0].dtype, low, high, axis, changed, others, whole=whole, apart=apart)


def convert(x: Abstract, dtype: np.dtype) -> Abstract:
    """Exact where the new dtype holds the number; else rounded, or truncated to an integer."""
    if dtype == x.dtype:
        return x
    if not x.is_finite:
        if x.is_known and dtype.kind == x.dtype.kind == "f" and dtype.itemsize >= 4:
            # A compiler may drop a change to float32 and back, and then nothing is rounded.
            rounded = x.low.astype(dtype).astype(float)
            ends = np.minimum(x.low, rounded), np.maximum(x.low, rounded)
            return dataclasses.replace(x, dtype=dtype, low=ends[0], high=ends[1])
        raise RefusalError("a number that is not finite changes its dtype")
    ends = x.low, x.high
    if rounding.NARROW.intersection((dtype, x.dtype)):
        return _narrow(x, dtype)
    if dtype == BOOL:
        return compare("ne", x, constant(np.zeros((), x.dtype)))
    if dtype.kind in "iu":
        if x.whole:
            found = exact((x,), x.shape, x.axis, dtype, ends, (1.0,), whole=True)
        else:
            found = steps(x, np.trunc, dtype=dtype)
        pending = found.pending.having(cut=not x.whole)
        return dataclasses.replace(found, tied=x.tied, pending=pending)
    if dtype.kind != "f":
        raise RefusalError(f"a change to {dtype} has no rule")
    held = x.whole and float(x.magnitude.max()) <= rounding.exact_integers(dtype)
    widens = x.dtype.kind == "f" and dtype.itemsize >= x.dtype.itemsize
    theta = 0.0 if held or widens else 2 * rounding.unit(dtype)
    whole = x.whole and (held or widens)
    found = lipschitz((x,), x.shape, x.axis, dtype, ends, (1.0,), relative=theta, whole=whole)
    # All copies along a tied axis change alike.
    found = dataclasses.replace(found, tied=x.tied)
    return found


def _narrow(x: Abstract, dtype: np.dtype) -> Abstract:
    """To or from 16 bits: a compiler may drop a change to them and back, so rounding may be none.

    It rounds to the nearest number, so the error is at most u. Either way, an entry that does not
    move is rounded alike in both databases.
    """
    if not rounding.is_float(dtype):
        raise RefusalError(f"a change from {x.dtype} to {dtype} has no rule: go by float32")
    exact_in = min(rounding.exact_integers(y) for y in (x.dtype, dtype))
    held = x.whole and float(x.magnitude.max()) <= exact_in
    # What 16 bits hold may still have all digits of before, which then are rounded here.
    theta, ends = 0.0 if held else rounding.unit(dtype) * (1 + 2.0**-6), (x.low, x.high)
    found = lipschitz((x,), x.shape, x.axis, dtype, ends, (1.0,), relative=theta, whole=held)
    return dataclasses.replace(found, tied=x.tied, pending=x.pending.having(coarse=True))
