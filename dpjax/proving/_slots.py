"""Rules about slots, for proofs under add-or-remove-one.

A database has a public number of slots, and each slot contains a record or is empty. Suppose that
the records are permuted among the slots. An array *follows* the records if its rows are permuted in
the same way, up to rounding. An array *stays* if the permutation does not change it, up to
rounding. Every array of a program must either follow or stay. Otherwise, the program may depend on
which record is in which slot, and is refused.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import same_rows
from dpjax.proving._value import Abstract, RefusalError, difference, meet, over, rounded_up

_REMEDY = "Sum over the records first, or prove it under replace-one"


@dataclasses.dataclass(frozen=True)
class Slots:
    """How an array depends on the slots of records.

    Attributes:
        axis: the axis along which rows are permuted like the records; None if no permutation of
            records changes the array.
        alike: if `axis` is None, the axes along which the array is constant.
    """

    axis: int | None = None
    alike: frozenset[int] = frozenset()

    def moved(self, place: Callable[[int], int | None]) -> "Slots":
        """Returns how an array depends on slots after an operation that permutes its axes.

        `place` maps an old axis to its new index, or to None if it is removed.
        """
        axis = None if self.axis is None else place(self.axis)
        if axis is None and self.axis is not None:
            raise RefusalError(f"this operation splits the axis of records. {_REMEDY}")
        return Slots(axis, frozenset(k for old in self.alike if (k := place(old)) is not None))

    def without(self, axes: Sequence[int]) -> "Slots":
        """Returns how an array depends on slots after an operation that removes axes."""
        return self.moved(lambda k: None if k in axes else k - sum(a < k for a in axes))


@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """The facts about one array in a walk under add-or-remove-one.

    Attributes:
        value: the abstract value, for pairs of a database and the same database with one slot
            emptied. `value.apart` also bounds how much a permutation of records may change an
            entry.
        empty: an abstract value whose range includes the row of an empty slot.
        slots: how the array depends on slots.
        fixed: whether no permutation of records changes a single bit of the array.
    """

    value: Abstract
    empty: Abstract
    slots: Slots
    fixed: bool = False

    def is_alike(self, axis: int) -> bool:
        """Whether the array is constant along an axis.

        The result is valid only for an array that stays the same if records are permuted.
        """
        x = self.value
        if not x.shape or axis in self.slots.alike or x.shape[axis] == 1:
            return True
        return x.is_known and bool((x.low == x.low.take([0], axis)).all())

    def is_along(self, axis: int) -> bool:
        """Whether `axis` is the axis of records, or the array is constant along `axis`.

        The second test applies only to an array without an axis of records.
        """
        return self.slots.axis == axis if self.slots.axis is not None else self.is_alike(axis)

    def is_by_record(self) -> bool:
        """Whether each row depends on only one record."""
        return self.value.axis == self.slots.axis and self.value.others.is_zero


class Applied(NamedTuple):
    """An operation, its parameters and operands, and the abstract value of its result."""

    parameters: Any
    operands: Sequence[Tracked]
    found: Abstract

    @property
    def first(self) -> Tracked:
        return self.operands[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first operand."""
        return self.first.value.shape


Rule = Callable[[Applied], Slots]


def placed(rule: Rule | None, applied: Applied) -> Slots:
    """Returns how the result of an operation depends on slots.

    Raises:
        RefusalError: if a permutation of records might do more to the result than permute its rows
            in the same way.
    """
    if rule is not None:
        return rule(applied)
    if all(x.value.is_known and x.slots.axis is None for x in applied.operands):
        return Slots()
    raise RefusalError(f"the result may depend on which slot contains which record. {_REMEDY}")


def at_one_place(op: Applied) -> Slots:
    """Returns how the result of an elementwise operation depends on slots.

    The operation combines entries at the same index.
    """
    axes = {x.slots.axis for x in op.operands} - {None}
    if len(axes) > 1:
        raise RefusalError(f"this operation combines pairs of different records. {_REMEDY}")
    if not axes:
        places = range(len(op.found.shape))
        return Slots(None, frozenset(k for k in places if all(x.is_alike(k) for x in op.operands)))
    (axis,) = axes
    assert axis is not None
    # A permutation of records does not change the operand jnp.arange(n), although its numbers
    # differ along the axis of records. Such numbers depend on the slot, not on the record.
    if not all(x.is_along(axis) for x in op.operands):
        raise RefusalError(
            "this operation combines each record with a number that depends on the position (slot) "
            f"of the record. {_REMEDY}"
        )
    sizes = [x.value.shape[axis] for x in op.operands if x.slots.axis == axis]
    if any(size != op.found.shape[axis] for size in sizes):
        raise RefusalError(f"this operation repeats an array along the axis of records. {_REMEDY}")
    return Slots(axis)


