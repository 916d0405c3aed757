"""Makes XLA compute several results in one loop, or compute an array only once.

On a CPU, XLA compiles a separate loop for each result of an elementwise program. If two results
depend on the same operations, both loops repeat these operations. Only a reduction computes several
results in one loop. XLA fuses the operations before a reduction into its loop, each of them once,
except operations that more than 15 results share.
"""

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_INTEGERS = {"bfloat16": "int16", "float16": "int16", "float32": "int32", "float64": "int64"}
_Tree = TypeVar("_Tree")
_Arrays = tuple[jax.Array, ...]


def at_once(results: _Tree) -> _Tree:
    """Makes XLA compute all results in one loop on a CPU. Their values do not change.

    All must be integers or booleans of the same shape.
    """
    return cast("_Tree", lax.platform_dependent(results, cpu=reduced, default=lambda same: same))


def reduced(results: _Tree) -> _Tree:
    """Returns the same arrays, computed by a reduction: the bitwise "or" of each one and zeros."""

    def above_zeros(x: jax.Array) -> jax.Array:
        edges = ((0, 1, 0), *((0, 0, 0),) * x.ndim)
        return lax.pad(lax.expand_dims(x, (0,)), np.zeros((), x.dtype), edges)

    return _either(jax.tree.map(above_zeros, results))


def reduced_steps(steps: Callable[[_Tree], _Tree], arrays: _Tree) -> _Tree:
    """Returns `steps(arrays)`, computed in one loop; `steps` is elementwise and maps 0 to 0.

    `reduced` appends zeros to each result. This function appends zeros to each operand instead, and
    `steps` maps these zeros to zeros. In this way XLA fuses all operations, even those that many
    results share. The zeros are computed by a bitwise "and". If they were computed by `where`, LLVM
    would not vectorize table look-ups.
    """

    def above_zeros(x: jax.Array) -> jax.Array:
        whole = jnp.int8 if x.dtype == bool else x.dtype
        row = lax.broadcasted_iota(whole, (2, *x.shape), 0)
        return jnp.broadcast_to(x[None], row.shape) & (row == 0 if x.dtype == bool else row - 1)

    return _either(steps(jax.tree.map(above_zeros, arrays)))


def _either(rows: _Tree) -> _Tree:
    zeros = jax.tree.map(lambda x: np.zeros((), x.dtype), rows)
    return lax.reduce(rows, zeros, lambda x, y: jax.tree.map(lax.bitwise_or, x, y), (0,))


def written(arrays: _Tree) -> _Tree:
    """Returns the same arrays, but makes XLA compute them only once.

    Otherwise, every loop that uses an array may compute it again, and round it differently. On
    accelerators, an optimization barrier prevents this. On a CPU, XLA removes barriers before it
    fuses loops, but it does not fuse a reduction into later loops.
    """
    return lax.platform_dependent(
        arrays, cpu=lambda same: jax.tree.map(_by_reduction, same), default=lax.optimization_barrier
    )


def _by_reduction(x: jax.Array) -> jax.Array:
    """Returns the same array with the same bits, even those of NaN and negative zero."""
    if x.dtype.name in _INTEGERS:
        return _float_by_reduction(x)
    whole = isinstance(x.dtype, np.dtype) and x.dtype.kind in "biu"
    return reduced(x) if whole else lax.optimization_barrier(x)


# JAX cannot differentiate a bitcast. This function returns x unchanged, so the rule below returns
# the derivative of the identity.
@jax.custom_jvp
def _float_by_reduction(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, _INTEGERS[x.dtype.name])
    return lax.bitcast_convert_type(reduced(bits), x.dtype)


@_float_by_reduction.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (moved,) = primals, tangents
    return _float_by_reduction(x), moved


def sums_of_rows(*arrays: jax.Array) -> Sequence[jax.Array]:
    """Returns the sums of several integer arrays over the leading axis, in a single pass.

    The terms may be expressions: they are not stored in memory.

    Sums that do not fit into their dtype wrap around.
    """

    def add(x: _Arrays, y: _Arrays) -> _Arrays:
        return tuple(map(operator.add, x, y))

    zeros = tuple(np.zeros((), x.dtype) for x in arrays)
    return lax.reduce(arrays, zeros, add, (0,))
