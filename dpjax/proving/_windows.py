"""Places that windows read: those of convolutions and of pooling."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._pending import flattened
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import RefusalError
from dpjax.proving._surrounded import check_cut, check_surrounded
from dpjax.proving._value import Abstract, Difference, as_dense, make

_MOST_TAPS = 4096
_MOST_READ = 2**26


@dataclasses.dataclass(frozen=True)
class Windows:
    """Along each axis: a window's size, steps, padding, and the gaps in an array and in a window.

    Result o reads the places o stride + t dilation, one for each tap t, of the padded array.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    gaps: tuple[int, ...]
    dilation: tuple[int, ...]

    def taps(self) -> Iterator[tuple[int, ...]]:
        """The places of a window."""
        return itertools.product(*map(range, self.sizes))

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape with gaps and padding."""
        axes = zip(shape, self.gaps, self.padding, strict=True)
        return tuple((size - 1) * gap + 1 + sum(pads) for size, gap, pads in axes)

    def results(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The number of windows along each axis."""
        axes = zip(self.padded(shape), self.sizes, self.dilation, self.strides, strict=True)
        return tuple((whole - (k - 1) * by - 1) // step + 1 for whole, k, by, step in axes)

    @property
    def wide(self) -> list[int]:
        """The axes along which a window has several taps."""
        return [k for k, size in enumerate(self.sizes) if size > 1]

    def pads_one(self, shape: Sequence[int]) -> bool:
        """Whether an axis of one place is padded."""
        return any(s == 1 and max(pads) > 0 for s, pads in zip(shape, self.padding, strict=True))

    def moves(self, axis: int) -> bool:
        """Whether a result reads other places along an axis than its own."""
        own = self.sizes[axis], self.strides[axis], self.gaps[axis], *self.padding[axis]
        return own != (1, 1, 1, 0, 0)

    def read(
        self, array: np.ndarray, shape: Sequence[int], fill: float
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Each tap, and what all windows read there; an axis of length 1 may stay short."""
        axes = [k for k in range(len(shape)) if self.moves(k)]
        full = [size if k in axes else array.shape[k] for k, size in enumerate(shape)]
        array, padded = np.broadcast_to(array, full), self.padded(shape)
        made = np.full([padded[k] if k in axes else s for k, s in enumerate(full)], fill)
        # Negative padding cuts.
        kept, placed = [slice(None)] * len(full), [slice(None)] * len(full)
        for k in axes:
            (start, _), gap = self.padding[k], self.gaps[k]
            inside = [p for p in range(shape[k]) if 0 <= start + p * gap < padded[k]]
            if not inside:
                raise RefusalError("windows that read padding alone have no rule")
            kept[k] = slice(inside[0], inside[-1] + 1)
            placed[k] = slice(start + inside[0] * gap, start + inside[-1] * gap + 1, gap)
        made[tuple(placed)] = array[tuple(kept)]
        counts = self.results(shape)
        for tap in self.taps():
            starts = [t * by for t, by in zip(tap, self.dilation, strict=True)]
            ends = [s + (c - 1) * step + 1 for s, c, step in zip(starts, counts, self.strides)]  # noqa: B905
            chosen = tuple(
                slice(starts[k], ends[k], self.strides[k]) if k in axes else slice(None)
                for k in range(len(full))
            )
            yield tap, made[chosen]

    def at_once(self, steps: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """The taps in groups, so that only taps of one group meet at one place.

        With the strides as steps, that is a place of the array, which is read by result o at tap t
        if o stride + t dilation is its place. With the gaps, it is a result, which reads a number
        at tap t if that place is no gap.
        """
        groups = dict[tuple[int, ...], list[tuple[int, ...]]]()
        for tap in self.taps():
            rest = tuple(t * by % s for t, by, s in zip(tap, self.dilation, steps, strict=True))
            groups.setdefault(rest, []).append(tap)
        return list(groups.values())

    def check(self, shape: Sequence[int]) -> None:
        """Refuses what takes too long to walk."""
        taps = math.prod(self.sizes)
        if min(self.results(shape)) < 1:
            raise RefusalError("windows larger than their array have no rule")
        if taps > _MOST_TAPS or taps * math.prod(self.results(shape)) > _MOST_READ:
            raise RefusalError("windows of this size have too many places to walk")


def _windows(parameters: Any) -> Windows:
    return Windows(
        tuple(parameters["window_dimensions"]), tuple(parameters["window_strides"]),
        tuple(map(tuple, parameters["padding"])), tuple(parameters["base_dilation"]),
        tuple(parameters["window_dilation"]),
    )  # fmt: skip


def pooled_sum(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
    """reduce_window_sum: a sum of the places of each window, in any order.

    A place is in at most m windows, and a window holds K places. So a move grows m times in l1, and
    sqrt(m K) times in l2 (Schur's test).
    """
    windows = _windows(parameters)
    check_surrounded(x, windows.wide, 0.0)
    check_cut(x)
    x = _by_row(x, windows)
    count = math.prod(windows.sizes)
    terms, weight = flattened(x)

    def added(array: np.ndarray) -> np.ndarray:
        return np.asarray(sum(part for _, part in windows.read(array, x.shape, 0.0)))

    sizes = np.maximum(added(x.magnitude), count * weight) * (1 + (count + 100) * 2.0**-52)
    exact = x.whole and (dtype.kind != "f" or sizes.max() <= rounding.exact_integers(dtype))
    error = np.zeros((1,) * sizes.ndim)
    if not exact:
        units = rounding.sum_units(count * terms, dtype) + (count + 100) * 2.0**-52
        error = rounding.up(units * sizes + 4 * rounding.tiny(dtype) * (count + 1))
    many = max(map(len, windows.at_once(windows.strides)))

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        each = np.minimum(rounding.up(added(d.each) * (1 + (count + 100) * 2.0**-52)), d.l1)
        return each, d.l1 * many, d.l2 * math.sqrt(many * count)

    interval = rounding.widened(added(x.low), added(x.high), error)
    if (x.low >= 0).all():
        interval = np.maximum(interval[0], 0.0), interval[1]
    pending = Pending(terms=count * terms, weight=float(sizes.max()))
    return _made(x, windows, interval, moved, error, whole=exact, pending=pending)


def pooled_extremum(largest: bool) -> Callable[..., Abstract]:
    """reduce_window_max and reduce_window_min.

    A result moves by at most the largest move in its window. A place is in at most m windows, so a
    move grows m times in l1, and sqrt(m) times in l2: the largest square is at most their sum.
    """

    def rule(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
        windows = _windows(parameters)
        check_surrounded(x, windows.wide, _start(dtype, largest=largest))
        x = _by_row(x, windows)
        pick, idle = (np.maximum, -np.inf) if largest else (np.minimum, np.inf)

        def chosen(array: np.ndarray) -> np.ndarray:
            parts = (part for _, part in windows.read(array, x.shape, idle))
            return pick.reduce(list(parts))

        many = max(map(len, windows.at_once(windows.strides)))

        def moved(d: Difference) -> tuple[np.ndarray, float, float]:
            parts = [part for _, part in windows.read(d.each, x.shape, 0.0)]
            return np.maximum.reduce(parts), d.l1 * many, d.l2 * math.sqrt(many)

        flush = np.full((1,) * len(x.shape), 0.0 if x.whole else 4 * rounding.tiny(dtype))
        interval = chosen(x.low), chosen(x.high)
        return _made(x, windows, interval, moved, flush, whole=x.whole)

    return rule


def _start(dtype: np.dtype, *, largest: bool) -> float:
    """What JAX lets an extremum start at."""
    if dtype.kind not in "iu":
        return -np.inf if largest else np.inf
    return float(np.iinfo(dtype).min if largest else np.iinfo(dtype).max)


def _by_row(x: Abstract, windows: Windows) -> Abstract:
    """Windows that read several records leave nothing that is known by record."""
    windows.check(x.shape)
    return as_dense(x) if x.axis is not None and windows.moves(x.axis) else x


def _made(
    x: Abstract,
    windows: Windows,
    interval: tuple[np.ndarray, np.ndarray],
    moved: Callable[[Difference], tuple[np.ndarray, float, float]],
    error: np.ndarray,
    **more: Any,
) -> Abstract:
    shape = windows.results(x.shape)
    changed, others = (
        with_errors(moved(d), error, shape, x.axis) for d in (x.changed, x.others)
    )  # fmt: skip
    found = make(shape, x.dtype, *interval, x.axis, changed, others, **more)
    pending = found.pending.having(padded=windows.pads_one(x.shape))
    return dataclasses.replace(found, pending=pending)


def with_errors(
    moved: tuple[np.ndarray, float, float],
    error: np.ndarray,
    shape: Sequence[int],
    axis: int | None,
) -> tuple[np.ndarray, float, float]:
    """Bounds on a difference, with twice the error where an entry differs at all."""
    each, l1, l2 = moved
    error = error if axis is None else error.max(axis=axis, keepdims=True)
    slips = np.where(each > 0, 2 * error, 0.0)
    copies = math.prod(s for k, s in enumerate(shape) if k != axis) / max(1, slips.size)
    return (
        rounding.up(each + slips),
        float(rounding.up(l1 + float(slips.sum()) * copies * (1 + slips.size * 2.0**-52))),
        float(rounding.up(l2 + rounding.norm2(slips, copies) * (1 + slips.size * 2.0**-52))),
    )
