"""Targets that are a function of a sum over records, which the sampler knows a shortcut for."""

from collections.abc import Callable
from typing import Any

from dpjax._core import _checks
from dpjax.sensitivity._sum_targets import Summable


def _unchanged(total: Any) -> Any:
    return total


def summable(
    statistic: Callable[[Any], Any],
    finish: Callable[[Any], Any] = _unchanged,
    *,
    average: bool = False,
) -> Summable:
    """A target that is a function of a sum: f(D) = finish(sum_i statistic(x_i)).

    Neighbors share n - 1 records, and the sampler makes use of it. Where `finish` is affine, as its
    traced operations show, it computes f(D) - f(D') from the two records that differ, without
    cancellation, and draws just these two where the oracle says that records are independent
    (`dpjax.oracles.independent`); elsewhere it computes the shared sum once.

    Args:
        statistic: takes one record, the database's pytree without the leading axis, to a pytree of
            real arrays.
        finish: takes the sum to the value; by default the sum is the value.
        average: divides the sum by n before it is finished.

    Returns:
        A target: takes a database to the value.

    Raises:
        TypeError: if statistic or finish is not a function.

    Formal guarantees:
        No bound on its own. The sampled distances are those of the target to rounding, and the
        rounding of the target as it is released, seen on random databases, is added to the
        estimate like that of any other target.

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
