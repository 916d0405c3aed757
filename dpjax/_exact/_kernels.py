"""Several results from one loop over their elements, and arrays that are computed once.

XLA on CPU makes a loop for each result, and every loop repeats the steps that results share. Only
a reduction has several results in one loop. XLA fuses the steps before a reduction into its loop,
each of them once, except steps that more than 15 results share.
"""

import operator
from collections.abc import Sequence
from typing import TypeVar, cast

import jax
import numpy as np
from jax import lax

_INTEGERS = {"bfloat16": "int16", "float16": "int16", "float32": "int32", "float64": "int64"}
_Tree = TypeVar("_Tree")
_Arrays = tuple[jax.Array, ...]


def at_once(results: _Tree) -> _Tree:
    """The same integers or booleans, of one shape; on CPU one loop computes them."""
    return cast("_Tree", lax.platform_dependent(results, cpu=reduced, default=lambda same: same))


def reduced(results: _Tree) -> _Tree:
    """The same results by a reduction: `or` with zeros, which changes no bit."""
    zeros = jax.tree.map(lambda x: np.zeros((), x.dtype), results)
    rows = jax.tree.map(lambda x: lax.expand_dims(x, (0,)), results)
    with_zeros = jax.tree.map(
        lambda row, zero: lax.pad(row, zero, ((0, 1, 0), *((0, 0, 0),) * (row.ndim - 1))),
        rows,
        zeros,
    )
    return lax.reduce(with_zeros, zeros, _either, (0,))


def written(arrays: _Tree) -> _Tree:
    """The same arrays, computed once and not again in the loop of every result that uses them.

    A barrier does that on accelerators. XLA on CPU drops barriers before it fuses, but it fuses no
    reduction into the loops after it.
    """
    return lax.platform_dependent(
        arrays, cpu=lambda same: jax.tree.map(_by_reduction, same), default=lax.optimization_barrier
    )


def _by_reduction(x: jax.Array) -> jax.Array:
    """The same array, bit by bit: also of a NaN and of a negative zero."""
    if x.dtype.name in _INTEGERS:
        return _float_by_reduction(x)
    whole = isinstance(x.dtype, np.dtype) and x.dtype.kind in "biu"
    return reduced(x) if whole else lax.optimization_barrier(x)


@jax.custom_jvp  # The bits of a float have no derivative.
def _float_by_reduction(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, _INTEGERS[x.dtype.name])
    return lax.bitcast_convert_type(reduced(bits), x.dtype)


@_float_by_reduction.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (moved,) = primals, tangents
    return _float_by_reduction(x), moved


def _either(some: _Tree, others: _Tree) -> _Tree:
    return jax.tree.map(lax.bitwise_or, some, others)


def sums_of_rows(*arrays: jax.Array) -> Sequence[jax.Array]:
    """Sums of integers over the leading axis, in one pass. For several, XLA would keep all terms.

    They wrap, where they leave their dtypes.
    """

    def add(x: _Arrays, y: _Arrays) -> _Arrays:
        return tuple(map(operator.add, x, y))

    zeros = tuple(np.zeros((), x.dtype) for x in arrays)
    return lax.reduce(arrays, zeros, add, (0,))
