"""`posterior_widths`: expected widths of posteriors before there is a release, to plan a study."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree
from dpjax._tracing._programs import Program
from dpjax.population._bank import SimulationBank, simulation_bank
from dpjax.population._posterior import LEAST_SIZE, Draws
from dpjax.population._world import Model, World
from dpjax.random._keys import check_key, sampling_key
from dpjax.release._privatize import PrivateFunction

if TYPE_CHECKING:
    from xarray import Dataset

_LEAST_REPEATS = 10
_Cell: TypeAlias = dict[str, np.ndarray]


def posterior_widths(
    key: Key,
    private: Callable[[int, float], PrivateFunction],
    *,
    prior: Callable[[Key], PyTree],
    model: Model,
    n: Sequence[int],
    epsilon: Sequence[float],
    confidence: float = 0.95,
    draws: int = 100_000,
    repeats: int = 50,
) -> "Dataset":
    """The widths of posterior intervals that studies with some n and epsilon can expect.

    `dpjax.rehearse` compares the noise of a release with the sampling spread. This function
    measures how precise conclusions about the population would be, with noise, clamping and
    sampling error together.

    Args:
        key: a typed key of `dpjax.random`, used for nothing else.
        private: `private(n, epsilon)` makes the private function of a study with n people.
        prior: `prior(key)` draws the parameters of a population, a pytree of real arrays.
        model: `model(key, theta, n)` draws n records of a population.
        n: the numbers of people to compare.
        epsilon: the epsilons to compare.
        confidence: the posterior probability of an interval.
        draws: the number of simulated populations for each n.
        repeats: the number of releases for each n and epsilon, each about another population.

    Returns:
        An `xarray.Dataset` (needs the extra "sweep") over `n`, `epsilon` and `repeat`:

        - `width` of the interval, and `contains`, whether it contains the true theta. For a pytree,
          the names of its numbers are appended, as in `Posterior.to_frame`;
        - `effective_size` of each posterior.

        `dpjax.plotting.utility(widths, variable="width", curve="n")` draws it over epsilon.

    Raises:
        ModuleNotFoundError: if xarray is not installed.
        TypeError: if the key is not one of `dpjax.random`, or private, prior or model is not a
            function, or `private` returns anything other than a result of `dpjax.privatize`.
        ValueError: if a size is out of range, or an effective size is below 100.

    Formal guarantees:
        None are needed: nothing private is read. Widths are averages over the prior. They say
        nothing about populations that the prior considers unlikely.

    Source:
        Gong (2022), as `dpjax.posterior`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> found = dpjax.posterior_widths(
        ...     dpjax.random.seeded_key(0),
        ...     lambda n, epsilon: dpjax.privatize(jnp.mean, dpjax.laplace(1 / n, epsilon)),
        ...     prior=jax.random.uniform,
        ...     model=lambda key, share, n: jax.random.bernoulli(key, share, (n,)).astype(float),
        ...     n=[50, 200],
        ...     epsilon=[0.1, 1.0],
        ...     draws=20_000,
        ... )
        >>> mean = found.width.mean("repeat")
        >>> bool(mean.sel(n=200, epsilon=1.0) < mean.sel(n=50, epsilon=0.1))
        True
    """
    check_key(key)
    _checks.host_only("posterior_widths", key, "the draws of your own model")
    xarray = _checks.extra("xarray", "sweep")
    _checks.function("private", private)
    sizes = [_checks.integer("n", size, least=1) for size in n]
    losses = [float(_checks.positive("epsilon", one)) for one in epsilon]
    confidence = _checks.fraction("confidence", confidence)
    repeats = _checks.integer("repeats", repeats, least=_LEAST_REPEATS)
    cells: list[list[_Cell]] = []
    for i, size in enumerate(sizes):
        of_size = jax.random.fold_in(key, i)
        bank = simulation_bank(
            of_size, private(size, losses[0]), prior=prior, model=model, n=size, draws=draws
        )
        banks = [_with_other_noise(bank, of_size, private(size, loss)) for loss in losses]
        keys = jax.random.split(jax.random.fold_in(of_size, 1), len(losses))
        given = zip(banks, keys, strict=True)
        cells.append([_measured(one, k, repeats, confidence) for one, k in given])
        for loss, cell in zip(losses, cells[-1], strict=True):
            _check_size(size, loss, cell, bank.draws)
    axes = {"n": sizes, "epsilon": losses, "repeat": np.arange(repeats)}
    variables: dict[str, Any] = {
        name: (tuple(axes), np.array([[cell[name] for cell in row] for row in cells]))
        for name in cells[0][0]
    }
    return xarray.Dataset(variables, axes)


def _with_other_noise(bank: SimulationBank, key: Key, private: PrivateFunction) -> SimulationBank:
    """Returns the bank for another epsilon.

    Exact values are simulated again only if the target depends on epsilon, as by its bounds.
    """
    world, spec = bank._world, jax.eval_shape(sampling_key, key)
    model, n = world.population.model, world.population.n
    other = World.of(sampling_key(key), private, world.prior, model, n, None)
    here, there = (Program.trace("private", x.simulated, spec) for x in (world, other))
    if here.fingerprint == there.fingerprint:
        return dataclasses.replace(bank, _world=other)
    return simulation_bank(key, private, prior=world.prior, model=model, n=n, draws=bank.draws)


def _check_size(n: int, epsilon: float, cell: _Cell, draws: int) -> None:
    """Refuses a posterior with too few effective draws.

    Such posteriors are narrow. If they were left out, the average width would be too large.
    """
    least = float(cell["effective_size"].min())
    if least < LEAST_SIZE:
        needed = f", such as {draws * 2 * LEAST_SIZE / least:.1g}" if least > 0 else ""
        raise ValueError(
            f"draws={draws:,} is too small: at n={n} and epsilon={epsilon:g}, a posterior has an"
            f" effective size of {least:.1f}, which must be at least {LEAST_SIZE}. Take more"
            f" draws{needed}"
        )


def _measured(bank: SimulationBank, key: Key, repeats: int, confidence: float) -> _Cell:
    """Simulates releases, each about a new population, and measures how wide posteriors are."""
    sizes: list[float] = []
    ends: list[tuple[PyTree, PyTree, PyTree]] = []
    keys = jax.random.split(key, 2 * repeats)
    draw = jax.jit(bank.draw_release)
    levels = ((1 - confidence) / 2, (1 + confidence) / 2)
    for i in range(repeats):
        theta = jax.jit(bank._world.prior)(sampling_key(keys[2 * i]))
        released = draw(keys[2 * i + 1], theta)
        weights, size, _ = bank._weigh(bank._world.read(released), bank.values)
        sizes.append(float(size))
        low, high = bank._theta_on_host.quantiles(np.asarray(weights, np.float64), levels)
        ends.append((low, high, theta))
    lows, highs, truths = jax.tree.map(lambda *x: np.stack(x), *ends)
    names = bank._theta_on_host.names
    columns = (Draws(tree).columns for tree in (lows, highs, truths))
    found = {"effective_size": np.array(sizes)}
    for name, low, high, true in zip(names, *columns, strict=True):
        suffix = "" if len(names) == 1 else f"_{name}"
        found[f"width{suffix}"] = high - low
        found[f"contains{suffix}"] = ((low <= true) & (true <= high)).astype(float)
    return found
