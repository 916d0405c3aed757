"""The lanes of a `vmap` do not touch each other, and what breaks that.

Bounds on one record assume it where records are lanes: per-example gradients, the predicates of
queries, the records of an oracle, the statistics of a sum. A lane of JAX's own operations computes
what it would compute alone, but for rounding, whatever the other lanes hold. The exceptions are all
in this file.
"""

from collections.abc import Callable
from typing import Any

import jax

from dpjax._foreign import is_own, key_implementations
from dpjax._programs import refuse_outside_code
from dpjax._walks import equations

# Under `vmap` all lanes get bits of the first lane's key.
_FIRST_KEY_FOR_ALL = frozenset(("rng_bit_generator", "rng_uniform"))
_DRAWN_BY_THEM = frozenset(("rbg", "unsafe_rbg"))
# Code that JAX does not see into: a kernel may read memory beyond its own block, and another may
# compute something else where it is batched or cut up.
_OPAQUE = frozenset(
    (
        *("pallas_call", "core_map", "mpmd_map", "triton_kernel_call", "tpu_custom_call"),
        *("custom_partitioning", "call_exported", "call_hi_primitive"),
    )
)


def touching(traced: Any) -> str | None:
    """What a traced program must not do for lanes not to touch each other; None if it does not."""
    for effect in traced.effects:
        # That of an axis which is bound inside is not among them.
        if type(effect).__name__ == "NamedAxisEffect":
            return f"look across a named axis, {effect.name!r}"
    for equation in equations(traced.jaxpr):
        operation = equation.primitive.name
        if operation == "custom_vmap_call":
            return "have a rule for vmap of its own (custom_vmap); leave that to JAX"
        if operation in _FIRST_KEY_FOR_ALL:
            return f"draw by {operation}; draw with jax.random"
        if operation in _OPAQUE or not is_own(equation.primitive):
            return f"use {operation}, whose code JAX does not see"
    for implementation in key_implementations(traced.jaxpr):
        if implementation.name in _DRAWN_BY_THEM:
            return (
                f"draw with {implementation.name} keys, whose bits are all from the first lane's"
                ' key; make keys by jax.random.key(seed, impl="threefry2x32")'
            )
    return None


def refuse_touching(name: str, traced: Any) -> None:
    """Refuses a program, what `name` is, whose lanes may touch each other under `vmap`."""
    if found := touching(traced):
        raise ValueError(
            f"{name} must not {found}. Under jax.vmap, what it makes of one could depend on others"
        )


def check_lanes(name: str, function: Callable[..., Any], *batched: Any) -> None:
    """Refuses a function of one example whose lanes may touch, given arrays of many examples."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batched)
    traced = jax.make_jaxpr(function)(*one)
    refuse_touching(name, traced)
    # Code outside of JAX, and references, may remember one example when they see another.
    refuse_outside_code(name, traced)
