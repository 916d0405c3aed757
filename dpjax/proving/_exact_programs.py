"""Programs with exact sums over the records, which a release runs instead of the target."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from dpjax._core._proof import PaddedRecordBounds, RecordBounds
from dpjax._core._types import Database, Value
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._walks import Equation, aval, called, live, parts
from dpjax.proving._exact_scatters import ExactScatter, planned_scatter, scattered_exactly
from dpjax.proving._exact_sums import FLOATS, ExactSum, planned, planned_product, summed_exactly
from dpjax.proving._exact_variances import ExactVariance, of_records
from dpjax.proving._value import Abstract

_SCATTERS = "scatter-add", "scatter_add"
# The indices that locate an operation in a program and its inner programs, as in `Step.path`.
Path = tuple[int, ...]
Kind = ExactSum | ExactVariance | ExactScatter


@dataclasses.dataclass(frozen=True)
class VarianceOf:
    """A variance in a program: its exact form, and the variable whose variance it is.

    Attributes:
        kind: the exact variance.
        source: the index of the operation that computes the variable, or -k for input k counted
            from the end.
    """

    kind: ExactVariance
    source: int

    @staticmethod
    def at(jaxpr: jex.Jaxpr, atom: Any, kind: ExactVariance | None) -> "VarianceOf | None":
        """Returns the variance of a variable.

        The result is None unless the variable is an input, or the first result of an operation.
        """
        if kind is None:
            return None
        for k, variable in enumerate(reversed(jaxpr.invars)):
            if variable is atom:
                return VarianceOf(kind, -1 - k)
        made = [k for k, equation in enumerate(live(jaxpr)) if equation.outvars[0] is atom]
        return VarianceOf(kind, made[0]) if made else None

    def variable(self, jaxpr: jex.Jaxpr, operations: Sequence[Equation]) -> jex.Var:
        """Returns the variable in the program `jaxpr`."""
        return jaxpr.invars[self.source] if self.source < 0 else operations[self.source].outvars[0]


# What replaces an operation: the exponent of the range of a sum's terms, or a variance.
Planned = int | VarianceOf
Sums = dict[Path, Planned]


def exponent_of(equation: Equation, operands: Sequence[Abstract]) -> int | None:
    """Returns the exponent of the range of the terms, if an operation is a sum that can be exact.

    Otherwise the result is None.
    """
    name = equation.primitive.name
    if name == "reduce_sum":
        return planned(operands[0], equation.params["axes"])
    if name == "dot_general":
        return planned_product(operands[0], operands[1], equation.params)
    if name in _SCATTERS:
        start, places, updates = operands
        return planned_scatter(start, places, updates, equation.params)
    return None


def _call(kind: Kind, *xs: Any) -> Equation:
    """Returns the equation that calls an exact sum, scatter or variance of arrays."""
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
    (equation,) = jax.make_jaxpr(kind)(*specs).jaxpr.eqns
    return equation


@functools.lru_cache(maxsize=512)
def _digest(kind: Kind, *arrays: tuple[tuple[int, ...], np.dtype]) -> str:
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
    return digest(_call(kind, *specs).params["jaxpr"])


def kind_of(equation: Equation, inner: Any) -> Kind | None:
    """Returns the exact sum, scatter or variance that an inner program computes; None if none.

    The name of the inner program is not trusted. The inner program must be equal to the program for
    which this name stands.
    """
    name = str(equation.params.get("name"))
    kind = ExactSum.named(name) or ExactVariance.named(name) or ExactScatter.named(name)
    xs = [(aval(x).shape, np.dtype(aval(x).dtype)) for x in equation.invars]
    count = 3 if isinstance(kind, ExactScatter) else 1
    if kind is None or len(xs) != count or xs[-1][1] not in FLOATS:
        return None
    return kind if digest(inner) == _digest(kind, *xs) else None


def value_of(kind: Kind, operands: Sequence[Abstract]) -> Abstract:
    """Returns the abstract value of an exact sum, scatter or variance."""
    if isinstance(kind, ExactScatter):
        start, places, updates = operands
        return scattered_exactly(start, places, updates, kind)
    (x,) = operands
    return summed_exactly(x, kind) if isinstance(kind, ExactSum) else of_records(x, kind)


class _Exact(RecordBounds):
    """Bounds on records, and a list of the sums that a release computes exactly.

    Attributes:
        sums: for each exact sum, its path in the target, and the exponent of the range of its terms
            or its variance.
    """

    sums: tuple[tuple[Path, Planned], ...] = ()

    def enforced_on(self, target: Callable[[Database], Value]) -> Callable[[Database], Value]:
        """Returns the target composed with the clamp, and with exact sums."""

        @functools.wraps(target, updated=())
        def clamped_target(database: Database) -> Value:
            return _with_exact_sums(target, dict(self.sums), jax.jit(self.clamp)(database))

        return clamped_target


@dataclasses.dataclass(frozen=True)
class ExactBounds(_Exact):
    """Bounds on records, with exact sums, under replace-one."""

    sums: tuple[tuple[Path, Planned], ...] = ()


@dataclasses.dataclass(frozen=True)
class ExactPaddedBounds(_Exact, PaddedRecordBounds):
    """Bounds on padded records, with exact sums, under add-or-remove-one."""

    sums: tuple[tuple[Path, Planned], ...] = ()


def with_sums(public: RecordBounds, sums: Sums) -> RecordBounds:
    """Returns the same bounds, for a target in which these sums are exact."""
    kind = ExactPaddedBounds if isinstance(public, PaddedRecordBounds) else ExactBounds
    return kind(public.leaves, tuple(sorted(sums.items())))


def _with_exact_sums(target: Callable[[Database], Value], sums: Sums, database: Database) -> Value:
    program, shapes = jax.make_jaxpr(target, return_shape=True)(database)
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
        replacing = sums.get(here)
        if isinstance(replacing, VarianceOf):
            x = replacing.variable(jaxpr, operations)
            call = _call(replacing.kind, aval(x))
            made.append(
                call.replace(invars=[x], outvars=equation.outvars, source_info=equation.source_info)
            )
        elif replacing is not None and equation.primitive.name in _SCATTERS:
            kind = ExactScatter(replacing, lax.GatherScatterMode.from_any(equation.params["mode"]))
            call = _call(kind, *map(aval, equation.invars))
            made.append(call.replace(invars=equation.invars, outvars=equation.outvars))
        elif replacing is not None and equation.primitive.name in ("reduce_sum", "dot_general"):
            (result,), divisor = equation.outvars, 1.0
            quotient = divided.get(result) if uses[result] == 1 else None
            if quotient is not None:
                dropped.add(id(quotient))
                (result,), divisor = quotient.outvars, float(quotient.invars[1].val)  # type: ignore[union-attr]
            call = _call_of(equation, replacing, divisor)
            given = {"invars": equation.invars, "source_info": equation.source_info}
            made.append(call.replace(outvars=[result], **given))
        elif id(equation) not in dropped:
            if called(equation) and any(place[: len(here)] == here for place in sums):
                equation = equation.replace(params=_inside(equation.params, sums, here))
            made.append(equation)
    return jaxpr.replace(eqns=made)


def _call_of(equation: Equation, exponent: int, divisor: float) -> Equation:
    """Returns the equation of the exact sum (of products) that replaces an operation."""
    if equation.primitive.name == "reduce_sum":
        kind = ExactSum(tuple(sorted(equation.params["axes"])), exponent, divisor)
        return _call(kind, aval(equation.invars[0]))
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
        return ExactSum(summed, exponent, divisor)(a * b)

    specs = [jax.ShapeDtypeStruct(aval(x).shape, aval(x).dtype) for x in equation.invars]
    (call,) = jax.make_jaxpr(exact_product)(*specs).jaxpr.eqns
    return call


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
