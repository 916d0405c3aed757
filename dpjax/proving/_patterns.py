"""Recognizes subprograms that compute a known function for which there is a lemma.

JAX inlines some functions, such as `jax.nn.softmax`, into the program of the caller. Other
functions, such as `jnp.var`, remain inner programs with a name. In both cases, the known function
is traced on the same shapes, and the lemma applies only if both programs have the same fingerprint.
Names only select which functions to compare with.

The gradient of `jax.nn.log_softmax`, and so of a cross entropy, contains t softmax(x), computed as
(t / sum_j exp x_j) exp x_i. JAX computes the exponentials and their sum in one inner program, and
the product in another one. So the walk marks the abstract values of these arrays: an abstract value
stands for one array.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._fingerprints import digest
from dpjax._tracing._walks import Atom, Equation, aval, called, equations, live, parts
from dpjax.proving import _lemmas as lemmas
from dpjax.proving import _norm_clips as norm_clips
from dpjax.proving import _rounding as rounding
from dpjax.proving._exact_variances import ExactVariance, planned
from dpjax.proving._layout import transpose
from dpjax.proving._operations import rearranged
from dpjax.proving._pending import flattened
from dpjax.proving._ratios import ratio
from dpjax.proving._reductions import outer
from dpjax.proving._scopes import Scope
from dpjax.proving._value import Abstract, Pending, meet


class Mark(NamedTuple):
    """Describes an array that is an intermediate result of a softmax of x.

    The array contains the exponentials exp(x - max x), or sums of exponentials over `axis`, or an
    array t divided by these sums.

    Attributes:
        x: the operand of the softmax.
        axis: the axis of the softmax.
        of: the array of exponentials that the sums add up; None if the described array itself
            contains the exponentials.
        rows: for each entry of the array, the flat index of a sum. The entry is this sum, or t
            divided by this sum. Empty if the array contains the exponentials.
        t: the numerator, if the array contains quotients; otherwise None.
    """

    x: Abstract
    axis: int
    of: Abstract | None = None
    rows: np.ndarray = np.zeros(0, int)
    t: Abstract | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sums of exponentials, if `axis` is kept with length 1."""
        return tuple(1 if k == self.axis else size for k, size in enumerate(self.x.shape))

    @property
    def is_along(self) -> bool:
        """Whether the sums in `rows` are arranged as in `exp(x).sum(axis, keepdims=True)`."""
        if self.rows.ndim != len(self.shape):
            return False
        sums = np.arange(math.prod(self.shape)).reshape(self.shape)
        return bool((self.rows == sums).all())


Marks = Mapping[Abstract, Mark]


def marked(
    name: str, params: Mapping[str, Any], operands: Sequence[Abstract], marks: Marks
) -> Mark | None:
    """Returns which part of a softmax an operation computes; None if it computes none."""
    known = [marks.get(x) for x in operands]
    if name == "div" and known[1] is not None:
        (t, total), mark = operands, known[1]
        usual = mark.of is not None and mark.t is None and t.shape == total.shape == mark.shape
        return mark._replace(t=t) if usual and mark.is_along else None
    if not known or known[0] is None:
        return None
    (x, *_), mark = operands, known[0]
    if mark.of is None:
        if name != "reduce_sum" or tuple(params["axes"]) != (mark.axis,):
            return None
        rows = np.arange(math.prod(mark.shape)).reshape(mark.shape).squeeze(mark.axis)
        return mark._replace(of=x, rows=rows)
    if name == "reduce_sum" and all(x.shape[k] == 1 for k in params["axes"]):
        return mark._replace(rows=mark.rows.squeeze(params["axes"]))
    rows = rearranged(name, params, mark.rows, operands[1:])
    return None if rows is None else mark._replace(rows=rows)


def product(name: str, operands: Sequence[Abstract], marks: Marks) -> Abstract | None:
    """Returns the value of t softmax(x); None for other operations."""
    for one, other in (operands, operands[::-1]) if name == "mul" else ():
        mark = marks.get(other)
        if mark is None or mark.t is None or mark.of is not one:
            continue
        t, usual = mark.t, not (mark.t.nan or mark.t.pending.coarse) and mark.t.is_finite
        if usual and t.dtype == mark.x.dtype and mark.is_along:
            return lemmas.shared(mark.x, t, (mark.axis,))
    return None


