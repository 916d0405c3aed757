"""Exact samples from uniform words, with as few blocks of ChaCha20 as possible.

An exact sample may need many words, but its first few words nearly always determine it. So in large
draws, several samples take their first words from one shared block of ChaCha20. A sample is *open*
if its first words do not determine it. Such a sample is drawn again from all of its words. The
result is the same as if every sample had been drawn from all of its words.

    nonce 3    counter i is the sample's own block, for sample i
    nonce 4    blocks that several samples share, for their first words

The second word of a nonce is the round. The first `ALONE` samples take all words from their own
blocks, so a small draw needs no shared block. Further samples form groups. A group is a table with
a few rows and `ALONE` columns. The samples of a column share one block, and each row uses different
words of this block. All other words, also in later rounds, come from the sample's own block. Sample
i depends only on the key, the round and i. So n samples are the first n samples of any larger draw.

The running time reveals nothing about open samples, with one exception. In each part of 257
columns, two columns are always drawn again, even if no column is open. Less than once in 6 * 10^9
samples, a part has three open columns. Then the loop runs for another iteration, which an observer
might notice by the running time.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._core._types import PyTree
from dpjax._exact._kernels import reduced_steps
from dpjax.random import _chacha20
from dpjax.random._chacha20 import BLOCK_WORDS, CHUNK, Words

_OWN, _SHARED = 3, 4
# Each of the first `ALONE` samples takes its words from blocks of ChaCha20 that no other sample
# uses. This number is the fastest on a CPU. Another number would change the noise of every key.
ALONE = CHUNK
# The columns of a group are divided into this many parts. A column is open if at least one of its
# samples is not determined by its first random words. `_first_and_last` finds the first and the
# last open column of each part.
_PARTS = 16

_in_one_loop = functools.partial(reduced_steps, lambda same: same)

# The state of the loop: the samples, which columns are open, and whether any column is open. A
# column is open if it contains a sample that is not final.
_State: TypeAlias = tuple[PyTree, jax.Array, jax.Array]
# Maps the number of a round to the random words that a batch of samples uses in this round.
Draw: TypeAlias = Callable[[jax.Array], Words]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A rule that computes samples from uniform words.

    A sampler is a key in caches, so its functions must be functions of a module, not lambdas.

    Attributes:
        first: the number of words that are used first. They nearly always determine a sample.
        width: the number of words in a round, including the first words.
        from_first: a function of first words. It returns samples, and booleans that are True for
            samples that these words do not determine.
        from_all: `from_all(draw, zeros)` returns samples. `draw(r)` returns the words of round r =
            0, 1, ..., as arrays with the shape of `zeros`.
    """

    first: int
    width: int
    from_first: Callable[[Words], tuple[PyTree, jax.Array]]
    from_all: Callable[[Draw, jax.Array], PyTree]

    @property
    def rows(self) -> int:
        """How many samples share a block."""
        return BLOCK_WORDS // self.first

    def first_words(self, block: Words, row: int) -> Words:
        """Returns the first words of the sample in `row`, from a block that several samples share.

        A block of a single sample has the sample's first words in the last row.
        """
        return block[row * self.first : (row + 1) * self.first]

    def other_words(self, block: Words) -> Words:
        """Returns the words that a sample uses after its first words, from the sample's block."""
        return block[: self.width - self.first]


def sample(sampler: Sampler, key_data: jax.Array, round_number: ArrayLike, count: int) -> PyTree:
    """Draws independent samples: a pytree of arrays of shape (count,).

    Args:
        sampler: the rule that computes samples from words.
        key_data: uint32 of shape (8,). The bits are the same under `vmap` over keys.
        round_number: uint32. Round r of the sampler is round `round_number` + r of the key.
        count: the number of samples.
    """
    return _of_keys(sampler, count)(key_data, jnp.asarray(round_number, jnp.uint32))


@functools.cache
def _of_keys(sampler: Sampler, count: int) -> Callable[..., PyTree]:
    if count >= 2**31:
        raise ValueError(
            f"shape must need fewer than 2^31 random numbers, the limit of one key, got {count}"
        )
    if count > ALONE:
        return _chacha20.for_all_keys(functools.partial(_in_groups, sampler, count))
    alone = functools.partial(_alone, sampler, count)
    return _chacha20.for_all_keys(functools.partial(_chacha20.by_chunks, alone, count))


