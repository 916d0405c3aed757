"""`summable`: targets that are a function of a sum over records, and are faster to sample."""

from collections.abc import Callable

import jax

from dpjax._core import _checks
from dpjax._core._types import PyTree, Value
from dpjax.sensitivity._sums import Summable


def summable(
    statistic: Callable[[PyTree], PyTree],
    finish: Callable[[PyTree], Value] = lambda total: total,
    *,
    average: bool = False,
) -> Summable:
    """A target that is a function of a sum: f(D) = finish(sum_i statistic(x_i)).

    Neighbors share n - 1 records, and the sampler computes their sum once. If the traced operations
    of `finish` are affine, the sampler computes f(D) - f(D') from only the two records that differ,
    without cancellation. If the oracle also draws independent records
    (`dpjax.oracles.independent`), the sampler draws only these two.

    Args:
        statistic: maps one record, the database's pytree without the leading axis, to a pytree of
            real arrays.
        finish: maps the sum to the value. By default the sum is the value.
        average: divides the sum by n before `finish` gets it.

    Returns:
        A target: maps a database to the value.

    Raises:
        TypeError: if statistic or finish is not a function.

    Formal guarantees:
        No sensitivity is known. The sampled distances equal those of the target up to rounding. The
        sampler measures the rounding of the released target on random databases, and adds it to the
        estimate, as for any other target.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, whose pairs share n - 1 records.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> variance = targets.summable(
        ...     lambda x: {"x": x, "square": x**2},
        ...     lambda mean: mean["square"] - mean["x"] ** 2,
        ...     average=True,
        ... )
        >>> float(variance(jnp.array([1.0, 3.0])))
        1.0
    """
    _checks.function("statistic", statistic)
    _checks.function("finish", finish)
    return Summable(statistic, finish, average)


def log_likelihoods(
    log_likelihood: Callable[[PyTree, PyTree], jax.Array], parameters: PyTree
) -> Summable:
    """A target: log p(D | theta) for each parameter in a public list, with independent records.

    This is the target of Section 4 of the paper (see Source), for a list of theta instead of all
    theta. If records are dependent, write a target that returns the K log likelihoods of a
    database.

    Args:
        log_likelihood: maps one record and one parameter to log p(record | parameter), a float.
            Terms that do not depend on the parameter may be left out, because they do not change
            the range. Keep it finite on every record, by clamping the record or by a lower limit: a
            record with probability 0 under a parameter makes the sensitivity infinite.
        parameters: public, a pytree of arrays with leading axis K: a grid, or draws from the prior.

    Returns:
        A `dpjax.targets.summable` target: maps a database to floats of shape (K,). Sample its
        sensitivity in the norm "range", and release it by `dpjax.posterior_sampler`.

    Raises:
        TypeError: if log_likelihood is not a function, or parameters are not arrays.

    Formal guarantees:
        No sensitivity is known. Replacing a record x by x' changes the values by log p(x' | theta)
        - log p(x | theta), for any n.

    Source:
        Rubinstein and Aldà (2017), section 4; Dimitrakakis et al. (2014).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> target = targets.log_likelihoods(
        ...     lambda x, rate: x * jnp.log(rate) - rate, jnp.array([1.0, 2.0])
        ... )
        >>> target(jnp.array([0.0, 0.0, 0.0])).tolist()
        [-3.0, -6.0]
    """
    _checks.function("log_likelihood", log_likelihood)
    fixed = _checks.real_arrays("parameters", parameters)

    def statistic(record: PyTree) -> jax.Array:
        return jax.vmap(lambda parameter: log_likelihood(record, parameter))(fixed)

    return summable(statistic)
