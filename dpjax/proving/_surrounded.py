"""One place between others that hold what a sum starts at, which XLA takes for padding.

XLA folds padding into the window of a sum. Where it stands alike on both sides of one place, XLA
takes each result for that place, also where the window does not reach it. So `cumsum([0, x, 0])`
is [x, x, x] once compiled, and is refused, however the zeros came there. A sum of one number at a
place that it chooses is such an array too, if XLA knows the place.
"""

from collections.abc import Iterable

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, without_middle


def check_surrounded(x: Abstract, axes: Iterable[int], start: float) -> None:
    """Refuses sums and extrema from `start` along axes on which all but the middle may hold it."""
    if x.is_known and (x.low == start).all():
        return
    for axis in axes:
        if x.shape[axis] < 3 or x.shape[axis] % 2 == 0:
            continue
        low, high = (without_middle(array, x.shape, axis) for array in (x.low, x.high))
        moves = [without_middle(d.each, x.shape, axis).any() for d in (x.changed, x.others)]
        public = not any(moves) and bool((low <= start).all() and (start <= high).all())
        # An operation that XLA drops may have widened the range of public numbers a little.
        slack = 0.0 if x.whole else 2.0**20 * rounding.tiny(x.dtype)
        off = max(np.abs(low - start).max(), np.abs(high - start).max())
        if public or off <= slack or x.pending.single or x.pending.padded:
            raise RefusalError(
                f"one place of axis {axis} may stand between others that hold {start:g}, which has"
                " no rule: pad it on one side, or leave them out"
            )


def check_cut(x: Abstract) -> None:
    """Refuses sums of floats that were cut to integers, where XLA may know them to be one number.

    XLA takes a cumulative sum of one number for its multiples, and forgets that it was cut.
    """
    if x.dtype.kind == "f" and x.pending.cut and (x.is_public or x.pending.hidden):
        raise RefusalError(
            "sums of public numbers that were cut to integers have no rule: use jnp.floor"
        )
