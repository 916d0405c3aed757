"""`posterior`: the posterior of a population's parameters, given a release."""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Release
from dpjax.population._bank import simulation_bank
from dpjax.population._latents import Latents
from dpjax.population._laws import OneOrSeveral
from dpjax.population._posterior import Draws, Posterior
from dpjax.population._tempered import (
    ISLANDS,
    effective_size,
    runs_that_count,
    tempered,
    weights_of,
)
from dpjax.population._world import Model, NumberOfRecords, World
from dpjax.random._keys import sampling_key

_LEAST_TEMPERED = 16 * ISLANDS


def posterior(
    key: Key,
    release: Release | Value | Sequence[Release],
    private: OneOrSeveral,
    *,
    prior: Callable[[Key], PyTree],
    model: Model,
    n: NumberOfRecords,
    capacity: int | None = None,
    draws: int = 100_000,
    method: Literal["weighted", "tempered"] = "weighted",
) -> Posterior:
    """The posterior of a population's parameters, given a release about a sample of it.

    `Release.interval` is about the exact value on the clamped records of the database. The
    posterior is about the population that the records come from: it accounts for noise, clamping
    and sampling error together.

    Args:
        key: a typed key, threefry2x32 or of `dpjax.random`, used for nothing else.
        release: a `Release`, or its value; or a list of several releases about one database.
        private: the private function that made the release: `dpjax.privatize(target, mechanism)`;
            or a function of a key and a database that asks one private statistic of `dpjax.queries`
            or of a `dpjax.PrivateTable`; or a list of such functions. It runs on simulated
            databases in JAX, so its Python code must not depend on their numbers.
        prior: `prior(key)` draws the parameters of a population, a pytree of real arrays, from
            the public belief before the release.
        model: `model(key, theta, n)` draws n records of a population.
        n: the number of records. If it is private, a function that computes it from theta.
        capacity: the public number of slots, if the release took `PaddedRecords`.
        draws: the number of simulated populations. For "tempered", a few thousand are enough.
        method: "weighted" simulates from the prior and weights the draws. "tempered" moves the
            populations toward the release, in steps. Use it for more than about five released
            numbers, where hardly any population of the prior is near the release. It takes longer,
            and its result is valid for one release only. It stores its draws with all of their
            records, a sixteenth at a time.

    Returns:
        A `Posterior`. If you will condition on further releases of the same private function, make
        a `dpjax.simulation_bank` first: it answers in milliseconds.

    Raises:
        TypeError: if the key is not a typed key, `private` does not release the numbers that one
            mechanism draws, prior or model is not a function, or theta or the release does not hold
            real arrays.
        ValueError: if a size is out of range, the release or the databases of the model are not
            like those of the private function, the release shows another scale, bound or public
            number of records, one release is given twice, no simulated database comes near the
            release, the effective size is below 100, or prior or model use their keys in a way that
            tempering does not support.

    Formal guarantees:
        Post-processing: prior, model, target and mechanism are public, and only the release comes
        from the private database. So the guarantee of the release does not change, however its
        sensitivity was found. The weight of draw j is proportional to the density of the release
        given f(D_j), where f(D_j) is computed, clamped and rounded as in a release. NaN and
        failures of host programs become the same public values. So the weighted draws converge to
        the exact posterior, for every f. The density is that of the ideal noise at the drawn scale:
        the tables of the noise and the grid of the release change probabilities by less than 1e-3.
        An average or a regression is computed from noisy sums. The release keeps these sums, and
        the posterior uses their density. The release is refused if it is far from all simulated
        databases: even from the nearest one, its noise would be drawn less than once in a million
        times.

        Tempered draws converge to the same posterior. All random numbers that `jax.random` draws
        for a population become functions of normal numbers. The Markov moves of these numbers leave
        their law, times a power of the density, unchanged, even if the density has no derivative.
        Sixteen independent runs are compared to estimate the error, and this gives the effective
        size.

    Source:
        Gong (2022), "Exact Inference with Approximate Computation for Differentially Private Data
        via Perturbations"; Kish (1965) for the effective size; Del Moral, Doucet and Jasra (2006),
        "Sequential Monte Carlo samplers"; Murray, Adams and MacKay (2010), "Elliptical slice
        sampling"; Beskos, Pinski, Sanz-Serna and Stuart (2011), "Hybrid Monte Carlo on Hilbert
        spaces".

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> clipped_mean = lambda waits: jnp.mean(jnp.clip(waits, 0, 2))
        >>> private = dpjax.privatize(clipped_mean, dpjax.laplace(2 / 200, epsilon=0.5))
        >>> waits = jax.random.exponential(jax.random.key(1), (200,)) * 1.5
        >>> release = private(dpjax.random.seeded_key(0), waits)
        >>> found = dpjax.posterior(
        ...     dpjax.random.seeded_key(2),
        ...     release,
        ...     private,
        ...     prior=lambda key: jax.random.uniform(key, minval=0.3, maxval=3.0),
        ...     model=lambda key, mean, n: mean * jax.random.exponential(key, (n,)),
        ...     n=200,
        ...     draws=10_000,
        ... )
        >>> low, high = found.interval()
        >>> bool(low < 1.5 < high)
        True
    """
    _checks.choice("method", method, ("weighted", "tempered"))
    if method == "tempered":
        key = sampling_key(key)
        _checks.host_only("posterior", key, "the draws of your own model")
        world = World.of(key, private, prior, model, n, capacity)
        return _tempered(key, world, world.read(release), draws)
    bank = simulation_bank(
        key, private, prior=prior, model=model, n=n, capacity=capacity, draws=draws
    )
    return bank.posterior(release)


def _tempered(key: Key, world: World, released: tuple[Value, ...], draws: int) -> Posterior:
    """Computes the posterior by tempering. Runs have equal sizes, so `draws` is rounded up."""
    draws = _checks.integer("draws", draws, least=_LEAST_TEMPERED)
    key_latents, key_runs = jax.random.split(key)
    found = tempered(
        key_runs,
        Latents.of(world.simulated, key_latents),
        lambda values: world.log_prob(released, values),
        -(-draws // ISLANDS),
    )
    theta = Draws(jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), found.theta))
    weights = weights_of(found)
    size = effective_size(theta.columns, weights)
    _check_runs(runs_that_count(weights), len(weights))
    posterior = Posterior.of(theta, weights, size, is_tempered=True)
    world.check_explained(float(np.max(found.log_density)))
    return posterior


def _check_runs(agreeing: float, draws: int) -> None:
    """Raises an error if runs disagree on the probability of the release.

    If runs disagree, the draws of some runs, or of all runs, did not reach the posterior. The
    effective size compares only average parameters of the runs, so it may not show this error. If
    no draw is compatible with the release, another check raises the error.
    """
    if 0 < agreeing < ISLANDS / 2:
        raise ValueError(
            f"draws must be more than {draws:,}: {ISLANDS} independent runs disagree on how likely"
            f" the release is. Each run has a weight, and only about {agreeing:.1f} runs have a"
            " large one. Ask for several times as many draws, or give fewer released numbers at"
            " once"
        )
