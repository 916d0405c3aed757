"""Rules of slots, for proofs under add-or-remove-one.

Records stand in a public number of slots. Move them to other slots. An array *follows* them if it
becomes the same array with its rows moved alike, up to rounding. An array *stays* if it does not
change, up to rounding. A program that does anything else may look at slots, and is refused.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax.proving import _choices as choices
from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import same_rows
from dpjax.proving._value import Abstract, RefusalError, aligned, difference, over

_REMEDY = "sum over the records first, or prove it under replace-one"


@dataclasses.dataclass(frozen=True)
class Slots:
    """How an array depends on slots.

    Attributes:
        axis: along which it follows the records; None if it stays.
        alike: the axes along which an array that stays has copies of one number.
    """

    axis: int | None = None
    alike: frozenset[int] = frozenset()

    def moved(self, place: Callable[[int], int | None]) -> "Slots":
        """After a rule that moves axes; it takes one to None where nothing is known."""
        axis = None if self.axis is None else place(self.axis)
        if axis is None and self.axis is not None:
            raise RefusalError(f"it takes the slots of records apart: {_REMEDY}")
        return Slots(axis, frozenset(k for old in self.alike if (k := place(old)) is not None))

    def without(self, axes: Sequence[int]) -> "Slots":
        """After a rule that drops axes."""
        return self.moved(lambda k: None if k in axes else k - sum(a < k for a in axes))


@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """What the walk under add-or-remove-one knows about one array.

    Attributes:
        value: its abstract value, if a record leaves its slot empty. Its `apart` also bounds how
            far rows in other slots are from these.
        empty: an array whose range holds the row of an empty slot.
        slots: how it depends on slots.
    """

    value: Abstract
    empty: Abstract
    slots: Slots

    def is_alike(self, axis: int) -> bool:
        """Whether an array that stays holds one number along an axis."""
        x = self.value
        if not x.shape or axis in self.slots.alike or x.shape[axis] == 1:
            return True
        return x.is_known and bool((x.low == x.low.take([0], axis)).all())

    def is_along(self, axis: int) -> bool:
        """Whether an axis is the axis of the records, or one of copies."""
        return self.slots.axis == axis if self.slots.axis is not None else self.is_alike(axis)

    def is_by_record(self) -> bool:
        """Whether each row depends on one record alone."""
        return self.value.axis == self.slots.axis and self.value.others.is_zero


class Applied(NamedTuple):
    """An operation with its operands, and its result by the rule for values."""

    parameters: Any
    operands: Sequence[Tracked]
    found: Abstract

    @property
    def first(self) -> Tracked:
        return self.operands[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first operand."""
        return self.first.value.shape


Rule = Callable[[Applied], Slots]


def placed(rule: Rule | None, applied: Applied) -> Slots:
    """How the result of an operation depends on slots.

    Raises:
        RefusalError: if it may look at them.
    """
    if rule is not None:
        return rule(applied)
    if all(x.value.is_known and x.slots.axis is None for x in applied.operands):
        return Slots()
    raise RefusalError(f"it may look at the slots of records: {_REMEDY}")


def at_one_place(op: Applied) -> Slots:
    """An entry of the result comes from the entries at its place."""
    axes = {x.slots.axis for x in op.operands} - {None}
    if len(axes) > 1:
        raise RefusalError(f"it meets pairs of records: {_REMEDY}")
    if not axes:
        places = range(len(op.found.shape))
        return Slots(None, frozenset(k for k in places if all(x.is_alike(k) for x in op.operands)))
    (axis,) = axes
    assert axis is not None
    if not all(x.is_along(axis) for x in op.operands):
        raise RefusalError(f"a number that is not a record's depends on the slot: {_REMEDY}")
    sizes = [x.value.shape[axis] for x in op.operands if x.slots.axis == axis]
    if any(size != op.found.shape[axis] for size in sizes):
        raise RefusalError(f"one slot becomes several: {_REMEDY}")
    return Slots(axis)


def compared(op: Applied) -> Slots:
    """Two uses of a rounded number may differ, so a comparison of them may look at slots."""
    values = [x.value for x in op.operands]
    if len(values) == 2 and values[0] is values[1] and values[0].apart:
        raise RefusalError("a rounded number is compared with itself: leave it out")
    return at_one_place(op)


def broadcast(op: Applied) -> Slots:
    places, old = op.parameters["broadcast_dimensions"], op.first.slots
    if old.axis is not None and op.found.shape[places[old.axis]] != op.shape[old.axis]:
        raise RefusalError(f"one slot becomes several: {_REMEDY}")
    new = old.moved(lambda k: places[k])
    if new.axis is not None:
        return new
    kept = {places[k] for k in range(len(op.shape)) if not op.first.is_alike(k)}
    return Slots(None, frozenset(range(len(op.found.shape))) - kept)


def reshaped(op: Applied) -> Slots:
    old, after = op.first.slots, op.found.shape
    if old.axis is not None:
        return Slots(same_rows(op.shape, old.axis, after))
    return Slots(None, frozenset(range(len(after)) if len(old.alike) == len(op.shape) else ()))


