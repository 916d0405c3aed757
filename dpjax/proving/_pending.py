"""What a compiler may still do to the operations that computed an array.

It takes (x + c) + d to x + (c + d), also where operations stand between that undo each other: a
product with 2 and one with 1/2, log and exp, log and logistic, or a sum of one term. So operations
hand on `shift`, but for those that no other one undoes.

It lets a sum by places, or a product of matrices, start at what is added to it. Then each of the N
additions rounds a number of that size. It takes a sum of sums to one sum of all their terms.

It multiplies constants first, (x c) (y d) = (x y) (c d), and divides once, a / b / c = a / (b c).
So numbers that no operation of the program holds may overflow, which is refused, or vanish.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import OverflowRefusalError
from dpjax.proving._value import Abstract

_NEVER_UNDONE = frozenset(
    (
        *("ceil", "cos", "eq", "erf", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "round"),
        *("sign", "sin", "tanh"),
    )
)
_COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "lt_to", "ne"))
_SAME = _COMPARISONS | {"add", "add_any", "sub", "xor"}
_PLACED = frozenset(("gather", "scatter-add", "scatter_add"))
PRODUCTS = frozenset(("mul", "div", "square", "integer_pow", "pow"))
# Nothing stays of these where they move one entry, or multiply by 1.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "copy_p"),
        *("cumsum", "div", "dynamic_slice", "gather", "max", "min", "mul", "neg", "pad"),
        *(
            "reduce_max",
            "reduce_min",
            "reduce_window_max",
            "reduce_window_min",
            "reshape",
            "rev",
            "select_n",
            "slice",
            "sort",
            "split",
        ),
        *("squeeze", "stack", "stop_gradient", "tile", "transpose"),
    )
)


def carried(name: str, parameters: Any, operands: Sequence[Abstract], found: Abstract) -> Pending:
    """That of the result of an operation.

    Raises:
        OverflowRefusalError: if a compiler may form a number that overflows.
    """
    bits = _bits(name, parameters, operands, found.dtype)
    flags = _flags(name, operands, found)
    if name in ("add", "add_any", "sub"):
        return found.pending.having(bits=bits, **flags)
    old, new = Pending.of_all([x.pending for x in operands]), found.pending
    shift = _shift(name, operands)
    scale = _scale(name, operands)
    if name in _NEVER_UNDONE:
        old = Pending()
    if not new.starts:
        new = new.having(starts=old.starts, load=old.load * abs(scale))
    if new.terms == 1 and name in _MOVES and sum(not x.is_public for x in operands) == 1:
        factor = old.factor * (_first_factor(name, operands) if name in ("mul", "div") else 1.0)
        new = new.having(terms=old.terms, weight=old.weight * abs(scale), factor=factor)
    return new.having(shift=shift, bits=bits, **flags)


def _flags(name: str, operands: Sequence[Abstract], found: Abstract) -> dict[str, bool]:
    """What a compiler may see of a result.

    It drops no operation that no other one undoes, but for comparisons of booleans. It knows that
    x - x is 0 and x == x for integers, and that squares are not below 0. Places move nothing.
    """
    flags = Pending.flags([found.pending, *(x.pending for x in operands)])
    if name in _NEVER_UNDONE and not any(x.dtype.kind == "b" for x in operands):
        flags |= {"padded": False, "cut": False}
    if name in _PLACED:
        flags["cut"] = any(x.pending.cut for x in operands[::2])
    unknown = [x for x in operands if not x.is_known]
    whole = name in _SAME and len(unknown) > 1 and all(x.dtype.kind in "iub" for x in unknown)
    zero = name in _COMPARISONS and any(x.is_known and (x.low == 0).any() for x in operands)
    if (whole or zero) and not found.is_known:
        flags["hidden"] = True
    return flags


def _shift(name: str, operands: Sequence[Abstract]) -> float:
    if name in _NEVER_UNDONE:
        return 0.0
    if name in ("mul", "dot_general", "conv_general_dilated"):
        a, b = operands
        return a.pending.shift * _largest(b) + b.pending.shift * _largest(a)
    if name == "div":
        a, b = operands
        # c / (d / y) is y c / d.
        return a.pending.shift * _largest(b, inverted=True) + b.pending.shift * max(
            _largest(a), _largest(a, inverted=True)
        )
    return sum(x.pending.shift for x in operands)


def _scale(name: str, operands: Sequence[Abstract]) -> float:
    """By how much a public factor may scale an array."""
    if name not in ("mul", "div"):
        return 1.0
    inverted = name == "div"
    return _largest(operands[0]) * _largest(operands[1], inverted=inverted)


def _first_factor(name: str, operands: Sequence[Abstract]) -> float:
    """One entry of a public factor."""
    first, second = (float(x.low.flat[0]) if x.is_known else 1.0 for x in operands)
    return first * second if name == "mul" else first / second


def added(first: Abstract, second: Abstract, dtype: np.dtype) -> tuple[Pending, float]:
    """That of a sum of two arrays, and its error if a compiler adds up all terms at once."""
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
    """The number of terms that an entry of a sum may bring into a sum of sums, and their size."""
    old = x.pending
    is_sum = old.terms > 1 and abs(abs(old.factor) - 1) < 2.0**-8
    return (old.terms, old.weight) if is_sum else (1, 0.0)


def _bits(name: str, parameters: Any, operands: Sequence[Abstract], dtype: np.dtype) -> float:
    """The bits of all factors that a compiler may move, of the product that an array is."""
    if not rounding.is_float(dtype) or name in _NEVER_UNDONE:
        return 0.0
    own = [x.pending.bits for x in operands]
    if name in ("dot_general", "conv_general_dilated"):
        return sum(own) + sum(_log(x) for x in operands if x.is_public)
    x = operands[0] if operands else None
    if name == "reduce_sum" and x is not None and x.axis not in parameters["axes"]:
        return own[0] + math.log2(math.prod(x.shape))  # Of k copies it is a product with k.
    if name not in PRODUCTS or x is None:
        return max(own, default=0.0)
    if name in ("mul", "div"):
        tops = [0.0 if x.is_public else _log(x) for x in operands]
        own = [max(b, _size(x)) if x.is_public else b for b, x in zip(own, operands, strict=True)]
        if name == "div" and not operands[1].is_public:
            own.append(max(_size(operands[1]), _log(x)))
    else:
        y = float(operands[1].low.flat[0]) if name == "pow" else parameters.get("y", 2)
        power = max(1.0, abs(y))
        own, tops = [power * own[0], power * _size(x) if y < 0 else 0.0], [power * _log(x)]
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
    """The most bits by which an entry is larger or smaller than 1."""
    sizes = np.append(np.abs(x.low), np.abs(x.high))
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return float(np.abs(np.log2(sizes)).max()) if sizes.size else 0.0


def _largest(x: Abstract, *, inverted: bool = False) -> float:
    """What a public factor may scale by; 1 for other arrays, which no constant undoes."""
    sizes = x.magnitude[x.magnitude > 0]
    if not x.is_public or not sizes.size:
        return 1.0
    return float(1 / sizes.min() if inverted else sizes.max())
