"""Walks over traced code: its operations, what depends on what, and running one by one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex

# Calls that compute what is inside of them. Some also say how to differentiate, and a program that
# was traced is not differentiated any more.
JITS = frozenset(("jit", "pjit"))
_CALLS = JITS | frozenset(
    (
        *("closed_call", "custom_jvp_call", "custom_vjp_call"),
        *("checkpoint", "remat", "remat2"),
    )
)


def called(equation: Any) -> Any:
    """The program that an operation stands for; None where it is more than a call."""
    if equation.primitive.name not in _CALLS:
        return None
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def bind(equation: Any, parameters: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """The outputs of an operation, run with these parameters in the context of its tracing."""
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*operands, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def run(
    program: Any,
    inputs: Sequence[Any],
    operation: Callable[[Any, list[Any]], Sequence[Any]],
    known: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Runs a program one operation after the other, in values of any kind.

    Args:
        program: with or without constants.
        inputs: a value for each of its inputs.
        operation: `operation(equation, operands)` gives the outputs.
        known: takes a constant or a literal to a value.
    """
    jaxpr = getattr(program, "jaxpr", program)
    constants = map(known, getattr(program, "consts", ()))
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return known(atom.val) if isinstance(atom, jex.Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = operation(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_variable(atom: Any) -> bool:
    return isinstance(atom, jex.Var)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All operations, also of inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jex.jaxprs_in_params(equation.params):
            yield from equations(inner)


def primitives(jaxpr: Any) -> set[str]:
    """The names of all operations, also of inner programs."""
    return {equation.primitive.name for equation in equations(jaxpr)}


def _reached(jaxpr: Any, inputs: set[Any]) -> set[Any]:
    """The variables that depend on the given ones."""
    reached = set(inputs)
    for equation in jaxpr.eqns:
        if not any(_is_variable(atom) and atom in reached for atom in equation.invars):
            continue
        if program := called(equation):
            inner = getattr(program, "jaxpr", program)
            depends = depends_on(inner, _passed(inner, equation, reached))
            reached.update(v for v, d in zip(equation.outvars, depends, strict=True) if d)
        else:
            reached.update(equation.outvars)
    return reached


def depends_on(jaxpr: Any, inputs: set[Any]) -> list[bool]:
    """For each output, whether it depends on the given variables."""
    reached = _reached(jaxpr, inputs)
    return [_is_variable(atom) and atom in reached for atom in jaxpr.outvars]


def _passed(inner: Any, equation: Any, reached: set[Any]) -> set[Any]:
    """The inputs of an inner program that depend on reached variables."""
    # Operands line up with inner inputs from the back: a branch has a predicate in front.
    pairs = zip(reversed(inner.invars), reversed(equation.invars), strict=False)
    return {v for v, atom in pairs if _is_variable(atom) and atom in reached}


def sizes_from(jaxpr: Any, inputs: set[Any]) -> list[int]:
    """Bytes of the arrays that depend on the given variables, also in inner programs."""
    reached = _reached(jaxpr, inputs)
    avals: list[Any] = [variable.aval for variable in reached]
    sizes = [aval.size * getattr(aval.dtype, "itemsize", 16) for aval in avals]
    for equation in jaxpr.eqns:
        for inner in jex.jaxprs_in_params(equation.params):
            sizes += sizes_from(inner, _passed(inner, equation, reached))
    return sizes
