"""Operations with the results that XLA defines: arithmetic in 8 bits, and extrema of NaN.

Where operations feed a sum or an extremum, jaxlib 0.10 on a CPU hands them to YNNPACK. That takes
numbers of 8 bits for approximate ones: it rounds casts from floats or leaves them out, divides as
floats do, and does not wrap. And its maximum of NaN and a number is the number. So the value of
an operation depends on the operations around it, and on the size of a batch. Values of neighbors
may lie further apart than was proved or sampled.

So 8 bits are computed in 32 here, and fit into 8 before they are cast; and an extremum is NaN if a
number is. No compiler has a choice then. `global_sensitivity` reads a program as XLA defines it,
and a release and the sampler run it as here.
"""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._exact._numerics import extremum
from dpjax._tracing._walks import Equation, aval, bind, equations

_BYTES = frozenset(("int8", "uint8"))
_CAST = "convert_element_type"
# All that compute numbers from numbers in the same place, except operations on bits.
_ARITHMETIC = frozenset(
    (
        *("abs", "add", "add_any", "clamp", "div", "integer_pow", "max", "min", "mul", "neg"),
        *("rem", "sign", "square", "sub", _CAST),
    )
)
_CHOICES = {"max": lax.gt, "min": lax.lt}
_EXTREMA = frozenset(("reduce_max", "reduce_min"))


def may_differ(jaxpr: jex.Jaxpr) -> bool:
    """Whether a program has operations that may be computed otherwise."""
    return any(_is_of_bytes(x) or _ignores_nan(x) for x in equations(jaxpr))


def as_defined(equation: Equation, operands: list[jax.Array]) -> list[jax.Array] | None:
    """The outputs of such an operation; None for others."""
    if _is_of_bytes(equation):
        return [_of_bytes(equation, operands)]
    if not _ignores_nan(equation):
        return None
    if equation.primitive.name in _CHOICES:
        return [_chosen(equation, *operands)]
    (x,) = operands
    if x.size == 0:
        return None
    of_all, plain = (functools.partial(f, equation) for f in (_extremum, _plain))
    return [lax.platform_dependent(x, cpu=of_all, default=plain)]


def _is_of_bytes(equation: Equation) -> bool:
    return equation.primitive.name in _ARITHMETIC and aval(equation.outvars[0]).dtype.name in _BYTES


def _of_bytes(equation: Equation, operands: list[jax.Array]) -> jax.Array:
    dtype = aval(equation.outvars[0]).dtype
    if equation.primitive.name == _CAST:
        return _output(equation, [_fitted(operands[0], dtype)])
    words = [lax.convert_element_type(x, jnp.int32) for x in operands]
    return lax.convert_element_type(_wrapped(_output(equation, words), dtype), dtype)


def _fitted(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """What a cast to 8 bits makes of a number, as a number that needs no rounding or wrapping."""
    if x.dtype == bool or x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = lax.real(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _wrapped(lax.convert_element_type(x, jnp.int32), dtype)
    if x.dtype.itemsize < 4:
        x = lax.convert_element_type(x, jnp.float32)
    ends = jnp.iinfo(dtype)
    whole = jnp.clip(jnp.trunc(x), ends.min, ends.max)
    return jnp.where(jnp.isnan(x), 0, whole)


def _wrapped(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The last 8 bits, as a number of 32 bits."""
    lowest = jnp.iinfo(dtype).min
    return ((x - lowest) & 255) + lowest


def _ignores_nan(equation: Equation) -> bool:
    if equation.primitive.name not in _EXTREMA | _CHOICES.keys():  # Some others have no outputs.
        return False
    return jnp.issubdtype(aval(equation.outvars[0]).dtype, jnp.floating)


def _chosen(equation: Equation, x: jax.Array, y: jax.Array) -> jax.Array:
    """The larger or lesser of two numbers; NaN if one of them is."""
    x, y = jnp.broadcast_arrays(x, y)
    further, is_max = _CHOICES[equation.primitive.name], equation.primitive.name == "max"
    # Of two zeros, 0.0 is larger than -0.0.
    first = further(x, y) | jnp.isnan(x) | ((x == y) & (jnp.signbit(x) != is_max))
    return jnp.where(first, x, y).astype(aval(equation.outvars[0]).dtype)


def _extremum(equation: Equation, x: jax.Array) -> jax.Array:
    return extremum(
        x,
        lambda integers: _output(equation, [integers]),
        largest=equation.primitive.name == "reduce_max",
    )


def _plain(equation: Equation, x: jax.Array) -> jax.Array:
    return _output(equation, [x])


def _output(equation: Equation, operands: list[jax.Array]) -> jax.Array:
    (output,) = bind(equation, equation.params, operands)
    return output
