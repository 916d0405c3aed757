"""Runs traced programs so that each lane of a `vmap` computes the same as without `vmap`.

The sampler runs a target on many databases at once by `vmap`, and a release runs it on one
database. Four kinds of operations could give different results in these two cases, and are
replaced:

- Batched LAPACK calls. They may hang on a CPU, so each call gets only one matrix.
- Convolutions whose kernels differ between lanes. `vmap` combines them to one grouped convolution.
  XLA may pad the groups with zeros, and zero times infinity is NaN. So if one lane overflows, other
  lanes may become NaN. These convolutions run one after the other instead.
- Functions with a rule of `jax.custom_batching`. A trace does not show the code of the rule, which
  may compute something else than the function. So users' rules are removed.
- Some operations on 8-bit integers, on bfloat16 and on NaN. Their results on a CPU depend on the
  operations around them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._core._types import PyTree
from dpjax._exact._numerics import extremum
from dpjax._tracing._walks import (
    Equation,
    aval,
    bind,
    equations,
    names,
    replaced,
    specs,
)

V = TypeVar("V")
Arrays: TypeAlias = Sequence[jax.Array]
# Primitives that XLA computes by LAPACK calls on a CPU. All operands and results have the same
# leading batch axes. Without the batch axes, at least one operand is a matrix, and no operand has
# more than two axes.
NAMES = names(
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr",
    "schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve",
)
_CONVOLUTION = "conv_general_dilated"
_CONCERNED = NAMES | {_CONVOLUTION}
_BYTES = frozenset(("int8", "uint8"))
_CAST = "convert_element_type"
# Primitives of elementwise arithmetic, including casts but no bitwise operations.
_ARITHMETIC = names(
    "abs add add_any clamp div integer_pow max min mul neg rem sign square sub",
    "convert_element_type",
)
# Primitives that XLA computes in float32, or rewrites as sums, if their operands are bfloat16.
_OF_FLOATS = names(
    "abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp",
    "conv_general_dilated cos cosh cumlogsumexp cummax cummin cumprod cumsum digamma div",
    "dot_general eq erf erf_inv ragged_dot_general erfc exp exp2 expm1 floor ge gt igamma",
    "igamma_grad_a igammac integer_pow is_finite le lgamma log log1p logistic lt max min mul ne",
    "neg polygamma pow reduce_max reduce_min reduce_precision reduce_prod reduce_sum",
    "reduce_window_sum regularized_incomplete_beta rem round rsqrt sign sin sinh sqrt square sub",
    "tan tanh zeta convert_element_type",
)
_CHOICES = {"max": lax.gt, "min": lax.lt}
_EXTREMA = names("max min reduce_max reduce_min")


def evaluate(program: jex.ClosedJaxpr, *operands: jax.Array) -> list[jax.Array]:
    """Runs a traced program. Under `vmap`, no lane influences another lane."""
    if any(map(_may_differ, equations(program.jaxpr))):
        return replaced(program, operands, _replacement)
    return jex.jaxpr_as_fun(program)(*operands)


def traced_lane(
    function: Callable[..., PyTree], *batched: PyTree
) -> tuple[Callable[..., PyTree], jex.ClosedJaxpr]:
    """Returns a function of one lane (one entry of a batch), and its traced program.

    The leading axis of the arrays `batched` counts the lanes. Under `vmap`, no lane of the returned
    function influences another lane.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batched)

    # A new function is made at each call. If the same function object were traced again, JAX would
    # reuse its old trace, even if a closed-over value has changed.
    traced, outputs = jax.make_jaxpr(lambda *xs: function(*xs), return_shape=True)(*one)
    traced = without_rules(traced)

    def lane(*arguments: PyTree) -> PyTree:
        found = evaluate(traced, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(outputs), found)

    return lane, traced


def vmapped(function: Callable[..., PyTree], *batched: PyTree) -> PyTree:
    """Returns `jax.vmap(function)(*batched)`, computed so that no lane influences another lane."""
    lane, _ = traced_lane(function, *batched)
    return jax.vmap(lane)(*batched)


def _replacement(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array] | None:
    name = equation.primitive.name
    if name in NAMES:
        return one_matrix_each(equation, operands)
    if name == _CONVOLUTION:
        return [_kernel_by_kernel(functools.partial(_convolution_as_defined, equation))(*operands)]
    return as_defined(equation, operands)


