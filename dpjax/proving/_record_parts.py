"""Bounds, over boxes of a record, on parts of a program that handle each record separately.

A *part* is an array whose row for record i is g(record i), with the same g for all records, and
which an operation then combines over the records. `enclosed` bounds g over many boxes at once. It
computes both endpoints of an interval for each number, in float64 on a device, and widens every
interval by the rounding error in the rule of its operation. docs/proofs/boxes.md has the proof.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._walks import Equation, aval, called, live, names, parts
from dpjax.proving import _rounding as rounding
from dpjax.proving._add_remove import PaddedWalk
from dpjax.proving._exact_programs import kind_of
from dpjax.proving._slopes import Ends, Form, Sloping, hull, largest, sloped, tightened
from dpjax.proving._slots import Tracked
from dpjax.proving._value import NOTHING, Abstract, RefusalError
from dpjax.proving._walk import Walk

# The indices that locate a result in a program, as in `Step.key`.
Key = tuple[int, ...]
# If a record has more coordinates than this, slopes are not computed.
_MOST_SLOPES = 16

# These operations are increasing in each operand. So the endpoints of a result are its values at
# the endpoints of the operands.
_GROWING = names(
    "add add_any max min clamp exp exp2 expm1 log log1p tanh atan logistic erf sqrt floor ceil",
    "round sign and or copy copy_p stop_gradient reduce_sum reduce_max",
    "reduce_min reduce_or reduce_and cumsum cummax cummin sort broadcast_in_dim reshape squeeze",
    "transpose slice split concatenate stack tile rev pad iota",
)
_SUMS = names("reduce_sum dot_general")
_COMPARISONS = names("lt le gt ge eq ne")


@dataclasses.dataclass(frozen=True)
class Fact:
    """Facts about one result of an operation. They are valid for all records within their bounds.

    Attributes:
        low: lower bounds on the computed result.
        high: upper bounds on the computed result.
        relative: the error per unit of the result; for a sum, per unit of the magnitudes that are
            added up.
        absolute: an error that is added. `relative` and `absolute` together cover two errors: the
            rounding error of this operation alone, and that of the same operation in float64.
        merging: the error per unit of the largest magnitude among operands and results. It arises
            because a compiler may merge operations of the program that computes the bounds.
        gap: two numbers that are closer than this may compare as equal, because a device may flush
            tiny numbers to 0.
        axis: the axis of records.
        of_nan: whether an operand may be NaN. Then the endpoints of the result cover two cases: the
            operand is a number in a box, or the operand is NaN.
    """

    low: np.ndarray
    high: np.ndarray
    relative: float
    absolute: float
    merging: float
    gap: float
    axis: int | None
    of_nan: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of a program that is computed for each record alone.

    Attributes:
        keys: where the program computes this array (`Step.key`). There are several keys if an
            inner program returns the array.
        value: its abstract value, for all records within their bounds.
    """

    keys: frozenset[Key]
    value: Abstract


