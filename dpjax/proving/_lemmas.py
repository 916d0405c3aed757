"""Lemmas: bounds on whole functions, tighter than bounds from their single operations.

`_patterns.py` decides where a lemma applies. docs/proofs/global-sensitivity.md has the proofs. In
lemmas about means and variances, the records are the first axis, and one record changes.

softmax, log_softmax and logsumexp first subtract the largest operand. So the operands of exp are in
[-W, 0], where W is the width of the range of all operands. The subtraction is rounded, so the
relative error of exp grows with W.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import lipschitz, multiply
from dpjax.proving._pending import flattened
from dpjax.proving._reductions import axes_after
from dpjax.proving._rows import as_dense, stretched
from dpjax.proving._value import Abstract, Difference, Moves, Pending, make, over, result_of

# The lemmas do not apply if the relative error of exponentials, or of means, exceeds these limits.
_OF_EXPONENTIALS, _OF_MEANS = 2.0**-4, 2.0**-6


def _of_columns(
    x: Abstract, ends: tuple[np.ndarray, np.ndarray], moves: np.ndarray, error: np.ndarray
) -> Abstract:
    """Returns the value of a statistic of each column, with a bound on its rounding error."""
    each = np.where(x.changed.each[0] > 0, rounding.up(moves + 2 * error), 0.0)
    moved = each, math.inf, math.inf
    return make(x.shape[1:], x.dtype, *ends, None, moved, moved)


def variance(x: Abstract, correction: float = 0.0) -> Abstract | None:
    """Returns the value of a variance: one record changes it by at most w^2 (n - 1) / n^2.

    Here w is the width of the range of the records. Let m be the mean and v the variance of the n -
    1 other records. The variance of all records is v (n - 1) / n + (x_i - m)^2 (n - 1) / n^2. Here
    x_i, its replacement and m are all in one interval of length w, so replacing x_i changes the
    variance by at most w^2 (n - 1) / n^2. With a correction c, as in `jnp.var(x, ddof=c)`, the
    variance is multiplied by n / (n - c).

    In floats, let e be the error of the computed mean. |e| is at most (gamma_n + 16 u) max|x|,
    where u is the unit roundoff, and gamma_n the relative error of a sum of n terms. Let M be the
    exact mean of all records. The mean of (x_j - M - e)^2 exceeds the variance by e^2, so it is at
    most w^2 / 4 + e^2. The relative rounding error of this bound is added.
    """
    n = x.n
    if not 0 <= correction <= n - 1:
        return None
    scale = n / (n - correction)
    low, high = x.low.min(axis=0), x.high.max(axis=0)
    width, off, relative = _centered(x, low, high)
    if not math.isfinite(relative):
        return None
    error = (off**2 + relative * (width / 2 + 2 * off) ** 2) * scale
    sizes = np.maximum(np.abs(low), np.abs(high))
    error = rounding.up(error + 16 * rounding.tiny(x.dtype) * (n + 1) * (1 + sizes) * scale)
    moves = rounding.up(width**2 * ((n - 1) / n**2) * scale)
    high = rounding.up(width**2 / 4 * scale + error)
    return _of_columns(x, (np.zeros_like(high), high), moves, error)


def variance_by_moments(x: Abstract) -> Abstract | None:
    """Returns the value of the mean of squares minus the square of the mean.

    This is a variance, computed with larger rounding errors.

    Let M be the largest |x|. The rounding error of the mean of squares is at most (gamma_n + 10 u)
    M^2. If the error of the mean is e, the error of its square is at most e (2 M + e) + 2 u M^2.
    The subtraction adds 2 u M^2.
    """
    exact = variance(x)
    gamma = rounding.sum_units(x.n, x.dtype) + 16 * rounding.unit(x.dtype)
    if exact is None or gamma > _OF_MEANS:
        return None
    largest = x.magnitude.max(axis=0)
    off = _mean_error(x, largest)
    error = 2 * gamma * largest**2 + off * (2 * largest + off)
    error = error + 16 * rounding.tiny(x.dtype) * (x.n + 1) * (1 + largest)
    error = rounding.up(np.broadcast_to(error, np.broadcast_shapes(error.shape, exact.low.shape)))
    ends = rounding.widened(exact.low, exact.high, error)
    return _of_columns(x, ends, exact.others.each, error)


def covariance(x: Abstract, divisor: float) -> Abstract | None:
    """Returns the value of the covariance matrix; `divisor` is n or n - 1.

    Let w_p be the width of the range of coordinate p, and R a bound on the l2 norm of a record. Let
    s = (n - 1) / (n divisor). One record changes entry (p, q) by at most w_p w_q s, and the matrix
    by at most min(||w||^2, 4 R^2) s in the Frobenius norm.
    """
    if len(x.shape) != 2:
        return None
    n = x.n
    low, high = (np.broadcast_to(end, (end.shape[0], x.shape[1])) for end in (x.low, x.high))
    width, off, relative = _centered(x, low.min(axis=0), high.max(axis=0))
    if not math.isfinite(relative):
        return None
    share = (n - 1) / n / divisor
    sides = width / 2 + 2 * off
    tiny = 16 * rounding.tiny(x.dtype) * (n + 1)
    error = off[:, None] * off + relative * sides[:, None] * sides
    # A compiler may compute x separately for each of the two factors, with different roundings.
    error = (error + x.apart * (sides[:, None] + sides)) * (n / divisor)
    error = rounding.up(error + tiny * (1 + sides[:, None] + sides))
    products = rounding.up(width[:, None] * width)
    # If R bounds the l2 norm of a record, a replaced record changes by at most 2 R in this norm. In
    # each coordinate, it changes by at most `width`.
    radius = min(float(rounding.norm2(width)) ** 2, 4 * x.l2_of_row**2)
    # If two coordinates are the same on both databases, so is their covariance.
    still = np.broadcast_to(x.changed.each[0], width.shape) == 0
    fixed = still[:, None] & still
    each = np.where(fixed, 0.0, rounding.up(products * share + 2 * error))
    l2 = float(rounding.up(radius * share + 2 * rounding.norm2(np.where(fixed, 0.0, error))))
    largest = rounding.up(products * (n / divisor) / 4 + error)
    moved = each, math.inf, l2
    return make(each.shape, x.dtype, -largest, largest, None, moved, moved)


def _centered(
    x: Abstract, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the widths of ranges, bounds on the errors of means, and a relative error.

    The relative error is that of a sum of squares around the mean. It is infinite if the relative
    error of a mean exceeds `_OF_MEANS`, because then the lemmas do not apply.
    """
    gamma = rounding.sum_units(x.n, x.dtype)
    off = _mean_error(x, np.maximum(np.abs(low), np.abs(high)))
    relative = 2 * (gamma + 32 * rounding.unit(x.dtype)) if gamma <= _OF_MEANS else math.inf
    return rounding.up(high - low), off, relative


