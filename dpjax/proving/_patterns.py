"""Recognizes subprograms that compute a known function for which there is a lemma.

JAX inlines some functions, such as `jax.nn.softmax`, into the program of the caller. Other
functions, such as `jnp.var`, remain inner programs with a name. In both cases, the known function
is traced on the same shapes, and the lemma applies only if both programs have the same fingerprint.
Names only select which functions to compare with.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._fingerprints import digest
from dpjax._tracing._walks import Atom, Equation, aval, called, equations, live, parts
from dpjax.proving import _lemmas as lemmas
from dpjax.proving import _rounding as rounding
from dpjax.proving._exact_variances import ExactVariance, planned
from dpjax.proving._norm_clips import (
    Scope,
    Search,
    at_most_one_over_the_norm,
    clipped,
    clipped_by_choice,
    sum_of_clipped,
)
from dpjax.proving._operations import OPERATIONS
from dpjax.proving._pending import carried, flattened
from dpjax.proving._projections import projected
from dpjax.proving._ratios import ratio
from dpjax.proving._reductions import outer
from dpjax.proving._value import Abstract, Difference, Moves, Pending, make, meet

_DEPTH = 16
Values = Mapping[jex.Var, Abstract | None]
Function = Callable[..., jax.Array]


class Program:
    """A program, and the operation that computes each of its variables."""

    def __init__(self, jaxpr: jex.Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}

    def definition(self, atom: Atom) -> Equation | None:
        """Returns the operation that computes a variable; None for inputs and literals."""
        return self.made.get(atom) if isinstance(atom, jex.Var) else None

    def sources(self, atom: Atom, name: str) -> Iterator[Equation]:
        """Yields the operations of this name that a variable depends on, a few operations back."""
        seen, front = set[int](), [atom]
        for _ in range(_DEPTH):
            made = [e for e in map(self.definition, front) if e is not None and id(e) not in seen]
            seen.update(map(id, made))
            yield from (e for e in made if e.primitive.name == name)
            front = [x for e in made for x in e.invars]

    def between(self, start: jex.Var, end: jex.Var) -> jex.Jaxpr | None:
        """Returns the program that computes `end` from `start`; None if it needs other inputs."""
        needed, chosen = {end}, set[int]()
        while needed:
            equation = self.made.get(needed.pop())
            if equation is None:
                return None
            if id(equation) not in chosen:
                chosen.add(id(equation))
                # The search stops at `start`. If it reaches another input, which no operation
                # computes, the result is None.
                needed |= {x for x in equation.invars if isinstance(x, jex.Var)} - {start}
            if len(chosen) > _DEPTH:
                return None
        return jex.Jaxpr(
            constvars=[],
            invars=[start],
            outvars=[end],
            eqns=[e for e in self.jaxpr.eqns if id(e) in chosen],
            effects=self.jaxpr.effects,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )


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
        variance: if the subprogram is a variance or covariance, the exact one that may replace it.
        of: the variable whose variance is computed.
    """

    name: str
    value: Abstract | None
    variance: ExactVariance | None = None
    of: Any = None


def of_call(equation: Equation, inner: Any, operands: Sequence[Abstract]) -> Found | None:
    """Returns the value of an inner program by a lemma; None if no lemma applies."""
    name = str(equation.params.get("name"))
    if name == "searchsorted":
        places = _searched(inner, operands)
        return Found(name, places) if places else None
    if name == "_interp":
        found = _interpolated(inner, operands)
        return Found("interpolation", found) if found else None
    if name not in _CALLED or not operands:
        return None
    x, *public = operands
    given, x = x, lemmas.as_records(x)
    if not _is_of_records(x) or not all(p.is_known and not p.shape for p in public):
        return None
    expected = aval(equation.outvars[0])
    for function, lemma, divisor in _CALLED[name]:
        calls = [e for e in equations(_traced(function, x)) if e.params.get("name") == name]
        if len(calls) == 1 and digest(calls[0].params["jaxpr"]) == digest(inner):
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