def broadcast(op: Applied) -> Slots:
    places, old = op.parameters["broadcast_dimensions"], op.first.slots
    if old.axis is not None and op.found.shape[places[old.axis]] != op.shape[old.axis]:
        raise RefusalError(f"this operation repeats an array along the axis of records. {_REMEDY}")
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
    """Returns how a reduction depends on slots. A reduction over records ignores their order."""
    axes = [k % len(op.shape) for k in op.parameters["axes"]]
    return Slots() if op.first.slots.axis in axes else chosen(op)


def chosen(op: Applied) -> Slots:
    """Returns how the index of an extremum depends on slots.

    An extremum over the records is refused, because the index would say which slot a record is in.
    """
    return op.first.slots.without([k % len(op.shape) for k in op.parameters["axes"]])


def ordered(op: Applied) -> Slots:
    """Returns how a `sort` depends on slots. Sorted records do not depend on their earlier order.

    If other numbers are sorted by the records, the numbers of equal records stay in the order of
    their slots. So the result depends on slots, and is refused.
    """
    axis = op.first.slots.axis
    if len(op.operands) > 1 and any(x.slots.axis is not None for x in op.operands):
        raise RefusalError(
            "this sort keeps rows with equal keys in the order of their slots, so the result "
            f"depends on which slot contains which record. {_REMEDY}"
        )
    return Slots() if axis == op.parameters["dimension"] else Slots(axis)


def transposed(op: Applied) -> Slots:
    return op.first.slots.moved(list(op.parameters["permutation"]).index)


def _kept_along(op: Applied, axes: Sequence[int]) -> Slots:
    """Returns how an operation that mixes entries along `axes` depends on slots.

    If the axis of records is one of `axes`, the operation is refused.
    """
    if any(x.slots.axis in axes for x in op.operands if x.slots.axis is not None):
        raise RefusalError(f"the result depends on the order of records. {_REMEDY}")
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
    # The slots that a slice leaves out are public, but the records in these slots are private.
    if op.found.shape[axis] != op.shape[axis] or steps[axis] != 1:
        raise RefusalError(f"this operation selects records by their slots. {_REMEDY}")
    return Slots(axis)


def joined(op: Applied) -> Slots:
    axes = [x.slots.axis for x in op.operands]
    if op.parameters["dimension"] in axes:
        raise RefusalError(f"this operation joins arrays along the axis of records. {_REMEDY}")
    return at_one_place(op) if any(axis is not None for axis in axes) else Slots()


def stacked(op: Applied) -> Slots:
    new = op.parameters["axis"] % len(op.found.shape)
    one = at_one_place(op._replace(found=op.first.value))
    return Slots(one.axis).moved(lambda k: k + (k >= new))


def multiplied(op: Applied) -> Slots:
    """Returns how a matrix product depends on slots.

    The axis of records may be summed (contracted), may be a batch axis, or may be free. If it is
    free, the other operand must not have an axis of records.
    """
    contracted, batch = op.parameters["dimension_numbers"]
    axes = [x.slots.axis for x in op.operands]
    if axes == [None, None]:
        return Slots()
    for kind in (contracted, batch):
        for number, places in enumerate(zip(*kind, strict=True)):
            if any(a == k for a, k in zip(axes, places, strict=True)):
                if not all(x.is_along(k) for x, k in zip(op.operands, places, strict=True)):
                    raise RefusalError(
                        "this operation multiplies each record by a number that depends on the "
                        f"position (slot) of the record. {_REMEDY}"
                    )
                return Slots() if kind is contracted else Slots(number)
    if None not in axes:
        raise RefusalError(f"this operation combines pairs of different records. {_REMEDY}")
    side, axis = (0, axes[0]) if axes[1] is None else (1, axes[1])
    assert axis is not None
    free = [
        [k for k in range(len(x.value.shape)) if k not in (*contracted[i], *batch[i])]
        for i, x in enumerate(op.operands)
    ]
    before = len(batch[0]) + (len(free[0]) if side else 0)
    return Slots(before + free[side].index(axis))


def gathered(op: Applied) -> Slots:
    """Returns how the result of a `gather` depends on slots.

    A gather may look up one row of a table for each record. It may also take the entry at one fixed
    index from the row of each record.
    """
    table, places = op.operands
    if places.slots.axis is not None:
        if table.slots.axis is not None:
            raise RefusalError(f"this operation looks up records by index. {_REMEDY}")
        # In the result of `gather`, the axes of the indices come first.
        return Slots(places.slots.axis)
    if table.slots.axis is None:
        return Slots()
    if not (places.value.is_known and places.value.shape == (1,)):
        raise RefusalError(f"this operation looks up records by index. {_REMEDY}")
    axes = tuple(op.parameters["dimension_numbers"].start_index_map)
    if table.slots.axis in axes:
        raise RefusalError(f"this operation selects the record in one slot. {_REMEDY}")
    return table.slots.without(axes)


