"""Simulates privacy losses of trainings in which it is secret which batches contain a record."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Key
from dpjax.learning._sampling import BatchSampling
from dpjax.learning._separated_losses import separated_losses
from dpjax.learning._strategies import Strategy

# Inner products are increased by this fraction of the largest inner product, to cover rounding
# errors.
_RAISED = 1e-10
# The largest number of entries of a matrix in memory.
_MOST_NUMBERS = 2**28
# The largest number of bins. For separated batches, the largest number of steps between two batches
# of a record. The inner products of the bins' shifts are a square matrix. For separated batches,
# 2^14 draws are made at once, and each of them stores two numbers for each of these steps.
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
        """The fineness of the grid of correlated noise; 0 for independent noise."""
        if self.strategy is None:
            return 0
        return self.strategy.fineness(dims=self.dims, multiplier=self.noise_multiplier)

    @functools.cached_property
    def _factor(self) -> np.ndarray:
        """Returns a Cholesky factor of the inner products of bins' shifts, slightly increased."""
        bins = self.sampling.groups
        shifts = np.array([self._shifts(i, apart=bins) for i in range(bins)])
        products = shifts @ shifts.T
        # Larger inner products give a dominating pair, so the increase covers the rounding errors
        # of the products and of the factor.
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
        """Returns how much a batch in step s changes row s + i, at [s, i], increased slightly."""
        bands = 1 if self.strategy is None else self.strategy.bands
        columns = np.zeros((self.steps, bands))
        for step in range(self.steps):
            rows = slice(step, step + bands)
            found = self._shifts(step, apart=self.steps)[rows]
            columns[step, : len(found)] = found
        return columns * (1 + _RAISED)

    def __call__(self, key: Key) -> jax.Array:
        """Draws the losses of databases with a record against those without, and the reverse."""
        if self.sampling.kind == "separated":
            return separated_losses(key, self._columns, self.sampling)
        return _losses_of_bins(key, jnp.asarray(self._factor))


def _losses_of_bins(key: Key, factor: jax.Array) -> jax.Array:
    """Draws both losses, given a Cholesky factor of the inner products of the bins' shifts."""
    products = factor @ factor.T
    key_bin, key_noise = jax.random.split(key)
    own = jax.random.randint(key_bin, (), 0, len(factor))
    noise = factor @ jax.random.normal(key_noise, (len(factor),), jnp.float64)

    def log_ratio(inner: jax.Array) -> jax.Array:
        """Returns log(mixture / Q), from inner products with each bin's shift."""
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
        sampling: a `balls_in_bins_sampling` or a `min_separation_sampling`, of at most 16,384 bins
            or steps apart.
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
    if not isinstance(sampling, BatchSampling):
        raise TypeError(
            "sampling must be made by balls_in_bins_sampling or min_separation_sampling, got"
            f" {_checks.described(sampling)}"
        )
    if not sampling.one_key:
        raise ValueError(
            "sampling must be made by balls_in_bins_sampling or min_separation_sampling, got "
            f"{sampling}: for other samplings, no simulation is needed, because "
            "learning.guarantee uses a formula"
        )
    if not isinstance(strategy, Strategy | None):
        raise TypeError(f"strategy must be a Strategy, got {_checks.described(strategy)}")
    if sampling.kind == "separated" and strategy is not None and strategy.bands > sampling.groups:
        raise ValueError(
            f"sampling must have at least the separation {strategy.bands}, one step for each band "
            f"of the strategy, got {sampling}: otherwise two batches of a record would enter one "
            "published number"
        )
    groups = _checks.integer("sampling.groups", sampling.groups, least=1, most=_MOST_GROUPS)
    steps = _checks.integer("steps", steps, least=1, most=_MOST_NUMBERS // groups)
    if strategy is not None and steps > strategy.steps:
        raise ValueError(f"steps must be at most the {strategy.steps} of the strategy, got {steps}")
    multiplier = _checks.concrete_positive("noise_multiplier", noise_multiplier)
    # Rounds the multiplier down at least as far as the state of the noise rounds it.
    narrow = np.float32(multiplier)
    if narrow > multiplier:
        narrow = np.nextafter(narrow, np.float32(0))
    dims = _checks.integer("dims", dims, least=1)
    return ParticipationLosses(sampling, strategy, float(narrow), steps, dims)