def _searched(inner: Any, operands: Sequence[Abstract]) -> Abstract | None:
    """Returns the value of `jnp.searchsorted`; None if no lemma applies.

    Either the array of levels is public, or the numbers are public and the levels are sorted
    records.
    """
    if len(operands) != 2 or not all(y.is_finite and not y.nan for y in operands):
        return None
    levels, x = operands
    if not levels.is_public and not (x.is_public and math.isfinite(levels.replaced)):
        return None
    if len(levels.shape) != 1 or levels.dtype != x.dtype:
        return None
    for side in ("left", "right"):
        reference = _traced(jnp.searchsorted, levels, x, side=side)
        if digest(reference.eqns[0].params["jaxpr"]) == digest(inner):
            return lemmas.place_among(x, levels)
    return None


def _interpolated(inner: Any, operands: Sequence[Abstract]) -> Abstract | None:
    """Returns the value of `jnp.interp` between public points; None if no lemma applies."""
    if len(operands) != 3 or len({x.dtype for x in operands}) != 1:
        return None
    x, places, heights = operands
    if not x.is_finite or x.nan or not (places.is_known and heights.is_known):
        return None
    reference = _traced(jnp.interp, x, places, heights)
    if len(reference.eqns) != 1 or digest(reference.eqns[0].params["jaxpr"]) != digest(inner):
        return None
    points = (np.broadcast_to(p.low, p.shape) for p in (places, heights))
    return lemmas.interpolated(x, *points)


def _of_mean(x: Abstract, found: Abstract, correction: float = 0.0) -> Pending:
    """Returns the pending operations of a sum of squares or products, divided by n - correction."""
    load, divisor = float(found.magnitude.max()), x.n - correction
    bits = 2 * x.pending.bits + abs(math.log2(divisor)) + 1
    return Pending.of_sum(x.n, load).having(
        terms=x.n, weight=load, factor=1 / divisor, bits=bits, shift=x.pending.shift
    )


def improved(
    program: Program, equation: Equation, values: Values, walked: Abstract | None
) -> Found | None:
    """Returns a tighter value of an operation, by a lemma about the operations that lead to it.

    The result is None if no lemma applies.

    Args:
        program: the program that contains the operation.
        equation: the operation.
        values: the abstract values so far; None for operations that were refused.
        walked: the value by the operation's own rule; None if the rule refused.
    """
    name = equation.primitive.name
    operands: Any = [values.get(x) for x in equation.invars if isinstance(x, jex.Var)]
    # Lemmas assume that all uses of an array see the same numbers, up to `apart`. For 16-bit
    # numbers, this may be false. Lemmas do not cover NaN, either.
    if any(x is not None and (x.pending.coarse or x.nan) for x in operands):
        return None
    found = clipped(program.made, equation, values) if name in ("div", "mul") else None
    if found is not None:
        operands = [values[x] for x in equation.invars]  # type: ignore[index]
        joined = carried(OPERATIONS[name].merging, equation.params, operands, found)
        found = dataclasses.replace(found, pending=joined)
        return Found("clip by norm", meeting(walked, found))
    if name == "reduce_max" and walked is not None and not walked.shape:
        distance = _distance(program, equation.invars[0], values)
        if distance is not None:
            moved = np.asarray(distance), math.inf, math.inf
            found = dataclasses.replace(walked, others=walked.others)
            return Found("distance of order statistics", meet(found, changed=moved, others=moved))
    if name == "div" and walked is not None:
        found = projected(program.made, equation, values)
        if found is not None:
            found = dataclasses.replace(found, pending=walked.pending)
            return Found("clip by norm", meeting(walked, found))
    if name == "dot_general" and walked is not None:
        if (found := _pooled(program, equation, values)) is not None:
            found = dataclasses.replace(found, pending=walked.pending)
            return Found("mean by softmax weights", meeting(walked, found))
        found = sum_of_clipped(program.made, equation, values)
        if found is not None and found.dtype == walked.dtype:
            found = dataclasses.replace(found, pending=walked.pending)
            return Found("sum of clipped records", meeting(walked, found))
        return None
    if name == "select_n" or (called(equation) and len(equation.outvars) == 1):
        found = clipped_by_choice(program.made, equation, values)
    elif name == "min" and walked is None:
        found = at_most_one_over_the_norm(program.made, equation, values)
    if found is not None:
        operands = [x for x in operands if x is not None]
        pending = carried(OPERATIONS["select_n"].merging, {}, operands, found)
        return Found("clip by norm", meeting(walked, dataclasses.replace(found, pending=pending)))
    if name == "mul" and walked is not None:
        found = _outer_products(program, equation, values, walked)
        return Found("outer products", found) if found is not None else None
    if name == "div" and walked is not None:
        search = Search(equation.outvars[0], Scope(program.made, {}), values)
        if (found := ratio(equation, search, walked)) is not None:
            return Found("ratio of sums", found)
    if walked is not None and (mean := _mean(program, equation, values)):
        if mean.value is None:
            return mean._replace(value=walked)
        found = dataclasses.replace(mean.value, pending=walked.pending)
        return mean._replace(value=meeting(walked, found))
    for lemma in _OF_A_MAXIMUM:
        found = _of_a_maximum(lemma, program, equation, values) if lemma.last == name else None
        if found is not None:
            return Found(lemma.name, meeting(walked, found))
    return None