Function = Callable[..., jax.Array]


def _names(jaxpr: jex.Jaxpr) -> list[str]:
    return [equation.primitive.name for equation in live(jaxpr)]


def _traced(function: Function, *operands: Any, **static: Any) -> jex.Jaxpr:
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    # The configuration is the same as in `Program.trace`, so that equal functions have equal
    # fingerprints.
    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        return jax.make_jaxpr(functools.partial(function, **static))(*specs).jaxpr


@functools.lru_cache(maxsize=512)
def _reference(
    function: Function, shape: tuple[int, ...], dtype: np.dtype, x64: bool, **static: Any
) -> tuple[list[str], str]:
    """Traces a function of one array. Returns the names of its operations, and its fingerprint."""
    del x64  # `x64` is only a key of the cache, because tracing depends on it.
    whole = _traced(function, jax.ShapeDtypeStruct(shape, dtype), **static)
    # A function under `jit` is traced to a single operation, which calls its inner program.
    while len(whole.eqns) == 1 and (inner := called(whole.eqns[0])):
        whole, _ = parts(inner)
    return _names(whole), digest(whole)


def _is_program_of(function: Function, part: jex.Jaxpr | None, x: Abstract, **static: Any) -> bool:
    """Whether a subprogram is the program of `function` applied to x."""
    if part is None:
        return False
    x64 = jnp.result_type(float) == jnp.float64
    names, fingerprint = _reference(function, x.shape, x.dtype, x64, **static)
    return names == _names(part) and fingerprint == digest(part)


class Found(NamedTuple):
    """The result of a lemma that applies to a subprogram.

    Attributes:
        name: the name of the lemma.
        value: the abstract value of the result; None if rounding errors are too large for the
            lemma.
        variance: if the subprogram computes a variance or covariance, the exact variance that may
            replace the subprogram.
        of: the variable whose variance is computed.
    """

    name: str
    value: Abstract | None
    variance: ExactVariance | None = None
    of: Any = None


def of_call(equation: Equation, operands: Sequence[Abstract]) -> Found | None:
    """Returns what a lemma says about the result of an inner program; None if none applies."""
    name = str(equation.params.get("name"))
    if name == "searchsorted":
        return _searched(equation, operands)
    if name == "_interp":
        return _interpolated(equation, operands)
    if name not in _CALLED or not operands:
        return None
    x, *public = operands
    given, x = x, lemmas.as_records(x)
    if not _is_of_records(x) or not all(p.is_known and not p.shape for p in public):
        return None
    expected = aval(equation.outvars[0])
    for function, lemma, divisor in _CALLED[name]:
        if _is_call_in(function, equation, x):
            numbers = [float(p.low) for p in public]
            found, exact = lemma(x, *numbers), None
            if found and (expected.shape, expected.dtype) != (found.shape, found.dtype):
                return None
            if divisor is not None and given is x:
                exact = planned(x, divisor(x.n, *numbers), matrix=name == "cov")
            if found:
                found = dataclasses.replace(found, pending=_of_mean(x, found, *numbers))
            return Found(name, found, exact, equation.invars[0])
    return None


def _is_call_in(function: Function, equation: Equation, *operands: Abstract, **static: Any) -> bool:
    """Whether `function` calls the same inner program as `equation`, under the same name."""
    name, inner = equation.params["name"], called(equation)
    reference = equations(_traced(function, *operands, **static))
    calls = [called(e) for e in reference if e.params.get("name") == name]
    return len(calls) == 1 and digest(calls[0]) == digest(inner)


