"""Targets that are a function of a sum over records."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core._types import Database, PyTree, Value
from dpjax._exact._fixed_point import average
from dpjax._tracing._one_by_one import vmapped

_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}


def sum_of_rows(x: jax.Array) -> jax.Array:
    """The sum over the leading axis, also of integers too narrow for `jnp.sum`."""
    wider = _WIDER.get(x.dtype.name)
    return jnp.sum(x if wider is None else x.astype(wider), axis=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Summable:
    """A target f(D) = finish(sum of statistic(record)), made by `dpjax.targets.summable`.

    Attributes:
        statistic: takes one record, a pytree without the leading axis, to a pytree of real arrays.
        finish: takes the sum of the statistics, or their average, to the value.
        average: whether the sum is divided by the number of records first.
        largest: a public bound on the magnitudes of all statistics, which are floats and averaged,
            or None; it broadcasts to the shape of each. Their sum is then exact.

    Formal guarantees:
        A sum ignores the order of the records: exactly where `largest` is given, else up to
        rounding.
    """

    statistic: Callable[[PyTree], PyTree]
    finish: Callable[[PyTree], Value]
    average: bool
    largest: PyTree = None

    def __call__(self, database: Database) -> Value:
        """The value on a database, a pytree of arrays with leading axis n."""
        statistics = vmapped(self.statistic, database)
        if self.largest is not None:
            return self.finish(jax.tree.map(lambda x: average(x, self.largest), statistics))
        total = jax.tree.map(sum_of_rows, statistics)
        return self.finish_sum(total, len(jax.tree.leaves(database)[0]))

    def finish_sum(self, total: PyTree, n: int) -> Value:
        """The value, from the sum over n records."""
        if self.average:
            total = jax.tree.map(lambda x: x / n, total)
        return self.finish(total)
