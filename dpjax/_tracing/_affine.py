"""Traced programs that are affine in their inputs, and the linear part of such a program."""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._exact._numerics import compute_dtype
from dpjax._tracing._walks import Equation, aval, bind, called, run

# One operand, whose elements are moved and copied.
_MOVES = frozenset(
    (
        *("reshape", "broadcast_in_dim", "transpose", "slice", "rev", "squeeze", "expand_dims"),
        *("copy", "copy_p"),
    )
)
# One operand, whose elements it adds up.
_LINEAR = frozenset(("reduce_sum", "cumsum", "neg"))
# Several operands that are added up or put next to each other.
_SUMS = frozenset(("add", "sub", "add_any", "concatenate"))
# One operand, from which it takes elements at places that are constant operands.
_CHOICES = frozenset(("gather", "dynamic_slice"))


class NotAffineError(Exception):
    """An operation is not known to be affine."""


def is_affine(program: jex.ClosedJaxpr) -> bool:
    """Whether a program of real arrays is affine in all its inputs, by its operations.

    Its derivative cannot tell: the derivative of a rounding is 0, and still it jumps.
    """
    avals = map(aval, program.jaxpr.invars)
    inputs = [jax.ShapeDtypeStruct(x.shape, compute_dtype(x.dtype)) for x in avals]
    try:
        jax.eval_shape(functools.partial(linear_part, program), inputs)
    except NotAffineError:
        return False
    return True


def linear_part(program: jex.ClosedJaxpr, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """f(x) - f(0) for an affine program f, without computing either, so that nothing cancels.

    Args:
        program: an affine program.
        inputs: float arrays of the shapes of its inputs.

    Returns:
        Float arrays of the shapes of its outputs.

    Raises:
        NotAffineError: if an operation is not known to be affine.
    """
    outputs = run(program, [(x, True) for x in inputs], _apply, lambda value: (value, False))
    avals = map(aval, program.jaxpr.outvars)
    return [
        x if depends else jnp.zeros(found.shape, compute_dtype(found.dtype))
        for (x, depends), found in zip(outputs, avals, strict=True)
    ]


# An array, and whether it depends on the inputs: then it stands for its linear part.
_Known: TypeAlias = tuple[jax.Array, bool]


def _apply(equation: Equation, operands: list[_Known]) -> list[_Known]:
    name = equation.primitive.name
    values = [x for x, _ in operands]
    depends = [d for _, d in operands]
    if inner := called(equation):
        return run(inner, operands, _apply, lambda value: (value, False))
    if list(jex.jaxprs_in_params(equation.params)):
        raise NotAffineError(name)
    parameters = dict(equation.params)
    if "preferred_element_type" in parameters:
        parameters["preferred_element_type"] = None
    if name in _MOVES or not any(depends):
        return [(x, any(depends)) for x in bind(equation, parameters, values)]
    if name == "convert_element_type":
        old, new = aval(equation.invars[0]).dtype, parameters["new_dtype"]
        narrower = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
        narrower = narrower and jnp.finfo(new).nmant < jnp.finfo(old).nmant
        # A conversion to fewer bits is a rounding, and rounds in steps.
        if old != new and (narrower or not jnp.issubdtype(new, jnp.floating)):
            raise NotAffineError(name)
        return [(values[0] if old == new else values[0].astype(new), True)]
    if not jnp.issubdtype(aval(equation.outvars[0]).dtype, jnp.floating):
        raise NotAffineError(name)  # Arithmetic of integers wraps, and division rounds.
    # The linear part is in floats, where the program may be in integers. So constants are, too.
    dtype = next(x.dtype for x, d in operands if d)
    if name in _SUMS:
        # Constants are no part of the linear part.
        values = [x if d else jnp.zeros_like(x, dtype) for x, d in operands]
    else:
        by_one = name in ("mul", "dot_general") and sum(depends) == 1
        by_first = (name == "div" or name in _CHOICES) and depends[0] and not any(depends[1:])
        if not (name in _LINEAR or by_one or by_first):
            raise NotAffineError(name)
        if name not in _CHOICES:  # Their other operands are places, which stay integers.
            values = [x if d else jnp.asarray(x).astype(dtype) for x, d in operands]
    return [(x, True) for x in bind(equation, parameters, values)]
