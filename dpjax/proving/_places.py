"""Rules of gather and scatter, with indices that may be private."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import check_inside, check_places, reshape, squeeze, transpose
from dpjax.proving._rows import as_dense
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    Pending,
    RefusalError,
    make,
    result_of,
    rounded_up,
)

_MOST_ROWS = 128
# If a program computes a public index in floats, the proof knows only an interval that contains the
# index. The ends of the interval may differ by at most this number.
_MOST_OPEN = 4


def gather(x: Abstract, index: Abstract, **parameters: Any) -> Abstract:
    """Returns the value of a gather: entries at a public index, or rows of a table."""
    rule = _take if index.is_public and not x.is_public else _look_up
    return rule(x, index, **parameters)


def _form_of(numbers: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the dimension numbers of a gather as tuples of axes, for comparison.

    The tuples have the axes of the operand that the gather drops, the axes that the indices select,
    the batch axes, and the axes of rows in the result.
    """
    dropped, chosen = numbers.collapsed_slice_dims, numbers.start_index_map
    return tuple(map(tuple, (dropped, chosen, numbers.operand_batching_dims, numbers.offset_dims)))


def _look_up(
    table: Abstract, places: Abstract, *, dimension_numbers: Any, slice_sizes: Any, **_: Any
) -> Abstract:
    """Returns the value of table[places] for private indices `places`, which select rows.

    If an index changes, the row that it selects changes. If the table is private, the change of a
    row is bounded only by the range of the table.
    """
    batch, size = places.shape[:-1], table.shape[1:]
    rows = range(len(batch), len(batch) + len(size))
    plain = places.shape[-1:] == (1,) and tuple(slice_sizes) == (1, *size)
    plain = plain and _form_of(dimension_numbers) == ((0,), (0,), (), tuple(rows))
    if not plain or not table.is_finite:
        raise RefusalError(
            "proofs support a gather at private indices only if it looks up whole rows of an "
            "array. Index the first axis alone, as in table[i]"
        )
    check_places(places, table.shape[0])
    if places.axis == len(batch):
        raise RefusalError("proofs do not support indices whose last axis is the axis of records")
    first, last = int(places.low.min()), int(places.high.max())
    check_inside(first, last, table.shape[0])
    ones = (1,) * len(batch)
    if not table.is_known:  # Then any row of the table may be selected.
        ends = table.low.min(0), table.high.max(0)
        low, high = (end.reshape((*ones, *end.shape)) for end in ends)
        width = rounding.up(high - low), math.inf, math.inf
        return make(
            (*batch, *size), table.dtype, low, high, None, width, width, whole=table.whole
        )  # fmt: skip
    rows = np.broadcast_to(table.low, table.shape)[first : last + 1].reshape(last - first + 1, -1)
    low, high = (pick(rows, axis=0).reshape((*ones, *size)) for pick in (np.min, np.max))
    flush = 0.0 if table.whole else 4 * rounding.tiny(table.dtype)
    each_row = len(batch) == 1 and places.axis == 0
    farthest = math.inf
    if each_row and len(rows) <= _MOST_ROWS:
        # Adding 2^-400 covers squares of tiny numbers that underflow to 0 on the host.
        apart = float(np.linalg.norm(rows[:, None] - rows[None], axis=-1).max())
        farthest = apart * (1 + 2.0**-30) + 2.0**-400 + flush * rows.shape[1]

    def moved(d: Difference) -> Moves:
        still = d.each.max(axis=-1).reshape((*d.each.shape[:-1], *(1,) * len(size))) == 0
        each = np.where(still, 0.0, high - low + flush)
        return rounding.up(each), math.inf, farthest

    norm = max(rounding.norm2(np.abs(row)) for row in rows) if each_row else math.inf
    norm = float(rounding.up(norm)) * (1 + 2.0**-30)
    return make(
        (*batch, *size), table.dtype, low, high, places.axis, moved(places.changed),
        moved(places.others), whole=table.whole, l2_of_row=norm,
        apart=math.inf if places.apart else flush,
    )  # fmt: skip