class RecordWalk(PaddedWalk):
    """A walk that finds the parts of a program.

    A part is an array whose row for record i is g(record i). The field `slots` proves that g is the
    same for all rows, and the field `others` proves that g reads one record alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[Key, Fact] = {}
        self.made = collections.defaultdict[Tracked, set[Key]](set)
        self.combined: dict[Tracked, None] = {}

    def outputs(
        self, jaxpr: jex.Jaxpr, equation: Equation, operands: list[Tracked]
    ) -> list[Tracked]:
        inner, path = called(equation), self.path
        plain = inner and kind_of(equation) is None
        try:
            outputs = super().outputs(jaxpr, equation, operands)
        except RefusalError:
            outputs = []
        alone = outputs and all(_is_part(x) or x.value.is_public for x in outputs)
        if not plain and not alone:
            self.combined.update(dict.fromkeys(filter(_is_part, operands)))
        if not outputs:
            raise RefusalError("this operation does not compute its result from one record alone")
        for k, output in enumerate(outputs):
            self.made[output].add((*path, k))
        if not inner:
            self._charge(equation, operands, path)
        return outputs

    def _charge(self, equation: Equation, operands: list[Tracked], path: Key) -> None:
        """Stores two error bounds: for the rounding of an operation, and for merging.

        A compiler may merge the operation with others, which changes the rounding.
        """
        once = {x: dataclasses.replace(x.value, apart=0.0) for x in operands}
        alone = {k: dataclasses.replace(x, pending=NOTHING) for k, x in once.items()}
        try:
            merged, found = (
                Walk().ruled(equation, [xs[x] for x in operands]) for xs in (once, alone)
            )
        except RefusalError:
            return
        for k, (x, y) in enumerate(zip(merged, found, strict=True)):
            more = max(float((y.low - x.low).max()), float((x.high - y.high).max()), 0.0)
            if x.pending.coarse or x.nan:
                continue
            tiny = max((rounding.tiny(z.value.dtype) for z in operands), default=0.0)
            relative, absolute = (0.0, max(x.apart, y.apart)) if x.off is None else x.off
            merging = 2.0**-43 if relative or absolute + more > 2.0**-100 else 0.0
            # `enclosed` computes the same operation in float64. The factor `own` covers the
            # rounding of that computation, too.
            double = np.dtype(float) in (x.dtype, *(z.value.dtype for z in operands))
            own = 2.0 if double else 1 + 2.0**-16
            charges = own * relative, own * (absolute + more), merging
            of_nan = any(z.value.nan for z in operands)
            self.facts[(*path, k)] = Fact(x.low, x.high, *charges, 2 * tiny, x.axis, of_nan)

    def parts(self) -> list[Part]:
        """Returns the arrays computed for each record alone, and then combined over records."""
        return [Part(frozenset(self.made[x]), x.value) for x in self.combined if x in self.made]


def _is_part(x: Tracked) -> bool:
    return x.value.axis is not None and x.is_by_record() and not x.value.is_public


def slopes_of(jaxpr: jex.Jaxpr) -> int:
    """Returns how many slopes (derivatives) are computed for each number.

    There is one slope for each coordinate of a record. For more than `_MOST_SLOPES` coordinates,
    the result is 0.
    """
    coordinates = sum(math.prod(aval(x).shape[1:]) for x in jaxpr.invars[len(jaxpr.invars) // 2 :])
    return coordinates if coordinates <= _MOST_SLOPES else 0


def enclosed(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], facts: dict[Key, Fact], part: Part
) -> Callable[[Sequence[Ends]], Ends] | None:
    """Returns a function that bounds a part over boxes; None if no such bounds are known.

    Row i of the part is g(record i). The function gets boxes of records: the lower and upper
    endpoints of the last inputs of `jaxpr`, with one box in each row. It returns the lower and
    upper endpoints of g over each box. It must be called with x64 enabled.
    """
    axes, count = jaxpr.invars[len(jaxpr.invars) // 2 :], slopes_of(jaxpr)

    def run(
        jaxpr: jex.Jaxpr, consts: Any, inputs: Any, path: Key, found: list[Ends], radii: Any
    ) -> list[Any]:
        values: dict[Any, Form | None] = {
            v: _constant(c, count) for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Form | None:
            if isinstance(atom, jex.Literal):
                return _constant(np.asarray(atom.val, aval(atom).dtype), count)
            return values[atom]

        for place, equation in enumerate(live(jaxpr)):
            here, given = (*path, place), [read(x) for x in equation.invars]
            keys = [(*here, k) for k in range(len(equation.outvars))]
            if inner := called(equation):
                outputs = run(*parts(inner), given, here, found, radii)
            else:
                outputs = _forms(equation, given, [facts.get(key) for key in keys], radii)
            values.update(zip(equation.outvars, outputs, strict=True))
            found += [
                x.ends for key, x in zip(keys, outputs, strict=True) if x and key in part.keys
            ]
        return [read(x) for x in jaxpr.outvars]

    def ends(records: Sequence[Ends]) -> Any:
        unusable, found = [None] * (len(jaxpr.invars) - len(records)), list[Ends]()
        # Endpoints are multiplied by slopes, which have one more axis.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            run(jaxpr, consts, [*unusable, *_inputs(records, count)], (), found, _radii(records))
        if not found:
            return None
        axis = part.value.axis or 0
        low, high = (jnp.moveaxis(x, axis, 0).astype(float) for x in found[0])
        return low.reshape(len(low), -1), high.reshape(len(high), -1)

    shapes = [jax.ShapeDtypeStruct(aval(x).shape, _in_float64(aval(x).dtype)) for x in axes]
    with jax.enable_x64(True):
        known = jax.eval_shape(ends, [(x, x) for x in shapes])
    return None if known is None else ends


def _inputs(records: Sequence[Ends], count: int) -> list[Form]:
    """Returns the records, each coordinate as a linear function (`Form`) of all coordinates.

    Coordinate j has slope 1 in coordinate j, and slope 0 in the others. Integers have no slopes.
    """
    found, place = list[Form](), 0
    for low, high in records:
        size, slopes, middle = math.prod(low.shape[1:]), None, low
        if count and low.dtype.kind == "f":
            middle = (low + high) / 2
            own = jnp.eye(count)[:, place : place + size].reshape(count, 1, *low.shape[1:])
            own = jnp.broadcast_to(own, (count, *low.shape))
            slopes = own, own
        found.append(Form((low, high), (middle, middle), slopes, jnp.zeros(low.shape)))
        place += size
    return found


def _radii(records: Sequence[Ends]) -> Any:
    """Returns half the widths of the boxes, as an array of shape (coordinates, rows)."""
    ends = [[x.reshape(len(x), -1).astype(float) for x in both] for both in records]
    halves = jnp.concatenate([(high - low) / 2 for low, high in ends], 1).T * (1 + 2.0**-50)
    # The middle of a box is rounded, too.
    largest = jnp.concatenate([jnp.maximum(-low, high) for low, high in ends], 1).T
    return halves + jnp.abs(largest) * 2.0**-52


def _forms(
    equation: Equation, given: list[Form | None], known: list[Fact | None], radii: Any
) -> list[Form | None]:
    """Returns the forms of an operation's results; None where they are unknown."""
    forms, facts = [x for x in given if x is not None], [x for x in known if x is not None]
    if len(forms) < len(given) or len(facts) < len(known):
        return [None] * len(known)
    outputs = _ends(equation, [x.ends for x in forms], facts)
    plain: list[Form | None] = [Form(x[0], x[0], None, 0.0) if x else None for x in outputs]
    if len(outputs) > 1 or outputs[0] is None or not len(radii):
        return plain
    (ends, charge), (fact,) = outputs[0], facts
    (centered,) = _ends(equation, [x.middle for x in forms], facts)
    if centered is None or ends[0].dtype.kind != "f":
        return plain
    slopes = sloped(Sloping(equation, forms, partial(_bound, equation), ends, centered[0]))
    if slopes is None:
        return plain
    both, off = slopes[0], slopes[1] + charge
    if fact.axis is not None:
        places = [1] * ends[0].ndim
        places[fact.axis] = radii.shape[1]
        ends = tightened(ends, centered[0], both, off, radii.reshape(-1, *places))
    return [Form(ends, centered[0], both, off)]