def _mean_error(x: Abstract, sizes: np.ndarray) -> np.ndarray:
    """Bounds the rounding error of a computed mean of records of these magnitudes.

    The records may be sums, and a compiler may flatten the sum of sums. A compiler may also compute
    the records again for the mean, with other roundings. `x.apart` bounds this difference, so it is
    added.
    """
    terms, weight = flattened(x)
    gamma = rounding.sum_units(x.n * terms, x.dtype) + 16 * rounding.unit(x.dtype)
    flush = 8 * rounding.tiny(x.dtype) * (x.n * terms + 1)
    return gamma * np.maximum(sizes, weight) + flush + x.apart


def pooled(s: Abstract, x: Abstract) -> Abstract | None:
    """Returns the value of softmax(s) @ x: a mean of x with weights exp(s_i).

    If s is a matrix, the result is one mean for each row of s.

    Let W be the width of the range of s. Divide each weight by the sum of all n weights. Each
    quotient t_i is at most t = e^W / (n - 1 + e^W). Let record i change, and let m be the mean
    without record i. The mean of all records is m + t_i (x_i - m).

    Let K be the intersection of the range and the ball of a record. Let y be the point

        y = m + (t_i / t) (x_i - m) .

    K is convex and contains m and x_i, so K contains y. The mean of all records is m + t (y - m).
    On a neighbor, m and t are the same, and only y differs. So the mean changes by at most t times
    the diameter of K.

    Suppose that s is a matrix whose entry (j, k) depends only on the records j and k. Then this
    bound is valid for every row of the result except the row of the changed record. That row
    changes by at most the diameter of K.

    A computed weight has the relative error of a softmax, and the products are summed in any order.
    """
    n, width = x.n, float(s.high.max() - s.low.min())
    relative = _error(s, n)
    gamma = rounding.sum_units(n, x.dtype) + 8 * rounding.unit(x.dtype)
    if not math.isfinite(relative) or gamma > _OF_MEANS:
        return None
    low, high = (np.broadcast_to(end, (end.shape[0], *x.shape[1:])) for end in (x.low, x.high))
    low, high = low.min(axis=0), high.max(axis=0)
    share = 1 / (1 + (n - 1) * math.exp(-width)) * (1 + 2.0**-30)
    sizes = np.maximum(np.abs(low), np.abs(high))
    error = (rounding.of_quotient(relative, x.dtype) * (1 + gamma) + gamma) * sizes
    error = rounding.up(error + 16 * rounding.tiny(x.dtype) * (n + 1) ** 2 * (1 + sizes))
    widths = rounding.up(high - low)
    l1 = min(float(widths.sum()), 2 * x.l1_of_row)
    l2 = min(rounding.norm2(widths), 2 * x.l2_of_row)

    def moved(fraction: float) -> Moves:
        more = 2 * float(error.sum()), 2 * rounding.norm2(error)
        each = rounding.up(fraction * widths + 2 * error)
        each = each if len(s.shape) == 1 else each[None]
        return each, _up(fraction * l1 + more[0]), _up(fraction * l2 + more[1])

    low, high = rounding.widened(low, high, error)
    if len(s.shape) == 1:
        return make(x.shape[1:], x.dtype, low, high, None, moved(share), moved(share))
    row = x.l1_of_row + float(error.sum()), x.l2_of_row + rounding.norm2(error)
    return make(
        (s.shape[0], *x.shape[1:]), x.dtype, low[None], high[None], 0, moved(1.0), moved(share),
        l1_of_row=_up(row[0]), l2_of_row=_up(row[1]),
    )  # fmt: skip