def _take(
    x: Abstract, index: Abstract, *, dimension_numbers: Any, slice_sizes: Any, **_: Any
) -> Abstract:
    """Returns the value of entries at public indices of an axis, such as order statistics.

    If the program computes an index in floats, the proof may know several candidates for it. The
    index is the same on both databases. If an entry is taken m times, its change counts m times in
    the l1 norm, and sqrt(m) times in the l2 norm.
    """
    axes: Any = tuple(dimension_numbers.start_index_map)
    every = tuple(range(len(x.shape)))
    if len(axes) > 1 and _form_of(dimension_numbers) == (every, every, (), ()):
        return _entries(x, index)
    sizes = [1 if k in axes else s for k, s in enumerate(x.shape)]
    plain = index.shape[-1:] == (1,) and len(index.shape) <= 2 and len(axes) == 1
    rank, rows = len(x.shape) + len(index.shape) - 2, tuple(dimension_numbers.offset_dims)
    plain = plain and list(slice_sizes) == sizes and len(rows) == len(x.shape) - 1
    if not plain or _form_of(dimension_numbers)[:3] != (axes, axes, ()):
        raise RefusalError(
            "proofs support a gather at public indices only along one axis. Use jnp.take with one "
            "axis"
        )
    axis = axes[0]
    check_places(index, x.shape[axis])
    first, last = (
        np.broadcast_to(end, index.shape).ravel().astype(int) for end in (index.low, index.high)
    )
    check_inside(first.min(), last.max(), x.shape[axis])
    width = int((last - first).max())
    if width > _MOST_OPEN:
        raise RefusalError(
            "an index is public, but the proof does not know its value. Compute the index with "
            "NumPy"
        )
    found = _picked(x, axis, first, last)
    where = set(range(rank)) - set(rows)
    if not where:
        return squeeze(found, [axis])
    order = [k for k in range(rank) if k != axis]
    order.insert(min(where), axis)
    return transpose(found, order)


def _picked(x: Abstract, axis: int, first: np.ndarray, last: np.ndarray) -> Abstract:
    """Returns the value of entries at indices of an axis, each index between `first` and `last`."""
    if x.axis == axis:
        x = as_dense(x)
    starts, ends = (np.bincount(k, minlength=x.shape[axis] + 1) for k in (first, last + 1))
    most = float((starts - ends).cumsum().max())
    places = [np.minimum(first + k, last) for k in range(int((last - first).max()) + 1)]

    def move(array: np.ndarray, pick: Any) -> np.ndarray:
        one = array.shape[axis] == 1
        return pick([array if one else array.take(k, axis) for k in places], axis=0)

    def moved(d: Difference) -> Moves:
        l1, l2 = rounding.up(d.l1 * most), rounding.up(d.l2 * math.sqrt(most))
        return move(d.each, np.max), float(l1), float(l2)

    shape = [len(first) if k == axis else size for k, size in enumerate(x.shape)]
    low, high = move(x.low, np.min), move(x.high, np.max)
    return result_of(x, low, high, moved, shape=shape, whole=x.whole, apart=x.apart)


def _entries(x: Abstract, index: Abstract) -> Abstract:
    """Returns the value of single entries at known indices, such as a diagonal."""
    check_places(index, max(x.shape))
    if not index.is_known or len(index.shape) != 2:
        raise RefusalError(
            "proofs support a gather that indexes several axes only if its indices are a single "
            "list of constants. Compute them with NumPy"
        )
    places = np.broadcast_to(index.low, index.shape).astype(int).T
    for indices, size in zip(places, x.shape, strict=True):
        check_inside(indices.min(), indices.max(), size)
    flat: Any = np.ravel_multi_index(tuple(places), x.shape)
    return _picked(reshape(as_dense(x), [math.prod(x.shape)]), 0, flat, flat)


