"""Arrays with and without an axis of records, and arrays that are repeated."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, Difference, RefusalError, difference, meet, over


def as_dense(x: Abstract) -> Abstract:
    """Returns the array without an axis of records, and bounds the change of all rows together.

    In x, `changed` bounds the change of one row, and `others` that of each of the n - 1 other rows.
    The l1 norms of rows add up, and so do the squares of their l2 norms.
    """
    if x.axis is None:
        return x
    rest = x.n - 1
    each = np.maximum(x.changed.each, x.others.each if rest else 0.0)
    l1 = float(rounding.up(x.changed.l1 + rest * x.others.l1))
    l2 = float(rounding.up(rounding.norm2([x.changed.l2, math.sqrt(rest) * x.others.l2])))
    count = x.changed.count + (rest * x.others.count if rest else 0.0)
    dense = difference(each, x.shape, None, l1=l1, l2=l2, count=count, whole=x.whole)
    return dataclasses.replace(
        x, axis=None, changed=dense, others=dense, l1_of_row=math.inf, l2_of_row=math.inf,
        source=None,
    )  # fmt: skip


def as_rows(x: Abstract, axis: int) -> Abstract:
    """Returns the array with an axis of records.

    A row changes by at most as much as the whole array.
    """
    if x.axis == axis:
        return x
    x = as_dense(x)
    each = x.others.each
    if not x.is_public and not without_middle(each, x.shape, axis).any():
        # Only the middle entry of this array can change. `check_surrounded` must refuse sums of
        # such an array, but cannot recognize the array if only bounds on rows are left. So the
        # array is refused here.
        raise RefusalError(
            f"proofs do not support combining an array with records along axis {axis} and an array "
            "in which only one entry along this axis can change"
        )
    each = over(each, axis)
    d = x.others
    row = difference(each, x.shape, axis, l1=d.l1, l2=d.l2, count=d.count, whole=x.whole)
    size = difference(over(x.magnitude, axis), x.shape, axis)
    return dataclasses.replace(
        x, axis=axis, changed=row, others=row, l1_of_row=size.l1, l2_of_row=size.l2, source=None
    )


def without_middle(array: np.ndarray, shape: Sequence[int], axis: int) -> np.ndarray:
    """Returns all entries along an axis except the middle one, if there is one."""
    size = shape[axis]
    if array.shape[axis] == 1 or size % 2 == 0:
        return array
    return np.delete(array, size // 2, axis)


def stretched(x: Abstract, shape: Sequence[int]) -> Abstract:
    """Returns the array repeated along axes of length 1, or a scalar repeated everywhere."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if not x.shape:
        ones = (1,) * len(shape)
        d = dataclasses.replace(x.others, each=x.others.each.reshape(ones))
        ends = {"low": x.low.reshape(ones), "high": x.high.reshape(ones)}
        x = dataclasses.replace(x, shape=ones, changed=d, others=d, **ends)
    repeated = {k for k, (a, b) in enumerate(zip(x.shape, shape, strict=False)) if a != b}
    if len(x.shape) != len(shape) or any(x.shape[k] != 1 for k in repeated):
        raise RefusalError(f"proofs do not support broadcasting shape {x.shape} to {shape}")
    # If there is a single record and the axis of records is repeated, this axis no longer indexes
    # records.
    if x.axis in repeated:
        x = as_dense(x)
    copies = math.prod(shape[k] for k in repeated)

    def more(d: Difference) -> Difference:
        l1, l2 = d.l1 * copies, d.l2 * math.sqrt(copies)
        return difference(
            d.each, shape, x.axis, l1=float(rounding.up(l1)), l2=float(rounding.up(l2)),
            count=d.count * copies, whole=x.whole,
        )  # fmt: skip

    norms = x.l1_of_row * copies, x.l2_of_row * math.sqrt(copies)
    return dataclasses.replace(
        x, shape=shape, changed=more(x.changed), others=more(x.others), tied=x.tied | repeated,
        l1_of_row=float(rounding.up(norms[0])), l2_of_row=float(rounding.up(norms[1])),
        source=None, replaced=math.inf,
    )  # fmt: skip


def aligned(*values: Abstract) -> list[Abstract]:
    """Broadcasts the values to one shape. All get the same axis of records, or none has one."""
    shape = np.broadcast_shapes(*(x.shape for x in values))
    full = [stretched(x, shape) for x in values]
    axis = next((x.axis for x in full if x.axis is not None), None)
    if axis is None:
        return full
    # If an array gets an axis of records, its bounds must allow every row to change. If only a few
    # of its entries can change, this makes the bounds much larger. So if one of the arrays has
    # fewer changing entries than rows, no array gets the axis.
    if any(x.axis is None and 0 < x.others.count < shape[axis] for x in full):
        return list(map(as_dense, full))
    return [_rows_of(x, y, axis) for x, y in zip(values, full, strict=True)]


def _rows_of(x: Abstract, repeated: Abstract, axis: int) -> Abstract:
    """Returns `repeated`, which contains copies of x, with `axis` as its axis of records.

    If all rows are copies of one row of x, each of them changes as much as this row.
    """
    copied = len(x.shape) == len(repeated.shape) and x.shape[axis] == 1 < repeated.shape[axis]
    if repeated.axis == axis or not copied or repeated.is_public:
        return as_rows(repeated, axis)
    shape = [1 if k == axis else size for k, size in enumerate(repeated.shape)]
    one = as_dense(stretched(as_dense(x), shape))
    size = difference(one.magnitude, one.shape, None)
    return dataclasses.replace(
        one, shape=repeated.shape, axis=axis, tied=repeated.tied, source=None, l1_of_row=size.l1,
        l2_of_row=size.l2,
    )  # fmt: skip


def counted(found: Abstract, operands: Sequence[Abstract]) -> Abstract:
    """Bounds how many entries change in the result of an elementwise operation.

    An entry changes only if an entry of an operand does.

    But if an operand is a sum, a compiler may use the other operand as the initial value of this
    sum, which changes its rounding. Then the result may change where the terms of the sum change,
    even if the sum does not. So the bound on such a result is not tightened.
    """
    if not found.whole and any(x.pending.starts for x in operands):
        return found
    xs = aligned(*operands)
    if xs[0].axis != found.axis or xs[0].shape != found.shape:
        return found

    counts = sum(x.changed.count for x in xs), sum(x.others.count for x in xs)
    fewer = counts[0] < found.changed.count or counts[1] < found.others.count
    return meet(found, counts=counts) if fewer else found


@np.errstate(all="ignore")
def norm_of(outputs: Sequence[Abstract], norm: str) -> float:
    """Returns a bound on the norm of the difference of all outputs together."""
    found = [as_dense(x).others for x in outputs]
    if norm == "l1":
        bound = sum(d.l1 for d in found)
    elif norm == "l2":
        bound = rounding.norm2([d.l2 for d in found])
    else:
        bound = max(float(d.each.max()) for d in found)
    return float(rounding.up(rounding.up(bound)))
