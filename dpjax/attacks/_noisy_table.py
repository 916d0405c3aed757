"""The "noisy table": a published table with an entry for each record, which anyone can sum."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype


def subset_error(table: jax.Array, database: jax.Array) -> jax.Array:
    """The largest error of a sum over a subset of a published table.

    The worst of all 2^n subsets holds exactly the entries that are too large, or exactly those that
    are too small.

    Args:
        table: n published numbers, shape (n,), or (..., n) for many tables.
        database: n numbers, of the same shape, such as bits.

    Returns:
        The largest error over all subsets, shape (...).

    Raises:
        TypeError: if the arrays are not real numbers.
        ValueError: if their shapes differ.

    Formal guarantees:
        Some subset has this error, up to rounding in floats.

    Source:
        Proved by the sentence above.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> float(dpjax.attacks.subset_error(jnp.array([0.5, 0.5, 0.5]), jnp.array([1, 1, 0])))
        1.0
    """
    published = jnp.asarray(_checks.real_arrays("table", table))
    truth = jnp.asarray(_checks.real_arrays("database", database))
    if published.shape != truth.shape or published.ndim == 0:
        raise ValueError(
            "table and database must have one shape (..., n), got"
            f" {list(published.shape)} and {list(truth.shape)}"
        )
    dtype = np.promote_types(compute_dtype(published.dtype), compute_dtype(truth.dtype))
    errors = published.astype(dtype) - truth.astype(dtype)
    return jnp.maximum(jnp.sum(jnp.maximum(errors, 0), -1), jnp.sum(jnp.maximum(-errors, 0), -1))


def reconstruct_from_noisy_table(table: jax.Array) -> jax.Array:
    """Guesses bits from a table that gives accurate counts, by rounding it.

    If all subset sums are within E of the truth, at most 4 E guesses are wrong, without any search
    (docs/proofs/reconstruction.md). This is the lecture's dilemma: a table with accurate answers
    can be attacked, and a table that cannot be attacked has inaccurate answers. The lecture
    concludes that only an interactive mechanism escapes it. That does not follow. No release that
    answers *all* subsets well escapes, interactive or not. A static release may be accurate for the
    queries that it was made for.

    Args:
        table: n published numbers, shape (n,), or (..., n) for many tables.

    Returns:
        The guesses, booleans of the same shape.

    Raises:
        TypeError: if the table is not real numbers.

    Formal guarantees:
        At most 4 `subset_error(table, database)` guesses are wrong. For a table of bits it is at
        most 2 `subset_error(table, database)`.

    Source:
        The lecture "A firm foundation for private data analysis", "Noise and the noisy table",
        after Dwork (2011).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> table = jnp.array([0.7, 0.1, 0.9])
        >>> dpjax.attacks.reconstruct_from_noisy_table(table).tolist()
        [True, False, True]
    """
    published = jnp.asarray(_checks.real_arrays("table", table))
    return published.astype(compute_dtype(published.dtype)) > 0.5