def _in_float64(dtype: Any) -> Any:
    """Returns float64 for float dtypes, and other dtypes unchanged."""
    return np.dtype(float) if rounding.is_float(np.dtype(dtype)) else dtype


def _constant(number: Any, count: int) -> Form:
    array = np.asarray(number)
    array = array.astype(_in_float64(array.dtype))
    ends = array, array
    if not count:  # Forms have no slopes.
        return Form(ends, ends, None, 0.0)
    none = jnp.zeros((count, *array.shape))
    return Form(ends, ends, (none, none), jnp.zeros(array.shape))


def _ends(
    equation: Equation, operands: list[Ends], facts: list[Fact]
) -> Sequence[tuple[Ends, Any] | None]:
    """Returns the endpoints of an operation's results, with their errors; None if unknown."""
    name = equation.primitive.name
    rule = _RULES.get(name)
    if rule is None or (result := rule(equation, operands, facts[0])) is None:
        return [None] * len(facts)
    results = [result] if isinstance(result, tuple) else result
    magnitudes = [_magnitude(x) for x in operands]
    sizes = [_magnitude(x) for x in results]
    if name in _SUMS:
        sizes = [_bound(equation, *magnitudes)]
    found = list[tuple[Ends, Any]]()
    for ends, size, fact in zip(results, sizes, facts, strict=True):
        alike = [x for x in magnitudes if np.shape(x) in ((), size.shape)]
        found.append(_outward(ends, size, functools.reduce(jnp.maximum, alike, size), fact))
    return found


