"""Gradients of many examples at once: norms for clipping, and a weighted sum.

The traced loss of one example shows where it uses its parameters, so no layer needs a wrapper.
Calls are inlined, and every parameter is followed through reshapes and transposes to the operation
that uses it. If that operation is a layer of `_layers`, the gradient of the parameter follows from
the other operand and the gradient with respect to the output, so it is not stored for each example.
If a parameter has several uses, or its use is not such a layer, the gradient of each example is
stored.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Database, PyTree
from dpjax._exact._numerics import compute_dtype, is_float
from dpjax._tracing import _walks
from dpjax._tracing._contents import with_own_arrays
from dpjax._tracing._evaluate import vmapped
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._lanes import refuse_touching
from dpjax._tracing._programs import configuration, needs_no_values, refuse_outside_code
from dpjax.learning._layers import LAYERS, Gradients, Layer, formed

_REMATERIALIZED = frozenset(("checkpoint", "remat", "remat2"))
_INLINED = _walks.JITS | _REMATERIALIZED | {"closed_call"}
# Primitives that rearrange or repeat the entries of a parameter, and change none of them.
_MOVES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "copy_p"))
_REAL = (np.floating, np.integer, np.bool_)


class Use(NamedTuple):
    """The single operation that uses a parameter.

    Attributes:
        layer: the kind of operation.
        equation: the equation of the program.
        operand: the index of the parameter among the equation's operands.
        moves: the equations that turn the parameter into this operand, by reshapes or transposes.
    """

    layer: Layer
    equation: jex.JaxprEqn
    operand: int
    moves: tuple[jex.JaxprEqn, ...]


class TracedLoss(NamedTuple):
    """The loss of one example, traced.

    Attributes:
        program: computes the loss and the leaves of aux, and calls the caller's custom derivative
            rules. None in a `FixedLoss`, which keeps only traces of these rules.
        places: the positions of the parameters among the leaves of all arguments.
        uses: for each parameter, the single layer that uses it; None if there is no such layer, and
            its gradient is stored for each example.
        derivatives: maps the leaves of all arguments to the leaves of `Derivatives`.
        aux: the structure of aux, a PyTreeDef.
        results: the structure of `Derivatives`, a PyTreeDef.
    """

    program: jex.ClosedJaxpr | None
    places: tuple[int, ...]
    uses: tuple[Use | None, ...]
    derivatives: jex.ClosedJaxpr
    aux: Any
    results: Any


class Derivatives(NamedTuple):
    """The derivatives of one example, which determine all gradients.

    Attributes:
        loss: the loss.
        aux: the leaves of aux.
        saved: for each parameter that only one layer uses (see `Use`), the layer's other operand.
            The keys are the indices of these parameters.
        at_outputs: for each of these parameters, the gradient of the loss with respect to the
            layer's output. The keys are those of `saved`.
        formed: the gradients with respect to all other parameters.
    """

    loss: jax.Array
    aux: list[jax.Array]
    saved: dict[int, jax.Array]
    at_outputs: dict[int, jax.Array]
    formed: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class FixedLoss:
    """A traced loss of parameters and one example.

    Two fixed losses are equal if their programs are the same.

    Attributes:
        traced: the program, with its own copies of all arrays.
        fingerprint: a fingerprint of the programs of the loss and of its gradients.
    """

    traced: TracedLoss = dataclasses.field(compare=False)
    fingerprint: str

    def __call__(self, *arguments: PyTree) -> jax.Array:
        """Evaluates the loss of one example."""
        found = jex.jaxpr_as_fun(self.traced.derivatives)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(self.traced.results, found).loss


def fixed_loss(loss: Callable[..., PyTree], parameters: PyTree, example: PyTree) -> FixedLoss:
    """Traces the loss of one example; `example` may be given by its shapes."""
    found = traced(loss, (parameters,), example, argnums=0, has_aux=False)
    # A cached program must not contain the caller's arrays (see `_programs`): if the caller changes
    # a 64-bit array in place, JAX would still use the old numbers of the trace. Derivative rules
    # may close over such arrays, so they run only here, and only their traces are kept.
    assert found.program is not None
    own, derivatives = with_own_arrays(found.program), with_own_arrays(found.derivatives)
    uses = _uses(own, found.places)
    found = found._replace(program=None, uses=uses, derivatives=derivatives)
    return FixedLoss(found, digest(own, derivatives, configuration()))


def traced(
    loss: Callable[..., PyTree],
    given: Sequence[PyTree],
    example: PyTree,
    *,
    argnums: int | tuple[int, ...],
    has_aux: bool,
) -> TracedLoss:
    """Traces the loss of one example, and finds the use of every parameter.

    Args:
        loss: `loss(*given, example)`, a scalar, or a scalar and aux.
        given: the arguments in front of the example.
        example: a pytree of arrays, or of their shapes.
        argnums: which of the given arguments are parameters.
        has_aux: whether there is aux.
    """
    if isinstance(loss, FixedLoss):
        return loss.traced

    def pair(*arguments: PyTree) -> PyTree:
        try:
            found = loss(*arguments)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            raise  # The loss needs the value of a tracer. JAX's own message explains this.
        except (IndexError, TypeError, ValueError) as error:
            raise ValueError(
                "loss must be a function of the parameters and one example, without an axis of"
                f" examples: {_checks.described(arguments[-1])}. A loss of a whole batch does not"
                f" work here. It raised {type(error).__name__}: {error}"
            ) from error
        if has_aux and (type(found) is not tuple or len(found) != 2):
            kind = type(found).__name__
            raise TypeError(f"loss must return (loss, aux) with has_aux, got {kind}")
        return found if has_aux else (found, None)

    arguments = jax.eval_shape(lambda *arrays: arrays, *given, example)
    with needs_no_values("loss"):
        called, (value, aux) = jax.make_jaxpr(pair, return_shape=True)(*arguments)
    arrays = jax.tree.leaves(arguments)
    if not isinstance(value, jax.ShapeDtypeStruct) or value.shape != () or not is_float(value):
        found = _checks.described(value)
        raise ValueError(f"loss must return the loss of one example, a real scalar, got {found}")
    _check_operations(called)
    ends = [0, *itertools.accumulate(len(jax.tree.leaves(argument)) for argument in given)]
    chosen = argnums if isinstance(argnums, tuple) else (argnums,)
    places = tuple(itertools.chain(*(range(ends[i], ends[i + 1]) for i in chosen)))
    program = inlined(called, arrays)
    uses = _uses(program, places)

    def differentiated(*leaves: jax.Array) -> Derivatives:
        return _differentiated(program, places, uses, leaves)

    # A custom derivative rule may contain operations that occur only in the traced derivative. So
    # the derivative is checked as well.
    derivatives, shapes = jax.make_jaxpr(differentiated, return_shape=True)(*arrays)
    _check_operations(derivatives)
    structures = map(jax.tree.structure, (aux, shapes))
    return TracedLoss(program, places, uses, derivatives, *structures)


def _uses(program: jex.ClosedJaxpr, places: Sequence[int]) -> tuple[Use | None, ...]:
    """Returns the `Use` of the parameter at each of these positions, or None."""
    equations, jaxpr = _walks.live(program.jaxpr), program.jaxpr
    return tuple(_use(equations, jaxpr.invars[i], jaxpr.outvars) for i in places)


def inlined(program: jex.ClosedJaxpr, inputs: Sequence[PyTree]) -> jex.ClosedJaxpr:
    """Traces a program again with all calls inlined, on arrays or their shapes."""
    return jax.make_jaxpr(lambda *leaves: _walks.run(program, leaves, _inline))(*inputs)


def explained(loss: TracedLoss) -> list[str]:
    """Returns a string for each parameter that states how its gradients are clipped."""
    assert loss.program is not None
    jaxpr = loss.program.jaxpr
    equations = _walks.live(jaxpr)

    def text(place: int, use: Use | None) -> str:
        if use is not None:
            return f"{use.layer.name}: {use.layer.why}"
        parameter = jaxpr.invars[place]
        if _is_elementwise(equations, parameter):
            return "elementwise: its gradient is no larger than what the layer computes"
        return f"formed for each example: {_walks.aval(parameter).size} numbers"

    return list(map(text, loss.places, loss.uses))


def perform(equation: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Evaluates one equation of a jaxpr."""
    return _walks.bind(equation, equation.primitive.get_bind_params(equation.params), operands)


