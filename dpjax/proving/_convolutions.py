"""The rule of convolutions with a public kernel: one linear map for each place of the batch.

Let A be that map. It moves an entry by at most |A| d, and by at most max_j sum_i |A_ij| in l1. In
l2 Schur's test gives sqrt(max_i sum_j |A_ij| max_j sum_i |A_ij|). A part of a circular convolution
on a torus of more places has at most its norm: the largest ||K(w)||_2 of the kernel's transform K.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from dpjax.proving import _rounding as rounding
from dpjax.proving._layout import transpose
from dpjax.proving._pending import flattened
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, Difference, as_dense, make
from dpjax.proving._windows import Windows, with_errors

_HIGHEST = (lax.Precision.HIGHEST, (lax.Precision.HIGHEST, lax.Precision.HIGHEST))
_MOST_PRODUCTS = 2**26
_MOST_OF_TRANSFORM = 2**19


@dataclasses.dataclass(frozen=True)
class _Map:
    """Kernels of shape (taps..., inputs, groups, outputs), which slide over (batch, ..., features).

    `inputs` and `outputs` count the features of a group.
    """

    windows: Windows
    shape: tuple[int, ...]

    def of(self, array: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        """The sums of all products, in float64."""
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
        """The largest sum of magnitudes of a column of A, and of a row."""
        columns = self._largest(sizes.sum(-1), self.windows.strides)
        return columns, self._largest(sizes.sum(-3), self.windows.gaps)

    def _largest(self, sizes: np.ndarray, steps: tuple[int, ...]) -> float:
        groups = self.windows.at_once(steps)
        return max(float(np.sum([sizes[tap[1:-1]] for tap in taps], 0).max()) for taps in groups)

    def schur(self, sizes: np.ndarray) -> float:
        """A bound on the l2 norm of A."""
        return float(rounding.up(math.sqrt(math.prod(self.sums(sizes)))))

    def spectral(self, kernel: np.ndarray) -> float:
        """The largest norm of the transform; infinite where that takes long.

        A step s reads each of s phases of the array once, so phases are more inputs of a kernel
        with step 1.
        """
        *taps, inputs, groups, outputs = kernel.shape
        steps, by = self.windows.strides[1:-1], self.windows.dilation[1:-1]
        reach = [(size - 1) * gap + 1 for size, gap in zip(taps, by, strict=True)]
        blocks = [-(-size // step) for size, step in zip(reach, steps, strict=True)]
        padded = zip(self.windows.padded(self.shape)[1:-1], steps, blocks, strict=True)
        torus = [-(-size // step) + block for size, step, block in padded]
        phases = math.prod(steps)
        if not taps or math.prod(torus) * phases * inputs * groups * outputs > _MOST_OF_TRANSFORM:
            return math.inf
        split = list(zip(blocks, steps, strict=True))
        spread = np.zeros([*(b * step for b, step in split), inputs, groups, outputs])
        spread[tuple(slice(0, r, gap) for r, gap in zip(reach, by, strict=True))] = kernel
        spread = spread.reshape(*(size for pair in split for size in pair), inputs, groups, outputs)
        last = 2 * len(taps)  # The places of inputs, groups and outputs.
        order = [*range(0, last, 2), last + 1, *range(1, last, 2), last, last + 2]
        spread = spread.transpose(order).reshape(*blocks, groups, phases * inputs, outputs)
        waves = np.fft.fftn(spread, torus, axes=tuple(range(len(taps))))
        return float(np.linalg.norm(waves, 2, axis=(-2, -1)).max()) * (1 + 1e-9)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A public kernel: what is nearest to it, how far it may be off, and the largest magnitudes."""

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


def convolve(parameters: Any, dtype: np.dtype, x: Abstract, kernel: Abstract) -> Abstract:
    """conv_general_dilated of records by a public kernel, as sums of products in any order."""
    _check(parameters, dtype, x, kernel)
    numbers = parameters["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    if x.axis not in (None, batch):
        x = as_dense(x)
    # From here on: the batch, the places, the features.
    rows = transpose(x, [batch, *spatial, feature])
    out, into, *places = numbers.rhs_spec
    weights = _Kernel.of(kernel, [*places, into, out], parameters["feature_group_count"])
    windows = _windows(parameters, weights.sizes.shape[:-3])
    windows.check((*rows.shape[:-1], 1))
    if math.prod(windows.results(rows.shape)[1:-1]) * kernel.low.size > _MOST_PRODUCTS:
        raise RefusalError("a convolution of this size has too many products to walk")
    exact = x.whole and kernel.whole
    found = _convolved(rows, weights, _Map(windows, rows.shape), exact=exact)
    back = np.argsort([numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1]])
    return dataclasses.replace(transpose(found, list(map(int, back))), source=None)


