"""Queries of records in parts. Each part has exact totals, which add up in any order."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dpjax._core._parts import Parts, Summed, Unsummed
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database
from dpjax.queries._padded_records import present_records
from dpjax.queries._totals import Totals, added


class OfParts:
    """A query that takes `Parts` and `Summed` in place of records.

    Formal guarantees:
        Totals are integers that add up to the same bits in any order. So the value on parts has the
        bits of the value on all records at once, and its sensitivity.
    """

    partial: Callable[..., Totals]

    def check_size(self, n: int) -> None:
        """Refuses more records than a query can count."""

    def over(self, parts: Parts) -> Unsummed:
        """The pass that adds up the totals of these parts."""
        self.check_size(parts.slots)
        shapes = jax.eval_shape(self.partial, *present_records(parts.like))
        return Unsummed(
            Summed(shapes, parts.slots), lambda: Summed(_total(self.partial, parts), parts.slots)
        )


def _total(partial: Callable[[Database, jax.Array], Totals], parts: Parts) -> Totals:
    """The totals of all parts; refuses more records than are known to be possible."""

    def of_several(several: Iterator[PaddedRecords]) -> tuple[Any, int]:
        # Runs in the process that holds the parts. The lambda is new at each call, because JAX may
        # cache old closures.
        of_one = jax.jit(lambda records, present: partial(records, present))
        total, n = nothing, 0
        for part in several:
            n += int(np.count_nonzero(part.present))
            total = added(total, of_one(*present_records(part)))
            jax.block_until_ready(total)  # Without this wait, queued batches would fill the memory.
        return jax.device_get(total), n

    shapes = jax.eval_shape(partial, *present_records(parts.like))
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    total, n = nothing, 0
    for found, count in parts.each(of_several):
        total, n = added(total, found), n + count
    if n > parts.slots:
        raise ValueError(
            f"most_rows must be enough for every possible table, got {parts.slots} for {n}"
        )
    return total
