"""Arithmetic in 8 bits, with the results that XLA defines.

Where operations feed a sum or an extremum, jaxlib 0.10 on a CPU hands them to YNNPACK. That takes
numbers of 8 bits for approximate ones: it rounds casts from floats or leaves them out, divides as
floats do, and does not wrap. Compiled with other operations, the same program then has another
value, and may lie further from that of a neighbor than was proved.

So results are computed in 32 bits here, and fit into 8 bits before they are cast. No compiler has a
choice then. `global_sensitivity` reads a program as XLA defines it, and a release runs it as here.
"""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._tracing._walks import Equation, aval, bind, equations

_BYTES = frozenset(("int8", "uint8"))
_CAST = "convert_element_type"
# All that compute numbers from numbers in the same place, but for operations on bits.
_ARITHMETIC = frozenset(
    (
        *("abs", "add", "add_any", "clamp", "div", "integer_pow", "max", "min", "mul", "neg"),
        *("rem", "sign", "square", "sub", _CAST),
    )
)


def computes_bytes(jaxpr: jex.Jaxpr) -> bool:
    """Whether a program has arithmetic in 8 bits."""
    return any(map(_is_of_bytes, equations(jaxpr)))


def bytes_in_words(equation: Equation, operands: list[jax.Array]) -> list[jax.Array] | None:
    """The outputs of arithmetic in 8 bits; None for other operations."""
    if not _is_of_bytes(equation):
        return None
    dtype = aval(equation.outvars[0]).dtype
    if equation.primitive.name == _CAST:
        return bind(equation, equation.params, [_fitted(operands[0], dtype)])
    words = [lax.convert_element_type(x, jnp.int32) for x in operands]
    (result,) = bind(equation, equation.params, words)
    return [lax.convert_element_type(_wrapped(result, dtype), dtype)]


def _is_of_bytes(equation: Equation) -> bool:
    return equation.primitive.name in _ARITHMETIC and aval(equation.outvars[0]).dtype.name in _BYTES


def _fitted(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """What a cast to 8 bits makes of a number, as a number that needs no rounding or wrapping."""
    if x.dtype == bool or x.dtype == dtype:
        return x
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
