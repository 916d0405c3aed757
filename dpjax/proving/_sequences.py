"""Rules of cumulative sums, and of arrays that are put together, cut or turned around."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import broadcast, check_inside, check_places, cut, join
from dpjax.proving._pending import flattened
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import RefusalError
from dpjax.proving._surrounded import check_cut, check_surrounded
from dpjax.proving._value import Abstract, Difference, as_dense, make

Moved = tuple[np.ndarray, float, float]
_MOST_COPIES = 64


def _along(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The array with all places of one axis."""
    shape = list(array.shape)
    shape[axis] = size
    return np.broadcast_to(array, shape)


def cumulative_sum(x: Abstract, axis: int, *, reverse: bool) -> Abstract:
    """Each result is a sum of at most N terms, and each term is in at most N results.

    So a change d of one record moves N results by d: N times in l1 and sqrt(N) times in l2. Within
    a row the matrix of zeros and ones has a norm of at most N in l1 and l2.
    """
    check_surrounded(x, [axis], 0.0)
    check_cut(x)
    count = x.shape[axis]
    order = slice(None, None, -1) if reverse else slice(None)
    turn = tuple(order if k == axis else slice(None) for k in range(len(x.shape)))

    def added(array: np.ndarray) -> np.ndarray:
        return np.cumsum(_along(array, axis, count)[turn], axis)[turn]

    terms, weight = flattened(x)
    sizes = np.maximum(added(x.magnitude), count * weight) * (1 + (count + 100) * 2.0**-52)
    whole = x.whole and (
        x.dtype.kind != "f" or float(sizes.max()) <= rounding.exact_integers(x.dtype)
    )
    gamma = 0.0 if whole else rounding.sum_units(count * terms, x.dtype)
    if not math.isfinite(gamma):
        raise RefusalError(f"a sum of {count} numbers in {x.dtype} may lose all digits")
    flush = 0.0 if whole else 4 * rounding.tiny(x.dtype) * (count + 1)
    error = rounding.up(
        gamma * sizes + flush + (0.0 if whole else (count + 100) * 2.0**-52 * sizes)
    )
    by_record = x.axis == axis
    rows = None if by_record else x.axis
    slip = 2 * (error if rows is None else error.max(axis=rows, keepdims=True))
    places = math.prod(s for k, s in enumerate(x.shape) if k != rows) / max(1, slip.size)

    def moved(each: np.ndarray, l1: float, l2: float, gain: float) -> Moved:
        slips = np.where(each > 0, slip, 0.0)
        return (
            rounding.up(np.minimum(each, l1) + slips),  # A sum of moves is at most their l1 norm.
            float(rounding.up(l1 * count + float(slips.sum()) * places)),
            float(rounding.up(l2 * gain + rounding.norm2(slips, places))),
        )

    def in_row(d: Difference) -> Moved:
        return moved(rounding.up(added(d.each) * (1 + (count + 100) * 2.0**-52)), d.l1, d.l2, count)

    if by_record:
        c, o, rest = x.changed, x.others, x.n - 1
        l1, l2 = c.l1 + rest * o.l1, c.l2 + rest * o.l2
        changed = others = moved(c.each + rest * o.each, l1, l2, math.sqrt(count))
    else:
        changed, others = in_row(x.changed), in_row(x.others)
    low, high = rounding.widened(added(x.low), added(x.high), error)
    pending = Pending(terms=count * terms, weight=float(sizes.max()))
    apart = count * x.apart + 2 * float(error.max())
    return make(
        x.shape, x.dtype, low, high, rows, changed, others, whole=whole, pending=pending,
        apart=float(rounding.up(apart)),
    )  # fmt: skip


def reverse(x: Abstract, axes: Sequence[int]) -> Abstract:
    """Entries move. A reversed row has another number, so nothing is known by row then."""
    x = as_dense(x) if x.axis in axes else x
    turn = tuple(slice(None, None, -1) if k in axes else slice(None) for k in range(len(x.shape)))
    changed, others = ((d.each[turn], d.l1, d.l2) for d in (x.changed, x.others))
    return make(
        x.shape, x.dtype, x.low[turn], x.high[turn], x.axis, changed, others, whole=x.whole,
        tied=x.tied, l2_of_row=x.l2_of_row, source=x.origin, apart=x.apart,
    )  # fmt: skip


