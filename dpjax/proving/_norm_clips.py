"""A quotient or product that no group of numbers leaves a ball by: clips by the l2 norm.

Take x / v with v at least alpha ||x||, as max(1, ||x|| / C) is with alpha = 1 / C. Or take x f with
f at most beta / ||x||, as min(1, C / (||x|| + eps)) is. The norm runs over some axes of x. Then the
norm of each such group of the result is at most 1 / alpha or beta. Each step is read off the
program, and every axis of the divisor must be that of x, so that no row meets another one's norm.

If x is an array less its means, the norm may be that of the same difference, computed anew: layer
norms do so. Both differ by rounding, which `_apart` bounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import JITS, Atom, Equation, aval, called, parts
from dpjax.proving import _rounding as rounding
from dpjax.proving._slices import Program
from dpjax.proving._value import Abstract, Difference, make

_MOST_STEPS = 40
_REPEATS = ("convert_element_type", "broadcast_in_dim")
_SAME = ("stop_gradient", "copy", "copy_p")
_SMALL = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class _Scope:
    """A program, and what its inputs are in the program that calls it."""

    program: Program
    inputs: Mapping[jex.Var, tuple[Atom, "_Scope"]]


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A multiple of the norm of x over `summed`; axis k of this array is axis `places[k]` of x."""

    factor: float
    summed: tuple[int, ...]
    places: tuple[int | None, ...]


_Reader = Callable[[Atom, _Scope], _Norm | None]


