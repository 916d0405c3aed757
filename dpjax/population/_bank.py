"""`posterior` of a population's parameters, given a release, and `simulation_bank`.

A bank simulates populations and databases once, to be weighted for any release.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Release
from dpjax._running._devices import compilation, devices_of, outside_any_mesh
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._programs import Program, check_concrete
from dpjax.population._laws import OneOrSeveral
from dpjax.population._posterior import Draws, Posterior
from dpjax.population._tempered import tempered_posterior
from dpjax.population._world import Model, NumberOfRecords, World
from dpjax.random._keys import sampling_key
from dpjax.sweeps._axes import fingerprint_of_cell, outputs_of, words_of_cells
from dpjax.sweeps._parts import Cut, Part
from dpjax.sweeps._store import Store
from dpjax.sweeps._sweep import Work

_LEAST_DRAWS = 200
_MOST_DRAWS = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SimulationBank:
    """Simulated populations, and the exact values of private functions on their databases.

    Made by `dpjax.simulation_bank`. It is public: it contains nothing from private data.

    Attributes:
        theta: the parameters, arrays with a leading axis of draws.
        values: for each private function, its exact values on the databases, with the same leading
            axis.

    Formal guarantees:
        It reads no private database and costs no budget.
    """

    theta: PyTree
    values: tuple[Value, ...]
    _world: World

    @property
    def draws(self) -> int:
        """The number of simulated populations."""
        return jax.tree.leaves(self.theta)[0].shape[0]

    @functools.cached_property
    def _theta_on_host(self) -> Draws:
        return Draws(jax.tree.map(np.asarray, self.theta))

    @functools.cached_property
    def _weigh(self) -> Any:
        return jax.jit(functools.partial(_weighed, self._world))

    def posterior(self, release: Release | Value | Sequence[Release]) -> Posterior:
        """The posterior given a release, computed only from the draws in this bank.

        Args:
            release: a `Release`, or its value; a list if the bank is for several functions.

        Returns:
            A `Posterior`.

        Raises:
            TypeError: if a release does not contain numbers.
            ValueError: if the private function cannot make such a release, or the effective size
                of the weighted draws is below 100.
        """
        released = self._world.read(release)
        weights, size, largest = self._weigh(released, self.values)
        found = Posterior.of(self._theta_on_host, np.asarray(weights, np.float64), float(size))
        self._world.check_explained(float(largest))
        return found

    def draw_release(self, key: Key, theta: PyTree) -> Value:
        """The values of releases about one simulated database, for `auditing.calibration`.

        Args:
            key: a typed key of `dpjax.random`.
            theta: the parameters of the population.

        Returns:
            The value of a release, or a tuple of values if the bank is for several functions. No
            ledger pays for these simulated releases. Works inside `jit`.
        """
        return self._world.draw_release(key, theta)

    def sample(self, key: Key, released: Value, draws: int) -> PyTree:
        """Draws simulated populations independently, with probabilities given by weights.

        A population has a large weight if its database makes the release likely. This method is for
        `auditing.calibration`.

        Args:
            key: a typed key.
            released: the value of a release, or a tuple of values.
            draws: the number of draws.

        Returns:
            The parameters of the drawn populations, with a leading axis of draws. Works inside
            `jit`.
        """
        several = (released,) if self._world.is_single else tuple(released)
        weights, _, _ = _weighed(self._world, several, self.values)
        below = jnp.cumsum(weights)
        levels = jax.random.uniform(key, (draws,), below.dtype) * below[-1]
        places = jnp.minimum(jnp.searchsorted(below, levels), len(below) - 1)
        return jax.tree.map(lambda leaf: leaf[places], self.theta)

    def __repr__(self) -> str:
        names = ", ".join(law.name for law in self._world.laws)
        return f"SimulationBank({self.draws:,} simulated databases; {names})"


def _weighed(
    world: World, released: tuple[Value, ...], values: tuple[Value, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the weights of all draws, their effective size, and the largest log density.

    The sum of the weights is 1. The effective size is that of Kish (1965).
    """
    logs = jax.vmap(functools.partial(world.log_prob, released))(values)
    peak = jnp.max(logs)
    weights = jnp.where(jnp.isfinite(peak), jnp.exp(logs - peak), 0)
    total = jnp.sum(weights)
    weights = weights / jnp.where(total > 0, total, 1)
    squares = jnp.sum(weights**2)
    size = jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1), 0)
    return weights, size, peak


