"""The gradients of many examples at once, as what clipping needs of them: norms and a sum."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._exact._numerics import compute_dtype
from dpjax._tracing._one_by_one import vmapped
from dpjax.learning._layers import Gradients, formed
from dpjax.learning._uses import TracedLoss, Use, moved, run_with


class PerExample(NamedTuple):
    """The gradients of a batch.

    Attributes:
        losses: shape (batch,).
        squared_norms: shape (batch,), of each example's whole gradient.
        total: takes factors of shape (batch,) to the sum, a list of arrays like the parameters.
        terms: how many roundings a squared norm has gone through, at most.
    """

    losses: jax.Array
    squared_norms: jax.Array
    total: Callable[[jax.Array], list[jax.Array]]
    terms: int


def per_example(program: TracedLoss, parameters: Sequence[jax.Array], examples: Any) -> PerExample:
    """Gradients of the loss of each example, none larger than its norm needs.

    Args:
        program: of the loss of one example.
        parameters: its leaves.
        examples: leaves of the examples, each with a leading axis of the batch.
    """
    own = [i for i, use in enumerate(program.uses) if use is None]
    used = {i: use for i, use in enumerate(program.uses) if use is not None}
    probes = {i: _zeros(use.equation.outvars[0].aval) for i, use in used.items()}

    def one(example: Sequence[jax.Array]) -> Any:
        def loss(probes: dict[int, jax.Array], formed: list[jax.Array]) -> Any:
            merged = list(parameters)
            for i, parameter in zip(own, formed, strict=True):
                merged[i] = parameter
            return _probed(program.program, used, probes, [*merged, *example])

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            probes, [parameters[i] for i in own]
        )

    computed = vmapped(one, examples)
    # The norms must be those of the numbers that are summed: what is computed twice, in other
    # company, may be rounded in another way.
    (losses, saved), (at_probes, at_parameters) = lax.optimization_barrier(computed)
    gradients = {i: formed(g) for i, g in zip(own, at_parameters, strict=True)}
    for i, use in used.items():
        gradients[i] = _of_layer(use, parameters[i], saved[i], at_probes[i])

    def total(factors: jax.Array) -> list[jax.Array]:
        # Under x64 the factors are float64; a sum keeps the precision of its norm.
        return [
            gradients[i].total(factors.astype(compute_dtype(parameter.dtype)))
            for i, parameter in enumerate(parameters)
        ]

    squares = [g.squared_norms.astype(jnp.result_type(float)) for g in gradients.values()]
    return PerExample(
        losses,
        functools.reduce(jnp.add, squares),
        total,
        max(g.terms for g in gradients.values()) + len(gradients),
    )


def _probed(program: Any, used: dict[int, Use], probes: Any, inputs: list[Any]) -> Any:
    """The loss, with a probe added to what every use gives; and what went into them."""
    saved = {}

    def changed(equation: Any, operands: list[Any], outputs: list[Any]) -> list[Any]:
        for i, use in used.items():
            if use.equation is equation:
                saved[i] = operands[use.layer.saved(use.operand)]
                outputs = [outputs[0] + probes[i]]
        return outputs

    return run_with(program, inputs, changed), saved


def _of_layer(use: Use, parameter: jax.Array, x: jax.Array, g: jax.Array) -> Gradients:
    dtype = compute_dtype(parameter.dtype)
    gradients = use.layer.gradients(use.equation, use.operand, x, g.astype(dtype))

    def total(factors: jax.Array) -> jax.Array:
        back = jax.linear_transpose(
            lambda leaf: moved(use, leaf), jax.ShapeDtypeStruct(parameter.shape, dtype)
        )
        return back(gradients.total(factors))[0]

    return gradients._replace(total=total)


def _zeros(aval: Any) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)