@dataclasses.dataclass
class _Search:
    x: Atom
    root: _Scope
    values: Mapping[jex.Var, Abstract | None]
    steps: int = 0

    @functools.cached_property
    def centered(self) -> tuple[jex.Var, tuple[int, ...]] | None:
        """The array that x is, less its means over some axes."""
        return self.less_its_means(self.x, self.root)

    def less_its_means(self, atom: Atom, scope: _Scope) -> tuple[jex.Var, tuple[int, ...]] | None:
        steps, self.steps = self.steps, 0
        found = self._less_its_means(atom, scope)
        self.steps = steps  # `_apart` counts the rounding of those steps.
        return found

    def _less_its_means(self, atom: Atom, scope: _Scope) -> tuple[jex.Var, tuple[int, ...]] | None:
        _, equation, scope = self.definition(atom, scope)
        if equation is None or equation.primitive.name != "sub":
            return None
        whole, _, home = self.definition(equation.invars[0], scope)
        mean = self.mean(equation.invars[1], scope, whole)
        shape = aval(whole).shape
        if home is not self.root or isinstance(whole, jex.Literal) or mean is None:
            return None
        kept = [k for k, size in enumerate(shape) if k not in mean.summed and size > 1]
        along = len(mean.places) == len(shape) and all(mean.places[k] == k for k in kept)
        count = math.prod(shape[k] for k in mean.summed)
        return (whole, mean.summed) if along and mean.factor == 1 / count else None

    def mean(self, atom: Atom, scope: _Scope, whole: Atom) -> _Norm | None:
        """A sum of an array over some axes, times a factor."""
        _, equation, scope = self.definition(atom, scope)
        if equation is None:
            return None
        name, first = equation.primitive.name, equation.invars[0]
        if name == "reduce_sum" and self.definition(first, scope)[0] is whole:
            axes = tuple(equation.params["axes"])
            places = tuple(k for k in range(len(aval(whole).shape)) if k not in axes)
            return _Norm(1.0, axes, places)
        norm = self.mean(first, scope, whole) if name in ("broadcast_in_dim", "div") else None
        if norm is None or name == "broadcast_in_dim":
            return None if norm is None else _repeated(equation, norm)
        number = self.number(equation.invars[1], scope)
        return None if not number else dataclasses.replace(norm, factor=norm.factor / number)

    def definition(self, atom: Atom, scope: _Scope) -> tuple[Atom, Equation | None, _Scope]:
        """Where a variable is computed, inside of calls and outside of them."""
        while True:
            self.steps += 1
            if isinstance(atom, jex.Literal) or self.steps > _MOST_STEPS:
                return atom, None, scope
            if atom in scope.inputs:
                atom, scope = scope.inputs[atom]
                continue
            equation = scope.program.definition(atom)
            if equation is None or equation.primitive.name not in JITS:
                return atom, equation, scope
            inner, consts = parts(called(equation))
            if consts:
                return atom, None, scope
            place = equation.outvars.index(atom)
            outer = [(operand, scope) for operand in equation.invars]
            scope = _Scope(Program(inner), dict(zip(inner.invars, outer, strict=True)))
            atom = inner.outvars[place]

    def number(self, atom: Atom, scope: _Scope) -> float | None:
        """A public number that is the same at every place."""
        atom, equation, scope = self.definition(atom, scope)
        if isinstance(atom, jex.Literal):
            literal = np.asarray(atom.val, aval(atom).dtype)
            return float(literal) if literal.ndim == 0 else None
        if scope is self.root and (known := self.values.get(atom)) is not None and known.is_known:
            first = float(known.low.flat[0])
            return first if (known.low == first).all() else None
        if equation is None or equation.primitive.name not in _REPEATS:
            return None
        # Floats keep their value, up to rounding that the lemma counts; 1.9 as an integer does not.
        dtype = np.dtype(aval(equation.outvars[0]).dtype)
        is_float = dtype.kind == "f" and dtype.itemsize >= 4
        return self.number(equation.invars[0], scope) if is_float else None

    def is_x(self, atom: Atom, scope: _Scope) -> bool:
        found, _, home = self.definition(atom, scope)
        if home is self.root and found is self.x:
            return True
        return self.centered is not None and self.less_its_means(atom, scope) == self.centered

    def _of_square(self, atom: Atom, scope: _Scope) -> tuple[Atom, _Scope] | None:
        _, equation, scope = self.definition(atom, scope)
        if equation is None:
            return None
        first = equation.invars[0]
        name, power = equation.primitive.name, equation.params.get("y")
        if name == "square" or (name == "integer_pow" and power == 2):
            return first, scope
        if name == "mul" and first is equation.invars[1]:
            return first, scope
        return None

    def computed(self, atom: Atom, scope: _Scope) -> float | None:
        """A public number, also a difference or a comparison of small integers, which is exact."""
        if (number := self.number(atom, scope)) is not None:
            return number
        _, equation, scope = self.definition(atom, scope)
        if equation is None or equation.primitive.name not in ("sub", "gt"):
            return None
        found = [self.computed(operand, scope) for operand in equation.invars]
        first, second = (x if x is not None and x in range(_SMALL) else None for x in found)
        if first is None or second is None or aval(equation.invars[0]).dtype.kind != "f":
            return None
        return first - second if equation.primitive.name == "sub" else float(first > second)

    def squares(self, atom: Atom, scope: _Scope) -> tuple[bool, _Norm | None]:
        """Whether this adds up squares, and the squared norm of x if it is among them."""
        if (known := self.number(atom, scope)) is not None:
            return known >= 0, None
        _, equation, scope = self.definition(atom, scope)
        if equation is None:
            return False, None
        name, operands = equation.primitive.name, equation.invars
        if name == "broadcast_in_dim":
            sure, norm = self.squares(operands[0], scope)
            return sure, None if norm is None else _repeated(equation, norm)
        if name == "select_n" and (place := self.computed(operands[0], scope)) is not None:
            return self.squares(operands[1 + int(place)], scope)
        if name == "div" and (number := self.computed(operands[1], scope)) is not None:
            sure, norm = self.squares(operands[0], scope)
            if norm is None or not 2.0**-60 <= number <= 2.0**60:
                return False, None
            return sure, dataclasses.replace(norm, factor=norm.factor / math.sqrt(number))
        if name == "max":
            for one, other in (operands, operands[::-1]):
                if self.number(other, scope) is not None:
                    return self.squares(one, scope)
        if name == "add":
            found = [self.squares(operand, scope) for operand in operands]
            norms = [norm for _, norm in found if norm is not None]
            same = norms if all(norm == norms[0] for norm in norms) else []
            return all(sure for sure, _ in found), same[0] if same else None
        if name != "reduce_sum":
            return False, None
        squared = self._of_square(equation.invars[0], scope)
        if squared is None:
            return False, None
        if not self.is_x(*squared):
            return True, None
        rank, axes = len(aval(self.x).shape), tuple(equation.params["axes"])
        places = tuple(k for k in range(rank) if k not in axes)
        return True, _Norm(1.0, axes, places)

    def above(self, atom: Atom, scope: _Scope) -> _Norm | None:
        """A multiple of the norm that a variable is never below."""
        _, equation, scope = self.definition(atom, scope)
        if equation is None:
            return None
        name, operands = equation.primitive.name, equation.invars
        if name == "sqrt":
            sure, norm = self.squares(operands[0], scope)
            return norm if sure else None
        if name in ("max", "add"):
            for one, other in (operands, operands[::-1]):
                number = self.number(other, scope)
                if number is not None and (name == "max" or number >= 0):
                    return self.above(one, scope)
        return self._moved(equation, scope, self.above)

    def below_reciprocal(self, atom: Atom, scope: _Scope) -> _Norm | None:
        """The beta of a variable that is never above beta over the norm."""
        _, equation, scope = self.definition(atom, scope)
        if equation is None:
            return None
        name, operands = equation.primitive.name, equation.invars
        if name == "min":
            for one, other in (operands, operands[::-1]):
                if self.number(other, scope) is not None:
                    return self.below_reciprocal(one, scope)
        if name == "rsqrt":
            sure, norm = self.squares(operands[0], scope)
            if norm is None or not sure:
                return None
            return dataclasses.replace(norm, factor=1 / norm.factor)
        if name == "div" and (number := self.number(operands[0], scope)) is not None:
            norm = self.above(operands[1], scope)
            if norm is None or number < 0:
                return None
            return dataclasses.replace(norm, factor=number / norm.factor)
        return self._moved(equation, scope, self.below_reciprocal)

    def _moved(self, equation: Equation, scope: _Scope, of: _Reader) -> _Norm | None:
        """The norm after an operation that scales it by a public number, or repeats it."""
        name = equation.primitive.name
        if name not in ("mul", "div", "broadcast_in_dim", *_SAME):
            return None
        scaled, *by = equation.invars
        if name == "mul" and self.number(scaled, scope) is not None:
            scaled, by = by[0], [scaled]
        norm = of(scaled, scope)
        if norm is None or name in _SAME:
            return norm
        if name in ("mul", "div"):
            number = self.number(by[0], scope)
            if number is None or not 2.0**-60 <= number <= 2.0**60:
                return None
            factor = norm.factor / number if name == "div" else norm.factor * number
            return dataclasses.replace(norm, factor=factor)
        return _repeated(equation, norm)


