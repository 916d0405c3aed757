"""Many programs of one process, cold: a sweep of 27 static choices, and ten releases of one table.

Whole processes in turns, against the same jobs in plain JAX. Plain JAX draws with threefry keys
and adds noise in floats, which is not private.
"""

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from first_answer import process

SIZES, DEGREES, BANDWIDTHS = (100, 200, 400), (4, 8, 16), (0.05, 0.1, 0.2)
EPSILONS, REPEATS, POINTS = (0.1, 0.3, 1.0, 3.0, 10.0), 20, 51
N, EPSILON, RADIUS = 1000, 1.0, 2.0


def _records(n: int) -> dict[str, np.ndarray]:
    """A sine with noise."""
    generator = np.random.default_rng(0)
    x = generator.uniform(size=n)
    y = np.clip(np.sin(2 * np.pi * x) + generator.normal(size=n) / 10, -1, 1)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def _regression(bandwidth: float) -> Callable[..., Any]:
    """Nadaraya and Watson's, as a user writes it; a record moves it by at most 4 / (1 + .1 n)."""

    def regress(records: dict[str, jax.Array]) -> Callable[[jax.Array], jax.Array]:
        def curve(point: jax.Array) -> jax.Array:
            weights = jnp.exp(-jnp.square((point[0] - records["x"]) / bandwidth) / 2)
            return jnp.sum(weights * records["y"]) / (jnp.sum(weights) + 0.1 * len(weights))

        return curve

    return regress


def _error(curve: jax.Array) -> jax.Array:
    return jnp.mean(jnp.abs(curve - jnp.sin(2 * jnp.pi * jnp.linspace(0, 1, POINTS))))


def sweep_in_dpjax() -> None:
    """Sizes, degrees and bandwidths of a private kernel regression, at five epsilons."""
    import dpjax

    def error(
        key: jax.Array, epsilon: jax.Array, n: int, degree: int, bandwidth: float
    ) -> jax.Array:
        lattice = dpjax.evaluate_on_lattice(_regression(bandwidth), degree=degree, dims=1)(
            _records(n)
        )
        mechanism = dpjax.bernstein(4 / (1 + 0.1 * n), epsilon, degree=degree, dims=1)
        polynomial = mechanism(key, lattice).value
        return _error(polynomial(jnp.linspace(0, 1, POINTS)[:, None]))

    errors = dpjax.sweep(
        dpjax.random.seeded_key(0),
        error,
        traced={"epsilon": EPSILONS},
        static={"n": SIZES, "degree": DEGREES, "bandwidth": BANDWIDTHS},
        repeats=REPEATS,
    ).value.mean("repeat")
    assert (errors[..., -1] < errors[..., 0]).all()


def sweep_in_jax() -> None:
    """The same number of cells in a loop over jitted functions, with noise in floats."""
    key, epsilons = jax.random.key(0), jnp.repeat(jnp.array(EPSILONS), REPEATS)
    for i, (n, degree, bandwidth) in enumerate(itertools.product(SIZES, DEGREES, BANDWIDTHS)):

        def error(
            key: jax.Array,
            epsilon: jax.Array,
            n: int = n,
            degree: int = degree,
            bandwidth: float = bandwidth,
        ) -> jax.Array:
            curve = _regression(bandwidth)(_records(n))
            lattice = jax.vmap(curve)(jnp.linspace(0, 1, degree + 1)[:, None])
            scale = (degree + 1) * 4 / (1 + 0.1 * n) / epsilon
            noisy = lattice + scale * jax.random.laplace(key, lattice.shape)
            places, points = np.arange(degree + 1), jnp.linspace(0, 1, POINTS)[:, None]
            counts = np.array([math.comb(degree, place) for place in places], np.float32)
            return _error((counts * points**places * (1 - points) ** (degree - places)) @ noisy)

        keys = jax.random.split(jax.random.fold_in(key, i), len(epsilons))
        errors = np.asarray(jax.jit(jax.vmap(error))(keys, epsilons))
        errors = errors.reshape(len(EPSILONS), REPEATS).mean(1)
        assert errors[-1] < errors[0]


def _table() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (N, 3)).astype(np.float32)
    y = np.clip(x @ np.float32([0.2, 0.3, 0.4]), -1, 1)
    sex, region = (generator.integers(0, k, N).astype(np.int32) for k in (2, 6))
    return {"x": x, "y": y, "sex": sex, "region": region}


def releases_in_dpjax() -> None:
    """Ten releases of one table."""
    import dpjax
    from dpjax import queries

    table = _table()
    x, y = table["x"], table["y"]
    keys = iter(jax.random.split(dpjax.random.secure_key(), 10))
    interval = {"lower": -1.0, "upper": 1.0, "epsilon": EPSILON}

    def release(query: Any, database: Any) -> jax.Array:
        mechanism = dpjax.laplace(query.sensitivity(), EPSILON)
        return dpjax.privatize(query, mechanism)(next(keys), database).value

    def select(probabilities: Any, count: int) -> jax.Array:
        scores = queries.quantile_scores(probabilities, grid=np.linspace(-1, 1, 201))
        mechanism = queries.select_each(scores.sensitivity(), epsilon=EPSILON, count=count)
        return dpjax.privatize(scores, mechanism)(next(keys), y).value

    tables = {name: table[name] for name in ("sex", "region")}
    regression = {"x": x, "y": y}
    radii = {"x_radius": RADIUS, "y_radius": 1.0}
    _run_steps(
        {
            "mean": lambda: queries.private_mean(next(keys), y, **interval).value,
            "variance": lambda: queries.private_variance(next(keys), y, **interval).value,
            "sum": lambda: release(queries.sum_query(lower=-1.0, upper=1.0, capacity=N), y),
            "count": lambda: release(queries.counting_query(lambda y: y > 0), y),
            "histogram": lambda: release(queries.histogram_query(6), table["region"]),
            "contingency": lambda: release(
                queries.contingency_query({"sex": 2, "region": 6}), tables
            ),
            "median": lambda: select(0.5, 1),
            "quartiles": lambda: select((0.25, 0.5, 0.75), 3),
            "covariance": lambda: (
                queries.private_covariance(next(keys), x, radius=RADIUS, epsilon=EPSILON).value
            ),
            "regression": lambda: (
                queries.private_linear_regression(
                    next(keys), regression, epsilon=EPSILON, **radii
                ).value
            ),
        }
    )


