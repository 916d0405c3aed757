"""Targets that are a function of a sum over records."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks


@dataclasses.dataclass(frozen=True, eq=False)
class Summable:
    """A target f(D) = finish(sum of statistic(record)), made by `summable`.

    Attributes:
        statistic: takes one record, a pytree without the leading axis, to a pytree of float arrays.
        finish: takes the sum of the statistics, or their average, to the value.
        average: whether the sum is divided by the number of records first.

    Formal guarantees:
        A sum ignores the order of the records, but for rounding.
    """

    statistic: Callable[[Any], Any]
    finish: Callable[[Any], Any]
    average: bool

    def __call__(self, database: Any) -> Any:
        """The value on a database."""
        statistics = jax.vmap(self.statistic)(database)
        return self.finish_sum(jax.tree.map(lambda x: jnp.sum(x, axis=0), statistics), database)

    def finish_sum(self, total: Any, database: Any) -> Any:
        """The value, from the sum over a database of this size."""
        if self.average:
            n = len(jax.tree.leaves(database)[0])
            total = jax.tree.map(lambda x: x / n, total)
        return self.finish(total)


def _unchanged(total: Any) -> Any:
    return total


def summable(
    statistic: Callable[[Any], Any],
    finish: Callable[[Any], Any] = _unchanged,
    *,
    average: bool = False,
) -> Summable:
    """A target that is a function of a sum over records: f(D) = finish(sum of statistic(record))."""
    _checks.function("statistic", statistic)
    _checks.function("finish", finish)
    return Summable(statistic, finish, average)