def squeezed(op: Applied) -> Slots:
    return op.first.slots.without([k % len(op.shape) for k in op.parameters["dimensions"]])


def reduced(op: Applied) -> Slots:
    """Sums and extrema over the records do not depend on their order."""
    axes = [k % len(op.shape) for k in op.parameters["axes"]]
    return Slots() if op.first.slots.axis in axes else op.first.slots.without(axes)


def ordered(op: Applied) -> Slots:
    """Sorted records do not depend on the order before."""
    axis = op.first.slots.axis
    return Slots() if axis == op.parameters["dimension"] else Slots(axis)


def transposed(op: Applied) -> Slots:
    return op.first.slots.moved(list(op.parameters["permutation"]).index)


def _kept_along(op: Applied, axes: Sequence[int]) -> Slots:
    """For operations that mix entries along some axes."""
    if any(x.slots.axis in axes for x in op.operands if x.slots.axis is not None):
        raise RefusalError(f"it depends on the order of records: {_REMEDY}")
    return Slots(op.first.slots.axis)


def reversed_(op: Applied) -> Slots:
    return _kept_along(op, op.parameters["dimensions"])


def accumulated(op: Applied) -> Slots:
    return _kept_along(op, [op.parameters["axis"]])


def sliced(op: Applied) -> Slots:
    axis = op.first.slots.axis
    if axis is None:
        return Slots()
    steps = op.parameters["strides"] or [1] * len(op.shape)
    if op.found.shape[axis] != op.shape[axis] or steps[axis] != 1:
        raise RefusalError(f"it takes records of some slots: {_REMEDY}")
    return Slots(axis)


def joined(op: Applied) -> Slots:
    axes = [x.slots.axis for x in op.operands]
    if op.parameters["dimension"] in axes:
        raise RefusalError(f"it puts records behind others: {_REMEDY}")
    return at_one_place(op) if any(axis is not None for axis in axes) else Slots()


def stacked(op: Applied) -> Slots:
    new = op.parameters["axis"] % len(op.found.shape)
    one = at_one_place(op._replace(found=op.first.value))
    return Slots(one.axis).moved(lambda k: k + (k >= new))


def multiplied(op: Applied) -> Slots:
    """Sums over the records, products of each record with public numbers, or within records."""
    contracted, batch = op.parameters["dimension_numbers"]
    axes = [x.slots.axis for x in op.operands]
    if axes == [None, None]:
        return Slots()
    for kind in (contracted, batch):
        for number, places in enumerate(zip(*kind, strict=True)):
            if any(a == k for a, k in zip(axes, places, strict=True)):
                if not all(x.is_along(k) for x, k in zip(op.operands, places, strict=True)):
                    raise RefusalError(f"a public array depends on the slot: {_REMEDY}")
                return Slots() if kind is contracted else Slots(number)
    if None not in axes:
        raise RefusalError(f"it meets pairs of records: {_REMEDY}")
    side, axis = (0, axes[0]) if axes[1] is None else (1, axes[1])
    assert axis is not None
    free = [
        [k for k in range(len(x.value.shape)) if k not in (*contracted[i], *batch[i])]
        for i, x in enumerate(op.operands)
    ]
    before = len(batch[0]) + (len(free[0]) if side else 0)
    return Slots(before + free[side].index(axis))


def gathered(op: Applied) -> Slots:
    """Rows of a public table at places of records, or one public place of an array."""
    table, places = op.operands
    if places.slots.axis is not None:
        if table.slots.axis is not None:
            raise RefusalError(f"it looks records up: {_REMEDY}")
        return Slots(places.slots.axis)  # The rule of `gather` puts the axes of places first.
    if table.slots.axis is None:
        return Slots()
    if not (places.value.is_known and places.value.shape == (1,)):
        raise RefusalError(f"it looks records up: {_REMEDY}")
    axes = tuple(op.parameters["dimension_numbers"].start_index_map)
    if table.slots.axis in axes:
        raise RefusalError(f"it takes the record of one slot: {_REMEDY}")
    return table.slots.without(axes)


def scattered(op: Applied) -> Slots:
    """Sums by place do not depend on the order in which numbers are added."""
    start, *added = op.operands
    if start.slots.axis is not None:
        raise RefusalError(f"it adds to numbers of slots: {_REMEDY}")
    by_record = any(x.slots.axis is not None for x in added)
    if by_record and not all(x.is_along(0) for x in added):
        raise RefusalError(f"a place or a number depends on the slot: {_REMEDY}")
    return Slots()


def numbered(op: Applied) -> Slots:
    return Slots(None, frozenset(range(len(op.found.shape))) - {op.parameters["dimension"]})


# Tighter values: an empty row moves less than any row, and rows in other slots are equal to these.
Tightening = Callable[[Applied], Abstract]


