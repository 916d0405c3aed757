"""Sums of a function of counts, such as an entropy or the number of groups.

If a record is replaced, one count may fall from c to c - 1, and another may rise from c to c + 1.
Let d(c) = f(c + 1) - f(c). The sum of f over all counts changes by d(c) - d(b - 1), if a count c
rises and a count b falls. So it changes by at most

    max d - min d ,

and if only one of the two counts changes, by at most max |d|. A rule for single operations adds up
both changes as if they had the same sign.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._cells import Held
from dpjax.proving._value import Abstract, meet

# Maps an array of counts to whether a count rises whenever another one falls.
Transfers = Mapping[Abstract, bool]


def transfer(
    name: str, params: Mapping[str, Any], operands: Sequence[Abstract], found: Abstract
) -> bool | None:
    """Whether a record that leaves one count joins another; None if `found` has no counts."""
    if not found.whole or found.axis is not None or found.apart:
        return None
    if name == "reduce_sum":
        (x,) = operands
        one = x.whole and x.low.min() >= 0 and x.l1_of_row < 2 and x.others.is_zero
        return False if one and tuple(params["axes"]) == (x.axis,) else None
    if not name.startswith("scatter"):
        return None
    start, places, updates = operands
    added = name in ("scatter-add", "scatter_add")
    known = start.is_known and updates.is_known and len(updates.shape) == 1
    # Each record has one place, and adds 1 there. A place that is set to a number that exceeds the
    # start by 1 counts whether there is a record, so these numbers and starts must be equal.
    known = known and places.shape == (*updates.shape, len(found.shape))
    by = updates.low if added else np.subtract.outer(updates.low, start.low)
    if name not in ("scatter", "scatter-add", "scatter_add") or not known or (by != 1).any():
        return None
    highest = np.broadcast_to(places.high, (*places.high.shape[:-1], places.shape[-1])).max(axis=0)
    inside = float(places.low.min()) >= 0 and bool((highest < np.array(found.shape)).all())
    return added and inside


def sum_of_counts(x: Abstract, found: Abstract, held: Held, transfers: Transfers) -> Abstract:
    """Returns the value of a sum of a function of counts, tightened by the lemma of this file."""
    if found.shape or found.axis is not None or found.off is None:
        return found
    relative, absolute = found.off
    sizes = float(np.broadcast_to(x.magnitude, x.shape).sum())
    error = relative * sizes + absolute + 2.0**-40 * sizes * (not found.whole)
    for base, cells in held.items():
        both = transfers.get(base.value)
        if both is None or base.width or not cells.alone or not cells.good.all():
            continue
        if base.value.shape != x.shape or len(cells.low) < 2:
            continue
        most = float((cells.high[1:] - cells.low[:-1]).max())
        least = float((cells.low[1:] - cells.high[:-1]).min())
        moved = most - least if both else max(most - least, most, -least)
        bound = float(rounding.up(moved * (1 + 2.0**-40) + 2 * error))
        if math.isfinite(bound):
            moves = np.asarray(bound), bound, bound
            found = meet(found, changed=moves, others=moves)
    return found
