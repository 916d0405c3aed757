"""Simulates privacy losses of trainings in which the batches of one record are far enough apart.

Let x be the published rows in units of their noise. Suppose that a batch with the record in step s
shifts x by the vector mu_s, and let L_s = exp(mu_s . x - |mu_s|^2 / 2). If no two batches of the
record change the same row, the likelihood ratio of several batches is the product of their L_s. So
the ratio of the mixture over all possible batches follows from a recursion over steps. Let q be the
rate of the sampling, and b its separation. A_s is the part of the ratio that comes from the cases
in which the record may join the batch of step s, and J_s is the part from the cases in which it
joins:

    J_s = q L_s A_s,    A_{s+1} = (1 - q) A_s + J_{s+1-b}.

Dong and Ganesh (2026), arXiv 2602.09338, have this recursion, from the last step to the first.
docs/proofs/correlated-noise.md has the proof.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._types import Key
from dpjax.accounting._dp_sgd import share_of_batches
from dpjax.learning._sampling import BatchSampling

# Random numbers are drawn for this many rows at once.
_BLOCK = 64


class Ratio(NamedTuple):
    """The likelihood ratio after the first steps, in logarithms.

    Attributes:
        able: log A_s, for the step s that comes next.
        joined: log J of the last b steps; that of step s at index s modulo b.
    """

    able: jax.Array
    joined: jax.Array

    @staticmethod
    def at_start(sampling: BatchSampling, shape: tuple[int, ...] = ()) -> "Ratio":
        """Returns the ratio before the first step: L_s is 1 in all earlier steps."""
        share = share_of_batches(sampling.rate, sampling.groups)
        able, joined = math.log(share / sampling.rate), math.log(share)
        shape_of_joined = (sampling.groups, *shape)
        return Ratio(jnp.full(shape, able, float), jnp.full(shape_of_joined, joined, float))

    def after(self, step: jax.Array, log_ratio: jax.Array, sampling: BatchSampling) -> "Ratio":
        """Returns the ratio after one more step, given log L of this step."""
        rate, apart = sampling.rate, sampling.groups
        new = self.able + log_ratio + math.log(rate)
        joined = lax.dynamic_update_index_in_dim(self.joined, new, step % apart, 0)
        again = joined[(step + 1) % apart]
        if rate == 1:
            return Ratio(again, joined)
        return Ratio(jnp.logaddexp(self.able + math.log1p(-rate), again), joined)

    def total(self, step: jax.Array | int) -> jax.Array:
        """Returns the log of the ratio of all `step` steps so far.

        The record may join the next step, or joined one of the last b - 1 steps.
        """
        apart = len(self.joined)
        shares = lax.dynamic_update_index_in_dim(self.joined, self.able, step % apart, 0)
        return jax.nn.logsumexp(shares, axis=0)


class _Row(NamedTuple):
    """What the next row of the noise depends on.

    Attributes:
        wait: the number of steps until the record may join a batch.
        age: the number of rows since the record's last batch, but at most the number of bands.
        sums: for each of the last steps s whose rows are not complete, mu_s . x over the rows so
            far, for a database with the record and for one without it.
        ratio: the likelihood ratio, for both databases.
    """

    wait: jax.Array
    age: jax.Array
    sums: jax.Array
    ratio: Ratio


def separated_losses(key: Key, columns: np.ndarray, sampling: BatchSampling) -> jax.Array:
    """Draws two losses: of databases with the record against those without it, and the reverse.

    Args:
        key: a key.
        columns: shape (steps, bands): how much a batch in step s changes row s + i, at [s, i], in
            units of the noise; 0 for rows that do not exist.
        sampling: a `min_separation_sampling` of at least as many steps apart as there are bands.
    """
    steps, bands = columns.shape
    assert bands <= sampling.groups
    key_first, key_rows = jax.random.split(key)
    # A step is complete when its last row is drawn, which is `before` rows later. Steps before the
    # first and after the last one change no row, and so do not change the ratio.
    before = bands - 1
    blocks = -(-(steps + before) // _BLOCK)
    rows = blocks * _BLOCK
    padded = np.pad(columns, ((before, rows - steps), (0, 0)))
    halves = jnp.asarray((padded[:rows] ** 2).sum(1) / 2)
    # How much a batch in step row - before + k changes this row, at [row, k].
    changes = jnp.asarray(
        np.stack([padded[k : k + rows, before - k] for k in range(bands)], axis=1)
    )

    def one_row(state: _Row, drawn: tuple[jax.Array, ...]) -> tuple[_Row, None]:
        row, noise, chance = drawn
        joins = (state.wait == 0) & (chance < sampling.rate)
        wait = jnp.where(joins, sampling.groups - 1, jnp.maximum(state.wait - 1, 0))
        age = jnp.where(joins, 0, jnp.minimum(state.age + 1, bands))
        own = jnp.where(age < bands, changes[row, jnp.maximum(before - age, 0)], 0.0)
        both = noise + jnp.stack([own, jnp.zeros_like(own)])
        sums = state.sums + jnp.outer(both, changes[row])
        ratio = state.ratio.after(row - before, sums[:, 0] - halves[row], sampling)
        left = jnp.concatenate([sums[:, 1:], jnp.zeros((2, 1))], axis=1)
        return _Row(wait, age, left, ratio), None

    def one_block(state: _Row, number: jax.Array) -> tuple[_Row, None]:
        key_noise, key_joins = jax.random.split(jax.random.fold_in(key_rows, number))
        noise = jax.random.normal(key_noise, (_BLOCK,), jnp.float64)
        chance = jax.random.uniform(key_joins, (_BLOCK,), jnp.float64)
        own_rows = number * _BLOCK + lax.iota(jnp.int32, _BLOCK)
        return lax.scan(one_row, state, (own_rows, noise, chance))

    nothing = jnp.int32(bands), jnp.zeros((2, bands)), Ratio.at_start(sampling, (2,))
    start = _Row(_first_wait(key_first, sampling), *nothing)
    last, _ = lax.scan(one_block, start, lax.iota(jnp.int32, blocks))
    having, lacking = last.ratio.total(rows - before)
    return jnp.stack([having, -lacking])


def _first_wait(key: Key, sampling: BatchSampling) -> jax.Array:
    """Draws the first step in which the record may join."""
    share = share_of_batches(sampling.rate, sampling.groups)
    chance = jax.random.uniform(key, (), jnp.float64)
    # With probability share / rate, the record may join at once. For each of the next b - 1 steps,
    # the record may first join in this step with probability `share`.
    later = jnp.ceil((chance - share / sampling.rate) / share)
    return jnp.clip(later, 0, sampling.groups - 1).astype(jnp.int32)
