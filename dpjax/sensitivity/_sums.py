"""The shortcut for targets that are a function of a sum over records."""

import dataclasses

import jax
import jax.numpy as jnp

from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import Norm
from dpjax._tracing._affine import is_affine, linear_part
from dpjax._tracing._programs import Program
from dpjax._tracing._walks import specs
from dpjax.sensitivity._norms import difference, distance, is_float, length
from dpjax.sensitivity._sum_targets import Summable, sum_of_rows


@dataclasses.dataclass(frozen=True)
class SumOfRecords:
    """A target in two parts: the statistic of a record, and the function of their sum.

    Attributes:
        statistic: takes a record.
        finish: takes the sum over all n records to the value.
        affine: whether finish is, so that only the two records that differ matter.
        n: number of records.
    """

    statistic: Program
    finish: Program
    affine: bool
    n: int

    @classmethod
    def trace(cls, target: Summable, database: Database) -> "SumOfRecords":
        """Traces both parts for databases of the given shapes."""
        n = jax.tree.leaves(database)[0].shape[0]
        record = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), database)
        statistic = Program.trace("statistic", target.statistic, record)
        rows = (x.update(shape=(n, *x.shape)) for x in specs(statistic.jaxpr.out_avals))
        sums = [jax.eval_shape(sum_of_rows, x) for x in rows]
        total = jax.tree.unflatten(statistic.outputs.structure, sums)
        finish = Program.trace("finish", lambda total: target.finish_sum(total, n), total)
        return cls(statistic, finish, is_affine(finish.jaxpr), n)

    def distance_of_records(self, norm: Norm, old: PyTree, new: PyTree) -> jax.Array:
        """The distance between the values where one record is replaced by another: affine only."""
        statistics = self.statistic(new), self.statistic(old)
        moved = difference(*statistics)
        leaves = linear_part(self.finish.jaxpr, jax.tree.leaves(moved))
        found = length(norm, jax.tree.unflatten(self.finish.outputs.structure, leaves))
        # Where n records like these could take a sum of integers beyond its dtype, it may wrap, and
        # nothing is known about it.
        totals = self.finish.inputs.argument(0).leaves
        wraps = jnp.zeros((), bool)
        for statistic in statistics:
            for x, total in zip(jax.tree.leaves(statistic), totals, strict=True):
                if not is_float(total) and not is_float(x):
                    most = jnp.iinfo(total.dtype).max // self.n
                    magnitude = jnp.abs(x.astype(jnp.float32))
                    wraps |= jnp.max(magnitude) > float(most)
        return jnp.where(wraps, jnp.inf, found)

    def distance(
        self, norm: Norm, records: Database, position: jax.Array | int
    ) -> tuple[jax.Array, Value]:
        """The same for any finish, with the value, from all n + 1 records.

        The sum over the records that both databases have is computed once, and added to last.
        """
        statistics = jax.vmap(self.statistic)(records)
        n = jax.tree.leaves(records)[0].shape[0] - 1
        places, position = jnp.arange(n + 1, dtype=jnp.int32), jnp.asarray(position, jnp.int32)
        shared = (places != position) & (places != n)

        def common(x: jax.Array) -> jax.Array:
            kept = jnp.expand_dims(shared, tuple(range(1, x.ndim)))
            return sum_of_rows(jnp.where(kept, x, jnp.zeros_like(x)))

        def value_with(last: jax.Array | int) -> Value:
            return self.finish(
                jax.tree.map(lambda s, x: s + x[last].astype(s.dtype), total, statistics)
            )

        total = jax.tree.map(common, statistics)
        value, other = value_with(position), value_with(n)
        return distance(norm, value, other), value
