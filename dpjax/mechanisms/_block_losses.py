"""Blocks of records, and how many of them must change until a program's results are low.

A program is evaluated on subsets of the blocks. The loss of a number y is the least number of
blocks that hits every subset whose result exceeds y. One block moves it by at most 1, for any
program (docs/proofs/subset-envelope.md).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._types import Database

# A batch of subsets takes about this many bytes.
_MOST_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class BlockDesign:
    """Blocks in groups; the subsets are those of one size within a group.

    Attributes:
        blocks: the number of blocks.
        size: the number of blocks in a subset.
        groups: blocks are dealt to them in order, and sizes of groups differ by at most 1.
    """

    blocks: int
    size: int
    groups: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of blocks in each group. Single blocks need no groups."""
        groups = self.blocks if self.size == 1 else self.groups
        least, larger = divmod(self.blocks, groups)
        return tuple(least + (group < larger) for group in range(groups))

    @property
    def evaluations(self) -> int:
        """The number of subsets."""
        return sum(math.comb(length, self.size) for length in self.lengths)

    @property
    def most_losses(self) -> int:
        """The blocks that hit every subset: all but size - 1 of each group."""
        return sum(length - self.size + 1 for length in self.lengths)

    @functools.cached_property
    def subsets(self) -> np.ndarray:
        """The blocks of every subset, shape (evaluations, size), group by group."""
        starts = np.cumsum((0, *self.lengths[:-1]))
        return np.concatenate(
            [
                start + np.array(list(itertools.combinations(range(length), self.size)), np.int32)
                for start, length in zip(starts, self.lengths, strict=True)
            ]
        ).astype(np.int32)

    def evaluate(
        self, program: Callable[[Database], jax.Array], database: Database, size: int
    ) -> jax.Array:
        """The program's results on the records of all subsets.

        Record i is in block i modulo `blocks`, so blocks of sorted records are alike. Each has
        n // blocks records, and the last n % blocks records are not used. Shapes decide how many
        subsets are evaluated at a time.

        Args:
            program: takes records to a scalar.
            database: a pytree of arrays with leading axis n.
            size: the bytes that one evaluation takes.
        """
        n = jax.tree.leaves(database)[0].shape[0]
        records = n // self.blocks
        in_blocks = jax.tree.map(
            lambda x: jnp.moveaxis(
                x[: records * self.blocks].reshape(records, self.blocks, *x.shape[1:]), 1, 0
            ),
            database,
        )

        def one(chosen: jax.Array) -> jax.Array:
            return program(
                jax.tree.map(
                    lambda x: x[chosen].reshape(self.size * records, *x.shape[2:]), in_blocks
                )
            )

        at_once = max(1, _MOST_BYTES // max(1, size))
        if at_once >= self.evaluations:
            return jax.vmap(one)(jnp.asarray(self.subsets))
        return lax.map(one, jnp.asarray(self.subsets), batch_size=at_once)

    def thresholds(self, results: jax.Array) -> jax.Array:
        """The numbers at which the loss changes: loss(y) of them exceed y; of shape (most_losses,).

        Args:
            results: of all subsets, shape (evaluations,), without NaN.
        """
        ends = np.cumsum([math.comb(length, self.size) for length in self.lengths])[:-1]
        parts = jnp.split(results, ends)
        return jnp.concatenate(
            [
                _thresholds_of_group(part, length, self.size)
                for part, length in zip(parts, self.lengths, strict=True)
            ]
        )


def _thresholds_of_group(results: jax.Array, length: int, size: int) -> jax.Array:
    """The least m_c for c = 0, 1, ... so that c blocks hit all subsets with a result above m_c."""
    if size == length:  # Also for single blocks in groups of their own.
        return results
    subsets = itertools.combinations(range(length), size)
    masks = np.array([sum(1 << block for block in chosen) for chosen in subsets])
    # At every set of blocks that stay, the largest result of its subsets.
    largest = jnp.full(2**length, -jnp.inf, results.dtype).at[masks].set(results)
    for block in range(length):
        without, with_block = jnp.moveaxis(largest.reshape(-1, 2, 2**block), 1, 0)
        largest = jnp.stack([without, jnp.maximum(without, with_block)], axis=1).ravel()
    stay = np.bitwise_count(np.arange(2**length))
    counts = range(length, size - 1, -1)
    return jnp.stack([jnp.min(largest[np.flatnonzero(stay == count)]) for count in counts])


def losses_at_ends(thresholds: jax.Array, inner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The losses at the left and at the right end of every candidate, int32.

    The first candidate begins below all numbers and the last one ends above all: the loss is that
    of the number of thresholds there, and 0.

    Args:
        thresholds: from `BlockDesign.thresholds`.
        inner: the ends between candidates, in order.
    """
    above = jnp.sum(thresholds[:, None] > inner[None, :], axis=0, dtype=jnp.int32)
    most = jnp.full(1, thresholds.size, jnp.int32)
    return jnp.concatenate([most, above]), jnp.concatenate([above, jnp.zeros(1, jnp.int32)])


def doubled_scores(thresholds: jax.Array, inner: jax.Array) -> jax.Array:
    """Minus twice the distance of half of all losses from a candidate's losses; 0 is best.

    A candidate's losses are the interval between those at its ends. Each end moves by at most 1, so
    these integers move by at most 2.
    """
    left, right = losses_at_ends(thresholds, inner)
    return -jnp.maximum(0, jnp.maximum(2 * right - thresholds.size, thresholds.size - 2 * left))
