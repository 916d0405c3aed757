"""Helpers for jaxprs: listing operations, following dependencies, and interpreting jaxprs."""

import collections
import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh

Equation: TypeAlias = jex.JaxprEqn
Atom: TypeAlias = jex.Var | jex.Literal
Program: TypeAlias = jex.ClosedJaxpr | jex.Jaxpr
V = TypeVar("V")


def names(*lines: str) -> frozenset[str]:
    """Returns the set of all words in some strings."""
    return frozenset(" ".join(lines).split())


# Primitives that only call an inner jaxpr. Their derivative rules are ignored, because dpjax never
# differentiates a traced program.
JITS = frozenset(("jit", "pjit"))
_CALLS = JITS | names("closed_call custom_jvp_call custom_vjp_call checkpoint remat remat2")
# A function of an operation and its operands. It returns the outputs, or None to leave the
# operation as it is.
Replacement = Callable[[Equation, list[jax.Array]], Sequence[jax.Array] | None]
# A cache that maps each inner jaxpr to the jaxpr after replacement. So equal calls return the same
# object, and JAX does not trace or compile that object again. The mesh is part of the key, because
# the types in a jaxpr contain it.
_Kept: TypeAlias = weakref.WeakKeyDictionary[Program, Program]
_REPLACED: dict[tuple[Replacement, AbstractMesh], _Kept] = collections.defaultdict(
    weakref.WeakKeyDictionary
)
# Caches the results of `equations`.
_EQUATIONS: weakref.WeakKeyDictionary[jex.Jaxpr, list[Equation]] = weakref.WeakKeyDictionary()


# Returns the abstract value (shape and dtype) of a variable or literal. The value has the type
# `Any`, because JAX does not annotate the attribute `aval`.
aval: Callable[[Atom], Any] = operator.attrgetter("aval")


