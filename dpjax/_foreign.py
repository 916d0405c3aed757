"""What is not JAX's own: operations and key implementations that a trace knows by name alone.

The name of an operation of JAX stands for JAX's code, alone and under `vmap`. Another's may stand
for anything, anywhere. So an operation of an installed library is replaced by what it computes, in
JAX's own operations, and one of the user's is refused; so are keys that are not JAX's or dpjax's.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._by_value import is_installed
from dpjax._walks import equations, replaced, specs

# Libraries build their operations of one another's, but not without end.
_MOST_NESTED = 16
_own: set[Any] = set()


def is_own(primitive: Any) -> bool:
    """Whether an operation is JAX's: by the object, for names may be anybody's."""
    if primitive not in _own:
        _own.update(_primitives_in(lambda module: _package(module) in ("jax", "jaxlib")))
    return primitive in _own


def in_own_operations(name: str, traced: Any) -> Any:
    """The same program without operations that are not JAX's own; `name` is for messages."""
    for _ in range(_MOST_NESTED):
        _refuse_foreign_keys(name, traced.jaxpr)
        foreign = _foreign_in(traced)
        if not foreign:
            return traced
        _refuse(name, foreign - _primitives_in(is_installed))
        traced = _once_replaced(traced)
    _refuse(name, _foreign_in(traced))
    return traced


def _foreign_in(traced: Any) -> set[Any]:
    return {x.primitive for x in equations(traced.jaxpr) if not is_own(x.primitive)}


def _once_replaced(traced: Any) -> Any:
    return jax.make_jaxpr(lambda *xs: replaced(traced, xs, _computed))(*specs(traced.in_avals))


def _computed(equation: Any, operands: list[Any]) -> list[Any] | None:
    """What a library says that its operation computes."""
    primitive = equation.primitive
    if is_own(primitive):
        return None
    with equation.ctx.manager:
        outputs = primitive.impl(*operands, **equation.params)
    return list(outputs) if primitive.multiple_results else [outputs]


def _primitives_in(is_meant: Callable[[str], bool]) -> set[Any]:
    """The operations that modules define, of those whose names are meant."""
    modules = [module for name, module in list(sys.modules.items()) if is_meant(name)]
    values = (
        value for module in modules for value in list(getattr(module, "__dict__", {}).values())
    )
    return {value for value in values if issubclass(type(value), jex.Primitive)}


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _refuse(name: str, foreign: set[Any]) -> None:
    if foreign:
        raise ValueError(
            f"{name} must be made of JAX's own operations or those of installed packages, got"
            f" {sorted(primitive.name for primitive in foreign)}: nothing shows what else they"
            " compute, alone or under jax.vmap. Call the functions of JAX that they stand for"
        )


def _refuse_foreign_keys(name: str, jaxpr: Any) -> None:
    for implementation in key_implementations(jaxpr):
        functions = (implementation.seed, implementation.split, implementation.fold_in)
        modules = [getattr(f, "__module__", None) for f in (*functions, implementation.random_bits)]
        if not {_package(module) for module in modules} <= {"jax", "dpjax"}:
            raise ValueError(
                f"{name} must draw with keys of JAX or of dpjax.random, got the implementation"
                f" {implementation.name!r}: nothing shows what it computes"
            )


def key_implementations(jaxpr: Any) -> Iterator[Any]:
    """The implementations of all keys in a program."""
    atoms = [*jaxpr.invars, *jaxpr.constvars]
    for equation in equations(jaxpr):
        atoms += (*equation.invars, *equation.outvars)
    dtypes: set[Any] = {getattr(atom.aval, "dtype", jnp.dtype(bool)) for atom in atoms}
    for dtype in dtypes:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            yield dtype._impl