def median(x: Abstract) -> Abstract:
    """Returns the value of a median.

    For an even number n of records, the median changes by at most half as much as one record. It is
    the mean of two adjacent order statistics. Sorting does not increase the l1 distance of two
    arrays. So the changes of both order statistics add up to at most the change of the record.

    JAX computes the indices of the order statistics in floats. If n is too large for floats to
    represent these indices exactly, JAX may use the same order statistic twice. In this case, and
    for odd n, the bound has no factor 1/2.
    """
    low, high = x.low.min(axis=0), x.high.max(axis=0)
    sizes = np.maximum(np.abs(low), np.abs(high))
    error = 8 * rounding.unit(x.dtype) * sizes + 16 * rounding.tiny(x.dtype)
    inexact = x.n > rounding.exact_integers(x.dtype) / 2
    share = 1.0 if x.n % 2 or inexact else 0.5
    return _of_columns(x, rounding.widened(low, high, error), x.changed.each[0] * share, error)


def as_records(x: Abstract) -> Abstract:
    """Returns a sorted vector as an array of records, if one record changes at most one number.

    A number that only moves to another index is not counted as a change. Other arrays are returned
    unchanged. Only functions that ignore the order of records may use the result.
    """
    if x.axis is not None or len(x.shape) != 1 or x.replaced > 1:
        return x
    width = rounding.up(np.atleast_1d(x.high.max() - x.low.min()))
    still = Difference(np.zeros(1), 0.0, 0.0, 0.0)
    one = Difference(width, float(width[0]), float(width[0]), 1.0)
    return dataclasses.replace(x, axis=0, changed=one, others=still)


