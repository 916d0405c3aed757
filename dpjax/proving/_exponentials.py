"""Lemmas of softmax, log_softmax and logsumexp; docs/proofs/global-sensitivity.md has the proofs.

All three subtract the largest operand first, so that exp sees numbers in [-W, 0], with W the width
of all operands together. Its relative error counts W, because the difference is rounded.
"""

import math

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, Difference, as_dense, make, over

_LARGEST_ERROR = 2.0**-4


def _error(x: Abstract, count: int) -> float:
    """The relative error of the exponentials, and of their sum.

    Numbers are used twice, and may be rounded in two ways; so is their maximum.
    """
    width = float(x.high.max() - x.low.min())
    units = 2 * rounding.elementary(x.dtype) + 40 * width + 64
    found = units * rounding.unit(x.dtype) + rounding.sum_units(count, x.dtype) + x.apart
    # e^x - 1 and -log(1 - x) are at most x / (1 - x).
    return found / (1 - found) if found <= _LARGEST_ERROR else math.inf


def _farthest_two(each: np.ndarray, axis: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """By how much the difference of two entries moves: of entry i and another one; of any two."""
    if count == 1:
        return np.zeros_like(each), np.zeros_like(each)
    if each.shape[axis] == 1:
        return 2 * each, 2 * each
    ordered = np.sort(each, axis)
    first, second = (np.take(ordered, [k], axis) for k in (-1, -2))
    return each + np.where(each == first, np.where(first == second, first, second), first), (
        first + second
    )


def softmax(x: Abstract, axis: int) -> Abstract | None:
    """The log odds of a set of entries move by at most t, its probability by tanh(t / 4)."""
    count = x.shape[axis]
    error = _error(x, count)
    if axis == x.axis or not math.isfinite(error):
        return None
    low, high = _probabilities(x, axis)
    flush = 8 * rounding.tiny(x.dtype) * (count + 1)
    error = rounding.of_quotient(error, x.dtype)

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        entry, both = _farthest_two(d.each, axis, count)
        each = np.tanh(entry / 4)
        largest = np.tanh(both / 4)
        copies = _copies(x, largest, axis)
        slip = np.where(largest > 0, 2 * (error + count * flush), 0.0)
        l1 = float((2 * largest + slip).sum()) * copies
        l2 = min(math.sqrt(2) * rounding.norm2(largest, copies), d.l2 / 2)
        l2 += rounding.norm2(slip, copies)
        each = each + np.where(each > 0, 2 * (error * over(high, x.axis) + flush), 0.0)
        return rounding.up(each) * (1 + 2.0**-40), _up(l1), _up(l2)

    low, high = low * (1 - error) * (1 - 2.0**-30) - flush, high * (1 + error) * (1 + 2.0**-30)
    return make(
        x.shape, x.dtype, np.maximum(low, 0.0), high + flush, x.axis, moved(x.changed),
        moved(x.others), apart=_up(2 * (error + flush)),
    )  # fmt: skip


def _copies(x: Abstract, array: np.ndarray, axis: int) -> float:
    """How many places each number of an array without that axis and the records stands for."""
    places = math.prod(s for k, s in enumerate(x.shape) if k not in (axis, x.axis))
    return places / max(1, array.size)


def _up(bound: float) -> float:
    return float(rounding.up(bound)) * (1 + 2.0**-40)


def _probabilities(x: Abstract, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """exp(l_i) / (exp(l_i) + sum of exp(h_j) over others), and the other way around."""
    top = float(x.high.max())
    ends = [np.exp(end - top) for end in np.broadcast_arrays(x.low, x.high)]
    repeats = x.shape[axis] // ends[0].shape[axis]

    def share(mine: np.ndarray, theirs: np.ndarray, slack: float) -> np.ndarray:
        others = theirs.sum(axis, keepdims=True) * repeats - theirs
        whole = mine + np.maximum(others + slack * theirs.max(), 0.0)
        return np.where(whole > 0, mine / whole, 1.0)

    slack = 2.0**-40 * (x.shape[axis] + 1)
    return share(ends[0], ends[1], slack), np.minimum(share(ends[1], ends[0], -slack), 1.0)


def _log_sum(end: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """The log of the sum of exp over axes; an axis of length 1 stands for all of its places."""
    copies = math.prod(shape[k] // end.shape[k] for k in axes)
    top = end.max(axes, keepdims=True)
    total = np.exp(end - top).sum(axes, keepdims=True) * copies
    return np.squeeze(top + np.log(total), axes)


def logsumexp(x: Abstract, axes: tuple[int, ...]) -> Abstract | None:
    """It moves by at most what an entry moves; by log1p((A - a) / S) where one record does.

    A and a are the largest and the least sum of exp over a record, and S the least over all.
    """
    shape = tuple(s for k, s in enumerate(x.shape) if k not in axes)
    count = math.prod(x.shape[k] for k in axes)
    low, high = _log_sum(x.low, x.shape, axes), _log_sum(x.high, x.shape, axes)
    size = np.maximum(np.abs(low), np.abs(high))
    width = float(x.high.max() - x.low.min())
    error = _error(x, count) + rounding.unit(x.dtype) * (
        rounding.elementary(x.dtype) * (1 + math.log(count)) + 8 * (size + width)
    )
    error = rounding.up(error + 2.0**-40 * (1 + size) + 64 * rounding.tiny(x.dtype) * (count + 1))
    if not np.isfinite(error).all():
        return None
    axis = None if x.axis is None or x.axis in axes else x.axis - sum(k < x.axis for k in axes)
    slip = 2 * over(error, axis)

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        each = d.each.max(axes)
        return np.where(each > 0, rounding.up(each + slip), 0.0), math.inf, math.inf

    if x.axis in axes:
        dense = as_dense(x).others
        changed = others = moved(dense)
        if x.others.is_zero:
            one = _one_record(x, axes)
            moves = changed[0] > 0
            each = np.where(moves, np.minimum(changed[0], rounding.up(one + slip)), 0.0)
            changed = others = each, math.inf, math.inf
    else:
        changed, others = moved(x.changed), moved(x.others)
    ends = rounding.widened(low, high, error)
    apart = _up(2 * float(error.max()))
    return make(shape, x.dtype, *ends, axis, changed, others, apart=apart)


def _one_record(x: Abstract, axes: tuple[int, ...]) -> np.ndarray:
    """log1p((A - a) / (a + (n - 1) a)), with A and a of the record that has most and least."""
    assert x.axis is not None
    short = tuple(1 if k == x.axis else s for k, s in enumerate(x.shape))
    least = _log_sum(-over(-x.low, x.axis), short, axes)
    most = _log_sum(over(x.high, x.axis), short, axes)
    return np.log1p(np.expm1(most - least) / x.n) * (1 + 2.0**-30)


def log_softmax(x: Abstract, axis: int) -> Abstract | None:
    """x_i - log sum exp x: entry i moves by at most as its difference to another entry does."""
    count = x.shape[axis]
    error = _error(x, count)
    if axis == x.axis or not math.isfinite(error):
        return None
    ends = _probabilities(x, axis)
    width = float(x.high.max() - x.low.min())
    least = -width - math.log(count)
    low = np.where(ends[0] > 2.0**-900, np.maximum(np.log(ends[0]), least), least)
    high = np.minimum(np.log(ends[1]), 0.0)
    u, size = rounding.unit(x.dtype), width + math.log(count)
    logs = rounding.elementary(x.dtype) * (1 + math.log(count))
    slip = error + x.apart + u * (logs + 16 * (1 + size))
    slip = _up(slip + 2.0**-30 * u * size + 64 * rounding.tiny(x.dtype) * (count + 1))

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        each, _ = _farthest_two(d.each, axis, count)
        each = np.where(each > 0, rounding.up(each + 2 * slip), 0.0)
        return each, math.inf, math.inf

    low, high = rounding.widened(low, high, np.asarray(slip))
    return make(
        x.shape, x.dtype, low, high, x.axis, moved(x.changed), moved(x.others), apart=_up(2 * slip)
    )
