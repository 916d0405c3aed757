"""Checks that the lanes of a `vmap` do not *touch*: no lane depends on another lane's data.

Some bounds on the effect of one record assume that lanes do not touch, because each record is one
lane. This concerns per-example gradients, predicates of queries, records of an oracle, and
statistics of a sum. With nearly all primitives of JAX, a lane computes the same result as without
`vmap`, up to rounding. This file lists the exceptions and refuses them. Convolutions with several
kernels are another exception, but `_evaluate.py` runs these one by one.
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
from dpjax._tracing._host_calls import is_own, key_implementations
from dpjax._tracing._programs import Program, check_concrete, refuse_outside_code
from dpjax._tracing._walks import JITS, Equation, aval, equations, names

# Under `vmap`, these primitives draw the bits of all lanes from the key of the first lane.
_FIRST_KEY_FOR_ALL = frozenset(("rng_bit_generator", "rng_uniform"))
_DRAWN_BY_THEM = frozenset(("rbg", "unsafe_rbg"))
# These primitives run code that does not consist of JAX primitives. A Pallas or Triton kernel may
# read memory beyond its own block, and other opaque code may compute something different under
# `vmap`.
_OPAQUE = names(
    "pallas_call core_map mpmd_map triton_kernel_call tpu_custom_call custom_partitioning",
    "call_exported call_hi_primitive",
)


# Primitives whose results are the same bits with and without `vmap`, because they only move
# numbers, compare them, or operate on bits.
_EXACT = JITS | names(
    "eq ne lt le gt ge and or not xor reduce_and reduce_or broadcast_in_dim reshape squeeze slice",
    "transpose concatenate",
)
# Primitives whose results on integers are the same with and without `vmap`. On floats, the results
# may differ, because sums are rounded, and a minimum may treat NaN differently. Division is not in
# the list, because the result of dividing an integer by 0 depends on the machine.
_EXACT_FOR_INTEGERS = names(
    "add sub mul neg abs sign min max clamp reduce_sum reduce_max reduce_min convert_element_type"
)


# Caches programs in which no lane (one entry of a batch) influences another. Without this cache,
# the check would take longer than drawing samples with a compiled program.
_SEPARATE = weakref.WeakSet[jex.Jaxpr]()


def touching(traced: jex.ClosedJaxpr) -> str | None:
    """Describes the first operation by which a lane may influence another; None if none does."""
    if traced.jaxpr in _SEPARATE:
        return None
    for effect in traced.effects:
        # A program has this effect only if the named axis is bound outside of the program.
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
    _SEPARATE.add(traced.jaxpr)
    return None


def refuse_touching(name: str, traced: jex.ClosedJaxpr) -> None:
    """Refuses a program whose lanes may influence each other under `vmap`."""
    if found := touching(traced):
        raise ValueError(
            f"{name} must not {found}. Under jax.vmap, its value for one example could depend on"
            " other examples"
        )


def program_of_a_number(name: str, function: Callable[..., PyTree], example: PyTree) -> Program:
    """Traces a user's function that returns one number, for use under `vmap`.

    Args:
        name: the name of the function in messages.
        function: returns one number.
        example: arrays, or their shapes and dtypes, like those to which the function will be
            applied.

    Raises:
        TypeError: if the function closes over a traced value.
        ValueError: if the function does not return one number, or its value for one example may
            depend on other examples under `vmap`.
    """
    program = Program.trace(name, function, example)
    check_concrete(name, "make the mechanism", program)
    if [leaf.shape for leaf in program.outputs.leaves] != [()]:
        raise ValueError(f"{name} must return one number, got {program.outputs}")
    refuse_touching(name, program.jaxpr)
    return program


def is_exact(traced: jex.ClosedJaxpr) -> bool:
    """Whether a lane has the same bits with and without `vmap`, unless inputs are subnormal.

    This is true if floats are only moved and compared, so that nothing is rounded. Constants must
    not be subnormal either, because a machine may flush a subnormal number to 0 in one lane but not
    in another.
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
    # If there are more than two cases, the result for an index out of range depends on the machine.
    if operation == "select_n":
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
        return True  # The value of a tracer is unknown, so it may be subnormal.
    sizes = np.abs(np.asarray(constant, dtype))
    return bool(np.any((sizes > 0) & (sizes < jnp.finfo(dtype).tiny)))


def check_lanes(
    name: str, function: Callable[..., PyTree], *batched: PyTree
) -> tuple[Callable[..., PyTree], jex.ClosedJaxpr]:
    """Refuses a function whose result for one example may depend on other examples under `vmap`.

    `function` takes one example. `batched` are arrays of many examples.

    Returns:
        A function that runs the checked program on one example, and the traced program.
    """
    checked, traced = traced_lane(function, *batched)
    refuse_touching(name, traced)
    # Code outside of JAX, or a mutable reference, could store data of one example and use it for
    # the next one.
    refuse_outside_code(name, traced)
    return checked, traced
