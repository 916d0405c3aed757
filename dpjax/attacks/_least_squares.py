"""Reconstruction from noisy answers to linear queries, by least squares."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype


def reconstruct_by_least_squares(queries: jax.Array, answers: jax.Array) -> jax.Array:
    """Guesses bits from noisy answers to linear queries, such as counts over random subsets.

    Solves queries @ x = answers by least squares, and rounds. Of several solutions it takes the one
    of least norm. Let m = r n counts over random subsets have noise of standard deviation s, with
    r above 1. Every record then has noise of about 2 s / sqrt((r - 1) n), and a guess is wrong if
    it exceeds 1/2. As for `walsh_hadamard`, noise must be well below sqrt(n). Works inside `jit`.

    Args:
        queries: shape (m, n), one row for each query.
        answers: shape (m,), or (..., m) for many releases of the same queries.

    Returns:
        The guesses, booleans of shape (..., n).

    Raises:
        TypeError: if queries or answers are not real numbers.
        ValueError: if their shapes do not fit.

    Formal guarantees:
        If no answer is off by more than E, at most 4 m E^2 / s_n^2 guesses are wrong, up to
        rounding in floats. Here s_n is the least of n singular values of the queries.

    Source:
        Dinur and Nissim (2003); Kasiviswanathan, Rudelson, Smith and Ullman (2010), for least
        squares.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> queries = jnp.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
        >>> dpjax.attacks.reconstruct_by_least_squares(queries, jnp.array([2, 1, 1])).tolist()
        [True, True, False]
    """
    matrix = jnp.asarray(_checks.real_arrays("queries", queries))
    noisy = jnp.asarray(_checks.real_arrays("answers", answers))
    if matrix.ndim != 2 or noisy.shape[-1:] != matrix.shape[:1]:
        raise ValueError(
            "queries must have shape (m, n) and answers (..., m), got"
            f" {list(matrix.shape)} and {list(noisy.shape)}"
        )
    dtype = np.promote_types(compute_dtype(matrix.dtype), compute_dtype(noisy.dtype))
    return _solution(matrix.astype(dtype), noisy.astype(dtype)) > 0.5


@jax.jit
def _solution(queries: jax.Array, answers: jax.Array) -> jax.Array:
    columns = jnp.moveaxis(answers, -1, 0)
    found, *_ = jnp.linalg.lstsq(queries, columns.reshape(len(columns), -1))
    return jnp.moveaxis(found.reshape(-1, *columns.shape[1:]), 0, -1)