def _distance(program: Program, atom: Atom, values: Values) -> float | None:
    """Bounds how much the largest entry of s - c, c - s or |s - c| changes, for a sorted vector s.

    The vector c is public. The bound is also valid for the maximum of several such arrays. The
    result is None for other arrays.
    """
    made = program.definition(atom)
    if made is None:
        return None
    if made.primitive.name == "max":
        found = [_distance(program, x, values) for x in made.invars]
        return None if None in found else max(found)  # type: ignore[type-var]
    inner = program.definition(made.invars[0]) if made.primitive.name == "abs" else made
    if inner is None or inner.primitive.name != "sub":
        return None
    first, second = (None if isinstance(x, jex.Literal) else values.get(x) for x in inner.invars)
    for s, c, sign in ((first, second, 1), (second, first, -1)):
        if s is None or c is None or not c.is_public or s.shape != c.shape:
            continue
        if math.isfinite(s.replaced) and len(s.shape) == 1 and not (s.nan or s.pending.coarse):
            return lemmas.largest_distance(s, c, 0 if inner is not made else sign)
    return None


def _outer_products(
    program: Program, equation: Equation, values: Values, walked: Abstract
) -> Abstract | None:
    """Returns the value of a product of two arrays that is an outer product a b^T in each row.

    The rows of the two arrays are repeated along different axes.

    The l1 and l2 norms of such a row are products of the norms of a and b. The rounding of each
    entry is added.
    """
    made = [program.definition(x) for x in equation.invars]
    if any(e is None or e.primitive.name != "broadcast_in_dim" for e in made):
        return None
    sources = [e.invars[0] for e in made if e]
    a, b = (values.get(x) if isinstance(x, jex.Var) else None for x in sources)
    if a is None or b is None or a.axis is None or b.axis is None or walked.axis is None:
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
    l1, l2 = (
        float(rounding.up((d + 2 * off) * (1 + 2.0**-30)))
        for d, off in zip(moves, slips, strict=True)
    )
    rows = (a.l1_of_row * b.l1_of_row, a.l2_of_row * b.l2_of_row)
    kept = [
        float(rounding.up((x + off) * (1 + 2.0**-30))) for x, off in zip(rows, slips, strict=True)
    ]
    changed = np.asarray(math.inf), l1, l2
    return meet(walked, changed=changed, l1_of_row=kept[0], l2_of_row=kept[1])


def meeting(first: Abstract | None, second: Abstract) -> Abstract:
    """Returns the intersection of two abstract values of one array: the tighter of each bound."""
    if first is None or first.axis != second.axis:
        return second
    low, high = np.maximum(first.low, second.low), np.minimum(first.high, second.high)

    def better(a: Difference, b: Difference) -> Moves:
        return np.minimum(a.each, b.each), min(a.l1, b.l1), min(a.l2, b.l2)

    return make(
        first.shape, first.dtype, low, high, first.axis, better(first.changed, second.changed),
        better(first.others, second.others), whole=first.whole,
        l2_of_row=min(first.l2_of_row, second.l2_of_row), source=first.source,
        pending=first.pending, apart=min(first.apart, second.apart),
    )  # fmt: skip


