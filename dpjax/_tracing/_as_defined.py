"""Operations with the results that XLA defines: on 8 bits, on bfloat16, and extrema of NaN.

Where operations feed a sum or an extremum, jaxlib 0.10 on a CPU hands them to YNNPACK:

- It takes numbers of 8 bits for approximate ones. It rounds casts from floats or leaves them out,
  divides as floats do, and does not wrap.
- Its maximum of NaN and a number is the number.
- It reads and writes beyond arrays of bfloat16 that are multiplied by a constant and then given to
  a function such as exp. The sums then hold other numbers from memory, or the process crashes.

So the value of an operation depends on the operations around it, and on the size of a batch. Values
of neighbors may lie further apart than was proved or sampled.

Here 8 bits are computed in 32, and fit into 8 before they are cast. An extremum is NaN if a number
is. And arithmetic on bfloat16 is done in float32, so that YNNPACK gets no bfloat16: the 16 bits of
such a number are the first half of those of a float32. No compiler has a choice then.
`prove_sensitivity` reads a program as XLA defines it, and a release and the sampler run it as
here.
"""

import functools
from collections.abc import Sequence

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
# All that XLA computes in float32 where they are of bfloat16. Of some products XLA makes sums.
_OF_FLOATS = frozenset(
    (
        *("abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh"),
        *("bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "conv_general_dilated", "cos"),
        *("cosh", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "digamma", "div"),
        *("dot_general", "eq", "erf", "erf_inv", "ragged_dot_general"),
        *("erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a"),
        *("igammac", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic"),
        *("lt", "max", "min", "mul", "ne", "neg", "polygamma", "pow", "reduce_max", "reduce_min"),
        *("reduce_precision", "reduce_prod", "reduce_sum", "reduce_window_sum"),
        *("regularized_incomplete_beta", "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt"),
        *("square", "sub", "tan", "tanh", "zeta", _CAST),
    )
)
_CHOICES = {"max": lax.gt, "min": lax.lt}
_EXTREMA = frozenset(("reduce_max", "reduce_min"))


def may_differ(jaxpr: jex.Jaxpr) -> bool:
    """Whether a program has operations that may be computed otherwise."""
    return any(_is_of_bytes(x) or _ignores_nan(x) or _takes_bfloat16(x) for x in equations(jaxpr))


def as_defined(equation: Equation, operands: Sequence[jax.Array]) -> list[jax.Array] | None:
    """The outputs of such an operation; None for others."""
    if not _takes_bfloat16(equation):
        output = _of_wide(equation, *operands)
        return None if output is None else [output]

    def in_float32(*operands: jax.Array) -> jax.Array:
        wide = [_in_float32(x) if x.dtype == jnp.bfloat16 else x for x in operands]
        output = _of_wide(equation, *wide)
        found = _output(equation, *wide) if output is None else output
        return found.astype(aval(equation.outvars[0]).dtype)

    plain = functools.partial(_output, equation)
    return [lax.platform_dependent(*operands, cpu=in_float32, default=plain)]


def _of_wide(equation: Equation, *operands: jax.Array) -> jax.Array | None:
    """The output of an operation without operands in bfloat16."""
    if _is_of_bytes(equation):
        return _of_bytes(equation, *operands)
    if not _ignores_nan(equation):
        return None
    if equation.primitive.name in _CHOICES:
        return _chosen(equation, *operands)
    (x,) = operands
    if x.size == 0:
        return None
    of_all, plain = (functools.partial(f, equation) for f in (_extremum, _output))
    return lax.platform_dependent(x, cpu=of_all, default=plain)


def _takes_bfloat16(equation: Equation) -> bool:
    if equation.primitive.name not in _OF_FLOATS:
        return False
    return any(aval(x).dtype == jnp.bfloat16 for x in equation.invars)


def _in_float32(x: jax.Array) -> jax.Array:
    """The same numbers, by their bits: a cast would be handed over with the array."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << np.uint32(16), jnp.float32)


def _is_of_bytes(equation: Equation) -> bool:
    return equation.primitive.name in _ARITHMETIC and aval(equation.outvars[0]).dtype.name in _BYTES


def _of_bytes(equation: Equation, *operands: jax.Array) -> jax.Array:
    dtype = aval(equation.outvars[0]).dtype
    if equation.primitive.name == _CAST:
        return _output(equation, _fitted(operands[0], dtype))
    words = [lax.convert_element_type(x, jnp.int32) for x in operands]
    return lax.convert_element_type(_wrapped(_output(equation, *words), dtype), dtype)


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
        lambda integers: _output(equation, integers),
        largest=equation.primitive.name == "reduce_max",
    )


def _output(equation: Equation, *operands: jax.Array) -> jax.Array:
    (output,) = bind(equation, equation.params, operands)
    return output