def _searched(equation: Equation, operands: Sequence[Abstract]) -> Found | None:
    """Returns the value of `jnp.searchsorted`; None if no lemma applies.

    The lemma supports `searchsorted(levels, numbers)` in two cases. In the first case, the levels
    are public. In the second case, the levels are sorted records, and the numbers are public.
    """
    if len(operands) != 2 or not all(y.is_finite and not y.nan for y in operands):
        return None
    levels, x = operands
    if not levels.is_public and not (x.is_public and math.isfinite(levels.replaced)):
        return None
    if len(levels.shape) != 1 or levels.dtype != x.dtype:
        return None
    sides = ("left", "right")
    found = any(_is_call_in(jnp.searchsorted, equation, levels, x, side=side) for side in sides)
    return Found("searchsorted", lemmas.place_among(x, levels)) if found else None


def _interpolated(equation: Equation, operands: Sequence[Abstract]) -> Found | None:
    """Returns the value of `jnp.interp` between public points; None if no lemma applies."""
    if len(operands) != 3 or len({x.dtype for x in operands}) != 1:
        return None
    x, places, heights = operands
    if not x.is_finite or x.nan or not (places.is_known and heights.is_known):
        return None
    if not _is_call_in(jnp.interp, equation, *operands):
        return None
    points = (np.broadcast_to(p.low, p.shape) for p in (places, heights))
    return Found("interpolation", lemmas.interpolated(x, *points))


def _of_mean(x: Abstract, found: Abstract, correction: float = 0.0) -> Pending:
    """Returns the `Pending` of a mean of squares or products.

    The mean is a sum divided by n - correction.
    """
    load, divisor = float(found.magnitude.max()), x.n - correction
    bits = 2 * x.pending.bits + abs(math.log2(divisor)) + 1
    return Pending.of_sum(x.n, load).having(
        terms=x.n, weight=load, factor=1 / divisor, bits=bits, shift=x.pending.shift
    )


def improved(scope: Scope, equation: Equation, walked: Abstract | None) -> Found | None:
    """Returns a tighter value of an operation, by a lemma about the operations that lead to it.

    The result is None if no lemma applies.

    Args:
        scope: the program that contains the operation.
        equation: the operation.
        walked: the value by the operation's own rule; None if the rule refused.
    """
    # Lemmas assume that every use of an array reads the same numbers, to within `apart`. For 16-bit
    # numbers, this may be false. Lemmas do not cover NaN, either.
    operands = map(scope.value, equation.invars)
    if any(x is not None and (x.pending.coarse or x.nan) for x in operands):
        return None
    operation = equation.primitive.name
    if called(equation):
        operation = "jit" if len(equation.outvars) == 1 else ""
    for name, lemma in _LEMMAS.get(operation, ()):
        if (found := lemma(scope, equation, walked)) is None:
            continue
        known = found if isinstance(found, Found) else Found(name, found)
        if walked is None or known.value is None:
            return known._replace(value=known.value or walked)
        return known._replace(value=meeting(walked, known.value))
    return None


def _farthest(scope: Scope, equation: Equation, walked: Abstract | None) -> Abstract | None:
    """Returns the value of max |s - c|, max (s - c) or max (c - s); None for other maxima.

    Here s is a sorted vector, and c is a public vector.
    """
    if walked is None or walked.shape:
        return None
    if (distance := _distance(scope, equation.invars[0])) is None:
        return None
    moved = np.asarray(distance), math.inf, math.inf
    return meet(walked, changed=moved, others=moved)


def _distance(scope: Scope, atom: Atom) -> float | None:
    """Bounds how much the largest entry of s - c, c - s or |s - c| changes, for a sorted vector s.

    The vector c is public. The bound is also valid for the maximum of several such arrays. The
    result is None for other arrays.
    """
    made = scope.definition(atom)
    if made is None:
        return None
    if made.primitive.name == "max":
        found = [_distance(scope, x) for x in made.invars]
        return None if None in found else max(found)  # type: ignore[type-var]
    inner = scope.definition(made.invars[0]) if made.primitive.name == "abs" else made
    if inner is None or inner.primitive.name != "sub":
        return None
    first, second = map(scope.value, inner.invars)
    for s, c, sign in ((first, second, 1), (second, first, -1)):
        if s is None or c is None or not c.is_public or s.shape != c.shape:
            continue
        if math.isfinite(s.replaced) and len(s.shape) == 1 and not (s.nan or s.pending.coarse):
            return lemmas.largest_distance(s, c, 0 if inner is not made else sign)
    return None