def _repeated(equation: Equation, norm: _Norm) -> _Norm:
    """The norm after `broadcast_in_dim`."""
    before, after = aval(equation.invars[0]).shape, aval(equation.outvars[0]).shape
    places: list[int | None] = [None] * len(after)
    for old, new in enumerate(equation.params["broadcast_dimensions"]):
        places[new] = norm.places[old] if before[old] == after[new] else None
    return dataclasses.replace(norm, places=tuple(places))


def clipped(
    program: Program, equation: Equation, values: Mapping[jex.Var, Abstract | None]
) -> Abstract | None:
    """The value of a quotient or product that clips its first operand by a norm."""
    root = _Scope(program, {})
    pairs = [equation.invars]
    if equation.primitive.name == "mul":
        pairs.append(equation.invars[::-1])
    for first, second in pairs:
        if isinstance(first, jex.Literal) or isinstance(second, jex.Literal):
            continue
        x, by = values.get(first), values.get(second)
        if x is None or by is None or x.axis is None or x.is_public or x.dtype.kind != "f":
            continue
        search = _Search(first, root, values)
        divides = equation.primitive.name == "div"
        norm = (search.above if divides else search.below_reciprocal)(second, root)
        if norm is not None and by.low.min() > 0 and _is_along(norm, x, by.shape):
            slack = _apart(search, norm)
            return None if slack is None else _in_ball(x, by, norm, slack, divides=divides)
    return None


