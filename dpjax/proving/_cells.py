"""Ranges of elementwise functions of one array, on small cells of the array's range.

The rule of an operation bounds its result over the whole ranges of its operands. This loses the
information which operands are large at the same time, for example in p log(p), or in where(x > c, a
/ x, a). So the walk cuts the range of an array, the *base*, into cells. For an array x that
elementwise operations computed from the base, it stores one interval for each cell, with this
property:

    If an entry of the base is in a cell, on any database, then every use of the entry of x at the
    same index, on the same database, is in the interval of this cell.

The rule of an operation maps intervals of its operands to an interval of its result, cell by cell.
For an operand without cells, its whole range is used. So the property is true for all arrays by
induction. The interval of a cell is marked as unknown if the result may be infinite or NaN there. A
`select` may later exclude this cell.

Suppose that x depends on the base alone, and that an entry of the base changes by at most d. Then
the old and the new entry of x are in the intervals of two cells that are at most d apart. This
bounds how much the entry of x changes.

Sums of a function of counts, such as an entropy or the number of groups, have a lemma. If a record
is replaced, one count may fall from b to b - 1, and another may rise from c to c + 1. Let d(c) =
f(c + 1) - f(c). The sum of f over all counts changes by d(c) - d(b - 1), if a count c rises and a
count b falls. So it changes by at most max d - min d, and if only one of the two counts changes, by
at most max |d|. A rule for single operations adds up both changes as if they had the same sign.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._rows import aligned
from dpjax.proving._value import Abstract, Difference, RefusalError, anywhere, changing_with, meet

_FLOATS, _MOST_INTEGERS, _MOST_BASES = 256, 1024, 2


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """An array whose range is cut into cells of equal width.

    Attributes:
        value: the abstract value of the array.
        width: the width of a cell; 0 if each cell is a single integer.
        gap: the distance between the lower endpoints of two successive cells.
    """

    value: Abstract
    width: float
    gap: float

    def reach(self, d: np.ndarray) -> np.ndarray:
        """Bounds the difference of the cell indices of two entries at a distance of at most `d`."""
        if not self.width:
            return np.floor(d * (1 + 2.0**-30))
        return np.ceil(d / self.gap * (1 + 2.0**-30)) + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """Bounds on an array: one interval for each cell of a base array.

    If an entry of the base is in a cell, the array's entry at the same index is in the interval of
    this cell.

    Attributes:
        base: the array whose range is cut into cells.
        low: the lower endpoint of each interval.
        high: the upper endpoint of each interval.
        good: whether each interval is known.
        alone: whether the array depends on the base alone.
    """

    base: Base
    low: np.ndarray
    high: np.ndarray
    good: np.ndarray
    alone: bool

    def farthest(self, d: np.ndarray) -> np.ndarray:
        """Bounds the change of an entry if the same entry of `base` changes by at most `d`."""
        count = len(self.low)
        reach = np.minimum(self.base.reach(d), count)
        found = np.zeros(np.shape(d))
        for size in np.unique(reach):
            top = _near(self.high, int(size), np.maximum)
            bottom = _near(self.low, int(size), np.minimum)
            most = max(float((top - self.low).max()), float((self.high - bottom).max()))
            found = np.where(reach == size, float(rounding.up(most)), found)
        return np.where(np.asarray(d) > 0, found, 0.0)

    def over(self, x: Abstract) -> Abstract:
        """Returns `x` with a range and bounds on its change that are tightened by the intervals."""
        base = self.base.value
        same = base.axis == x.axis and len(base.shape) == len(x.shape)
        ends = float(self.low.min()), float(self.high.max())
        if not (self.alone and same):
            return meet(x, *ends)
        ds = base.changed, base.others
        changed, others = ((self.farthest(d.each), math.inf, math.inf) for d in ds)
        # Suppose that the program later adds a number to a sum of floats. A compiler may start the
        # sum with this number, and round it differently (see `counted`). Then an entry of the array
        # may change, although the entry of the base at the same index does not change.
        exact = x.shape == base.shape and (base.whole or not base.pending.starts)
        counts = [d.count if exact else math.inf for d in ds]
        return meet(x, *ends, changed, others, counts=counts)


def _near(array: np.ndarray, size: int, pick: np.ufunc) -> np.ndarray:
    """Returns, for each entry, the extremum of the entries that are at most `size` indices away."""
    found, width, window = np.pad(array, size, mode="edge"), 1, 2 * size + 1
    while 2 * width <= window:
        found, width = pick(found[:-width], found[width:]), 2 * width
    rest = window - width
    return pick(found[: len(found) - rest], found[rest:])


Held = Mapping[Base, Cells]


def separated(x: Abstract) -> Held:
    """Cuts the range of an array into cells. Returns no cells if the range cannot be cut.

    If a compiler computes an entry twice, the two numbers may differ by `x.apart`. So each cell is
    widened by `x.apart`.
    """
    low, high = float(x.low.min()), float(x.high.max())
    if x.is_public or x.nan or x.pending.coarse or not x.is_finite or low >= high:
        return {}
    count = int(high - low) + 1
    if x.whole and not x.apart and count <= _MOST_INTEGERS and max(-low, high) < 2.0**30:
        base, lows = Base(x, 0.0, 1.0), low + np.arange(count)
        return {base: Cells(base, lows, lows, np.ones(count, bool), alone=True)}
    # The endpoints of cells are rounded, so neighboring cells must overlap slightly.
    gap = (high - low) / _FLOATS
    slack = 2.0**-40 * max(-low, high) + 4 * rounding.tiny(x.dtype) + x.apart
    if x.dtype.kind != "f" or slack > gap / 16:
        return {}
    edges = np.linspace(low, high, _FLOATS + 1)
    lows, highs = np.maximum(edges[:-1] - slack, low), np.minimum(edges[1:] + slack, high)
    base = Base(x, gap, gap * (1 - 2.0**-20))
    return {base: Cells(base, lows, highs, np.ones(_FLOATS, bool), alone=True)}


def of_result(
    rule: Callable[..., Abstract], operands: Sequence[tuple[Abstract, Held]], *, chooses: bool
) -> Held:
    """Returns the cells of the result of an elementwise operation.

    Args:
        rule: the rule of the operation, with its parameters.
        operands: the abstract value and the cells of each operand.
        chooses: whether the operation is a `select`, whose result does not depend on the cases that
            it does not choose.
    """
    made = dict[Base, Cells]()
    for base in dict.fromkeys(base for _, held in operands for base in held):
        if any(base not in held and x.refusal for x, held in operands):
            continue
        cells = [(x, held.get(base) or _one_cell(base, x)) for x, held in operands]
        found = _by_cell(rule, cells, chooses)
        if found.good.any():
            made[base] = found
    # At most `_MOST_BASES` bases are kept. Bases that alone determine the array come first, because
    # their cells also bound how much the array changes.
    kept = sorted(made.items(), key=lambda pair: not pair[1].alone)
    return dict(kept[:_MOST_BASES])


def _one_cell(base: Base, x: Abstract) -> Cells:
    """Returns the range of an array without cells, as one interval that is valid for all cells."""
    low, high = x.low.min().reshape(1), x.high.max().reshape(1)
    return Cells(base, low, high, np.array([x.is_finite]), x.is_public)


def _by_cell(
    rule: Callable[..., Abstract], operands: Sequence[tuple[Abstract, Cells]], chooses: bool
) -> Cells:
    """Applies a rule to each cell of a base array, and returns one interval of the result per cell.

    All given `Cells` are those of the same base array.
    """
    xs, cells = zip(*operands, strict=True)
    count = max(len(one.low) for one in cells)
    lows = [np.array(np.broadcast_to(one.low, count)) for one in cells]
    highs = [np.array(np.broadcast_to(one.high, count)) for one in cells]
    goods = [np.array(np.broadcast_to(one.good, count)) for one in cells]
    for k in range(1, len(operands) if chooses else 0):
        # `left` marks the cells in which the interval of case k is unknown, but case k is certainly
        # not chosen. There, the interval does not matter, so it becomes [0, 0]. A known interval
        # stays as it is, because the same array may also be another operand.
        left = goods[0] & ~goods[k] & ((lows[0] > k - 1) | (highs[0] < k - 1))
        goods[k] |= left
        lows[k][left] = highs[k][left] = 0.0
    good = np.logical_and.reduce(goods)
    low, high = np.full(count, -math.inf), np.full(count, math.inf)

    def fill(places: np.ndarray) -> None:
        """Applies the rule to all given cells at once.

        If the rule refuses them, the function tries each half of the cells.
        """
        # If an array occurs twice among the operands, the rule must get the same object twice.
        # Rules compare operands by `is` to recognize x * x.
        ends = zip(xs, lows, highs, strict=True)
        arrays = {x: _array(a[places], b[places], x) for x, a, b in ends}
        try:
            with np.errstate(all="ignore"):
                found = rule(*map(arrays.get, xs))
        except RefusalError:
            if len(places) == 1:
                good[places] = False
                return
            fill(places[: len(places) // 2])
            fill(places[len(places) // 2 :])
            return
        low[places], high[places] = np.broadcast_to(found.low, len(places)), found.high

    if good.any():
        fill(np.flatnonzero(good))
    good &= np.isfinite(low) & np.isfinite(high)
    return Cells(cells[0].base, low, high, good, all(one.alone for one in cells))


def _array(low: np.ndarray, high: np.ndarray, like: Abstract) -> Abstract:
    """Returns an abstract value with one entry per cell, in the range [low, high].

    Its dtype and pending operations are those of `like`.

    The array is public only if `like` is public, because rules treat public arrays differently.
    """
    one = 0.0 if like.is_public else 1.0
    each = Difference(np.full(1, one), one * len(low), one * math.sqrt(len(low)))
    return dataclasses.replace(
        like, shape=low.shape, low=low, high=high, axis=None, changed=each, others=each,
        tied=frozenset(), l1_of_row=math.inf, l2_of_row=math.inf, source=None, replaced=math.inf,
        refusal=None,
    )  # fmt: skip


def stand_in(operands: Sequence[Abstract], held: Held, dtype: np.dtype) -> Abstract:
    """Returns an abstract value in place of a result that the rule refuses.

    `held` has one interval of the result for each cell. The abstract value covers only the known
    intervals, so it is valid only if the intervals of all cells are known. An entry of the result
    may change wherever an entry of an operand changes.
    """
    xs = aligned(*operands)
    # `held` may contain the cells of several bases. If the intervals of all cells of one base are
    # known, they contain every possible result. Then bases that have a cell with an unknown
    # interval are ignored.
    whole = [x for x in held.values() if x.good.all()] or list(held.values())
    ends = [(x.low[x.good].min(), x.high[x.good].max()) for x in whole]
    low, high = max(a for a, _ in ends), min(b for _, b in ends)
    if low > high:
        low, high = min(a for a, _ in ends), max(b for _, b in ends)
    ones = (1,) * len(xs[0].shape)
    return changing_with(xs, np.full(ones, low), np.full(ones, high), anywhere, dtype=dtype)


def transfer(
    name: str, params: Mapping[str, Any], operands: Sequence[Abstract], found: Abstract
) -> bool | None:
    """Whether each record is known to be counted in one entry of `found`.

    In this case, a record that leaves one count joins another count. The result is None if `found`
    is not known to consist of counts.
    """
    if not found.whole or found.axis is not None or found.apart:
        return None
    if name == "reduce_sum":
        (x,) = operands
        one = x.whole and x.low.min() >= 0 and x.l1_of_row < 2 and x.others.is_zero
        return False if one and tuple(params["axes"]) == (x.axis,) else None
    if name not in ("scatter", "scatter-add", "scatter_add"):
        return None
    start, places, updates = operands
    added = name != "scatter"
    known = start.is_known and updates.is_known and len(updates.shape) == 1
    # Each record must have one place. `scatter-add` must add 1 at this place, so that an entry of
    # the result counts the records with its place. `scatter` must set a number that is 1 more than
    # every entry of `start`, so that an entry shows whether any record has its place.
    known = known and places.shape == (*updates.shape, len(found.shape))
    by = updates.low if added else np.subtract.outer(updates.low, start.low)
    if not known or (by != 1).any():
        return None
    highest = np.broadcast_to(places.high, (*places.high.shape[:-1], places.shape[-1])).max(axis=0)
    inside = float(places.low.min()) >= 0 and bool((highest < np.array(found.shape)).all())
    return added and inside


def sum_of_counts(
    x: Abstract, found: Abstract, held: Held, transfers: Mapping[Abstract, bool]
) -> Abstract:
    """Tightens `found`, the value of the sum of x, where x is a function of counts.

    For each array of counts, `transfers` says whether every record is known to be counted in one of
    its entries. If so, one count falls only if another one rises.

    The lemma at the top of this file bounds how much the sum changes.
    """
    if found.shape or found.axis is not None or found.off is None:
        return found
    relative, absolute = found.off
    sizes = float(np.broadcast_to(x.magnitude, x.shape).sum())
    error = relative * sizes + absolute + 2.0**-40 * sizes * (not found.whole)
    for base, cells in held.items():
        both = transfers.get(base.value)
        if both is None or base.width or base.value.shape != x.shape or len(cells.low) < 2:
            continue
        if not cells.alone or not cells.good.all():
            continue
        most = float((cells.high[1:] - cells.low[:-1]).max())
        least = float((cells.low[1:] - cells.high[:-1]).min())
        moved = most - least if both else max(most - least, most, -least)
        bound = float(rounding.up(moved * (1 + 2.0**-40) + 2 * error))
        if math.isfinite(bound):
            moves = np.asarray(bound), bound, bound
            found = meet(found, changed=moves, others=moves)
    return found
