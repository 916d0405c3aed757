"""The "noisy table": a published table with an entry for each record, from which anyone counts."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype


def subset_error(table: jax.Array, database: jax.Array) -> jax.Array:
    """How far the sum over some subset of a published table is from the truth, at most.

    The worst of all 2^n subsets holds just those entries that are too large, or just those that are
    too small.

    Args:
        table: n published numbers, shape (n,), or (..., n) for many tables.
        database: n numbers, of the same shape, such as bits.

    Returns:
        The largest error over all subsets, shape (...).

    Raises:
        TypeError: if the arrays are not real numbers.
        ValueError: if their shapes differ.

    Formal guarantees:
        Attained, up to rounding in floats.

    Source:
        The two lines above.

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
    off = published.astype(dtype) - truth.astype(dtype)
    return jnp.maximum(jnp.sum(jnp.maximum(off, 0), -1), jnp.sum(jnp.maximum(-off, 0), -1))


def reconstruct_from_noisy_table(table: jax.Array) -> jax.Array:
    """Guesses bits from a table that gives accurate counts: rounds it.

    Of a table whose sums over all subsets are within E of the truth, entries that are too large
    add up to E too much at most, and those that are too small to E too little. An entry that
    rounds to the wrong bit is off by 1/2 or more, so at most 4 E of them are wrong, and no search
    is needed. Hence the lecture's dilemma: a table that gives accurate answers can be attacked, and
    one that cannot gives inaccurate answers. That only an interactive mechanism escapes it, as the
    lecture concludes, does not follow: no release that answers *all* subsets well does, of either
    kind, and a static one may be accurate for the queries that it was made for.

    Args:
        table: n published numbers, shape (n,), or (..., n) for many tables.

    Returns:
        The guesses, booleans of the same shape.

    Raises:
        TypeError: if the table is not real numbers.

    Formal guarantees:
        At most 4 `subset_error(table, database)` guesses are wrong; of a table of bits, 2 times as
        many as that.

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
