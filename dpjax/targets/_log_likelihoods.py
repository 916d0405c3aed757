"""Log likelihoods of public parameters: the target whose release is a draw from a posterior."""

from collections.abc import Callable

import jax

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax.sensitivity._sum_targets import Summable
from dpjax.targets._summable import summable


def log_likelihoods(
    log_likelihood: Callable[[PyTree, PyTree], jax.Array], parameters: PyTree
) -> Summable:
    """A target: log p(D | theta) for each of a public list of parameters, D of independent records.

    Section 4 of the paper has this target as a function of all theta. For other models, write a
    target that returns the K log likelihoods of a database.

    Args:
        log_likelihood: takes one record and one parameter to log p(record | parameter), a float.
            Terms without the parameter may be left out: they change no range. Keep it finite on
            every record, by a bound on the record or a floor: a record that one parameter excludes
            makes the sensitivity infinite.
        parameters: public, a pytree of arrays with leading axis K: a grid, or draws from the prior.

    Returns:
        A `dpjax.targets.summable` target: takes a database to floats of shape (K,). Sample it in
        the norm "range", and release it by `dpjax.posterior_sampler`.

    Raises:
        TypeError: if log_likelihood is not a function, or parameters are not arrays.

    Formal guarantees:
        None of its own. Replacing a record changes the values by log p(x | theta) - log p(x' |
        theta), whatever n.

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
