"""Job 2: the Bernstein vignette: Priestley-Chao regression, n = 250, degree 25, m = 500."""

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import targets
from harness import race, record

N, DEGREE, M, GAMMA, BANDWIDTH = 250, 25, 500, 0.2, 0.05
R_SECONDS = 3.781  # R diffpriv 0.4.2.9000 on 2 cores of an AMD EPYC: its least CPU time.


def oracle(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """Uniform x, and a noisy sine of it."""
    key_x, key_y = jax.random.split(key)
    x = jax.random.uniform(key_x, (n,))
    return {"x": x, "y": jnp.sin(10 * x) * x + 0.1 * jax.random.normal(key_y, (n,))}


def numpy_distance(records: dict[str, np.ndarray]) -> float:
    """The sup distance over the lattice of one pair, in NumPy."""
    lattice = np.linspace(0, 1, DEGREE + 1)

    def curve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        order = np.argsort(x)
        x, y = x[order], y[order]
        weights = np.diff(x, prepend=x[:1]) * y / BANDWIDTH
        kernel = np.exp(-(((lattice[:, None] - x) / BANDWIDTH) ** 2) / 2) / np.sqrt(2 * np.pi)
        return kernel @ weights

    last = np.r_[: N - 1, N]
    x, y = records["x"], records["y"]
    return float(np.max(np.abs(curve(x[:N], y[:N]) - curve(x[last], y[last]))))


def run(rounds: int = 9) -> list[str]:
    """Times the job, checks it against NumPy pair by pair, and returns rows for the table."""
    target = dpjax.on_lattice(targets.priestley_chao(bandwidth=BANDWIDTH), degree=DEGREE, dims=1)
    key = dpjax.random.seeded_key(0)
    pairs = [jax.tree.map(np.asarray, oracle(jax.random.fold_in(key, i), N + 1)) for i in range(M)]
    point = dpjax.operating_point(m=M, gamma=GAMMA)
    estimates = {}

    def in_dpjax() -> None:
        sampled = dpjax.sample_sensitivity(key, target, oracle, n=N, norm="linf", m=M, gamma=GAMMA)
        estimates["dpjax"] = float(sampled.value)

    def in_numpy() -> None:
        distances = [numpy_distance(pair) for pair in pairs]
        estimates["numpy"] = float(np.sort(distances)[point.k - 1])

    seconds = race({"dpjax": in_dpjax, "numpy": in_numpy}, rounds=rounds)
    assert abs(estimates["dpjax"] / estimates["numpy"] - 1) < 1e-3, estimates
    sizes = {"n": N, "degree": DEGREE, "m": M}
    record("priestley-chao", sizes, seconds | {"r": R_SECONDS}, estimates)
    ours = seconds["dpjax"]
    job = "Priestley-Chao, n = 250, degree 25, m = 500"
    return [
        f"{job} | NumPy, pair by pair, databases given | {ours * 1e3:.0f} ms |"
        f" {seconds['numpy'] * 1e3:.0f} ms | {seconds['numpy'] / ours:.1f}x",
        f"{job} | R diffpriv, recorded | {ours * 1e3:.0f} ms |"
        f" {R_SECONDS * 1e3:.0f} ms | {R_SECONDS / ours:.0f}x",
    ]