def called(equation: Equation) -> Any:
    """Returns the jaxpr of an operation that only calls a jaxpr; None for other operations."""
    if equation.primitive.name not in _CALLS:
        return None
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def sizes_of_scan(parameters: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a `scan` are constants, and how many are carries."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    # JAX 0.11 and later store the operands in groups.
    fixed, carried, _ = parameters["ft_in"].unpack()
    return len(fixed), len(carried)


def bind(
    equation: Equation, parameters: dict[str, Any], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Runs an operation with these parameters, in the context in which it was traced."""
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*operands, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def run(
    program: Program,
    inputs: Sequence[V],
    operation: Callable[[Equation, list[V]], Sequence[V]],
    known: Callable[[Any], V] = lambda value: value,
) -> list[V]:
    """Interprets a program, one operation after the other, on values of any type.

    Args:
        program: a jaxpr with or without constants.
        inputs: a value for each input of the jaxpr.
        operation: `operation(equation, operands)` returns the outputs of an operation.
        known: converts a constant or a literal to a value.
    """
    jaxpr, constants = parts(program)
    values = dict(zip(jaxpr.constvars, map(known, constants), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms: Iterable[Atom]) -> list[V]:
        return [known(x.val) if isinstance(x, jex.Literal) else values[x] for x in atoms]

    for equation in jaxpr.eqns:
        outputs = operation(equation, read(equation.invars))
        values.update(zip(equation.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def parts(program: Program) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Splits a program into a jaxpr without constants, and its constants."""
    if isinstance(program, jex.ClosedJaxpr):
        return program.jaxpr, program.consts
    return program, ()


def replaced(
    program: Program, operands: Sequence[jax.Array], replacement: Replacement
) -> list[jax.Array]:
    """Runs a jaxpr with some of its operations replaced, including those in inner jaxprs.

    Derivative rules are dropped, because dpjax never differentiates a traced program.

    Args:
        program: a jaxpr with or without constants.
        operands: the arrays to run it on.
        replacement: a function that a module defines, not a lambda, because it is a key in the
            cache of inner jaxprs.
    """

    def operation(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array]:
        with _holding(equation):
            outputs = replacement(equation, operands)
            if outputs is not None:
                return outputs
            name = equation.primitive.name
            if name in _CALLS and name not in JITS:
                return replaced(called(equation), operands, replacement)
            if name == "shard_map":
                # The inner jaxpr can only be traced inside a `shard_map` that binds its axes.
                given = equation.params
                return jax.shard_map(
                    lambda *operands: replaced(given["jaxpr"], operands, replacement),
                    mesh=given["mesh"],
                    in_specs=given["in_specs"],
                    out_specs=list(given["out_specs"]),
                    axis_names=given["newly_manual_axes"],
                    check_vma=given["check_vma"],
                )(*operands)
            # All remaining rules for `vmap` belong to dpjax, because `without_rules` has removed
            # users' rules.
            if name == "custom_vmap_call":
                return bind(equation, equation.params, operands)
            parameters = {
                name: _replaced_inside(value, replacement)
                for name, value in equation.params.items()
            }
            return bind(equation, parameters, operands)

    return run(program, operands, operation)


def _holding(equation: Equation) -> contextlib.AbstractContextManager[object]:
    """Returns a context that enables x64 if an operation has 64-bit numbers.

    Some queries use such operations even without x64. Without this context, their inner jaxprs
    would be traced again with 32-bit numbers.
    """
    kinds = (jax.numpy.integer, jax.numpy.floating)
    dtypes = {aval(x).dtype for x in (*equation.invars, *equation.outvars) if hasattr(x, "aval")}
    wide = any(x.itemsize == 8 and any(jax.numpy.issubdtype(x, k) for k in kinds) for x in dtypes)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _replaced_inside(value: Any, replacement: Replacement) -> Any:
    """Returns a parameter of an operation, with replacements in the jaxprs that it contains."""
    if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
        kept = _REPLACED[replacement, jax.sharding.get_abstract_mesh()]
        if value not in kept:
            inputs = specs(variable.aval for variable in parts(value)[0].invars)
            made = jax.make_jaxpr(lambda *xs: replaced(value, xs, replacement))(*inputs)
            kept[value] = made if isinstance(value, jex.ClosedJaxpr) else made.jaxpr
        return kept[value]
    if isinstance(value, tuple) and any(isinstance(x, (jex.ClosedJaxpr, jex.Jaxpr)) for x in value):
        items = [_replaced_inside(item, replacement) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def specs(avals: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns `ShapeDtypeStruct`s for tracing a program again, with the inputs' shardings."""
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, **_placement(x))
        for x in avals
    ]


def _placement(shaped: Any) -> dict[str, Any]:
    """Returns an array's sharding and varying mesh axes, as keywords; absent ones are omitted."""
    sharding = getattr(shaped, "sharding", None)
    kind = getattr(shaped, "manual_axis_type", None)
    varies = kind is not None and kind.varying
    spread = sharding is not None and any(axis is not None for axis in sharding.spec)
    found: dict[str, Any] = {"sharding": sharding} if varies or spread else {}
    return found | {"manual_axis_type": kind} if varies else found


def equations(jaxpr: jex.Jaxpr) -> Sequence[Equation]:
    """Returns all operations of a jaxpr and of its inner jaxprs."""
    if (kept := _EQUATIONS.get(jaxpr)) is not None:
        return kept
    found = list[Equation]()
    for equation in jaxpr.eqns:
        found.append(equation)
        for inner in jex.jaxprs_in_params(equation.params):
            found += equations(inner)
    _EQUATIONS[jaxpr] = found
    return found


def source_line(equation: Equation) -> str:
    """Returns the user's line of an operation.

    It is the innermost stack frame outside of JAX and dpjax.
    """
    traceback: Any = getattr(equation.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not any(f"/{name}/" in frame.file_name for name in ("jax", "dpjax", "jaxlib")):
            return f" at {frame.file_name}:{frame.line_num}"
    return ""


def live(jaxpr: jex.Jaxpr) -> list[Equation]:
    """Returns the operations on which an output depends, or which have effects."""
    needed, found = _variables(jaxpr.outvars), list[Equation]()
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed |= _variables(equation.invars)
            found.append(equation)
    return found[::-1]


def primitives(jaxpr: jex.Jaxpr) -> set[str]:
    """Returns the names of all primitives in a jaxpr and in its inner jaxprs."""
    return {equation.primitive.name for equation in equations(jaxpr)}


def _variables(atoms: Iterable[Atom]) -> set[jex.Var]:
    """Returns the variables among some atoms. The others are literals, which are not hashable."""
    return {atom for atom in atoms if isinstance(atom, jex.Var)}


def reached_from(jaxpr: jex.Jaxpr, inputs: set[jex.Var]) -> set[jex.Var]:
    """Returns the variables of a jaxpr that depend on the given inputs."""
    reached = set(inputs)
    for equation in jaxpr.eqns:
        if reached.isdisjoint(_variables(equation.invars)):
            continue
        if program := called(equation):
            inner, _ = parts(program)
            inside = reached_from(inner, passed(inner, equation, reached))
            outputs = zip(equation.outvars, inner.outvars, strict=True)
            reached.update(v for v, x in outputs if not inside.isdisjoint(_variables((x,))))
        else:
            reached.update(equation.outvars)
    return reached


def passed(inner: jex.Jaxpr, equation: Equation, reached: set[jex.Var]) -> set[jex.Var]:
    """Returns the inputs of an inner jaxpr that depend on the variables in `reached`."""
    # Inputs are matched from the last to the first, because a `cond` has an additional first
    # operand, its predicate.
    pairs = zip(reversed(inner.invars), reversed(equation.invars), strict=False)
    return {v for v, atom in pairs if isinstance(atom, jex.Var) and atom in reached}
