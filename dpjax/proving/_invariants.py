"""Invariants of loops: values that a step takes to such values again.

The search jumps to where a geometric series ends, and else widens. Only the last check counts: a
step from S stays in S, in each of the numbers that describe a value.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, as_dense, as_rows, make

_ROUNDS, _NARROWED = 40, 4
Numbers = list[np.ndarray]
Step = Callable[[Sequence[Abstract]], list[Abstract]]


def closed(step: Step, start: Sequence[Abstract], length: int) -> list[Abstract]:
    """Values that hold those at the start, and with each the value after a step."""
    if not start:
        return []
    found, before = list(map(_plain, start)), None
    for count in range(_ROUNDS):
        try:
            after = step(found)
        except RefusalError:
            if count == 0:
                raise
            raise _refusal(found, length) from None
        taken, (found, pairs) = found, _joined(found, after)
        if _holds(taken, found, pairs):
            return _narrowed(step, start, found)
        excess = [[np.maximum(x - y, 0.0) for x, y in zip(a, b, strict=True)] for a, b in pairs]
        jumps = (
            excess if before is None else list(map(_jumped, before, excess, [count] * len(excess)))
        )
        before = excess if before is None else None
        try:
            found = [
                _made(x, [y + d for y, d in zip(b, jump, strict=True)])
                for x, (_, b), jump in zip(found, pairs, jumps, strict=True)
            ]
        except RefusalError:
            break
    raise _refusal(found, length)


def hull(first: Abstract, second: Abstract) -> Abstract:
    """What holds for either of two values."""
    (x,), ((a, b),) = _joined([_plain(first)], [second])
    return _made(x, [np.maximum(one, other) for one, other in zip(a, b, strict=True)])


def _refusal(found: Sequence[Abstract], length: int) -> RefusalError:
    widest = max(found, key=lambda x: float(x.magnitude.max()))
    moves = max(float(x.changed.each.max()) for x in found)
    return RefusalError(
        f"nothing bounds what {length} steps carry: {widest.dtype}{list(widest.shape)} may reach"
        f" {widest.magnitude.max():.3g}, and move by {moves:.3g}"
    )


def _numbers(x: Abstract) -> Numbers:
    """They grow with the set of arrays that is described."""
    ds = (x.changed, x.others)
    return [-x.low, x.high, *(np.asarray(y, float) for d in ds for y in (d.each, d.l1, d.l2))]


def _made(x: Abstract, numbers: Numbers) -> Abstract:
    low, high, *moves = numbers
    changed, others = (
        (each, float(l1), float(l2)) for each, l1, l2 in (moves[:3], moves[3:])
    )  # fmt: skip
    # A carry that no step changes is that of the start, also for a compiler.
    pending = Pending().having(**Pending.flags([x.pending])).having(coarse=False)
    return make(
        x.shape, x.dtype, -low, high, x.axis, changed, others, whole=x.whole, pending=pending
    )


def _plain(x: Abstract) -> Abstract:
    """Without what a step may lose."""
    return _made(x, _numbers(x))


def _joined(
    found: Sequence[Abstract], after: Sequence[Abstract]
) -> tuple[list[Abstract], list[tuple[Numbers, Numbers]]]:
    """Values with one axis of records, whole only where both are, and the numbers of both."""
    joined: list[Abstract] = []
    pairs: list[tuple[Numbers, Numbers]] = []
    for x, y in zip(found, after, strict=True):
        axis = y.axis if x.is_public else x.axis
        axis = axis if y.is_public or axis == y.axis else None
        both = [as_dense(z) if axis is None else as_rows(z, axis) for z in (x, y)]
        if both[0].whole and not y.whole:
            both[0] = _made(dataclasses.replace(both[0], whole=False), _numbers(both[0]))
        joined.append(both[0])
        pairs.append((_numbers(both[1]), _numbers(both[0])))
    return joined, pairs


def _holds(
    taken: Sequence[Abstract], joined: Sequence[Abstract], pairs: Sequence[tuple[Numbers, Numbers]]
) -> bool:
    """Whether a step stays in the values that it took: those that changed were not walked."""
    same = all(x is y for x, y in zip(taken, joined, strict=True))
    return same and all(_inside(after, before) for after, before in pairs)


def _inside(inner: Numbers, outer: Numbers) -> bool:
    return all(bool((x <= y).all()) for x, y in zip(inner, outer, strict=True))


def _jumped(before: Numbers, excess: Numbers, count: int) -> Numbers:
    """Where e, e r, e r^2, ... add up to; far away where they do not fall."""

    def jump(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(first > 0, second / first, 1.0)
            falls = ratio < 1 - 2.0**-24
            return np.where(falls, second / (1 - ratio) * (1 + 2.0**-16), second * 4.0**count)

    return list(map(jump, before, excess))


def _narrowed(step: Step, start: Sequence[Abstract], found: list[Abstract]) -> list[Abstract]:
    """A smaller invariant, where what a step makes of this one is one."""
    for _ in range(_NARROWED):
        smaller = list(map(hull, start, step(found)))
        joined, pairs = _joined(smaller, step(smaller))
        if not _holds(smaller, joined, pairs):
            break
        found = smaller
    return found
