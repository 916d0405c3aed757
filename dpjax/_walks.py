"""Walks over traced code: its operations, what depends on what, and running one by one."""

import collections
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
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
# Takes an operation and its operands to its outputs, or to None where it stays as it is.
Replacement = Callable[[Any, list[Any]], Sequence[Any] | None]
# One for each program, so that what is called again is neither traced nor compiled again.
_REPLACED: dict[Replacement, Any] = collections.defaultdict(weakref.WeakKeyDictionary)


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


def replaced(program: Any, operands: Sequence[Any], replacement: Replacement) -> list[Any]:
    """Runs a program with some of its operations replaced, also inside of others.

    Rules for derivatives are left out: a program that was traced is not differentiated any more.

    Args:
        program: with or without constants.
        operands: arrays.
        replacement: a function of a module, for what it makes of inner programs is kept.
    """

    def operation(equation: Any, operands: list[Any]) -> Sequence[Any]:
        outputs = replacement(equation, operands)
        if outputs is not None:
            return outputs
        name = equation.primitive.name
        if name not in JITS and (inner := called(equation)):
            return replaced(inner, operands, replacement)
        if name == "shard_map":
            return _replaced_shard_map(equation.params, replacement)(*operands)
        parameters = {
            name: _replaced_inside(value, replacement) for name, value in equation.params.items()
        }
        if name == "custom_vmap_call":
            parameters["rule"] = functools.partial(
                _replaced_rule, replacement, equation.params["rule"]
            )
        return bind(equation, parameters, operands)

    return run(program, operands, operation)


def _replaced_shard_map(
    parameters: dict[str, Any], replacement: Replacement
) -> Callable[..., Sequence[Any]]:
    """Made anew: its program can be traced only where the axes of its mesh are known."""
    return jax.shard_map(
        lambda *operands: replaced(parameters["jaxpr"], operands, replacement),
        mesh=parameters["mesh"],
        in_specs=parameters["in_specs"],
        out_specs=list(parameters["out_specs"]),
        axis_names=parameters["newly_manual_axes"],
        check_vma=parameters["check_vma"],
    )


def _replaced_inside(value: Any, replacement: Replacement) -> Any:
    """A parameter of an operation, with replacements in the programs that it holds."""
    if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
        return _replaced_program(value, replacement)
    if isinstance(value, tuple) and any(isinstance(x, (jex.ClosedJaxpr, jex.Jaxpr)) for x in value):
        items = [_replaced_inside(item, replacement) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _replaced_program(program: Any, replacement: Replacement) -> Any:
    kept = _REPLACED[replacement]
    if program not in kept:
        avals = [variable.aval for variable in getattr(program, "jaxpr", program).invars]
        made = jax.make_jaxpr(lambda *xs: replaced(program, xs, replacement))(*specs(avals))
        kept[program] = made if isinstance(program, jex.ClosedJaxpr) else made.jaxpr
    return kept[program]


def _replaced_rule(
    replacement: Replacement,
    rule: Callable[..., Any],
    axis_size: int,
    mapped: list[bool],
    *operands: Any,
) -> tuple[Any, Any]:
    """A rule for `vmap` of the user's, with replacements in what it runs."""
    mapped_outputs: list[Any] = []

    def outputs(*operands: Any) -> Any:
        values, mapping = rule(axis_size, mapped, *operands)
        mapped_outputs.append(mapping)
        return values

    program, shapes = jax.make_jaxpr(outputs, return_shape=True)(*operands)
    leaves = replaced(program, jax.tree.leaves(operands), replacement)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), mapped_outputs[0]


def specs(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What to trace a program with anew."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]


def _is_variable(atom: Any) -> bool:
    return isinstance(atom, jex.Var)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All operations, also of inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jex.jaxprs_in_params(equation.params):
            yield from equations(inner)


def live(jaxpr: Any) -> list[Any]:
    """The operations that outputs depend on: a program may compute what it needs the shape of."""
    needed, found = {x for x in jaxpr.outvars if _is_variable(x)}, []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(filter(_is_variable, equation.invars))
            found.append(equation)
    return found[::-1]


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
