"""Rules of operations that move entries: nothing is computed, so differences move along."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import (
    Abstract,
    Difference,
    as_dense,
    as_rows,
    difference,
    make,
    stretched,
)

Moved = tuple[np.ndarray, float, float]


def _kept(d: Difference, each: np.ndarray) -> Moved:
    return each, d.l1, d.l2


def check_places(places: Abstract, size: int) -> None:
    """XLA takes places for signed integers, and adds those of a slice of a slice."""
    small = places.dtype.kind not in "iu" or places.dtype.itemsize < 4
    if small or max(size, places.high.max()) >= 2.0**31:
        raise RefusalError(f"places in {places.dtype} have no rule here: use int32")


def check_inside(first: float, last: float, size: int) -> None:
    """A place beyond the ends of a slice would be one beside it: XLA makes two slices one."""
    if not 0 <= first <= last < size:
        raise RefusalError("a place may be out of bounds: clip the index")


def transpose(x: Abstract, order: Sequence[int]) -> Abstract:
    """Entries of a row stay in it."""
    axis = None if x.axis is None else list(order).index(x.axis)
    shape = tuple(x.shape[k] for k in order)
    found = make(
        shape, x.dtype, x.low.transpose(order), x.high.transpose(order), axis,
        _kept(x.changed, x.changed.each.transpose(order)),
        _kept(x.others, x.others.each.transpose(order)), whole=x.whole,
        tied=frozenset(k for k, old in enumerate(order) if old in x.tied),
        l2_of_row=x.l2_of_row, source=x.origin, pending=x.pending, apart=x.apart,
    )  # fmt: skip
    return found


def broadcast(x: Abstract, shape: Sequence[int], places: Sequence[int]) -> Abstract:
    """Axes of length 1 are added, then repeated."""
    ones = [1] * len(shape)
    for old, new in enumerate(places):
        ones[new] = x.shape[old]

    def put(array: np.ndarray) -> np.ndarray:
        short = [1] * len(shape)
        for old, new in enumerate(places):
            short[new] = array.shape[old]
        return array.reshape(short)

    def placed(d: Difference) -> Difference:
        return dataclasses.replace(d, each=put(d.each))

    inserted = dataclasses.replace(
        x, shape=tuple(ones), low=put(x.low), high=put(x.high),
        axis=None if x.axis is None else places[x.axis],
        changed=placed(x.changed), others=placed(x.others),
        tied=frozenset(places[k] for k in x.tied), source=x.origin,
    )  # fmt: skip
    return stretched(inserted, shape)


def _full(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return np.broadcast_to(array, shape)


def reshape(x: Abstract, shape: Sequence[int]) -> Abstract:
    """Entries keep their order. The records must stay one axis, with the same entries in a row."""
    shape = tuple(shape)
    axis = None if x.axis is None else _same_rows(x.shape, x.axis, shape)

    def changed_shape(array: np.ndarray) -> np.ndarray:
        if array.size == 1:
            return array.reshape((1,) * len(shape))
        if x.axis is None:
            return _full(array, x.shape).reshape(shape)
        assert axis is not None
        if array.shape[x.axis] == 1:
            before, after = list(x.shape), list(shape)
            before[x.axis] = after[axis] = 1
            return _full(array, before).reshape(after)
        return _full(array, x.shape).reshape(shape)

    low, high = (changed_shape(array) for array in (x.low, x.high))
    return make(
        shape, x.dtype, low, high, axis,
        _kept(x.changed, changed_shape(x.changed.each)),
        _kept(x.others, changed_shape(x.others.each)),
        whole=x.whole, l2_of_row=x.l2_of_row, source=x.origin, pending=x.pending, apart=x.apart,
    )  # fmt: skip


def _same_rows(before: Sequence[int], axis: int, after: Sequence[int]) -> int:
    """The axis of records afterwards: as many places before it, after it, and along it."""
    ahead, n = math.prod(before[:axis]), before[axis]
    for k, size in enumerate(after):
        if size == n and math.prod(after[:k]) == ahead:
            return k
    raise RefusalError(
        f"the reshape {tuple(before)} to {tuple(after)} mixes the records of axis {axis}: keep"
        " their axis"
    )


def squeeze(x: Abstract, dims: Sequence[int]) -> Abstract:
    """Axes of length 1 are dropped."""
    dropped = {d % len(x.shape) for d in dims}
    if x.axis in dropped:
        x = as_dense(x)
    return reshape(x, [size for k, size in enumerate(x.shape) if k not in dropped])


def cut(x: Abstract, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]) -> Abstract:
    """A part of the entries. Of the records, the changed one may or may not be among them.

    Where the first record that is left was not the first one, rows get other numbers. Then the
    changed row is not that of other arrays, and nothing is known by row.
    """
    if x.axis is not None and (starts[x.axis] != 0 or steps[x.axis] != 1):
        x = as_dense(x)
    shape = tuple(len(range(s, e, t)) for s, e, t in zip(starts, ends, steps, strict=True))

    def part(array: np.ndarray) -> np.ndarray:
        chosen = tuple(
            slice(None) if array.shape[k] == 1 else slice(s, e, t)
            for k, (s, e, t) in enumerate(zip(starts, ends, steps, strict=True))
        )
        return array[chosen]

    changed = x.changed
    if x.axis is not None and shape[x.axis] < x.n:  # Any row may be all that is left.
        each = np.maximum(changed.each, x.others.each)
        l1, l2 = max(changed.l1, x.others.l1), max(changed.l2, x.others.l2)
        changed = Difference(each, l1, l2)
    return make(
        shape, x.dtype, part(x.low), part(x.high), x.axis, _kept(changed, part(changed.each)),
        _kept(x.others, part(x.others.each)), whole=x.whole, tied=x.tied,
        l2_of_row=x.l2_of_row, pending=x.pending, apart=x.apart,
    )  # fmt: skip


def join(parts: Sequence[Abstract], dim: int) -> Abstract:
    """Along an axis that is not that of the records, or else the records are no rows any more."""
    axes = {x.axis for x in parts} - {None}
    axis = axes.pop() if axes else None
    if axes or axis == dim:
        parts, axis = [as_dense(x) for x in parts], None
    if axis is not None:
        parts = [as_rows(x, axis) for x in parts]

    def whole_of(arrays: Sequence[np.ndarray], *, record: bool) -> np.ndarray:
        rows = [list(x.shape) for x in parts]
        if axis is not None and (record or all(a.shape[axis] == 1 for a in arrays)):
            for sizes in rows:
                sizes[axis] = 1
        pairs = zip(arrays, rows, strict=True)
        return np.concatenate([_full(array, sizes) for array, sizes in pairs], dim)

    def moved(ds: Sequence[Difference]) -> Moved:
        l2 = rounding.norm2([d.l2 for d in ds])
        each = whole_of([d.each for d in ds], record=True)
        return each, float(rounding.up(sum(d.l1 for d in ds))), float(rounding.up(l2))

    shape = list(parts[0].shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    pending = Pending.of_all([x.pending for x in parts])
    padded = pending.padded or any(
        x.shape[dim] == 1 and _may_be_one([*parts[:k], *parts[k + 1 :]])
        for k, x in enumerate(parts)
    )
    return make(
        shape, parts[0].dtype, whole_of([x.low for x in parts], record=False),
        whole_of([x.high for x in parts], record=False), axis,
        moved([x.changed for x in parts]), moved([x.others for x in parts]),
        whole=all(x.whole for x in parts), pending=pending.having(padded=padded),
        apart=max(x.apart for x in parts),
    )  # fmt: skip


def _may_be_one(parts: Sequence[Abstract]) -> bool:
    """Whether a compiler may know arrays to hold one number, and take them for padding."""
    if not parts or not all(x.is_public or x.pending.hidden for x in parts):
        return False
    return max(float(x.low.max()) for x in parts) <= min(float(x.high.min()) for x in parts)


def iota(shape: Sequence[int], dimension: int, dtype: np.dtype) -> Abstract:
    """0, 1, 2, ... along an axis."""
    from dpjax.proving._value import constant

    short = [1] * len(shape)
    short[dimension] = shape[dimension]
    numbers = np.arange(shape[dimension], dtype=float).reshape(short)
    none = difference(np.zeros((1,) * len(shape)), shape, None)
    # Integers wrap around: iota of uint8 starts at 0 again after 255.
    largest = np.iinfo(dtype).max if dtype.kind in "iu" else rounding.exact_integers(dtype)
    if dtype.kind not in "fiu" or shape[dimension] - 1 > largest:
        raise RefusalError("iota exceeds the integers of its dtype")
    return dataclasses.replace(
        constant(np.zeros((), dtype)), shape=tuple(shape), low=numbers, high=numbers,
        changed=none, others=none, whole=True,
    )  # fmt: skip
