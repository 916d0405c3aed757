"""A lemma for clipping by the l2 norm: quotients or products whose rows are in a ball.

The lemma recognizes two forms:

- x / v with v >= alpha ||x||. An example is v = max(1, ||x|| / C), with alpha = 1 / C.
- x f with f <= beta / ||x||. An example is f = min(1, C / (||x|| + eps)), with beta = C.

The norm is over some axes of x. The other axes index *groups*. The norm of each group of the result
is at most 1 / alpha, or at most beta. Every axis of v or f must be an axis of x, so that each group
is divided by its own norm.

In a layer norm, x is an array minus its means, and the program may compute this difference a second
time for the norm. The two results differ by rounding, which `_apart` bounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import Atom, Equation, aval, called
from dpjax.proving import _layout as layout
from dpjax.proving import _rounding as rounding
from dpjax.proving._operations import OPERATIONS
from dpjax.proving._pending import carried
from dpjax.proving._reductions import sum_over
from dpjax.proving._scopes import MOST_STEPS, At, Node, Reader, Scope
from dpjax.proving._value import Abstract, Difference, Moves, anywhere, changing_with, make


class _Norm(NamedTuple):
    """An array that contains `factor` times the norm of x over the axes `summed`.

    Axis k of this array is axis `places[k]` of x. If the array repeats the norm along axis k,
    `places[k]` is None.
    """

    factor: float
    summed: tuple[int, ...]
    places: tuple[int | None, ...]

    def is_of(self, other: "_Norm") -> bool:
        """Whether `self` and `other` contain multiples of the same norm at every index."""
        return self.summed == other.summed and self.places == other.places


def _is_minus_zero(number: float) -> bool:
    """Whether a number is -0, whose root is -0 and whose reciprocal is -infinity."""
    return number == 0 and math.copysign(1, number) < 0


def _sum_of(atom: Atom, equation: Equation) -> _Norm:
    """Returns a sum over axes of an array, as a `_Norm` with factor 1."""
    axes = tuple(equation.params["axes"])
    return _Norm(1.0, axes, tuple(k for k in range(len(aval(atom).shape)) if k not in axes))


def _repeated(equation: Equation, norm: _Norm) -> _Norm:
    """Returns the norm after a `broadcast_in_dim`."""
    before, after = aval(equation.invars[0]).shape, aval(equation.outvars[0]).shape
    places: list[int | None] = [None] * len(after)
    for old, new in enumerate(equation.params["broadcast_dimensions"]):
        places[new] = norm.places[old] if before[old] == after[new] else None
    return norm._replace(places=tuple(places))


@dataclasses.dataclass
class Search(Reader):
    """Searches for the norm of x, backward from a denominator or a factor.

    Attributes:
        root: the program that clips x.
        steps: how many operations the search has passed. It stops after `MOST_STEPS` of them.
        x: the array that is clipped.
        loose: whether the search has passed a sum or a maximum. Then the variable at which the
            search began may be large even if x is 0.
    """

    x: Any = None
    loose: bool = False

    @functools.cached_property
    def centered(self) -> tuple[jex.Var, tuple[int, ...]] | None:
        """Returns (a, axes) if x is `a` minus the means of `a` over `axes`; otherwise None."""
        return self.less_its_means((self.x, self.root))

    def less_its_means(self, at: At) -> tuple[jex.Var, tuple[int, ...]] | None:
        """Returns (a, axes) if a variable is `a` minus the means of `a` over `axes`; else None."""
        # A separate search follows the subtraction of the means, because `steps` counts only
        # operations that round the norm. The means and the subtraction round x instead, and
        # `_apart` bounds this error.
        search = Search(self.root)
        node = search.node(at)
        if node.name != "sub":
            return None
        found = search.node(node.operands[0])
        whole, mean = found.atom, search.mean(node.operands[1], found.atom)
        if found.scope is not self.root or isinstance(whole, jex.Literal) or mean is None:
            return None
        shape = aval(whole).shape
        kept = [k for k, size in enumerate(shape) if k not in mean.summed and size > 1]
        along = len(mean.places) == len(shape) and all(mean.places[k] == k for k in kept)
        count = math.prod(shape[k] for k in mean.summed)
        return (whole, mean.summed) if along and mean.factor == 1 / count else None

    def mean(self, at: At, whole: Atom) -> _Norm | None:
        """Returns a `_Norm` that describes a public multiple of a sum of `whole`; otherwise None.

        The `_Norm` contains the factor and the axes of the sum, although a sum is not a norm.
        """
        node = self.node(at)
        if node.name == "reduce_sum" and self.node(node.operands[0]).atom is whole:
            return _sum_of(whole, node.equation)
        return self.moved(node, lambda at: self.mean(at, whole))

    def factor(self, at: At) -> float | None:
        """Returns a public number; None if a product with it could overflow or underflow."""
        number = self.number(at)
        return number if number is not None and 2.0**-60 <= number <= 2.0**60 else None

    def beside_numbers(self, node: Node) -> Iterator[tuple[At, float]]:
        """Yields the operands of a binary operation whose other operand is a public number.

        Each operand comes with this number.
        """
        for one, other in (node.operands, node.operands[::-1]):
            if (number := self.number(other)) is not None:
                yield one, number

    def computed(self, at: At) -> float | None:
        """Returns the public number that a variable equals; None if it is not known.

        In addition to `number`, this computes differences and comparisons of small integers, which
        are exact.
        """
        if (number := self.number(at)) is not None:
            return number
        node = self.node(at)
        if node.name not in ("sub", "gt") or aval(node.equation.invars[0]).dtype.kind != "f":
            return None
        first, second = map(self.computed, node.operands)
        if first is None or second is None:
            return None
        if not all(x.is_integer() and 0 <= x < 2**20 for x in (first, second)):
            return None
        return first - second if node.name == "sub" else float(first > second)

    def is_x(self, at: At) -> bool:
        """Whether a variable is x, or equals x up to rounding.

        The second case is known if both are the same array minus the same means.
        """
        found = self.node(at)
        if found.scope is self.root and found.atom is self.x:
            return True
        return self.centered is not None and self.less_its_means(at) == self.centered

    def squared(self, at: At) -> At | None:
        """Returns the array a if the variable is a^2; otherwise None."""
        node = self.node(at)
        power = node.equation.params.get("y") if node.name == "integer_pow" else None
        if node.name == "square" or power == 2:
            return node.operands[0]
        same = node.name == "mul" and node.equation.invars[0] is node.equation.invars[1]
        return node.operands[0] if same else None

    def squares(self, at: At) -> tuple[bool, _Norm | None]:
        """Returns whether a variable is a sum of squares, and the norm of x or None.

        The norm is returned if the squares of x are among the terms.
        """
        if (known := self.number(at)) is not None:
            return known >= 0 and not _is_minus_zero(known), None
        node = self.node(at)
        name, operands = node.name, node.operands if node.name else []
        if name == "broadcast_in_dim":
            sure, norm = self.squares(operands[0])
            return sure, None if norm is None else _repeated(node.equation, norm)
        # `jnp.var` and `jnp.std` select one of two cases by the test n - ddof > 0. The outcome of
        # this test is public.
        if name == "select_n" and (place := self.computed(operands[0])) is not None:
            return self.squares(operands[1 + int(place)])
        if name == "div" and (number := self.computed(operands[1])) is not None:
            sure, norm = self.squares(operands[0])
            if norm is None or not 2.0**-60 <= number <= 2.0**60:
                return False, None
            return sure, norm._replace(factor=norm.factor / math.sqrt(number))
        # A maximum is at least as large as its operand. So a lower bound on the operand is also a
        # lower bound on the maximum.
        if name == "max":
            self.loose = True
            for one, number in self.beside_numbers(node):
                if not _is_minus_zero(number):
                    return self.squares(one)
        if name == "add":
            self.loose = True
            found = list(map(self.squares, operands))
            norms = [norm for _, norm in found if norm is not None]
            # The sum may have other squares as terms, because they only make it larger. If several
            # terms are squared norms of x, all of them must be the same norm, because only one is
            # returned.
            same = bool(norms) and all(norm == norms[0] for norm in norms)
            return all(sure for sure, _ in found), norms[0] if same else None
        squared = self.squared(operands[0]) if name == "reduce_sum" else None
        if squared is None:
            return False, None
        if self.is_x(squared):
            return True, _sum_of(self.x, node.equation)
        # The other supported form: each record is reshaped to a vector and then squared.
        shape, flat = aval(self.x).shape, self.node(squared)
        rows = (shape[0], math.prod(shape[1:])) if shape else ()
        if flat.name != "reshape" or aval(flat.equation.outvars[0]).shape != rows:
            return True, None
        whole = tuple(node.equation.params["axes"]) == (1,) and self.is_x(flat.operands[0])
        return True, _Norm(1.0, tuple(range(1, len(shape))), (0,)) if whole else None

    def above(self, at: At) -> _Norm | None:
        """Returns a `_Norm` with factor alpha if `at` >= alpha * norm of `self.x`, else None."""
        node = self.node(at)
        if node.name == "sqrt":
            sure, norm = self.squares(node.operands[0])
            return norm if sure else None
        if node.name in ("max", "add"):
            self.loose = True
            for one, number in self.beside_numbers(node):
                if node.name == "max" or number >= 0:
                    return self.above(one)
        return self.moved(node, self.above)

    def below_reciprocal(self, at: At) -> _Norm | None:
        """Returns a `_Norm` with factor beta if `at` <= beta / norm of `self.x`, else None."""
        node = self.node(at)
        if node.name == "min":
            for one, number in self.beside_numbers(node):
                # A negative factor would turn the upper bound into a lower bound.
                if number > 0:
                    return self.below_reciprocal(one)
        if (chosen := self.when_long(node)) is not None:
            # `short` is chosen only if the norm of x is at most `most.factor`. It multiplies x by
            # the constant `number`. So the norm of the product is at most `number * most.factor`.
            most, short, long = chosen
            number, norm = self.number(short), self.below_reciprocal(long)
            if number is None or number <= 0 or norm is None or not norm.is_of(most):
                return None
            return norm._replace(factor=max(norm.factor, number * most.factor))
        if node.name == "rsqrt":
            sure, norm = self.squares(node.operands[0])
            return norm._replace(factor=1 / norm.factor) if norm is not None and sure else None
        if node.name == "div" and (number := self.number(node.operands[0])) is not None:
            norm = self.above(node.operands[1])
            if norm is None or number < 0:
                return None
            return norm._replace(factor=number / norm.factor)
        return self.moved(node, self.below_reciprocal)

    def when_long(self, node: Node) -> "tuple[_Norm, At, At] | None":
        """Analyzes a `select` that compares the norm of x with a public number, up to rounding.

        Returns:
            (norm, short, long), or None for all other operations. `short` is the case for a small
            norm, and `long` for a large norm. `norm.factor` is the largest norm for which `short`
            is chosen. If this call sets `loose`, `long` may also be chosen for a smaller norm.
        """
        if node.name != "select_n" or len(node.operands) != 3:
            return None
        at, *cases = node.operands
        outer = which = self.node(at)
        if outer.name == "broadcast_in_dim":
            which = self.node(outer.operands[0])
        above = which.name in ("gt", "ge")
        if not above and which.name not in ("lt", "le"):
            return None
        sides = which.operands if above else which.operands[::-1]
        for norm_at, number_at, order in ((*sides, 1), (*sides[::-1], -1)):
            self.loose = False
            norm, number = self.above(norm_at), self.factor(number_at)
            if norm is not None and number is not None:
                norm = norm._replace(factor=number / norm.factor)
                norm = norm if outer is which else _repeated(outer.equation, norm)
                short, long = cases[::order]
                return norm, short, long
        return None

    def multiple(self, at: At) -> float | None:
        """Returns c if a variable is c x for a public number c > 0; otherwise None."""
        if self.is_x(at):
            return 1.0
        node = self.node(at)
        for one, other in (node.operands, node.operands[::-1]) if node.name == "mul" else ():
            number = self.factor(other)
            if self.is_x(one) and number is not None:
                return number
        return None

    def shortened(self, at: At) -> "tuple[_Norm, At, float | None] | None":
        """Returns (norm, divisor, factor) if a variable is factor * x / divisor; otherwise None.

        The divisor must be at least alpha ||x|| for some alpha > 0. If the variable is instead x
        times a number f <= beta / ||x||, the result is (norm, f, None). `norm.factor` bounds the
        norm of the variable: factor / alpha in the first case, and beta in the second.
        """
        node = self.node(at)
        if node.name == "div" and (factor := self.multiple(node.operands[0])) is not None:
            norm = self.above(node.operands[1])
            if norm is not None:
                return norm._replace(factor=factor / norm.factor), node.operands[1], factor
        for one, other in (node.operands, node.operands[::-1]) if node.name == "mul" else ():
            if self.is_x(one) and (norm := self.below_reciprocal(other)) is not None:
                return norm, other, None
        return None

    def moved(self, node: Node, of: Callable[[At], _Norm | None]) -> _Norm | None:
        """Finds the norm or sum in the operand of an operation that scales or repeats an array.

        Args:
            node: the operation.
            of: a function that finds the norm or sum in a variable.
        """
        name = node.name
        if name in OPERATIONS and OPERATIONS[name].rule is layout.same:
            return of(node.operands[0])
        if name not in ("mul", "div", "broadcast_in_dim"):
            return None
        scaled, *by = node.operands
        if name == "mul" and self.number(scaled) is not None:
            scaled, by = by[0], [scaled]
        if (norm := of(scaled)) is None or name == "broadcast_in_dim":
            return None if norm is None else _repeated(node.equation, norm)
        if (number := self.factor(by[0])) is None:
            return None
        return norm._replace(factor=norm.factor / number if name == "div" else norm.factor * number)


def clipped(scope: Scope, equation: Equation, _: Any) -> Abstract | None:
    """Returns the value of a quotient or product that clips the norm of an operand, or None."""
    divides = equation.primitive.name == "div"

    def along(norm: _Norm, x: Abstract, by: Abstract) -> bool:
        return _is_along(norm, x, by.shape)

    pairs = [equation.invars] if divides else [equation.invars, equation.invars[::-1]]
    for first, second in pairs:
        found = _clipped_by(scope, first, second, along, divides=divides)
        if found is not None:
            return _joined(scope, equation, found)
    return None


def _joined(scope: Scope, equation: Equation, found: Abstract) -> Abstract:
    """Returns `found` with `pending` set, because the rule that sets `pending` may have refused."""
    xs = [x for x in map(scope.value, equation.invars) if x is not None]
    name = "select_n" if called(equation) else equation.primitive.name
    pending = carried(OPERATIONS[name].merging, equation.params, xs, found)
    return dataclasses.replace(found, pending=pending)


def _clipped_by(
    scope: Scope, first: Atom, second: Atom, along: Callable[[_Norm, Abstract, Abstract], bool], *,
    divides: bool,
) -> Abstract | None:  # fmt: skip
    """Returns the value of x / v or x f if this clips the norm of x; otherwise None.

    Args:
        scope: the program.
        first: the variable x.
        second: the variable v or f.
        along: says whether each group of entries of x is scaled by the norm of the same group.
        divides: whether x is divided.
    """
    x, by = scope.value(first), scope.value(second)
    if x is None or by is None or x.axis is None or x.is_public or x.dtype.kind != "f":
        return None
    search = Search(scope, x=first)
    norm = (search.above if divides else search.below_reciprocal)((second, scope))
    # The search shows only that the divisor is at least alpha ||x||, or the factor at most beta /
    # ||x||. The divisor may still be 0, and the factor may be far below 0. Other rules handle that.
    if norm is None or by.low.min() <= 0 or not along(norm, x, by):
        return None
    slack = _apart(search, x, norm)
    return None if slack is None else _clip(x, by, norm, slack, divides=divides)


def _is_along(norm: _Norm, x: Abstract, shape: tuple[int, ...]) -> bool:
    """Whether an array of norms contains, at each index, the norm of the slice of x at this index.

    `shape` is the shape of the array of norms. A slice of x extends along the axes `norm.summed`,
    and must be in one record.
    """
    if len(shape) != len(x.shape) or len(norm.places) != len(shape) or x.axis in norm.summed:
        return False
    groups = [k for k, size in enumerate(x.shape) if k not in norm.summed and size > 1]
    return all(norm.places[k] == k and shape[k] == x.shape[k] for k in groups)


def _apart(search: Search, x: Abstract, norm: _Norm) -> float | None:
    """Bounds the difference of two norms: of x, and of the array y that the program squares.

    Both arrays are equal up to rounding. If y is x, a compiler may compute x twice, with different
    roundings. Otherwise, x and y are computed separately, each as an array a minus the means of a.
    Let M be the largest magnitude in a, k the number of entries in a mean, and d the difference of
    two computations of an entry of a. The error of an entry of x is at most (gamma_k + 16 u) M + d.
    """
    count = math.prod(x.shape[axis] for axis in norm.summed)
    uses = x.apart * math.sqrt(count)
    if search.centered is None:
        return uses
    whole, axes = search.centered
    if (values := search.root.value(whole)) is None or not values.is_finite:
        return None
    k = math.prod(values.shape[axis] for axis in axes)
    units = rounding.sum_units(k, values.dtype) + 16 * rounding.unit(values.dtype)
    entry = units * float(values.magnitude.max()) + 16 * rounding.tiny(values.dtype) * (k + 1)
    entry += values.apart
    return uses + 2.1 * entry * math.sqrt(count) if units <= 2.0**-8 else None


def sum_of_clipped(scope: Scope, equation: Equation, walked: Abstract | None) -> Abstract | None:
    """Returns the value of sum_i f_i x_i over records, if f_i x_i clips record i by its norm."""
    contracted, batch = equation.params["dimension_numbers"]
    if walked is None or contracted != ((0,), (0,)) or batch != ((), ()):
        return None

    def along(norm: _Norm, x: Abstract, by: Abstract) -> bool:
        by_record = (x.axis, by.axis, len(by.shape)) == (0, 0, 1)
        return by_record and norm[1:] == (tuple(range(1, len(x.shape))), (0,))

    for first, second in (equation.invars, equation.invars[::-1]):
        rows = _clipped_by(scope, first, second, along, divides=False)
        if rows is not None and rows.dtype == walked.dtype:
            operands: Any = scope.value(first), scope.value(second)
            pending = carried(OPERATIONS["mul"].merging, {}, operands, rows)
            return sum_over(dataclasses.replace(rows, pending=pending), [0])
    return None


def clipped_by_choice(scope: Scope, equation: Equation, _: Any) -> Abstract | None:
    """Returns the value of where(||x|| > c, x / ||x||, x), whose rows have bounded norms.

    Each row either has a norm of at most c, or is a unit vector.

    The quotient may be NaN where the norm is 0, but it is not chosen there. Some conditions may be
    true even if x is 0, such as max(||x||, 5) > c. Then the divisor must be above 0.
    """
    output = equation.outvars[0]
    for atom in equation.invars:
        x = scope.value(atom)
        if x is None or x.axis is None or x.is_public or x.dtype.kind != "f":
            continue
        if x.shape != aval(output).shape:
            continue
        search = Search(scope, x=atom)
        chosen = search.when_long(search.node((output, scope)))
        loose = search.loose
        if chosen is None or not search.is_x(chosen[1]):
            continue
        most, _, long = chosen
        found = search.shortened(long)
        by = found[1][1].value(found[1][0]) if found else None
        if found is None or by is None or not found[0].is_of(most):
            continue
        if not _is_along(most, x, x.shape) or (slack := _apart(search, x, most)) is None:
            continue
        length = max(found[0].factor, most.factor)
        least, lowest, factor = most.factor / 2, float(by.low.min()), found[2]
        if loose and (factor is None or lowest <= 0):
            continue
        if loose and factor is not None:  # The divisor alone bounds the error of the quotient.
            least = min(least, lowest * found[0].factor / factor)
        radius = _radius(x, most, slack, least, length)
        if radius is not None:
            return _joined(scope, equation, _in_ball(x, by, most, radius))
    return None


def at_most_one_over_the_norm(
    scope: Scope, equation: Equation, walked: Abstract | None
) -> Abstract | None:
    """Returns the value of min(a, c / ||x||), whose quotient is infinite where the norm is 0.

    The root of a sum of squares is never -0. So the quotient is c / ||x|| > 0 or +infinity.
    """
    search = Search(scope, x=equation.outvars[0])
    for one, other in (equation.invars, equation.invars[::-1]) if walked is None else ():
        number, node = search.number((one, scope)), search.node((other, scope))
        if number is None or number <= 0 or node.name != "div" or node.scope is not scope:
            continue
        top, by = search.number(node.operands[0]), node.equation.invars[1]
        v = scope.value(by)
        if top is None or not 2.0**-30 <= top <= 2.0**30 or v is None or v.nan:
            continue
        under = search.node((by, scope))
        if under.name != "sqrt" or not search.squares(under.operands[0])[0] or v.low.min() < 0:
            continue
        theta = rounding.DIVISION * rounding.unit(v.dtype)
        low = np.minimum(number, top / (v.high + rounding.tiny(v.dtype)) * (1 - 2 * theta))
        high = np.full((1,) * len(v.shape), number)
        return _joined(scope, equation, changing_with(v, low, high, anywhere))
    return None


def _radius(x: Abstract, norm: _Norm, slack: float, least: float, length: float) -> float | None:
    """Returns `length` times a bound on ||x|| / v, where v is the computed norm; None if unknown.

    The bound is valid for v >= `least`. Without rounding, it would be 1.
    """
    _, theta, vanished = _errors(x, norm)
    if theta > 2.0**-8 or vanished + slack > least * 2.0**-6:
        return None
    return (length * (1 + (vanished + slack) / least)) / (1 - 2 * theta)


def _errors(x: Abstract, norm: _Norm) -> tuple[int, float, float]:
    """Returns (count, theta, vanished): how many squares a norm of x adds, and two error bounds.

    The relative error of the norm is at most theta, if no square is flushed to 0. Tiny squares that
    are flushed to 0 reduce the norm by at most `vanished`.
    """
    count = math.prod(x.shape[k] for k in norm.summed)
    # `elementary` covers one rsqrt, and `DIVISION` covers every other operation.
    units = rounding.DIVISION * MOST_STEPS + rounding.elementary(x.dtype)
    theta = rounding.sum_units(count, x.dtype) + units * rounding.unit(x.dtype)
    return count, theta, 2 * math.sqrt(2 * count * rounding.tiny(x.dtype))


def _clip(
    x: Abstract, by: Abstract, norm: _Norm, slack: float, *, divides: bool
) -> Abstract | None:
    """Returns the value of the clipped array. Its bound includes the rounding of the norm.

    The norm has a relative error theta, and tiny squares may underflow.
    """
    _, theta, vanished = _errors(x, norm)
    if theta > 2.0**-8:
        return None
    if divides:
        radius = (1 / norm.factor + (vanished + slack) / float(by.low.min())) / (1 - theta)
    else:
        # If the norm of a group is below `short`, the norm of the product is below short * most. In
        # a group with a larger norm, the underflow of squares is negligible.
        short = 2.0**20 * vanished
        most = float(by.high.max()) * (1 + theta)
        radius = max(norm.factor / (1 - 2 * theta - 2.0**-20), short * most) + slack * most
    return _in_ball(x, by, norm, radius * (1 + theta))


def _in_ball(x: Abstract, by: Abstract, norm: _Norm, radius: float) -> Abstract:
    """Returns an array like x, in which each group of entries has a norm of at most `radius`."""
    count = math.prod(x.shape[k] for k in norm.summed)
    groups = math.prod(s for k, s in enumerate(x.shape) if k not in norm.summed and k != x.axis)
    radius = float(rounding.up(radius)) + 64 * count * rounding.tiny(x.dtype)
    ends = np.full((1,) * len(x.shape), radius)
    row = float(rounding.up(radius * math.sqrt(groups)))

    def moved(*ds: Difference) -> Moves:
        still = all(d.is_zero for d in ds)
        return (ends * 0, 0.0, 0.0) if still else (2 * ends, math.inf, 2 * row)

    return make(
        x.shape, x.dtype, -ends, ends, x.axis, moved(x.changed, by.changed),
        moved(x.others, by.others, *([] if by.axis == x.axis else [by.changed])), l2_of_row=row,
    )  # fmt: skip


def projected(scope: Scope, equation: Equation, walked: Abstract | None) -> Abstract | None:
    """Returns the value of y = x / max(f ||x||, c), where ||x|| is the norm of the whole array.

    Here y is 1 / c times the projection of x to the ball of radius c / f. A projection to a convex
    set does not increase distances in l2. The norm has a relative error theta, tiny squares may
    underflow, and a compiler may compute x again for the norm, with another rounding.
    """
    first, second = equation.invars
    x = scope.value(first)
    if walked is None or x is None or x.axis is not None or x.is_public or x.dtype.kind != "f":
        return None
    search = Search(scope, x=first)
    node = search.node((second, scope))
    if node.name == "broadcast_in_dim":
        node = search.node(node.operands[0])
    for one, number in search.beside_numbers(node) if node.name == "max" else ():
        if not 2.0**-30 <= number <= 2.0**30:
            continue
        norm = search.above(one)
        if norm is None or search.loose or norm.summed != tuple(range(len(x.shape))):
            continue
        count, theta, vanished = _errors(x, norm)
        slack, least = x.apart * math.sqrt(count), number / norm.factor
        relative = 2 * theta + 2 * (vanished + slack) / least
        if relative > 2.0**-6 or search.centered is not None:
            return None
        radius = float(rounding.up((1 + 2 * relative) / norm.factor))
        off = 2 * relative * radius + 64 * count * rounding.tiny(x.dtype) * (1 + 1 / number)
        l2 = float(rounding.up(x.others.l2 / number * (1 + 2.0**-30) + 2 * off))
        ends, moved = np.full((1,) * len(x.shape), radius), (np.asarray(l2), math.inf, l2)
        return make(x.shape, x.dtype, -ends, ends, None, moved, moved, l2_of_row=radius)
    return None
