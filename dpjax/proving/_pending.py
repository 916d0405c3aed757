"""Constants, and terms of sums, that a compiler may add up.

It takes (x + c) + d to x + (c + d), also where operations stand between that undo each other: a
product with 2 and one with 1/2, log and exp, log and logistic, or a sum of one term. So operations
hand on `shift`, but for those that no other one undoes.

It also lets a sum at places start at what is added to it. Then each of the N additions rounds a
number of that size. So a sum has `terms`, and operations hand them on in the same way.
"""

import math
from collections.abc import Sequence

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, Terms

_NEVER_UNDONE = frozenset(
    (
        *("ceil", "cos", "eq", "erf", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "round"),
        *("sign", "sin", "tanh"),
    )
)


def carried(name: str, operands: Sequence[Abstract]) -> float:
    """The `shift` of the result of an operation other than a sum of two."""
    if name in _NEVER_UNDONE:
        return 0.0
    if name == "mul":
        a, b = operands
        return a.shift * _largest(b) + b.shift * _largest(a)
    if name == "div":
        a, b = operands
        # c / (d / y) is y c / d.
        return a.shift * _largest(b, inverted=True) + b.shift * max(
            _largest(a), _largest(a, inverted=True)
        )
    return sum(x.shift for x in operands)


def carried_terms(name: str, operands: Sequence[Abstract]) -> Terms:
    """The `terms` of the result of such an operation: those of all operands, scaled."""
    if name in _NEVER_UNDONE or not any(x.terms.counts for x in operands):
        return Terms()
    factor = 1.0
    if name in ("mul", "div"):
        factor = math.prod(
            _largest(x, inverted=name == "div" and k == 1) for k, x in enumerate(operands)
        )
    found = Terms.of_all(operands)
    return Terms(found.counts, found.load * factor)


def together(first: Abstract, second: Abstract, dtype: np.dtype) -> tuple[Terms, float]:
    """The terms of a sum of two arrays, and its error if a compiler adds up all of them at once."""
    counts = first.terms.counts | second.terms.counts
    if not counts:
        return Terms(), 0.0
    load = sum(max(x.terms.load, float(x.magnitude.max())) for x in (first, second))
    return Terms(counts, load), rounding.sum_units(sum(n for _, n in counts) + 2, dtype) * load


def _largest(x: Abstract, *, inverted: bool = False) -> float:
    """What a public factor may scale by; 1 for other arrays, which no constant undoes."""
    sizes = x.magnitude[x.magnitude > 0]
    if not x.is_public or not sizes.size:
        return 1.0
    return float(1 / sizes.min() if inverted else sizes.max())
