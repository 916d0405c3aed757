"""Reconstruction: from 2^16 Walsh-Hadamard queries, and from all subsets of 14 records."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from dpjax import attacks
from harness import Race, Row, record

N, DENSE, RECORDS = 2**16, 2**11, 14
C = 0.3
CHUNK = 2**10


def run(rounds: int = 5) -> None:
    """Least squares, then exhaustion."""
    _walsh_hadamard(rounds)
    _all_subsets(rounds)


def _walsh_hadamard(rounds: int) -> None:
    """Against the same transform by NumPy, and against solvers that do not know the matrix."""
    rng = np.random.default_rng(0)
    bits = rng.integers(2, size=N)
    noise = (C * N**0.5 * rng.uniform(-1, 1, N)).astype(np.float32)
    answers = np.asarray(attacks.walsh_hadamard(jnp.asarray(bits))) + noise
    on_device = jnp.asarray(answers)
    matrix = scipy.linalg.hadamard(DENSE).astype(np.float32)
    part = matrix @ bits[:DENSE].astype(np.float32) + noise[:DENSE] * (DENSE / N) ** 0.5
    found = {}

    def dpjax() -> None:
        found["dpjax"] = np.asarray(attacks.reconstruct_from_walsh_hadamard(on_device))

    def numpy() -> None:
        found["numpy"] = _butterflies(answers) > N / 2

    def scipy_dense() -> None:
        found["scipy"] = scipy.linalg.lstsq(matrix, part, lapack_driver="gelsy")[0] > 0.5

    race = Race({"dpjax": dpjax, "numpy": numpy}, rounds=3 * rounds)
    dense = Race({"scipy": scipy_dense}, rounds=1)
    race.seconds |= dense.seconds
    race.peak_mib |= dense.peak_mib
    assert np.array_equal(found["dpjax"], found["numpy"])
    wrong = {"dpjax": found["dpjax"] != bits, "scipy": found["scipy"] != bits[:DENSE]}
    shares = {name: float(np.mean(flags)) for name, flags in wrong.items()}
    expected = 1 - float(attacks.expected_recovered_fraction(C))
    assert all(abs(share - expected) < 5 * (expected / DENSE) ** 0.5 for share in shares.values())
    job, ours = "reconstruction from n = 2^16 Walsh-Hadamard queries", race.seconds["dpjax"]
    record(
        "reconstruction",
        [
            Row(job, "NumPy, fast transform", ours, race.seconds["numpy"]),
            # Cubic in n, and 16 GiB for the matrix.
            Row(
                job,
                "scipy.linalg.lstsq (n = 2^11, scaled)",
                ours,
                race.seconds["scipy"] * (N / DENSE) ** 3,
            ),
        ],
        race=race,
        sizes={"n": N, "dense": DENSE, "c": C},
        results=shares,
        work={"bytes": 4.0 * 2 * N, "flops": 16.0 * N},
    )


def _butterflies(x: np.ndarray) -> np.ndarray:
    """The Walsh-Hadamard transform in log2 n passes."""
    width = 1
    while width < len(x):
        first, second = np.moveaxis(x.reshape(-1, 2, width), 1, 0)
        x = np.stack([first + second, first - second], axis=1).reshape(-1)
        width *= 2
    return x


def _all_subsets(rounds: int) -> None:
    """Against a comparison of every candidate with every subset."""
    rng = np.random.default_rng(0)
    subsets = ((np.arange(2**RECORDS)[:, None] >> np.arange(RECORDS)) & 1).astype(np.float32)
    truth = rng.integers(2, size=RECORDS)
    answers = (subsets @ truth + rng.uniform(-0.9, 0.9, 2**RECORDS)).astype(np.float32)
    on_device = jnp.asarray(answers)
    found = {}

    def dpjax() -> None:
        found["dpjax"] = np.asarray(jax.block_until_ready(attacks.subset_distortions(on_device)))

    def numpy() -> None:
        chunks = np.split(subsets, len(subsets) // CHUNK)
        found["numpy"] = np.concatenate(
            [np.max(np.abs(chunk @ subsets.T - answers), axis=1) for chunk in chunks]
        )

    race = Race({"dpjax": dpjax}, rounds=3 * rounds)
    slow = Race({"numpy": numpy}, rounds=1)
    race.seconds |= slow.seconds
    race.peak_mib |= slow.peak_mib
    assert np.allclose(found["dpjax"], found["numpy"], atol=1e-5)
    job = "distortion of all 2^14 candidates over all 2^14 subsets"
    record(
        "all subsets",
        [Row(job, "NumPy, every pair", race.seconds["dpjax"], race.seconds["numpy"])],
        race=race,
        sizes={"n": RECORDS},
        results={name: float(np.min(distortions)) for name, distortions in found.items()},
    )


if __name__ == "__main__":
    run()
