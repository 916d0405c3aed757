"""Rules of sums, extrema and sorts.

Where the records are reduced, one row moves within `changed` and n - 1 rows within `others`.
"""

import math
from collections.abc import Sequence

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._pending import flattened
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, Difference, as_dense, make


def _axes_after(x: Abstract, axes: Sequence[int]) -> tuple[tuple[int, ...], int | None]:
    shape = tuple(size for k, size in enumerate(x.shape) if k not in axes)
    if x.axis is None or x.axis in axes:
        return shape, None
    return shape, x.axis - sum(k < x.axis for k in axes)


def _summed(array: np.ndarray, shape: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """The sum of an array of which axes of length 1 stand for all of their places."""
    copies = math.prod(shape[k] // array.shape[k] for k in axes)
    total = array.sum(tuple(axes)) * copies
    return total


def sum_over(x: Abstract, axes: Sequence[int]) -> Abstract:
    """A sum of N terms in any order: sum x_i (1 + theta_i), |theta_i| <= gamma (Higham 2002).

    Integers that the dtype holds are added exactly. A sum of sums may become one sum of all their
    terms.
    """
    axes = tuple(k % len(x.shape) for k in axes)
    shape, axis = _axes_after(x, axes)
    count = math.prod(x.shape[k] for k in axes)
    room = 1 + (count + 100) * 2.0**-52
    terms, weight = flattened(x)
    sizes = np.maximum(_summed(x.magnitude, x.shape, axes), count * weight) * room
    exact = x.whole and (
        x.dtype.kind != "f" or float(sizes.max()) <= rounding.exact_integers(x.dtype)
    )
    gamma = 0.0 if exact else rounding.sum_units(count * terms, x.dtype)
    if not math.isfinite(gamma):
        raise RefusalError(
            f"a sum of {count} numbers in {x.dtype} may lose all digits: use float64"
        )
    flush = 0.0 if exact else 4 * rounding.tiny(x.dtype) * (count + 1)
    slack = np.abs(x.low) * gamma, np.abs(x.high) * gamma
    low = _summed(x.low - slack[0], x.shape, axes)
    high = _summed(x.high + slack[1], x.shape, axes)
    host = np.asarray(sizes * (room - 1) if not exact else 0.0)
    joined = gamma * sizes if terms > 1 else 0.0
    low, high = rounding.widened(low, high, host + flush + joined)
    if (x.low >= 0).all():  # Sums of numbers above 0 are, too, in any rounding.
        low = np.maximum(low, 0.0)
    slip_full = gamma * sizes + flush
    slip = slip_full if axis is None else slip_full.max(axis=axis, keepdims=True)
    inner = [k for k in axes if k != x.axis]
    width = math.prod(x.shape[k] for k in inner)
    rest = x.n - 1 if x.axis in axes else 0
    short = tuple(1 if k == x.axis else size for k, size in enumerate(x.shape))

    def moved(first: Difference, second: Difference) -> tuple[np.ndarray, float, float]:
        l1 = first.l1 + rest * second.l1
        l2 = math.sqrt(width) * (first.l2 + rest * second.l2)
        each = _summed(first.each, short, axes) + rest * _summed(second.each, short, axes)
        each = np.minimum(each * room, l1)
        slips = np.where(each > 0, 2 * slip, 0.0)
        copies = math.prod(s for k, s in enumerate(shape) if k != axis) / max(1, slips.size)
        return (
            rounding.up(each + slips),
            float(rounding.up(l1 + slips.sum() * copies)),
            float(rounding.up(l2 + rounding.norm2(slips, copies))),
        )

    changed, others = moved(x.changed, x.others), moved(x.others, x.others)
    if axis is None:
        others = changed
    pending = Pending(terms=count * terms, weight=float(sizes.max()))
    apart = float(rounding.up(count * x.apart + 2 * float(slip_full.max())))
    return make(
        shape, x.dtype, low, high, axis, changed, others, whole=exact, pending=pending, apart=apart
    )


def extremum_over(x: Abstract, axes: Sequence[int], *, largest: bool) -> Abstract:
    """|max_i x_i - max_i y_i| <= max_i |x_i - y_i|; also logical or and and."""
    axes = tuple(k % len(x.shape) for k in axes)
    shape, axis = _axes_after(x, axes)
    pick = np.max if largest else np.min
    dense = as_dense(x) if x.axis in axes else x
    flush = 0.0 if x.whole else 4 * rounding.tiny(x.dtype)

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        each = d.each.max(axes)
        each = each + np.where(each > 0, flush, 0.0)
        count = math.prod(shape) * flush
        return each, float(rounding.up(d.l1 + count)), float(rounding.up(d.l2 + count))

    low, high = pick(x.low, axis=axes), pick(x.high, axis=axes)
    return make(
        shape, x.dtype, low, high, axis, moved(dense.changed), moved(dense.others), whole=x.whole,
        apart=x.apart + flush,
    )  # fmt: skip


def sort(x: Abstract, dimension: int) -> Abstract:
    """Sorting moves no two arrays further apart, in l1, l2 and linf.

    ||sort x - sort y||_p is the least ||x - P y||_p over permutations P (rearrangement inequality).
    """
    low = np.broadcast_to(x.low.min(dimension, keepdims=True), x.low.shape)
    high = np.broadcast_to(x.high.max(dimension, keepdims=True), x.high.shape)
    if x.axis == dimension:
        x = as_dense(x)
    flush = 0.0 if x.whole else 4 * rounding.tiny(x.dtype)

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        each = np.broadcast_to(d.each.max(dimension, keepdims=True), d.each.shape)
        each = each + np.where(each > 0, flush, 0.0)
        count = math.prod(x.shape) * flush
        return each, float(rounding.up(d.l1 + count)), float(rounding.up(d.l2 + count))

    return make(
        x.shape, x.dtype, low, high, x.axis, moved(x.changed), moved(x.others), whole=x.whole,
        apart=x.apart + flush,
    )  # fmt: skip
