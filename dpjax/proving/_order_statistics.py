"""Combinations of order statistics: quantiles, ranges between them, and means of some of them.

Let s be a sorted vector, and s' the one of a neighbor, with ||s - s'||_1 <= d. Let y = C s for a
public matrix C, which is the same on both databases. Then y - y' = C (s - s'), so

    ||y - y'||_1 <= d max_j sum_i |C_ij| ,    ||y - y'||_2 <= d max_j sqrt(sum_i C_ij^2) ,
    |y_i - y'_i| <= d max_j |C_ij| .

A rule for single operations forgets that two order statistics cannot both move by d. For example, a
quantile is (1 - t) s_j + t s_(j+1), which changes by at most d max(t, 1 - t), not d.

The walk stores bounds on |C|, and a bound on the distance of a computed entry from the exact one.
The matrix may depend on how the program computes a public index in floats, so the bounds cover all
candidates.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._operations import rearranged
from dpjax.proving._value import Abstract, meet

_MOST_WEIGHTS = 2**22


@dataclasses.dataclass(frozen=True, eq=False)
class Combination:
    """An array that is a linear combination of the entries of a sorted vector.

    Attributes:
        of: the sorted vector.
        weights: bounds on the magnitudes of the coefficients; the last axis indexes `of`.
        off: a bound on the rounding error of an entry.
    """

    of: Abstract
    weights: np.ndarray
    off: float

    def tightened(self, x: Abstract) -> Abstract:
        """Tightens x, the abstract value of this array, by the lemma at the top of this file."""
        weights, d = self.weights.reshape(-1, self.weights.shape[-1]), self.of.others.l1
        slip, size, room = 2 * self.off, len(weights), 1 + 2.0**-30
        each = self.weights.max(-1) * d * room + slip
        l1 = weights.sum(0).max() * d * room + slip * size
        l2 = np.sqrt((weights**2).sum(0).max()) * d * room + slip * math.sqrt(size)
        moved = rounding.up(each), float(rounding.up(l1)), float(rounding.up(l2))
        return meet(x, changed=moved, others=moved)


def combination(
    name: str, params: Mapping[str, Any], operands: Sequence[Abstract], found: Abstract,
    known: Mapping[Abstract, Combination],
) -> Combination | None:  # fmt: skip
    """Returns the combination of order statistics that an operation computes.

    The result is None if the operation computes none.
    """
    if found.axis is not None or found.nan or found.pending.coarse or found.is_public:
        return None
    given = [known.get(x) for x in operands]
    first = given[0] if given else None
    if first is None and operands and is_sorted(operands[0]):
        return _started(operands[0], name, params, operands[1:], found)
    if first is not None:
        *shape, n = first.weights.shape
        places = _places(name, params, operands[1:], shape)
        if places is not None and places.size * n <= _MOST_WEIGHTS:
            return dataclasses.replace(first, weights=first.weights.reshape(-1, n)[places])
    if found.off is None:
        return None
    relative, absolute = found.off
    made = None
    if name in ("add", "sub"):
        a, b = given
        if a is not None and b is not None and a.of is b.of:
            made = Combination(a.of, a.weights + b.weights, a.off + b.off)
    elif name in ("mul", "div"):
        made = _scaled(name, operands, given)
    elif name == "neg":
        made = first
    elif name == "reduce_sum" and first is not None:
        axes = tuple(params["axes"])
        count = math.prod(operands[0].shape[k] for k in axes)
        made = Combination(first.of, first.weights.sum(axes), first.off * count)
        relative *= count
    if made is None or made.weights.shape[:-1] != found.shape:
        return None
    size = max(float(x.magnitude.max()) for x in (found, *operands))
    relative = relative / (1 - relative) if relative < 0.5 else math.inf
    # Before it was rounded, a number was at most (size + absolute) / (1 - relative).
    off = float(rounding.up(made.off + relative * (size + absolute) + absolute))
    return dataclasses.replace(made, off=off) if math.isfinite(off) else None


def is_sorted(x: Abstract) -> bool:
    """Whether an array is a vector that is known to be sorted.

    `replaced` is finite only for such a vector.
    """
    return math.isfinite(x.replaced) and x.axis is None and len(x.shape) == 1


def _started(
    x: Abstract, name: str, params: Mapping[str, Any], rest: Sequence[Abstract], found: Abstract
) -> Combination | None:
    """Describes the result of an operation that takes entries of a sorted vector x.

    Returns None for other operations. The program may compute an index in floats, so an entry may
    come from one of several indices of x. The coefficient of x is bounded by 1 at each of these
    indices, and by 0 at all other indices.
    """
    if math.prod(found.shape) * x.shape[0] > _MOST_WEIGHTS:
        return None
    off = float(rounding.up(x.apart + 4 * rounding.tiny(x.dtype)))
    places = _places(name, params, rest, x.shape)
    if places is not None:
        return Combination(x, 1.0 * (places[..., None] == np.arange(x.shape[0])), off)
    if name != "gather" or not rest[0].is_public or found.shape != rest[0].shape[:-1]:
        return None
    first, last = (
        np.broadcast_to(end, rest[0].shape)[..., 0] for end in (rest[0].low, rest[0].high)
    )
    every = np.arange(x.shape[0])
    weights = (first[..., None] <= every) & (every <= last[..., None])
    return Combination(x, weights.astype(float), off)


def _places(
    name: str, params: Mapping[str, Any], rest: Sequence[Abstract], shape: Sequence[int]
) -> np.ndarray | None:
    """Returns the old index of each entry if an operation only moves entries; otherwise None."""
    return rearranged(name, params, np.arange(math.prod(shape)).reshape(shape), rest)


def _scaled(
    name: str, operands: Sequence[Abstract], given: Sequence[Combination | None]
) -> Combination | None:
    """Returns a combination multiplied or divided by public numbers; None for other operands."""
    pairs = list(zip(given, reversed(operands), strict=True))[: 1 if name == "div" else 2]
    for one, other in pairs:
        if one is None or not other.is_public or not other.is_finite:
            continue
        factor = other.magnitude
        if name == "div":
            if not ((other.low > 0) | (other.high < 0)).all():
                return None
            factor = 1 / np.minimum(np.abs(other.low), np.abs(other.high))
        weights = one.weights * (np.asarray(factor) * (1 + 2.0**-50))[..., None]
        return Combination(one.of, weights, float(one.off * np.max(factor)))
    return None