def check_scatter(
    start: Abstract, places: Abstract, updates: Abstract, numbers: Any, mode: Any, *,
    unique_indices: bool = False, indices_are_sorted: bool = False, **_: Any,
) -> tuple[tuple[int, ...], int]:  # fmt: skip
    """Returns the shape of a record's row, and the number of possible indices of a row.

    Raises:
        RefusalError: if the scatter does not add one number or row of each record at one index.
    """
    if unique_indices or indices_are_sorted:
        raise RefusalError(
            "proofs do not support unique_indices or indices_are_sorted. Leave them out"
        )
    n, axes = updates.shape[0], places.shape[-1]
    size, leading = start.shape[axes:], start.shape[:axes]
    every, rows = tuple(range(axes)), tuple(range(1, len(updates.shape)))
    plain = tuple(map(tuple, numbers)) == (rows, every, every, (), ())
    plain = plain and (updates.shape, places.shape) == ((n, *size), (n, axes))
    if not plain or not start.is_public or {places.axis, updates.axis} - {0, None}:
        raise RefusalError(
            "proofs support a scatter only if each record puts one number or one row at one index "
            "of a public array. Write it in this form, for example jnp.zeros(k).at[i].add(x)"
        )
    check_places(places, max(leading))
    if start.dtype != updates.dtype:
        raise RefusalError(
            "proofs support a scatter only if the updates have the dtype of the array that they "
            "are added to"
        )
    public = places.is_public and updates.is_public
    by_record = places.others.is_zero and updates.others.is_zero
    if not public and not (by_record and 0 in (places.axis, updates.axis)):
        raise RefusalError(
            "proofs support a scatter only if each index and each update depends on one record"
        )
    highest = np.broadcast_to(places.high, (*places.high.shape[:-1], axes)).max(axis=0)
    inside = places.low.min() >= 0 and (highest < np.array(leading)).all()
    mode = str(getattr(mode, "name", mode)).lower()
    if not inside and mode not in ("fill_or_drop", "clip"):
        raise RefusalError("an index may be out of bounds. Clip it first")
    return size, math.prod(leading)


def moved_rows(places: Abstract, updates: Abstract, size: Sequence[int], off: float = 0.0) -> Moves:
    """Bounds how much the sums at each index change if one record changes.

    Each number of a record has an error of up to `off`. The rounding of the sums is not included.
    """
    d, width = updates.changed, math.prod(size)
    largest = np.broadcast_to(updates.magnitude.max(axis=0, keepdims=True), (1, *size)) + off
    each = d.each.max(axis=0, keepdims=True)
    each = np.where(each > 0, each + 2 * off, 0.0)
    l1, l2 = d.l1 + 2 * off * width, d.l2 + 2 * off * math.sqrt(width)
    if not places.is_public:
        l1 = max(l1, 2 * float(rounding.up(largest.sum() * (1 + (width + 100) * 2.0**-52))))
        row = min(updates.l2_of_row + off * math.sqrt(width), rounding.norm2(largest))
        l2 = max(l2, math.sqrt(2) * (1 + 2.0**-40) * float(rounding.up(row)))
        each = np.maximum(each, largest)
    return each, l1, l2


def scatter_extremum(
    start: Abstract, places: Abstract, updates: Abstract, *, largest: bool,
    dimension_numbers: Any, mode: Any, **promises: Any,
) -> Abstract:  # fmt: skip
    """Returns the value of an extremum of the records at each index, as in `jax.ops.segment_max`.

    If the index of a record changes, the extrema at its old and at its new index may change. So at
    most two rows change, each within its range. If the index does not change, only the row at this
    index changes, by at most as much as the record.
    """
    size, _ = check_scatter(start, places, updates, dimension_numbers, mode, **promises)
    axes = len(start.shape) - len(size)
    if not start.is_finite:
        raise RefusalError(
            "the extremum at an index without records would be infinite. Start with finite public "
            "numbers, for example jnp.zeros(k).at[i].max(x)"
        )
    row = (1,) * axes + tuple(size)
    low, high = updates.low.min(axis=0), updates.high.max(axis=0)
    low, high = (np.broadcast_to(end, size).reshape(row) for end in (low, high))
    ends = start.low, np.maximum(start.high, high)
    if not largest:
        ends = np.minimum(start.low, low), start.high
    d, whole = updates.changed, start.whole and updates.whole
    flush = 0.0 if whole else 4 * rounding.tiny(updates.dtype)
    width = np.max(ends[1] - ends[0], axis=tuple(range(axes)), keepdims=True)
    each = np.minimum(np.broadcast_to(d.each.max(axis=0), size).reshape(row), width)
    l1, l2 = min(d.l1, float(rounding.up(each.sum()))), min(d.l2, rounding.norm2(each))
    if not places.is_public:
        each = np.broadcast_to(width, row)
        l1 = max(l1, 2 * float(rounding.up(each.sum())))
        l2 = max(l2, math.sqrt(2) * (1 + 2.0**-40) * rounding.norm2(each))
    each = np.where(each > 0, rounding.up(each + flush), 0.0)
    count = math.prod(start.shape) * flush
    moved = each, float(rounding.up(l1 + count)), float(rounding.up(l2 + count))
    apart = math.inf if places.apart else max(start.apart, updates.apart) + flush
    return make(
        start.shape, start.dtype, *ends, None, moved, moved, apart=apart, whole=whole,
        pending=Pending(single=updates.shape[0] == 1), counts=[2.0 * math.prod(size)] * 2,
    )  # fmt: skip


