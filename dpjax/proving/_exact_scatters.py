"""Exact sums by index, as in `jax.ops.segment_sum` of many records, computed from integers."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.proving import _rounding as rounding
from dpjax.proving._exact_sums import (
    OF_FLOAT64,
    Named,
    exponent_of_range,
    is_over_records,
    most_off,
    nearest,
    steps_of,
    total_of_steps,
    worth_it,
)
from dpjax.proving._places import check_scatter, moved_rows
from dpjax.proving._value import Abstract, Pending, RefusalError, make

_MODES = tuple(lax.GatherScatterMode)


@dataclasses.dataclass(frozen=True)
class ExactScatter(Named):
    """A scatter-add of rows of records, whose entries are within [-2^exponent, 2^exponent].

    The entries are rounded to integer numbers of steps, whose sums do not depend on the order of
    records. The total is computed from them in float64. `mode` is the index of JAX's mode of the
    scatter in `_MODES`.
    """

    exponent: int
    mode: int
    title: ClassVar = "exact sums by place"

    def numbers(self, places: Any, updates: Any) -> lax.ScatterDimensionNumbers:
        """Returns the dimension numbers of a scatter of one row for each record."""
        axes = tuple(range(places.shape[-1]))
        return lax.ScatterDimensionNumbers(tuple(range(1, len(updates.shape))), axes, axes)

    def __call__(self, start: jax.Array, places: jax.Array, updates: jax.Array) -> jax.Array:
        def exact_scatter(start: jax.Array, places: jax.Array, updates: jax.Array) -> jax.Array:
            steps = steps_of(updates, self.exponent, len(updates))
            zeros = lax.full(start.shape, 0, steps.dtype)
            numbers = self.numbers(places, steps)
            sums = lax.scatter_add(zeros, places, steps, numbers, mode=_MODES[self.mode])
            total = total_of_steps(sums, self.exponent, len(updates))
            total = total + lax.convert_element_type(start, jnp.float64)
            return lax.convert_element_type(total, start.dtype)

        exact_scatter.__name__ = self.name
        with jax.enable_x64(True):
            return jax.jit(exact_scatter)(start, places, updates)


def planned_scatter(
    start: Abstract, places: Abstract, updates: Abstract, dimension_numbers: Any, mode: Any,
    **_: Any,
) -> ExactScatter | None:  # fmt: skip
    """Returns the exact form of a scatter of records; None if floats are as accurate.

    Raises:
        RefusalError: if an exact scatter cannot replace the scatter.
    """
    whole, count = start.whole and updates.whole, updates.shape[0] if updates.shape else 1
    over = is_over_records(updates, [0]) or not places.is_public
    if whole or not over or not worth_it(count, updates.dtype):
        return None
    mode = lax.GatherScatterMode.from_any(mode)
    check_scatter(start, places, updates, dimension_numbers, mode)
    if not start.is_finite:
        raise RefusalError(
            "an exact scatter needs a public array to add to. Start with zeros, for example"
        )
    exponent = exponent_of_range(updates, (0,), count)
    return None if exponent is None else ExactScatter(exponent, _MODES.index(mode))


def scattered_exactly(
    start: Abstract, places: Abstract, updates: Abstract, kind: ExactScatter
) -> Abstract:
    """Returns the abstract value of an exact scatter.

    Each number of a record is rounded to a grid, and the resulting integers are added up at the
    index of the record. If a record changes, only the sums at its old and its new index change. So
    at most two rows change, and only these two are rounded differently.
    """
    numbers = kind.numbers(places, updates)
    size, _ = check_scatter(start, places, updates, numbers, _MODES[kind.mode])
    if updates.nan or updates.pending.coarse or not start.is_finite or start.pending.coarse:
        raise RefusalError(
            "an exact scatter needs finite updates and a public array to add to. Start with "
            "zeros, for example"
        )
    n, dtype = updates.shape[0], start.dtype
    off = most_off(updates, n, kind.exponent)
    axes, first = len(start.shape) - len(size), float(start.magnitude.max())
    each, l1, l2 = moved_rows(places, updates, size, off)
    room = 1 + (n + 100) * 2.0**-52
    low, high = updates.low.min(axis=0, keepdims=True), updates.high.max(axis=0, keepdims=True)
    row = (1,) * axes
    low = start.low + n * (np.minimum(low, 0.0) * room - off).reshape(row + low.shape[1:])
    high = start.high + n * (np.maximum(high, 0.0) * room + off).reshape(row + high.shape[1:])
    largest = np.asarray(max(float(np.abs(low).max()), float(np.abs(high).max()), 2.0**-500))
    final = OF_FLOAT64 * (n * 2.0**kind.exponent + first) + 4 * rounding.tiny(dtype)
    final = float(rounding.up(final + nearest(largest, rounding.unit(dtype))))
    entries = 2 * math.prod(size)
    moved = (
        rounding.up(np.where(each > 0, each + 2 * final, 0.0)).reshape(row + each.shape[1:]),
        float(rounding.up(l1 + 2 * final * entries)),
        float(rounding.up(l2 + 2 * final * math.sqrt(entries))),
    )
    low, high = rounding.widened(low, high, np.asarray(final))
    apart = n * (updates.apart + 2 * off) if updates.apart else 2 * off
    pending = Pending().having(**Pending.flags([updates.pending]))
    return make(
        start.shape, dtype, low, high, None, moved, moved, counts=[float(entries)] * 2,
        pending=pending.having(single=n == 1),
        apart=math.inf if places.apart else float(rounding.up(apart + 2 * final)),
    )  # fmt: skip
