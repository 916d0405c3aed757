"""Lanes of a `vmap` do not touch each other, with some exceptions.

Bounds on one record assume it where records are lanes: per-example gradients, the predicates of
queries, the records of an oracle, the statistics of a sum. A lane of JAX's own operations computes
the same as alone, up to rounding. This file lists the exceptions but one: convolutions by many
kernels, which `_evaluate.py` runs one after the other wherever lanes must not touch.
"""

import itertools
import weakref
from collections.abc import Callable

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax._tracing._evaluate import looks_at_other_lanes, traced_lane
from dpjax._tracing._foreign import is_own, key_implementations
from dpjax._tracing._programs import refuse_outside_code
from dpjax._tracing._walks import JITS, Equation, aval, equations

# Under `vmap` all lanes get bits of the first lane's key.
_FIRST_KEY_FOR_ALL = frozenset(("rng_bit_generator", "rng_uniform"))
_DRAWN_BY_THEM = frozenset(("rbg", "unsafe_rbg"))
# JAX does not see into this code. A kernel may read memory beyond its own block, and other code may
# compute something else when it is batched or cut up.
_OPAQUE = frozenset(
    (
        *("pallas_call", "core_map", "mpmd_map", "triton_kernel_call", "tpu_custom_call"),
        *("custom_partitioning", "call_exported", "call_hi_primitive"),
    )
)


# XLA gives one result for these, however it vectorizes: they move, compare, and compute in bits.
_EXACT = JITS | frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "reduce_and", "reduce_or"),
        *("broadcast_in_dim", "reshape", "squeeze", "slice", "transpose", "concatenate"),
    )
)
# The same for integers. In floats these round, and the machine decides where NaN goes in a minimum.
# Division is left out: XLA leaves division of integers by 0 to the machine.
_EXACT_FOR_INTEGERS = frozenset(
    (
        *("add", "sub", "mul", "neg", "abs", "sign", "min", "max", "clamp", "reduce_sum"),
        *("reduce_max", "reduce_min", "convert_element_type"),
    )
)


# Programs whose lanes do not touch, which takes longer to find out than a warm sampling has.
_SEPARATE = weakref.WeakSet[jex.Jaxpr]()


def touching(traced: jex.ClosedJaxpr) -> str | None:
    """The first thing that a traced program does and that lets lanes touch, or None."""
    if traced.jaxpr in _SEPARATE:
        return None
    if found := _touching(traced):
        return found
    _SEPARATE.add(traced.jaxpr)
    return None


def _touching(traced: jex.ClosedJaxpr) -> str | None:
    for effect in traced.effects:
        # The effect of an axis that is bound inside is not among them.
        if type(effect).__name__ == "NamedAxisEffect":
            return f"look across a named axis, {effect.name!r}"
    for equation in equations(traced.jaxpr):
        operation = equation.primitive.name
        if looks_at_other_lanes(equation):
            return "call what dpjax computes for all lanes together, such as a mechanism"
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


def refuse_touching(name: str, traced: jex.ClosedJaxpr) -> None:
    """Refuses a program if its lanes may touch under `vmap`; `name` is for messages."""
    if found := touching(traced):
        raise ValueError(
            f"{name} must not {found}. Under jax.vmap, its value for one could depend on others"
        )


def is_exact(traced: jex.ClosedJaxpr) -> bool:
    """Whether each lane has the same bits alone and among others, unless a number is subnormal.

    Floats are only moved and compared, so nothing is rounded. A machine may take a subnormal number
    for 0 in one lane and not in another, so no constant may be subnormal.
    """
    found = list(equations(traced.jaxpr))
    inner = [x.params["jaxpr"] for x in found if x.primitive.name in JITS]
    constants: list[tuple[jax.Array, np.dtype]] = [
        (constant, variable.aval.dtype)
        for program in (traced, *inner)
        for constant, variable in zip(program.consts, program.jaxpr.constvars, strict=True)
    ]
    literals = [x for e in found for x in e.invars if isinstance(x, jex.Literal)]
    constants += [(x.val, aval(x).dtype) for x in literals]
    return all(map(_is_exact, found)) and not any(itertools.starmap(_may_be_subnormal, constants))


def _is_exact(equation: Equation) -> bool:
    operation = equation.primitive.name
    if operation == "select_n":  # Among more than two XLA leaves it to the machine, too.
        return aval(equation.invars[0]).dtype == bool
    if operation in _EXACT:
        return True
    atoms = (*equation.invars, *equation.outvars)
    return operation in _EXACT_FOR_INTEGERS and not any(
        jnp.issubdtype(aval(atom).dtype, jnp.inexact) for atom in atoms
    )


def _may_be_subnormal(constant: jax.Array, dtype: np.dtype) -> bool:
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    if _checks.is_traced(constant):
        return True  # Its value is not known yet.
    sizes = np.abs(np.asarray(constant, dtype))
    return bool(np.any((sizes > 0) & (sizes < jnp.finfo(dtype).tiny)))


def check_lanes(
    name: str, function: Callable[..., PyTree], *batched: PyTree
) -> tuple[Callable[..., PyTree], jex.ClosedJaxpr]:
    """Refuses a function of one example whose lanes may touch, given arrays of many examples.

    Returns:
        A function that runs the checked program, and that program.
    """
    checked, traced = traced_lane(function, *batched)
    refuse_touching(name, traced)
    # Code outside of JAX, and references, may remember one example when they see another.
    refuse_outside_code(name, traced)
    return checked, traced
