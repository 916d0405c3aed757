"""Rules for NaN, for records that may be missing.

Records may be missing if their bounds say so (`Interval(low, high, missing=True)`). A missing
record is NaN. Operations without a rule in this file, such as sums, sorts and casts to integers,
refuse arrays that may contain NaN. The rules of comparisons, logic and choices are in
`_choices.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax.proving._rows import aligned
from dpjax.proving._value import Abstract, RefusalError, Source, anywhere, changing_with

# rule(parameters, operands, found) returns the result of an operation, where `found` is the result
# for operands without NaN.
Rule = Callable[[Any, Sequence[Abstract], Abstract], Abstract]


def by_rule(parameters: Any, operands: Sequence[Abstract], found: Abstract) -> Abstract:
    """Returns the result unchanged, for operations whose own rule handles NaN."""
    return found


def arithmetic(parameters: Any, operands: Sequence[Abstract], found: Abstract) -> Abstract:
    """Returns the result, which is NaN exactly where an operand is NaN.

    Where no operand is NaN, the result is in the finite range of `found`.
    """
    if parameters.get("y") == 0:
        raise RefusalError("proofs do not support x ** 0 if x may be NaN")
    nan = frozenset[Source]().union(*(x.nan for x in operands))
    return checked(dataclasses.replace(found, nan=nan), operands)


def extremum(parameters: Any, operands: Sequence[Abstract], found: Abstract) -> Abstract:
    """Returns the result of a maximum or minimum of operands that may be NaN.

    If one operand is NaN, some devices return NaN, and others return the other operand. The result
    includes both cases.
    """
    xs = aligned(*operands)
    if not all(x.is_finite for x in xs):
        raise RefusalError(
            "proofs do not support a maximum or minimum with an infinite or NaN constant, if the "
            "other operand may be NaN"
        )
    low = np.minimum.reduce(np.broadcast_arrays(*(x.low for x in xs)))
    high = np.maximum.reduce(np.broadcast_arrays(*(x.high for x in xs)))
    hull = changing_with(xs, low, high, anywhere, whole=found.whole)
    return checked(dataclasses.replace(hull, nan=Source.new(*xs)), xs)


def rearranged(parameters: Any, operands: Sequence[Abstract], found: Abstract) -> Abstract:
    """Returns the result of an operation that moves entries to other indices.

    The result is a new `Source`, because its NaN entries have other indices than those of the
    operand.
    """
    return dataclasses.replace(found, nan=Source.new())


_ARITHMETIC = "add add_any sub mul div neg abs square integer_pow"
_SAME = "convert_element_type stop_gradient copy copy_p"
_BY_RULE = "lt gt le ge eq ne lt_to is_finite select_n"
_REARRANGED = "broadcast_in_dim reshape squeeze transpose slice split concatenate stack tile rev"
# Rules by the name of the primitive.
RULES: dict[str, Rule] = {
    **dict.fromkeys((_ARITHMETIC + " " + _SAME).split(), arithmetic),
    **dict.fromkeys(("max", "min"), extremum),
    **dict.fromkeys(_BY_RULE.split(), by_rule),
    **dict.fromkeys(_REARRANGED.split(), rearranged),
}


def checked(found: Abstract, operands: Sequence[Abstract]) -> Abstract:
    """Returns `found`, if its bounds allow a change wherever an operand may change.

    An entry of an operand may be NaN on one of two neighbors, and a number on the other. Then the
    same entry of the result may change, too.

    Raises:
        RefusalError: if the bounds of an entry do not allow a change. For example, 0 x is 0 for
            every number x, but NaN if x is NaN.
    """
    *xs, result = aligned(*operands, found)
    for d, *ds in ((x.changed for x in (result, *xs)), (x.others for x in (result, *xs))):
        moves = np.logical_or.reduce(np.broadcast_arrays(*(a.each > 0 for a in ds)))
        if (moves & (d.each == 0)).any():
            raise RefusalError(
                "proofs do not support a result that may be NaN on some databases and that is the "
                "same number on all other databases"
            )
    return found
