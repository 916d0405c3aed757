"""Primitives and key implementations that are not part of JAX: replaced or refused.

A jaxpr contains primitives, but not the code that implements them. For JAX's own primitives it is
known that they compute the same alone and under `vmap`. Any other primitive could compute anything.
So primitives of installed libraries are replaced by their implementations, which consist of JAX's
primitives. Primitives that the user defined are refused. Keys must have an implementation of JAX or
dpjax.
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

# The implementation of one library's primitive may use primitives of another library. This is the
# largest supported depth of such nesting.
_MOST_NESTED = 16
_own: set[jex.Primitive] = set()


def is_own(primitive: jex.Primitive) -> bool:
    """Whether a primitive belongs to JAX.

    Primitives are compared as objects, because a user may reuse the name of one of JAX's.
    """
    if primitive not in _own:
        modules = [x for x in list(sys.modules) if x.partition(".")[0] in ("jax", "jaxlib")]
        _own.update(_primitives_in(modules))
    return primitive in _own


def in_own_operations(name: str, traced: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites a program so that it only has JAX's own primitives; `name` is for messages."""
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
                f"{name} must be made of JAX's own primitives or primitives of installed "
                f"packages, got {sorted(primitive.name for primitive in unknown)}: dpjax cannot "
                "check what these primitives compute, alone or under jax.vmap. Call functions "
                "of JAX instead"
            )
        again = jax.make_jaxpr(lambda *xs, program=traced: replaced(program, xs, _computed))
        traced = again(*specs(traced.in_avals))
    return traced


def _computed(equation: Equation, operands: list[jax.Array]) -> list[jax.Array] | None:
    """Runs a library's implementation of its own primitive; None for primitives of JAX."""
    primitive = equation.primitive
    if is_own(primitive):
        return None
    with equation.ctx.manager:
        outputs = primitive.impl(*operands, **equation.params)
    return list(outputs) if primitive.multiple_results else [outputs]


def _primitives_in(modules: list[str]) -> set[jex.Primitive]:
    """Returns all primitives that are global variables of some modules."""
    found = (sys.modules.get(module) for module in modules)
    values = (value for module in found for value in list(getattr(module, "__dict__", {}).values()))
    return {value for value in values if issubclass(type(value), jex.Primitive)}


def key_implementations(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Yields the implementations of all keys that occur in a program."""
    atoms: list[Atom] = [*jaxpr.invars, *jaxpr.constvars]
    for equation in equations(jaxpr):
        atoms += (*equation.invars, *equation.outvars)
    dtypes: set[Any] = {getattr(aval(atom), "dtype", jnp.dtype(bool)) for atom in atoms}
    for dtype in dtypes:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            yield dtype._impl