def _alone(sampler: Sampler, count: int, keys: jax.Array, rounds: jax.Array) -> PyTree:
    """Draws the first `count` samples of K keys, shape (K, count). No two samples share a block."""
    places = jnp.broadcast_to(jnp.arange(count, dtype=jnp.uint32), (len(keys), count))

    def draw(round_number: jax.Array) -> Words:
        numbers = rounds[:, None] + round_number
        own = _blocks(keys, places, _OWN, numbers)
        return *sampler.first_words(own, sampler.rows - 1), *sampler.other_words(own)

    return _shaped(sampler.from_all(draw, _zeros(keys, places)), places.shape)


def _in_groups(sampler: Sampler, count: int, keys: jax.Array, rounds: jax.Array) -> PyTree:
    """Draws samples of K keys, as shape (K, count), in groups.

    A group is an array of samples with a few rows. The last row of the first group contains the
    first `ALONE` samples, and its other rows are not used. The next samples are in the second
    group.
    """
    unused = (sampler.rows - 1) * ALONE
    each = -(-(unused + count) // (sampler.rows * ALONE))
    numbers = jnp.tile(jnp.arange(each, dtype=jnp.uint32), len(keys))
    drawn = lax.platform_dependent(
        *(jnp.repeat(keys, each, axis=0), jnp.repeat(rounds, each), numbers),
        cpu=functools.partial(_groups_from_first, sampler),
        default=functools.partial(_groups_from_all, sampler),
    )
    return jax.tree.map(lambda x: x.reshape(len(keys), -1)[:, unused : unused + count], drawn)


def _groups_from_all(sampler: Sampler, *groups: jax.Array) -> PyTree:
    """Draws the samples of each group, as arrays of shape (groups, rows, columns).

    Every sample is computed from all of its random words, even if its first words are enough. On
    accelerators this is fast, and needs fewer compiled programs.
    """
    columns = jnp.broadcast_to(jnp.arange(ALONE, dtype=jnp.int32), (len(groups[0]), ALONE))
    from_all = functools.partial(_columns_from_all, sampler)
    drawn = _chacha20.by_chunks(from_all, ALONE * (sampler.rows + 1), *groups, columns)
    return jax.tree.map(lambda x: x.swapaxes(1, 2), drawn)


def _groups_from_first(sampler: Sampler, *groups: jax.Array) -> PyTree:
    """Draws the samples of groups on a CPU.

    Every sample is first computed from only its first random words. If these words do not determine
    all samples of a column, the column is computed again from all words.
    """
    from_first = functools.partial(_rows_from_first, sampler)
    rows, left_open = _chacha20.in_chunks(from_first, ALONE, CHUNK, *groups)
    drawn = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *rows)
    from_all = functools.partial(_columns_from_all, sampler)
    blocks = 2 * _PARTS * (sampler.rows + 1)
    group = jnp.arange(len(left_open))[:, None]

    def draw_again(state: _State) -> _State:
        drawn, left_open, _ = state
        columns = _first_and_last(left_open)
        new = _chacha20.in_chunks(from_all, blocks, CHUNK, *groups, columns)
        drawn = jax.tree.map(lambda x, y: x.at[group, :, columns].set(y, mode="drop"), drawn, new)
        left_open = left_open.at[group, columns].set(False, mode="drop")
        return drawn, left_open, jnp.any(left_open)

    # One iteration is nearly always enough. It also runs if no column is open, so that the running
    # time does not reveal whether one is.
    start = drawn, left_open, jnp.any(left_open) | True
    drawn, _, _ = lax.while_loop(lambda state: state[2], draw_again, start)
    return drawn


def _rows_from_first(
    sampler: Sampler, keys: jax.Array, rounds: jax.Array, numbers: jax.Array
) -> tuple[list[PyTree], jax.Array]:
    """Computes samples from only the first random words of each sample.

    A group is a table of samples. The result is a list that contains the samples of each row of the
    tables, and an array that says which columns are open. A column is open if the first words do
    not determine all of its samples. Each array has the shape (groups, columns).
    """
    counters, nonces = _shared_blocks(numbers[:, None], jnp.arange(ALONE, dtype=jnp.uint32)[None])
    block = _blocks(keys, counters, nonces, rounds[:, None])
    rows = [
        _shaped(_in_one_loop(sampler.from_first(sampler.first_words(block, row))), counters.shape)
        for row in range(sampler.rows)
    ]
    drawn, left_open = zip(*rows, strict=True)
    return list(drawn), functools.reduce(operator.or_, left_open)


