"""Loops of any fixed number of steps, by what holds at each step.

A carry has an invariant S: it holds at first, and if it holds before a step, it holds after it. So
it holds at every step, by induction. The walk proves the second part by one walk of the body, from
any value in S. How S was found plays no part.

Where steps take one record each, one step takes the changed one. Let B be an invariant of the steps
of unchanged records, and A one that also holds what the step of the changed record makes of B. The
carry is in B before that step, and in A after it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import Atom, aval, live, parts, sizes_of_scan
from dpjax.proving import _elementwise as elementwise
from dpjax.proving import _rounding as rounding
from dpjax.proving._invariants import closed, hull
from dpjax.proving._layout import broadcast
from dpjax.proving._pending_facts import Pending
from dpjax.proving._reductions import sum_over
from dpjax.proving._refusal import RefusalError
from dpjax.proving._sequences import cumulative_sum
from dpjax.proving._value import Abstract, Difference, as_dense, difference, make

_MOST_SUMS = 2**22
Run = Callable[[Any, Sequence[object], Sequence[Abstract | None]], list[Abstract]]


class LongLoop:
    """A `scan` with its operands."""

    def __init__(self, parameters: Any, operands: Sequence[Abstract]) -> None:
        self.body, self.constants = parts(parameters["jaxpr"])
        self.length, self.reverse = parameters["length"], parameters["reverse"]
        fixed, carries = sizes_of_scan(parameters)
        self.fixed = list(operands[:fixed])
        self.start = list(operands[fixed : fixed + carries])
        self.arrays = list(operands[fixed + carries :])
        self.by_record = any(x.axis == 0 for x in self.arrays)
        roots = _Roots(self.body, fixed, carries)
        self.counters = {
            k: step
            for k in range(carries)
            if (step := roots.counts(k)) is not None and self.start[k].is_known
        }
        self.sums = {
            k: term
            for k in range(carries)
            if k not in self.counters and (term := roots.adds(k)) is not None
        }
        self.partial = {j: k for j in roots.results for k in self.sums if roots.same(j, k)}
        self.others = [k for k in range(carries) if k not in self.counters and k not in self.sums]
        outputs = list(self.body.outvars)
        for k, term in self.sums.items():
            outputs[k] = term
        for j, k in self.partial.items():
            outputs[j] = self.sums[k]
        # Terms are computed in the place of their sums.
        self.steps = _with_outputs(self.body, outputs)

    def outputs(self, run: Run, tried: Run) -> list[Abstract]:
        """The last carry, and the results of all steps along a new first axis."""
        carries = len(self.start)

        def step(walk: Run, carry: Sequence[Abstract], *, changed: bool) -> list[Abstract]:
            given: list[Abstract | None] = [None] * carries
            for k, x in zip(self.others, carry, strict=True):
                given[k] = x
            for k, by in self.counters.items():
                given[k] = self._counted(k, 0, by, self.length - 1)
            arrays = [_any_step(x, changed=changed) for x in self.arrays]
            return walk(self.steps, self.constants, [*self.fixed, *given, *arrays])

        def carried(carry: Sequence[Abstract], *, changed: bool) -> list[Abstract]:
            found = step(tried, carry, changed=changed)
            return [found[k] for k in self.others]

        carry = closed(
            lambda x: carried(x, changed=False), [self.start[k] for k in self.others], self.length
        )
        moved = still = step(tried, carry, changed=self.by_record)
        if self.by_record:
            after = list(map(hull, carry, [moved[k] for k in self.others]))
            after = closed(lambda x: carried(x, changed=False), after, self.length)
            still = step(tried, after, changed=False)
        last = {
            k: self._counted(k, self.length, by, self.length) for k, by in self.counters.items()
        }
        # Steps are compiled apart from what follows, for compilers unroll loops of few steps only.
        last |= {
            k: dataclasses.replace(
                hull(moved[k], still[k]),
                pending=Pending().having(**_flags(moved[k], still[k])),
            )
            for k in self.others
        }
        rows = {j: self._rows(moved[j], still[j]) for j in range(len(moved)) if j not in last}
        last |= {k: self._total(k, rows[k]) for k in self.sums}
        rows |= {j: self._sums(k, rows[j]) for j, k in self.partial.items()}
        step(run, carry, changed=self.by_record)  # To be shown.
        return [last.get(j, rows.get(j)) for j in range(len(moved))]  # type: ignore[misc]

    def _counted(self, k: int, least: int, by: int, most: int) -> Abstract:
        start = self.start[k]
        ends = start.low + by * np.array(float(least)), start.low + by * np.array(float(most))
        none = np.zeros(()), 0.0, 0.0
        low, high = np.minimum(*ends), np.maximum(*ends)
        return make((), start.dtype, low, high, None, none, none, whole=True)

    def _rows(self, moved: Abstract, still: Abstract) -> Abstract:
        """A result of each step: that of the changed record, and those of the others."""
        if self.by_record:
            moved, still = as_dense(moved), as_dense(still)
            axis, changed, others = 0, moved.others, still.others
        else:
            axis, changed, others = moved.axis, moved.changed, moved.others
            axis = None if axis is None else axis + 1
        copies = 1 if self.by_record else self.length

        def row(d: Difference) -> tuple[np.ndarray, float, float]:
            l1, l2 = rounding.up(d.l1 * copies), rounding.up(d.l2 * math.sqrt(copies))
            return d.each[None], float(l1), float(l2)

        low, high = np.minimum(moved.low, still.low), np.maximum(moved.high, still.high)
        pending = moved.pending
        if moved is not still:
            pending = Pending.of_all([moved.pending, still.pending])
        return make(
            (self.length, *moved.shape), moved.dtype, low[None], high[None], axis, row(changed),
            row(others), whole=moved.whole and still.whole,
            pending=pending,
        )  # fmt: skip

    def _total(self, k: int, terms: Abstract) -> Abstract:
        """What all steps add to the carry."""
        shift = self.length * terms.pending.shift
        total = sum_over(terms, [0])
        load = float(rounding.up(self.length * terms.magnitude.max()))
        started = self.length * sum(count for _, count in terms.pending.starts)
        load = max(load, total.pending.weight, self.length * terms.pending.load)
        start = Pending.of_sum(total.pending.terms + started, load)
        bits = terms.pending.bits + math.log2(self.length)
        start = start.having(shift=shift, bits=bits, **_flags(terms))
        zero = self.start[k].is_known and not self.start[k].magnitude.any()
        if zero and not terms.pending.starts:
            return dataclasses.replace(total, pending=start)
        total = dataclasses.replace(total, pending=start)
        return _sum(self.start[k], total)

    def _sums(self, k: int, terms: Abstract) -> Abstract:
        """The carry after each step."""
        if math.prod(terms.shape) > _MOST_SUMS:
            raise RefusalError("so many partial sums take too long to walk")
        sums = cumulative_sum(terms, 0, reverse=self.reverse)
        total = self._total(k, terms)
        sums = dataclasses.replace(sums, pending=total.pending)
        places = range(1, len(terms.shape))
        start = broadcast(self.start[k], terms.shape, list(places))
        return _sum(start, sums)


def _sum(start: Abstract, total: Abstract) -> Abstract:
    found = elementwise.add(start, total, dtype=total.dtype)
    return dataclasses.replace(found, pending=found.pending.having(**_flags(start, total)))


def _flags(*xs: Abstract) -> dict[str, bool]:
    """What stays true behind a loop."""
    return Pending.flags([x.pending for x in xs])


def _any_step(x: Abstract, *, changed: bool) -> Abstract:
    """What a step takes of an array: any row of it, or the row of the changed record."""
    shape, axis = x.shape[1:], None if not x.axis else x.axis - 1

    def row(d: Difference) -> Difference:
        return difference(d.each.max(0), shape, axis, l1=d.l1, l2=d.l2, whole=x.whole)

    moves = row(x.changed), row(x.others)
    if x.axis == 0:
        moves = (moves[0],) * 2 if changed else (moves[1],) * 2
    return dataclasses.replace(
        x, shape=shape, low=x.low.min(0), high=x.high.max(0), axis=axis, changed=moves[0],
        others=moves[1], tied=frozenset(), source=None,
        l2_of_row=math.inf if axis is None else x.l2_of_row,
    )  # fmt: skip


class _Roots:
    """The variables of a body, without those that are others in the same dtype."""

    def __init__(self, body: jex.Jaxpr, fixed: int, carries: int) -> None:
        self.body, self.fixed = body, fixed
        self.results = range(carries, len(body.outvars))
        self.root: dict[jex.Var, Atom] = {}
        self.made: dict[jex.Var, Any] = {}
        self.used: dict[jex.Var, int] = {}
        for equation in live(body):
            self.made.update(dict.fromkeys(equation.outvars, equation))
            made = equation.outvars[0]
            if equation.primitive.name == "convert_element_type":
                (first,) = equation.invars
                if _type(first) == _type(made):
                    self.root[made] = self.of(first)
                    continue
            for atom in equation.invars:
                self._use(atom)
        for atom in body.outvars:
            self._use(atom)

    def _use(self, atom: Atom) -> None:
        root = self.of(atom)
        if isinstance(root, jex.Var):
            self.used[root] = self.used.get(root, 0) + 1

    def of(self, atom: Atom) -> Atom:
        """The variable that this one is."""
        return self.root.get(atom, atom) if isinstance(atom, jex.Var) else atom

    def same(self, j: int, k: int) -> bool:
        """Whether two outputs are one variable."""
        return self.of(self.body.outvars[j]) is self.of(self.body.outvars[k])

    def _added(self, k: int) -> Atom | None:
        """What is added to a carry, in its shape."""
        carry, made = self.body.invars[self.fixed + k], self.of(self.body.outvars[k])
        equation = self.made.get(made) if isinstance(made, jex.Var) else None
        if equation is None or equation.primitive.name != "add":
            return None
        first, second = equation.invars
        for one, other in ((first, second), (second, first)):
            if self.of(one) is carry and self.of(other) is not carry:
                return other if _type(other) == _type(carry) else None
        return None

    def counts(self, k: int) -> int | None:
        """The integer by which a carry of one integer grows in each step."""
        term = self._added(k)
        whole = isinstance(term, jex.Literal) and aval(term).dtype.kind in "iu"
        return int(term.val) if whole and not aval(term).shape else None  # type: ignore[union-attr]

    def adds(self, k: int) -> Atom | None:
        """The term that each step adds to a carry which it does not use otherwise."""
        term = self._added(k)
        carry, made = self.body.invars[self.fixed + k], self.of(self.body.outvars[k])
        if term is None or not isinstance(made, jex.Var):
            return None
        outputs = sum(self.same(j, k) for j in range(len(self.body.outvars)))
        alone = self.used.get(carry, 0) == 1 and self.used[made] == outputs
        return term if alone else None


def _type(atom: Any) -> tuple[Any, Any]:
    return aval(atom).shape, aval(atom).dtype


def _with_outputs(body: jex.Jaxpr, outputs: Sequence[Atom]) -> jex.Jaxpr:
    return body.replace(outvars=list(outputs))
