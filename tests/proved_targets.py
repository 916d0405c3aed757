"""33 functions with the largest move of one record: on paper, or by a grid and a search ("found").

Each: the function, records, bounds, norm, that move, and what the proof may be at most, divided by
it, at 100 records. The limits above 1.05 are those of networks and loops, where intervals forget
what moves together.
"""

import math
import runpy

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.proving import Ball

N, D = globals().get("SIZE", 100), 3
NUMBERS = jax.ShapeDtypeStruct((N,), jnp.float32)
ROWS = jax.ShapeDtypeStruct((N, D), jnp.float32)
UNIT, BALL, EXACT = (0, 1), Ball(1.0), 1.01
GRID = np.linspace(0, 1, 20, dtype=np.float32)
DIRECTION = np.array([0.3, -0.2, 0.5], np.float32)


def _weights(place, shape):
    key = jax.random.fold_in(jax.random.key(0), place)
    return np.asarray(jax.random.normal(key, shape, jnp.float32) * 0.5)


FIRST, SECOND, THIRD = (_weights(k, s) for k, s in enumerate([(D, 16), (16, 16), (16, 4)]))


def hidden(x):
    return jnp.tanh(jnp.tanh(x @ FIRST) @ SECOND)


def network(x):
    return jax.nn.softmax(hidden(x) @ THIRD)


def gradient(x, weights):
    return (jax.nn.sigmoid(x @ weights)[:, None] * x).mean(0)


def clipped(x):
    return (x / jnp.maximum(1.0, jnp.sqrt(jnp.sum(x * x, 1, keepdims=True)))).mean(0)


def descent(x):
    return jax.lax.fori_loop(0, 5, lambda i, w: w - 0.1 * (gradient(x, w) + w), jnp.zeros(D))


def solved(x):
    return jnp.linalg.solve(x.T @ x / N + jnp.eye(D), x.mean(0))


TARGETS = {
    "mean": (jnp.mean, NUMBERS, UNIT, "l1", 1 / N, EXACT),
    "sum of squares": (lambda x: (x**2).sum(), NUMBERS, UNIT, "l1", 1, EXACT),
    "mean of exp(sin(3x))": (
        lambda x: jnp.exp(jnp.sin(3 * x)).mean(), NUMBERS, UNIT, "l1", (math.e - 1) / N, EXACT,
    ),
    "geometric mean of numbers in [.1, 1]": (
        lambda x: jnp.exp(jnp.log(x).mean()), NUMBERS, (0.1, 1), "l1", 1 - 0.1 ** (1 / N), EXACT,
    ),
    "variance in two passes": (
        lambda x: ((x - x.mean()) ** 2).mean(), NUMBERS, UNIT, "l1", (N - 1) / N**2, EXACT,
    ),
    "variance by moments": (
        lambda x: (x**2).mean() - x.mean() ** 2, NUMBERS, UNIT, "l1", (N - 1) / N**2, EXACT,
    ),
    "jnp.std": (jnp.std, NUMBERS, UNIT, "l1", math.sqrt(N - 1) / N, EXACT),
    "root of variance + .01": (
        lambda x: jnp.sqrt(x.var() + 0.01), NUMBERS, UNIT, "l1",
        math.sqrt((N - 1) / N**2 + 0.01) - 0.1, EXACT,
    ),
    "histogram by one-hot bins": (
        lambda x: jax.nn.one_hot((x * 10).astype(int), 10).sum(0), NUMBERS, UNIT, "l1", 2, EXACT,
    ),
    "share above .5": (lambda x: (x > 0.5).mean(), NUMBERS, UNIT, "l1", 1 / N, EXACT),
    "maximum": (jnp.max, NUMBERS, UNIT, "l1", 1, EXACT),
    "trimmed mean": (
        lambda x: jnp.sort(x)[N // 10 : -N // 10].mean(), NUMBERS, UNIT, "l1", 1.25 / N, EXACT,
    ),
    "sorted records": (jnp.sort, NUMBERS, UNIT, "l1", 1, EXACT),
    "jnp.median": (jnp.median, NUMBERS, UNIT, "l1", 0.5, EXACT),
    "kernel density on 20 points": (
        lambda x: jnp.exp(-((GRID[:, None] - x[None]) ** 2) / 0.02).mean(1), NUMBERS, UNIT,
        "linf", 1 / N, EXACT,
    ),
    "log of a mean of exp": (
        lambda x: jnp.log(jnp.exp(x).mean()), NUMBERS, UNIT, "l1",
        math.log1p((math.e - 1) / N), EXACT,
    ),
    "weighted mean, weights in [.5, 1]": (
        lambda t: (t["w"] * t["x"]).sum() / t["w"].sum(), {"w": NUMBERS, "x": NUMBERS},
        {"w": (0.5, 1), "x": UNIT}, "l1", 1 / (1 + 0.5 * (N - 1)), 1.02,
    ),
    "means of columns": (lambda x: x.mean(0), ROWS, UNIT, "l2", math.sqrt(D) / N, EXACT),
    "means of columns, ball": (lambda x: x.mean(0), ROWS, BALL, "l2", 2 / N, EXACT),
    "second moments, ball": (
        lambda x: x.T @ x / N, ROWS, BALL, "l2", math.sqrt(2) / N, EXACT,
    ),
    "second moments": (lambda x: x.T @ x / N, ROWS, UNIT, "l2", D / N, EXACT),
    "rows times a matrix, ball": (
        lambda x: (x @ FIRST).mean(0), ROWS, BALL, "l2",
        2 / N * float(np.linalg.norm(FIRST.astype(float), 2)), EXACT,
    ),
    "logistic gradient": (
        lambda x: gradient(x, DIRECTION), ROWS, UNIT, "l2", 1.11831 / N, 1.08,  # found
    ),
    "softmax network": (
        lambda x: network(x).mean(0), ROWS, UNIT, "linf", 0.360724 / N, 2.83,  # found
    ),
    "softmax network, clipped to [0, 1]": (
        lambda x: jnp.clip(network(x), 0, 1).mean(0), ROWS, UNIT, "linf",
        0.360724 / N, 2.8,  # found
    ),
    "tanh network": (
        lambda x: hidden(x).mean(0), ROWS, UNIT, "linf", 1.59089 / N, 1.27,  # found
    ),
    "winsorized mean": (
        lambda x: jnp.clip(x, 0.2, 0.8).mean(), NUMBERS, UNIT, "l1", 0.6 / N, EXACT,
    ),
    "distribution function on 20 points": (
        lambda x: (x[None] <= GRID[:, None]).mean(1), NUMBERS, UNIT, "linf", 1 / N, EXACT,
    ),
    "random Fourier features": (
        lambda x: jnp.cos(x @ FIRST * 5).mean(0), ROWS, UNIT, "linf", 2 / N, EXACT,
    ),
    "mean of rows clipped by norm": (clipped, ROWS, (-10, 10), "l2", 2 / N, EXACT),
    "standardized mean": (  # All ones, and one 0 among them.
        lambda x: x.mean() / jnp.sqrt(x.var() + 0.01), NUMBERS, UNIT, "l1",
        10 - (1 - 1 / N) / math.sqrt((N - 1) / N**2 + 0.01), 1.05,
    ),
    "least squares by solve": (solved, ROWS, UNIT, "l2", None, None),
    "five steps of gradient descent": (descent, ROWS, UNIT, "l2", 0.354349 / N, 1.77),  # found
}  # fmt: skip


def of_size(n):
    """The same functions of n records."""
    return runpy.run_path(__file__, {"SIZE": n})["TARGETS"]
