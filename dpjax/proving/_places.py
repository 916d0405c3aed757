"""Rules of gather and scatter, with indices that may be private."""

import dataclasses
import math
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import check_inside, check_places, place, squeeze
from dpjax.proving._reductions import is_exact
from dpjax.proving._value import Abstract, Difference, Moves, Pending, RefusalError, make

_MOST_ROWS = 128


def gather(x: Abstract, index: Abstract, **parameters: Any) -> Abstract:
    """Entries of an array at a public index, or rows of a public table at private ones."""
    rule = _take if index.is_known and not x.is_public else _look_up
    return rule(x, index, **parameters)


def _form_of(numbers: Any) -> tuple[tuple[int, ...], ...]:
    """The dimension numbers of a gather, as tuples of axes that can be compared.

    The tuples contain the axes of the operand that the gather drops, that the indices select, and
    that are batch axes, and the axes of rows in the result.
    """
    dropped, chosen = numbers.collapsed_slice_dims, numbers.start_index_map
    return tuple(map(tuple, (dropped, chosen, numbers.operand_batching_dims, numbers.offset_dims)))


def _look_up(
    table: Abstract, places: Abstract, *, dimension_numbers: Any, slice_sizes: Any, **_: Any
) -> Abstract:
    """Rows of a public table at private indices. A row moves if its index moves."""
    batch, size = places.shape[:-1], table.shape[1:]
    rows = range(len(batch), len(batch) + len(size))
    plain = places.shape[-1:] == (1,) and tuple(slice_sizes) == (1, *size)
    plain = plain and _form_of(dimension_numbers) == ((0,), (0,), (), tuple(rows))
    if not plain or not table.is_known or not table.is_finite:
        raise RefusalError("a gather of this form has no rule: look up rows of a public table")
    check_places(places, table.shape[0])
    if places.axis == len(batch):
        raise RefusalError("indices of this form have no rule")
    first, last = int(places.low.min()), int(places.high.max())
    check_inside(first, last, table.shape[0])
    rows = np.broadcast_to(table.low, table.shape)[first : last + 1].reshape(last - first + 1, -1)
    ones = (1,) * len(batch)
    low, high = (pick(rows, axis=0).reshape((*ones, *size)) for pick in (np.min, np.max))
    flush = 0.0 if table.whole else 4 * rounding.tiny(table.dtype)
    each_row = len(batch) == 1 and places.axis == 0
    farthest = math.inf
    if each_row and len(rows) <= _MOST_ROWS:
        # Squares of tiny numbers underflow to 0 on the host. Adding 2^-400 covers that.
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
    )  # fmt: skip


def _take(
    x: Abstract, index: Abstract, *, dimension_numbers: Any, slice_sizes: Any, **_: Any
) -> Abstract:
    """All entries at one public index of an axis, such as an order statistic of sorted records."""
    axes = tuple(dimension_numbers.start_index_map)
    sizes = [1 if k in axes else s for k, s in enumerate(x.shape)]
    plain = index.shape == (1,) and len(axes) == 1 and list(slice_sizes) == sizes
    rest = tuple(range(len(x.shape) - 1))
    plain = plain and _form_of(dimension_numbers) == (axes, axes, (), rest)
    if not plain:
        raise RefusalError(
            "a gather of this form has no rule: take one index along one axis, as x[:, 2]"
        )
    start, axis = int(index.low.flat[0]), axes[0]
    check_places(index, x.shape[axis])
    check_inside(start, start, x.shape[axis])
    return squeeze(place(x, axis, start), axes)


def scatter_add(
    start: Abstract, places: Abstract, updates: Abstract, *, dimension_numbers: Any, mode: Any,
    unique_indices: bool = False, indices_are_sorted: bool = False, **_: Any,
) -> Abstract:  # fmt: skip
    """Adds a number or row u of each record at index i of a public array, as a histogram does.

    Replacing a record by one with u' and i' subtracts u at i, and adds u' at i'. If i and i'
    differ, the difference has the norm |u| + |u'| in l1, and sqrt(|u|^2 + |u'|^2) in l2. If they
    agree, it is u' - u. If an index is out of bounds, nothing is added there, and the difference is
    smaller.
    """
    if unique_indices or indices_are_sorted:
        raise RefusalError("a promise about private indices has no rule: leave it out")
    n, size, bins, dtype = updates.shape[0], start.shape[1:], start.shape[0], start.dtype
    plain = (
        updates.shape == (n, *size)
        and places.shape == (n, 1)
        and tuple(dimension_numbers.update_window_dims) == tuple(range(1, len(updates.shape)))
        and tuple(dimension_numbers.inserted_window_dims) == (0,)
        and tuple(dimension_numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(dimension_numbers.operand_batching_dims) == ()
    )
    if not plain or not start.is_public or {places.axis, updates.axis} - {0, None}:
        raise RefusalError(
            "a scatter of this form has no rule: add one number or row per record to one axis"
        )
    check_places(places, bins)
    if dtype != updates.dtype:
        raise RefusalError("a scatter of these dtypes has no rule")
    public = places.is_public and updates.is_public
    by_record = places.others.is_zero and updates.others.is_zero
    if not public and not (by_record and 0 in (places.axis, updates.axis)):
        raise RefusalError("indices or numbers that depend on several records have no rule")
    inside = places.low.min() >= 0 and places.high.max() < bins
    mode = str(getattr(mode, "name", mode)).lower()
    if not inside and mode not in ("fill_or_drop", "clip"):
        raise RefusalError("an index may be out of bounds: clip the index")
    first = float(start.magnitude.max())
    largest = np.broadcast_to(updates.magnitude.max(axis=0, keepdims=True), (1, *size))
    sizes = rounding.up(first + n * largest)
    whole = is_exact(start.whole and updates.whole, sizes, dtype)
    # Rounding errors: `one` for each entry, and `all_` for the sum over all entries. The entries of
    # the result together are sums of n rows and the entries of `start`.
    one = all_ = np.zeros_like(sizes)
    if not whole:
        gamma, flush = rounding.sum_units(n + 1, dtype), 4 * rounding.tiny(dtype) * (n + 1)
        one = rounding.up(gamma * sizes + flush)
        all_ = rounding.up(gamma * (sizes + bins * first) + flush * bins)
        all_ = np.minimum(all_, one * bins)
    moves = updates.changed
    each, l1, l2 = moves.each.max(axis=0, keepdims=True), moves.l1, moves.l2
    if not places.is_public:
        width = largest.size
        l1 = max(l1, 2 * float(rounding.up(largest.sum() * (1 + (width + 100) * 2.0**-52))))
        row = min(updates.l2_of_row, float(rounding.up(rounding.norm2(largest))))
        l2 = max(l2, math.sqrt(2) * (1 + 2.0**-40) * row)
        each = np.maximum(each, largest)
    moved = (
        rounding.up(each + 2 * one),
        float(rounding.up(l1 + 2 * all_.sum())),
        float(rounding.up(l2 + 2 * rounding.norm2(np.minimum(all_, one * math.sqrt(bins))))),
    )
    low, high = updates.low.min(axis=0, keepdims=True), updates.high.max(axis=0, keepdims=True)
    low, high = start.low + n * np.minimum(low, 0.0), start.high + n * np.maximum(high, 0.0)
    ends = rounding.widened(low, high, rounding.up(one + 2.0**-48 * sizes * (not whole)))
    found = make(start.shape, dtype, *ends, None, moved, moved, whole=whole)
    pending = Pending.of_sum(n, float(sizes.max())).having(single=n == 1)
    return dataclasses.replace(found, pending=pending)