def _outer_products(scope: Scope, equation: Equation, walked: Abstract | None) -> Abstract | None:
    """Returns the value of a product whose row for each record is an outer product a b^T.

    Here a and b are the record's rows in two arrays, which the program repeats along different
    axes.

    The l1 and l2 norms of a b^T are products of the norms of a and b. The rounding of each entry is
    added.
    """
    made = list(map(scope.definition, equation.invars))
    if any(e is None or e.primitive.name != "broadcast_in_dim" for e in made):
        return None
    a, b = (scope.value(e.invars[0]) for e in made if e)
    if a is None or b is None or a.axis is None or b.axis is None:
        return None
    if walked is None or walked.axis is None:
        return None
    places = [e.params["broadcast_dimensions"] for e in made if e]
    for x, at in zip((a, b), places, strict=True):
        whole = all(walked.shape[k] == size for k, size in zip(at, x.shape, strict=True))
        if not whole or at[x.axis] != walked.axis:
            return None
    if set(places[0]) & set(places[1]) != {walked.axis}:
        return None
    moves = outer(a, b, [a.axis], [b.axis])
    if moves is None or len(set(places[0]) | set(places[1])) != len(walked.shape):
        return None
    entries, size = math.prod(walked.shape) // walked.n, float(walked.magnitude.max())
    tiny = 8 * rounding.tiny(walked.dtype) * (1 + float(a.magnitude.max() + b.magnitude.max()))
    slip = rounding.ARITHMETIC * rounding.unit(walked.dtype) * size + tiny
    slips = slip * entries, slip * math.sqrt(entries)
    rows = a.l1_of_row * b.l1_of_row, a.l2_of_row * b.l2_of_row
    exact = moves[0] + 2 * slips[0], moves[1] + 2 * slips[1], rows[0] + slips[0], rows[1] + slips[1]
    l1, l2, row1, row2 = (float(rounding.up(bound * (1 + 2.0**-30))) for bound in exact)
    changed = np.asarray(math.inf), l1, l2
    return meet(walked, changed=changed, l1_of_row=row1, l2_of_row=row2)


def meeting(first: Abstract, second: Abstract) -> Abstract:
    """Returns the intersection of two abstract values of one array: the tighter of each bound.

    The pending operations are those of the first value.
    """
    if first.axis != second.axis:
        return dataclasses.replace(second, pending=first.pending)
    moves = second.changed.moves, second.others.moves
    return meet(
        first, second.low, second.high, *moves, l1_of_row=second.l1_of_row,
        l2_of_row=second.l2_of_row, apart=second.apart,
    )  # fmt: skip


def _argument(
    function: Function, scope: Scope, atom: Atom
) -> tuple[Abstract, tuple[int, ...], jex.Var] | None:
    """Returns (x, axes, variable) if `atom` is the result of `function` on x; otherwise None.

    `function` is softmax or similar: it first takes a maximum of x over `axes`. In the program, x
    is the value of `variable`.
    """
    for maximum in scope.sources(atom, "reduce_max"):
        variable, axes = maximum.invars[0], tuple(maximum.params["axes"])
        x = scope.value(variable)
        if x is None or x.is_public or x.nan or not x.is_finite:
            continue
        if x.dtype.kind != "f" or x.pending.coarse:
            continue
        part = scope.between(variable, atom)
        axis: Any = axes[0] if len(axes) == 1 else axes
        if _is_program_of(function, part, x, axis=axis):
            return x, axes, variable  # type: ignore[return-value]
    return None


def _of_a_maximum(
    function: Function,
    bound: Callable[..., Abstract | None],
    scope: Scope,
    equation: Equation,
    _: Any,
) -> Abstract | None:
    """Returns the value of softmax or a similar function; `bound` computes it by a lemma."""
    made = aval(equation.outvars[0])
    if (known := _argument(function, scope, equation.outvars[0])) is None:
        return None
    found = bound(*known[:2])
    if found is None or (found.shape, found.dtype) != (tuple(made.shape), made.dtype):
        return None
    # The denominator is a sum of exponentials, each of which is at most 1.
    bits = known[0].pending.bits + math.log2(math.prod(known[0].shape)) + 1
    return dataclasses.replace(found, pending=known[0].pending.having(bits=bits, terms=1))


