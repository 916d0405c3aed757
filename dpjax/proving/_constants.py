"""Constants that a compiler may add up.

It takes (x + c) + d to x + (c + d), also where operations stand between that undo each other: a
product with 2 and one with 1/2, log and exp, log and logistic, or a sum of one term. So operations
hand on `shift`, but for those that no other one undoes.
"""

from collections.abc import Sequence

from dpjax.proving._value import Abstract

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


def _largest(x: Abstract, *, inverted: bool = False) -> float:
    """What a public factor may scale by; 1 for other arrays, which no constant undoes."""
    sizes = x.magnitude[x.magnitude > 0]
    if not x.is_public or not sizes.size:
        return 1.0
    return float(1 / sizes.min() if inverted else sizes.max())
