"""Running traced programs: what `vmap` must not compute together, and as XLA defines it.

LAPACK calls, and convolutions by many kernels, are kept apart.

`vmap` makes one grouped convolution of many that have kernels of their own. XLA may fill groups up
with zeros, and zero times infinity is NaN: one lane that overflows would make others NaN. Here such
convolutions run one after the other. `_lapack.py` says why LAPACK calls do.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
from jax import lax

from dpjax._core._types import PyTree
from dpjax._tracing._as_defined import as_defined, may_differ
from dpjax._tracing._lapack import NAMES, OneByOne, one_matrix_each, with_rule
from dpjax._tracing._rules_for_vmap import without_rules
from dpjax._tracing._walks import Equation, bind, primitives, replaced

_CONVOLUTION = "conv_general_dilated"
_CONCERNED = NAMES | {_CONVOLUTION}


def evaluate(program: jex.ClosedJaxpr, *operands: jax.Array) -> list[jax.Array]:
    """The outputs of a traced program, whose lanes stay apart under `vmap`, as XLA defines them."""
    apart = primitives(program.jaxpr).isdisjoint(_CONCERNED)
    if apart and not may_differ(program.jaxpr):
        return jex.jaxpr_as_fun(program)(*operands)
    return replaced(program, operands, _replacement)


def traced_lane(
    function: Callable[..., PyTree], *batched: PyTree
) -> tuple[Callable[..., PyTree], jex.ClosedJaxpr]:
    """A function that runs the program of one lane, apart from others; and that program."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batched)

    # A new function each time: a trace that JAX keeps may hold a stale closure.
    def fresh(*arguments: PyTree) -> PyTree:
        return function(*arguments)

    traced, outputs = jax.make_jaxpr(fresh, return_shape=True)(*one)
    traced = without_rules(traced)

    def lane(*arguments: PyTree) -> PyTree:
        found = evaluate(traced, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(outputs), found)

    return lane, traced


def vmapped(function: Callable[..., PyTree], *batched: PyTree) -> PyTree:
    """`jax.vmap(function)(*batched)`, whose lanes stay apart."""
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
    (output,) = as_defined(equation, operands) or bind(equation, equation.params, operands)
    return output


def _kernel_by_kernel(convolution: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A convolution that `vmap` over its kernels computes one after the other."""

    @OneByOne
    def rule(_: int, mapped: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        if not mapped[1]:  # Many inputs with one kernel are one longer batch, without groups.
            return _kernel_by_kernel(jax.vmap(convolution, (0, None)))(*operands), True
        if not mapped[0]:
            return lax.map(lambda kernel: computed(operands[0], kernel), operands[1]), True
        return lax.map(lambda pair: computed(*pair), operands), True

    computed = with_rule(convolution, rule)
    return computed
