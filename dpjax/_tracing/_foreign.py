"""Operations and key implementations that are not JAX's own.

A traced program contains operations, not their code. An operation of JAX is known to compute the
same alone and under `vmap`. Any other operation could compute anything. So operations of installed
libraries are replaced by their implementations in operations of JAX, and operations of the user are
refused. Key implementations must be those of JAX or dpjax.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._tracing._evaluate import without_rules
from dpjax._tracing._host_code import is_installed
from dpjax._tracing._walks import Atom, Equation, aval, equations, replaced, specs

# Libraries build their operations from those of other libraries. This bounds the nesting.
_MOST_NESTED = 16
_own: set[jex.Primitive] = set()


def is_own(primitive: jex.Primitive) -> bool:
    """Whether an operation is JAX's own. Its object decides, since a user may reuse its name."""
    if primitive not in _own:
        modules = [x for x in list(sys.modules) if x.partition(".")[0] in ("jax", "jaxlib")]
        _own.update(_primitives_in(modules))
    return primitive in _own


def in_own_operations(name: str, traced: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program in JAX's own operations; `name` is for messages."""
    for level in range(_MOST_NESTED + 1):
        for implementation in key_implementations(traced.jaxpr):
            functions = (implementation.seed, implementation.split, implementation.fold_in)
            makers = [
                getattr(f, "__module__", "") for f in (*functions, implementation.random_bits)
            ]
            if not {str(module).partition(".")[0] for module in makers} <= {"jax", "dpjax"}:
                raise ValueError(
                    f"{name} must draw with keys of JAX or of dpjax.random, got the implementation"
                    f" {implementation.name!r}, whose code is unknown"
                )
        traced = without_rules(traced)
        foreign = {x.primitive for x in equations(traced.jaxpr) if not is_own(x.primitive)}
        if not foreign:
            break
        installed = [module for module in list(sys.modules) if is_installed(module)]
        unknown = foreign - _primitives_in(installed) if level < _MOST_NESTED else foreign
        if unknown:
            raise ValueError(
                f"{name} must be made of JAX's own operations or those of installed packages, got"
                f" {sorted(primitive.name for primitive in unknown)}: nothing shows what else they"
                " compute, alone or under jax.vmap. Call the functions of JAX that they stand for"
            )
        again = jax.make_jaxpr(lambda *xs, program=traced: replaced(program, xs, _computed))
        traced = again(*specs(traced.in_avals))
    return traced


def _computed(equation: Equation, operands: list[jax.Array]) -> list[jax.Array] | None:
    """The outputs of a library's operation, by the library's own implementation."""
    primitive = equation.primitive
    if is_own(primitive):
        return None
    with equation.ctx.manager:
        outputs = primitive.impl(*operands, **equation.params)
    return list(outputs) if primitive.multiple_results else [outputs]


def _primitives_in(modules: list[str]) -> set[jex.Primitive]:
    """The operations that modules define."""
    found = (sys.modules.get(module) for module in modules)
    values = (value for module in found for value in list(getattr(module, "__dict__", {}).values()))
    return {value for value in values if issubclass(type(value), jex.Primitive)}


def key_implementations(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """The implementations of all keys in a program."""
    atoms: list[Atom] = [*jaxpr.invars, *jaxpr.constvars]
    for equation in equations(jaxpr):
        atoms += (*equation.invars, *equation.outvars)
    dtypes: set[Any] = {getattr(aval(atom), "dtype", jnp.dtype(bool)) for atom in atoms}
    for dtype in dtypes:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            yield dtype._impl