def scatter_set(
    start: Abstract, places: Abstract, updates: Abstract, **parameters: Any
) -> Abstract:
    """Returns the value of a scatter that writes one public number at the index of each record.

    If the numbers may differ, the scatter is refused, because the order of writes to one index is
    not defined.
    """
    known = updates.is_known and bool((updates.low == updates.low.flat[0]).all())
    if not known or not start.is_known:
        raise RefusalError(
            "two records may write to the same index, and it is not defined which of them writes "
            "last. Write one public number, or use .at[i].max(x) instead"
        )
    number = float(updates.low.flat[0])
    ends = np.minimum(start.low, number), np.maximum(start.high, number)
    # A row either keeps its start value or becomes the public number. So it is within `ends`. A
    # scatter that takes a maximum has the same property, so its rule applies here.
    reach = dataclasses.replace(start, low=ends[0], high=ends[1])
    return scatter_extremum(reach, places, updates, largest=True, **parameters)


def scatter_add(
    start: Abstract, places: Abstract, updates: Abstract, *, dimension_numbers: Any, mode: Any,
    **promises: Any,
) -> Abstract:  # fmt: skip
    """Returns the value of a scatter-add of one number or row of each record, as in a histogram.

    Let u be the number or row of a record, and i its index. If u and i are replaced by u' and i',
    the result changes by -u at i, and by u' at i'. If i and i' differ, the change has the l1 norm
    |u| + |u'|, and the l2 norm sqrt(|u|^2 + |u'|^2). If i = i', the change is u' - u. If an index
    is out of bounds, nothing is added, and the change is smaller.
    """
    size, bins = check_scatter(start, places, updates, dimension_numbers, mode, **promises)
    n, dtype = updates.shape[0], start.dtype
    axes = len(start.shape) - len(size)
    first = float(start.magnitude.max())
    largest = np.broadcast_to(updates.magnitude.max(axis=0, keepdims=True), (1, *size))
    sizes = rounding.up(first + n * largest)
    whole = start.whole and updates.whole and rounding.holds(sizes, sizes, dtype)
    # `one` bounds the rounding error of each entry, and `all_` bounds the sum of these errors. Each
    # of the n rows is added at one index only. So in the sum of the errors, each of the n rows and
    # each entry of `start` counts once.
    one = all_ = np.zeros_like(sizes)
    if not whole:
        gamma, flush = rounding.sum_units(n + 1, dtype), 4 * rounding.tiny(dtype) * (n + 1)
        one = rounding.up(gamma * sizes + flush)
        all_ = rounding.up(gamma * (sizes + bins * first) + flush * bins)
        all_ = np.minimum(all_, one * bins)
    each, l1, l2 = moved_rows(places, updates, size)

    def put(row: np.ndarray) -> np.ndarray:
        """Returns the bounds on a row, in a shape that broadcasts to all rows of the result."""
        return row.reshape((1,) * axes + row.shape[1:])

    slip2 = rounding.norm2(np.minimum(all_, one * math.sqrt(bins)))
    moved = rounded_up(put(each + 2 * one), l1 + 2 * all_.sum(), l2 + 2 * slip2)
    low, high = updates.low.min(axis=0, keepdims=True), updates.high.max(axis=0, keepdims=True)
    low, high = (
        end + n * put(pick(row, 0.0))
        for end, row, pick in ((start.low, low, np.minimum), (start.high, high, np.maximum))
    )
    ends = rounding.widened(low, high, put(rounding.up(one + 2.0**-48 * sizes * (not whole))))
    # If sums are exact, at most two rows change. Otherwise all of them may change, because a GPU
    # may add floats in another order, so that sums of equal terms differ.
    counts = [2.0 * math.prod(size) if whole else math.inf] * 2
    # An exact sum is the same number wherever it is used, even if a compiler computes it twice.
    apart = 0.0 if whole and places.apart == updates.apart == 0 else math.inf
    # The l1 norm of the result is at most the l1 norm of the start plus the l1 norms of all
    # updates.
    total = bins * first * math.prod(size) + float((n * largest + all_).sum())
    return make(
        start.shape, dtype, *ends, None, moved, moved, whole=whole, counts=counts, apart=apart,
        l1_of_row=float(rounding.up(total * (1 + 2.0**-30))),
        pending=Pending.of_sum(n, float(sizes.max())).having(single=n == 1),
    )  # fmt: skip
