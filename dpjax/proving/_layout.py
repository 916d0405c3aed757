"""Rules of operations that only rearrange entries; differences are rearranged in the same way."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._rows import as_dense, as_rows, stretched
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    Pending,
    RefusalError,
    constant,
    make,
    result_of,
)

_MOST_COPIES = 64


def check_places(places: Abstract, size: int) -> None:
    """Refuses indices that may wrap around.

    XLA treats indices as signed integers, and adds the indices of nested slices.
    """
    small = places.dtype.kind not in "iu" or places.dtype.itemsize < 4
    if small or max(size, places.high.max()) >= 2.0**31:
        raise RefusalError(
            "proofs support only indices below 2^31, as integers of at least 32 bits, got "
            f"{places.dtype}. Use int32 instead"
        )


def check_inside(first: float, last: float, size: int) -> None:
    """Refuses indices that may be out of bounds.

    XLA may merge nested slices into one slice, whose index is the sum of theirs. If an index is out
    of bounds, the merged slice may read other entries than the separate slices.
    """
    if not 0 <= first <= last < size:
        raise RefusalError("an index may be out of bounds. Clip it first")


def _moved(
    x: Abstract,
    shape: Sequence[int],
    axis: int | None,
    move: Callable[[np.ndarray], np.ndarray],
    **more: Any,
) -> Abstract:
    """Returns the value of an array whose entries are rearranged by `move`.

    Norms of differences and of rows stay the same.
    """
    kept: Any = dict(whole=x.whole, source=x.origin, apart=x.apart, shape=shape, axis=axis)
    kept |= {"l1_of_row": x.l1_of_row, "l2_of_row": x.l2_of_row}
    kept |= {"counts": (x.changed.count, x.others.count)} | more
    return result_of(x, move(x.low), move(x.high), lambda d: (move(d.each), d.l1, d.l2), **kept)


def same(x: Abstract, **_: Any) -> Abstract:
    """Returns the operand itself."""
    return x


def transpose(x: Abstract, permutation: Sequence[int], **_: Any) -> Abstract:
    """Returns the value of a transpose. The entries of a record's row stay in this row."""
    order = list(permutation)
    axis = None if x.axis is None else order.index(x.axis)
    tied = frozenset(k for k, old in enumerate(order) if old in x.tied)
    shape = [x.shape[k] for k in order]
    move = lambda array: array.transpose(order)  # noqa: E731
    return _moved(x, shape, axis, move, tied=tied, pending=x.pending)


