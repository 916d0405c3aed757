"""Which programs do not look at slots: a rule for each operation.

Move the records of a database to other slots. An array *follows* them if it becomes the same array
with its rows moved alike, up to rounding. Other arrays stay as they are, up to rounding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dpjax.proving import _choices as choices
from dpjax.proving._elementary import ELEMENTARY
from dpjax.proving._layout import _same_rows
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract

_REMEDY = "sum over the records first, or prove it under replace-one"


@dataclasses.dataclass(frozen=True)
class Slots:
    """How an array depends on slots.

    Attributes:
        axis: along which it follows the records; None if it stays as it is.
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


Rule = Callable[[Any, Sequence[Abstract], Sequence[Slots], Abstract], Slots]


def placed(
    name: str,
    parameters: Any,
    operands: Sequence[Abstract],
    slots: Sequence[Slots],
    found: Abstract,
) -> Slots:
    """How the result of an operation depends on slots.

    Raises:
        RefusalError: if it may look at them.
    """
    rule = _RULES.get(name)
    if rule is not None:
        return rule(parameters, operands, slots, found)
    if all(x.is_known for x in operands) and not any(s.axis is not None for s in slots):
        return Slots()
    raise RefusalError(f"it may look at the slots of records: {_REMEDY}")


def _is_alike(x: Abstract, slots: Slots, axis: int) -> bool:
    """Whether an array that stays holds one number along an axis."""
    if not x.shape or axis in slots.alike or x.shape[axis] == 1:
        return True
    return x.is_known and bool((x.low == x.low.take([0], axis)).all())


def _follows_or_alike(x: Abstract, slots: Slots, axis: int) -> bool:
    """Whether an axis is that of the records, or one of copies."""
    return slots.axis == axis if slots.axis is not None else _is_alike(x, slots, axis)