class _Whole(Part):
    """A `Part` for a simulation that is one program and shares no draws with other programs."""

    @property
    def cut(self) -> Cut:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Cut((), self.program)


@outside_any_mesh
def simulation_bank(
    key: Key,
    private: OneOrSeveral,
    *,
    prior: Callable[[Key], PyTree],
    model: Model,
    n: NumberOfRecords,
    capacity: int | None = None,
    draws: int = 100_000,
    path: str | os.PathLike[str] | None = None,
    progress: bool = False,
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
) -> SimulationBank:
    """Simulates populations and their databases once, for posteriors given any release.

    Draws theta_j from the prior and a database D_j from the model, and evaluates the target on D_j.
    `bank.posterior(release)` then weights theta_j by the density of the release given f(D_j).

    Args:
        key: a typed key, threefry2x32 or of `dpjax.random`, used for nothing else.
        private: the private function whose releases you will condition on, as for
            `dpjax.posterior`; or a list of several, all about one database.
        prior: `prior(key)` draws the parameters of a population, a pytree of real arrays.
        model: `model(key, theta, n)` draws n records of a population.
        n: the number of records. If it is private, a function that computes it from theta.
        capacity: the public number of slots, if the release took `PaddedRecords`.
        draws: the number of simulated populations.
        path: a folder that stores finished chunks, as in `dpjax.sweep`.
        progress: whether a progress bar is drawn.
        chunk_size: the number of databases that a device computes at a time.
        mesh: devices of this process; by default the default device.

    Returns:
        A `SimulationBank`.

    Raises:
        TypeError: if the key is not a typed key, `private` does not release the numbers that one
            mechanism draws, prior or model is not a function, or theta does not hold real arrays.
        ValueError: if a size is out of range, n is a function and no capacity is given, or the
            private function does not accept databases like the model's.

    Formal guarantees:
        None are needed: prior, model, target and mechanism are public, and no private database is
        read. Results have the same bits with the same chunk size, device and version.

    Source:
        Gong (2022), "Exact Inference with Approximate Computation for Differentially Private Data
        via Perturbations", for weights by the density of the noise.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> private_mean = dpjax.privatize(jnp.mean, dpjax.laplace(1 / 100, epsilon=1.0))
        >>> bank = dpjax.simulation_bank(
        ...     dpjax.random.seeded_key(0),
        ...     private_mean,
        ...     prior=jax.random.uniform,
        ...     model=lambda key, share, n: jax.random.bernoulli(key, share, (n,)).astype(float),
        ...     n=100,
        ...     draws=10_000,
        ... )
        >>> low, high = bank.posterior(jnp.array(0.3)).interval()
        >>> bool(low < 0.3 < high)
        True
    """
    key = sampling_key(key)
    _checks.host_only("simulation_bank", key, "the draws of your own model")
    world = World.of(key, private, prior, model, n, capacity)
    draws = _checks.integer("draws", draws, least=_LEAST_DRAWS, most=_MOST_DRAWS)

    def simulated(key: Key, values: PyTree) -> dict[str, PyTree]:
        del values  # A sweep passes traced parameters, but a bank has none.
        return world.simulated(key)

    if chunk_size is not None:
        chunk_size = _checks.integer("chunk_size", chunk_size, least=1)
    program = Program.trace("model", simulated, jax.ShapeDtypeStruct((), key.dtype), {})
    check_concrete("model", "call simulation_bank", program)
    cell = fingerprint_of_cell(())
    words = words_of_cells([cell], np.arange(draws))
    part = _Whole("simulations", cell.hex(), program, outputs_of(program.outputs), words)
    devices = devices_of(mesh, calls_host=program.calls_host)
    shared = {"key": digest(key), "traced": "{}", **compilation(devices)}
    with contextlib.nullcontext() if path is None else Store(path).in_use() as store:
        work = Work(key, [part], (), draws, devices, store)
        work.begin(shared, chunk_size)
        work.finish(progress=progress)
    arrays = [jnp.asarray(array[0]) for array in work.values]
    found = jax.tree.unflatten(program.outputs.structure, arrays)
    return SimulationBank(found["theta"], found["values"], world)


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
        return tempered_posterior(key, world, world.read(release), draws)
    bank = simulation_bank(
        key, private, prior=prior, model=model, n=n, capacity=capacity, draws=draws
    )
    return bank.posterior(release)