class Lemma(NamedTuple):
    """A lemma about a function whose operations may be inlined anywhere in a program.

    Attributes:
        name: the name that the steps of a proof show.
        last: the name of the last operation of the function.
        function: the function.
        bound: computes the abstract value of the function's result.
    """

    name: str
    last: str
    function: Function
    bound: Callable[..., Abstract | None]


def _argument(
    function: Function, program: Program, atom: Any, values: Values
) -> tuple[Abstract, tuple[int, ...], jex.Var] | None:
    """Returns the array x, the axes, and the variable of x, if a variable is softmax(x) or similar.

    The first step of these functions is a maximum. The result is None for other variables.
    """
    for maximum in program.sources(atom, "reduce_max"):
        variable, axes = maximum.invars[0], tuple(maximum.params["axes"])
        x = None if isinstance(variable, jex.Literal) else values.get(variable)
        if x is None or x.is_public or x.nan or not x.is_finite:
            continue
        if x.dtype.kind != "f" or x.pending.coarse:
            continue
        part = program.between(variable, atom)  # type: ignore[arg-type]
        axis: Any = axes[0] if len(axes) == 1 else axes
        if _is_program_of(function, part, x, axis=axis):
            return x, axes, variable  # type: ignore[return-value]
    return None


def _of_a_maximum(
    lemma: Lemma, program: Program, equation: Equation, values: Values
) -> Abstract | None:
    """Returns the value of softmax or a similar function."""
    made = aval(equation.outvars[0])
    if (known := _argument(lemma.function, program, equation.outvars[0], values)) is None:
        return None
    found = lemma.bound(*known[:2])
    if found is None or (found.shape, found.dtype) != (tuple(made.shape), made.dtype):
        return None
    # The denominator is a sum of exponentials, each of which is at most 1.
    bits = known[0].pending.bits + math.log2(math.prod(known[0].shape)) + 1
    return dataclasses.replace(found, pending=known[0].pending.having(bits=bits, terms=1))


def _exponentials(x: jax.Array, axis: Any) -> jax.Array:
    """Returns the exponentials in `jax.nn.softmax` and in `jax.nn.log_softmax`."""
    largest = jnp.max(x, axis, initial=-jnp.inf, keepdims=True)
    return jnp.exp(x - jax.lax.stop_gradient(largest))


def exponentials_of(
    program: Program, equation: Equation, values: Values
) -> tuple[Abstract, int] | None:
    """Returns x and an axis if an operation computes the exponentials in softmax(x); else None."""
    if equation.primitive.name != "exp":
        return None
    known = _argument(_exponentials, program, equation.outvars[0], values)
    return (known[0], known[1][0]) if known and len(known[1]) == 1 else None


def _pooled(program: Program, equation: Equation, values: Values) -> Abstract | None:
    """Returns the value of softmax(s) @ x over records, as in attention and attention pooling."""
    contracted, batch = equation.params["dimension_numbers"]
    (by, of) = equation.invars
    if batch != ((), ()) or isinstance(by, jex.Literal) or isinstance(of, jex.Literal):
        return None
    if contracted == ((0,), (0,)) and len(aval(by).shape) > 1:
        by, of = of, by
    x, made, rows = values.get(of), program.definition(by), len(aval(by).shape)
    if contracted != ((rows - 1,), (0,)) or rows > 2 or made is None or x is None:
        return None
    if made.primitive.name != "div" or not _is_of_records(x) or len(x.shape) > 2:
        return None
    if (known := _argument(jax.nn.softmax, program, by, values)) is None:
        return None
    scores, axes, atom = known
    alone = rows == 1 and _is_of_records(scores)
    if axes != (rows - 1,) or not (alone or (rows == 2 and _is_of_pairs(program, atom, values))):
        return None
    if x.dtype != scores.dtype or flattened(x)[0] > 1 or x.n != scores.shape[-1]:
        return None
    return lemmas.pooled(scores, x)


