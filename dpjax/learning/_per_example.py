"""The gradients of many examples at once, as what clipping needs of them: norms and a sum."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from dpjax._core._types import Database, PyTree
from dpjax._exact._numerics import compute_dtype
from dpjax._tracing import _walks
from dpjax._tracing._one_by_one import vmapped
from dpjax.learning._layers import Gradients, formed
from dpjax.learning._uses import TracedLoss, Use, perform


class PerExample(NamedTuple):
    """The gradients of a batch.

    Attributes:
        losses: shape (batch,).
        aux: what the loss returns besides, with a leading axis of examples.
        squared_norms: for each parameter by its number, in an order of their own; shape (batch,).
        total: takes factors of shape (batch,), for each parameter, to the sum, a list of arrays.
        terms: an upper bound on the number of roundings in a squared norm.
    """

    losses: jax.Array
    aux: PyTree
    squared_norms: dict[int, jax.Array]
    total: Callable[[Sequence[jax.Array]], list[jax.Array]]
    terms: int

    def norms(self, groups: Sequence[int]) -> dict[int, jax.Array]:
        """The norm of each example's gradient in each group, given the groups of parameters."""
        squares: dict[int, jax.Array] = {}
        for i, square in self.squared_norms.items():
            group = groups[i]
            squares[group] = squares[group] + square if group in squares else square
        return {group: jnp.sqrt(square) for group, square in squares.items()}


def per_example(program: TracedLoss, given: PyTree, examples: Database) -> PerExample:
    """Gradients of the loss of each example, none larger than its norm needs.

    Args:
        program: of the loss of one example.
        given: the arguments in front of the examples.
        examples: with a leading axis of the batch.
    """
    inputs, data = jax.tree.leaves(given), jax.tree.leaves(examples)
    parameters = [inputs[place] for place in program.places]
    own = [i for i, use in enumerate(program.uses) if use is None]
    used = {i: use for i, use in enumerate(program.uses) if use is not None}
    outputs = {i: _walks.aval(use.equation.outvars[0]) for i, use in used.items()}
    probes = {i: jnp.zeros(output.shape, output.dtype) for i, output in outputs.items()}

    def one(example: list[jax.Array]) -> PyTree:
        def loss(
            probes: dict[int, jax.Array], formed: list[jax.Array]
        ) -> tuple[jax.Array, tuple[dict[int, jax.Array], list[jax.Array]]]:
            merged = [*inputs, *example]
            for i, parameter in zip(own, formed, strict=True):
                merged[program.places[i]] = parameter
            return _probed(program, used, probes, merged)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            probes, [parameters[i] for i in own]
        )

    computed = vmapped(one, data)
    # The norms must be those of the numbers that are summed. A second computation of them, in
    # another program, may round in another way.
    (losses, (saved, aux)), (at_probes, at_parameters) = lax.optimization_barrier(computed)
    gradients = {i: formed(g) for i, g in zip(own, at_parameters, strict=True)}
    for i, use in used.items():
        gradients[i] = _of_layer(use, parameters[i], saved[i], at_probes[i])

    def total(factors: Sequence[jax.Array]) -> list[jax.Array]:
        # Under x64 the factors are float64; a sum keeps the precision of its norm.
        return [
            gradients[i].total(factor.astype(compute_dtype(parameter.dtype)))
            for i, (parameter, factor) in enumerate(zip(parameters, factors, strict=True))
        ]

    return PerExample(
        losses,
        jax.tree.unflatten(program.aux, aux),
        {i: g.squared_norms.astype(jnp.result_type(float)) for i, g in gradients.items()},
        total,
        max(g.terms for g in gradients.values()) + len(gradients),
    )


def _probed(
    program: TracedLoss, used: dict[int, Use], probes: dict[int, jax.Array], inputs: list[jax.Array]
) -> tuple[jax.Array, tuple[dict[int, jax.Array], list[jax.Array]]]:
    """The loss, with a probe added to the output of every use; the other operands, and aux."""
    saved: dict[int, jax.Array] = {}

    def operation(equation: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
        outputs = perform(equation, operands)
        for i, use in used.items():
            if use.equation is equation:
                saved[i] = operands[use.layer.saved(use.operand)]
                # The probe is 0. The gradient with respect to it is that of the output.
                outputs = [outputs[0] + probes[i]]
        return outputs

    value, *aux = _walks.run(program.program, inputs, operation)
    return value, (saved, aux)


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
