"""Traced programs that are affine in their inputs, and the linear part of such a program."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._exact._numerics import compute_dtype
from dpjax._tracing._walks import bind, called, run

# One operand, whose elements are moved and copied.
_MOVES = frozenset(
    (
        *("reshape", "broadcast_in_dim", "transpose", "slice", "rev", "squeeze", "expand_dims"),
        *("copy", "copy_p"),
    )
)
# One operand, of whose elements it makes sums.
_LINEAR = frozenset(("reduce_sum", "cumsum", "neg"))
# Several operands that are added up or put next to each other.
_SUMS = frozenset(("add", "sub", "add_any", "concatenate"))
# One operand of whose elements it takes some, by constant others.
_CHOICES = frozenset(("gather", "dynamic_slice"))


class NotAffineError(Exception):
    """An operation is not known to be affine."""


def is_affine(program: jex.ClosedJaxpr) -> bool:
    """Whether a program of real arrays is affine in all its inputs, by its operations.

    Its derivative would not tell: that of a rounding is 0, and still it jumps.
    """
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, compute_dtype(v.aval.dtype)) for v in _in(program)]
    try:
        jax.eval_shape(lambda *x: linear_part(program, x), *inputs)
    except NotAffineError:
        return False
    return True


def linear_part(program: jex.ClosedJaxpr, inputs: Any) -> list[Any]:
    """f(x) - f(0) for an affine program f, without computing either, so that nothing cancels.

    Args:
        program: an affine program.
        inputs: float arrays of the shapes of its inputs.

    Returns:
        Float arrays of the shapes of its outputs.

    Raises:
        NotAffineError: if an operation is not known to be affine.
    """
    outputs = run(program, [(x, True) for x in inputs], _apply, _constant)
    return [
        x if depends else jnp.zeros(v.aval.shape, compute_dtype(v.aval.dtype))
        for (x, depends), v in zip(outputs, program.jaxpr.outvars, strict=True)
    ]


# A value, and whether it depends on the inputs: then it stands for its linear part.
_Known = tuple[Any, bool]


def _in(program: jex.ClosedJaxpr) -> Any:
    return program.jaxpr.invars


def _constant(value: Any) -> _Known:
    return value, False


def _apply(equation: Any, operands: list[_Known]) -> list[_Known]:
    name = equation.primitive.name
    values = [x for x, _ in operands]
    depends = [d for _, d in operands]
    if inner := called(equation):
        return run(inner, operands, _apply, _constant)
    if list(jex.jaxprs_in_params(equation.params)):
        raise NotAffineError(name)
    if not any(depends):
        return [(x, False) for x in _bind(equation, values)]
    if name in _MOVES:
        return [(x, True) for x in _bind(equation, values)]
    if name == "convert_element_type":
        return [(_converted(equation, values[0]), True)]
    if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        raise NotAffineError(name)  # Arithmetic of integers wraps, and division rounds.
    if name in _SUMS:
        # What does not depend on the inputs is no part of the linear part.
        terms = [x if d else jnp.zeros_like(x, _dtype(values, depends)) for x, d in operands]
        return [(_bind(equation, terms)[0], True)]
    if name in _CHOICES and _is_linear_by_its_operands(name, depends):
        return [(x, True) for x in _bind(equation, values)]
    if name in _LINEAR or _is_linear_by_its_operands(name, depends):
        return [(x, True) for x in _bind(equation, _in_floats(values, depends))]
    raise NotAffineError(name)


def _is_linear_by_its_operands(name: str, depends: list[bool]) -> bool:
    if name in ("mul", "dot_general"):
        return sum(depends) == 1
    return (name == "div" or name in _CHOICES) and depends[0] and not any(depends[1:])


def _in_floats(values: list[Any], depends: list[bool]) -> list[Any]:
    """Constants next to a linear part, which is in floats where the program may be in integers."""
    dtype = _dtype(values, depends)
    return [x if d else jnp.asarray(x).astype(dtype) for x, d in zip(values, depends, strict=True)]


def _dtype(values: list[Any], depends: list[bool]) -> Any:
    return next(x.dtype for x, d in zip(values, depends, strict=True) if d)


def _converted(equation: Any, linear: jax.Array) -> jax.Array:
    """The linear part of a conversion; one to fewer bits is a rounding, and rounds in steps."""
    old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    if old == new:
        return linear
    if not jnp.issubdtype(new, jnp.floating):
        raise NotAffineError("convert_element_type")
    if jnp.issubdtype(old, jnp.floating) and jnp.finfo(new).nmant < jnp.finfo(old).nmant:
        raise NotAffineError("convert_element_type")
    return linear.astype(new)


def _bind(equation: Any, values: list[Any]) -> list[Any]:
    parameters = dict(equation.params)
    if "preferred_element_type" in parameters:
        parameters["preferred_element_type"] = None
    return bind(equation, parameters, values)
