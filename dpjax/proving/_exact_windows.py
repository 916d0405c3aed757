"""Exact cumulative sums and window sums along the records.

Each number of a record is rounded to an integer number of small steps, and sums are computed in
integers. If one record changes, all later cumulative sums change, and so do the sums of all windows
that contain the record. Each of them changes by as much as the integer of the record, and is
rounded to a float once.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from dpjax.proving._exact_sums import ExactSums, exponent_of_range, is_over_records
from dpjax.proving._reductions import SumsOf, check_cut, check_surrounded, cumulative_sum
from dpjax.proving._value import Abstract
from dpjax.proving._windows import pooled_sum


@dataclasses.dataclass(frozen=True)
class ExactCumulative(ExactSums):
    """Cumulative sums along an axis, from its end if `reverse`."""

    axis: int = 0
    reverse: bool = False
    title = "exact cumulative sum"

    def count(self, shape: Sequence[int]) -> int:
        return shape[self.axis]

    def added(self, integers: jax.Array) -> jax.Array:
        return lax.cumsum(integers, self.axis, self.reverse)

    def check(self, x: Abstract) -> None:
        check_surrounded(x, [self.axis], 0.0)
        check_cut(x)

    def of_floats(self, x: Abstract, sums_of: SumsOf) -> Abstract:
        return cumulative_sum(x, self.axis, self.reverse, sums_of)


@dataclasses.dataclass(frozen=True)
class ExactWindows(ExactSums):
    """Sums over windows, whose fields are the parameters of `lax.reduce_window`."""

    sizes: tuple[int, ...] = (1,)
    strides: tuple[int, ...] = (1,)
    padding: tuple[tuple[int, int], ...] = ((0, 0),)
    gaps: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    title = "exact sums of windows"

    def count(self, shape: Sequence[int]) -> int:
        return math.prod(self.sizes)

    def added(self, integers: jax.Array) -> jax.Array:
        parameters = self.sizes, self.strides, self.padding, self.gaps, self.dilation
        return lax.reduce_window(integers, np.zeros((), integers.dtype), lax.add, *parameters)

    def check(self, x: Abstract) -> None:
        check_surrounded(x, [k for k, size in enumerate(self.sizes) if size > 1], 0.0)
        check_cut(x)

    def of_floats(self, x: Abstract, sums_of: SumsOf) -> Abstract:
        return pooled_sum(
            x, sums_of, window_dimensions=self.sizes, window_strides=self.strides,
            padding=self.padding, base_dilation=self.gaps, window_dilation=self.dilation,
        )  # fmt: skip


def planned_cumulative(x: Abstract, axis: int, reverse: bool, **_: Any) -> ExactCumulative | None:
    """Returns the exact form of a cumulative sum; None if floats are as accurate."""
    if not is_over_records(x, [axis]):
        return None
    exponent = exponent_of_range(x, [axis], x.shape[axis])
    return None if exponent is None else ExactCumulative(exponent, axis=axis, reverse=bool(reverse))


def planned_windows(
    x: Abstract, *, window_dimensions: Any, window_strides: Any, padding: Any, base_dilation: Any,
    window_dilation: Any, **_: Any,
) -> ExactWindows | None:  # fmt: skip
    """Returns the exact form of sums over windows; None if floats are as accurate."""
    of_integers = [window_dimensions, window_strides, base_dilation, window_dilation]
    sizes, strides, gaps, dilation = (tuple(map(int, numbers)) for numbers in of_integers)
    wide = [k for k, size in enumerate(sizes) if size > 1]
    if not is_over_records(x, wide):
        return None
    if (exponent := exponent_of_range(x, wide, math.prod(sizes))) is None:
        return None
    pads = tuple((int(a), int(b)) for a, b in padding)
    windows = {"sizes": sizes, "strides": strides, "padding": pads}
    return ExactWindows(exponent, **windows, gaps=gaps, dilation=dilation)