def _exponentials(x: jax.Array, axis: Any) -> jax.Array:
    """Returns the exponentials in `jax.nn.softmax` and in `jax.nn.log_softmax`."""
    largest = jnp.max(x, axis, initial=-jnp.inf, keepdims=True)
    return jnp.exp(x - jax.lax.stop_gradient(largest))


def exponentials_of(scope: Scope, equation: Equation) -> Mark | None:
    """Returns a mark if an operation computes the exponentials in softmax(x); otherwise None."""
    if equation.primitive.name != "exp":
        return None
    known = _argument(_exponentials, scope, equation.outvars[0])
    return Mark(known[0], *known[1]) if known and len(known[1]) == 1 else None


def _pooled(scope: Scope, equation: Equation, walked: Abstract | None) -> Abstract | None:
    """Returns the value of softmax(s) @ x, as in attention; None for other products.

    The rows of x are records, so the product averages records.
    """
    contracted, batch = equation.params["dimension_numbers"]
    if walked is None or batch != ((), ()):
        return None
    weights, records = zip(equation.invars, contracted, strict=True)
    # The order of the factors does not matter if the second one is a vector.
    turned = len(aval(equation.invars[1]).shape) == 1
    found = _means(scope, records, weights) if turned else None
    return _means(scope, weights, records) if found is None else found


def _means(scope: Scope, weights: Any, records: Any) -> Abstract | None:
    """Returns the value of softmax(s) @ x; None if no lemma applies.

    Args:
        scope: the program.
        weights: the variable of softmax(s), and the axes along which the product sums it.
        records: the variable of x, and the axes along which the product sums it.
    """
    (by, summed), (of, axes) = weights, records
    x, made, rows = scope.value(of), scope.definition(by), len(aval(by).shape)
    if rows > 2 or summed != (rows - 1,) or made is None or made.primitive.name != "div":
        return None
    if x is None or not x.is_finite or len(x.shape) > 2:
        return None
    x = transpose(x, [*axes, *(k for k in range(len(x.shape)) if k not in axes)])
    if not _is_of_records(x) or (known := _argument(jax.nn.softmax, scope, by)) is None:
        return None
    scores, axes, atom = known
    alone = rows == 1 and _is_of_records(scores)
    if axes != (rows - 1,) or not (alone or (rows == 2 and _is_of_pairs(scope, atom))):
        return None
    if x.dtype != scores.dtype or flattened(x)[0] > 1 or x.n != scores.shape[-1]:
        return None
    return lemmas.pooled(scores, x)


def _is_of_pairs(scope: Scope, atom: Atom) -> bool:
    """Whether each entry of a matrix is an entry of A B^T times a known number.

    A and B must have one row for each record. Then entry (j, k) of the matrix depends only on the
    records j and k.
    """
    made = scope.definition(atom)
    while made is not None and made.primitive.name in ("mul", "div", "transpose"):
        known = [isinstance(x, jex.Literal) or _is_known(scope.value(x)) for x in made.invars]
        if made.primitive.name == "transpose" or known == [False, True]:
            made = scope.definition(made.invars[0])
        elif known == [True, False] and made.primitive.name == "mul":
            made = scope.definition(made.invars[1])
        else:
            return False
    if made is None or made.primitive.name != "dot_general":
        return False
    contracted, batch = made.params["dimension_numbers"]
    xs = list(map(scope.value, made.invars))
    if batch != ((), ()) or any(x is None or len(x.shape) != 2 for x in xs):
        return False
    pairs: Any = zip(xs, contracted, strict=True)
    return all(x.axis == 1 - axis and x.others.is_zero and not x.nan for x, (axis,) in pairs)


def _is_known(x: Abstract | None) -> bool:
    return x is not None and x.is_known


