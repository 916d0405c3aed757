"""The sensitivity of a mean of 1000 normals, for 10^4 to 10^7 pairs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import cpu_count

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import targets
from harness import R, Race, Row, record

N, GAMMA = 1000, 0.05
R_SECONDS = 0.638
BLOCK = 256  # The fastest of 64 to 2,048 for NumPy: 1 MiB of records.
DRAWING = "drawing normals is most of the time on both sides"
OVERHEAD = "tracing and checks of Python take longer than the pairs, and so do 100 whole databases"
PART = 10**5  # NumPy takes minutes for 10^7 pairs, and its time grows linearly.


INDEPENDENT = dpjax.oracles.independent(jax.random.normal)
MEAN = targets.summable(lambda x: x, average=True)


def oracle(key: jax.Array, n: int) -> jax.Array:
    """Standard normal records, all in one call: what is fastest where all of them are needed."""
    return jax.random.normal(key, (n,))


def in_dpjax(target: dpjax.Target, oracle: dpjax.Oracle, m: int) -> float:
    """The estimate from m pairs."""
    key = jax.random.key(0)
    sampled = dpjax.sample_sensitivity(key, target, oracle, n=N, norm="l1", m=m, gamma=GAMMA)
    return float(sampled.value)


def numpy_distances(rng: np.random.Generator, m: int) -> np.ndarray:
    """The same in NumPy at its best: float32, SFC64, blocks that fit the cache, no copy of D."""
    distances = np.empty(m, np.float32)
    for start in range(0, m, BLOCK):
        records = rng.standard_normal((min(BLOCK, m - start), N + 1), dtype=np.float32)
        shared = records[:, : N - 1].sum(axis=1)
        values = (shared + records[:, N - 1]) / N, (shared + records[:, N]) / N
        distances[start : start + BLOCK] = np.abs(values[0] - values[1])
    return distances


def in_numpy(m: int, *, threads: int) -> float:
    """The estimate from m pairs, drawn by so many threads."""
    rngs = [np.random.Generator(np.random.SFC64(seed)) for seed in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(partial(numpy_distances, m=m // threads), rngs)
    k = dpjax.operating_point(m=m, gamma=GAMMA).k
    return float(np.partition(np.concatenate(list(parts)), k - 1)[k - 1])


def run() -> None:
    """All sizes; the largest once, for the smaller ones have compiled its chunks."""
    for m, rounds in ((10**4, 7), (10**5, 2), (10**6, 1), (10**7, 1)):
        _compare(m, rounds, warm=m <= 10**6)


def _compare(m: int, rounds: int, *, warm: bool) -> None:
    part = min(m, PART)
    threads = cpu_count() or 1
    estimates = {}

    def noted(name: str, estimate: Callable[[], float]) -> Callable[[], None]:
        return lambda: estimates.update({name: estimate()})

    summable = noted("summable", lambda: in_dpjax(MEAN, INDEPENDENT, m))
    summable()  # Its chunks grow with m, so it is compiled for each.
    race = Race(
        {
            "summable": summable,
            "dense": noted("dense", lambda: in_dpjax(jnp.mean, oracle, m)),
            "numpy": noted("numpy", lambda: in_numpy(part, threads=1)),
            "threads": noted("threads", lambda: in_numpy(part, threads=threads)),
        },
        rounds=rounds,
        warm=warm,
    )
    if m == 10**4:  # The same pairs.
        whole = in_dpjax(jnp.mean, INDEPENDENT, m)
        assert abs(estimates["summable"] / whole - 1) < 1e-3, (estimates, whole)
    # The same distribution, where an estimate from 10^4 pairs varies by 1%.
    assert abs(estimates["summable"] / estimates["dense"] - 1) < 0.07, estimates
    assert abs(estimates["numpy"] / estimates["dense"] - 1) < 0.07, estimates
    seconds = race.seconds
    numpy_seconds, threads_seconds = (seconds[x] * m / part for x in ("numpy", "threads"))
    scaled = "" if part == m else f" (10^{len(str(part)) - 1} pairs, scaled)"
    job = f"mean, n = {N}, m = 10^{len(str(m)) - 1}"
    rows = [
        Row(f"{job}, dense", f"NumPy{scaled}", seconds["dense"], numpy_seconds, 1, DRAWING),
        Row(f"{job}, summable", f"NumPy{scaled}", seconds["summable"], numpy_seconds, 20, OVERHEAD),
    ]
    if m == 10**4:
        rows += [
            Row(f"{job}, dense", f"NumPy, {threads} threads", seconds["dense"], threads_seconds),
            Row(f"{job}, dense", R, seconds["dense"], R_SECONDS),
        ]
    record(
        "mean",
        rows,
        race=race,
        sizes={"n": N, "m": m, "m of NumPy": part},
        results=estimates,
        work={"bytes": 8.0 * m * N, "flops": 2.0 * m * N},
    )


if __name__ == "__main__":
    run()