def _is_elementwise(equations: Sequence[jex.JaxprEqn], variable: jex.Var) -> bool:
    """Whether a parameter is used only in elementwise sums and products with other arrays."""
    found = [equation for equation in equations if any(x is variable for x in equation.invars)]
    names = {equation.primitive.name for equation in found}
    passed = [x.outvars[0] for x in found if x.primitive.name in _MOVES]
    return names <= _MOVES | {"add", "sub", "mul"} and all(
        _is_elementwise(equations, other) for other in passed
    )


def _check_operations(program: jex.ClosedJaxpr) -> None:
    refuse_outside_code("loss", program)
    refuse_touching("loss", program)


def _inline(equation: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Evaluates an equation; for a call, evaluates the equations inside the call.

    A checkpoint is inlined as well: its intermediate results are stored, not computed again. Custom
    derivative rules stay as they are.
    """
    if equation.primitive.name in _INLINED:
        return _walks.run(_walks.called(equation), operands, _inline)
    return perform(equation, operands)


def _use(
    equations: Sequence[jex.JaxprEqn], variable: jex.Var, outputs: Sequence[object]
) -> Use | None:
    """Returns the `Use` of a parameter if it has exactly one use and that is a layer; else None."""
    moves: list[jex.JaxprEqn] = []
    while True:
        found = [
            (equation, operand)
            for equation in equations
            for operand, atom in enumerate(equation.invars)
            if atom is variable
        ]
        if len(found) != 1 or any(atom is variable for atom in outputs):
            return None
        ((equation, operand),) = found
        name, output = equation.primitive.name, _walks.aval(equation.outvars[0])
        if name == "convert_element_type":
            is_move = is_float(output)
        else:
            alone = name in _MOVES and len(equation.invars) == 1
            is_move = alone and _walks.aval(variable).size == output.size
        if not is_move:
            break
        moves.append(equation)
        (variable,) = equation.outvars
    for layer in LAYERS:
        if layer.takes(equation, operand) and _is_real(equation):
            return Use(layer, equation, operand, tuple(moves))
    return None


def _is_real(equation: jex.JaxprEqn) -> bool:
    """Whether all operands and results of an equation are real, as layers assume.

    If a real parameter is combined with complex numbers, its gradient is the real part of a complex
    product. Layers do not compute real parts.
    """
    dtypes = [_walks.aval(atom).dtype for atom in equation.invars]
    operands = all(any(jnp.issubdtype(dtype, kind) for kind in _REAL) for dtype in dtypes)
    return operands and is_float(_walks.aval(equation.outvars[0]))


class PerExample(NamedTuple):
    """The per-example gradients of a batch.

    Attributes:
        losses: shape (batch,).
        aux: the second result of the loss, with a leading axis of examples.
        squared_norms: maps the index of a parameter to the squared norms of its gradients, of shape
            (batch,). The order of the indices is arbitrary.
        total: takes a list with one array of factors, of shape (batch,), for each parameter.
            Returns a list with the weighted sum of the gradients of each parameter.
        terms: an upper bound on the number of roundings in a squared norm.
    """

    losses: jax.Array
    aux: PyTree
    squared_norms: dict[int, jax.Array]
    total: Callable[[Sequence[jax.Array]], list[jax.Array]]
    terms: int

    def norms(self, groups: Sequence[int]) -> dict[int, jax.Array]:
        """Returns the norm of each example's gradient in each group of parameters."""
        squares: dict[int, jax.Array] = {}
        for i, square in self.squared_norms.items():
            group = groups[i]
            squares[group] = squares[group] + square if group in squares else square
        return {group: jnp.sqrt(square) for group, square in squares.items()}


def per_example(program: TracedLoss, given: PyTree, examples: Database) -> PerExample:
    """Computes the per-example gradients of a batch.

    If a parameter has a `Use`, its layer computes norms and sums, and its gradients are not stored.

    Args:
        program: the traced loss of one example.
        given: the arguments in front of the examples.
        examples: arrays with a leading axis of examples.
    """
    inputs, data = jax.tree.leaves(given), jax.tree.leaves(examples)
    parameters = [inputs[place] for place in program.places]
    used, own = _used_and_formed(program.uses)

    def one(example: list[jax.Array]) -> Derivatives:
        leaves = jex.jaxpr_as_fun(program.derivatives)(*inputs, *example)
        return jax.tree.unflatten(program.results, leaves)

    # The barrier ensures that norms and sum are computed from the same numbers. Without it, XLA
    # might compute the gradients twice, with different rounding.
    found = lax.optimization_barrier(vmapped(one, data))
    gradients = {i: formed(g) for i, g in zip(own, found.formed, strict=True)}
    for i, use in used.items():
        gradients[i] = _of_layer(use, parameters[i], found.saved[i], found.at_outputs[i])

    def total(factors: Sequence[jax.Array]) -> list[jax.Array]:
        # Under x64 the factors are float64. They are cast so that each weighted sum has the dtype
        # of the norms.
        return [
            gradients[i].total(factor.astype(compute_dtype(parameter.dtype)))
            for i, (parameter, factor) in enumerate(zip(parameters, factors, strict=True))
        ]

    return PerExample(
        found.loss,
        jax.tree.unflatten(program.aux, found.aux),
        {i: g.squared_norms.astype(jnp.result_type(float)) for i, g in gradients.items()},
        total,
        max(g.terms for g in gradients.values()) + len(gradients),
    )


def _used_and_formed(uses: Sequence[Use | None]) -> tuple[dict[int, Use], list[int]]:
    """Splits parameters into those with a `Use`, and those whose gradients are stored."""
    used = {i: use for i, use in enumerate(uses) if use is not None}
    return used, [i for i in range(len(uses)) if i not in used]


def _differentiated(
    program: jex.ClosedJaxpr,
    places: Sequence[int],
    uses: Sequence[Use | None],
    inputs: Sequence[jax.Array],
) -> Derivatives:
    """Returns the derivatives of one example, by adding a probe to the output of each layer."""
    used, own = _used_and_formed(uses)
    outputs = {i: _walks.aval(use.equation.outvars[0]) for i, use in used.items()}
    # A probe is an array of zeros that is added to an output. The gradient with respect to the
    # probe is the gradient with respect to the output.
    probes = {i: jnp.zeros(output.shape, output.dtype) for i, output in outputs.items()}

    def loss(
        probes: dict[int, jax.Array], parameters: list[jax.Array]
    ) -> tuple[jax.Array, tuple[list[jax.Array], dict[int, jax.Array]]]:
        merged, saved = list(inputs), dict[int, jax.Array]()
        for i, parameter in zip(own, parameters, strict=True):
            merged[places[i]] = parameter

        def operation(equation: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
            outputs = perform(equation, operands)
            for i, use in used.items():
                if use.equation is equation:
                    saved[i] = operands[1 - use.operand]
                    outputs = [outputs[0] + probes[i]]
            return outputs

        value, *aux = _walks.run(program, merged, operation)
        return value, (aux, saved)

    (value, (aux, saved)), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        probes, [inputs[places[i]] for i in own]
    )
    return Derivatives(value, aux, saved, *gradients)


def _of_layer(use: Use, parameter: jax.Array, x: jax.Array, g: jax.Array) -> Gradients:
    dtype = compute_dtype(parameter.dtype)
    gradients = use.layer.gradients(use.equation, use.operand, x, g.astype(dtype))

    def move(leaf: jax.Array) -> jax.Array:
        for equation in use.moves:
            if equation.primitive.name != "convert_element_type":
                (leaf,) = _walks.bind(equation, equation.params, [leaf])
        return leaf

    def total(factors: jax.Array) -> jax.Array:
        back = jax.linear_transpose(move, jax.ShapeDtypeStruct(parameter.shape, dtype))
        return back(gradients.total(factors))[0]

    return gradients._replace(total=total)
