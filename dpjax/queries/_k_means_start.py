"""Where k-means starts: public cells, and clusters of their noisy counts and averages.

It draws in float32, so it gives the same with and without x64.
"""

import functools

import jax
import jax.numpy as jnp

# Candidates for each cell; more of them spread the cells more evenly.
_CANDIDATES = 32
_RESTARTS = 64
_STEPS = 10
# A cell whose count is not above so many deviations of the noise may be empty.
_DEVIATIONS = 2


def number_of_cells(clusters: int) -> int:
    """How many cells cover the ball: so many that two clusters rarely share one."""
    return max(32, 4 * clusters)


@functools.partial(jax.jit, static_argnames=("count", "dims"))
def spread_points(key: jax.Array, *, count: int, dims: int) -> jax.Array:
    """Points of the unit ball: each of them, of many random ones, the furthest from those before.

    Gonzalez (1985).
    """
    candidates = _points_of_ball(key, _CANDIDATES * count, dims)

    def add(nearest: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        point = candidates[jnp.argmax(nearest)]
        return jnp.minimum(nearest, _squares(candidates - point[None])), point

    farther_than_any = jnp.full(len(candidates), 5.0, jnp.float32)
    _, points = jax.lax.scan(add, farther_than_any, None, length=count)
    return points.astype(float)


@functools.partial(jax.jit, static_argnames="clusters")
def clusters_of_cells(
    key: jax.Array, cells: jax.Array, counts: jax.Array, noise: jax.Array, *, clusters: int
) -> jax.Array:
    """The best of many k-means of the centers of cells, weighed by their noisy counts.

    They start as k-means++ does, Arthur and Vassilvitskii (2007).
    """
    points = cells.astype(jnp.float32)
    weights = jnp.where(counts > _DEVIATIONS * noise, counts, 0).astype(jnp.float32)

    def step(centers: jax.Array, _: None) -> tuple[jax.Array, None]:
        nearest = jnp.argmin(_apart(points, centers), axis=1)
        shares = jax.nn.one_hot(nearest, clusters, dtype=jnp.float32) * weights[:, None]
        total = jnp.sum(shares, axis=0)[:, None]
        averages = shares.T @ points / jnp.maximum(total, 1)
        return jnp.where(total > 0, averages, centers), None

    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        centers, _ = jax.lax.scan(step, _seeds(key, points, weights, clusters), length=_STEPS)
        return centers, jnp.sum(weights * jnp.min(_apart(points, centers), axis=1))

    found, costs = jax.vmap(run)(jax.random.split(key, _RESTARTS))
    return found[jnp.argmin(costs)].astype(float)


def _seeds(key: jax.Array, points: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """Points drawn by their weight and their squared distance from those before."""

    def draw(nearest: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The small number chooses a point where no weight is left.
        point = points[jax.random.categorical(key, jnp.log(weights * nearest + 1e-30))]
        return jnp.minimum(nearest, _squares(points - point[None])), point

    start = jnp.ones(len(points), jnp.float32)
    return jax.lax.scan(draw, start, jax.random.split(key, count))[1]


def _apart(points: jax.Array, centers: jax.Array) -> jax.Array:
    return _squares(points[:, None] - centers[None])


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x), axis=-1)


def _points_of_ball(key: jax.Array, count: int, dims: int) -> jax.Array:
    """Uniform points of the unit ball."""
    direction_key, length_key = jax.random.split(key)
    directions = jax.random.normal(direction_key, (count, dims), jnp.float32)
    radii = jax.random.uniform(length_key, (count, 1), jnp.float32) ** (1 / dims)
    return radii * directions / jnp.sqrt(_squares(directions))[:, None]