def largest_distance(s: Abstract, c: Abstract, sign: int) -> float | None:
    """Bounds how much the largest entry of s - c (`sign` 1), c - s (-1) or |s - c| (0) changes.

    Here s is sorted, with numbers in [L, H]. r of its numbers are replaced, and c is public. Let D
    be the largest entry of s - c. For all j except the last r, s'_j <= s_(j + r), so

        s'_j - c_j <= (s_(j + r) - c_(j + r)) + (c_(j + r) - c_j) <= D + (c_(j + r) - c_j) .

    For the last r indices j, s'_j - c_j <= H - c_j. Let c_k be the smallest entry of c. Then D >= L
    - c_k. So D grows by at most the largest c_(j + r) - c_j, or by at most (H - c_j) - (L - c_k)
    for one of the last r indices j. The same is true of c - s with the order reversed. For |s - c|,
    both bounds are combined, with 0 in place of L - c_k, because |s - c| >= 0.
    """
    if c.axis is not None or not 1 <= s.replaced < s.shape[0] or s.dtype.kind != "f":
        return None
    r, ends = int(s.replaced), (float(s.low.min()), float(s.high.max()))
    low, high = (np.broadcast_to(end, c.shape) for end in (c.low, c.high))
    rise = max(float((high[r:] - low[:-r]).max()), 0.0)
    tops = ends[1] - float(low[-r:].min()), float(high[:r].max()) - ends[0]
    least = ends[0] - float(high.min()), float(low.max()) - ends[1]
    most = [top - (start if sign else 0.0) for top, start in zip(tops, least, strict=True)]
    chosen = {1: most[:1], -1: most[1:], 0: most}[sign]
    error = rounding.ARITHMETIC * rounding.unit(s.dtype) * (max(map(abs, ends)) + c.magnitude.max())
    return _up(max(rise, *chosen) + 4 * (float(error) + 8 * rounding.tiny(s.dtype)))


def place_among(x: Abstract, levels: Abstract) -> Abstract:
    """Returns the value of `searchsorted`: for each number, its index among k sorted numbers.

    The index, from 0 to k, counts how many of the k numbers are smaller. So if m of the k numbers
    change, the index of a public number changes by at most m.
    """
    top = np.full((1,) * len(x.shape), float(levels.shape[0]))

    def moved(d: Difference) -> Moves:
        if not levels.is_public:
            return np.minimum(top, levels.replaced), math.inf, math.inf
        return np.where(d.each > 0, top, 0.0), math.inf, math.inf

    # A compiler may compute an array once for each use. If x and `levels` are the same numbers for
    # every use, then the index is also the same number for every use.
    apart = math.inf if x.apart or levels.apart else 0.0
    kept: Any = {"dtype": np.dtype(np.int32), "whole": True, "apart": apart}
    return result_of(x, 0 * top, top, moved, **kept)


def interpolated(x: Abstract, places: np.ndarray, heights: np.ndarray) -> Abstract | None:
    """Returns the value of `jnp.interp` for public points; it is constant outside of the points.

    The function is continuous, and its slopes are those between successive points. Between two
    points (p, h) and (p', h'), a device computes h + (x - p) / (p' - p) (h' - h) with fewer than 16
    roundings. The quotient is at most 1 up to rounding. The magnitudes of the differences are
    limited. So the product does not overflow, in whichever order its factors are multiplied, and a
    number that is flushed to 0 is multiplied by at most 2^42.
    """
    sizes = np.abs(np.concatenate([places, heights, [x.low.min(), x.high.max()]]))
    widths, rises = np.diff(places), np.diff(heights)
    # The lemma is not valid if x has pending operations. A compiler may round these operations
    # differently for each use of x, or merge them with the subtraction of a point from x.
    if x.pending != Pending() or x.apart or not sizes.max() <= 2.0**20:
        return None
    if not widths.min(initial=math.inf) >= 2.0**-20 or not widths.size:
        return None
    units = 32 * np.abs(rises).max() + 4 * np.abs(heights).max()
    absolute = float(rounding.up(units * rounding.unit(x.dtype) + 2.0**42 * rounding.tiny(x.dtype)))
    slope = float(rounding.up(np.abs(rises / widths).max()))
    low, high = (np.full((1,) * len(x.shape), end) for end in (heights.min(), heights.max()))
    found = lipschitz((x,), (low, high), (np.asarray(slope),), absolute=absolute)
    factors = np.abs(np.log2([*widths, *np.abs(rises[rises != 0]), 1.0])).max()
    shift = float(np.abs(heights).max() + slope * np.abs(places).max())
    pending = Pending(shift=shift, bits=2 * float(factors), hidden=True)
    return dataclasses.replace(found, pending=pending)


