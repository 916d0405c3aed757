"""The walk under add-or-remove-one, for records in a public number of slots.

Let D' hold the records of D but one, in any slots. Let E be D with that record's slot emptied. Then
E and D' hold the same rows in other slots. So f moves by at most a step from D to E, where one row
becomes the empty one, and a step from E to D', where rows change places. The walk bounds both.
docs/proofs/global-sensitivity.md has the proof.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax.extend.core as jex
import numpy as np

from dpjax._core._proof import PaddedRecordBounds
from dpjax._tracing._walks import Atom, Equation, aval, called, live, parts
from dpjax.proving import _choices as choices
from dpjax.proving import _rounding as rounding
from dpjax.proving._refusal import RefusalError
from dpjax.proving._slots import Slots, placed
from dpjax.proving._value import Abstract, Difference, aligned, constant, difference, norm_of, over
from dpjax.proving._walk import Step, Walk, _check_type, source_line


@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """What is known of one array.

    Attributes:
        value: on every pair of D and E. Its `apart` also bounds how far rows in other slots are
            from these.
        empty: an array whose range holds the row of an empty slot.
        slots: how it depends on slots.
    """

    value: Abstract
    empty: Abstract
    slots: Slots


def stays(value: Abstract) -> Tracked:
    """An array that no slot moves."""
    numbers = np.abs(np.append(value.low, value.high))
    if ((numbers > 0) & (numbers < rounding.tiny(value.dtype))).any():
        raise RefusalError("a subnormal constant has no rule here: use 0")
    return Tracked(value, value, Slots())


def inputs_of(clamped: Sequence[Abstract], public: PaddedRecordBounds) -> list[Tracked]:
    """Records after the clamp, which gives empty slots a public row."""
    return [
        _within_rows(Tracked(x, _filled(x, number), Slots(0)))
        for x, number in zip(clamped, public.empty_row, strict=True)
    ]


def _filled(x: Abstract, number: float) -> Abstract:
    ends, none = np.full(x.low.shape, number), np.zeros(x.low.shape)
    still = Difference(none, 0.0, 0.0)
    size = abs(number) * math.sqrt(math.prod(x.shape[1:]))
    return dataclasses.replace(
        x, low=ends, high=ends, changed=still, others=still, apart=0.0,
        whole=float(number).is_integer(), l2_of_row=float(rounding.up(size)),
    )  # fmt: skip


@dataclasses.dataclass
class PaddedWalk:
    """The state of a walk: the steps so far."""

    steps: list[Step]
    depth: int = 0

    def run(
        self, jaxpr: jex.Jaxpr, consts: Sequence[object], inputs: Sequence[Tracked | None]
    ) -> list[Tracked]:
        """The outputs of a program, from those inputs that may be used."""
        values: dict[jex.Var, Tracked | None] = {}
        values.update(zip(jaxpr.constvars, (stays(constant(c)) for c in consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Atom) -> Tracked:
            if isinstance(atom, jex.Literal):
                return stays(constant(np.asarray(atom.val, aval(atom).dtype)))
            if (found := values[atom]) is None:
                raise RefusalError("the program uses records that were not clamped")
            return found

        for equation in live(jaxpr):
            try:
                outputs = self._outputs(equation, read)
            except RefusalError as refusal:
                raise Walk([]).located(refusal, equation) from None
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, equation: Equation, read: Callable[[Atom], Tracked]) -> list[Tracked]:
        if equation.effects:
            raise RefusalError(f"it has side effects: {equation.effects}")
        if inner := called(equation):
            jaxpr, consts = parts(inner)
            self.depth += 1
            try:
                return self.run(jaxpr, consts, [read(atom) for atom in equation.invars])
            finally:
                self.depth -= 1
        name, given = equation.primitive.name, [read(atom) for atom in equation.invars]
        found = _ruled(equation, [x.value for x in given])
        try:
            empty = _ruled(equation, [x.empty for x in given])
        except RefusalError:
            empty = found  # Its range holds every row.
        made: list[Tracked] = []
        for variable, value, row in zip(equation.outvars, found, empty, strict=True):
            _check_type(aval(variable), value)
            if value.pending.coarse:
                raise RefusalError("floats of 16 bits have no rule under add-or-remove-one")
            values, slots = [x.value for x in given], [x.slots for x in given]
            place = placed(name, equation.params, values, slots, value)
            settled = _settled(name, equation, given, value)
            made.append(_within_rows(Tracked(settled, row, place)))
            step = Step(self.depth, name, source_line(equation), made[-1].value)
            self.steps.append(step)
        return made


def whole_norm(bound: float, outputs: Sequence[Tracked], norm: str) -> float:
    """A bound on a norm of integers is that of some integers; `bound` exceeds it by 2^-44."""
    if not all(x.value.whole for x in outputs) or bound > 2.0**20:
        return bound
    if norm != "l2":
        return float(math.floor(bound))
    square = math.floor(bound**2)
    root = math.sqrt(square)
    return root if root.is_integer() else math.nextafter(root, math.inf)


def moves(outputs: Sequence[Tracked], norm: str) -> tuple[float, float]:
    """How far an emptied slot moves the outputs, and how far other slots do.

    Raises:
        RefusalError: if an output lists the records by their slots.
    """
    if any(x.slots.axis is not None for x in outputs):
        raise RefusalError("the value lists records by their slots: sum over the records")
    values = [x.value for x in outputs]
    sizes = [(x.apart, math.prod(x.shape)) for x in values]
    if norm == "l1":
        slots = sum(apart * size for apart, size in sizes)
    elif norm == "l2":
        slots = rounding.norm2([apart * math.sqrt(size) for apart, size in sizes])
    else:
        slots = max(apart for apart, _ in sizes)
    return norm_of(values, norm), float(rounding.up(slots))


def _ruled(equation: Equation, values: Sequence[Abstract]) -> list[Abstract]:
    """What the rule of an operation gives for values that are at hand."""
    kept = iter(values)
    return Walk([]).outputs(equation, lambda atom: next(kept))


def _within_rows(x: Tracked) -> Tracked:
    """One row moves between a row of D and an empty one, so by no more than both are long."""
    axis, value = x.slots.axis, x.value
    if axis is None:
        return Tracked(value, value, x.slots)
    if value.axis != axis:
        return x
    apart = np.maximum(value.high - x.empty.low, x.empty.high - value.low)
    each = np.minimum(*np.broadcast_arrays(value.changed.each, rounding.up(over(apart, axis))))
    own, empty = _row(value, axis), _row(x.empty, axis)
    l1, l2 = (float(rounding.up(a + b)) for a, b in zip(own, empty, strict=True))
    old = value.changed
    changed = difference(
        each, value.shape, axis, l1=min(old.l1, l1), l2=min(old.l2, l2), whole=value.whole
    )
    return dataclasses.replace(x, value=dataclasses.replace(value, changed=changed))


def _row(x: Abstract, axis: int) -> tuple[float, float]:
    """The largest l1 and l2 norm of a row. Of integers, the l1 norm is at most the square in l2."""
    l2 = x.l2_of_row if x.axis == axis else math.inf
    largest = difference(over(x.magnitude, axis), x.shape, axis, l2=l2)
    square = float(rounding.up(largest.l2**2 * (1 + 2.0**-30)))
    return min(largest.l1, square) if x.whole else largest.l1, largest.l2


def _settled(name: str, equation: Equation, given: Sequence[Tracked], found: Abstract) -> Abstract:
    """The value with what only pairs of a row and an empty one allow, or rows in other slots."""
    values = [x.value for x in given]
    if name == "gather" and values[0].is_known and not values[1].apart:
        flush = 0.0 if found.whole else 4 * rounding.tiny(found.dtype)
        return dataclasses.replace(found, apart=min(found.apart, flush))
    if name in ("scatter-add", "scatter_add"):
        return _scattered(given, found)
    if name == "dot_general":
        (ca, cb), _ = equation.params["dimension_numbers"]
        return _summed_products(given, (tuple(ca), tuple(cb)), found)
    if found.axis is not None and found.whole and name in _KEEP_SMALL_ROWS:
        norm = min(found.l2_of_row, _norm_of_row(name, values, found.axis))
        return dataclasses.replace(found, l2_of_row=norm)
    return found


_KEEP_SMALL_ROWS = frozenset(("eq", "and", "convert_element_type", "mul", "select_n"))


def _norm_of_row(name: str, values: Sequence[Abstract], axis: int) -> float:
    """A bound on the l2 norm of a row of integers, of which many are 0."""
    full, _, place = aligned(*values)  # Operations repeat operands along axes of length 1.
    if place != axis:
        return math.inf
    rows = [x.l2_of_row for x in full]
    if name == "eq":
        fibers = choices._one_true(full[0], full[1], axis)
        return float(rounding.up(math.sqrt(fibers))) if fibers else math.inf
    if name == "and" or (name == "convert_element_type" and values[0].whole):
        return min(rows)
    if name == "mul":
        sizes = [float(x.magnitude.max()) for x in full[::-1]]
        return min(
            float(rounding.up(r * s)) if s else 0.0 for r, s in zip(rows, sizes, strict=True)
        )
    if name == "select_n":
        cases = zip(full[1:], rows[1:], strict=True)
        sizes = [0.0 if x.is_known and not x.magnitude.any() else row for x, row in cases]
        return float(rounding.up(rounding.norm2(sizes)))
    return math.inf


def _scattered(given: Sequence[Tracked], found: Abstract) -> Abstract:
    """Sums by place: u is taken away, and the row of an empty slot is added, perhaps elsewhere."""
    start, places, added = given
    u, empty = added.value, added.empty
    n, size = u.shape[0], math.prod(found.shape)
    slip = 0.0
    if not found.whole:
        largest = float(start.value.magnitude.max()) + n * float(u.magnitude.max())
        flush = 4 * rounding.tiny(found.dtype) * (n + 1)
        slip = 2 * float(rounding.up(rounding.sum_units(n + 1, found.dtype) * largest + flush))
    if not places.value.apart:
        apart = float(rounding.up(n * u.apart + slip))
        found = dataclasses.replace(found, apart=min(found.apart, apart))
    by_record = u.axis == 0 and u.others.is_zero and places.value.others.is_zero
    if added.slots.axis != 0 or not by_record:
        return found
    own, none = _row(u, 0), _row(empty, 0)
    each = np.maximum(u.changed.each, np.maximum(over(u.magnitude, 0), over(empty.magnitude, 0)))
    l2 = max(u.changed.l2, rounding.norm2([own[1], none[1]]))
    return _tightened(
        found, each + slip, own[0] + none[0] + slip * size, l2 + slip * math.sqrt(size)
    )


def _summed_products(
    given: Sequence[Tracked], contracted: tuple[tuple[int, ...], tuple[int, ...]], found: Abstract
) -> Abstract:
    """A sum of a b over records, rows of both, moves by at most |a| |b| + |a'| |b'|."""
    ca, cb = contracted
    a, b = given
    if not (len(ca) == 1 and (a.slots.axis, b.slots.axis) == (ca[0], cb[0])):
        return found
    by_record = all(
        x.value.axis == x.slots.axis and x.value.others.is_zero for x in (a, b)
    )  # fmt: skip
    if not by_record:
        return found
    rows = [[_row(x, k) for x in (y.value, y.empty)] for y, k in ((a, ca[0]), (b, cb[0]))]
    l1, l2 = (sum(rows[0][e][k] * rows[1][e][k] for e in (0, 1)) for k in (0, 1))
    size, slip = math.prod(found.shape), found.apart
    return _tightened(found, np.asarray(l2 + slip), l1 + slip * size, l2 + slip * math.sqrt(size))


def _tightened(found: Abstract, each: np.ndarray, l1: float, l2: float) -> Abstract:
    """A value without rows, whose difference has a second bound."""
    if found.axis is not None:
        return found
    old = found.others
    if each.ndim == 0:
        each = each.reshape((1,) * len(found.shape))
    each = rounding.up(each)
    new = difference(
        np.minimum(*np.broadcast_arrays(old.each, each)), found.shape, None,
        l1=min(old.l1, float(rounding.up(l1))), l2=min(old.l2, float(rounding.up(l2))),
        whole=found.whole,
    )  # fmt: skip
    return dataclasses.replace(found, changed=new, others=new)
