"""Posteriors by tempered sequential Monte Carlo, for releases that few simulated databases fit.

Particles are simulated populations. The density of the release is raised to a power t, which rises
in steps from t = 0 (the prior) to t = 1 (the posterior). After each step, particles with large
weights are copied, and particles with small weights are dropped. Then all particles move by Markov
chains that leave the law at t unchanged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax.population._latents import Latents
from dpjax.population._posterior import Draws, Posterior
from dpjax.population._world import World

Density: TypeAlias = Callable[[jax.Array], jax.Array]
"""Takes a row of normal numbers to the log density of the release, which is finite."""

WithSlope: TypeAlias = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Computes the log density and its derivative, for a row of normal numbers."""

_KICKS = 16  # The number of steps of a path that follows the derivative.
_MOST_TRIES = 12  # The largest number of points that are tried on an ellipse.
# One move of a particle with d coordinates draws d + RANDOM normal numbers.
RANDOM = 2 + _MOST_TRIES


def with_slope(density: Density, size: int) -> WithSlope:
    """Returns the density and its derivative. Loops and host code get a derivative of zeros."""
    both = jax.value_and_grad(density)
    try:
        jax.eval_shape(both, jax.ShapeDtypeStruct((size,), jnp.result_type(float)))
    # JAX raises these errors if it cannot differentiate.
    except (NotImplementedError, TypeError, ValueError):
        return lambda normal: (density(normal), jnp.zeros_like(normal))
    return both