def row_norms(x: Abstract, axis: int) -> tuple[float, float]:
    """The largest l1 and l2 norm of a row. Of integers, the l1 norm is at most the square in l2."""
    l2 = x.l2_of_row if x.axis == axis else math.inf
    largest = difference(over(x.magnitude, axis), x.shape, axis, l2=l2)
    square = float(rounding.up(largest.l2**2 * (1 + 2.0**-30)))
    return min(largest.l1, square) if x.whole else largest.l1, largest.l2


def _tightened(found: Abstract, each: np.ndarray, l1: float, l2: float, slip: float) -> Abstract:
    """A value without rows, with a second bound on its difference, plus `slip` in each entry."""
    if found.axis is not None:
        return found
    size, old = math.prod(found.shape), found.others
    each = rounding.up(each + slip).reshape(each.shape or (1,) * len(found.shape))
    new = difference(
        np.minimum(*np.broadcast_arrays(old.each, each)), found.shape, None,
        l1=min(old.l1, float(rounding.up(l1 + slip * size))),
        l2=min(old.l2, float(rounding.up(l2 + slip * math.sqrt(size)))), whole=found.whole,
    )  # fmt: skip
    return dataclasses.replace(found, changed=new, others=new)


def tight_lookup(op: Applied) -> Abstract:
    """Equal places give equal rows of a public table."""
    table, places = (x.value for x in op.operands)
    if not table.is_known or places.apart:
        return op.found
    flush = 0.0 if op.found.whole else 4 * rounding.tiny(op.found.dtype)
    return dataclasses.replace(op.found, apart=min(op.found.apart, flush))


def tight_sums(op: Applied) -> Abstract:
    """Sums by place: u is taken away, and the row of an empty slot is added, perhaps elsewhere."""
    start, places, added = op.operands
    found, u, empty = op.found, added.value, added.empty
    n, slip = u.shape[0], 0.0
    if not found.whole:
        largest = float(start.value.magnitude.max()) + n * float(u.magnitude.max())
        flush = 4 * rounding.tiny(found.dtype) * (n + 1)
        slip = 2 * float(rounding.up(rounding.sum_units(n + 1, found.dtype) * largest + flush))
    if not places.value.apart:
        apart = float(rounding.up(n * u.apart + slip))
        found = dataclasses.replace(found, apart=min(found.apart, apart))
    by_record = u.axis == 0 and u.others.is_zero and places.value.others.is_zero
    if added.slots.axis != 0 or not by_record:
        return found
    own, none = row_norms(u, 0), row_norms(empty, 0)
    each = np.maximum(u.changed.each, np.maximum(over(u.magnitude, 0), over(empty.magnitude, 0)))
    l2 = max(u.changed.l2, rounding.norm2([own[1], none[1]]))
    return _tightened(found, each, own[0] + none[0], l2, slip)


def tight_products(op: Applied) -> Abstract:
    """A sum of a b over records, rows of both, moves by at most |a| |b| + |a'| |b'|."""
    (ca, cb), _ = op.parameters["dimension_numbers"]
    a, b = op.operands
    if not (len(ca) == 1 and (a.slots.axis, b.slots.axis) == (ca[0], cb[0])):
        return op.found
    if not (a.is_by_record() and b.is_by_record()):
        return op.found
    own, empty = (
        [p * q for p, q in zip(row_norms(x, ca[0]), row_norms(y, cb[0]), strict=True)]
        for x, y in ((a.value, b.value), (a.empty, b.empty))
    )
    l1, l2 = own[0] + empty[0], own[1] + empty[1]
    return _tightened(op.found, np.asarray(l2), l1, l2, op.found.apart)


def _of_row(norm: Callable[[list[Abstract]], float]) -> Tightening:
    """A bound on the l2 norm of a row of integers, many of which are 0."""

    def rule(op: Applied) -> Abstract:
        found = op.found
        if found.axis is None or not found.whole:
            return found
        # Operations repeat operands along axes of length 1.
        full = aligned(*(x.value for x in op.operands))
        l2 = norm(full) if full[0].axis == found.axis else math.inf
        return dataclasses.replace(found, l2_of_row=min(found.l2_of_row, l2))

    return rule


def _norm_of_product(full: list[Abstract]) -> float:
    pairs = (full, full[::-1])
    tops = [(x.l2_of_row, float(y.magnitude.max())) for x, y in pairs]
    return min(float(rounding.up(row * top)) if top else 0.0 for row, top in tops)


def _norm_of_chosen(full: list[Abstract]) -> float:
    rows = [0.0 if x.is_known and not x.magnitude.any() else x.l2_of_row for x in full[1:]]
    return float(rounding.up(rounding.norm2(rows)))


tight_equal = _of_row(lambda full: float(rounding.up(choices.one_true(*full) ** 0.5)) or math.inf)
tight_and = _of_row(lambda full: min(x.l2_of_row for x in full))
tight_cast = _of_row(lambda full: full[0].l2_of_row if full[0].whole else math.inf)
tight_product = _of_row(_norm_of_product)
tight_choice = _of_row(_norm_of_chosen)
