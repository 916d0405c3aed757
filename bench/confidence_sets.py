"""The widths of confidence sets, beside the published method in its plain form.

The setting is the one of Awan and Wang (2023), "Simulation-based, Finite-sample Inference for
Privatized Data": 100 normal records of mean 1 and standard deviation 1, clamped to [0, 3]; their
mean and variance are released with normal noise of 3 / 100 and 9 / 100 standard deviations, which
is 1-GDP each; 200 seeds, 95%. The plain form evaluates Mahalanobis depths on a grid of means and
standard deviations, in NumPy, and takes the range of each parameter over the grid points that
belong to the set. It is within two steps of the grid of the exact range of its own seeds.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax._core._accuracy import UNKNOWN
from dpjax._core._values import Guarantee, Release

N, SEEDS, UPPER, EPSILON, ALPHA = 100, 200, 3.0, 1.0, 0.05
SCALES = np.array([UPPER, UPPER**2]) / (N * EPSILON)
LOW, HIGH = {"mean": -1.0, "sd": 0.05}, {"mean": 3.0, "sd": 3.0}
SIDE = 80


def statistics(records):
    """The mean and the variance of clamped records, the last axis."""
    clamped = np.clip(records, 0, UPPER)
    return np.stack([clamped.mean(axis=-1), clamped.var(axis=-1, ddof=1)], axis=-1)


def plain(rng: np.random.Generator, observed: np.ndarray) -> np.ndarray:
    """The widths of the published set, for the mean and the standard deviation."""
    normal, noise = rng.normal(size=(SEEDS, N)), rng.normal(size=(SEEDS, 2))
    means, sds = (np.linspace(LOW[name], HIGH[name], SIDE) for name in LOW)
    inside = []
    for mean in means:
        for sd in sds:
            points = statistics(mean + sd * normal) + SCALES * noise
            points = np.concatenate([observed[None], points])
            away = points - points.mean(axis=0)
            distances = np.einsum("ij,jk,ik->i", away, np.linalg.inv(np.cov(away.T)), away)
            if np.mean(distances >= distances[0]) > ALPHA:
                inside.append((mean, sd))
    return np.ptp(np.array(inside), axis=0)


def private(key, records):
    """The release of the same statistics with the same noise, as JAX code."""
    clamped = jnp.clip(records, 0, UPPER)
    exact = jnp.stack([jnp.mean(clamped), jnp.var(clamped, ddof=1)])
    noise = jax.random.normal(dpjax.random._keys.sampling_key(key), (2,))
    return Release(exact + SCALES.astype(np.float32) * noise, Guarantee(1.0, 0.0), UNKNOWN)


def model(key, theta, n):
    """Normal records."""
    return theta["mean"] + theta["sd"] * jax.random.normal(key, (n,))


def main(repeats: int = 8) -> None:
    """Prints the average widths of both, and their ratios."""
    rng = np.random.default_rng(0)
    found, seconds = {"dpjax": [], "plain": []}, {"dpjax": 0.0, "plain": 0.0}
    ours = None
    for i in range(repeats):
        observed = statistics(1 + rng.normal(size=N)) + SCALES * rng.normal(size=2)
        key, release = dpjax.random.seeded_key(i), jnp.asarray(observed, jnp.float32)
        start = time.process_time()
        if ours is None:
            ours = dpjax.confidence_set(
                key, release, private, model=model, n=N, bounds=(LOW, HIGH), seeds=SEEDS
            )
        ours = ours.given(key, release)
        low, high = ours.interval()
        found["dpjax"].append([float(high[name] - low[name]) for name in LOW])
        middle = time.process_time()
        found["plain"].append(plain(rng, observed))
        seconds["dpjax"] += middle - start
        seconds["plain"] += time.process_time() - middle
        print(i, found["dpjax"][-1], found["plain"][-1].tolist(), seconds, flush=True)
    widths = {name: np.mean(rows, axis=0) for name, rows in found.items()}
    errors = {name: np.std(rows, axis=0) / np.sqrt(repeats) for name, rows in found.items()}
    ratios = widths["dpjax"] / widths["plain"]
    assert (ratios < 1.3).all()
    told = {
        name: (widths[name].round(3).tolist(), errors[name].round(3).tolist()) for name in found
    }
    print(json.dumps({"widths": told, "ratios": ratios.round(3).tolist(), "cpu_seconds": seconds}))


if __name__ == "__main__":
    main()
