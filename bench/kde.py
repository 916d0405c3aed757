"""Kernel density estimation, n = 5000, a lattice of 11, m = 50,000."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import dpjax
from dpjax import targets
from harness import R, Race, Row, every_device, record

N, DEGREE, M, GAMMA, BANDWIDTH = 5000, 10, 50_000, 0.05, 0.1
R_SECONDS = 169.6  # 50 times what 1,000 pairs took.
PART = 200


def drawn(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """.4 N(.5, .02) + .6 N(.75, .005), as in the vignette."""
    key_first, key_noise = jax.random.split(key)
    first = jax.random.uniform(key_first, shape) < 0.4
    noise = jax.random.normal(key_noise, shape)
    return jnp.where(first, 0.5 + 0.02**0.5 * noise, 0.75 + 0.005**0.5 * noise)


INDEPENDENT = dpjax.oracles.independent(lambda key: drawn(key, (1,)))


def oracle(key: jax.Array, n: int) -> jax.Array:
    """All records in one call: what is fastest where all of them are needed."""
    return drawn(key, (n, 1))


def numpy_distances(rng: np.random.Generator, m: int) -> np.ndarray:
    """The same in NumPy, pair by pair, float32, the shared records evaluated once."""
    lattice = np.linspace(0, 1, DEGREE + 1, dtype=np.float32)
    peak = np.float32(1 / (BANDWIDTH * (2 * np.pi) ** 0.5 * N))
    distances = np.empty(m)
    for i in range(m):
        first = rng.random(N + 1, dtype=np.float32) < 0.4
        noise = rng.standard_normal(N + 1, dtype=np.float32)
        x = np.where(
            first, 0.5 + np.float32(0.02**0.5) * noise, 0.75 + np.float32(0.005**0.5) * noise
        )
        offsets = (lattice[:, None] - x) / np.float32(BANDWIDTH)
        kernels = np.exp(offsets * offsets * np.float32(-0.5))
        shared = kernels[:, : N - 1].sum(axis=1)
        values = (shared + kernels[:, N - 1]) * peak, (shared + kernels[:, N]) * peak
        distances[i] = np.max(np.abs(values[0] - values[1]))
    return distances


def run() -> None:
    """The target as it is, and as a function that the sampler knows nothing about."""
    target = targets.kernel_density_on_lattice(bandwidth=BANDWIDTH, degree=DEGREE, dims=1)
    rng = np.random.Generator(np.random.SFC64(0))
    key = jax.random.key(0)
    estimates = {}

    def plain(database: jax.Array) -> jax.Array:
        return target(database)

    def in_dpjax(
        name: str, function: dpjax.Target, oracle: dpjax.Oracle, m: int, mesh: Mesh | None = None
    ) -> None:
        sampled = dpjax.sample_sensitivity(
            key, function, oracle, n=N, norm="linf", m=m, gamma=GAMMA, mesh=mesh
        )
        estimates[name] = float(sampled.value)

    race = Race(
        {
            "summable": lambda: in_dpjax("summable", target, INDEPENDENT, M),
            "dense": lambda: in_dpjax("dense", plain, oracle, M // 10),
            "dense, device per core": lambda: in_dpjax(
                "dense", plain, oracle, M // 10, every_device()
            ),
            "numpy": lambda: numpy_distances(rng, PART),
        },
        rounds=3,
    )
    for name, function in (("summable", target), ("dense", plain)):
        in_dpjax(f"{name}, the same pairs", function, INDEPENDENT, PART)
    same = estimates["summable, the same pairs"] / estimates["dense, the same pairs"]
    assert abs(same - 1) < 1e-3, estimates
    assert abs(estimates["summable"] / estimates["dense"] - 1) < 0.1, estimates
    k = dpjax.operating_point(m=1000, gamma=GAMMA).k
    estimates["numpy, m = 1000"] = float(np.sort(numpy_distances(rng, 1000))[k - 1])
    assert abs(estimates["numpy, m = 1000"] / estimates["dense"] - 1) < 0.1, estimates
    dense = 10 * min(race.seconds["dense"], race.seconds["dense, device per core"])
    numpy_seconds = race.seconds["numpy"] * M / PART
    twice = "NumPy evaluates the shared records once; here the target is a function of a database"
    job = f"KDE, n = {N}, lattice {DEGREE + 1}, m = 5*10^4"
    record(
        "kde",
        [
            Row(f"{job}, summable", R, race.seconds["summable"], R_SECONDS, 1000),
            Row(
                f"{job}, summable",
                "NumPy (200 pairs, scaled)",
                race.seconds["summable"],
                numpy_seconds,
            ),
            Row(
                f"{job}, dense (5,000 pairs, scaled)",
                "NumPy (200 pairs, scaled)",
                dense,
                numpy_seconds,
                2,
                twice,
            ),
        ],
        race=race,
        sizes={"n": N, "degree": DEGREE, "m": M, "m of dense": M // 10, "m of NumPy": PART},
        results=estimates,
        work={"bytes": 8.0 * M, "flops": 2.0 * M * (DEGREE + 1) * 8},
    )


if __name__ == "__main__":
    run()