def _is_of_pairs(program: Program, atom: Atom, values: Values) -> bool:
    """Whether entry (j, k) of a matrix depends only on the records j and k: a multiple of a b^T."""
    made = program.definition(atom)
    while made is not None and made.primitive.name in ("mul", "div", "transpose"):
        known = [isinstance(x, jex.Literal) or _is_known(values.get(x)) for x in made.invars]
        if made.primitive.name == "transpose" or known == [False, True]:
            made = program.definition(made.invars[0])
        elif known == [True, False] and made.primitive.name == "mul":
            made = program.definition(made.invars[1])
        else:
            return False
    if made is None or made.primitive.name != "dot_general":
        return False
    contracted, batch = made.params["dimension_numbers"]
    xs = [None if isinstance(x, jex.Literal) else values.get(x) for x in made.invars]
    if batch != ((), ()) or any(x is None or len(x.shape) != 2 for x in xs):
        return False
    pairs: Any = zip(xs, contracted, strict=True)
    return all(x.axis == 1 - axis and x.others.is_zero and not x.nan for x, (axis,) in pairs)


def _is_known(x: Abstract | None) -> bool:
    return x is not None and x.is_known


def _mean(program: Program, equation: Equation, values: Values) -> Found | None:
    """Returns the value of a weighted mean or variance without a named function."""
    name = equation.primitive.name
    if name == "div" and (found := _weighted_mean(program, equation, values)) is not None:
        return Found("weighted mean", found)
    candidates = [lemma for lemma in _VARIANCES if lemma.last == name]
    for total in program.sources(equation.outvars[0], "reduce_sum") if candidates else ():
        atom, squared = total.invars[0], program.definition(total.invars[0])
        if squared is not None and squared.primitive.name in ("integer_pow", "square", "mul"):
            atom = squared.invars[0]
        x = None if isinstance(atom, jex.Literal) else values.get(atom)
        if x is None or not _is_of_records(rows := lemmas.as_records(x)):
            continue
        part = program.between(atom, equation.outvars[0])  # type: ignore[arg-type]
        for lemma in candidates:
            if _is_program_of(lemma.function, part, x):
                exact = planned(x, x.n) if rows is x else None
                return Found(lemma.name, lemma.bound(rows), exact, atom)
    return None


def _is_of_records(x: Abstract) -> bool:
    by_record = x.axis == 0 and x.others.is_zero and not x.nan
    return by_record and x.dtype.kind == "f" and x.is_finite and x.n > 1


def _weighted_mean(program: Program, equation: Equation, values: Values) -> Abstract | None:
    over, weights = (_summed(program, atom) for atom in equation.invars)
    product = None if over is None else program.definition(over)
    if weights is None or product is None or product.primitive.name != "mul":
        return None
    operands = [atom for atom in product.invars if atom is not weights]
    if len(operands) != 1 or isinstance(operands[0], jex.Literal):
        return None
    x, w = values.get(operands[0]), values.get(weights)
    if x is None or w is None or not (_is_of_records(x) and _is_of_records(w)):
        return None
    return lemmas.weighted_mean(x, w)


def _summed(program: Program, atom: Atom) -> jex.Var | None:
    """If a variable is the sum of an array over its first axis: this array. Otherwise None."""
    total = program.definition(atom)
    if total is None or total.primitive.name != "reduce_sum" or tuple(total.params["axes"]) != (0,):
        return None
    return None if isinstance(total.invars[0], jex.Literal) else total.invars[0]


def _centered(square: Function, *, keepdims: bool) -> Function:
    return lambda x: square(x - x.mean(0, keepdims=keepdims)).mean(0)


def _moments(inner: Function, outer: Function) -> Function:
    return lambda x: inner(x).mean(0) - outer(x.mean(0))


_SQUARES: tuple[Function, ...] = (lambda x: x**2, lambda x: x * x, jnp.square)
_VARIANCES = [
    *(
        Lemma("variance", "div", _centered(square, keepdims=keepdims), lemmas.variance)
        for square in _SQUARES
        for keepdims in (False, True)
    ),
    *(
        Lemma("variance", "sub", _moments(a, b), lemmas.variance_by_moments)
        for a in _SQUARES
        for b in _SQUARES
    ),
]
_OF_A_MAXIMUM = [
    Lemma("softmax", "div", jax.nn.softmax, lemmas.softmax),
    Lemma("log_softmax", "sub", jax.nn.log_softmax, lemmas.log_softmax),
    Lemma("logsumexp", "add", jax.nn.logsumexp, lemmas.logsumexp),
]
# Maps the name of an inner program to the functions that call it, each with its lemma, and with a
# function for the divisor if it is a variance.
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