def _shared_blocks(numbers: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the counters and nonces of the blocks that contain the samples' first words.

    A group is a table of samples. The samples of a column share one block. In the first group, only
    the last row of the table has samples, so each block belongs to a single sample.
    """
    nonces = jnp.where(numbers == 0, np.uint32(_OWN), np.uint32(_SHARED))
    return numbers * np.uint32(ALONE) + columns, nonces


def _first_and_last(left_open: jax.Array) -> jax.Array:
    """Returns the index of the first and of the last open column, in each part of a group.

    A column is open if it contains a sample that is not final. If a part has no open column, both
    indices are `ALONE`, which is not the index of a column.
    """
    parts = left_open.reshape(len(left_open), _PARTS, -1)
    column = jnp.arange(ALONE, dtype=jnp.int32).reshape(1, *parts.shape[1:])
    first = jnp.min(jnp.where(parts, column, ALONE), axis=2)
    last = jnp.max(jnp.where(parts, column, -1), axis=2)
    return jnp.concatenate([first, jnp.where(last < 0, ALONE, last)], axis=1)


def _columns_from_all(
    sampler: Sampler, keys: jax.Array, rounds: jax.Array, numbers: jax.Array, columns: jax.Array
) -> PyTree:
    """Computes the samples of the given columns from all words of each sample.

    The samples have the shape (groups, columns, rows).
    """
    columns = columns.astype(jnp.uint32)[..., None]
    numbers, rounds = numbers[:, None, None], rounds[:, None, None]
    row = jnp.arange(sampler.rows, dtype=jnp.uint32)[None, None]
    shape = *columns.shape[:2], sampler.rows
    places = (numbers * np.uint32(sampler.rows) + row - np.uint32(sampler.rows - 1)) * np.uint32(
        ALONE
    ) + columns
    shared, nonces = _shared_blocks(numbers, columns)

    def own_and_shared(own: ArrayLike, shared: ArrayLike) -> jax.Array:
        own = jnp.broadcast_to(jnp.uint32(own), shape)
        shared = jnp.broadcast_to(jnp.uint32(shared), columns.shape)
        return jnp.concatenate([own, shared], axis=2).reshape(len(keys), -1)

    counters, nonces = own_and_shared(places, shared), own_and_shared(_OWN, nonces)

    def draw(round_number: jax.Array) -> Words:
        # Own blocks and shared blocks are computed by one call, which saves compile time. In later
        # rounds, shared blocks are ignored.
        both = own_and_shared(rounds + round_number, rounds)
        blocks = _blocks(keys, counters, nonces, both)
        blocks = [x.reshape(*shape[:2], -1) for x in blocks]
        own = tuple(x[..., :-1] for x in blocks)
        of_rows = [
            sampler.first_words(tuple(x[..., -1] for x in blocks), row)
            for row in range(sampler.rows)
        ]
        shared = (jnp.stack(x, axis=-1) for x in zip(*of_rows, strict=True))
        first = (
            jnp.where(round_number == 0, x, y)
            for x, y in zip(shared, sampler.first_words(own, sampler.rows - 1), strict=True)
        )
        return tuple(x.reshape(-1) for x in (*first, *sampler.other_words(own)))

    zeros = _zeros(keys, places.reshape(len(keys), -1))
    return _shaped(sampler.from_all(draw, zeros), shape)


def _blocks(keys: jax.Array, counters: jax.Array, nonces: ArrayLike, rounds: ArrayLike) -> Words:
    """Returns the 16 words of each block, as arrays of the size of `counters`."""
    return tuple(jnp.unstack(_chacha20.blocks_of(keys, counters, nonces, rounds)))


def _zeros(keys: jax.Array, places: jax.Array) -> jax.Array:
    """Returns zeros that are computed from the data.

    `shard_map` requires that the initial values of a loop vary over the same devices as the data.
    Zeros computed from the data count as varying.
    """
    return ((keys[:, :1] ^ places) & np.uint32(0)).reshape(-1)


def _shaped(tree: PyTree, shape: tuple[int, ...]) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(shape), tree)
