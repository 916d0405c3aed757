"""Several results from one loop over their elements.

XLA on CPU makes a loop of its own for each of several results, and computes in every one anew what
they share. Only a reduction may have several results, and what leads to it is fused with it: each
step once, but for steps that more than 15 results need, which are left out of the loop.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

_Tree = TypeVar("_Tree")


def at_once(results: _Tree) -> _Tree:
    """The same integers or booleans, of one shape, that one loop computes where it runs on CPU."""
    return lax.platform_dependent(results, cpu=reduced, default=lambda unchanged: unchanged)


def reduced(results: _Tree) -> _Tree:
    """The same by a reduction that changes nothing: of each result and zeros, bit by bit."""
    leaves, structure = jax.tree.flatten(results)
    zeros = tuple(np.zeros((), x.dtype) for x in leaves)
    padded = tuple(map(_with_zeros, leaves, zeros))
    return jax.tree.unflatten(structure, lax.reduce(padded, zeros, _either, (0,)))


def _with_zeros(x: jax.Array, zero: np.ndarray) -> jax.Array:
    return lax.pad(lax.expand_dims(x, (0,)), zero, ((0, 1, 0), *((0, 0, 0) for _ in x.shape)))


def _either(some: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(lax.bitwise_or, some, others))
