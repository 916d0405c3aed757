"""How a compiler may merge the operations that computed an array with later operations.

XLA's algebraic simplifier rewrites programs. So the rounding error of a result may depend on
several operations:

- *Constants that are added.* (x + c) + d becomes x + (c + d). XLA also does this if operations
  between the two additions cancel each other, such as products with 2 and with 1/2, or log and exp.
  So an operation passes the `shift` of its operands (the sum of added constants) to its result,
  except an operation that no other can cancel.
- *Sums.* The accumulator of a scatter or of a matrix product may start at a number that the program
  adds later. If this number is large, each of the N additions rounds a large number. A sum of sums
  may become one sum of all terms.
- *Factors.* (x c) (y d) becomes (x y) (c d), and a / b / c becomes a / (b c). So XLA computes
  numbers that do not occur in the original program. If they may overflow, the program is refused.
  If they may underflow to 0, the resulting error is added.
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
        kind: the group of operations that this file treats in the same way; "" for all other
            operations.
        undone: whether another operation may cancel this one, so that a compiler removes both.
        dropped: whether a compiler may remove this operation alone. Examples are a transpose of a
            single entry, and a product with 1.
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
    """Returns the operations of a result that a compiler may still merge with later ones.

    Raises:
        OverflowRefusalError: if merged operations may compute a number that overflows.
    """
    bits = _bits(merging, parameters, operands, found.dtype)
    flags = _flags(merging, operands, found)
    # For a sum, the rule `add` has already called `added`, which computed all other fields.
    if merging.kind == "sum":
        return found.pending.having(bits=bits, **flags)
    old, new = Pending.of_all([x.pending for x in operands]), found.pending
    squares = len(operands) == 2 and operands[0] is operands[1]
    if merging.kind == "power" or (merging.kind == "product" and squares):
        old = old.having(starts=frozenset((_Power(token), n) for token, n in old.starts))
    elif merging.kind == "reduction" and math.prod(found.shape) < math.prod(operands[0].shape):
        # Once powers are summed, no later operation, such as a root, can undo the power.
        starts = frozenset(pair for pair in old.starts if not isinstance(pair[0], _Power))
        old = old.having(starts=starts, load=old.load if starts else 0.0)
    shift, (scale, first) = _shift(merging, operands), _factors(merging, operands)
    if not merging.undone:
        old = Pending()
    if not new.starts:
        new = new.having(starts=old.starts, load=old.load * abs(scale))
    if new.terms == 1 and merging.dropped and sum(not x.is_public for x in operands) == 1:
        factor = old.factor * first
        new = new.having(terms=old.terms, weight=old.weight * abs(scale), factor=factor)
    return new.having(shift=shift, bits=bits, **flags)


class _Power(NamedTuple):
    """The token in `Pending.starts` for a sum that was raised to a power."""

    token: object


def _flags(merging: Merging, operands: Sequence[Abstract], found: Abstract) -> dict[str, bool]:
    """Returns the flags of a result, which are the boolean fields of `Pending`.

    If no other operation can cancel an operation, a compiler keeps it. Then the compiler no longer
    sees that an operand was padded (`padded`) or truncated to integers (`cut`). So both flags of
    the result are false. Booleans are an exception, because a compiler may remove a comparison of
    booleans.

    `hidden` is set if a compiler may know a result more precisely than its range shows. For
    integers, x - x is 0 and x == x is true. A square is never below 0.

    Indices of a gather or a scatter are not entries of the result, so their truncation does not
    matter.
    """
    flags = Pending.flags(x.pending for x in (found, *operands))
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
        # A compiler may rewrite c / (d / y) as y c / d.
        return a.pending.shift * _largest(b, inverted=True) + b.pending.shift * max(
            _largest(a), _largest(a, inverted=True)
        )
    return sum(x.pending.shift for x in operands)


def _factors(merging: Merging, operands: Sequence[Abstract]) -> tuple[float, float]:
    """Returns a bound on the public factor in a product or quotient, and the factor's first entry.

    Both numbers are 1 for other operations. A compiler removes factors only if all entries of their
    product are 1. If the first entry is not 1, the other entries do not matter.
    """
    if merging.kind not in ("product", "quotient"):
        return 1.0, 1.0
    divides = merging.kind == "quotient"
    scale = _largest(operands[0]) * _largest(operands[1], inverted=divides)
    first, second = (float(x.low.flat[0]) if x.is_known else 1.0 for x in operands)
    return scale, first / second if divides and second else first * second


def added(first: Abstract, second: Abstract, dtype: np.dtype) -> tuple[Pending, float]:
    """Returns the pending operations of a + b, and a bound on an additional rounding error.

    This error arises if a compiler merges the addition with the sums that computed a and b.
    """
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
    """Returns how many terms an entry of x adds to a later sum, and the sum of their magnitudes.

    A compiler may flatten a sum of sums: it adds up all terms in one sum. If the entries of x are
    not sums, the result is (1, 0.0).
    """
    old = x.pending
    is_sum = old.terms > 1 and abs(abs(old.factor) - 1) < 2.0**-8
    return (old.terms, old.weight) if is_sum else (1, 0.0)


def _bits(
    merging: Merging, parameters: Any, operands: Sequence[Abstract], dtype: np.dtype
) -> float:
    """Returns the sum of |log2 f| over the public factors f of a product.

    A compiler may multiply these factors in any order.
    """
    kind = merging.kind
    if not rounding.is_float(dtype) or not merging.undone or not operands:
        return 0.0
    own, x = [x.pending.bits for x in operands], operands[0]
    if kind == "contraction":
        return sum(own) + sum(_log(x) for x in operands if x.is_public)
    if kind == "reduction" and x.axis not in parameters["axes"]:
        # A compiler may rewrite a sum of k copies as a product with k.
        return own[0] + math.log2(math.prod(x.shape))
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
            "a compiler may combine the public factors of a product into one number, which may "
            "overflow. Take fewer steps or smaller factors. In a loop of more than 64 steps, clip "
            "the carry with jnp.clip"
        )
    return bits


def _log(x: Abstract) -> float:
    """Returns log2 of the largest magnitude, but at least 0."""
    return math.log2(max(1.0, float(x.magnitude.max())))


def _size(x: Abstract) -> float:
    """Returns the largest |log2| of an endpoint of the range."""
    sizes = np.append(np.abs(x.low), np.abs(x.high))
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return float(np.abs(np.log2(sizes)).max()) if sizes.size else 0.0


def _largest(x: Abstract, *, inverted: bool = False) -> float:
    """Returns a bound on a public factor, or on its inverse.

    For a private array, the result is 1. A compiler does not know the numbers of such an array, so
    it cannot cancel them in a product.
    """
    sizes = x.magnitude[x.magnitude > 0]
    if not x.is_public or not sizes.size:
        return 1.0
    return float(1 / sizes.min() if inverted else sizes.max())
