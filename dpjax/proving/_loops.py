"""The rule of `lax.scan`, and of `lax.fori_loop` with a fixed number of steps.

A short loop is unrolled: the walk visits the body once for each step. Longer loops, and loops over
the records, need an *invariant*: a set S of abstract values of the carry. S contains the carry at
the start, and if S contains the carry before a step, it also contains the carry after the step. By
induction, S contains the carry at every step. To find a candidate for S, the search extrapolates a
geometric series, or widens S. The search itself proves nothing. The proof is the last check: a walk
of the body shows that a step from S leads into S.

In a loop over the records, one step reads the changed record. Let B be an invariant of the steps
that read unchanged records. Let A be another such invariant, which also contains every carry that
the step with the changed record can compute from a carry in B. Before that step, the carry is in B,
and afterwards it is in A.

XLA unrolls loops of at most 64 steps, and may then merge operations of two steps. If all carries
are sums and counters, this merging does not affect the bounds.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import Atom, aval, live, parts, sizes_of_scan
from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import add
from dpjax.proving._layout import broadcast, join, new_axis, place, squeeze
from dpjax.proving._reductions import cumulative_sum, sum_over
from dpjax.proving._rows import as_dense, as_rows, norm_of
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    Pending,
    RefusalError,
    difference,
    make,
)

# The largest number of operations in an unrolled loop, which limits the time of the walk.
_MOST_OPERATIONS = 2000
_MOST_UNROLLED = 64  # The largest number of steps of a loop that XLA unrolls.
# Right after the step with this index, `Loop.unrolled` may check whether the last step is refused.
# If so, it refuses the loop without walking the steps in between.
_TRIED = 2
_MOST_SUMS = 2**22  # The largest number of partial sums, which limits the time of the walk.
# The search for an invariant has at most `_ROUNDS` rounds. The search for a smaller invariant,
# which follows it, has at most `_NARROWED` rounds.
_ROUNDS, _NARROWED = 40, 4
# A function that walks a program, given its operations, its constants and its inputs.
Run = Callable[[Any, Sequence[object], Sequence[Abstract | None]], list[Abstract]]
# A step of a loop, as a function from carry to carry.
Step = Callable[[Sequence[Abstract]], list[Abstract]]
# The bounds in an abstract value, with signs such that larger numbers are weaker bounds.
Numbers = list[np.ndarray]


def looped(run: Run, tried: Run, parameters: Any, operands: Sequence[Abstract]) -> list[Abstract]:
    """Returns the last carry, and the results of all steps, stacked along a new first axis."""
    loop = Loop(parameters, operands)
    few = loop.length * len(live(loop.body)) <= _MOST_OPERATIONS
    if few and not loop.by_record:
        return loop.unrolled(run, tried)
    # Whether to search for an invariant. An invariant does not cover steps that XLA merges. But if
    # all carries are sums and counters, merged steps do not matter.
    closes = loop.is_apart or not loop.others
    if not few and not closes:
        raise RefusalError(
            f"the {loop.length} steps of the loop have more operations than the "
            f"{_MOST_OPERATIONS} that a proof can visit. Use fewer steps"
        )
    ways = [(loop.outputs if closes else loop.step_by_step, run), (loop.unrolled, tried)]
    found, refusals = list[list[Abstract]](), list[RefusalError]()
    for way, walk in ways if few else ways[:1]:
        try:
            found.append(way(walk, tried))
        except RefusalError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[-1]
    return min(found, key=lambda xs: norm_of(xs, "l1"))


def added_one_by_one(parameters: Any, operands: Sequence[Abstract]) -> list[np.dtype]:
    """Returns the dtypes of the carries to which a loop over records adds a term in each step."""
    loop = Loop(parameters, operands)
    return [loop.start[k].dtype for k in loop.sums] if loop.by_record else []


def by_invariant(
    run: Run, tried: Run, parameters: Any, operands: Sequence[Abstract]
) -> list[Abstract] | None:
    """Bounds the results of a loop by an invariant of its steps.

    Returns None if XLA may merge the steps, or if no invariant is found.

    A walk that visits every step may refuse a loop although it has an invariant. For example, the
    walk multiplies the public factors of all steps, and refuses a product that is too large.
    """
    loop = Loop(parameters, operands)
    try:
        return loop.outputs(run, tried) if loop.is_apart else None
    except RefusalError:
        return None


def _row_of(x: Abstract, step: int, *, changed: bool) -> Abstract:
    """Returns the row that a step reads: that of the changed record, or of another record."""
    if x.axis == 0:
        d = x.changed if changed else x.others
        x = dataclasses.replace(x, changed=d, others=d)
    return squeeze(place(x, 0, step), (0,))


def _any_of(xs: Sequence[Abstract]) -> Abstract:
    """Returns an abstract value that contains all given ones."""
    found = functools.reduce(hull, xs)
    pending = [x.pending for x in xs]
    if any(p.starts or p.terms > 1 for p in pending):
        raise RefusalError(
            "proofs do not support sums inside of this loop, because a compiler may merge the sums "
            "of several steps. Sum outside of the loop instead"
        )
    most = {name: max(getattr(p, name) for p in pending) for name in ("shift", "load", "bits")}
    apart = min(found.apart, max(x.apart for x in xs))
    return dataclasses.replace(
        found, apart=apart, pending=Pending().having(**most, **Pending.flags(pending))
    )


def _stacked(pairs: Sequence[tuple[Abstract, Abstract]]) -> Abstract:
    """Returns the stacked results of all steps.

    Each pair contains two results of one step: for the case that the step reads the changed record,
    and for the case that it does not.
    """
    one, other = (_any_of([as_dense(x) for x in xs]) for xs in zip(*pairs, strict=True))
    low = np.stack([np.broadcast_to(np.minimum(a.low, b.low), a.shape) for a, b in pairs])
    high = np.stack([np.broadcast_to(np.maximum(a.high, b.high), a.shape) for a, b in pairs])

    def row(d: Difference) -> Moves:
        return d.each[None], d.l1, d.l2

    return make(
        (len(pairs), *one.shape), one.dtype, low, high, 0, row(one.others), row(other.others),
        whole=one.whole and other.whole, pending=_any_of([one, other]).pending,
        apart=max(one.apart, other.apart),
    )  # fmt: skip


class Loop:
    """A `scan` and its operands.

    There are three kinds of carries. A carry is a counter if each step adds a constant integer to
    it. It is a sum if each step adds a term that does not depend on the sum. All other carries need
    an invariant.
    """

    def __init__(self, parameters: Any, operands: Sequence[Abstract]) -> None:
        self.body, self.constants = parts(parameters["jaxpr"])
        self.length, self.reverse = parameters["length"], parameters["reverse"]
        self.order = range(self.length)[:: -1 if self.reverse else 1]
        # True if XLA does not unroll the loop. XLA may merge the steps of an unrolled loop.
        self.is_apart = self.length > _MOST_UNROLLED and parameters["unroll"] == 1
        fixed, carries = sizes_of_scan(parameters)
        self.fixed = list(operands[:fixed])
        self.start = list(operands[fixed : fixed + carries])
        self.arrays = list(operands[fixed + carries :])
        self.by_record = any(x.axis == 0 for x in self.arrays)
        self.roots = roots = _Roots(self.body, fixed, carries)
        # `counters` maps the index of a carry to its increment. `sums` maps the index of a carry to
        # the term that each step adds to it.
        self.counters, self.sums = dict[int, int](), dict[int, Atom]()
        for k in range(carries):
            if (by := roots.counts(k)) is not None and self.start[k].is_known:
                self.counters[k] = by
            elif (term := roots.adds(k)) is not None:
                self.sums[k] = term
        self.others = [k for k in range(carries) if k not in self.counters | self.sums]
        # Maps the index of a stacked result to the index of the sum whose partial sums it contains.
        self.partial = {j: k for j in roots.results for k in self.sums if roots.same(j, k)}
        # The loop body, changed so that it returns terms instead of sums: for each sum, the term
        # that one step adds to it.
        places = enumerate(self.body.outvars)
        outputs = [self.sums.get(self.partial.get(j, j), atom) for j, atom in places]
        self.steps = self.body.replace(outvars=outputs)

    def _step(
        self, walk: Run, carry: Sequence[Abstract], rows: Sequence[Abstract]
    ) -> tuple[list[Abstract], list[Abstract]]:
        """Returns the carry after a step that reads these rows, and the results of the step."""
        found = walk(self.body, self.constants, [*self.fixed, *carry, *rows])
        return found[: len(carry)], found[len(carry) :]

    def unrolled(self, run: Run, tried: Run) -> list[Abstract]:
        """Returns the results of a loop. The walk visits the body once for each step.

        In many loops, each step multiplies by public factors. Their product grows until the walk
        refuses it. To refuse such a loop early, the walk predicts this product for the last step.
        It tries the last step with the predicted product, and then continues with the next step.
        The prediction needs two steps in which the product grows by the same factor, and a body
        that does not depend on the index of the step.
        """
        if self.roots.results and not self.length:
            raise RefusalError("proofs do not support a loop of 0 steps")
        carry, grown, made = self.start, list[float](), list[list[Abstract]]()
        for count, step in enumerate(self.order):
            rows = [squeeze(place(x, 0, step), (0,)) for x in self.arrays]
            before, last = carry, grown
            carry, results = self._step(run, carry, rows)
            made.append(results)
            grown = [y.pending.bits - x.pending.bits for x, y in zip(before, carry, strict=True)]
            if count == _TRIED < self.length - 2 and any(grown) and np.allclose(grown, last):
                counters = [k for k, x in enumerate(carry) if x.is_known]
                public = any(x.is_public for x in self.arrays)
                if all(self.roots.adds(k) for k in counters) and not public:
                    left = self.length - 2 - count
                    # Only `bits`, which bounds the product of public factors, is updated.
                    late = [
                        dataclasses.replace(
                            x, pending=x.pending.having(bits=x.pending.bits + left * bits)
                        )
                        for x, bits in zip(carry, grown, strict=True)
                    ]
                    self._step(tried, late, rows)
        stacked = zip(*(made[step] for step in self.order), strict=True)
        return [*carry, *(join(*(new_axis(x, 0) for x in xs), dimension=0) for xs in stacked)]

    def step_by_step(self, run: Run, tried: Run) -> list[Abstract]:
        """Returns the results of a loop over the records; one step reads the changed record.

        The walk visits each step up to three times: as a step before the changed record, as the
        step that reads it, and as a step after it. Before the changed record is read, no carry
        changes. The step that reads it maps an unchanged carry to a carry that may change. Later
        steps read unchanged records, and map carries that may change to carries that may change.
        """
        before, after, made = self.start, list[Abstract](), list[Any]()
        for step in self.order:
            still, moved = (
                [_row_of(x, step, changed=changed) for x in self.arrays]
                for changed in (False, True)
            )
            carry, results = self._step(run, before, moved)
            others = [self._step(tried, before, still)]
            before = others[0][0]
            if after:
                others.append(self._step(tried, after, still))
            after = list(map(_any_of, zip(carry, *(x for x, _ in others[1:]), strict=True)))
            kept = list(map(_any_of, zip(*(found for _, found in others), strict=True)))
            made.append(zip(results, kept, strict=True))
        rows = zip(*(made[step] for step in self.order), strict=True)
        return [*after, *map(_stacked, rows)]

    def outputs(self, run: Run, tried: Run) -> list[Abstract]:
        """Returns the results of a loop, from an invariant: bounds that are valid in every step."""

        def step(walk: Run, carry: Sequence[Abstract], *, changed: bool) -> list[Abstract]:
            given = dict(zip(self.others, carry, strict=True))
            given |= {k: self._counted(k, 0, self.length - 1) for k in self.counters}
            inputs = [*self.fixed, *map(given.get, range(len(self.start)))]
            inputs += [_any_step(x, changed=changed) for x in self.arrays]
            return walk(self.steps, self.constants, inputs)

        def carried(carry: Sequence[Abstract]) -> list[Abstract]:
            found = step(tried, carry, changed=False)
            return [found[k] for k in self.others]

        carry = closed(carried, [self.start[k] for k in self.others], self.length)
        moved = still = step(tried, carry, changed=self.by_record)
        if self.by_record:
            after = list(map(hull, carry, [moved[k] for k in self.others]))
            after = closed(carried, after, self.length)
            still = step(tried, after, changed=False)
        last = {k: self._counted(k, self.length, self.length) for k in self.counters}
        # This loop is too long for XLA to unroll. So XLA cannot merge its steps with operations
        # after the loop.
        for k in self.others:
            pending = Pending().having(**_flags(moved[k], still[k]))
            last[k] = dataclasses.replace(hull(moved[k], still[k]), pending=pending)
        rows = {j: self._rows(moved[j], still[j]) for j in range(len(moved)) if j not in last}
        last |= {k: self._total(k, rows[k]) for k in self.sums}
        rows |= {j: self._sums(k, rows[j]) for j, k in self.partial.items()}
        # Walks the step once more and records it, so that `explain()` shows its operations.
        step(run, carry, changed=self.by_record)
        return [(rows | last)[j] for j in range(len(moved))]

    def _counted(self, k: int, least: int, most: int) -> Abstract:
        """Returns the range of a counter after `least` to `most` steps."""
        start, none = self.start[k], (np.zeros(()), 0.0, 0.0)
        ends = [start.low + self.counters[k] * np.array(float(count)) for count in (least, most)]
        low, high = np.minimum(*ends), np.maximum(*ends)
        return make((), start.dtype, low, high, None, none, none, whole=True)

    def _rows(self, moved: Abstract, still: Abstract) -> Abstract:
        """Returns the results of all steps, one of which reads the changed record."""
        if self.by_record:
            moved, still = as_dense(moved), as_dense(still)
            axis, changed, others = 0, moved.others, still.others
        else:
            axis, changed, others = moved.axis, moved.changed, moved.others
            axis = None if axis is None else axis + 1
        copies = 1 if self.by_record else self.length

        def row(d: Difference) -> Moves:
            l1, l2 = rounding.up(d.l1 * copies), rounding.up(d.l2 * math.sqrt(copies))
            return d.each[None], float(l1), float(l2)

        low, high = np.minimum(moved.low, still.low), np.maximum(moved.high, still.high)
        both = [moved.pending, still.pending]
        pending = moved.pending if moved is still else Pending.of_all(both)
        return make(
            (self.length, *moved.shape), moved.dtype, low[None], high[None], axis, row(changed),
            row(others), whole=moved.whole and still.whole, pending=pending,
        )  # fmt: skip

    def _total(self, k: int, terms: Abstract) -> Abstract:
        """Returns the last value of a carry to which all steps add terms."""
        shift = self.length * terms.pending.shift
        total = sum_over(terms, [0])
        load = float(rounding.up(self.length * terms.magnitude.max()))
        started = self.length * sum(count for _, count in terms.pending.starts)
        load = max(load, total.pending.weight, self.length * terms.pending.load)
        start = Pending.of_sum(total.pending.terms + started, load)
        bits = terms.pending.bits + math.log2(self.length)
        start = start.having(shift=shift, bits=bits, **_flags(terms))
        total = dataclasses.replace(total, pending=start)
        zero = self.start[k].is_known and not self.start[k].magnitude.any()
        return total if zero and not terms.pending.starts else _sum(self.start[k], total)

    def _sums(self, k: int, terms: Abstract) -> Abstract:
        """Returns the partial sums after each step, for a carry to which all steps add terms."""
        if math.prod(terms.shape) > _MOST_SUMS:
            raise RefusalError(
                "the loop returns too many partial sums for a proof. Sum the terms with jnp.sum "
                "instead"
            )
        sums = cumulative_sum(terms, 0, reverse=self.reverse)
        sums = dataclasses.replace(sums, pending=self._total(k, terms).pending)
        start = broadcast(self.start[k], terms.shape, list(range(1, len(terms.shape))))
        return _sum(start, sums)


def _sum(start: Abstract, total: Abstract) -> Abstract:
    found = add(start, total)
    return dataclasses.replace(found, pending=found.pending.having(**_flags(start, total)))


def _flags(*xs: Abstract) -> dict[str, bool]:
    """Returns the flags of `Pending` for the result of a loop."""
    return Pending.flags([x.pending for x in xs])


def _any_step(x: Abstract, *, changed: bool) -> Abstract:
    """Returns an abstract value that contains the entries of `x` that any step reads.

    If each step reads one record, the bound on the change is that of the changed record
    (`changed`), or that of any other record.
    """
    shape, axis = x.shape[1:], None if not x.axis else x.axis - 1

    def row(d: Difference) -> Difference:
        return difference(d.each.max(0), shape, axis, l1=d.l1, l2=d.l2, whole=x.whole)

    moves = row(x.changed), row(x.others)
    if x.axis == 0:
        moves = (moves[0],) * 2 if changed else (moves[1],) * 2
    return dataclasses.replace(
        x, shape=shape, low=x.low.min(0), high=x.high.max(0), axis=axis, changed=moves[0],
        others=moves[1], tied=frozenset(), source=None,
        l1_of_row=math.inf if axis is None else x.l1_of_row,
        l2_of_row=math.inf if axis is None else x.l2_of_row,
    )  # fmt: skip


class _Roots:
    """Finds the counters and sums among the carries of a body, ignoring casts that do nothing."""

    def __init__(self, body: jex.Jaxpr, fixed: int, carries: int) -> None:
        self.body, self.fixed = body, fixed
        self.results = range(carries, len(body.outvars))
        self.root: dict[jex.Var, Atom] = {}
        self.made: dict[jex.Var, Any] = {}
        uses = list[Atom](body.outvars)
        for equation in live(body):
            made = equation.outvars[0]
            self.made.update(dict.fromkeys(equation.outvars, equation))
            cast = equation.primitive.name == "convert_element_type"
            if cast and _type(equation.invars[0]) == _type(made):
                self.root[made] = self.of(equation.invars[0])
            else:
                uses += equation.invars
        self.used = Counter(x for x in map(self.of, uses) if isinstance(x, jex.Var))

    def of(self, atom: Atom) -> Atom:
        """Returns the variable that was cast to `atom` if the cast changes nothing, else `atom`."""
        return self.root.get(atom, atom) if isinstance(atom, jex.Var) else atom

    def same(self, j: int, k: int) -> bool:
        """Whether two outputs are the same variable."""
        return self.of(self.body.outvars[j]) is self.of(self.body.outvars[k])

    def _added(self, k: int) -> Atom | None:
        """Returns the term that a step adds to a carry; None if it has another shape or dtype."""
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
        """Returns the integer that each step adds to a carry, if the carry is a single integer."""
        term = self._added(k)
        whole = isinstance(term, jex.Literal) and aval(term).dtype.kind in "iu"
        return int(term.val) if whole and not aval(term).shape else None  # type: ignore[union-attr]

    def adds(self, k: int) -> Atom | None:
        """Returns the term that each step adds to the k-th carry.

        The result is None if a step uses this carry in any other way.
        """
        term = self._added(k)
        carry, made = self.body.invars[self.fixed + k], self.of(self.body.outvars[k])
        if term is None or not isinstance(made, jex.Var):
            return None
        outputs = sum(self.same(j, k) for j in range(len(self.body.outvars)))
        alone = self.used[carry] == 1 and self.used[made] == outputs
        return term if alone else None


def _type(atom: Any) -> tuple[Any, Any]:
    return aval(atom).shape, aval(atom).dtype


# A carry before a step, and after it: both with the same axis of records, or both without one.
_Met = tuple[Abstract, Abstract]


def closed(step: Step, start: Sequence[Abstract], length: int) -> list[Abstract]:
    """Returns an invariant: abstract values that contain `start` and all results of a step on them.

    Raises:
        RefusalError: if the search finds no invariant.
    """
    if not start:
        return []
    found, last = list(map(_plain, start)), None
    for count in range(_ROUNDS):
        try:
            met = list(map(_met, found, step(found)))
        except RefusalError:
            if count == 0:
                raise
            break
        if _holds(found, met):
            return _narrowed(step, start, found)
        numbers = [(_numbers(x), _numbers(y)) for x, y in met]
        excess = [[np.maximum(y - x, 0.0) for x, y in zip(*m, strict=True)] for m in numbers]
        jumps = [
            e if last is None else [_jumped(x, y, count) for x, y in zip(last[k], e, strict=True)]
            for k, e in enumerate(excess)
        ]
        last = excess if last is None else None
        try:
            found = [
                _made(x, [a + d for a, d in zip(before, jump, strict=True)])
                for (x, _), (before, _), jump in zip(met, numbers, jumps, strict=True)
            ]
        except RefusalError:
            break
    widest = max(found, key=lambda x: float(x.magnitude.max()))
    moves = max(float(x.changed.each.max()) for x in found)
    raise RefusalError(
        f"no bound was found on the carry of a loop of {length} steps. The search stopped when "
        f"{widest.dtype}{list(widest.shape)} might reach {widest.magnitude.max():.3g}, and a carry "
        f"might change by {moves:.3g}. Clip the carry in each step"
    )


def hull(first: Abstract, second: Abstract) -> Abstract:
    """Returns a small abstract value that contains both values."""
    x, y = _met(_plain(first), second)
    return _made(x, list(map(np.maximum, _numbers(x), _numbers(y))))


def _numbers(x: Abstract) -> Numbers:
    """Returns the bounds in an abstract value as numbers; larger numbers are weaker bounds."""
    ds = (x.changed, x.others)
    return [-x.low, x.high, *(np.asarray(y, float) for d in ds for y in d.moves)]


def _made(x: Abstract, numbers: Numbers) -> Abstract:
    low, high, *moves = numbers
    changed, others = ((e, float(l1), float(l2)) for e, l1, l2 in (moves[:3], moves[3:]))
    # If no step changes a carry, a compiler may replace the carry by its initial value. So the
    # carry keeps the flags of this value, such as `hidden`.
    pending = Pending().having(**(_flags(x) | {"coarse": False}))
    return make(
        x.shape, x.dtype, -low, high, x.axis, changed, others, whole=x.whole, pending=pending
    )


def _plain(x: Abstract) -> Abstract:
    """Returns the value with only its bounds, because its other facts may be false after a step."""
    return _made(x, _numbers(x))


def _met(x: Abstract, y: Abstract) -> _Met:
    """Returns x and y with the same axis of records, or both without one.

    If y may contain numbers that are not integers, the returned x may also contain such numbers.
    """
    axis = y.axis if x.is_public else x.axis
    axis = axis if y.is_public or axis == y.axis else None
    first, second = (as_dense(z) if axis is None else as_rows(z, axis) for z in (x, y))
    if first.whole and not y.whole:
        first = _made(dataclasses.replace(first, whole=False), _numbers(first))
    return first, second


def _holds(taken: Sequence[Abstract], met: Sequence[_Met]) -> bool:
    """Whether a step maps the abstract values `taken` into themselves.

    `met` contains the pairs (before, after) that `_met` returned: each value before and after the
    step. If `_met` widened a value before the step, `before` is not the value in `taken`. Then the
    result is False, because the step must be walked again from `before`.
    """
    if any(x is not before for x, (before, _) in zip(taken, met, strict=True)):
        return False
    pairs = (zip(_numbers(after), _numbers(before), strict=True) for before, after in met)
    return all(bool((x <= y).all()) for pair in pairs for x, y in pair)


def _jumped(first: np.ndarray, second: np.ndarray, count: int) -> np.ndarray:
    """Estimates how much the bounds must grow, so that no later step exceeds them.

    One step exceeded the bounds by `first` = e, and the bounds grew by e. The next step exceeds
    them by `second` = e r. The result is e r + e r^2 + ... If r >= 1, this series diverges, and the
    result is a large number.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(first > 0, second / first, 1.0)
        falls = ratio < 1 - 2.0**-24
        return np.where(falls, second / (1 - ratio) * (1 + 2.0**-16), second * 4.0**count)


def _narrowed(step: Step, start: Sequence[Abstract], found: list[Abstract]) -> list[Abstract]:
    """Returns a smaller invariant than `found` if it finds one, and otherwise `found`.

    It applies the step to `found`, and takes the hull of the result and of `start`. If this hull is
    an invariant, it replaces `found`. This is repeated up to `_NARROWED` times.
    """
    for _ in range(_NARROWED):
        smaller = list(map(hull, start, step(found)))
        if not _holds(smaller, list(map(_met, smaller, step(smaller)))):
            break
        found = smaller
    return found