def broadcast(
    x: Abstract, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> Abstract:
    """Returns the value of a broadcast: inserts axes of length 1, then repeats entries."""
    places = broadcast_dimensions

    def put(sizes: Sequence[int]) -> list[int]:
        kept = dict(zip(places, sizes, strict=True))
        return [kept.get(k, 1) for k in range(len(shape))]

    def placed(d: Difference) -> Difference:
        return dataclasses.replace(d, each=d.each.reshape(put(d.each.shape)))

    inserted = dataclasses.replace(
        x, shape=tuple(put(x.shape)), low=x.low.reshape(put(x.low.shape)),
        high=x.high.reshape(put(x.high.shape)), axis=None if x.axis is None else places[x.axis],
        changed=placed(x.changed), others=placed(x.others),
        tied=frozenset(places[k] for k in x.tied), source=x.origin, nan=frozenset(),
        answers=frozenset(),
    )  # fmt: skip
    return stretched(inserted, shape)


def reshape(x: Abstract, new_sizes: Sequence[int], dimensions: object = None, **_: Any) -> Abstract:
    """Returns the value of a reshape, which keeps the order of entries.

    If the reshape mixes entries of different records, the result has no axis of records.
    """
    if dimensions is not None:
        raise RefusalError("proofs do not support a reshape that also transposes. Transpose first")
    shape = tuple(new_sizes)
    axis = None
    if x.axis is not None:
        try:
            axis = same_rows(x.shape, x.axis, shape)
        except RefusalError:
            x = as_dense(x)

    def move(array: np.ndarray) -> np.ndarray:
        # If all entries or all rows have the same bound, `array` stores it once. The reshaped array
        # stores it once, too.
        if array.size == 1:
            return array.reshape((1,) * len(shape))
        before, after = list(x.shape), list(shape)
        if x.axis is not None and axis is not None and array.shape[x.axis] == 1:
            before[x.axis] = after[axis] = 1
        return np.broadcast_to(array, before).reshape(after)

    return _moved(x, shape, axis, move, pending=x.pending)


def same_rows(before: Sequence[int], axis: int, after: Sequence[int]) -> int:
    """Returns the axis of records after a reshape.

    This axis must keep its length, and the axes before it must keep their number of entries.
    """
    ahead, n = math.prod(before[:axis]), before[axis]
    for k, size in enumerate(after):
        if size == n and math.prod(after[:k]) == ahead:
            return k
    raise RefusalError(
        f"the reshape from {tuple(before)} to {tuple(after)} mixes records, which are along axis "
        f"{axis}. Keep this axis as it is"
    )


def squeeze(x: Abstract, dimensions: Sequence[int], **_: Any) -> Abstract:
    """Returns the value of a squeeze, which removes axes of length 1."""
    dropped = {d % len(x.shape) for d in dimensions}
    if x.axis in dropped:  # The axis of records has length 1, so there is one record.
        x = as_dense(x)
    return reshape(x, [size for k, size in enumerate(x.shape) if k not in dropped])


def cut(
    x: Abstract,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
    **_: Any,
) -> Abstract:
    """Returns the value of a slice, which may leave out the changed record.

    If the slice does not start at the first record, or has a stride, rows get other indices. Then
    row i of this array and row i of another array may belong to different records. So the result
    has no axis of records.

    If k numbers of a sorted vector are replaced, at most k numbers of a slice of it are replaced.
    """
    steps = strides or [1] * len(x.shape)
    chosen = list(map(slice, start_indices, limit_indices, steps))
    if x.axis is not None and (start_indices[x.axis] != 0 or steps[x.axis] != 1):
        x = as_dense(x)
    shape = [len(range(*s.indices(size))) for s, size in zip(chosen, x.shape, strict=True)]

    def move(array: np.ndarray) -> np.ndarray:
        # If an axis of `array` has length 1, it has one bound for all indices, so there is nothing
        # to cut.
        short = zip(chosen, array.shape, strict=True)
        return array[tuple(slice(None) if size == 1 else s for s, size in short)]

    if x.axis is not None and shape[x.axis] < x.n:  # The slice may leave out the changed record.
        c, o = x.changed, x.others
        tops = max(c.l1, o.l1), max(c.l2, o.l2), max(c.count, o.count)
        most = Difference(np.maximum(c.each, o.each), *tops)
        x = dataclasses.replace(x, changed=most)
    found = _moved(x, shape, x.axis, move, tied=x.tied, source=None, pending=x.pending)
    return dataclasses.replace(found, replaced=x.replaced if steps == [1] else math.inf)


def place(x: Abstract, axis: int, start: int, size: int = 1) -> Abstract:
    """Returns the value of a slice of `size` entries along one axis, from `start` on."""
    starts = [start if k == axis else 0 for k in range(len(x.shape))]
    ends = [start + size if k == axis else whole for k, whole in enumerate(x.shape)]
    return cut(x, starts, ends)


def split(x: Abstract, sizes: Sequence[int], axis: int, **_: Any) -> list[Abstract]:
    """Returns the values of consecutive slices along an axis."""
    ends = itertools.accumulate(sizes, initial=0)
    return [place(x, axis, int(end), int(size)) for end, size in zip(ends, sizes, strict=False)]


def dynamic_slice(x: Abstract, *starts: Abstract, slice_sizes: Sequence[int], **_: Any) -> Abstract:
    """Returns the value of a slice that starts at public indices."""
    if not all(start.is_known for start in starts):
        raise RefusalError("proofs support a dynamic slice only if its start indices are public")
    firsts = [int(start.low) for start in starts]
    for start, first, whole, size in zip(starts, firsts, x.shape, slice_sizes, strict=True):
        check_places(start, whole)
        check_inside(first, first, whole - size + 1)
    return cut(x, firsts, [a + size for a, size in zip(firsts, slice_sizes, strict=True)])


def join(*parts: Abstract, dimension: int, **_: Any) -> Abstract:
    """Returns the value of a concatenation.

    If it joins arrays along the axis of records, the result has no such axis.
    """
    dim, axes = dimension, {x.axis for x in parts} - {None}
    axis = axes.pop() if axes else None
    # The result has no axis of records in two cases: the arrays have different axes of records, or
    # they are concatenated along the axis of records.
    if axes or axis == dim:
        axis = None
    joined = [as_dense(x) if axis is None else as_rows(x, axis) for x in parts]

    def whole_of(arrays: Sequence[np.ndarray], *, record: bool) -> np.ndarray:
        # The result has one row of bounds for all records in two cases. In the first case, `record`
        # is true: `arrays` bound the change of any one row. In the second case, each array has only
        # one row of bounds.
        rows = [list(x.shape) for x in joined]
        if axis is not None and (record or all(a.shape[axis] == 1 for a in arrays)):
            for sizes in rows:
                sizes[axis] = 1
        return np.concatenate(list(map(np.broadcast_to, arrays, rows)), dim)

    def moved(*ds: Difference) -> Moves:
        each, l2 = whole_of([d.each for d in ds], record=True), rounding.norm2([d.l2 for d in ds])
        return each, float(rounding.up(sum(d.l1 for d in ds))), float(rounding.up(l2))

    shape = list(joined[0].shape)
    shape[dim] = sum(x.shape[dim] for x in joined)
    pending = Pending.of_all([x.pending for x in joined])
    # If a single entry is concatenated with copies of one number, a compiler may rewrite this as
    # padding of the entry.
    padded = pending.padded or any(
        x.shape[dim] == 1 and _may_be_one([*joined[:k], *joined[k + 1 :]])
        for k, x in enumerate(joined)
    )
    low, high = (whole_of(ends, record=False) for ends in zip(*((x.low, x.high) for x in joined)))  # noqa: B905
    return result_of(
        joined, low, high, moved, shape=shape, whole=all(x.whole for x in joined),
        pending=pending.having(padded=padded), apart=max(x.apart for x in joined),
    )  # fmt: skip


def _may_be_one(parts: Sequence[Abstract]) -> bool:
    """Whether a compiler may notice that all entries of these arrays are equal.

    A compiler may replace such arrays by padding.
    """
    if not parts or not all(x.is_public or x.pending.hidden for x in parts):
        return False
    return max(float(x.low.max()) for x in parts) <= min(float(x.high.min()) for x in parts)


def new_axis(x: Abstract, axis: int) -> Abstract:
    """Returns the array with an additional axis of length 1."""
    shape = (*x.shape[:axis], 1, *x.shape[axis:])
    return broadcast(x, shape, [k for k in range(len(shape)) if k != axis])


def stack(*xs: Abstract, axis: int, **_: Any) -> Abstract:
    """Returns the value of arrays that are stacked along a new axis."""
    return join(*(new_axis(x, axis) for x in xs), dimension=axis)


def tile(x: Abstract, reps: Sequence[int], **_: Any) -> Abstract:
    """Returns the value of x, repeated `reps[k]` times along each axis k."""
    if len(reps) != len(x.shape) or not 1 <= math.prod(reps) <= _MOST_COPIES:
        raise RefusalError(
            f"proofs support at most {_MOST_COPIES} copies of an array in one jnp.tile"
        )
    for axis, count in enumerate(reps):
        x = join(*[x] * count, dimension=axis) if count > 1 else x
    return x


def reverse(x: Abstract, dimensions: Sequence[int], **_: Any) -> Abstract:
    """Returns the value of an array with reversed axes.

    If records are reversed, rows get other indices, so the result has no axis of records.
    """
    x = as_dense(x) if x.axis in dimensions else x
    move = lambda array: np.flip(array, tuple(dimensions))  # noqa: E731
    return _moved(x, x.shape, x.axis, move, tied=x.tied)


def along(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Returns the array with one axis of length 1 expanded to length `size`."""
    shape = list(array.shape)
    shape[axis] = size
    return np.broadcast_to(array, shape)


def accumulated(array: np.ndarray, axis: int, of: np.ufunc, *, reverse: bool) -> np.ndarray:
    """Returns an array accumulated along an axis, from its end if `reverse`."""
    turned = np.flip(array, axis) if reverse else array
    found = of.accumulate(turned, axis)
    return np.flip(found, axis) if reverse else found


def pad(
    x: Abstract, value: Abstract, padding_config: Sequence[tuple[int, int, int]], **_: Any
) -> Abstract:
    """Returns the value of padding by a public number, around and between the entries.

    No record changes a row that consists of padding.
    """
    if not value.is_known or not value.is_finite:
        raise RefusalError("proofs support padding only with a public, finite number")
    if any(start < 0 or end < 0 for start, end, _ in padding_config):
        raise RefusalError("proofs do not support negative padding. Slice the operand instead")
    number, axes = float(value.low), list(zip(x.shape, padding_config, strict=True))
    shape = tuple(a + b + s + max(0, s - 1) * inner for s, (a, b, inner) in axes)
    if x.axis is not None and (padding_config[x.axis][0] or padding_config[x.axis][2]):
        x = as_dense(x)  # The rows get other indices.
    padded = [k for k, size in enumerate(shape) if size != x.shape[k]]

    def filled(array: np.ndarray, fill: float, axes: Sequence[int]) -> np.ndarray:
        for k in axes:
            (start, _, inner), size = padding_config[k], x.shape[k]
            # The entries of axis k begin at `start`, with `inner` padding numbers between two
            # entries.
            made = np.full([shape[k] if j == k else s for j, s in enumerate(array.shape)], fill)
            np.moveaxis(made, k, 0)[start : start + (size - 1) * (inner + 1) + 1 : inner + 1] = (
                np.moveaxis(along(array, k, size), k, 0)
            )
            array = made
        return array

    # A `Difference` describes one row. So it is not padded along the axis of records.
    within = [k for k in padded if k != x.axis]

    def moved(d: Difference) -> Moves:
        return filled(d.each, 0.0, within), d.l1, d.l2

    return result_of(
        x, filled(x.low, number, padded), filled(x.high, number, padded), moved, shape=shape,
        whole=x.whole and number.is_integer(), l2_of_row=x.l2_of_row if number == 0 else math.inf,
        pending=Pending(padded=any(s == 1 and a + b > 0 for s, (a, b, _) in axes)), apart=x.apart,
    )  # fmt: skip


def platform_index(platforms: Sequence[object], **_: Any) -> Abstract:
    """Returns the value of a platform's index in a list. No record changes it."""
    none = np.zeros(()), 0.0, 0.0
    last = np.array(len(platforms) - 1.0)
    return make((), np.dtype(np.int32), np.zeros(()), last, None, none, none, whole=True)


def iota(shape: Sequence[int], dimension: int, dtype: np.dtype, **_: Any) -> Abstract:
    """Returns the value of an array with the entries 0, 1, 2, ... along `dimension`."""
    dtype, size = np.dtype(dtype), shape[dimension]
    # Integers wrap around: in uint8, 255 is followed by 0.
    largest = np.iinfo(dtype).max if dtype.kind in "iu" else rounding.exact_integers(dtype)
    if dtype.kind not in "fiu" or size - 1 > largest:
        raise RefusalError("iota has more entries than its dtype can represent. Use a wider dtype")
    short = [size if k == dimension else 1 for k in range(len(shape))]
    return stretched(constant(np.arange(size, dtype=dtype).reshape(short)), shape)
