"""Simulation-based calibration: do posteriors contain the truth as often as they claim?"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax.random._keys import check_sampling_key, sampling_key

_MOST_BINS = 20
_LEAST_REPEATS = 100
_SUSPECT = 1e-3


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """The ranks of true parameters among draws of their posteriors; made by `calibration`.

    Attributes:
        ranks: shape (repeats, numbers): for each number of theta, how many draws are below its true
            value, from 0 to draws.
        draws: the number of draws from each posterior.

    A `Calibration` prints its p-value, and the coverage of 95% intervals.

    Formal guarantees:
        If prior, releases and posterior are consistent, each column of ranks is uniform on 0, ...,
        draws, and its rows are independent.
    """

    ranks: np.ndarray
    draws: int

    @property
    def counts(self) -> np.ndarray:
        """How many trials have a rank in each bin, shape (numbers, bins).

        All bins are equally wide.
        """
        ranks = self.draws + 1
        bins = max(x for x in range(1, _MOST_BINS + 1) if ranks % x == 0)
        places = self.ranks * bins // ranks
        return np.stack([np.bincount(column, minlength=bins) for column in places.T])

    @property
    def p_value(self) -> float:
        """The p-value of a chi-square test that ranks are uniform, with Bonferroni's correction."""
        counts = self.counts
        expected = len(self.ranks) / counts.shape[1]
        statistics = ((counts - expected) ** 2 / expected).sum(axis=1)
        each = scipy.special.chdtrc(counts.shape[1] - 1, statistics)
        return float(min(1.0, len(each) * np.min(each)))

    def coverage(self, *, confidence: float = 0.95) -> np.ndarray:
        """How often the central interval of the posterior contains each number of theta.

        Args:
            confidence: the posterior probability of the interval, in (0, 1).

        Returns:
            The fraction of trials for each number of theta, shape (numbers,). The interval leaves
            out x ranks at each end. If x is not an integer, the interval contains only the fraction
            ceil(x) - x of the next rank. A trial with this rank counts as this fraction.

        Raises:
            TypeError: if the confidence is not a number.
            ValueError: if the confidence is out of range.
        """
        confidence = _checks.fraction("confidence", confidence)
        left = (1 - confidence) / 2 * (self.draws + 1)  # The number of ranks below the interval.
        whole, part = int(left), left - int(left)
        folded = np.minimum(self.ranks, self.draws - self.ranks)
        inside = np.where(folded > whole, 1.0, np.where(folded == whole, 1 - part, 0.0))
        return inside.mean(axis=0)

    def __repr__(self) -> str:
        told = "refuted" if self.p_value < _SUSPECT else "not refuted"
        covered = ", ".join(f"{100 * x:.1f}%" for x in self.coverage())
        return (
            f"Calibration({told} at p = {self.p_value:.2g}; intervals of 95% contain the truth in"
            f" {covered} of {len(self.ranks):,} trials)"
        )


def calibration(
    key: Key,
    posterior: Callable[[Key, Value, int], PyTree],
    *,
    prior: Callable[[Key], PyTree],
    release: Callable[[Key, PyTree], Value],
    repeats: int = 1000,
    draws: int = 99,
) -> Calibration:
    """Checks posteriors by simulation: the ranks of the truth among draws must be uniform.

    Each trial draws theta from the prior, a release given theta, and draws from the posterior given
    the release. A wrong density, prior or number of records makes the ranks nonuniform.

    Args:
        key: a typed key of `dpjax.random`, used for nothing else.
        posterior: `posterior(key, released, draws)` returns draws of theta with a leading axis, as
            `SimulationBank.sample` does; JAX code.
        prior: `prior(key)` draws theta, a pytree of real arrays.
        release: `release(key, theta)` simulates a release, as `SimulationBank.draw_release` does.
            It draws a database from a population with parameters theta, and returns the value
            released about this database; JAX code.
        repeats: number of trials, at least 100.
        draws: the number of draws from each posterior. The draws + 1 possible ranks are grouped
            into at most 20 equal bins, so 99 is better than 100.

    Returns:
        A `Calibration`.

    Raises:
        TypeError: if the key is not a typed key, or another argument is not a function.
        ValueError: if a size is out of range, or the posterior returns draws whose structure
            differs from theta.

    Formal guarantees:
        If prior, releases and posterior are consistent, `p_value` is below x with probability about
        x. The chi-square distribution is a limit for many trials; 1,000 trials in 20 bins are
        enough. All draws from one simulation bank share its error: at an effective sample size s,
        ranks are off by about draws / (2 sqrt(s)), which many trials can detect.

    Source:
        Talts, Betancourt, Simpson, Vehtari and Gelman (2018), "Validating Bayesian Inference
        Algorithms with Simulation-Based Calibration", Algorithm 1.

    Example:
        >>> import jax
        >>> import dpjax
        >>> def normal_posterior(key, released, draws):
        ...     return released / 2 + jax.random.normal(key, (draws,)) * 0.5**0.5
        >>> dpjax.auditing.calibration(
        ...     dpjax.random.seeded_key(0),
        ...     normal_posterior,
        ...     prior=jax.random.normal,
        ...     release=lambda key, theta: theta + jax.random.normal(key),
        ... ).p_value > 0.001
        True
    """
    check_sampling_key(key)
    _checks.host_only("calibration", key, "your own trials")
    for name, function in (("posterior", posterior), ("prior", prior), ("release", release)):
        _checks.function(name, function)
    repeats = _checks.integer("repeats", repeats, least=_LEAST_REPEATS)
    draws = _checks.integer("draws", draws, least=1)

    def trial(key: Key) -> jax.Array:
        of_theta, of_release, of_draws, of_ties = jax.random.split(key, 4)
        theta = _checks.real_arrays("theta", prior(sampling_key(of_theta)))
        found = posterior(sampling_key(of_draws), release(of_release, theta), draws)
        return _ranks(sampling_key(of_ties), theta, found, draws)

    ranks = jax.jit(lambda keys: jax.lax.map(trial, keys))(jax.random.split(key, repeats))
    return Calibration(np.asarray(ranks), draws)


def _ranks(key: Key, theta: PyTree, found: PyTree, draws: int) -> jax.Array:
    """Returns how many draws are below each number of theta. Ties are broken at random."""
    numbers, structure = jax.tree.flatten(theta)
    columns, of_draws = jax.tree.flatten(found)
    wanted = [(draws, *leaf.shape) for leaf in numbers]
    if structure != of_draws or [jnp.shape(x) for x in columns] != wanted:
        raise ValueError(
            f"posterior must return {draws} draws along a leading axis, each like theta, "
            f"{_checks.described(theta)}, got {_checks.described(found)}"
        )
    ranks: list[jax.Array] = []
    for i, (number, column) in enumerate(zip(numbers, columns, strict=True)):
        below = jnp.sum(column < number[None], axis=0)
        equal = jnp.sum(column == number[None], axis=0)
        uniform = jax.random.uniform(jax.random.fold_in(key, i), number.shape)
        share = jnp.floor(uniform * (equal + 1).astype(uniform.dtype)).astype(below.dtype)
        ranks.append((below + jnp.minimum(share, equal)).ravel())
    return jnp.concatenate(ranks)