def _variance(
    functions: Sequence[Function], bound: Callable[[Abstract], Abstract | None], scope: Scope,
    equation: Equation, walked: Abstract | None,
) -> Found | None:  # fmt: skip
    """Returns the value of a variance that the program computes without a call of `jnp.var`.

    The result is None for other operations. `bound` computes the value by a lemma.
    """
    for total in () if walked is None else scope.sources(equation.outvars[0], "reduce_sum"):
        atom, squared = total.invars[0], scope.definition(total.invars[0])
        if squared is not None and squared.primitive.name in ("integer_pow", "square", "mul"):
            atom = squared.invars[0]
        x = scope.value(atom)
        if x is None or not _is_of_records(rows := lemmas.as_records(x)):
            continue
        part = scope.between(atom, equation.outvars[0])
        if any(_is_program_of(function, part, x) for function in functions):
            exact = planned(x, x.n) if rows is x else None
            return Found("variance", bound(rows), exact, atom)
    return None


def _is_of_records(x: Abstract) -> bool:
    by_record = x.axis == 0 and x.others.is_zero and not x.nan
    return by_record and x.dtype.kind == "f" and x.is_finite and x.n > 1


def _centered(square: Function, *, keepdims: bool) -> Function:
    return lambda x: square(x - x.mean(0, keepdims=keepdims)).mean(0)


def _moments(inner: Function, outer: Function) -> Function:
    return lambda x: inner(x).mean(0) - outer(x.mean(0))


_SQUARES: tuple[Function, ...] = (lambda x: x**2, lambda x: x * x, jnp.square)
_CENTERED = [_centered(square, keepdims=k) for square in _SQUARES for k in (False, True)]
_MOMENTS = [_moments(a, b) for a in _SQUARES for b in _SQUARES]
_BY_NORM = "clip by norm"
# Lemmas about functions, by the last operation of the function. A lemma gets the program, this
# operation, and the value that the operation's own rule computed.
_LEMMAS: dict[
    str, list[tuple[str, Callable[[Scope, Any, Abstract | None], Abstract | Found | None]]]
] = {
    "div": [
        (_BY_NORM, norm_clips.clipped),
        (_BY_NORM, norm_clips.projected),
        ("ratio of sums", ratio),
        ("variance", functools.partial(_variance, _CENTERED, lemmas.variance)),
        ("softmax", functools.partial(_of_a_maximum, jax.nn.softmax, lemmas.softmax)),
    ],
    "mul": [(_BY_NORM, norm_clips.clipped), ("outer products", _outer_products)],
    "sub": [
        ("variance", functools.partial(_variance, _MOMENTS, lemmas.variance_by_moments)),
        ("log_softmax", functools.partial(_of_a_maximum, jax.nn.log_softmax, lemmas.log_softmax)),
    ],
    "add": [("logsumexp", functools.partial(_of_a_maximum, jax.nn.logsumexp, lemmas.logsumexp))],
    "dot_general": [
        ("mean by softmax weights", _pooled),
        ("sum of clipped records", norm_clips.sum_of_clipped),
    ],
    "reduce_max": [("distance of order statistics", _farthest)],
    "select_n": [(_BY_NORM, norm_clips.clipped_by_choice)],
    "jit": [(_BY_NORM, norm_clips.clipped_by_choice)],
    "min": [(_BY_NORM, norm_clips.at_most_one_over_the_norm)],
}
# Maps the name of an inner program to triples: a function that calls the program, the lemma about
# this function, and, for a variance or covariance, a function that returns the divisor.
_Divisor = Callable[..., float]
_CALLED: dict[str, list[tuple[Function, Callable[..., Abstract | None], _Divisor | None]]] = {
    "_var": [(lambda x: jnp.var(x, axis=0), lemmas.variance, lambda n, ddof=0.0: n - ddof)],
    "median": [(lambda x: jnp.median(x, axis=0), lemmas.median, None)],
    "cov": [
        (
            functools.partial(jnp.cov, rowvar=False, bias=bias),
            lambda x, less=1 - bias: lemmas.covariance(x, x.n - less),
            lambda n, less=1 - bias: n - less,
        )
        for bias in (False, True)
    ],
}