def _convolution_as_defined(equation: Equation, *operands: jax.Array) -> jax.Array:
    (output,) = as_defined(equation, operands) or [_output(equation, *operands)]
    return output


def _kernel_by_kernel(convolution: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wraps a convolution: under a `vmap` over kernels, it is computed for one kernel at a time."""

    @OneByOne
    def rule(_: int, mapped: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        if not mapped[1]:  # If all lanes share one kernel, `vmap` only makes the batch larger.
            return _kernel_by_kernel(jax.vmap(convolution, (0, None)))(*operands), True
        if not mapped[0]:
            return lax.map(lambda kernel: computed(operands[0], kernel), operands[1]), True
        return lax.map(lambda pair: computed(*pair), operands), True

    computed = with_rule(convolution, rule)
    return computed


# LAPACK calls: on a CPU, each call gets one matrix.
#
# XLA's CPU backend has a pool with one thread for each core, which all devices and programs share.
# jaxlib 0.10 and 0.11.0 split a batched LAPACK call into tasks for the same pool, and block a
# thread until the tasks are done (`ParallelBatchMap` in lapack_kernels.cc). If such calls block all
# threads, no thread is left to run the tasks, which is a deadlock. A call with one matrix is never
# split.
#
# jaxlib 0.11.1 and 0.11.2 did not hang in our runs. Once dpjax requires jaxlib 0.11.1 or later on
# every version of Python, this replacement can be removed. Convolutions still need `OneByOne`.


class OneByOne(functools.partial[Any]):
    """A rule for `vmap` under which every lane computes the same as without `vmap`."""


def with_rule(call: Callable[..., V], rule: OneByOne) -> Callable[..., V]:
    """Returns a function that computes `call`, with `rule` as its rule for `vmap`."""
    computed = custom_vmap(lambda *operands: call(*operands))
    computed.def_vmap(rule)
    # `custom_vmap` does not support reverse-mode derivatives, so derivatives are computed from
    # `call` itself.
    differentiable = jax.custom_jvp(lambda *operands: computed(*operands))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(call, primals, tangents))
    return differentiable


def one_matrix_each(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array]:
    """Runs a LAPACK operation by calls that get one matrix each.

    Under `vmap`, these calls become a loop on a CPU, and one batched call on accelerators.
    """

    def call(*one: jax.Array) -> Arrays:
        return bind(equation, equation.params, one)

    @OneByOne
    def loop(size: int, mapped: list[bool], *operands: jax.Array) -> tuple[Arrays, list[bool]]:
        def one_by_one(*operands: jax.Array) -> Arrays:
            def at(index: jax.Array) -> Arrays:
                picked = (
                    lax.dynamic_index_in_dim(x, index, keepdims=False) if m else x
                    for x, m in zip(operands, mapped, strict=True)
                )
                return alone(*picked)

            return lax.map(at, lax.iota("int32", size))

        together = jax.vmap(call, in_axes=tuple(0 if m else None for m in mapped))
        if size == 0:  # A batch of size 0 is not split into tasks, so it needs no loop.
            outputs = together(*operands)
        else:
            outputs = lax.platform_dependent(*operands, cpu=one_by_one, default=together)
        return outputs, [True] * len(outputs)

    alone = batched = with_rule(call, loop)
    for _ in range(max(x.ndim for x in operands) - 2):
        batched = jax.vmap(batched)
    return batched(*operands)


# Rules for `vmap`.


def without_rules(traced: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Traces a program again. Its functions lose the rules for `vmap` that users gave them."""
    if not any(_has_rule(x, of_dpjax=False) for x in equations(traced.jaxpr)):
        return traced
    again = jax.make_jaxpr(lambda *operands: replaced(traced, operands, _function_itself))
    return again(*specs(traced.in_avals))


def looks_at_other_lanes(equation: Equation) -> bool:
    """Whether an operation has a rule of dpjax for `vmap` that uses several lanes together."""
    rule = getattr(equation.params.get("rule"), "rule", None)
    return _has_rule(equation, of_dpjax=True) and not isinstance(rule, OneByOne)


def _has_rule(equation: Equation, *, of_dpjax: bool) -> bool:
    """Whether an operation has a rule for `vmap`, from dpjax or from a user.

    If `of_dpjax`, only a rule of dpjax counts. Otherwise, only a rule of a user counts.
    """
    if equation.primitive.name != "custom_vmap_call":
        return False
    return of_dpjax == (str(equation.params["rule"].__module__).partition(".")[0] == "dpjax")


def _function_itself(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array] | None:
    if _has_rule(equation, of_dpjax=False):
        return replaced(equation.params["call"], operands, _function_itself)
    return None


# Operations whose results on a CPU differ from XLA's definitions.
#
# On a CPU, jaxlib 0.10 uses the library YNNPACK for operations that precede a sum or an extremum.
# YNNPACK deviates from XLA's definitions:
#
# - It treats 8-bit integers as approximate: it rounds casts from floats or omits them, divides
#   integers as floats, and does not wrap around.
# - Its maximum of NaN and a number is the number.
# - If an array of bfloat16 is multiplied by a constant and then passed to a function such as exp,
#   it reads and writes beyond the end of the array. Then sums contain other numbers from memory, or
#   the process crashes.
#
# So the result of an operation depends on the operations around it, and on the batch size. Then the
# values of neighboring databases could differ by more than was proved or sampled.
#
# This file computes 8-bit arithmetic in 32 bits, and wraps results to 8 bits before the cast. An
# extremum is NaN if one of its operands is NaN. Arithmetic on bfloat16 is done in float32. Bit
# operations convert the numbers to float32 and back, so that YNNPACK never sees bfloat16. With
# these replacements, results do not depend on the operations around them. `prove_sensitivity`
# assumes these results.


def _may_differ(equation: Equation) -> bool:
    """Whether the result of an operation may depend on other lanes or on operations around it."""
    if equation.primitive.name in _CONCERNED:
        return True
    return _is_of_bytes(equation) or _ignores_nan(equation) or _takes_bfloat16(equation)


def as_defined(equation: Equation, operands: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Runs an operation as XLA defines it if jaxlib may deviate from XLA; else returns None."""
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
    """Runs an operation as XLA defines it. No operand may be bfloat16.

    Returns None if jaxlib does not deviate from XLA's definition.
    """
    if _is_of_bytes(equation):
        return _of_bytes(equation, *operands)
    if not _ignores_nan(equation):
        return None
    if equation.primitive.name in _CHOICES:
        return _chosen(equation, *operands)
    (x,) = operands
    if x.size == 0:
        return None
    plain, largest = functools.partial(_output, equation), equation.primitive.name == "reduce_max"
    of_all = functools.partial(extremum, reduce=plain, largest=largest)
    return lax.platform_dependent(x, cpu=of_all, default=plain)


def _takes_bfloat16(equation: Equation) -> bool:
    if equation.primitive.name not in _OF_FLOATS:
        return False
    return any(aval(x).dtype == jnp.bfloat16 for x in equation.invars)


def _in_float32(x: jax.Array) -> jax.Array:
    """Converts bfloat16 to float32 by bit operations.

    A cast would let jaxlib pass bfloat16 to YNNPACK, which handles it wrongly.
    """
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
    """Returns the values that a cast to 8 bits should give, but in a wider dtype.

    The cast to 8 bits that follows is then exact.
    """
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
    """Wraps integers of 32 bits to the range of an 8-bit dtype, without changing their dtype."""
    lowest = jnp.iinfo(dtype).min
    return ((x - lowest) & 255) + lowest


def _ignores_nan(equation: Equation) -> bool:
    # The name is checked first, because some operations have no outputs.
    if equation.primitive.name not in _EXTREMA:
        return False
    return jnp.issubdtype(aval(equation.outvars[0]).dtype, jnp.floating)


def _chosen(equation: Equation, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the larger or smaller of two numbers; NaN if one of them is NaN."""
    x, y = jnp.broadcast_arrays(x, y)
    further, is_max = _CHOICES[equation.primitive.name], equation.primitive.name == "max"
    # In this comparison, 0.0 counts as larger than -0.0, as XLA defines it.
    first = further(x, y) | jnp.isnan(x) | ((x == y) & (jnp.signbit(x) != is_max))
    return jnp.where(first, x, y).astype(aval(equation.outvars[0]).dtype)


def _output(equation: Equation, *operands: jax.Array) -> jax.Array:
    (output,) = bind(equation, equation.params, operands)
    return output