def _magnitude(x: Ends) -> Any:
    """Bounds the magnitudes of floats; 0 for integers and booleans, which are not rounded."""
    return largest(x) if x[0].dtype.kind == "f" else jnp.zeros(x[0].shape)


def _outward(ends: Ends, size: Any, most: Any, fact: Fact) -> tuple[Ends, Any]:
    """Widens endpoints by the rounding error, but not beyond the bounds for all records.

    Also returns the rounding error.
    """
    (low, high), charge = ends, 0.0
    if low.dtype == bool:
        return (low | (fact.low > 0), high & (fact.high > 0)), charge
    if low.dtype.kind == "f":
        charge = fact.absolute
        if fact.relative:
            charge = charge + fact.relative * size
        if fact.merging:
            charge = charge + fact.merging * most
        low, high = low - charge, high + charge
        # A device may flush numbers near 0 to 0. So an endpoint that is closer to 0 than `gap` is
        # moved to 0, if this widens the interval.
        low = jnp.where((low > 0) & (low < fact.gap), 0.0, low)
        high = jnp.where((high < 0) & (high > -fact.gap), 0.0, high)
    kind = low.dtype
    least, most = fact.low.astype(kind), fact.high.astype(kind)
    # An endpoint may be NaN, for example the difference of two infinities. It is then replaced by
    # the bound for all records.
    ends = jnp.where(low > least, low, least), jnp.where(high < most, high, most)
    return ends, charge


def _bound(equation: Equation, *operands: Any) -> Any:
    """Applies the operation to endpoints of its operands' intervals, in float64."""
    parameters = {
        k: _in_float64(v) if k.endswith("dtype") or k == "preferred_element_type" else v
        for k, v in equation.params.items()
        if v is not None or "dtype" not in k
    }
    return equation.primitive.bind(*map(jnp.asarray, operands), **parameters)


def _growing(equation: Equation, operands: list[Ends], fact: Fact) -> Any:
    low, high = (_bound(equation, *(x[k] for x in operands)) for k in (0, 1))
    multiple = equation.primitive.multiple_results
    return list(zip(low, high, strict=True)) if multiple else (low, high)


def _at_corners(equation: Equation, operands: list[Ends], fact: Fact) -> Ends:
    """Returns the endpoints of an operation that is monotone in each of its operands."""
    if equation.primitive.name == "mul" and equation.invars[0] is equation.invars[1]:
        return _power(operands[0], 2)
    return hull([_bound(equation, *ends) for ends in itertools.product(*operands)])


def _power(x: Ends, y: int) -> Ends:
    """Returns the endpoints of x^y for an integer y."""
    low, high = x
    if y < 0:
        return hull([1 / end for end in _power(x, -y)])
    ends = low**y, high**y
    if y % 2:
        return ends
    least = jnp.where((low <= 0) & (high >= 0), float(y == 0), jnp.minimum(*ends))
    return least, jnp.maximum(*ends)


def _absolute(equation: Equation, operands: list[Ends], fact: Fact) -> Ends:
    ((low, high),) = operands
    return jnp.maximum(jnp.maximum(low, -high), 0), jnp.maximum(-low, high)


