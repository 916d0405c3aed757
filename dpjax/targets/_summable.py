"""Targets that are a function of a sum over records: the sampler has a shortcut for them."""

from collections.abc import Callable

from dpjax._core import _checks
from dpjax._core._types import PyTree, Value
from dpjax.sensitivity._sum_targets import Summable


def summable(
    statistic: Callable[[PyTree], PyTree],
    finish: Callable[[PyTree], Value] = lambda total: total,
    *,
    average: bool = False,
) -> Summable:
    """A target that is a function of a sum: f(D) = finish(sum_i statistic(x_i)).

    Neighbors share n - 1 records, and the sampler computes their sum once. If `finish` is affine,
    as its traced operations show, the sampler needs less: it computes f(D) - f(D') from the two
    records that differ, without cancellation. If in addition the oracle says that records are
    independent (`dpjax.oracles.independent`), it draws only these two.

    Args:
        statistic: takes one record, the database's pytree without the leading axis, to a pytree of
            real arrays.
        finish: takes the sum to the value; by default the sum is the value.
        average: divides the sum by n before `finish` takes it.

    Returns:
        A target: takes a database to the value.

    Raises:
        TypeError: if statistic or finish is not a function.

    Formal guarantees:
        No bound on its own. The sampled distances are those of the target up to rounding. The
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
