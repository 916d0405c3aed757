"""Markov moves of normal numbers that leave their law, times a power of a density, unchanged."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr

Density: TypeAlias = Callable[[jax.Array], jax.Array]
"""Takes a row of normal numbers to the log density of the release, which is finite."""

WithSlope: TypeAlias = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""The same with a row of derivatives."""

_KICKS = 16  # The number of steps of a path along the derivative.
_MOST_TRIES = 12  # The most points that are tried on an ellipse.
RANDOM = 2 + _MOST_TRIES  # The number of further normal numbers that a move needs.


def with_slope(density: Density, size: int) -> WithSlope:
    """The density and its derivative; zeros if JAX cannot differentiate it (loops, host code)."""
    both = jax.value_and_grad(density)
    try:
        jax.eval_shape(both, jax.ShapeDtypeStruct((size,), jnp.result_type(float)))
    except (NotImplementedError, TypeError, ValueError):  # JAX raises these if it cannot.
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
    """A step of Hamiltonian Monte Carlo; an exact rotation where the density is constant.

    The path is reversible and preserves volumes, even with a wrong derivative. So the law stays
    unchanged even if the density has jumps or no derivative. In that case, fewer paths are
    accepted.

    Args:
        both: the log density at power 1, and its derivative.
        power: the power of the density.
        step: the angle between two kicks, up to a random factor from 0.5 to 1.5.
        normal: standard normal numbers: one for each number of the particle, and `RANDOM` more.
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
    density: Density, power: jax.Array, normal: jax.Array, particle: jax.Array, log: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A step of elliptical slice sampling, which needs no derivative.

    If `_MOST_TRIES` points fail, the particle stays, which leaves the law unchanged. Without this
    limit, a density with jumps could make a chain in float32 try points forever.

    Args:
        density: the log density at power 1.
        power: the power of the density.
        normal: standard normal numbers: one for each number of the particle, and `RANDOM` more.
        particle: a vector of normal numbers.
        log: the log density of the particle.

    Returns:
        The particle after the move, and its log density.
    """
    other, uniform = normal[: len(particle)], ndtr(normal[len(particle) :])
    level = power * log + jnp.log(uniform[0])

    def point_at(angle: jax.Array) -> jax.Array:
        return particle * jnp.cos(angle) + other * jnp.sin(angle)

    def is_left(found: Any) -> jax.Array:
        tries, _, _, _, log = found
        return (tries == 0) | ((power * log < level) & (tries < _MOST_TRIES))

    def shrunk(found: Any) -> Any:
        tries, angle, low, high, _ = found
        # The first bracket is the whole ellipse. Then each rejected point becomes an end of it.
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