def _at_one_place(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    """An entry of the result comes from the entries at its place."""
    del parameters
    axes = {s.axis for s in slots} - {None}
    both = list(zip(xs, slots, strict=True))
    if len(axes) > 1:
        raise RefusalError(f"it meets pairs of records: {_REMEDY}")
    if not axes:
        places = range(len(found.shape))
        return Slots(None, frozenset(k for k in places if all(_is_alike(x, s, k) for x, s in both)))
    (axis,) = axes
    assert axis is not None
    if not all(_follows_or_alike(x, s, axis) for x, s in both):
        raise RefusalError(f"a number that is not a record's depends on the slot: {_REMEDY}")
    if any(s.axis == axis and x.shape[axis] != found.shape[axis] for x, s in both):
        raise RefusalError(f"one slot becomes several: {_REMEDY}")
    return Slots(axis)


def _compared(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    if len(xs) == 2 and xs[0] is xs[1] and xs[0].apart:
        raise RefusalError("a rounded number is compared with itself: leave it out")
    return _at_one_place(parameters, xs, slots, found)


def _broadcast(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    places = parameters["broadcast_dimensions"]
    (x,), (old,) = xs[:1], slots[:1]
    if old.axis is not None and found.shape[places[old.axis]] != x.shape[old.axis]:
        raise RefusalError(f"one slot becomes several: {_REMEDY}")
    new = old.moved(lambda k: places[k])
    if new.axis is not None:
        return new
    kept = {places[k] for k in range(len(x.shape)) if not _is_alike(x, old, k)}
    return Slots(None, frozenset(range(len(found.shape))) - kept)


def _reshaped(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    del parameters
    old, shape = slots[0], xs[0].shape
    if old.axis is not None:
        return Slots(_same_rows(shape, old.axis, found.shape))
    return Slots(None, frozenset(range(len(found.shape)) if len(old.alike) == len(shape) else ()))


def _without(axes: Sequence[int], slots: Slots) -> Slots:
    return slots.moved(lambda k: None if k in axes else k - sum(a < k for a in axes))


def _squeezed(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    rank = len(xs[0].shape)
    return _without([k % rank for k in parameters["dimensions"]], slots[0])


def _reduced(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    """Sums and extrema over the records do not depend on their order."""
    axes = [k % len(xs[0].shape) for k in parameters["axes"]]
    return Slots() if slots[0].axis in axes else _without(axes, slots[0])


def _sorted(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    """Sorted records do not depend on the order before."""
    return Slots() if slots[0].axis == parameters["dimension"] else Slots(slots[0].axis)


def _transposed(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    return slots[0].moved(list(parameters["permutation"]).index)


def _kept_along(axes_of: Callable[[Any], Sequence[int]]) -> Rule:
    """For operations that move entries along some axes."""

    def rule(
        parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
    ) -> Slots:
        axes = axes_of(parameters)
        if any(s.axis in axes for s in slots if s.axis is not None):
            raise RefusalError(f"it depends on the order of records: {_REMEDY}")
        return Slots(slots[0].axis)

    return rule


def _one_axis(name: str) -> Rule:
    return _kept_along(lambda parameters: [parameters[name]])


def _sliced(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    axis = slots[0].axis
    if axis is None:
        return Slots()
    steps = parameters["strides"] or [1] * len(found.shape)
    if found.shape[axis] != xs[0].shape[axis] or steps[axis] != 1:
        raise RefusalError(f"it takes records of some slots: {_REMEDY}")
    return Slots(axis)


def _joined(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    if all(s.axis is None for s in slots):
        return Slots()
    dim = parameters["dimension"]
    if any(s.axis == dim for s in slots):
        raise RefusalError(f"it puts records behind others: {_REMEDY}")
    return _at_one_place(parameters, xs, slots, found)


def _stacked(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    new = parameters["axis"] % len(found.shape)
    return Slots(_at_one_place(parameters, xs, slots, xs[0]).axis).moved(lambda k: k + (k >= new))


def _multiplied(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    """Sums over the records, products of each record with public numbers, or within records."""
    (contracted, batch) = parameters["dimension_numbers"]
    axes = [s.axis for s in slots]
    if axes == [None, None]:
        return Slots()
    for kind in (contracted, batch):
        for places in zip(*kind, strict=True):
            if any(a == k for a, k in zip(axes, places, strict=True)):
                both = zip(xs, slots, places, strict=True)
                if not all(
                    s.axis == k if s.axis is not None else _is_alike(x, s, k) for x, s, k in both
                ):
                    raise RefusalError(f"a public array depends on the slot: {_REMEDY}")
                return Slots() if kind is contracted else Slots(list(batch[0]).index(places[0]))
    if None not in axes:
        raise RefusalError(f"it meets pairs of records: {_REMEDY}")
    side, axis = (0, axes[0]) if axes[1] is None else (1, axes[1])
    assert axis is not None
    free = [
        [k for k in range(len(x.shape)) if k not in (*contracted[i], *batch[i])]
        for i, x in enumerate(xs)
    ]
    before = len(batch[0]) + (len(free[0]) if side else 0)
    return Slots(before + free[side].index(axis))


def _gathered(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    """Rows of a public table at places of records, or one public place of an array."""
    table, places = slots
    if places.axis is not None:
        if table.axis is not None:
            raise RefusalError(f"it looks records up: {_REMEDY}")
        return Slots(places.axis)  # The rule of `gather` puts the axes of places first.
    if table.axis is None:
        return Slots()
    if not (xs[1].is_known and xs[1].shape == (1,)):
        raise RefusalError(f"it looks records up: {_REMEDY}")
    axes = tuple(parameters["dimension_numbers"].start_index_map)
    if table.axis in axes:
        raise RefusalError(f"it takes the record of one slot: {_REMEDY}")
    return _without(axes, table)


def _scattered(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    """Sums by place do not depend on the order of what is added."""
    start, *added = slots
    if start.axis is not None:
        raise RefusalError(f"it adds to numbers of slots: {_REMEDY}")
    by_record = any(s.axis is not None for s in added)
    both = zip(xs[1:], added, strict=True)
    if by_record and not all(_follows_or_alike(x, s, 0) for x, s in both):
        raise RefusalError(f"a place or a number depends on the slot: {_REMEDY}")
    return Slots()


def _numbered(
    parameters: Any, xs: Sequence[Abstract], slots: Sequence[Slots], found: Abstract
) -> Slots:
    return Slots(None, frozenset(range(len(found.shape))) - {parameters["dimension"]})


_ONE_PLACE = (
    *("add", "add_any", "sub", "mul", "div", "neg", "abs", "square", "pow", "integer_pow"),
    *("max", "min", "clamp", "floor", "ceil", "round", "sign", "and", "or", "xor", "not"),
    *("select_n", "is_finite", "convert_element_type", "stop_gradient", "copy", "copy_p"),
    *ELEMENTARY,
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ONE_PLACE, _at_one_place),
    **dict.fromkeys(choices.COMPARISONS, _compared),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and"), _reduced
    ),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "transpose": _transposed,
    "slice": _sliced,
    "sort": _sorted,
    "concatenate": _joined,
    "stack": _stacked,
    "rev": _kept_along(lambda parameters: parameters["dimensions"]),
    "cumsum": _one_axis("axis"),
    "iota": _numbered,
    "dot_general": _multiplied,
    "gather": _gathered,
    "scatter-add": _scattered,
    "scatter_add": _scattered,
}
