"""The Bernstein vignette: Priestley-Chao regression, n = 250, degree 25, m = 500."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import dpjax
from dpjax import targets
from harness import R, Race, Row, every_device, record

N, DEGREE, M, GAMMA, BANDWIDTH = 250, 25, 500, 0.2, 0.05
R_SECONDS = 3.781


def oracle(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """Uniform x, and a noisy sine of it."""
    key_x, key_y = jax.random.split(key)
    x = jax.random.uniform(key_x, (n,))
    return {"x": x, "y": jnp.sin(10 * x) * x + 0.1 * jax.random.normal(key_y, (n,))}


def numpy_distance(records: dict[str, np.ndarray]) -> float:
    """The sup distance over the lattice of one pair, in NumPy, float32."""
    lattice = np.linspace(0, 1, DEGREE + 1, dtype=np.float32)
    h, peak = np.float32(BANDWIDTH), np.float32(1 / (BANDWIDTH * (2 * np.pi) ** 0.5))

    def curve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        order = np.argsort(x)
        x, y = x[order], y[order]
        weights = np.diff(x, prepend=x[:1]) * y * peak
        return np.exp(-(((lattice[:, None] - x) / h) ** 2) / 2) @ weights

    last = np.r_[: N - 1, N]
    x, y = records["x"], records["y"]
    return float(np.max(np.abs(curve(x[:N], y[:N]) - curve(x[last], y[last]))))


def run(rounds: int = 7) -> None:
    """Times the job, and checks it against NumPy on the same databases."""
    target = dpjax.evaluate_on_lattice(
        targets.priestley_chao(bandwidth=BANDWIDTH), degree=DEGREE, dims=1
    )
    key = jax.random.key(0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(M, dtype=jnp.uint32))
    drawn = jax.device_get(jax.jit(jax.vmap(lambda key: oracle(key, N + 1)))(keys))
    pairs = [{name: drawn[name][i] for name in drawn} for i in range(M)]
    k = dpjax.operating_point(m=M, gamma=GAMMA).k
    estimates = {}

    def in_dpjax(mesh: Mesh | None = None) -> None:
        sampled = dpjax.sample_sensitivity(
            key, target, oracle, n=N, norm="linf", m=M, gamma=GAMMA, mesh=mesh
        )
        estimates["dpjax"] = float(sampled.value)

    def in_numpy() -> None:
        distances = [numpy_distance(pair) for pair in pairs]
        estimates["numpy"] = float(np.sort(distances)[k - 1])

    race = Race(
        {
            "dpjax": in_dpjax,
            "dpjax, device per core": lambda: in_dpjax(every_device()),
            "numpy": in_numpy,
        },
        rounds=rounds,
    )
    assert abs(estimates["dpjax"] / estimates["numpy"] - 1) < 1e-3, estimates
    job, ours = (
        f"Priestley-Chao, n = {N}, degree {DEGREE}, m = {M}",
        min(race.seconds["dpjax"], race.seconds["dpjax, device per core"]),
    )
    kernels = "26 kernels of 250 sorted records for each of 1,000 databases"
    record(
        "priestley-chao",
        [
            Row(job, R, ours, R_SECONDS, 100, kernels),
            Row(
                job,
                "NumPy per pair, databases given",
                ours,
                race.seconds["numpy"],
                2,
                "a third is to sort the records, on one core of XLA's",
            ),
        ],
        race=race,
        sizes={"n": N, "degree": DEGREE, "m": M},
        results=estimates,
        work={"bytes": 16.0 * M * N, "flops": 2.0 * M * N * (DEGREE + 1) * 8},
    )


if __name__ == "__main__":
    run()
