"""Bounds by slopes: g(x) equals g(middle) plus slopes times x - middle, up to rounding.

Intervals do not record which numbers change together, but slopes do. So the excess of a bound
decreases with the square of the width of the box. For the exact value v of an array, a `Form`
states

    v(x) - v(middle) = sum_j s_j (x_j - middle_j), with s_j in `slopes`, for every x in the box,

and that the computed value is within `off` of v(x). docs/proofs/boxes.md has the proof.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._walks import Equation, names

Ends = tuple[Any, Any]  # Lower and upper endpoints, as arrays of the same shape.
Bind = Callable[..., Any]
# A bound on the rounding error of slopes in float64, relative to their magnitudes.
_SLACK = 2.0**-40


def hull(candidates: Sequence[Any]) -> Ends:
    """Returns the smallest and the largest of several arrays, entry by entry."""
    return functools.reduce(jnp.minimum, candidates), functools.reduce(jnp.maximum, candidates)


def largest(ends: Ends) -> Any:
    """Returns bounds on the magnitudes of numbers between `ends`."""
    return jnp.maximum(abs(ends[0]), abs(ends[1]))


class Form(NamedTuple):
    """Bounds on one array over a box of records.

    Attributes:
        ends: the lower and upper endpoints of the computed value over the box.
        middle: the endpoints of the exact value in the middle of the box.
        slopes: the endpoints of the slopes, of shape (coordinates, *shape); None if they are
            unknown.
        off: a bound on the distance of the computed value from the exact value.
    """

    ends: Ends
    middle: Ends
    slopes: Any
    off: Any

    def ranked(self, rank: int) -> "Form":
        """Returns a scalar form reshaped to `rank` axes of length 1. Other forms are unchanged."""
        if np.ndim(self.ends[0]) == rank or self.slopes is None:
            return self
        more = (1,) * rank
        ends, middle = (tuple(jnp.reshape(x, more) for x in y) for y in (self.ends, self.middle))
        slopes = tuple(x.reshape(*x.shape, *more) for x in self.slopes)
        return Form(ends, middle, slopes, jnp.reshape(self.off, more))  # type: ignore[arg-type]


# (low, high, size, off) for one result. Its slopes are between `low` and `high`. The rounding error
# of `low` and `high` is at most `_SLACK * size`. The computed result is within `off` of the exact
# one.
Sloped = tuple[Any, Any, Any, Any]


class Sloping(NamedTuple):
    """An operation, with bounds on its operands and its result over a box of records.

    Attributes:
        equation: the operation.
        forms: the endpoints and slopes of each operand.
        bind: computes the operation in float64.
        out: the endpoints of its result over the box.
        middle: the endpoints of its result for the record in the middle of the box.
    """

    equation: Equation
    forms: Sequence[Form]
    bind: Bind
    out: Ends
    middle: Ends

    @property
    def ranked(self) -> list[Form]:
        """The forms, with scalars reshaped to the rank of the result."""
        return [f.ranked(self.out[0].ndim) for f in self.forms]


def sloped(op: Sloping) -> tuple[Ends, Any] | None:
    """Returns the slopes of a result, and a bound on the error that it inherits from the operands.

    The rounding error of the operation is not included. Slopes and bound are widened, to cover
    their own rounding in float64. The result is None if slopes are unknown.
    """
    name = op.equation.primitive.name
    sloping = op.forms[1:] if name == "select_n" else op.forms
    if name not in _RULES or any(f.slopes is None for f in sloping):
        return None
    if (found := _RULES[name](op)) is None:
        return None
    down, up, size, off = found
    return (down - _SLACK * size, up + _SLACK * size), off * (1 + _SLACK)


def tightened(ends: Ends, middle: Ends, slopes: Ends, off: Any, radii: Any) -> Ends:
    """Returns the endpoints, intersected with the endpoints that follow from the slopes.

    `radii` is half the width of the box in each coordinate. It broadcasts against the slopes.
    """
    down, up = slopes
    reach = (jnp.maximum(abs(down), abs(up)) * radii).sum(0) * (1 + _SLACK) + off * (1 + _SLACK)
    low, high = middle[0] - reach, middle[1] + reach
    # If a new endpoint is NaN or infinite, the old one is returned.
    return jnp.where(low > ends[0], low, ends[0]), jnp.where(high < ends[1], high, ends[1])


def _linear(op: Sloping) -> Sloped:
    """Returns the slopes of a sum or a rearrangement: the same operation, applied to slopes."""
    each = jax.vmap(op.bind)
    slopes = [f.slopes for f in op.forms if f.slopes is not None]
    down, up, size = (each(*xs) for xs in zip(*((*s, largest(s)) for s in slopes), strict=True))
    return down, up, size, op.bind(*(f.off for f in op.forms))


def _difference(op: Sloping) -> Sloped:
    first, second = op.ranked
    (a, b), (c, d) = first.slopes, second.slopes
    return a - d, b - c, largest(first.slopes) + largest(second.slopes), first.off + second.off


def _negative(op: Sloping) -> Sloped:
    (form,) = op.forms
    down, up = form.slopes
    return -up, -down, 0.0, form.off


def _scaled(factor: Ends, slopes: Ends) -> Ends:
    return hull([x * s for x in factor for s in slopes])


def _product(op: Sloping) -> Sloped:
    """Returns the slopes of a product.

    Let c be the middle of the box. Then

        a(x) b(x) - a(c) b(c) = a(x) (b(x) - b(c)) + b(c) (a(x) - a(c)).
    """
    a, b = op.ranked
    first, second = _scaled(a.ends, b.slopes), _scaled(b.middle, a.slopes)
    size = largest(first) + largest(second)
    off = largest(a.ends) * b.off + largest(b.ends) * a.off
    return first[0] + second[0], first[1] + second[1], size, off


def _quotient(op: Sloping) -> Sloped:
    """Returns the slopes of a quotient.

    Let c be the middle of the box, and q = a(c) / b(c). Then

        a(x) / b(x) - q = (a(x) - a(c) - q (b(x) - b(c))) / b(x).
    """
    a, b = op.ranked
    less = _scaled(op.middle, b.slopes)
    top = a.slopes[0] - less[1], a.slopes[1] - less[0]
    inverse = hull([1 / end for end in b.ends])
    found, most = _scaled(inverse, top), largest(inverse)
    size = most * (largest(a.slopes) + largest(less))
    return *found, size, most * (a.off + largest(op.out) * b.off)


def _contraction(op: Sloping) -> Sloped | None:
    """Returns the slopes of the product of an array and a constant matrix.

    The result is None for all other products.
    """
    constants = [f.ends[0] is f.ends[1] for f in op.forms]
    if constants.count(True) != 1:
        return None
    place = constants.index(False)
    form, matrix = op.forms[place], op.forms[1 - place].ends[0]

    def times(factor: Any) -> Bind:
        return lambda x: op.bind(x, factor) if place == 0 else op.bind(factor, x)

    above, below = (jax.vmap(times(x)) for x in (jnp.maximum(matrix, 0), jnp.minimum(matrix, 0)))
    down, up = form.slopes
    size = jax.vmap(times(abs(matrix)))(largest(form.slopes))
    off = times(abs(matrix))(form.off)
    return above(down) + below(up), above(up) + below(down), size, off


def _curve(op: Sloping) -> Sloped | None:
    """Returns the slopes of a function whose derivative is monotone on both sides of 0.

    On each side of 0, the function is convex or concave, so its slope between two points increases
    with both points, or decreases with both.
    """
    form, *others = op.forms
    # The exponent of a power must be a constant.
    if any(x.ends[0] is not x.ends[1] for x in others):
        return None
    form, exponents = form.ranked(op.out[0].ndim), [x.ends[0] for x in others]

    def function(x: Any) -> Any:
        return op.bind(x, *exponents)

    def derivative(x: Any) -> Any:
        return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]

    low, high = form.ends
    down, up = hull([derivative(x) for x in (low, jnp.clip(0.0, low, high), high)])
    centers = [jnp.clip(x, low, high) for x in form.middle]
    pairs = zip((low, high), centers, strict=True)
    below, above = hull([x for pair in pairs for x in _between(function, *pair)])
    bent = jnp.zeros(low.shape, bool) if _is_convex(op.equation) else (low < 0) & (high > 0)
    # A slope of NaN, for example between two equal points, is replaced by the derivatives.
    down = jnp.where(~bent & (below > down), below, down)
    return _by((down, jnp.where(~bent & (above < up), above, up)), form)


def _is_convex(equation: Equation) -> bool:
    """Whether a function or its negative is convex on all numbers where it is defined."""
    if equation.primitive.name == "integer_pow":
        return equation.params["y"] in (2, 4)
    return equation.primitive.name in _CONVEX


def _between(function: Bind, x: Any, y: Any) -> Ends:
    """Returns bounds on the slope of a function between two points, including rounding."""
    first, second, width = function(x), function(y), x - y
    slope = (first - second) / width
    # The slack covers the rounding errors of both points and of both values.
    values = largest((first, second)) + abs(slope) * largest((x, y))
    slack = _SLACK * (abs(slope) + values / abs(width))
    return slope - slack, slope + slack


def _by(factor: Ends, form: Form) -> Sloped:
    """Returns the slopes of a function of one array whose derivative is in an interval."""
    # This covers the rounding error of the derivative.
    slack = 2.0**-36 * (1 + largest(factor))
    factor = factor[0] - slack, factor[1] + slack
    found = _scaled(factor, form.slopes)
    return *found, largest(found), largest(factor) * form.off


def _wave(op: Sloping) -> Sloped:
    """Returns the slopes of a sine or cosine f.

    Because |f''| <= 1, f' differs from its value in the middle of an interval by at most the radius
    of the interval.
    """
    (form,) = op.forms
    low, high = form.ends
    middle = (low + high) / 2
    slope = jax.jvp(op.bind, (middle,), (jnp.ones_like(middle),))[1]
    radius = (high - low) / 2 + 2.0**-30
    return _by((jnp.maximum(slope - radius, -1), jnp.minimum(slope + radius, 1)), form)


def _absolute(op: Sloping) -> Sloped:
    (form,) = op.forms
    low, high = form.ends
    return _by((jnp.where(low >= 0, 1.0, -1.0), jnp.where(high <= 0, -1.0, 1.0)), form)


def _larger(op: Sloping) -> Sloped:
    """Returns the slopes of a maximum or minimum of two arrays.

    Each slope is that of an operand, or an average of the operands' slopes.
    """
    a, b = op.ranked
    first, second = a.ends[0] >= b.ends[1], b.ends[0] >= a.ends[1]
    if op.equation.primitive.name == "min":
        first, second = second, first
    both = hull([*a.slopes, *b.slopes])
    down, up = (
        jnp.where(first, x, jnp.where(second, y, z))
        for x, y, z in zip(a.slopes, b.slopes, both, strict=True)
    )
    return down, up, 0.0, jnp.maximum(a.off, b.off)


def _selected(op: Sloping) -> Sloped | None:
    """Returns the slopes of a `select_n`; they are infinite where its boolean is not known."""
    (surely, maybe), *cases = op.forms[0].ends, *op.ranked[1:]
    if surely.dtype != bool or len(cases) != 2:
        return None
    a, b = cases
    unknown = (-jnp.inf, jnp.inf, jnp.inf)
    pairs = zip((*a.slopes, a.off), (*b.slopes, b.off), unknown, strict=True)
    down, up, off = (jnp.where(surely, y, jnp.where(maybe, z, x)) for x, y, z in pairs)
    return down, up, 0.0, off


def _extremum(op: Sloping) -> Sloped:
    """Returns the slopes of an extremum over axes.

    Entries that are certainly not the extreme one do not matter.
    """
    (form,) = op.forms
    axes = op.equation.params["axes"]
    low, high = (jnp.expand_dims(x, axes) for x in op.out)
    may_be = (form.ends[1] >= low) & (form.ends[0] <= high)
    later = tuple(k + 1 for k in axes)
    down = jnp.where(may_be, form.slopes[0], jnp.inf).min(later)
    up = jnp.where(may_be, form.slopes[1], -jnp.inf).max(later)
    return down, up, 0.0, form.off.max(axes)


_CURVES = names("square integer_pow exp exp2 expm1 log log1p tanh atan logistic erf sqrt rsqrt pow")
_CONVEX = names("square exp exp2 expm1 log log1p sqrt rsqrt")
_LINEAR = names(
    "add add_any broadcast_in_dim reshape squeeze transpose slice rev reduce_sum copy copy_p",
    "stop_gradient convert_element_type cumsum concatenate",
)
_RULES: dict[str, Callable[..., Sloped | None]] = {
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(_CURVES, _curve),
    **dict.fromkeys(names("sin cos"), _wave),
    **dict.fromkeys(names("max min"), _larger),
    **dict.fromkeys(names("reduce_max reduce_min"), _extremum),
    "select_n": _selected,
    "sub": _difference,
    "neg": _negative,
    "mul": _product,
    "div": _quotient,
    "dot_general": _contraction,
    "abs": _absolute,
}
