"""k-means at epsilon 5 against diffprivlib: how often all centers are found, and the time."""

import warnings

import diffprivlib
import jax
import numpy as np

import dpjax
from harness import Race, Row, record

RECORDS, EPSILON, DELTA = 1500, 5.0, 1e-6
CENTERS = np.array([[0.5, 0.5], [-0.5, 0.0], [0.3, -0.6]])
NEAR = 0.1  # Two standard deviations of a cluster.
RUNS = 200


def run(rounds: int = 5) -> None:
    """Three clusters in the unit disk, at the epsilon that each library claims."""
    warnings.simplefilter("ignore")
    noise = 0.05 * np.random.default_rng(0).normal(size=(3, RECORDS // 3, 2))
    points = (CENTERS[:, None] + noise).reshape(-1, 2).astype(np.float32)
    key = dpjax.random.seeded_key(0)

    def in_dpjax(key: jax.Array) -> jax.Array:
        release = dpjax.queries.private_k_means(
            key, points, clusters=3, radius=1.0, epsilon=EPSILON, delta=DELTA
        )
        return release.value["centers"]

    def in_diffprivlib(seed: int) -> np.ndarray:
        model = diffprivlib.models.KMeans(
            3, epsilon=EPSILON, bounds=([-1, -1], [1, 1]), random_state=seed
        )
        return model.fit(points).cluster_centers_

    keys = jax.random.split(key, RUNS)
    in_all_runs = {
        "dpjax": jax.jit(lambda keys: jax.lax.map(in_dpjax, keys))(keys),
        "diffprivlib": [in_diffprivlib(seed) for seed in range(RUNS)],
    }
    found = {
        name: float(np.mean([_all_found(np.asarray(x)) for x in centers]))
        for name, centers in in_all_runs.items()
    }
    race = Race(
        {
            "dpjax": lambda: jax.block_until_ready(in_dpjax(key)),
            "diffprivlib": lambda: in_diffprivlib(0),
        },
        rounds=rounds,
    )
    ours, theirs = (f"all centers found in {share:.0%} of runs" for share in found.values())
    job = f"k-means, n = 1500, d = 2, k = 3, epsilon = 5: {ours}"
    row = Row(job, f"diffprivlib: {theirs}", race.seconds["dpjax"], race.seconds["diffprivlib"])
    sizes = {"records": RECORDS, "runs": RUNS}
    record("k-means", [row], race=race, sizes=sizes, results={"all centers found": found})


def _all_found(centers: np.ndarray) -> bool:
    distances = np.linalg.norm(CENTERS[:, None] - centers[None], axis=2)
    return bool(np.all(distances.min(axis=1) < NEAR))


if __name__ == "__main__":
    run()