def releases_in_jax() -> None:
    """The same answers with noise in floats."""
    table = _table()
    x, y = table["x"], table["y"]
    keys = iter(jax.random.split(jax.random.key(0), 11))

    def noisy(value: Any, scale: float) -> Any:
        leaves, structure = jax.tree.flatten(value)
        split = jax.random.split(next(keys), len(leaves))
        noise = (
            jax.random.laplace(key, leaf.shape) for key, leaf in zip(split, leaves, strict=True)
        )
        added = [leaf + scale * z for leaf, z in zip(leaves, noise, strict=True)]
        return jax.tree.unflatten(structure, added)

    def select(probabilities: Any) -> jax.Array:
        grid, p = jnp.linspace(-1, 1, 201), jnp.atleast_1d(jnp.asarray(probabilities))[:, None]
        below = jnp.searchsorted(jnp.sort(y), grid)[None]
        scores = -jnp.maximum(below - p * N, (1 - p) * N - (N - below))
        scale = 2 * p.size / EPSILON
        chosen = jax.random.categorical(next(keys), scores / scale, axis=1)
        return grid[chosen]

    def covariance() -> jax.Array:
        mean = noisy(x.mean(0), 1 / N)
        return noisy((x.T @ x) / N, RADIUS**2 / N) - jnp.outer(mean, mean)

    def regression() -> jax.Array:
        with_one = jnp.concatenate([jnp.ones((N, 1)), x], axis=1)
        moments = noisy((with_one.T @ with_one / N, with_one.T @ y / N), 3 / N)
        return jnp.linalg.solve(*moments)

    codes = jnp.asarray(table["sex"] * 6 + table["region"])
    _run_steps(
        {
            "mean": lambda: noisy(jnp.clip(y, -1, 1).mean(), 2 / N),
            "variance": lambda: noisy((jnp.mean(y), jnp.mean(jnp.square(y))), 3 / N),
            "sum": lambda: noisy(jnp.sum(y), 2.0),
            "count": lambda: noisy(jnp.sum(y > 0), 1.0),
            "histogram": lambda: noisy(jnp.bincount(table["region"], length=6), 2.0),
            "contingency": lambda: noisy(jnp.bincount(codes, length=12).reshape(2, 6), 2.0),
            "median": lambda: select(0.5),
            "quartiles": lambda: select((0.25, 0.5, 0.75)),
            "covariance": covariance,
            "regression": regression,
        }
    )


def _run_steps(steps: dict[str, Callable[[], Any]]) -> None:
    """Seconds of CPU of every step go to the error stream."""
    for name, step in steps.items():
        start = time.process_time()
        jax.block_until_ready(step())
        print(f"{name}: {time.process_time() - start:.3g} s", file=sys.stderr)


def _print_compilations(job: Callable[[], None]) -> None:
    compiled = 0

    def note(event: str, *_: Any, **__: Any) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(note)
    job()
    print(compiled)


CHILDREN = {
    "sweep dpjax": sweep_in_dpjax,
    "sweep jax": sweep_in_jax,
    "releases dpjax": releases_in_dpjax,
    "releases jax": releases_in_jax,
}


def run(rounds: int = 3) -> None:
    """All of them in turns: medians of the time of CPUs."""
    from harness import Row, record

    found: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    compilations = {}
    for _ in range(rounds):
        for job in CHILDREN:
            _, cpu, memory[job], output = process(job, program=__file__)
            found.setdefault(job, []).append(cpu)
            compilations[job] = json.loads(output)
    seconds = {job: statistics.median(times) for job, times in found.items()}
    peer = "plain JAX (not private)"
    choices = len(SIZES) * len(DEGREES) * len(BANDWIDTHS)
    rows = [
        Row(
            f"sweep of {choices} static choices, whole process, cold, seconds of CPU",
            f"{peer}, a jitted function each",
            seconds["sweep dpjax"],
            seconds["sweep jax"],
            round(1 / 1.5, 2),
            "rounding to a grid and exact arithmetic compile for each choice",
        ),
        Row(
            "ten releases of one table, whole process, cold, seconds of CPU",
            peer,
            seconds["releases dpjax"],
            seconds["releases jax"],
        ),
    ]
    sizes = {"n": N, "cells": choices * len(EPSILONS) * REPEATS, "rounds": rounds}
    race = SimpleNamespace(seconds=seconds, peak_mib=memory)
    record("cold", rows, race=race, sizes=sizes, results={"compilations": compilations})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _print_compilations(CHILDREN[sys.argv[1]])
    else:
        run()