def along_a_path(
    both: WithSlope,
    power: jax.Array,
    step: jax.Array,
    normal: jax.Array,
    particle: jax.Array,
    log: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Makes a step of Hamiltonian Monte Carlo.

    Where the density is constant, the path of the step is a rotation. The path is reversible and
    preserves volumes, even with a wrong derivative. So the law stays unchanged even if the density
    has jumps or no derivative. In that case, fewer paths are accepted.

    Args:
        both: the log density at power 1, and its derivative.
        power: the power of the density.
        step: between two kicks, the path turns by this angle. A kick changes the velocity. The
            angle is multiplied by a random factor from 0.5 to 1.5.
        normal: d + `RANDOM` standard normal numbers, where d is the length of the particle.
        particle: a vector of normal numbers.
        log: the log density of the particle.

    Returns:
        The particle after the move, its log density, and the path's probability of acceptance.
    """
    velocity, uniform = normal[: len(particle)], ndtr(normal[len(particle) :])
    step = step * (uniform[0] + 0.5)
    cos, sin = jnp.cos(step), jnp.sin(step)

    def kicked(velocity: jax.Array, slope: jax.Array) -> jax.Array:
        return velocity + step * power / 2 * jnp.nan_to_num(slope)

    def forward(_: jax.Array, found: Any) -> Any:
        point, velocity, _, slope = found
        velocity = kicked(velocity, slope)
        point, velocity = point * cos + velocity * sin, velocity * cos - point * sin
        log, slope = both(point)
        return point, kicked(velocity, slope), log, slope

    def energy(point: jax.Array, velocity: jax.Array, log: jax.Array) -> jax.Array:
        return (jnp.sum(point**2) + jnp.sum(velocity**2)) / 2 - power * log

    start = particle, velocity, *both(particle)
    point, last, found, _ = lax.fori_loop(0, _KICKS, forward, start)
    change = energy(particle, velocity, log) - energy(point, last, found)
    accepted = jnp.log(uniform[1]) < change
    share = jnp.exp(jnp.minimum(jnp.where(jnp.isnan(change), -jnp.inf, change), 0))
    return jnp.where(accepted, point, particle), jnp.where(accepted, found, log), share


def on_an_ellipse(
    density: Density,
    power: jax.Array,
    moves: jax.Array,
    normal: jax.Array,
    particle: jax.Array,
    log: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Makes a step of elliptical slice sampling, which needs no derivative.

    If `_MOST_TRIES` points are rejected, the particle does not move, which leaves the law
    unchanged. Without this limit, a density with jumps could make a chain in float32 try points
    forever.

    Args:
        density: the log density at power 1.
        power: the power of the density.
        moves: for each number of the particle, whether it moves. Given the others, the numbers that
            move are independent and normal, so any fixed choice leaves the law unchanged.
        normal: d + `RANDOM` standard normal numbers, where d is the length of the particle.
        particle: a vector of normal numbers.
        log: the log density of the particle.

    Returns:
        The particle after the move, and its log density.
    """
    other, uniform = normal[: len(particle)], ndtr(normal[len(particle) :])
    level = power * log + jnp.log(uniform[0])

    def point_at(angle: jax.Array) -> jax.Array:
        return jnp.where(moves, particle * jnp.cos(angle) + other * jnp.sin(angle), particle)

    def is_left(found: Any) -> jax.Array:
        tries, _, _, _, log = found
        return (tries == 0) | ((power * log < level) & (tries < _MOST_TRIES))

    def shrunk(found: Any) -> Any:
        tries, angle, low, high, _ = found
        # The first bracket of angles is the whole ellipse. After that, each rejected angle becomes
        # an end of the bracket.
        after = tries > 0
        low = jnp.where(after & (angle < 0), angle, low)
        high = jnp.where(after & (angle >= 0), angle, high)
        share = uniform[2 + tries]
        angle = jnp.where(after, low + (high - low) * share, angle)
        return tries + 1, angle, low, high, density(point_at(angle))

    angle = 2 * np.pi * uniform[1]
    first = jnp.zeros((), jnp.int32), angle, angle - 2 * np.pi, angle, log
    _, angle, _, _, found = lax.while_loop(is_left, shrunk, first)
    accepted = power * found >= level
    return jnp.where(accepted, point_at(angle), particle), jnp.where(accepted, found, log)


ISLANDS = 16  # The number of independent runs, whose differences show the error.
_SHARE = 0.5  # The effective fraction of particles after each rise of t.
_LEAST_TEMPERED = 16 * ISLANDS
_HALVINGS = 30  # The steps of the bisection that finds the next t.
_MOVES, _LAST_MOVES = 4, 12  # The number of moves at each t, and at t = 1.
_ACCEPTED = 0.7  # Step sizes adapt until this fraction of paths is accepted.
_LEAST = -1e30  # The log density for databases that cannot give the release.


class Islands(NamedTuple):
    """Draws of parameters from independent runs, called islands.

    Attributes:
        theta: parameters, arrays with leading axes (ISLANDS, particles).
        log_density: the log density of the release, for each draw.
        log_evidence: the log of the estimated probability of the release, for each run.
    """

    theta: PyTree
    log_density: jax.Array
    log_evidence: jax.Array


class _State(NamedTuple):
    """A run at one power t of the density.

    Attributes:
        key: the key of the next steps.
        power: t.
        particles: rows of normal numbers; each row makes a population.
        log_density: the log density of the release, for each particle.
        log_evidence: the log of the estimated mean of density^t under the prior.
        step: the step size of paths.
    """

    key: Key
    power: jax.Array
    particles: jax.Array
    log_density: jax.Array
    log_evidence: jax.Array
    step: jax.Array


def tempered(
    key: Key, latents: Latents, log_density: Callable[[PyTree], jax.Array], particles: int
) -> Islands:
    """Runs all islands, which are independent of each other.

    Args:
        key: a threefry key.
        latents: simulates a population and its exact values, {"theta": ..., "values": ...}.
        log_density: maps the exact values to the log density of the release.
        particles: the number of particles of each island.
    """

    def density(normal: jax.Array) -> jax.Array:
        found = log_density(latents.evaluate(normal)["values"])
        return jnp.where(found > _LEAST, found, _LEAST)  # This also replaces NaN.

    def island(key: Key) -> Islands:
        key_start, key_run = jax.random.split(key)
        normal = jax.random.normal(key_start, (particles, latents.size))
        log = jax.vmap(density)(normal)
        zero = jnp.zeros((), log.dtype)
        state = lax.while_loop(
            lambda state: state.power < 1,
            functools.partial(_risen, density, latents.places),
            _State(key_run, zero, normal, log, zero, jnp.asarray(0.5, log.dtype)),
        )
        theta = jax.vmap(lambda row: latents.evaluate(row)["theta"])(state.particles)
        return Islands(theta, state.log_density, state.log_evidence)

    return jax.jit(lambda keys: lax.map(island, keys))(jax.random.split(key, ISLANDS))


def _risen(density: Density, places: jax.Array, state: _State) -> _State:
    """Makes one step: raises the power, resamples the particles, and moves them.

    For each number of a particle, `places` contains the index of the draw that is computed from
    this number (`Latents.places`).
    """
    key, key_choose, key_move = jax.random.split(state.key, 3)
    power = state.power + _rise(state.log_density, state.power)
    power = jnp.where(power > 1 - 1e-6, 1.0, power)
    logs = (power - state.power) * state.log_density
    peak = jnp.max(logs)
    weights = jnp.exp(logs - peak)
    evidence = state.log_evidence + peak + jnp.log(jnp.mean(weights))
    chosen = _resampled(key_choose, weights)
    count, size = state.particles.shape

    def moved(i: jax.Array, found: Any) -> Any:
        particles, log, step = found
        # One call of the generator draws the numbers for all moves, because each call would be
        # compiled separately.
        shape = 3, count, size + RANDOM
        normal = jax.random.normal(jax.random.fold_in(key_move, i), shape, particles.dtype)
        path = functools.partial(along_a_path, with_slope(density, size), power, step)
        particles, log, accepted = jax.vmap(path)(normal[0], particles, log)
        # There are two moves on an ellipse. The first changes all numbers. But if all records move
        # at the same time, parameters that many records depend on hardly move. So the second move
        # changes only the numbers of one draw of the program: draw i, modulo the number of draws.
        for j, moves in enumerate((places >= 0, places == i % (places[-1] + 1))):
            ellipse = functools.partial(on_an_ellipse, density, power, moves)
            particles, log = jax.vmap(ellipse)(normal[1 + j], particles, log)
        step = step * jnp.exp(jnp.mean(accepted) - _ACCEPTED)
        return particles, log, jnp.clip(step, 1e-4, 1.0)

    start = state.particles[chosen], state.log_density[chosen], state.step
    moves = jnp.where(power < 1, _MOVES, _LAST_MOVES)
    particles, log, step = lax.fori_loop(0, moves, moved, start)
    return _State(key, power, particles, log, evidence, step)


def _rise(log: jax.Array, power: jax.Array) -> jax.Array:
    """Returns the largest increase of `power` that leaves enough effective particles.

    `log` contains the log densities of the particles. The density is raised to `power`. The
    effective size of the weights must be at least `_SHARE` of the number of particles.
    """

    def fits(rise: jax.Array) -> jax.Array:
        weights = jnp.exp(rise * (log - jnp.max(log)))
        return jnp.sum(weights) ** 2 >= _SHARE * len(log) * jnp.sum(weights**2)

    def halved(i: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        # The bisection tries `high` first. This increase raises the power to 1.
        middle = jnp.where(i == 0, high, (low + high) / 2)
        fit = fits(middle)
        return jnp.where(fit, middle, low), jnp.where(fit, high, middle)

    low, high = lax.fori_loop(0, _HALVINGS, halved, (jnp.zeros_like(power), 1 - power))
    return jnp.where(low > 0, low, high)


def _resampled(key: Key, weights: jax.Array) -> jax.Array:
    """Returns indices of particles, about in proportion to weights (systematic resampling)."""
    count = len(weights)
    below = jnp.cumsum(weights)
    first = jax.random.uniform(key, dtype=weights.dtype)
    levels = (jnp.arange(count, dtype=weights.dtype) + first) / count * below[-1]
    return jnp.minimum(jnp.searchsorted(below, levels), count - 1)


def weights_of(islands: Islands) -> np.ndarray:
    """Returns the weights of all draws, island by island. Their sum is 1, or 0 if no draw fits."""
    fits = np.asarray(islands.log_density) > _LEAST / 2
    logs = np.asarray(islands.log_evidence, np.float64)
    shares = np.exp(logs - logs.max())
    weights = np.where(fits, shares[:, None], 0.0).ravel()
    return weights / max(weights.sum(), np.finfo(float).tiny)


def runs_that_count(weights: np.ndarray) -> float:
    """Returns Kish's effective number of islands (independent runs); 0 if no draw has weight."""
    shares = weights.reshape(ISLANDS, -1).sum(axis=1)
    return float(shares.sum() ** 2 / max((shares**2).sum(), np.finfo(float).tiny))


def effective_size(columns: Sequence[np.ndarray], weights: np.ndarray) -> float:
    """Returns how many independent draws would give averages with the same error.

    Islands are independent runs, so the jackknife, which leaves out one island at a time, measures
    the error. Comparing each island's average with the average of all draws would hide the error:
    an island with nearly all of the weight determines the average of all draws. For each column,
    two averages are used: of its numbers, and of their distances from the mean. The worst average
    determines the size, so the size tends to be too small.
    """
    if not weights.sum() > 0:
        return 0.0
    found = [float(len(weights))]
    shares = weights.reshape(ISLANDS, -1).sum(axis=1)
    for column in columns:
        numbers = np.asarray(column, np.float64)
        for each in (numbers, np.abs(numbers - numbers @ weights)):
            away = each - each @ weights
            moved = (weights * away).reshape(ISLANDS, -1).sum(axis=1)
            without = moved / np.maximum(1 - shares, np.finfo(float).eps)
            error = (without**2).sum() * (ISLANDS - 1) / ISLANDS
            if error > 0:
                found.append(float(away**2 @ weights / error))
    return min(found)


def tempered_posterior(
    key: Key, world: World, released: tuple[Value, ...], draws: int
) -> Posterior:
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