def _wave(equation: Equation, operands: list[Ends], fact: Fact, peak: float) -> Ends:
    """Returns the endpoints of sin or cos: 1 or -1 if the operand may be at an extremum."""
    ((low, high),) = operands
    sides, turn, slack = [_bound(equation, x) for x in (low, high)], 2 * np.pi, 2.0**-30

    def meets(place: float) -> Any:
        return place + turn * jnp.ceil((low - slack - place) / turn) <= high + slack

    least, most = hull(sides)
    return jnp.where(meets(peak + np.pi), -1.0, least), jnp.where(meets(peak), 1.0, most)


def _compared(equation: Equation, operands: list[Ends], fact: Fact) -> Ends:
    """Returns whether a comparison is certainly true, and whether it may be true.

    With NaN, != is true, and all other comparisons are false.
    """
    surely, maybe = _of_numbers(equation.primitive.name, operands, fact)
    if not fact.of_nan:
        return surely, maybe
    if equation.primitive.name == "ne":
        return surely, jnp.ones_like(maybe)
    return jnp.zeros_like(surely), maybe


def _of_numbers(name: str, operands: list[Ends], fact: Fact) -> Ends:
    """Returns the same as `_compared`, for operands that are not NaN."""
    ((a, b), (c, d)), gap = operands, fact.gap
    if a.dtype.kind != "f":
        gap = 0
    if name in ("gt", "ge"):
        (a, b), (c, d) = (c, d), (a, b)
    if name in ("lt", "gt"):
        return b + gap < c, ~(a >= d + gap)
    if name in ("le", "ge"):
        return c >= b + gap, ~(d + gap < a)
    same, apart = (a == b) & (c == d) & (a == c), (b + gap < c) | (a > d + gap)
    return (same, ~apart) if name == "eq" else (apart, ~same)


def _converted(equation: Equation, operands: list[Ends], fact: Fact) -> Ends:
    """Returns the endpoints of a cast. All casts are increasing, except casts to booleans.

    A cast to booleans maps 0 to false, and all other numbers to true.
    """
    if np.dtype(equation.params["new_dtype"]).kind != "b":
        return _growing(equation, operands, fact)
    zero = jnp.zeros_like(operands[0][0])
    return _of_numbers("ne", [*operands, (zero, zero)], fact)


def _selected(equation: Equation, operands: list[Ends], fact: Fact) -> Ends | None:
    """Returns the endpoints of a `select_n` by a boolean; None for others."""
    (surely, maybe), *cases = operands
    if surely.dtype != bool or len(cases) != 2:
        return None
    (a, b), (c, d) = cases
    least, most = jnp.minimum(a, c), jnp.maximum(b, d)
    low = jnp.where(surely, c, jnp.where(maybe, least, a))
    return low, jnp.where(surely, d, jnp.where(maybe, most, b))


def _product(equation: Equation, operands: list[Ends], fact: Fact) -> Ends | None:
    """Returns the endpoints of a `dot_general` with a public factor; None for others.

    Each endpoint of the product uses the same endpoint of the private factor where the public
    factor is positive, and the opposite endpoint where it is negative.
    """
    (a, b), (c, d) = operands
    times = functools.partial(_bound, equation)
    if c is d:
        up, down = jnp.maximum(c, 0), jnp.minimum(c, 0)
        return times(a, up) + times(b, down), times(b, up) + times(a, down)
    if a is b:
        up, down = jnp.maximum(a, 0), jnp.minimum(a, 0)
        return times(up, c) + times(down, d), times(up, d) + times(down, c)
    return None


_RULES: dict[str, Callable[[Equation, list[Ends], Fact], Any]] = {
    **dict.fromkeys(_GROWING, _growing),
    **dict.fromkeys(names("sub mul div pow neg rsqrt not"), _at_corners),
    **dict.fromkeys(_COMPARISONS, _compared),
    "convert_element_type": _converted,
    "abs": _absolute,
    "square": lambda equation, operands, fact: _power(operands[0], 2),
    "integer_pow": lambda equation, operands, fact: _power(operands[0], equation.params["y"]),
    "sin": functools.partial(_wave, peak=np.pi / 2),
    "cos": functools.partial(_wave, peak=0.0),
    "select_n": _selected,
    "dot_general": _product,
}