def _is_along(norm: _Norm, x: Abstract, shape: tuple[int, ...]) -> bool:
    """Whether every group of x meets its own norm, and no record is part of a group."""
    if len(shape) != len(x.shape) or len(norm.places) != len(shape) or x.axis in norm.summed:
        return False
    groups = [k for k, size in enumerate(x.shape) if k not in norm.summed and size > 1]
    return all(norm.places[k] == k and shape[k] == x.shape[k] for k in groups)


def _apart(search: _Search, norm: _Norm) -> float | None:
    """How far apart the norms of x and of what the norm reads may lie.

    These are two uses of x, or x and the same difference, computed anew. Then an entry of each is
    off by (gamma_k + 16 u) M, with M the largest entry of the array, and by how far its uses lie
    apart.
    """
    x = search.values[search.x]  # type: ignore[index]
    assert x is not None
    count = math.prod(x.shape[axis] for axis in norm.summed)
    uses = x.apart * math.sqrt(count)
    if search.centered is None:
        return uses
    whole, axes = search.centered
    if (values := search.values.get(whole)) is None or not values.is_finite:
        return None
    k = math.prod(values.shape[axis] for axis in axes)
    units = rounding.sum_units(k, values.dtype) + 16 * rounding.unit(values.dtype)
    entry = units * float(values.magnitude.max()) + 16 * rounding.tiny(values.dtype) * (k + 1)
    entry += values.apart
    return uses + 2.1 * entry * math.sqrt(count) if units <= 2.0**-8 else None


def _in_ball(
    x: Abstract, by: Abstract, norm: _Norm, slack: float, *, divides: bool
) -> Abstract | None:
    """Rounding: the norm is off by theta, and by s where squares vanish as subnormal numbers."""
    count = math.prod(x.shape[k] for k in norm.summed)
    groups = math.prod(s for k, s in enumerate(x.shape) if k not in norm.summed and k != x.axis)
    units = rounding.UNITS["div"] * _MOST_STEPS + rounding.elementary(x.dtype)  # One rsqrt.
    theta = rounding.sum_units(count, x.dtype) + units * rounding.unit(x.dtype)
    if theta > 2.0**-8:
        return None
    vanished = 2 * math.sqrt(2 * count * rounding.tiny(x.dtype))
    if divides:
        radius = (1 / norm.factor + (vanished + slack) / float(by.low.min())) / (1 - theta)
    else:
        short = 2.0**20 * vanished  # Shorter groups stay short; longer ones lose little.
        radius = max(
            norm.factor / (1 - 2 * theta - 2.0**-20), short * float(by.high.max()) * (1 + theta)
        )
        radius += slack * float(by.high.max()) * (1 + theta)
    radius = float(rounding.up(radius * (1 + theta))) + 64 * count * rounding.tiny(x.dtype)
    ends = np.full((1,) * len(x.shape), radius)
    row = float(rounding.up(radius * math.sqrt(groups)))

    def moved(*ds: Difference) -> tuple[np.ndarray, float, float]:
        still = all(d.is_zero for d in ds)
        return (ends * 0, 0.0, 0.0) if still else (2 * ends, math.inf, 2 * row)

    return make(
        x.shape, x.dtype, -ends, ends, x.axis, moved(x.changed, by.changed),
        moved(x.others, by.others, *([] if by.axis == x.axis else [by.changed])), l2_of_row=row,
    )  # fmt: skip
