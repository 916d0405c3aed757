"""Job 1: the sensitivity of a mean, n = 1000 normals, m = 10^4, against vectorized NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from harness import race, record

N, M, GAMMA = 1000, 10_000, 0.05
R_SECONDS = 0.638  # R diffpriv 0.4.2.9000 on 2 cores of an AMD EPYC: its least CPU time.
CHUNK = 256  # The fastest of 64 to 2,048 for NumPy: 1 MiB of records.


def oracle(key: jax.Array, n: int) -> jax.Array:
    """Standard normal records."""
    return jax.random.normal(key, (n,))


def numpy_estimate(rng: np.random.Generator, k: int) -> float:
    """The same job in NumPy at its best: float32, SFC64, cache-sized chunks, no copy of D."""
    distances = np.empty(M, np.float32)
    for start in range(0, M, CHUNK):
        records = rng.standard_normal((min(CHUNK, M - start), N + 1), dtype=np.float32)
        value = records[:, :N].mean(axis=1)
        records[:, N - 1] = records[:, N]
        distances[start : start + CHUNK] = np.abs(value - records[:, :N].mean(axis=1))
    return float(np.partition(distances, k - 1)[k - 1])


def run(rounds: int = 9) -> list[str]:
    """Times both, checks that they agree, and returns rows for the table."""
    point = dpjax.operating_point(m=M, gamma=GAMMA)
    rng = np.random.Generator(np.random.SFC64(0))
    estimates = {"dpjax": [], "numpy": []}

    def in_dpjax() -> None:
        key = dpjax.random.secure_key()
        sampled = dpjax.sample_sensitivity(key, jnp.mean, oracle, n=N, norm="l1", m=M, gamma=GAMMA)
        estimates["dpjax"].append(float(sampled.value))

    def in_numpy() -> None:
        estimates["numpy"].append(numpy_estimate(rng, point.k))

    seconds = race({"dpjax": in_dpjax, "numpy": in_numpy}, rounds=rounds)
    means = {name: float(np.mean(values)) for name, values in estimates.items()}
    # One estimate varies by 1%: the means of `rounds` must agree within 5 standard errors.
    assert abs(means["dpjax"] / means["numpy"] - 1) < 5 * 0.01 * (2 / rounds) ** 0.5, means
    record("mean", {"n": N, "m": M}, seconds | {"r": R_SECONDS}, means)
    ours = seconds["dpjax"]
    return [
        f"mean, n = 1000, m = 10^4 | vectorized NumPy | {ours * 1e3:.0f} ms |"
        f" {seconds['numpy'] * 1e3:.0f} ms | {seconds['numpy'] / ours:.2f}x",
        f"mean, n = 1000, m = 10^4 | R diffpriv, recorded | {ours * 1e3:.0f} ms |"
        f" {R_SECONDS * 1e3:.0f} ms | {R_SECONDS / ours:.0f}x",
    ]
