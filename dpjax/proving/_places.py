"""Rules of places that a record chooses: rows of a public table, and rows added at a place."""

import dataclasses
import math
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import check_inside, check_places, cut, squeeze
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, Difference, make

_MOST_ROWS = 128


def look_up(table: Abstract, places: Abstract, parameters: Any) -> Abstract:
    """Rows of a public table at the places of the records: an entry moves where its place does."""
    numbers, batch = parameters["dimension_numbers"], places.shape[:-1]
    size = table.shape[1:]
    plain = (
        places.shape[-1:] == (1,)
        and tuple(parameters["slice_sizes"]) == (1, *size)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.operand_batching_dims) == ()
        and tuple(numbers.offset_dims) == tuple(range(len(batch), len(batch) + len(size)))
    )
    if not plain or not table.is_known or not table.is_finite:
        raise RefusalError("a gather of this form has no rule: look up rows of a public table")
    check_places(places, table.shape[0])
    if places.axis == len(batch):
        raise RefusalError("places of this form have no rule")
    first, last = int(places.low.min()), int(places.high.max())
    check_inside(first, last, table.shape[0])
    rows = np.broadcast_to(table.low, table.shape)[first : last + 1].reshape(last - first + 1, -1)
    ones = (1,) * len(batch)
    low, high = (pick(rows, axis=0).reshape((*ones, *size)) for pick in (np.min, np.max))
    flush = 0.0 if table.whole else 4 * rounding.tiny(table.dtype)
    each_row = len(batch) == 1 and places.axis == 0
    farthest = math.inf
    if each_row and len(rows) <= _MOST_ROWS:
        # The sum of squares of tiny numbers would be 0 on the host.
        apart = float(np.linalg.norm(rows[:, None] - rows[None], axis=-1).max())
        farthest = apart * (1 + 2.0**-30) + 2.0**-400 + flush * rows.shape[1]

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        still = d.each.max(axis=-1).reshape((*d.each.shape[:-1], *(1,) * len(size))) == 0
        each = np.where(still, 0.0, high - low + flush)
        return rounding.up(each), math.inf, farthest

    norm = max(rounding.norm2(np.abs(row)) for row in rows) if each_row else math.inf
    norm = float(rounding.up(norm)) * (1 + 2.0**-30)
    return make(
        (*batch, *size), table.dtype, low, high, places.axis, moved(places.changed),
        moved(places.others), whole=table.whole, l2_of_row=norm,
    )  # fmt: skip


def take(x: Abstract, index: Abstract, parameters: Any) -> Abstract:
    """All entries at one public place of an axis, as of sorted records."""
    numbers, whole = parameters["dimension_numbers"], list(x.shape)
    axes = tuple(numbers.start_index_map)
    plain = (
        index.shape == (1,)
        and len(axes) == 1
        and tuple(numbers.collapsed_slice_dims) == axes
        and tuple(numbers.operand_batching_dims) == ()
        and tuple(numbers.offset_dims) == tuple(range(len(whole) - 1))
        and list(parameters["slice_sizes"]) == [1 if k in axes else s for k, s in enumerate(whole)]
    )
    if not plain:
        raise RefusalError("a gather of this form has no rule: take one place of one axis")
    place, axis = int(index.low.flat[0]), axes[0]
    check_places(index, whole[axis])
    check_inside(place, place, whole[axis])
    starts = [place if k == axis else 0 for k in range(len(whole))]
    ends = [place + 1 if k == axis else size for k, size in enumerate(whole)]
    return squeeze(cut(x, starts, ends, [1] * len(whole)), axes)


def add_rows(start: Abstract, places: Abstract, updates: Abstract, parameters: Any) -> Abstract:
    """scatter_add of one row u a record into the rows of a public array: sums by group.

    A record leaves place i with u, and its replacement adds u' at i'. If the places differ, that
    moves |u| + |u'| in l1 and sqrt(|u|^2 + |u'|^2) in l2. If they agree it moves |u - u'|.
    """
    numbers, size = parameters["dimension_numbers"], start.shape[1:]
    plain = (
        len(updates.shape) == len(start.shape)
        and updates.shape[1:] == size
        and places.shape == (updates.shape[0], 1)
        and tuple(numbers.update_window_dims) == tuple(range(1, len(updates.shape)))
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.operand_batching_dims) == ()
    )
    if not plain or not start.is_public or {places.axis, updates.axis} - {0, None}:
        raise RefusalError("a scatter of this form has no rule: add one row per record")
    check_places(places, start.shape[0])
    if start.dtype != updates.dtype:
        raise RefusalError("a scatter of these dtypes has no rule")
    by_record = places.others.is_zero and updates.others.is_zero
    if not by_record or 0 not in (places.axis, updates.axis):
        raise RefusalError("places or numbers depend on several records: no rule")
    mode = str(getattr(parameters["mode"], "name", parameters["mode"])).lower()
    inside = places.low.min() >= 0 and places.high.max() < start.shape[0]
    if not inside and mode not in ("fill_or_drop", "clip"):
        raise RefusalError("a place may be out of bounds: clip the index")
    n, dtype, moves = updates.shape[0], start.dtype, updates.changed
    largest = updates.magnitude.max(axis=0, keepdims=True)
    sizes = np.broadcast_to(rounding.up(start.magnitude.max() + n * largest), (1, *size))
    whole = start.whole and updates.whole
    whole = whole and (dtype.kind != "f" or sizes.max() <= rounding.exact_integers(dtype))
    # Each bin has an error in proportion to what it adds up, and all bins add up n rows.
    bins, flush = start.shape[0], 4 * rounding.tiny(dtype) * (n + 1) * start.shape[0]
    whole_slip = rounding.sum_units(n + 1, dtype) * (sizes + bins * start.magnitude.max()) + flush
    slip = np.zeros_like(sizes) if whole else rounding.up(whole_slip)
    each, l1, l2 = moves.each.max(axis=0, keepdims=True), moves.l1, moves.l2
    if not places.is_public:
        width = math.prod(size)
        full = np.broadcast_to(largest, (1, *size))
        l1 = max(l1, 2 * float(rounding.up(full.sum() * (1 + (width + 100) * 2.0**-52))))
        l2 = max(l2, math.sqrt(2) * (1 + 2.0**-40) * updates.l2_of_row)
        each = np.maximum(each, largest)
    moved = (
        rounding.up(each + 2 * slip),
        float(rounding.up(l1 + 2 * slip.sum())),
        float(rounding.up(l2 + 2 * rounding.norm2(slip))),
    )
    low, high = updates.low.min(axis=0, keepdims=True), updates.high.max(axis=0, keepdims=True)
    low, high = start.low + n * np.minimum(low, 0.0), start.high + n * np.maximum(high, 0.0)
    ends = rounding.widened(low, high, rounding.up(slip + 2.0**-40 * sizes * (not whole)))
    found = make(start.shape, dtype, *ends, None, moved, moved, whole=whole)
    load = float(sizes.max()) + float(start.magnitude.max())
    return dataclasses.replace(found, pending=Pending.of_sum(n, load).having(single=n == 1))
