"""Symmetric positive definite systems by matrix products, without calls into LAPACK.

LAPACK is entered once per matrix, which is slow for many small ones.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Below this size elimination row by row is faster than splitting further.
_ELIMINATED = 16


def solve(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """Solves a symmetric positive definite system of a matrix (p, p) and a vector (p,)."""
    whitening = inverse_factor(matrix)
    return (whitening @ vector) @ whitening


def inverse_factor(matrix: jax.Array) -> jax.Array:
    """The inverse W of the lower Cholesky factor: W matrix W' = I, so W'W is the inverse."""
    if len(matrix) <= _ELIMINATED:
        return _eliminate(matrix)
    half = len(matrix) // 2
    first = inverse_factor(matrix[:half, :half])
    coupling = matrix[half:, :half] @ first.T
    last = inverse_factor(matrix[half:, half:] - coupling @ coupling.T)
    corner = -(last @ coupling) @ first
    return jnp.block([[first, jnp.zeros_like(corner.T)], [corner, last]])


def _eliminate(matrix: jax.Array) -> jax.Array:
    """Gauss's elimination beside the identity; a positive definite matrix needs no pivoting."""
    size = len(matrix)
    index = jnp.arange(size)

    def eliminate(k: jax.Array, both: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(both, k, keepdims=False)
        column = lax.dynamic_index_in_dim(both, k, axis=1, keepdims=False)
        pivot = lax.dynamic_index_in_dim(row, k, keepdims=False)
        factor = jnp.where(index > k, column / pivot, 0)
        return both - factor[:, None] * row[None, :]

    both = jnp.concatenate([matrix, jnp.eye(size, dtype=matrix.dtype)], axis=1)
    both = lax.fori_loop(0, size, eliminate, both)
    return both[:, size:] * lax.rsqrt(jnp.diagonal(both))[:, None]
