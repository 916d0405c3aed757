"""Logistic regression by optax: n = 1000, d = 20, 200 steps, m = 1000."""

import os

import jax
import jax.numpy as jnp
import joblib
import numpy as np
import optax
from jax.sharding import Mesh
from sklearn.linear_model import LogisticRegression

import dpjax
from dpjax import targets
from harness import Race, Row, every_device, record

N, D, STEPS, M, GAMMA, RATE, RIDGE = 1000, 20, 200, 1000, 0.05, 2.0, 0.01
PART = 50  # Pairs for the peers.


def oracle(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """Normal records, with labels of a logistic model."""
    key_x, key_y = jax.random.split(key)
    x = jax.random.normal(key_x, (n, D))
    return {"x": x, "y": jnp.sign(x[:, 0] - x[:, 1] + jax.random.logistic(key_y, (n,)))}


def loss(w: jax.Array, database: dict[str, jax.Array]) -> jax.Array:
    """The regularized average logistic loss."""
    margins = database["y"] * (database["x"] @ w)
    return jnp.mean(jax.nn.softplus(-margins)) + RIDGE / 2 * jnp.sum(w**2)


def sklearn_fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The minimizer of the same loss, to scikit-learn's default tolerance."""
    model = LogisticRegression(C=1 / (RIDGE * N), fit_intercept=False, tol=1e-4)
    return model.fit(x, y).coef_[0]


def neighbors(x: np.ndarray, y: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The two databases of a pair."""
    last = np.r_[: N - 1, N]
    return (x[:N], y[:N]), (x[last], y[last])


def sklearn_distance(x: np.ndarray, y: np.ndarray) -> float:
    """How far the minimizer moves, in the norm l2."""
    one, other = (sklearn_fit(*database) for database in neighbors(x, y))
    return float(np.linalg.norm(one - other))


def run() -> None:
    """All pairs at once, against one database at a time and against another solver."""
    target = targets.optax_training(loss, jnp.zeros(D), optax.sgd(RATE), steps=STEPS)
    key, fit = jax.random.key(0), jax.jit(target)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(PART, dtype=jnp.uint32))
    pairs = jax.device_get(jax.vmap(lambda key: oracle(key, N + 1))(keys))
    x, y = pairs["x"], pairs["y"]
    found = {}

    def in_dpjax(mesh: Mesh | None = None) -> None:
        sampled = dpjax.sample_sensitivity(
            key, target, oracle, n=N, norm="l2", m=M, gamma=GAMMA, mesh=mesh
        )
        found["estimate"] = float(sampled.value)

    def in_a_loop() -> None:
        found["loop"] = []
        for records in zip(x, y, strict=True):
            one, other = (fit({"x": x, "y": y}) for x, y in neighbors(*records))
            found["loop"].append(float(jnp.linalg.norm(one - other)))

    def in_sklearn() -> None:
        one = joblib.delayed(sklearn_distance)
        found["scikit-learn"] = joblib.Parallel(n_jobs=os.cpu_count())(map(one, x, y))

    race = Race(
        {
            "dpjax": in_dpjax,
            "dpjax, device per core": lambda: in_dpjax(every_device()),
            "loop": in_a_loop,
            "scikit-learn": in_sklearn,
        },
        rounds=3,
    )
    ours = np.asarray(dpjax.sensitivity_samples(key, target, oracle, n=N, norm="l2", m=PART))
    errors = {
        name: float(np.max(np.abs(ours - found[name]))) / found["estimate"]
        for name in ("loop", "scikit-learn")
    }
    # The same optimum: scikit-learn stops when its gradient is small, optax after 200 steps.
    assert errors["loop"] < 1e-3, errors
    assert errors["scikit-learn"] < 0.2, errors
    job = f"logistic regression by optax, {STEPS} steps, m = {M}"
    seconds = min(race.seconds["dpjax"], race.seconds["dpjax, device per core"])
    part = f"({PART} pairs, scaled)"
    rows = [
        Row(job, f"{peer} {part}", seconds, race.seconds[name] * M / PART, 5, reason)
        for name, peer, reason in (
            (
                "loop",
                "loop of jitted fits",
                "one fit is matrix products already, which batching does not speed up on a CPU",
            ),
            (
                "scikit-learn",
                "scikit-learn, all cores",
                "it stops at convergence, after about ten steps of L-BFGS",
            ),
        )
    ]
    record(
        "optax training",
        rows,
        race=race,
        sizes={"n": N, "d": D, "steps": STEPS, "m": M, "m of the peers": PART},
        results={"estimate": found["estimate"], "largest difference over estimate": errors},
        work={"bytes": 8.0 * M * N * D, "flops": 8.0 * M * STEPS * N * D},
    )


if __name__ == "__main__":
    run()
