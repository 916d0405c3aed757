"""Tracing: decides whether a person was in a group whose means were published."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype


def tracing_scores(records: jax.Array, means: jax.Array, population: jax.Array) -> jax.Array:
    """Scores how much closer records are to published means than a stranger's record would be.

    Let y be a record, q the published means and p the means in the population. The score is
    sum_j (y_j - p_j) (q_j - p_j) / (p_j (1 - p_j)), divided by its standard deviation for a
    stranger. For strangers it is standard normal in the limit, for any published means. So a
    threshold of z accuses a stranger with probability P(Z > z). With exact means of n members,
    members have an average score of sqrt(d / n): many attributes of few people expose each of them.
    Works inside `jit`.

    Args:
        records: attributes in [0, 1] of the people to trace, shape (d,), or (..., d) for many.
        means: the published means of the attributes, shape (d,).
        population: the means in the population, or in a sample of other people, strictly between 0
            and 1, shape (d,).

    Returns:
        The scores in standard deviations, shape (...).

    Raises:
        TypeError: if an argument is not real numbers.
        ValueError: if the shapes do not fit.

    Formal guarantees:
        Let a stranger's attributes be independent bits with the means of the population. Then,
        given the published means, the score has mean 0 and variance 1 exactly. If strangers are
        drawn like members, then under (epsilon, delta)-DP the rate of members beyond a threshold
        exceeds the rate of strangers by at most 2 b - 1, where b is the `guessing_bound`.

    Source:
        Homer et al. (2008); Dwork, Smith, Steinke, Ullman and Vadhan (2015), for the inner product
        and the number of attributes that it needs.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> means, population = jnp.array([1.0, 0.0, 0.5]), jnp.array([0.5, 0.5, 0.5])
        >>> records = jnp.array([[1, 0, 1], [0, 1, 1]])
        >>> dpjax.attacks.tracing_scores(records, means, population).round(2)
        Array([ 1.41, -1.41], dtype=float32)
    """
    given = {"records": records, "means": means, "population": population}
    arrays = [jnp.asarray(_checks.real_arrays(*item)) for item in given.items()]
    dtype = np.result_type(*(compute_dtype(x.dtype) for x in arrays))
    people, published, expected = (x.astype(dtype) for x in arrays)
    if expected.ndim != 1 or published.shape != expected.shape:
        raise ValueError(
            "means and population must have one shape (d,), got"
            f" {list(published.shape)} and {list(expected.shape)}"
        )
    if people.shape[-1:] != expected.shape:
        raise ValueError(
            f"records must have shape (..., {len(expected)}), got {list(people.shape)}"
        )
    return _scores(people, published, expected)


@jax.jit
def _scores(records: jax.Array, means: jax.Array, population: jax.Array) -> jax.Array:
    variance = population * (1 - population)
    slope = (means - population) / variance
    scores = jnp.matmul(records, slope, precision=jax.lax.Precision.HIGHEST) - population @ slope
    return scores / jnp.sqrt(jnp.sum(jnp.square(slope) * variance))
