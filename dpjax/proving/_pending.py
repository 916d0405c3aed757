"""How a compiler may merge the operations that computed an array with later ones.

A compiler takes (x + c) + d to x + (c + d). It also does so across operations that undo each other:
a product with 2 and one with 1/2, log and exp, log and logistic, or a sum of one term. So every
operation hands on the `shift` of its operands, unless no other operation undoes it.

It lets a sum by places, or a product of matrices, start at the number that is added to it. Then
each of the N additions rounds a number of that size. It takes a sum of sums to one sum of all their
terms.

It multiplies constants first, (x c) (y d) = (x y) (c d), and divides once, a / b / c = a / (b c).
So numbers that no operation of the program holds may overflow, which is refused, or vanish.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, OverflowRefusalError, Pending


class Merging(NamedTuple):
    """How a compiler may merge an operation with others.

    Attributes:
        kind: a group of operations with a rule of its own in this file.
        undone: whether another operation may undo it, so that a compiler drops both.
        dropped: whether a compiler may drop it alone: it moves one entry, or multiplies by 1.
    """

    kind: Literal[
        "", "sum", "xor", "comparison", "product", "quotient", "power", "contraction", "reduction",
        "places",
    ] = ""  # fmt: skip
    undone: bool = True
    dropped: bool = False


PRODUCT = Merging("product", dropped=True)


def carried(
    merging: Merging, parameters: Any, operands: Sequence[Abstract], found: Abstract
) -> Pending:
    """The pending operations of a result.

    Raises:
        OverflowRefusalError: if a compiler may form a number that overflows.
    """
    bits = _bits(merging, parameters, operands, found.dtype)
    flags = _flags(merging, operands, found)
    if merging.kind == "sum":  # `add` has called `added`.
        return found.pending.having(bits=bits, **flags)
    old, new = Pending.of_all([x.pending for x in operands]), found.pending
    shift, scale = _shift(merging, operands), _scale(merging, operands)
    if not merging.undone:
        old = Pending()
    if not new.starts:
        new = new.having(starts=old.starts, load=old.load * abs(scale))
    if new.terms == 1 and merging.dropped and sum(not x.is_public for x in operands) == 1:
        factor = old.factor * _first_factor(merging, operands)
        new = new.having(terms=old.terms, weight=old.weight * abs(scale), factor=factor)
    return new.having(shift=shift, bits=bits, **flags)


def _flags(merging: Merging, operands: Sequence[Abstract], found: Abstract) -> dict[str, bool]:
    """The flags of a result: what a compiler may see of it.

    A compiler drops no operation that no other one undoes, except comparisons of booleans. It knows
    that x - x is 0 and x == x for integers, and that squares are not below 0. Places move nothing.
    """
    flags = Pending.flags([found.pending, *(x.pending for x in operands)])
    if not merging.undone and not any(x.dtype.kind == "b" for x in operands):
        flags |= {"padded": False, "cut": False}
    if merging.kind == "places":
        flags["cut"] = any(x.pending.cut for x in operands[::2])
    unknown = [x for x in operands if not x.is_known]
    cancels = merging.kind in ("comparison", "sum", "xor")
    whole = cancels and len(unknown) > 1 and all(x.dtype.kind in "iub" for x in unknown)
    compares = merging.kind == "comparison"
    zero = compares and any(x.is_known and (x.low == 0).any() for x in operands)
    if (whole or zero) and not found.is_known:
        flags["hidden"] = True
    return flags


def _shift(merging: Merging, operands: Sequence[Abstract]) -> float:
    if not merging.undone:
        return 0.0
    if merging.kind in ("product", "contraction"):
        a, b = operands
        return a.pending.shift * _largest(b) + b.pending.shift * _largest(a)
    if merging.kind == "quotient":
        a, b = operands
        # c / (d / y) is y c / d.
        return a.pending.shift * _largest(b, inverted=True) + b.pending.shift * max(
            _largest(a), _largest(a, inverted=True)
        )
    return sum(x.pending.shift for x in operands)


def _scale(merging: Merging, operands: Sequence[Abstract]) -> float:
    """A bound on the public factor that scales an array."""
    if merging.kind not in ("product", "quotient"):
        return 1.0
    return _largest(operands[0]) * _largest(operands[1], inverted=merging.kind == "quotient")


def _first_factor(merging: Merging, operands: Sequence[Abstract]) -> float:
    """One entry of a public factor."""
    if merging.kind not in ("product", "quotient"):
        return 1.0
    first, second = (float(x.low.flat[0]) if x.is_known else 1.0 for x in operands)
    return first * second if merging.kind == "product" else first / second


def added(first: Abstract, second: Abstract, dtype: np.dtype) -> tuple[Pending, float]:
    """The pending operations of a + b, and its error if a compiler adds up all terms at once."""
    xs = first, second
    shift = sum(float(x.magnitude.max()) if x.is_public else x.pending.shift for x in xs)
    starts = first.pending.starts | second.pending.starts
    found = Pending(shift=shift)
    for one, other in (xs, xs[::-1]):
        if other.is_public and not other.magnitude.any():
            found = one.pending.having(shift=shift)
    if not starts:
        return found, 0.0
    load = sum(max(x.pending.load, float(x.magnitude.max())) for x in xs)
    count = sum(n for _, n in starts) + 2
    return found.having(starts=starts, load=load), rounding.sum_units(count, dtype) * load


def flattened(x: Abstract) -> tuple[int, float]:
    """How many terms an entry may bring into a sum of sums, and the sum of their magnitudes."""
    old = x.pending
    is_sum = old.terms > 1 and abs(abs(old.factor) - 1) < 2.0**-8
    return (old.terms, old.weight) if is_sum else (1, 0.0)


def _bits(
    merging: Merging, parameters: Any, operands: Sequence[Abstract], dtype: np.dtype
) -> float:
    """The bits of all factors that a compiler may move, if an array is a product of them."""
    kind = merging.kind
    if not rounding.is_float(dtype) or not merging.undone or not operands:
        return 0.0
    own, x = [x.pending.bits for x in operands], operands[0]
    if kind == "contraction":
        return sum(own) + sum(_log(x) for x in operands if x.is_public)
    if kind == "reduction" and x.axis not in parameters["axes"]:
        return own[0] + math.log2(math.prod(x.shape))  # A sum of k copies is a product with k.
    if kind == "power":
        y = float(operands[1].low.flat[0]) if len(operands) > 1 else parameters.get("y", 2)
        power = max(1.0, abs(y))
        own, tops = [power * own[0], power * _size(x) if y < 0 else 0.0], [power * _log(x)]
    elif kind in ("product", "quotient"):
        tops = [0.0 if x.is_public else _log(x) for x in operands]
        own = [max(b, _size(x)) if x.is_public else b for b, x in zip(own, operands, strict=True)]
        if kind == "quotient" and not operands[1].is_public:
            own.append(max(_size(operands[1]), _log(x)))
    else:
        return max(own)
    bits = sum(own)
    if bits + sum(tops) > rounding.most_bits(dtype):
        raise OverflowRefusalError(
            "the numbers that multiply or divide may overflow where a compiler combines"
            " them: rescale the records"
        )
    return bits


def _log(x: Abstract) -> float:
    return math.log2(max(1.0, float(x.magnitude.max())))


def _size(x: Abstract) -> float:
    """The largest |log2| of an entry."""
    sizes = np.append(np.abs(x.low), np.abs(x.high))
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return float(np.abs(np.log2(sizes)).max()) if sizes.size else 0.0


def _largest(x: Abstract, *, inverted: bool = False) -> float:
    """A bound on a public factor, or on its inverse; 1 for other arrays, which nothing undoes."""
    sizes = x.magnitude[x.magnitude > 0]
    if not x.is_public or not sizes.size:
        return 1.0
    return float(1 / sizes.min() if inverted else sizes.max())
