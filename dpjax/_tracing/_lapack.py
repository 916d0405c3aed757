"""LAPACK calls that cannot wait for each other: on a CPU, one matrix at a time.

XLA's CPU backend runs operations in a pool with a thread for each core. All devices and programs
share the pool. jaxlib 0.10 and 0.11.0 cut a batched LAPACK call into parts for the same pool, and
block a thread of it until the parts are done (`ParallelBatchMap` in lapack_kernels.cc). If every
thread is blocked by such a call, none is left for the parts, and all wait for ever. A call for one
matrix is never cut, so it never waits.

jaxlib 0.11.1 and 0.11.2 did not hang in our runs. LAPACK calls need no replacement any more when
dpjax needs jaxlib 0.11.1 or later on every Python that it supports. Convolutions keep `OneByOne`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._tracing._walks import Equation, bind

V = TypeVar("V")
Arrays: TypeAlias = Sequence[jax.Array]
# Operations that the CPU backend leaves to LAPACK. All take and return arrays with the same leading
# batch axes; their largest operand without a batch is a matrix.
NAMES = frozenset(
    (
        *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg"),
        *("householder_product", "lu", "ormqr", "qr", "schur", "svd", "symmetric_product"),
        *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
    )
)


class OneByOne(functools.partial[Any]):
    """A rule for `vmap` under which every lane computes what it computes alone."""


def with_rule(call: Callable[..., V], rule: OneByOne) -> Callable[..., V]:
    """A call that `vmap` computes by a rule."""
    computed = custom_vmap(lambda *operands: call(*operands))
    computed.def_vmap(rule)
    # `custom_vmap` has no reverse mode; the derivative of the call itself has.
    differentiable = jax.custom_jvp(lambda *operands: computed(*operands))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(call, primals, tangents))
    return differentiable


def one_matrix_each(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array]:
    """The outputs of a LAPACK call, by calls that take one matrix each.

    `vmap` turns them into a loop on a CPU, and into a batched call elsewhere.
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
        if size == 0:  # Nothing to cut, and nothing to loop over.
            outputs = together(*operands)
        else:
            outputs = lax.platform_dependent(*operands, cpu=one_by_one, default=together)
        return outputs, [True] * len(outputs)

    alone = batched = with_rule(call, loop)
    for _ in range(max(x.ndim for x in operands) - 2):
        batched = jax.vmap(batched)
    return batched(*operands)
