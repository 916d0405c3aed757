"""Where a loss uses its parameters, read off its traced program.

No layer is wrapped and no framework known: the loss of one example is traced, calls are inlined,
and every parameter is followed, through changes of its shape, to the one operation that uses it. If
that operation is a layer of `_layers`, what goes into it and the gradient of what comes out of it
determine the gradient of the parameter, which then is formed for no example. A parameter with more
than one use, or with any other, gets a gradient of its own for each example.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks, _walks
from dpjax._lanes import refuse_touching
from dpjax._programs import needs_no_values, refuse_outside_code
from dpjax.learning._layers import LAYERS, Layer

_REMATERIALIZED = frozenset(("checkpoint", "remat", "remat2"))
_INLINED = _walks.JITS | _REMATERIALIZED | {"closed_call"}
# Operations that put the numbers of a parameter in other places, each once.
_MOVES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "copy_p"))
_REAL = (np.floating, np.integer, np.bool_)


class Use(NamedTuple):
    """The one use of a parameter.

    Attributes:
        layer: what uses it.
        equation: of the program.
        operand: the place of the parameter among the equation's operands.
        moves: equations that take the parameter to that operand.
    """

    layer: Layer
    equation: Any
    operand: int
    moves: tuple[Any, ...]


class TracedLoss(NamedTuple):
    """The loss of one example, traced.

    Attributes:
        program: a closed jaxpr of the leaves of the parameters and those of the example.
        uses: for each parameter its use, or None where its gradient is formed for each example.
    """

    program: Any
    uses: tuple[Use | None, ...]


def traced(loss: Callable[[Any, Any], Any], parameters: Any, example: Any) -> TracedLoss:
    """Traces the loss of one example, and finds the use of every parameter.

    Args:
        loss: `loss(parameters, example)`, a scalar.
        parameters: a pytree of float arrays.
        example: a pytree of arrays, or of their shapes.
    """
    (leaves, structure), (data, form) = jax.tree.flatten(parameters), jax.tree.flatten(example)

    def flat(*arrays: Any) -> Any:
        given = jax.tree.unflatten(structure, arrays[: len(leaves)])
        return loss(given, jax.tree.unflatten(form, arrays[len(leaves) :]))

    arrays = jax.eval_shape(lambda *xs: xs, *leaves, *data)
    with needs_no_values("loss"):
        called = jax.make_jaxpr(flat)(*arrays)
    _check_scalar(called.out_avals)
    _check_operations(called)
    # Rules for derivatives are code that only a derivative shows.
    loss_of = functools.partial(_walks.run, called, operation=_bind)
    gradient = jax.grad(lambda *xs: loss_of(xs)[0], argnums=tuple(range(len(leaves))))
    _check_operations(jax.make_jaxpr(gradient)(*arrays))
    # Once more, now that it is known what to inline.
    program = jax.make_jaxpr(lambda *xs: _walks.run(called, xs, _inline))(*arrays)
    jaxpr = program.jaxpr
    equations = _walks.live(jaxpr)
    uses = (_use(equations, leaf, jaxpr.outvars) for leaf in jaxpr.invars[: len(leaves)])
    return TracedLoss(program, tuple(uses))


def run_with(
    program: Any, inputs: Sequence[Any], changed: Callable[[Any, list[Any], list[Any]], list[Any]]
) -> Any:
    """The loss; `changed(equation, operands, outputs)` may change what operations give."""

    def operation(equation: Any, operands: list[Any]) -> list[Any]:
        return changed(equation, operands, _bind(equation, operands))

    (value,) = _walks.run(program, inputs, operation)
    return value


def moved(use: Use, parameter: jax.Array) -> jax.Array:
    """A parameter as its use takes it, in its own dtype."""
    for equation in use.moves:
        if equation.primitive.name != "convert_element_type":
            (parameter,) = _walks.bind(equation, equation.params, [parameter])
    return parameter


def explained(program: TracedLoss, leaves: Sequence[jax.Array]) -> list[str]:
    """A text for each parameter that says how its gradients are clipped."""
    jaxpr = program.program.jaxpr
    equations, texts = _walks.live(jaxpr), []
    for leaf, variable, use in zip(leaves, jaxpr.invars, program.uses, strict=False):
        if use is not None:
            texts.append(f"{use.layer.name}: {use.layer.why}")
        elif _is_elementwise(equations, variable):
            texts.append("elementwise: its gradient is no larger than what the layer computes")
        else:
            texts.append(f"formed for each example: {leaf.size} numbers")
    return texts


def _is_elementwise(equations: Sequence[Any], variable: Any) -> bool:
    """Whether a parameter is only added to or multiplied with something, entry by entry."""
    found = [equation for equation in equations if any(x is variable for x in equation.invars)]
    names = {equation.primitive.name for equation in found}
    passed = [x.outvars[0] for x in found if x.primitive.name in _MOVES]
    return names <= _MOVES | {"add", "sub", "mul"} and all(
        _is_elementwise(equations, other) for other in passed
    )


def _like(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _check_scalar(avals: Sequence[Any]) -> None:
    if len(avals) != 1 or avals[0].shape != () or not _is_float(avals[0]):
        raise ValueError(
            "loss must return the loss of one example, a real scalar; it returned"
            f" {_checks.described([_like(aval) for aval in avals])}"
        )


def _check_operations(program: Any) -> None:
    refuse_outside_code("loss", program)
    refuse_touching("loss", program)


def _inline(equation: Any, operands: list[Any]) -> list[Any]:
    """Runs an operation, a call by what is inside of it.

    What a checkpoint would compute again is then stored. Rules for derivatives stay as they are.
    """
    if equation.primitive.name in _INLINED:
        return _walks.run(_walks.called(equation), operands, _inline)
    return _bind(equation, operands)


def _bind(equation: Any, operands: list[Any]) -> list[Any]:
    parameters = equation.primitive.get_bind_params(equation.params)
    return _walks.bind(equation, parameters, operands)


def _use(equations: Sequence[Any], variable: Any, outputs: Sequence[Any]) -> Use | None:
    """The use of a parameter, where it has one and a layer knows it."""
    moves: list[Any] = []
    while True:
        if any(atom is variable for atom in outputs):
            return None
        found = [
            (equation, operand)
            for equation in equations
            for operand, atom in enumerate(equation.invars)
            if atom is variable
        ]
        if len(found) != 1:
            return None
        ((equation, operand),) = found
        if not _is_move(equation):
            break
        moves.append(equation)
        (variable,) = equation.outvars
    for layer in LAYERS:
        if layer.takes(equation, operand) and _is_real(equation):
            return Use(layer, equation, operand, tuple(moves))
    return None


def _is_move(equation: Any) -> bool:
    name, outputs = equation.primitive.name, equation.outvars
    if name == "convert_element_type":
        return _is_float(outputs[0].aval)
    (*_, source), same = equation.invars, len(equation.invars) == 1
    return name in _MOVES and same and source.aval.size == outputs[0].aval.size


def _is_real(equation: Any) -> bool:
    """Whether an operation takes and gives real numbers, as layers assume.

    The gradient of a real parameter that meets complex numbers is the real part of a product.
    """
    dtypes = [atom.aval.dtype for atom in equation.invars]
    operands = all(any(jnp.issubdtype(dtype, kind) for kind in _REAL) for dtype in dtypes)
    return operands and _is_float(equation.outvars[0].aval)


def _is_float(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))