def scattered(op: Applied) -> Slots:
    """Returns how the result of a scatter depends on slots: not at all, or it is refused."""
    start, *added = op.operands
    if start.slots.axis is not None:
        raise RefusalError(
            "this scatter starts from an array that has one row for each position (slot) of a "
            f"record. {_REMEDY}"
        )
    by_record = any(x.slots.axis is not None for x in added)
    if by_record and not all(x.is_along(0) for x in added):
        raise RefusalError(
            "an index or an update of this scatter depends on the slot, not only on the record in "
            f"the slot. {_REMEDY}"
        )
    return Slots()


def numbered(op: Applied) -> Slots:
    return Slots(None, frozenset(range(len(op.found.shape))) - {op.parameters["dimension"]})


# Tighter bounds under add-or-remove-one. They use two facts. First, the row of a removed record
# becomes the row of an empty slot, not an arbitrary row. Second, if records are permuted, an array
# with a row for each record has the same rows in another order. Other rules use neither fact: they
# know only the range of the rows.
Tightening = Callable[[Applied], Abstract]


def row_norms(x: Abstract, axis: int) -> tuple[float, float]:
    """Returns bounds on the l1 and l2 norm of a row. For integers, ||x||_1 <= ||x||_2^2."""
    l1, l2 = (x.l1_of_row, x.l2_of_row) if x.axis == axis else (math.inf, math.inf)
    largest = difference(over(x.magnitude, axis), x.shape, axis, l1=l1, l2=l2)
    square = float(rounding.up(largest.l2**2 * (1 + 2.0**-30)))
    return min(largest.l1, square) if x.whole else largest.l1, largest.l2


def _tightened(found: Abstract, each: np.ndarray, l1: float, l2: float, slip: float) -> Abstract:
    """Returns a value without an axis of records, with a second bound on its difference.

    Args:
        found: the value with its first bound.
        each: the second bound, on entries.
        l1: the second bound, on the l1 norm.
        l2: the second bound, on the l2 norm.
        slip: the rounding error of each entry, which is added to the second bound.
    """
    size = math.prod(found.shape)
    moved = rounded_up(each + slip, l1 + slip * size, l2 + slip * math.sqrt(size))
    return meet(found, changed=moved, others=moved)


def tight_lookup(op: Applied) -> Abstract:
    """Returns the value of a gather from a public table, with a tighter bound `apart`.

    `apart` bounds the difference of two results of the gather. The second result may be compiled
    differently, or its records may be permuted. Equal indices give equal rows. So both results
    differ only where tiny numbers are flushed to 0.
    """
    table, places = (x.value for x in op.operands)
    if not table.is_known or places.apart:
        return op.found
    flush = 0.0 if op.found.whole else 4 * rounding.tiny(op.found.dtype)
    return dataclasses.replace(op.found, apart=min(op.found.apart, flush))


def tight_sums(op: Applied) -> Abstract:
    """Returns the value of a scatter-add, with tighter bounds on its change.

    If a slot is emptied, the row of its record is subtracted at one index. The row of an empty slot
    is added at the same or another index.
    """
    start, places, added = op.operands
    found, u = op.found, added.value
    n, slip = u.shape[0], 0.0
    if not found.whole:
        largest = float(start.value.magnitude.max()) + n * float(u.magnitude.max())
        flush = 4 * rounding.tiny(found.dtype) * (n + 1)
        slip = 2 * float(rounding.up(rounding.sum_units(n + 1, found.dtype) * largest + flush))
    if not places.value.apart:
        apart = float(rounding.up(n * u.apart + slip))
        found = dataclasses.replace(found, apart=min(found.apart, apart))
    return _tight_rows(op, found, slip)


def tight_exact_sums(op: Applied) -> Abstract:
    """Returns the value of an exact scatter, with the same tighter bounds as `tight_sums`.

    `op.found.apart` bounds both rounding errors: of terms to the grid, and of sums to floats.
    """
    return _tight_rows(op, op.found, op.found.apart)


def _tight_rows(op: Applied, found: Abstract, slip: float) -> Abstract:
    """Returns `found`, the sums of a scatter, with tighter bounds on their change.

    If a slot is emptied, the row of its record is subtracted at one index. The row of an empty slot
    is added at the same or another index. `slip` bounds the rounding error of a change.
    """
    _, places, added = op.operands
    u, empty = added.value, added.empty
    by_record = u.axis == 0 and u.others.is_zero and places.value.others.is_zero
    if added.slots.axis != 0 or not by_record:
        return found
    own, none = row_norms(u, 0), row_norms(empty, 0)
    each = np.maximum(u.changed.each, np.maximum(over(u.magnitude, 0), over(empty.magnitude, 0)))
    l2 = max(u.changed.l2, rounding.norm2([own[1], none[1]]))
    return _tightened(found, each, own[0] + none[0], l2, slip)


def tight_products(op: Applied) -> Abstract:
    """Returns the value of a sum of outer products a b^T of rows, with tighter bounds.

    If a slot is emptied, the sum changes by at most |a| |b| + |a'| |b'|, where a and b are the rows
    of its record, and a' and b' are those of an empty slot.
    """
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