def pad(x: Abstract, value: Abstract, config: Sequence[tuple[int, int, int]]) -> Abstract:
    """Public numbers around and between the entries. Rows of them do not move."""
    if not value.is_known or not value.is_finite:
        raise RefusalError("padding by a number that is not public and finite has no rule")
    if any(start < 0 or end < 0 for start, end, _ in config):
        raise RefusalError("negative padding has no rule: slice")
    number = float(value.low)
    shape = tuple(
        a + b + s + max(0, s - 1) * inner for s, (a, b, inner) in zip(x.shape, config, strict=True)
    )
    if x.axis is not None and (config[x.axis][0] or config[x.axis][2]):
        x = as_dense(x)  # Rows get other numbers.
    padded = [k for k, size in enumerate(shape) if size != x.shape[k]]

    def filled(array: np.ndarray, fill: float, axes: Sequence[int]) -> np.ndarray:
        for k in axes:
            array = _along(array, k, x.shape[k])
            sizes = [shape[k] if j == k else s for j, s in enumerate(array.shape)]
            start, _, inner = config[k]
            where = tuple(
                slice(start, start + (x.shape[k] - 1) * (inner + 1) + 1, inner + 1)
                if j == k
                else slice(None)
                for j in range(len(sizes))
            )
            made = np.full(sizes, fill)
            made[where] = array
            array = made
        return array

    one = any(s == 1 and a + b > 0 for s, (a, b, _) in zip(x.shape, config, strict=True))
    within = [k for k in padded if k != x.axis]
    changed, others = ((filled(d.each, 0.0, within), d.l1, d.l2) for d in (x.changed, x.others))
    return make(
        shape, x.dtype, filled(x.low, number, padded), filled(x.high, number, padded), x.axis,
        changed, others, whole=x.whole and number.is_integer(),
        l2_of_row=x.l2_of_row if number == 0 else math.inf, pending=Pending(padded=one),
        apart=x.apart,
    )  # fmt: skip


def stack(xs: Sequence[Abstract], axis: int) -> Abstract:
    """A new axis, along which the arrays are joined."""

    def widened(x: Abstract) -> Abstract:
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        return broadcast(x, shape, [k for k in range(len(shape)) if k != axis])

    return join([widened(x) for x in xs], axis)


def split(x: Abstract, sizes: Sequence[int], axis: int) -> list[Abstract]:
    """Parts of the entries, one after the other."""
    ends = np.cumsum([0, *map(int, sizes)])
    return [
        cut(
            x,
            [int(start) if k == axis else 0 for k in range(len(x.shape))],
            [int(end) if k == axis else size for k, size in enumerate(x.shape)],
            [1] * len(x.shape),
        )
        for start, end in itertools.pairwise(ends)
    ]


def tile(x: Abstract, copies: Sequence[int]) -> Abstract:
    """Copies of an array along its axes."""
    if len(copies) != len(x.shape) or not 1 <= math.prod(copies) <= _MOST_COPIES:
        raise RefusalError(f"more than {_MOST_COPIES} copies of an array have no rule")
    for axis, count in enumerate(copies):
        x = join([x] * count, axis) if count > 1 else x
    return x


def dynamic_slice(x: Abstract, starts: Sequence[Abstract], sizes: Sequence[int]) -> Abstract:
    """A part at a public place."""
    if not all(start.is_known for start in starts):
        raise RefusalError("a slice at a place that is not public has no rule")
    firsts = [int(start.low) for start in starts]
    for start, first, whole, size in zip(starts, firsts, x.shape, sizes, strict=True):
        check_places(start, whole)
        check_inside(first, first, whole - size + 1)
    ends = [first + size for first, size in zip(firsts, sizes, strict=True)]
    return cut(x, firsts, ends, [1] * len(x.shape))
