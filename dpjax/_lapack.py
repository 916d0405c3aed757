"""LAPACK calls that cannot wait for each other: on a CPU, one matrix at a time.

XLA's CPU backend runs operations in a pool with a thread for each core, which all its devices and
programs share. jaxlib (0.10, 0.11.0) cuts a batched LAPACK call into parts for that same pool, and
blocks the thread that it is on until they are done (`ParallelBatchMap` in its lapack_kernels.cc).
As many such calls as there are threads wait for ever: none is left for their parts. A call for a
single matrix is never cut, so it never waits, however many there are and whatever runs beside it.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._walks import JITS, bind, called, run

# Operations that the CPU backend leaves to LAPACK. All take and return arrays with the same leading
# batch axes; their largest operand without a batch is a matrix.
NAMES = frozenset(
    (
        *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg"),
        *("householder_product", "lu", "ormqr", "qr", "schur", "svd", "symmetric_product"),
        *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
    )
)
_CUSTOM_VMAP = "custom_vmap_call"
_GUARDED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def concerns(primitives: set[str]) -> bool:
    """Whether a program with these operations may call LAPACK, in a rule for `vmap` too."""
    return not primitives.isdisjoint(NAMES | {_CUSTOM_VMAP})


def evaluate(program: Any, *operands: Any) -> list[Any]:
    """The outputs of a traced program; its LAPACK calls take one matrix each, also under `vmap`."""
    return run(program, operands, _apply)


def _apply(equation: Any, operands: list[Any]) -> Sequence[Any]:
    name = equation.primitive.name
    if name not in JITS and (inner := called(equation)):
        return evaluate(inner, *operands)
    if name in NAMES:
        call = _for_each_matrix(lambda *one: bind(equation, equation.params, one))
        for _ in range(max(x.ndim for x in operands) - 2):
            call = jax.vmap(call)
        return call(*operands)
    if name == "shard_map":
        return _shard_map(equation.params)(*operands)
    parameters = {name: _guarded(value) for name, value in equation.params.items()}
    if name == _CUSTOM_VMAP:
        parameters["rule"] = functools.partial(_guarded_rule, parameters["rule"])
    return bind(equation, parameters, operands)


def _shard_map(parameters: dict[str, Any]) -> Callable[..., Sequence[Any]]:
    """Made anew: its program can be traced only where the axes of its mesh are known."""
    return jax.shard_map(
        functools.partial(evaluate, parameters["jaxpr"]),
        mesh=parameters["mesh"],
        in_specs=parameters["in_specs"],
        out_specs=list(parameters["out_specs"]),
        axis_names=parameters["newly_manual_axes"],
        check_vma=parameters["check_vma"],
    )


def _for_each_matrix(call: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """A LAPACK call that `vmap` turns into a loop on a CPU, and into a batched call elsewhere."""

    @custom_vmap
    def alone(*operands: Any) -> Sequence[Any]:
        return call(*operands)

    @alone.def_vmap
    def loop(size: int, mapped: list[bool], *operands: Any) -> tuple[Sequence[Any], Sequence[bool]]:
        def one_by_one(*operands: Any) -> Sequence[Any]:
            def at(index: jax.Array) -> Sequence[Any]:
                picked = (
                    lax.dynamic_index_in_dim(x, index, keepdims=False) if m else x
                    for x, m in zip(operands, mapped, strict=True)
                )
                return alone(*picked)

            return lax.map(at, lax.iota("int32", size))

        together = jax.vmap(call, in_axes=tuple(0 if m else None for m in mapped))
        if size == 0:  # Nothing to cut, and nothing to loop over.
            outputs = together(*operands)
        else:
            outputs = lax.platform_dependent(*operands, cpu=one_by_one, default=together)
        return outputs, [True] * len(outputs)

    # `custom_vmap` has no reverse mode; the derivative of the call itself has.
    differentiable = jax.custom_jvp(lambda *operands: alone(*operands))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(call, primals, tangents))
    return differentiable


def _guarded(value: Any) -> Any:
    """A parameter of an operation, with `evaluate` applied to the programs in it."""
    if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
        return _guarded_program(value)
    if isinstance(value, tuple) and any(isinstance(x, (jex.ClosedJaxpr, jex.Jaxpr)) for x in value):
        items = [_guarded(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _guarded_program(program: Any) -> Any:
    """One for each program, so that what is called again is neither traced nor compiled again."""
    if program not in _GUARDED:
        jaxpr = getattr(program, "jaxpr", program)
        specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        guarded = jax.make_jaxpr(functools.partial(evaluate, program))(*specs)
        _GUARDED[program] = guarded if isinstance(program, jex.ClosedJaxpr) else guarded.jaxpr
    return _GUARDED[program]


def _guarded_rule(
    rule: Callable[..., Any], axis_size: int, mapped: list[bool], *operands: Any
) -> tuple[Any, Any]:
    """A rule for `vmap` of the user's, which may batch LAPACK calls."""
    mapped_outputs: list[Any] = []

    def outputs(*operands: Any) -> Any:
        values, mapping = rule(axis_size, mapped, *operands)
        mapped_outputs.append(mapping)
        return values

    program, shapes = jax.make_jaxpr(outputs, return_shape=True)(*operands)
    leaves = evaluate(program, *jax.tree.leaves(operands))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), mapped_outputs[0]
