"""Proofs under add-or-remove-one, for records in a public number of slots.

Let D' contain all records of D except one, in any order of slots. Let E be the database D after the
slot of that record is emptied. Then D' is a permutation of E. So ||f(D) - f(D')|| is at most the
sum of two distances:

1. from f(D) to f(E): one row becomes the row of an empty slot;
2. from f(E) to f(D'): the rows are permuted.

The walk bounds both distances. docs/proofs/global-sensitivity.md has the proof.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from dpjax._core._bounds import PaddedRecordBounds
from dpjax._tracing._walks import Equation, called
from dpjax.proving import _rounding as rounding
from dpjax.proving import _slots as slots
from dpjax.proving._choices import everywhere
from dpjax.proving._exact_programs import kind_of
from dpjax.proving._exact_sums import ExactCumulative, ExactScatter, ExactSum
from dpjax.proving._operations import operation_of
from dpjax.proving._patterns import of_call
from dpjax.proving._rows import as_rows, norm_of
from dpjax.proving._slots import Applied, Slots, Tracked
from dpjax.proving._value import Abstract, Pending, RefusalError, Tighter, constant, meet, over
from dpjax.proving._walk import Step, Walk

# These functions have a lemma, and they treat each entry of one operand separately. The dictionary
# maps the name of each function to the index of this operand.
_LOOK_UPS = {"searchsorted": 1, "_interp": 0}


def inputs_of(clamped: Sequence[Abstract], public: PaddedRecordBounds) -> list[Tracked]:
    """Returns the abstract values of the records after the clamp.

    The clamp fills empty slots with a public row.
    """
    return [
        _within_rows(Tracked(x, as_rows(everywhere(x.dtype.type(number), x.shape), 0), Slots(0)))
        for x, number in zip(clamped, public.empty_row, strict=True)
    ]


class PaddedWalk(Walk):
    """A walk that represents each value of the program by a `Tracked`."""

    def known(self, array: object) -> Tracked:
        """Returns the abstract value of a constant, which no permutation of records changes."""
        value = constant(array)
        numbers = np.abs(np.append(value.low, value.high))
        if ((numbers > 0) & (numbers < rounding.tiny(value.dtype))).any():
            raise RefusalError(
                "proofs under add-or-remove-one do not support subnormal constants. Use 0 instead"
            )
        return Tracked(value, value, Slots(), fixed=True)

    def shown(self, value: Tracked) -> Abstract:
        return value.value

    def tightened(self, value: Tracked, facts: Tighter) -> Tracked:
        return dataclasses.replace(value, value=facts.of(value.value))

    def improved(self, *situation: Any) -> None:
        """Applies no lemma, because lemmas do not say how a result depends on the slots."""

    def sharpened(
        self, scope: Any, equation: Any, operands: Any, outputs: Any, refusal: Any
    ) -> list[Any]:
        """Returns `outputs` unchanged.

        The facts that `Walk.sharpened` uses do not say how a result depends on slots for records.
        """
        return outputs

    def outputs(
        self, jaxpr: jex.Jaxpr, equation: Equation, operands: list[Tracked]
    ) -> list[Tracked]:
        """Returns the values of an operation's results.

        If the operation has an inner program, this program is walked. Otherwise the rules of the
        operation apply.
        """
        if inner := called(equation):
            found = self._exact_sum(equation, operands)
            found = found or self._looked_up(equation, operands)
            return found or self.inner_outputs(inner, operands)
        operation = operation_of(equation.primitive.name)
        if operation.slots is None and operands:  # Refuse a loop before its steps are walked.
            slots.placed(None, Applied(equation.params, operands, operands[0].value))
        walk = Walk(path=self.path, sums=self.sums)
        values = walk.ruled(equation, [x.value for x in operands])
        try:
            rows = Walk().ruled(equation, [x.empty for x in operands])
        except RefusalError:
            # The ranges in `values` include every row, also the row of an empty slot.
            rows = values
        made = list[Tracked]()
        for value, row in zip(values, rows, strict=True):
            if value.pending.coarse:
                raise RefusalError(
                    "proofs under add-or-remove-one do not support 16-bit floats. Compute in "
                    "float32 instead"
                )
            applied = Applied(equation.params, operands, value)
            place = slots.placed(operation.slots, applied)
            tighter = operation.tighter(applied) if operation.tighter else value
            # A permutation of the records changes no bit of the result in two cases: it changes no
            # bit of the operands, or the result consists of integers that are computed exactly
            # (`apart` is 0).
            exact = value.dtype.kind in "iub" and value.apart == 0
            fixed = place.axis is None and (exact or all(x.fixed for x in operands))
            # A sort of one array undoes a permutation of its entries. If `apart` is 0, the permuted
            # entries are rounded in the same way as before.
            alone = equation.primitive.name == "sort" and len(operands) == 1
            fixed |= alone and place.axis is None and not operands[0].value.apart
            made.append(_within_rows(Tracked(tighter, row, place, fixed)))
        return made

    def _looked_up(self, equation: Equation, operands: list[Tracked]) -> list[Tracked] | None:
        """Returns the value of `searchsorted` or `interp`; None for other operations.

        Either the function is applied to each entry of a private array, or public numbers are
        looked up in a sorted private array. All other operands are public. If the lemma does not
        apply, the result is None, too.
        """
        name = str(equation.params.get("name"))
        moving = [x for x in operands if not x.value.is_known]
        if name not in _LOOK_UPS or len(moving) != 1:
            return None
        ((x,), values) = moving, [x.value for x in operands]
        by_entry = x is operands[_LOOK_UPS[name]]
        found = of_call(equation, values)
        if found is None or found.value is None or not (by_entry or x.slots.axis is None):
            return None
        flags = Pending.flags(y.pending for y in (found.value, *values))
        value = dataclasses.replace(found.value, pending=found.value.pending.having(**flags))
        self.steps.append(Step(self.depth, f"lemma {found.name}", self.line, value, self.path))
        emptied = of_call(equation, [y.empty for y in operands])
        row = emptied.value if emptied and emptied.value else value
        place = x.slots if by_entry else Slots()
        fixed = place.axis is None and (x.fixed or value.apart == 0)
        return [_within_rows(Tracked(value, row, place, fixed))]

    def _exact_sum(self, equation: Equation, operands: list[Tracked]) -> list[Tracked] | None:
        """Returns the value of an exact sum; None for other operations."""
        if (kind := kind_of(equation)) is None:
            return None
        if not isinstance(kind, (ExactSum, ExactCumulative, ExactScatter)):
            raise RefusalError(f"proofs under add-or-remove-one do not support {kind.title}")
        found = kind.value(*(x.value for x in operands))
        row, applied = found, Applied({}, operands, found)
        if isinstance(kind, ExactScatter):
            place, found = slots.scattered(applied), slots.tight_exact_sums(applied)
        else:
            row = kind.value(*(x.empty for x in operands))
            rule = slots.reduced if isinstance(kind, ExactSum) else slots.accumulated
            place = rule(applied._replace(parameters=dataclasses.asdict(kind)))
        self.steps.append(Step(self.depth, kind.title, self.line, found, self.path))
        # If `apart` is 0, a permutation of the records only reorders the terms, and an exact sum
        # does not depend on the order of its terms.
        fixed = place.axis is None and all(not x.value.apart for x in operands)
        return [_within_rows(Tracked(found, row, place, fixed))]


def whole_norm(bound: float, outputs: Sequence[Tracked], norm: str) -> float:
    """Rounds a bound on a norm down to the nearest norm that a vector of integers can have.

    The result is still a bound, because the norm of the outputs is one of these norms. If some
    outputs are not integers, `bound` is returned unchanged.
    """
    if not all(x.value.whole for x in outputs) or bound > 2.0**20:
        return bound
    if norm != "l2":
        return float(math.floor(bound))
    root = math.sqrt(math.floor(bound**2))
    return root if root.is_integer() else math.nextafter(root, math.inf)


def moves(outputs: Sequence[Tracked], norm: str) -> tuple[float, float]:
    """Bounds two changes of the outputs: if one slot is emptied, and if the records are permuted.

    Raises:
        RefusalError: if an output has one entry per slot, and so reveals which slots have records.
    """
    if any(x.slots.axis is not None for x in outputs):
        raise RefusalError(
            "the output has one entry per slot, so it shows which slots contain records. Return a "
            "sum over the records instead"
        )
    values = [x.value for x in outputs]
    sizes = [(0.0 if x.fixed else x.value.apart, math.prod(x.value.shape)) for x in outputs]
    if norm == "l1":
        permuted = sum(apart * size for apart, size in sizes)
    elif norm == "l2":
        permuted = rounding.norm2([apart * math.sqrt(size) for apart, size in sizes])
    else:
        permuted = max(apart for apart, _ in sizes)
    return norm_of(values, norm), float(rounding.up(permuted))


def _within_rows(x: Tracked) -> Tracked:
    """Tightens the bound on how much a row changes if its slot is emptied or filled.

    The change is at most the sum of the norms of the row before and after.
    """
    axis, value = x.slots.axis, x.value
    if axis is None:  # Without rows of records, there is also no row of an empty slot.
        return dataclasses.replace(x, empty=value)
    if value.axis != axis or value.nan:
        return x
    apart = np.maximum(value.high - x.empty.low, x.empty.high - value.low)
    rows = zip(slots.row_norms(value, axis), slots.row_norms(x.empty, axis), strict=True)
    l1, l2 = (float(rounding.up(a + b)) for a, b in rows)
    changed = rounding.up(over(apart, axis)), l1, l2
    return dataclasses.replace(x, value=meet(value, changed=changed))
