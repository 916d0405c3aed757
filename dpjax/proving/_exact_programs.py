"""Programs with exact sums over the records, which a release runs instead of the target."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from dpjax._core._bounds import PaddedRecordBounds, RecordBounds
from dpjax._core._types import Database, Value
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._host_calls import in_own_operations
from dpjax._tracing._walks import Atom, Equation, aval, called, equations, live, parts, source_line
from dpjax.proving._exact_sums import (
    FLOATS,
    ExactCumulative,
    ExactScatter,
    ExactSum,
    ExactSums,
    ExactWindows,
    worth_it,
)
from dpjax.proving._exact_variances import ExactVariance
from dpjax.proving._operations import operation_of

# The indices that locate an operation in a program and its inner programs, as in `Step.path`.
Path = tuple[int, ...]
Kind = ExactSums | ExactVariance | ExactScatter
_KINDS = {
    kind.__name__: kind
    for kind in (ExactSum, ExactCumulative, ExactWindows, ExactVariance, ExactScatter)
}


@dataclasses.dataclass(frozen=True)
class VarianceOf:
    """An exact variance in a program, and the variable whose variance it is.

    Attributes:
        kind: how the exact variance is computed.
        source: the index of the variable. An index of at least 0 counts the results of all
            operations. A negative index counts the inputs from the end: -1 is the last input.
    """

    kind: ExactVariance
    source: int

    @staticmethod
    def at(jaxpr: jex.Jaxpr, atom: Any, kind: ExactVariance | None) -> "VarianceOf | None":
        """Returns the variance of a variable; None for a constant."""
        if kind is None:
            return None
        places = {v: -k for k, v in enumerate(reversed(jaxpr.invars), 1)}
        places |= {v: k for k, v in enumerate(_results(jaxpr))}
        is_variable = isinstance(atom, jex.Var) and atom in places
        return VarianceOf(kind, places[atom]) if is_variable else None

    def variable(self, jaxpr: jex.Jaxpr) -> jex.Var:
        """Returns the variable in the program `jaxpr`."""
        return [*_results(jaxpr), *jaxpr.invars][self.source]


def _results(jaxpr: jex.Jaxpr) -> list[jex.Var]:
    return [variable for equation in live(jaxpr) for variable in equation.outvars]


# The exact form that replaces an operation in a program.
Planned = ExactSums | ExactScatter | VarianceOf
Sums = dict[Path, Planned]


def with_sum(sums: Sums, path: Path, plan: Planned) -> None:
    """Stores the exact form of the operation at a path.

    In a loop, all steps have the same path. The stored range contains the terms of all steps.
    """
    old = sums.get(path)
    if not isinstance(plan, VarianceOf) and type(old) is type(plan):
        plan = dataclasses.replace(plan, exponent=max(plan.exponent, old.exponent))  # type: ignore[union-attr]
    sums[path] = plan


def stays_inexact(equation: Equation, *, refused: bool, seen: bool) -> bool:
    """Whether an operation contains a float sum of many terms that will not be exact.

    Args:
        equation: the operation.
        refused: whether the walk refused it.
        seen: whether the walk has seen a sum in the inner program of the operation.
    """
    if refused and called(equation) is not None:
        return kind_of(equation) is not None
    if not refused and is_entered(equation) and (seen or called(equation) is not None):
        return False
    inside = [x for y in jex.jaxprs_in_params(equation.params) for x in equations(y)]
    return any(map(_has_many_terms, [equation, *inside] if refused else inside))


def is_entered(equation: Equation) -> bool:
    """Whether an operation has an inner program in which exact sums can replace float sums."""
    return called(equation) is not None or equation.primitive.name == "scan"


def _has_many_terms(equation: Equation) -> bool:
    """Whether an operation is a sum that is exact if its terms have public bounds."""
    if operation_of(equation.primitive.name).exact is None:
        return False
    shapes, parameters = [aval(x).shape for x in equation.invars], equation.params
    if len(shapes) == 3:  # A scatter of one row for each record.
        sizes = shapes[2][:1]
    elif "window_dimensions" in parameters:
        sizes = parameters["window_dimensions"]
    else:
        axes = parameters.get("axes", [parameters.get("axis")])
        if len(shapes) == 2:  # A product of matrices.
            (axes, _), _ = parameters["dimension_numbers"]
        sizes = [shapes[0][k] for k in axes]
    return worth_it(math.prod(sizes), np.dtype(aval(equation.outvars[0]).dtype))


def _spec(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval(atom).shape, aval(atom).dtype)


def _call(function: Callable[..., jax.Array], *specs: jax.ShapeDtypeStruct) -> Equation:
    """Traces a function that consists of one operation, and returns this operation."""
    (equation,) = jax.make_jaxpr(function)(*specs).jaxpr.eqns
    return equation


@functools.lru_cache(maxsize=512)
def _digest(kind: Kind, *specs: jax.ShapeDtypeStruct) -> str:
    return digest(_call(kind, *specs).params["jaxpr"])


def kind_of(equation: Equation) -> Kind | None:
    """Returns the exact sum, scatter or variance that an operation computes; otherwise None.

    A name alone proves nothing, because a user's program may have the same name. So the inner
    program must be equal to the program that this name encodes.
    """
    name = str(equation.params.get("name"))
    named = _KINDS.get(name.partition("_")[0])
    kind = named and named.named(name)
    if kind is None or len(equation.invars) != (3 if isinstance(kind, ExactScatter) else 1):
        return None
    specs = list(map(_spec, equation.invars))
    same = specs[-1].dtype in FLOATS and digest(called(equation)) == _digest(kind, *specs)
    return kind if same else None


def exact_steps(jaxpr: jex.Jaxpr, line: str = "") -> tuple[str, ...]:
    """Returns a line for each exact sum, scatter and variance of a program.

    `line` is the line of the user's code that calls the program.
    """
    lines = list[str]()
    for equation in live(jaxpr):
        here = source_line(equation) or line
        if (kind := kind_of(equation)) is None:
            for program in jex.jaxprs_in_params(equation.params):
                lines += exact_steps(program, here)
            continue
        terms, made = aval(equation.invars[-1]), aval(equation.outvars[0])
        shapes = [f"{x.dtype}{list(x.shape)}" for x in (terms, made)]
        lines.append(f"{kind.title} {' -> '.join(shapes)}, terms within 2^{kind.exponent} {here}")
    return tuple(lines)


@dataclasses.dataclass(frozen=True)
class ExactBounds(RecordBounds):
    """Bounds on records, and a list of the sums that a release computes exactly.

    Attributes:
        sums: pairs (path, exact sum). The path locates a sum in the target, and the exact sum
            replaces this sum.
    """

    sums: tuple[tuple[Path, Planned], ...] = ()

    def enforced_on(self, target: Callable[[Database], Value]) -> Callable[[Database], Value]:
        """Returns the target composed with the clamp, and with exact sums."""

        @functools.wraps(target, updated=())
        def clamped_target(database: Database) -> Value:
            return _with_exact_sums(target, dict(self.sums), jax.jit(self.clamp)(database))

        return clamped_target


@dataclasses.dataclass(frozen=True)
class ExactPaddedBounds(ExactBounds, PaddedRecordBounds):
    """Bounds on padded records, with exact sums, under add-or-remove-one."""


def with_sums(public: RecordBounds, sums: Sums) -> RecordBounds:
    """Returns the same bounds, for a target in which these sums are exact."""
    kind = ExactPaddedBounds if isinstance(public, PaddedRecordBounds) else ExactBounds
    return kind(public.leaves, tuple(sorted(sums.items())))


def _with_exact_sums(target: Callable[[Database], Value], sums: Sums, database: Database) -> Value:
    given, shapes = jax.make_jaxpr(target, return_shape=True)(database)
    # A path in `sums` contains indices of operations. They are correct only after the program is
    # rewritten in JAX's own primitives.
    program = in_own_operations("target", given)
    exact = jex.ClosedJaxpr(_rewritten(program.jaxpr, sums, ()), program.consts)
    outputs = jex.jaxpr_as_fun(exact)(*jax.tree.leaves(database))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _rewritten(jaxpr: jex.Jaxpr, sums: Sums, path: Path) -> jex.Jaxpr:
    """Returns the program with exact sums at the given paths.

    If a sum is followed by a division by a literal, the exact sum includes the division.
    """
    operations, made = live(jaxpr), list[Equation]()
    uses = Counter(x for e in operations for x in e.invars if isinstance(x, jex.Var))
    uses.update(x for x in jaxpr.outvars if isinstance(x, jex.Var))
    divided: dict[Any, Equation] = {
        e.invars[0]: e for k, e in enumerate(operations) if _divides(e) and (*path, k) not in sums
    }
    dropped = set[int]()
    for count, equation in enumerate(operations):
        here = (*path, count)
        plan = sums.get(here)
        if plan is not None:
            invars, outvars = equation.invars, equation.outvars
            if isinstance(plan, VarianceOf):
                invars = [plan.variable(jaxpr)]
                call = _call(plan.kind, _spec(invars[0]))
            else:
                quotient = divided.get(outvars[0]) if uses[outvars[0]] == 1 else None
                if quotient is not None and isinstance(plan, ExactSums):
                    dropped.add(id(quotient))
                    divisor: Any = quotient.invars[1]
                    plan = dataclasses.replace(plan, divisor=float(divisor.val))
                    outvars = quotient.outvars
                call = _call_of(equation, plan)
            given = {"invars": invars, "outvars": outvars, "source_info": equation.source_info}
            made.append(call.replace(**given))
        elif id(equation) not in dropped:
            if is_entered(equation) and any(place[: len(here)] == here for place in sums):
                equation = equation.replace(params=_inside(equation.params, sums, here))
            made.append(equation)
    return jaxpr.replace(eqns=made)


def _call_of(equation: Equation, kind: ExactSums | ExactScatter) -> Equation:
    """Returns the equation of the exact sum (of products) that replaces an operation."""
    if equation.primitive.name != "dot_general" or isinstance(kind, ExactScatter):
        return _call(kind, *map(_spec, equation.invars))
    (ca, cb), _ = equation.params["dimension_numbers"]

    @jax.jit
    def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
        # The axes of the product are ordered: free axes of a, free axes of b, and summed axes.
        free_a, free_b = ([k for k in range(x.ndim) if k not in c] for x, c in ((a, ca), (b, cb)))
        middle, end = len(free_a), len(free_a) + len(free_b)
        a, b = a.transpose([*free_a, *ca]), b.transpose([*free_b, *cb])
        shape = (*a.shape[:middle], *b.shape[: len(free_b)], *a.shape[middle:])
        summed = tuple(range(end, len(shape)))
        a = lax.broadcast_in_dim(a, shape, (*range(middle), *summed))
        b = lax.broadcast_in_dim(b, shape, tuple(range(middle, len(shape))))
        return kind(a * b)

    return _call(exact_product, *map(_spec, equation.invars))


def _inside(parameters: dict[str, Any], sums: Sums, path: Path) -> dict[str, Any]:
    name = "jaxpr" if "jaxpr" in parameters else "call_jaxpr"
    body, consts = parts(parameters[name])
    changed = _rewritten(body, sums, path)
    closed = isinstance(parameters[name], jex.ClosedJaxpr)
    return parameters | {name: jex.ClosedJaxpr(changed, consts) if closed else changed}


def _divides(equation: Equation) -> bool:
    """Whether an operation divides a variable by a literal above 0 of the same dtype."""
    if equation.primitive.name != "div":
        return False
    number, divisor = equation.invars
    if not isinstance(number, jex.Var) or not isinstance(divisor, jex.Literal):
        return False
    same = aval(divisor).dtype == aval(number).dtype and not np.ndim(divisor.val)
    return same and 2.0**-60 <= float(divisor.val) <= 2.0**60
