"""Tracing: was a person among those whose means were published?"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype


def tracing_scores(records: jax.Array, means: jax.Array, population: jax.Array) -> jax.Array:
    """How much closer people are to published means than strangers would be, in their deviations.

    sum_j (y_j - p_j) (q_j - p_j) / (p_j (1 - p_j)) for the record y, published means q and those of
    the population p, divided by its standard deviation for a stranger. That of strangers is
    standard normal in the limit, whatever was published, so that a threshold of z accuses a
    stranger with probability P(Z > z). Exact means of n members put these at sqrt(d / n) on
    average: many attributes of few people give each of them away. Works inside `jit`.

    Args:
        records: attributes in [0, 1] of those to be traced, shape (d,), or (..., d) for many.
        means: the published means of the attributes, shape (d,).
        population: their means in the population, strictly between 0 and 1, shape (d,); or of a
            sample of others.

    Returns:
        The scores, shape (...): in standard deviations.

    Raises:
        TypeError: if an argument is not real numbers.
        ValueError: if the shapes do not fit.

    Formal guarantees:
        For a stranger whose attributes are independent bits with the means of the population the
        score has mean 0 and variance 1 exactly, given the means. Under (epsilon, delta)-DP the
        rate of members beyond a threshold exceeds that of strangers by 2 b - 1 at most, with b of
        `guessing_bound`, where strangers are drawn as members are.

    Source:
        Homer et al. (2008); Dwork, Smith, Steinke, Ullman and Vadhan (2015), for the inner product
        and how many attributes are needed.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> means, population = jnp.array([1.0, 0.0, 0.5]), jnp.array([0.5, 0.5, 0.5])
        >>> records = jnp.array([[1, 0, 1], [0, 1, 1]])
        >>> dpjax.attacks.tracing_scores(records, means, population).round(2)
        Array([ 1.41, -1.41], dtype=float32)
    """
    given = {"records": records, "means": means, "population": population}
    arrays = [jnp.asarray(_checks.real_arrays(name, given[name])) for name in given]
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
    pull = (means - population) / variance
    scores = jnp.matmul(records, pull, precision=jax.lax.Precision.HIGHEST) - population @ pull
    return scores / jnp.sqrt(jnp.sum(jnp.square(pull) * variance))