def _error(x: Abstract, count: int) -> float:
    """Bounds the relative error of the exponentials of x, and of the sum of `count` of them.

    A compiler may compute x twice, with different roundings: once for exp, and once for the maximum
    that is subtracted. `x.apart` bounds this difference, so it is added.
    """
    width = float(x.high.max() - x.low.min())
    units = 2 * rounding.elementary(x.dtype) + 40 * width + 64
    found = units * rounding.unit(x.dtype) + rounding.sum_units(count, x.dtype) + x.apart
    # For an error y, both e^y - 1 and -log(1 - y) are at most y / (1 - y).
    return found / (1 - found) if found <= _OF_EXPONENTIALS else math.inf


def _farthest_two(d: Difference, axis: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds the change of x_i - x_j: first for each i and the worst j, then for the worst pair."""
    each = d.each
    if count == 1:
        return np.zeros_like(each), np.zeros_like(each)
    if each.shape[axis] == 1:
        return 2 * each, 2 * each
    ordered = np.sort(each, axis)
    first, second = (np.take(ordered, [k], axis) for k in (-1, -2))
    # For each entry, `other` is the largest change of any other entry. If only one entry has the
    # largest change, `other` is the second largest change for this entry.
    other = np.where((each == first) & (first != second), second, first)
    return each + other, first + second


def softmax(x: Abstract, axes: tuple[int, ...]) -> Abstract | None:
    """Returns the value of a softmax.

    If the log odds of a set of entries change by t, its probability changes by at most tanh(t / 4).
    """
    axis, count = axes[0], x.shape[axes[0]]
    error = _error(x, count)
    if len(axes) > 1 or axis == x.axis or not math.isfinite(error):
        return None
    low, high = _probabilities(x, axis)
    flush = 8 * rounding.tiny(x.dtype) * (count + 1)
    error = rounding.of_quotient(error, x.dtype)

    def moved(d: Difference) -> Moves:
        entry, both = _farthest_two(d, axis, count)
        each, largest = np.tanh(entry / 4), np.tanh(both / 4)
        # Each stored bound covers `copies` entries.
        places = math.prod(s for k, s in enumerate(x.shape) if k not in (axis, x.axis))
        copies = places / max(1, largest.size)
        slip = np.where(largest > 0, 2 * (error + count * flush), 0.0)
        # Probabilities add up to 1. So some entries gain at most `largest` in total, and the other
        # entries lose the same amount.
        l1 = float((2 * largest + slip).sum()) * copies
        # The Jacobian of softmax, diag(p) - p p^T, has an l2 norm of at most 1/2.
        l2 = min(math.sqrt(2) * rounding.norm2(largest, copies), d.l2 / 2)
        l2 += rounding.norm2(slip, copies)
        each = each + np.where(each > 0, 2 * (error * over(high, x.axis) + flush), 0.0)
        return rounding.up(each) * (1 + 2.0**-40), _up(l1), _up(l2)

    low, high = low * (1 - error) * (1 - 2.0**-30) - flush, high * (1 + error) * (1 + 2.0**-30)
    return result_of(x, np.maximum(low, 0.0), high + flush, moved, apart=_up(2 * (error + flush)))


def shared(x: Abstract, t: Abstract, axes: tuple[int, ...]) -> Abstract | None:
    """Returns the value of t softmax(x), where t has one number for each softmax.

    A device subtracts the largest x_j, and then computes (t / sum_j exp x_j) exp x_i. This adds
    rounding errors of a few units in the last place. One term of the sum is exp 0 = 1, so the sum
    is at least 1, up to rounding. So the quotient is flushed to 0 only if t is close to 0.
    """
    if (share := softmax(x, axes)) is None:
        return None
    found = multiply(share, stretched(t, x.shape))
    off: Any = {"relative": 32 * rounding.unit(x.dtype), "absolute": 64 * rounding.tiny(x.dtype)}
    more = off["absolute"] * math.prod(x.shape)
    rows = found.l1_of_row + more, found.l2_of_row + more
    return lipschitz((found,), (found.low, found.high), (1.0,), rows=rows, **off)


def _up(bound: float) -> float:
    """Rounds a bound up, and adds a margin for the rounding of its computation."""
    return float(rounding.up(bound)) * (1 + 2.0**-40)


def _probabilities(x: Abstract, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of a softmax.

    The lower endpoint of entry i is exp(low_i) / (exp(low_i) + sum_{j != i} exp(high_j)). Its upper
    endpoint is the same with low and high swapped.
    """
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
    """Returns log sum exp over axes of an array of shape `shape`, whose entries are in `end`.

    If an axis has length 1 in `end`, its entry is repeated along this axis of the array.
    """
    copies = math.prod(shape[k] // end.shape[k] for k in axes)
    top = end.max(axes, keepdims=True)
    total = np.exp(end - top).sum(axes, keepdims=True) * copies
    return np.squeeze(top + np.log(total), axes)


def logsumexp(x: Abstract, axes: tuple[int, ...]) -> Abstract | None:
    """Returns the value of logsumexp, which changes by at most the largest change of an entry.

    If the sum runs over the records, there is a second bound. Let A be the largest and a the
    smallest possible sum of exp(x) over the entries of one record. The sum over n records is at
    least n a, and one record changes it by at most A - a. So the result changes by at most log(1 +
    (A - a) / (n a)).
    """
    shape, axis = axes_after(x, axes)
    count = math.prod(x.shape[k] for k in axes)
    low, high = _log_sum(x.low, x.shape, axes), _log_sum(x.high, x.shape, axes)
    size = np.maximum(np.abs(low), np.abs(high))
    width = float(x.high.max() - x.low.min())
    units = rounding.elementary(x.dtype) * (1 + math.log(count)) + 8 * (size + width)
    error = _error(x, count) + rounding.unit(x.dtype) * units
    error = rounding.up(error + 2.0**-40 * (1 + size) + 64 * rounding.tiny(x.dtype) * (count + 1))
    if not np.isfinite(error).all():
        return None
    slip = 2 * over(error, axis)
    dense = as_dense(x) if x.axis in axes else x
    changed, others = (
        np.where(d.each.max(axes) > 0, rounding.up(d.each.max(axes) + slip), 0.0)
        for d in (dense.changed, dense.others)
    )
    if x.axis in axes and x.others.is_zero:
        one = np.minimum(changed, rounding.up(_one_record(x, axes) + slip))
        changed = others = np.where(changed > 0, one, 0.0)
    return make(
        shape, x.dtype, *rounding.widened(low, high, error), axis, (changed, math.inf, math.inf),
        (others, math.inf, math.inf), apart=_up(2 * float(error.max())),
    )  # fmt: skip


def _one_record(x: Abstract, axes: tuple[int, ...]) -> np.ndarray:
    """Bounds the change of a `logsumexp` over the records, if one record is replaced.

    The bound is log(1 + (A - a) / (n a)), where A and a are the largest and smallest sums of exp(x)
    for one record. It is computed as log1p(expm1(log A - log a) / n).
    """
    assert x.axis is not None
    short = tuple(1 if k == x.axis else s for k, s in enumerate(x.shape))
    least = _log_sum(-over(-x.low, x.axis), short, axes)
    most = _log_sum(over(x.high, x.axis), short, axes)
    return np.log1p(np.expm1(most - least) / x.n) * (1 + 2.0**-30)


def log_softmax(x: Abstract, axes: tuple[int, ...]) -> Abstract | None:
    """Returns the value of log_softmax, x_i - log sum_j exp x_j.

    Entry i changes by at most the largest change of x_i - x_j over all j.
    """
    axis, count = axes[0], x.shape[axes[0]]
    error = _error(x, count)
    if len(axes) > 1 or axis == x.axis or not math.isfinite(error):
        return None
    ends = _probabilities(x, axis)
    width = float(x.high.max() - x.low.min())
    least = -width - math.log(count)
    # Every probability is at least exp(-width) / count, even if it underflows on the host.
    low = np.where(ends[0] > 2.0**-900, np.maximum(np.log(ends[0]), least), least)
    high = np.minimum(np.log(ends[1]), 0.0)
    u, size = rounding.unit(x.dtype), width + math.log(count)
    logs = rounding.elementary(x.dtype) * (1 + math.log(count))
    slip = error + x.apart + u * (logs + 16 * (1 + size))
    slip = _up(slip + 2.0**-30 * u * size + 64 * rounding.tiny(x.dtype) * (count + 1))

    def moved(d: Difference) -> Moves:
        each, _ = _farthest_two(d, axis, count)
        return np.where(each > 0, rounding.up(each + 2 * slip), 0.0), math.inf, math.inf

    low, high = rounding.widened(low, high, np.asarray(slip))
    return result_of(x, low, high, moved, apart=_up(2 * slip))
