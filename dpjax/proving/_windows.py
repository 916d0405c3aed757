"""Rules of convolutions with a public kernel, and of pooling: operations on sliding windows.

A convolution applies one linear map A to each element of the batch. Let d be the vector of bounds
on how much each entry of its operand changes.

- Entries of the result change by at most |A| d.
- The l1 norm of a difference grows by at most the factor max_j sum_i |A_ij|.
- The l2 norm grows by at most sqrt(max_i sum_j |A_ij| max_j sum_i |A_ij|) (Schur's test).
- There is a second factor for the l2 norm: A is a submatrix of a circular convolution on a larger
  torus. Its norm is max_w ||K(w)||_2, where K is the Fourier transform of the kernel, and w runs
  over the frequencies of the torus.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _reductions as reductions
from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import transpose
from dpjax.proving._pending import flattened
from dpjax.proving._reductions import Sums, SumsOf
from dpjax.proving._rows import as_dense
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    Pending,
    RefusalError,
    erring,
    result_of,
)

_MOST_TAPS = 4096
_MOST_READ = 2**26


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a convolution or pooling. Each field has one number for each axis.

    The array gets gaps between its entries, and padding around them. Result o reads the entries o *
    stride + t * dilation, for each tap t from 0 to size - 1.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    gaps: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def taps(self) -> Iterator[tuple[int, ...]]:
        """The offsets in a window, one for each tap."""
        return itertools.product(*map(range, self.sizes))

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the array with gaps and padding."""
        axes = zip(shape, self.gaps, self.padding, strict=True)
        return tuple((size - 1) * gap + 1 + sum(pads) for size, gap, pads in axes)

    def results(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of windows along each axis."""
        axes = zip(self.padded(shape), self.sizes, self.dilation, self.strides, strict=True)
        return tuple((whole - (k - 1) * by - 1) // step + 1 for whole, k, by, step in axes)

    def pads_one(self, shape: Sequence[int]) -> bool:
        """Whether the windows pad an axis of length 1."""
        return any(s == 1 and max(pads) > 0 for s, pads in zip(shape, self.padding, strict=True))

    @property
    def pads(self) -> bool:
        """Whether a window may contain padding or gaps."""
        return any(map(any, self.padding)) or max(self.gaps, default=1) > 1

    def moves(self, axis: int) -> bool:
        """Whether result i along an axis may read other entries than entry i."""
        own = self.sizes[axis], self.strides[axis], self.gaps[axis], *self.padding[axis]
        return own != (1, 1, 1, 0, 0)

    def read(
        self, array: np.ndarray, shape: Sequence[int], fill: float
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yields, for each tap (position in a window), the numbers that all windows read there.

        `array` may have length 1 along an axis, if one bound is valid for all entries. The yielded
        arrays also have length 1 along this axis, if each result reads only the entry at its own
        index.

        Args:
            array: bounds on the entries of an array.
            shape: the shape of that array.
            fill: the number in gaps and padding.
        """
        axes = [k for k in range(len(shape)) if self.moves(k)]
        full = [size if k in axes else array.shape[k] for k, size in enumerate(shape)]
        array, padded = np.broadcast_to(array, full), self.padded(shape)
        made = np.full([padded[k] if k in axes else s for k, s in enumerate(full)], fill)
        # Negative padding removes entries.
        kept, placed = [slice(None)] * len(full), [slice(None)] * len(full)
        for k in axes:
            (start, _), gap = self.padding[k], self.gaps[k]
            inside = [p for p in range(shape[k]) if 0 <= start + p * gap < padded[k]]
            if not inside:
                raise RefusalError("proofs do not support windows that contain only padding")
            kept[k] = slice(inside[0], inside[-1] + 1)
            placed[k] = slice(start + inside[0] * gap, start + inside[-1] * gap + 1, gap)
        made[tuple(placed)] = array[tuple(kept)]
        counts = self.results(shape)
        for tap in self.taps:
            starts = [t * by for t, by in zip(tap, self.dilation, strict=True)]
            ends = [s + (c - 1) * step + 1 for s, c, step in zip(starts, counts, self.strides)]  # noqa: B905
            chosen = tuple(
                slice(starts[k], ends[k], self.strides[k]) if k in axes else slice(None)
                for k in range(len(full))
            )
            yield tap, made[chosen]

    def check_fit(self, shape: Sequence[int]) -> None:
        """Refuses windows that are larger than their array."""
        if min(self.results(shape)) < 1:
            raise RefusalError(
                "proofs do not support windows that are larger than the padded array"
            )

    def at_once(self, steps: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """Groups the taps t (positions in a window) by t * dilation modulo the step.

        Result o reads the padded array at o * stride + t * dilation. If `steps` are the strides,
        all taps that read the same entry are in one group.

        If `steps` are the gaps, consider a single result. All taps at which it reads entries of the
        array are in one group. At the taps of the other groups, it reads only padding and the
        numbers that fill gaps.
        """
        groups = dict[tuple[int, ...], list[tuple[int, ...]]]()
        for tap in self.taps:
            rest = tuple(t * by % s for t, by, s in zip(tap, self.dilation, steps, strict=True))
            groups.setdefault(rest, []).append(tap)
        return list(groups.values())

    @property
    def most_at_once(self) -> int:
        """The largest number of windows that contain one entry."""
        return max(map(len, self.at_once(self.strides)))

    def are_few(self, shape: Sequence[int]) -> bool:
        """Whether the windows have so few entries that a proof can read each of them."""
        taps = math.prod(self.sizes)
        return taps <= _MOST_TAPS and taps * math.prod(self.results(shape)) <= _MOST_READ

    def check(self, shape: Sequence[int]) -> None:
        """Refuses windows with too many entries for a proof that reads each of them."""
        if not self.are_few(shape):
            raise RefusalError("the windows have too many entries for a proof. Use smaller windows")


def _pooling(
    x: Abstract, *, start: float, window_dimensions: Any, window_strides: Any, padding: Any,
    base_dilation: Any, window_dilation: Any, **_: Any,
) -> tuple[Windows, Abstract]:  # fmt: skip
    """Returns the windows, and the array.

    If a window may read several records, the array is returned without an axis of records.
    """
    windows = Windows(
        tuple(window_dimensions), tuple(window_strides), tuple(map(tuple, padding)),
        tuple(base_dilation), tuple(window_dilation),
    )  # fmt: skip
    reductions.check_surrounded(x, [k for k, size in enumerate(windows.sizes) if size > 1], start)
    windows.check_fit(x.shape)
    return windows, as_dense(x) if x.axis is not None and windows.moves(x.axis) else x


def pooled_sum(x: Abstract, sums_of: SumsOf = Sums.of, **parameters: Any) -> Abstract:
    """Returns the value of a reduce_window_sum: sums of the entries of windows, in any order.

    An entry is in at most m windows, and a window contains K entries. So a difference grows at most
    m times in the l1 norm, and sqrt(m K) times in the l2 norm (Schur's test). A change by d of one
    entry changes m results by d, which is a change by sqrt(m) d in l2. These norms add up over the
    entries, so the l2 norm is also at most sqrt(m) times the old l1 norm.
    """
    reductions.check_cut(x)
    windows, x = _pooling(x, **parameters, start=0.0)
    count = math.prod(windows.sizes)
    # This factor covers the rounding of the sums that the proof itself computes in float64.
    room = 1 + (count + 100) * 2.0**-52
    wide = [k for k in range(len(x.shape)) if windows.moves(k)]

    def added(array: np.ndarray, pick: Any = np.maximum) -> np.ndarray:
        # If all entries have the same bounds, then all windows without padding have the same
        # bounds. A window with padding has fewer terms, so its sum may be nearer to 0.
        if all(array.shape[k] == 1 for k in wide) and not windows.are_few(x.shape):
            return count * (pick(array, 0.0) if windows.pads else array)
        windows.check(x.shape)
        return np.asarray(sum(part for _, part in windows.read(array, x.shape, 0.0)))

    sums = sums_of(x, count, added(x.magnitude))
    many = windows.most_at_once
    # If a compiler flattens a sum of sums, any result may be rounded differently, even where no
    # summand changes.
    by_one = many if sums.pending.terms <= count else math.inf

    def moved(d: Difference) -> Moves:
        each = np.minimum(rounding.up(added(d.each) * room), d.l1)
        return each, d.l1 * many, min(d.l2 * math.sqrt(many * count), d.l1 * math.sqrt(many))

    ends = added(x.low, np.minimum), added(x.high)
    low, high = rounding.widened(*ends, sums.error)
    # A sum of nonnegative numbers never becomes negative by rounding, in any order.
    if (x.low >= 0).all():
        low = np.maximum(low, 0.0)
    apart = float(rounding.up(count * x.apart + 2 * float(np.max(sums.error))))
    more = {"whole": sums.exact, "pending": sums.pending, "apart": apart}
    return _made(x, windows, (low, high), moved, sums.error, by_one, **more)


def _touched(d: Difference, by_one: float) -> float:
    """Bounds how many results change, if an entry is part of at most `by_one` results."""
    return d.count * by_one if d.count else 0.0


def pooled_extremum(x: Abstract, *, largest: bool, **parameters: Any) -> Abstract:
    """Returns the value of a reduce_window_max or reduce_window_min.

    A result changes by at most the largest change in its window. An entry is in at most m windows.
    So a difference grows at most m times in the l1 norm. In the l2 norm it grows at most sqrt(m)
    times, because the square of the largest change is at most the sum of all squares.
    """
    pick, idle = (np.maximum, -np.inf) if largest else (np.minimum, np.inf)
    start = reductions.start_of_extremum(x.dtype, largest=largest)
    windows, x = _pooling(x, **parameters, start=start)
    windows.check(x.shape)

    def chosen(array: np.ndarray) -> np.ndarray:
        return pick.reduce([part for _, part in windows.read(array, x.shape, idle)])

    many = windows.most_at_once

    def moved(d: Difference) -> Moves:
        parts = [part for _, part in windows.read(d.each, x.shape, 0.0)]
        return np.maximum.reduce(parts), d.l1 * many, d.l2 * math.sqrt(many)

    flush = np.full((1,) * len(x.shape), 0.0 if x.whole else 4 * rounding.tiny(x.dtype))
    ends = chosen(x.low), chosen(x.high)
    return _made(x, windows, ends, moved, flush, many, whole=x.whole)


def _made(
    x: Abstract,
    windows: Windows,
    interval: tuple[np.ndarray, np.ndarray],
    moved: Callable[[Difference], Moves],
    error: np.ndarray,
    by_one: float,
    **more: Any,
) -> Abstract:
    shape = windows.results(x.shape)

    def erred(d: Difference) -> Moves:
        return erring(moved(d), error, shape, x.axis, _touched(d, by_one))

    counts = [_touched(d, by_one) for d in (x.changed, x.others)]
    found = result_of(x, *interval, erred, shape=shape, counts=counts, **more)
    pending = found.pending.having(padded=windows.pads_one(x.shape))
    return dataclasses.replace(found, pending=pending)


_MOST_PRODUCTS = 2**26
_MOST_OF_TRANSFORM = 2**19


@dataclasses.dataclass(frozen=True)
class _Map:
    """The linear map A of a convolution.

    Kernels have the shape (taps..., inputs, groups, outputs), and arrays (batch, places...,
    features). `inputs` and `outputs` are the numbers of features in one group.

    Attributes:
        windows: the windows that slide over the array.
        shape: the shape of the array.
    """

    windows: Windows
    shape: tuple[int, ...]

    def of(self, array: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        """Returns the sums of all products, in float64."""
        inputs, groups, outputs = kernel.shape[-3:]
        features = np.broadcast_to(array, (*array.shape[:-1], self.shape[-1]))
        places: tuple[int, ...] = ()
        total: Any = 0.0
        for tap, part in self.windows.read(features, self.shape, 0.0):
            places = part.shape[:-1]
            rows = part.reshape(-1, groups, inputs).swapaxes(0, 1)
            total = total + rows @ kernel[tap[1:-1]].swapaxes(0, 1)
        return np.swapaxes(total, 0, 1).reshape(*places, groups * outputs)

    def sums(self, sizes: np.ndarray) -> tuple[float, float]:
        """Returns the largest sum of |A_ij| over a column of A, and the largest sum over a row.

        `sizes` are upper bounds on the magnitudes of the entries of the kernel.
        """
        columns = self._largest(sizes.sum(-1), self.windows.strides)
        return columns, self._largest(sizes.sum(-3), self.windows.gaps)

    def _largest(self, sizes: np.ndarray, steps: tuple[int, ...]) -> float:
        groups = self.windows.at_once(steps)
        return max(float(np.sum([sizes[tap[1:-1]] for tap in taps], 0).max()) for taps in groups)

    def column(self, sizes: np.ndarray) -> float:
        """Returns the largest l2 norm of a column of A."""
        return math.sqrt(self._largest((sizes**2).sum(-1), self.windows.strides))

    def schur(self, sizes: np.ndarray) -> float:
        """Returns a bound on the l2 norm of A, by Schur's test."""
        return float(rounding.up(math.sqrt(math.prod(self.sums(sizes)))))

    def spectral(self, kernel: np.ndarray) -> float:
        """Returns a bound on the l2 norm of A: the largest norm of its Fourier transform.

        The result is infinity if the transform would take too long.

        A convolution with stride s splits the array into s phases. So it equals a convolution with
        stride 1 whose inputs are the features of all phases.
        """
        *taps, inputs, groups, outputs = kernel.shape
        steps, by = self.windows.strides[1:-1], self.windows.dilation[1:-1]
        reach = [(size - 1) * gap + 1 for size, gap in zip(taps, by, strict=True)]
        blocks = [-(-size // step) for size, step in zip(reach, steps, strict=True)]
        # The torus is longer than the array by one kernel, so no window wraps around.
        padded = zip(self.windows.padded(self.shape)[1:-1], steps, blocks, strict=True)
        torus = [-(-size // step) + block for size, step, block in padded]
        phases = math.prod(steps)
        if not taps or math.prod(torus) * phases * inputs * groups * outputs > _MOST_OF_TRANSFORM:
            return math.inf
        split = list(zip(blocks, steps, strict=True))
        spread = np.zeros([*(b * step for b, step in split), inputs, groups, outputs])
        spread[tuple(slice(0, r, gap) for r, gap in zip(reach, by, strict=True))] = kernel
        spread = spread.reshape(*(size for pair in split for size in pair), inputs, groups, outputs)
        last = 2 * len(taps)  # The axes from `last` on are inputs, groups and outputs.
        order = [*range(0, last, 2), last + 1, *range(1, last, 2), last, last + 2]
        spread = spread.transpose(order).reshape(*blocks, groups, phases * inputs, outputs)
        waves = np.fft.fftn(spread, torus, axes=tuple(range(len(taps))))
        return float(np.linalg.norm(waves, 2, axis=(-2, -1)).max()) * (1 + 1e-9)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A public kernel of a convolution.

    Attributes:
        middle: the middle of the range of each entry.
        off: half the width of the range of each entry.
        sizes: upper bounds on the magnitudes of the entries.
    """

    middle: np.ndarray
    off: np.ndarray
    sizes: np.ndarray

    @staticmethod
    def of(kernel: Abstract, order: Sequence[int], groups: int) -> "_Kernel":
        def grouped(array: np.ndarray) -> np.ndarray:
            array = np.broadcast_to(array, kernel.shape).transpose(order)
            return array.reshape(*array.shape[:-1], groups, -1)

        low, high = grouped(kernel.low), grouped(kernel.high)
        middle = (low + high) / 2
        off = np.where(low < high, rounding.up(high - low) / 2 + np.abs(middle) * 2.0**-50, 0.0)
        return _Kernel(middle, off, np.maximum(np.abs(low), np.abs(high)))


def convolve(
    x: Abstract, kernel: Abstract, *, dimension_numbers: Any, window_strides: Any, padding: Any,
    lhs_dilation: Any, rhs_dilation: Any, feature_group_count: int, batch_group_count: int,
    precision: Any, preferred_element_type: Any = None, **_: Any,
) -> Abstract:  # fmt: skip
    """Returns the value of a convolution of records by a public kernel.

    Each result is a sum of products, added in any order.
    """
    dtype = np.dtype(preferred_element_type or x.dtype)
    if not kernel.is_public or not kernel.is_finite:
        raise RefusalError("proofs support a convolution only with a public, finite kernel")
    if batch_group_count != 1:
        raise RefusalError("proofs do not support batch_group_count other than 1")
    if not x.dtype == kernel.dtype == dtype:
        raise RefusalError(
            "proofs support a convolution only if its operands and its result have the same "
            "dtype. Convert the operands first"
        )
    reductions.check_highest(precision, dtype)
    if min(itertools.chain((0,), *padding)) < 0:
        # On CPUs, XLA computes such a convolution from wrong entries, some of them outside of the
        # array.
        raise RefusalError(
            "proofs do not support a convolution with negative padding. Slice the operand before "
            "the convolution instead"
        )
    batch, feature, *spatial = dimension_numbers.lhs_spec
    if x.axis not in (None, batch):
        x = as_dense(x)
    # From here on, the axes are the batch, the spatial axes, and the features.
    rows = transpose(x, [batch, *spatial, feature])
    out, into, *places = dimension_numbers.rhs_spec
    weights = _Kernel.of(kernel, [*places, into, out], feature_group_count)
    # Along the batch and the features, windows have size 1.
    windows = Windows(
        (1, *weights.sizes.shape[:-3], 1), (1, *window_strides, 1),
        ((0, 0), *map(tuple, padding), (0, 0)), (1, *lhs_dilation, 1), (1, *rhs_dilation, 1),
    )  # fmt: skip
    windows.check_fit((*rows.shape[:-1], 1))
    windows.check((*rows.shape[:-1], 1))
    if math.prod(windows.results(rows.shape)[1:-1]) * kernel.low.size > _MOST_PRODUCTS:
        raise RefusalError(
            "the convolution has too many products for a proof. Use a smaller kernel or fewer "
            "features"
        )
    whole = x.whole and kernel.whole
    found = _convolved(rows, weights, _Map(windows, rows.shape), whole=whole)
    spec = dimension_numbers.out_spec
    back = np.argsort([spec[0], *spec[2:], spec[1]])
    return dataclasses.replace(transpose(found, list(map(int, back))), source=None)


def _convolved(x: Abstract, kernel: _Kernel, map_: _Map, *, whole: bool) -> Abstract:
    sizes, middle = kernel.sizes, kernel.middle
    *taps, inputs, groups, outputs = sizes.shape
    count = math.prod(taps) * inputs
    room = 1 + (sizes.size + 100) * 2.0**-50
    terms, weight = flattened(x)
    total = np.maximum(map_.of(x.magnitude, sizes), count * weight * sizes.max()) * room
    load = float(total.max())
    exact = whole and rounding.holds(total, total, x.dtype)
    error = np.zeros((1,) * total.ndim)
    if not exact:
        units = rounding.sum_units(count * terms, x.dtype) + 4 * rounding.unit(x.dtype)
        reductions.check_sums(units, count, x.dtype)
        # If a device flushes a factor to 0, the product is also 0.
        flushed = 4 * rounding.tiny(x.dtype) * (1 + x.magnitude.max() + sizes.max())
        error = rounding.up(units * total + flushed * (count + 1))
    column, column2 = map_.sums(sizes)[0] * room, map_.column(sizes) * room
    # `by_one` bounds how many results one entry may change. If a compiler flattens a sum of sums,
    # any result may be rounded differently, even where no summand changes.
    by_one = map_.windows.most_at_once * outputs if terms == 1 else math.inf
    # Each weight is within `off` of the middle of its range. So the norm of the kernel is at most
    # the norm of the middle plus the norm of `off`.
    l2 = min(map_.schur(sizes), map_.spectral(middle) + map_.schur(kernel.off)) * room
    shape = (x.shape[0], *map_.windows.results(x.shape)[1:-1], groups * outputs)

    def moved(d: Difference) -> Moves:
        touched = map_.of((d.each > 0) * 1.0, (sizes > 0) * 1.0) > 0
        # A tiny change may underflow to 0 on the host, so changes are at least 2^-900.
        each = np.where(touched, np.maximum(map_.of(d.each, sizes) * room, 2.0**-900), 0.0)
        l1 = float(rounding.times(d.l1, column))
        each = np.minimum(each, rounding.times(d.l1, sizes.max() * room))
        # The convolution is a matrix. If one entry changes by d, the results change by d times a
        # column of the matrix. `column2` bounds the l2 norms of all columns.
        most2 = min(rounding.times(d.l2, l2), rounding.times(d.l1, column2))
        return erring((each, l1, float(most2)), error, shape, x.axis, _touched(d, by_one))

    # The lower endpoint of a result uses the lower endpoints of entries with positive weights, and
    # the upper endpoints of entries with negative weights.
    up, down = np.maximum(middle, 0.0), np.minimum(middle, 0.0)
    ends = map_.of(x.low, up) + map_.of(x.high, down), map_.of(x.high, up) + map_.of(x.low, down)
    spread = map_.of(x.magnitude, kernel.off) * room
    host = 0.0 if exact else total * (room - 1)
    pending = Pending.of_sum(count * terms, load)
    # A compiler may rewrite a product with a vector as a sum, as in `contract`.
    if groups > 1 or 1 in (outputs, math.prod(shape[:-1])):
        pending = pending.having(terms=count * terms, weight=load)
    low, high = rounding.widened(*ends, error + spread + host)
    counts = [_touched(d, by_one) for d in (x.changed, x.others)]
    return result_of(x, low, high, moved, shape=shape, whole=exact, pending=pending, counts=counts)
