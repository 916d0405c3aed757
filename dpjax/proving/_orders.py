"""Rules of extrema and sorts, which do not increase distances."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._choices import check_booleans
from dpjax.proving._layout import accumulated, place
from dpjax.proving._reductions import axes_after, check_surrounded, start_of_extremum
from dpjax.proving._rows import aligned, as_dense
from dpjax.proving._value import Abstract, Difference, Moves, RefusalError, flushed, over, result_of


def extremum_over(x: Abstract, axes: Sequence[int], *, largest: bool, **_: Any) -> Abstract:
    """Returns the value of an extremum over axes: |max_i x_i - max_i y_i| <= max_i |x_i - y_i|."""
    axes = tuple(k % len(x.shape) for k in axes)
    shape, axis = axes_after(x, axes)
    pick = np.max if largest else np.min
    dense = as_dense(x) if x.axis in axes else x
    flush = 0.0 if x.whole else 4 * rounding.tiny(x.dtype)

    def moved(d: Difference) -> Moves:
        return flushed((d.each.max(axes), d.l1, d.l2), flush, shape)

    ends = pick(x.low, axis=axes), pick(x.high, axis=axes)
    kept = {"shape": shape, "axis": axis, "whole": x.whole, "apart": x.apart + flush}
    return result_of(dense, *ends, moved, **kept)


def place_of_extremum(x: Abstract, axes: Sequence[int], index_dtype: Any, **_: Any) -> Abstract:
    """Returns the value of the index of the largest or smallest entry.

    If an entry changes, the index may become any other index.
    """
    if x.axis in axes:
        raise RefusalError("proofs do not support argmax or argmin over the records")
    shape, axis = axes_after(x, axes)
    last, dtype = math.prod(x.shape[k] for k in axes) - 1, np.dtype(index_dtype)
    kept = {"shape": shape, "axis": axis, "dtype": dtype}
    return _index(x, last, lambda each: each.max(tuple(axes)) > 0, **kept)


def _index(
    x: Abstract, last: int, moves: Callable[[np.ndarray], np.ndarray], **kept: Any
) -> Abstract:
    """Returns the value of an array of indices from 0 to `last`.

    An index that changes may become any other index. `moves` computes which indices may change,
    from bounds on the change of each entry of x.
    """
    top = np.full((1,) * len(kept["shape"]), float(last))

    def moved(d: Difference) -> Moves:
        return np.where(moves(d.each), top, 0.0), math.inf, math.inf

    return result_of(x, 0 * top, top, moved, whole=True, **kept)


def cumulative_extremum(
    x: Abstract, axis: int, reverse: bool, *, largest: bool, **_: Any
) -> Abstract:
    """Returns the value of a running maximum or minimum.

    It changes by at most the largest change of the entries so far.
    """
    check_surrounded(x, [axis], start_of_extremum(x.dtype, largest=largest))
    dense = as_dense(x) if x.axis == axis else x
    pick = np.maximum if largest else np.minimum
    flush = 0.0 if x.whole else 4 * rounding.tiny(x.dtype)

    def running(array: np.ndarray, pick: Any) -> np.ndarray:
        return accumulated(array, axis, pick, reverse=reverse)

    def moved(d: Difference) -> Moves:
        each = running(d.each, np.maximum)
        return np.where(each > 0, each + flush, 0.0), math.inf, math.inf

    ends = running(x.low, pick), running(x.high, pick)
    return result_of(dense, *ends, moved, whole=x.whole, apart=x.apart + flush)


def any_or_all(x: Abstract, axes: Sequence[int], *, largest: bool, **_: Any) -> Abstract:
    """Returns the value of `any` or `all` of booleans: their maximum or their minimum."""
    check_booleans(x)
    return extremum_over(x, axes, largest=largest)


def sort(x: Abstract, *others: Abstract, dimension: int, **_: Any) -> Abstract | list[Abstract]:
    """Returns the value of a sort. Sorting does not increase the distance of two arrays.

    This is true in l1, l2 and linf: ||sort x - sort y||_p is the smallest ||x - P y||_p over all
    permutations P (rearrangement inequality).

    The arrays `others` are reordered in the same way as x. Any of their entries may move to any
    index, so only the range of each array bounds how much its entries change.
    """
    if not others:
        return _sorted(x, dimension)
    lanes = aligned(x, *others)
    if lanes[0].axis == dimension:
        lanes = list(map(as_dense, lanes))
    zero = _may_be_zero(x)

    def moved(end: np.ndarray, *ds: Difference) -> Moves:
        # The shapes may differ, because an axis of length 1 represents all entries.
        any_ = functools.reduce(
            np.logical_or, [d.each.max(dimension, keepdims=True) > 0 for d in ds]
        )
        return np.where(zero | any_, rounding.up(over(end, lanes[0].axis)), 0.0), math.inf, math.inf

    made = [_sorted(x, dimension)]
    for y in lanes[1:]:
        low = y.low.min(dimension, keepdims=True)
        high = y.high.max(dimension, keepdims=True)
        kept: Any = {"dtype": y.dtype, "whole": y.whole}
        made.append(result_of(lanes, low, high, functools.partial(moved, high - low), **kept))
    return made


def _may_be_zero(x: Abstract) -> bool:
    """Whether a float may be 0 or -0. They compare as equal, but differ in total order."""
    gap = 2 * rounding.tiny(x.dtype)
    return gap > 0 and bool(((x.low <= gap) & (x.high >= -gap)).any())


def top_k(x: Abstract, *, k: int, axis: int = -1, **_: Any) -> list[Abstract]:
    """Returns the k largest numbers and their indices.

    The numbers have the same bounds as entries of the sorted array. If a number changes, an index
    may become any other index. XLA sorts in the total order, in which -0 is below 0. Two zeros,
    such as the products 0 * x for two records x, may differ in their signs. So where numbers may be
    0, an index may change even if no number changes in value.
    """
    axis = axis % len(x.shape)
    values, zero = place(_sorted(x, axis), axis, 0, k), _may_be_zero(x)
    dense = as_dense(x) if x.axis == axis else x

    def moves(each: np.ndarray) -> np.ndarray:
        return zero | (each.max(axis, keepdims=True) > 0)

    kept = {"shape": values.shape, "dtype": np.dtype(np.int32)}
    return [values, _index(dense, x.shape[axis] - 1, moves, **kept)]


def _sorted(x: Abstract, dimension: int) -> Abstract:
    low = np.broadcast_to(x.low.min(dimension, keepdims=True), x.low.shape)
    high = np.broadcast_to(x.high.max(dimension, keepdims=True), x.high.shape)
    if x.axis == dimension:
        x = as_dense(x)
    flush = 0.0 if x.whole else 4 * rounding.tiny(x.dtype)

    def moved(d: Difference) -> Moves:
        each = np.broadcast_to(d.each.max(dimension, keepdims=True), d.each.shape)
        return flushed((each, d.l1, d.l2), flush, x.shape)

    found = result_of(x, low, high, moved, whole=x.whole, apart=x.apart + flush)
    if len(x.shape) == 1 and x.apart == 0:
        found = dataclasses.replace(found, replaced=float(np.floor(x.others.count)))
    return found