def _check(parameters: Any, dtype: np.dtype, x: Abstract, kernel: Abstract) -> None:
    if not kernel.is_public or not kernel.is_finite:
        raise RefusalError("a kernel that is not public and finite has no rule")
    if parameters["batch_group_count"] != 1:
        raise RefusalError("groups of the batch have no rule")
    if not x.dtype == kernel.dtype == dtype:
        raise RefusalError("a convolution of two dtypes has no rule")
    if dtype.kind == "f" and parameters["precision"] not in _HIGHEST:
        raise RefusalError("a precision below the highest has no rule: leave it out")
    if min(itertools.chain((0,), *parameters["padding"])) < 0:
        # XLA on a CPU computes it from other numbers, and some that lie beyond the array.
        raise RefusalError("a convolution with negative padding has no rule: slice")


def _windows(parameters: Any, taps: Sequence[int]) -> Windows:
    """Along the batch and the features, each place is a window of its own."""
    return Windows(
        (1, *taps, 1),
        (1, *parameters["window_strides"], 1),
        ((0, 0), *map(tuple, parameters["padding"]), (0, 0)),
        (1, *parameters["lhs_dilation"], 1),
        (1, *parameters["rhs_dilation"], 1),
    )


def _convolved(x: Abstract, kernel: _Kernel, map_: _Map, *, exact: bool) -> Abstract:
    sizes, middle = kernel.sizes, kernel.middle
    *taps, inputs, groups, outputs = sizes.shape
    count = math.prod(taps) * inputs
    room = 1 + (sizes.size + 100) * 2.0**-50
    terms, weight = flattened(x)
    total = np.maximum(map_.of(x.magnitude, sizes), count * weight * sizes.max()) * room
    load = float(total.max())
    exact = exact and (x.dtype.kind != "f" or load <= rounding.exact_integers(x.dtype))
    error = np.zeros((1,) * total.ndim)
    if not exact:
        units = rounding.sum_units(count * terms, x.dtype) + 4 * rounding.unit(x.dtype)
        if not math.isfinite(units):
            raise RefusalError(f"sums of {count} products in {x.dtype} may lose all digits")
        # A factor that is flushed to 0 takes its product with it.
        flushed = 4 * rounding.tiny(x.dtype) * (1 + x.magnitude.max() + sizes.max())
        error = rounding.up(units * total + flushed * (count + 1))
    column = map_.sums(sizes)[0] * room
    l2 = min(map_.schur(sizes), map_.spectral(middle) + map_.schur(kernel.off)) * room
    shape = (x.shape[0], *map_.windows.results(x.shape)[1:-1], groups * outputs)

    def moved(d: Difference) -> tuple[np.ndarray, float, float]:
        touched = map_.of((d.each > 0) * 1.0, (sizes > 0) * 1.0) > 0
        # What is too small for the host still moves.
        each = np.where(touched, np.maximum(map_.of(d.each, sizes) * room, 2.0**-900), 0.0)
        l1 = float(rounding.times(d.l1, column))
        bounds = np.minimum(each, l1), l1, float(rounding.times(d.l2, l2))
        return with_errors(bounds, error, shape, x.axis)

    up, down = np.maximum(middle, 0.0), np.minimum(middle, 0.0)
    ends = map_.of(x.low, up) + map_.of(x.high, down), map_.of(x.high, up) + map_.of(x.low, down)
    spread = map_.of(x.magnitude, kernel.off) * room
    host = 0.0 if exact else total * (room - 1)
    pending = Pending.of_sum(count * terms, load)
    # Compilers may take a product with a vector for a sum, as in _products.py.
    if groups > 1 or 1 in (outputs, math.prod(shape[:-1])):
        pending = pending.having(terms=count * terms, weight=load)
    return make(
        shape, x.dtype, *rounding.widened(*ends, error + spread + host), x.axis,
        moved(x.changed), moved(x.others), whole=exact, pending=pending,
    )  # fmt: skip
