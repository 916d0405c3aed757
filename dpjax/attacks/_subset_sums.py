"""Reconstruction from noisy sums over all subsets, or from a table that determines these sums."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._exact._numerics import is_float
from dpjax.attacks._linear_queries import common_floats, wrong_shape

# With 20 records there are 2^20 subsets, and every further record doubles this number.
_MOST_RECORDS = 20


def subset_counts(database: jax.Array) -> jax.Array:
    """The sums over all subsets of the records: all 2^n counting queries about one bit.

    Args:
        database: n numbers, shape (n,), such as bits; n at most 20.

    Returns:
        Shape (2^n,). Entry S is for the subset that contains record i if bit i of S is set.

    Raises:
        TypeError: if the database is not real numbers.
        ValueError: if it does not have shape (n,), or n is above 20.

    Formal guarantees:
        Exact for integers. Every record is in half of the subsets. So for records in [0, 1] the
        sensitivity under replace-one is 2^(n-1) in the norm l1 and 2^((n-1)/2) in l2.

    Source:
        Dinur and Nissim (2003).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> dpjax.attacks.subset_counts(jnp.array([1, 0, 1])).tolist()
        [0, 1, 0, 1, 1, 2, 1, 2]
    """
    database = jnp.asarray(_checks.real_arrays("database", database))
    if database.ndim != 1 or len(database) > _MOST_RECORDS:
        raise wrong_shape(f"database must have shape (n,), n at most {_MOST_RECORDS}", database)
    # Sums of narrow integers, such as int8, would wrap around.
    return _counts(database if is_float(database) else database.astype(int))


def subset_distortions(answers: jax.Array) -> jax.Array:
    """The largest distance of each of the 2^n candidate databases from the answers.

    For answers a and a candidate c, this is max_S |a_S - sum of c over S|. The maximum over all
    subsets is the larger of the maxima over subsets with and without record i. Computing it record
    by record takes n 2^n steps for all candidates together, instead of 4^n.

    Args:
        answers: 2^n numbers, in the order of `subset_counts`.

    Returns:
        Shape (2^n,), entry c for the candidate whose record i is bit i of c.

    Raises:
        TypeError: if the answers are not real numbers.
        ValueError: if their number is not 2^n with n from 1 to 20.

    Formal guarantees:
        Exact if the answers and their differences are exact in floats, as for half integers.

    Source:
        Dinur and Nissim (2003), by exhaustive search.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> answers = dpjax.attacks.subset_counts(jnp.array([1, 0]))
        >>> dpjax.attacks.subset_distortions(answers).tolist()
        [1.0, 0.0, 1.0, 1.0]
    """
    (answers,) = common_floats(answers=answers)
    n = answers.size.bit_length() - 1
    if answers.shape != (2**n,) or not 1 <= n <= _MOST_RECORDS:
        raise wrong_shape(f"answers must have shape (2^n,), n from 1 to {_MOST_RECORDS}", answers)
    return _distortions(answers)


def reconstruct_from_all_subsets(answers: jax.Array) -> jax.Array:
    """Guesses bits by the candidate that is nearest to all 2^n answers.

    If every answer is within E of the truth, at most `max_wrong_guesses` guesses are wrong
    (docs/proofs/reconstruction.md). Works inside `jit` and under `vmap`.

    Args:
        answers: 2^n numbers, in the order of `subset_counts`; n from 1 to 20.

    Returns:
        The guesses, booleans of shape (n,).

    Raises:
        TypeError: as for `subset_distortions`.
        ValueError: as for `subset_distortions`.

    Formal guarantees:
        At most `max_wrong_guesses(n, error=E)` guesses are wrong if the error of every answer is at
        most E. E need not be known. Under differential privacy E is so large that this bound is
        useless, and `guessing_bound` bounds the number of right guesses instead.

    Source:
        Dinur and Nissim (2003); Dwork and Roth (2014), Theorem 8.1; Theorem 1 of the lecture "A
        firm foundation for private data analysis".

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> answers = dpjax.attacks.subset_counts(jnp.array([1.0, 0.0, 1.0])) + 0.2
        >>> dpjax.attacks.reconstruct_from_all_subsets(answers).tolist()
        [True, False, True]
    """
    distortions = subset_distortions(answers)
    nearest = jnp.argmin(distortions)
    return (nearest >> jnp.arange(distortions.size.bit_length() - 1)) & 1 == 1


def max_wrong_guesses(n: int, *, error: float | Fraction) -> int:
    """The largest number of wrong bits in a candidate that agrees with all answers up to E.

    This is min(n, 2 floor(2 E)), which is the bound 4 E of Theorem 1 of the lecture "A firm
    foundation for private data analysis", rounded down to a number that can occur. It is attained
    (docs/proofs/reconstruction.md). With E = n/400, at most 1% of the bits are wrong. The lecture
    calls such answers blatantly non-private. It also says that noise bounded by n/400 prevents such
    a reconstruction, but this does not follow. The theorem says only that noise below n/400 does
    not prevent it. More noise may not prevent it either: up to E = n/8, at least half of the bits
    are surely right.

    Args:
        n: the number of records, at least 1.
        error: E, the largest error of an answer, 0 or above; a `fractions.Fraction` is exact.

    Returns:
        The number of wrong records.

    Raises:
        TypeError: if n is not an integer, or the error not a number.
        ValueError: if n is below 1, or the error negative or not finite.

    Formal guarantees:
        The bound is valid, and attained, over all databases of n bits, all answers within E of the
        truth, and all candidates within E of the answers.

    Source:
        Dwork and Roth (2014), Theorem 8.1, for 4 E.

    Example:
        >>> from fractions import Fraction
        >>> import dpjax
        >>> errors = [Fraction(1000, x) for x in (401, 400, 8, 4)]
        >>> [dpjax.attacks.max_wrong_guesses(1000, error=error) for error in errors]
        [8, 10, 500, 1000]
    """
    n = _checks.integer("n", n, least=1)
    bound = error if isinstance(error, Fraction) else Fraction(_checks.non_negative("error", error))
    if bound < 0:
        raise ValueError(f"error must be 0 or above, got {bound}")
    return min(n, 2 * math.floor(2 * bound))


@jax.jit
def _counts(database: jax.Array) -> jax.Array:
    counts = jnp.zeros(1, database.dtype)
    for i in range(len(database)):
        counts = jnp.concatenate([counts, counts + database[i]])
    return counts


@jax.jit
def _distortions(answers: jax.Array) -> jax.Array:
    above, below = answers, -answers
    for i in range(answers.size.bit_length() - 1):
        above, below = _maximum_over_record(above, i, -1), _maximum_over_record(below, i, 1)
    return jnp.maximum(above, below)


def _maximum_over_record(x: jax.Array, i: int, step: int) -> jax.Array:
    """Returns max(x[S], x[S with record i] + v `step`), for subsets S without record i, v = 0, 1.

    v is the candidate's value of record i. In an index of x, bit i says whether the subset contains
    record i. In an index of the result, bit i is v.
    """
    without, holding = jnp.moveaxis(x.reshape(-1, 2, 2**i), 1, 0)
    ones = jnp.maximum(without, holding + jnp.asarray(step, x.dtype))
    return jnp.stack([jnp.maximum(without, holding), ones], axis=1).reshape(-1)


def subset_error(table: jax.Array, database: jax.Array) -> jax.Array:
    """The largest error of a sum over any subset of a published table.

    The subset with this error contains either exactly the entries that are too large, or exactly
    those that are too small.

    Args:
        table: n published numbers, shape (n,), or (..., n) for many tables.
        database: n numbers, of the same shape, such as bits.

    Returns:
        The largest error over all subsets, shape (...).

    Raises:
        TypeError: if the arrays are not real numbers.
        ValueError: if their shapes differ.

    Formal guarantees:
        The largest of the errors of all 2^n subsets, up to rounding in floats.

    Source:
        Proved in the first paragraph of this docstring.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> float(dpjax.attacks.subset_error(jnp.array([0.5, 0.5, 0.5]), jnp.array([1, 1, 0])))
        1.0
    """
    published, truth = common_floats(table=table, database=database)
    if published.shape != truth.shape or published.ndim == 0:
        raise wrong_shape("table and database must have one shape (..., n)", published, truth)
    errors = published - truth
    return jnp.maximum(jnp.sum(jnp.maximum(errors, 0), -1), jnp.sum(jnp.maximum(-errors, 0), -1))


def reconstruct_from_noisy_table(table: jax.Array) -> jax.Array:
    """Guesses bits by rounding the entries of a table whose sums over subsets are accurate.

    If all subset sums are within E of the truth, at most 4 E guesses are wrong, without any search
    (docs/proofs/reconstruction.md). The lecture that is cited below states this as a dilemma: a
    table with accurate answers can be attacked, and a table that resists attacks has inaccurate
    answers. The lecture concludes that only an interactive mechanism avoids this dilemma. That is
    wrong in two ways. No release that answers *all* subsets accurately can resist attacks,
    interactive or not. And a table that is accurate only for some queries can resist attacks.

    Args:
        table: n published numbers, shape (n,), or (..., n) for many tables.

    Returns:
        The guesses, booleans of the same shape.

    Raises:
        TypeError: if the table is not real numbers.

    Formal guarantees:
        At most 4 `subset_error(table, database)` guesses are wrong, and at most half as many for a
        table of bits.

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
    (published,) = common_floats(table=table)
    return published > 0.5
