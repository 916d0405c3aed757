"""Simulates privacy losses of trainings in which it is secret which batches contain a record.

The batches of one record may have to be far enough apart. Let x be the published rows in units of
their noise. Suppose that a batch with the record in step s shifts x by the vector mu_s, and let L_s
= exp(mu_s . x - |mu_s|^2 / 2). If no two batches of the record change the same row, the likelihood
ratio of several batches is the product of their L_s. So the ratio of the mixture over all possible
batches follows from a recursion over steps. Let q be the rate of the sampling, and b its
separation. A_s is the part of the ratio that comes from the cases in which the record may join the
batch of step s, and J_s is the part from the cases in which it joins:

    J_s = q L_s A_s,    A_{s+1} = (1 - q) A_s + J_{s+1-b}.

Dong and Ganesh (2026), arXiv 2602.09338, use this recursion from the last step to the first.
docs/proofs/correlated-noise.md has the proof.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Key
from dpjax.accounting._dp_sgd import share_of_batches
from dpjax.learning._sampling import BatchSampling
from dpjax.learning._strategies import MAKERS, Strategy

# Random numbers are drawn for this many rows at once.
_BLOCK = 64


class Ratio(NamedTuple):
    """The likelihood ratio after the first steps, as logarithms of its parts.

    Attributes:
        able: log A_s for the next step s. A_s is the part of the ratio from the cases in which the
            record may join the batch of step s.
        joined: log J_s for each of the last b steps s, at index s modulo b. J_s is the part from
            the cases in which the record joins the batch of step s.
    """

    able: jax.Array
    joined: jax.Array

    @staticmethod
    def at_start(sampling: BatchSampling, shape: tuple[int, ...] = ()) -> "Ratio":
        """Returns the ratio before step 0.

        With some probability, the sampling does not let the record join the batch of step 0. This
        is stored as if the record had joined a batch before step 0. The likelihood ratio of such a
        batch is 1.
        """
        share = share_of_batches(sampling.rate, sampling.groups)
        able, joined = math.log(share / sampling.rate), math.log(share)
        shape_of_joined = (sampling.groups, *shape)
        return Ratio(jnp.full(shape, able, float), jnp.full(shape_of_joined, joined, float))

    def after(self, step: jax.Array, log_ratio: jax.Array, sampling: BatchSampling) -> "Ratio":
        """Returns the ratio after one more step.

        `log_ratio` is log L_s: the log likelihood ratio of this step if its batch contains the
        record.
        """
        rate, apart = sampling.rate, sampling.groups
        new = self.able + log_ratio + math.log(rate)
        joined = lax.dynamic_update_index_in_dim(self.joined, new, step % apart, 0)
        again = joined[(step + 1) % apart]
        if rate == 1:
            return Ratio(again, joined)
        return Ratio(jnp.logaddexp(self.able + math.log1p(-rate), again), joined)

    def total(self, step: jax.Array | int) -> jax.Array:
        """Returns the log of the likelihood ratio of the first `step` steps.

        The ratio is a sum with one term for each case. Either the record may join the next batch,
        or it joined one of the last b - 1 batches, where b is the separation.
        """
        apart = len(self.joined)
        shares = lax.dynamic_update_index_in_dim(self.joined, self.able, step % apart, 0)
        return jax.nn.logsumexp(shares, axis=0)


class _Row(NamedTuple):
    """What the next published row depends on.

    Attributes:
        wait: the number of steps until the record may join a batch.
        age: the number of rows since the record's last batch, but at most the number of bands.
        sums: shape (2, bands). If the record is in the batch of step s, the rows shift by a vector
            mu_s. sums[i, k] is the inner product of mu_s and all rows so far, for
            the step s = t - bands + 1 + k, where t is the next row. For i = 0 the rows are drawn
            from the database with the record, for i = 1 from the database without it.
        ratio: the likelihood ratio of the rows of each database.
    """

    wait: jax.Array
    age: jax.Array
    sums: jax.Array
    ratio: Ratio


def separated_losses(key: Key, columns: np.ndarray, sampling: BatchSampling) -> jax.Array:
    """Draws a privacy loss for each of two databases, with a record and without it.

    Let P be the density of the published rows with the record, and Q their density without it. The
    losses are log(P / Q) at rows drawn from P, and log(Q / P) at rows drawn from Q.

    Args:
        key: a key.
        columns: shape (steps, bands). The entry [s, i] is how much a batch in step s changes row
            s + i, in units of the noise; 0 for rows that do not exist.
        sampling: a `min_separation_sampling` whose separation is at least the number of bands.
    """
    steps, bands = columns.shape
    assert bands <= sampling.groups
    key_first, key_rows = jax.random.split(key)
    # A batch in step s changes the rows s to s + `before`. So step s is complete when row s +
    # `before` is drawn. The padding adds steps before the first and after the last step. The added
    # steps change no row, so they do not change the likelihood ratio.
    before = bands - 1
    blocks = -(-(steps + before) // _BLOCK)
    rows = blocks * _BLOCK
    padded = np.pad(columns, ((before, rows - steps), (0, 0)))
    halves = jnp.asarray((padded[:rows] ** 2).sum(1) / 2)
    # changes[t, k] is how much a batch in step t - before + k changes row t.
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
    """Draws the number of steps until the record may join a batch."""
    share = share_of_batches(sampling.rate, sampling.groups)
    chance = jax.random.uniform(key, (), jnp.float64)
    # The number is 0 with probability share / rate. It is each of 1, ..., b - 1 with probability
    # `share`. Here b is `sampling.groups`: a record that joins a batch may join again b steps
    # later.
    later = jnp.ceil((chance - share / sampling.rate) / share)
    return jnp.clip(later, 0, sampling.groups - 1).astype(jnp.int32)


# Inner products are increased by this fraction of the largest inner product, to cover rounding
# errors.
_RAISED = 1e-10
# The largest number of entries of a matrix in memory.
_MOST_NUMBERS = 2**28
# The largest allowed number of bins, and the largest allowed separation of a
# `min_separation_sampling`. The reason is memory. For bins, a matrix has one row for each bin. For
# separated batches, 2^14 draws are made at once, and each draw stores twice `separation` numbers.
_MOST_GROUPS = 2**14


@dataclasses.dataclass(frozen=True)
class ParticipationLosses:
    """Draws privacy losses of a training; made by `participation_losses`.

    Attributes:
        sampling: how batches are drawn.
        strategy: the strategy of correlated noise; None for independent noise.
        noise_multiplier: the noise multiplier, rounded down to a float of JAX.
        steps: the number of steps.
        dims: how many numbers get noise in a step.

    Formal guarantees:
        Those of `participation_losses`.
    """

    sampling: BatchSampling
    strategy: Strategy | None
    noise_multiplier: float
    steps: int
    dims: int

    @property
    def fineness(self) -> int:
        """The k for which the grid has a spacing of about norm bound / (2^k sqrt(dims)).

        This is the grid of correlated noise. For independent noise, the result is 0.
        """
        if self.strategy is None:
            return 0
        return self.strategy.fineness(dims=self.dims, multiplier=self.noise_multiplier)

    @functools.cached_property
    def _factor(self) -> np.ndarray:
        """Returns a Cholesky factor of the matrix of inner products of the bins' shifts.

        A bin's shift is a vector with an entry for each row: how much a record in this bin changes
        the row. The inner products are increased slightly, to cover rounding errors.
        """
        bins = self.sampling.groups
        shifts = np.array([self._shifts(i, apart=bins) for i in range(bins)])
        products = shifts @ shifts.T
        # Larger inner products give a dominating pair. So raising them covers the rounding errors
        # of the products and of the Cholesky factor.
        raised = products + _RAISED * products.max() * (1 + np.eye(len(products)))
        return np.linalg.cholesky(raised)

    def _shifts(self, first: int, *, apart: int) -> np.ndarray:
        """Returns how much a record changes each row, in units of the noise of the row.

        The record is in the batches of the steps first, first + apart, first + 2 apart, ...
        """
        steps = self.steps
        if self.strategy is None:
            return (np.arange(steps) % apart == first) / self.noise_multiplier
        moved = self.strategy.moved_rows(first, groups=apart, steps=steps)
        # Rounding changes a row by at most sqrt(dims) times `rounding` units of the grid. The norm
        # bound of a clipped sum is at least sqrt(dims) 2^(fineness - 1) units.
        reached = np.zeros(steps + self.strategy.bands)
        for step in range(first, steps, apart):
            reached[step : step + self.strategy.bands] = 1
        moved += reached[:steps] * self.strategy.rounding * 2.0 ** (1 - self.fineness)
        return moved / (self.noise_multiplier * self.strategy.column_norm)

    @functools.cached_property
    def _columns(self) -> np.ndarray:
        """Returns an array whose entry [s, i] is how much a batch in step s changes row s + i.

        The entries are rounded up.
        """
        bands = 1 if self.strategy is None else self.strategy.bands
        columns = np.zeros((self.steps, bands))
        for step in range(self.steps):
            rows = slice(step, step + bands)
            found = self._shifts(step, apart=self.steps)[rows]
            columns[step, : len(found)] = found
        return columns * (1 + _RAISED)

    def __call__(self, key: Key) -> jax.Array:
        """Draws a privacy loss for each of two databases, with a record and without it.

        Let P be the density of the published rows with the record, and Q their density without it
        (see `participation_losses`). The losses are log(P / Q) at rows drawn from P, and log(Q / P)
        at rows drawn from Q.
        """
        if self.sampling.kind == "separated":
            return separated_losses(key, self._columns, self.sampling)
        return _losses_of_bins(key, jnp.asarray(self._factor))


def _losses_of_bins(key: Key, factor: jax.Array) -> jax.Array:
    """Draws a privacy loss for each of two databases, with a record and without it.

    Let P be the density of the published rows with the record, and Q their density without it. The
    losses are log(P / Q) at rows drawn from P, and log(Q / P) at rows drawn from Q. `factor` is the
    Cholesky factor of `ParticipationLosses`.
    """
    products = factor @ factor.T
    key_bin, key_noise = jax.random.split(key)
    own = jax.random.randint(key_bin, (), 0, len(factor))
    noise = factor @ jax.random.normal(key_noise, (len(factor),), jnp.float64)

    def log_ratio(inner: jax.Array) -> jax.Array:
        """Returns log(P / Q) at rows whose inner product with the shift of bin i is `inner[i]`."""
        exponents = inner - jnp.diagonal(products) / 2
        return jax.nn.logsumexp(exponents) - math.log(len(factor))

    return jnp.stack([log_ratio(noise + products[own]), -log_ratio(noise)])


def participation_losses(
    sampling: BatchSampling,
    *,
    strategy: Strategy | None = None,
    noise_multiplier: float,
    steps: int,
    dims: int,
) -> ParticipationLosses:
    """Draws privacy losses of a training whose batches are secret, for `accounting.monte_carlo`.

    With `balls_in_bins_sampling` and `min_separation_sampling`, nobody knows which batches a record
    was in. No formula is known for the privacy loss, but losses of a dominating pair P, Q can be
    drawn. Let S be the random set of the steps whose batches contain the record. The pair is

        P = mean of N(mu_S, I) over S,    Q = N(0, I).

    The shift mu_S has one entry for each step t: the sum of |C[t, j]| over the steps j in S,
    divided by the standard deviation of a row's noise.

    Args:
        sampling: a `balls_in_bins_sampling` of at most 16,384 bins, or a `min_separation_sampling`
            with a separation of at most 16,384.
        strategy: of correlated noise; None for `gaussian_noise`.
        noise_multiplier: a lower bound on the noise multiplier of every step.
        steps: an upper bound on the number of steps.
        dims: how many numbers get noise in a step: the total number of parameters.

    Returns:
        A function of a key, for `accounting.monte_carlo` under add-or-remove-one. Pass the result
        to `guarantee` as `simulated`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is out of range; if the sampling is another one; or if the
            separation is less than the number of bands.

    Formal guarantees:
        P and Q dominate the outputs of all steps on neighboring databases under add-or-remove-one,
        in both directions, for steps that depend on earlier outputs: see the theorem of secret
        places in docs/proofs/correlated-noise.md. Rounding to the grid is included. The costs of
        noise tables and of batches beyond their capacity are not: `guarantee` adds them.

    Source:
        Choquette-Choo, Ganesh, Haque, Steinke and Thakurta (2024), arXiv 2410.06266; Chua et al.
        (2024), arXiv 2412.16802, for independent noise; Dong and Ganesh (2026), arXiv 2602.09338,
        for separated batches.

    Example:
        >>> import dpjax
        >>> from dpjax import learning
        >>> losses = learning.participation_losses(
        ...     learning.balls_in_bins_sampling(1000, bins=10),
        ...     noise_multiplier=1.0, steps=20, dims=5,
        ... )
        >>> found = dpjax.accounting.monte_carlo(
        ...     dpjax.random.seeded_key(0), losses, draws=200_000,
        ...     relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE,
        ... )
        >>> round(found.epsilon(1e-3), 1)
        2.7
    """
    makers = "balls_in_bins_sampling or min_separation_sampling"
    _checks.instance("sampling", sampling, BatchSampling, makers)
    if not sampling.one_key:
        raise ValueError(
            f"sampling must be made by {makers}, got {sampling}: guarantees of other samplings need"
            " no simulated losses"
        )
    _checks.instance("strategy", strategy, Strategy | None, MAKERS)
    if sampling.kind == "separated" and strategy is not None and strategy.bands > sampling.groups:
        raise ValueError(
            f"sampling must have a separation of at least {strategy.bands}, the number of bands of"
            f" the strategy, got {sampling}"
        )
    groups = _checks.integer("sampling.groups", sampling.groups, least=1, most=_MOST_GROUPS)
    steps = _checks.integer("steps", steps, least=1, most=_MOST_NUMBERS // groups)
    if strategy is not None and steps > strategy.steps:
        raise ValueError(f"steps must be at most the {strategy.steps} of the strategy, got {steps}")
    multiplier = _checks.concrete_positive("noise_multiplier", noise_multiplier)
    # The state of the noise stores the multiplier rounded down to float32 or float64. Here it is
    # always rounded down to float32. So the result is at most the stored multiplier.
    narrow = np.float32(multiplier)
    if float(narrow) > multiplier:  # NumPy would compare a float in float32.
        narrow = np.nextafter(narrow, np.float32(0))
    dims = _checks.integer("dims", dims, least=1)
    return ParticipationLosses(sampling, strategy, float(narrow), steps, dims)
