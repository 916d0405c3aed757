"""Training by optax: logistic regression, n = 1000, d = 20, 200 steps, m = 1000; a small network.

As first written, a step reads the records row by row, 20 numbers at a time, and differentiates
softplus by two exponentials and a logarithm. On columns, with the sigmoid for a derivative, it
reads them as fast as a core's cache gives them; one program for all pairs then gains what there are
cores.
"""

import os
from collections.abc import Callable
from typing import Any

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
HIDDEN, NETWORK_STEPS, NETWORK_M = 32, 50, 200
REPEATS = 2000  # Of a part of a step, to be timed.


def oracle(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """Normal records, with labels of a logistic model."""
    key_x, key_y = jax.random.split(key)
    x = jax.random.normal(key_x, (n, D))
    return {"x": x, "y": jnp.sign(x[:, 0] - x[:, 1] + jax.random.logistic(key_y, (n,)))}


def loss(w: jax.Array, database: dict[str, jax.Array]) -> jax.Array:
    """The regularized average logistic loss."""
    margins = database["y"] * (database["x"] @ w)
    return jnp.mean(jax.nn.softplus(-margins)) + RIDGE / 2 * jnp.sum(w**2)


@jax.custom_jvp
def softplus(z: jax.Array) -> jax.Array:
    """log(1 + exp(z)), whose derivative is the sigmoid."""
    return jax.nn.softplus(z)


@softplus.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (z,), (moved,) = primals, tangents
    return softplus(z), jax.nn.sigmoid(z) * moved


def loss_of_columns(w: jax.Array, database: dict[str, jax.Array]) -> jax.Array:
    """The same loss, of features in columns."""
    margins = database["y"] * (w @ database["columns"])
    return jnp.mean(softplus(-margins)) + RIDGE / 2 * jnp.sum(w**2)


def network_loss(parameters: dict[str, jax.Array], database: dict[str, jax.Array]) -> jax.Array:
    """The average logistic loss of one hidden layer."""
    hidden = jax.nn.relu(database["x"] @ parameters["first"] + parameters["bias"])
    return jnp.mean(jax.nn.softplus(-database["y"] * (hidden @ parameters["second"])))


def on_columns(fit: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    """A target that turns the features over once, before the first step."""

    def target(database: dict[str, jax.Array]) -> jax.Array:
        columns = jax.lax.optimization_barrier(database["x"].T)
        return fit({"columns": columns, "y": database["y"]})

    return target


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


def distances_in_a_loop(fit: Callable[[Any], Any], x: np.ndarray, y: np.ndarray) -> list[float]:
    """One jitted training after another."""
    found = []
    for records in zip(x, y, strict=True):
        one, other = (fit({"x": x, "y": y}) for x, y in neighbors(*records))
        difference = jax.tree.map(jnp.subtract, one, other)
        found.append(float(optax.tree.norm(difference)))
    return found


def parts_of_a_step(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Seconds that a step, and its parts, take on one core."""
    rows, columns, signs = jnp.asarray(x[:N]), jnp.asarray(x[:N].T.copy()), jnp.asarray(y[:N])

    def repeated(step: Callable[[jax.Array, Any], jax.Array], features: jax.Array) -> Any:
        @jax.jit
        def run(features: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(
                0, REPEATS, lambda _, w: w - 0.1 * step(w, features), jnp.zeros(D)
            )

        return lambda: run(features).block_until_ready()

    def margins_only(function: Callable[[jax.Array], jax.Array]) -> Any:
        derivative = jax.grad(lambda margins: jnp.mean(function(-margins)))
        return lambda w, _: w * jnp.sum(derivative(signs * w[0]))

    race = Race(
        {
            "step on rows": repeated(jax.grad(lambda w, x: loss(w, {"x": x, "y": signs})), rows),
            "products on rows": repeated(lambda w, x: (x @ w) @ x / N, rows),
            "derivative of jax.nn.softplus": repeated(margins_only(jax.nn.softplus), rows),
            "step on columns": repeated(
                jax.grad(lambda w, x: loss_of_columns(w, {"columns": x, "y": signs})), columns
            ),
            "products on columns": repeated(lambda w, x: x @ (w @ x) / N, columns),
            "derivative by the sigmoid": repeated(margins_only(softplus), rows),
        },
        rounds=5,
    )
    return {name: seconds / REPEATS for name, seconds in race.seconds.items()}


def run() -> None:
    """All pairs at once, against one database at a time and against another solver."""
    rows_target = targets.optax_training(loss, jnp.zeros(D), optax.sgd(RATE), steps=STEPS)
    target = on_columns(
        targets.optax_training(loss_of_columns, jnp.zeros(D), optax.sgd(RATE), steps=STEPS)
    )
    key, fit, fit_rows = jax.random.key(0), jax.jit(target), jax.jit(rows_target)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(PART, dtype=jnp.uint32))
    pairs = jax.device_get(jax.vmap(lambda key: oracle(key, N + 1))(keys))
    x, y = pairs["x"], pairs["y"]
    found = {}

    def in_dpjax(mesh: Mesh | None = None, target: Any = target) -> None:
        sampled = dpjax.sample_sensitivity(
            key, target, oracle, n=N, norm="l2", m=M, gamma=GAMMA, mesh=mesh
        )
        found["estimate"] = float(sampled.value)

    def in_a_loop() -> None:
        found["loop"] = distances_in_a_loop(fit_rows, x, y)

    def in_a_loop_on_columns() -> None:
        found["loop on columns"] = distances_in_a_loop(fit, x, y)

    def in_sklearn() -> None:
        one = joblib.delayed(sklearn_distance)
        found["scikit-learn"] = joblib.Parallel(n_jobs=os.cpu_count())(map(one, x, y))

    race = Race(
        {
            "dpjax": in_dpjax,
            "dpjax, device per core": lambda: in_dpjax(every_device()),
            "dpjax, device per core, on rows": lambda: in_dpjax(every_device(), rows_target),
            "loop": in_a_loop,
            "loop on columns": in_a_loop_on_columns,
            "scikit-learn": in_sklearn,
        },
        rounds=3,
    )
    ours = np.asarray(dpjax.sample_distances(key, target, oracle, n=N, norm="l2", m=PART))
    errors = {
        name: float(np.max(np.abs(ours - found[name]))) / found["estimate"]
        for name in ("loop", "loop on columns", "scikit-learn")
    }
    # The same optimum: scikit-learn stops when its gradient is small, optax after 200 steps.
    assert errors["loop"] < 1e-3, errors
    assert errors["scikit-learn"] < 0.2, errors
    parts = parts_of_a_step(x[0], y[0])
    job = f"logistic regression by optax, {STEPS} steps, m = {M}"
    seconds = min(race.seconds["dpjax"], race.seconds["dpjax, device per core"])
    part = f"({PART} pairs, scaled)"
    rows = [
        Row(job, f"{peer} {part}", seconds, race.seconds[name] * M / PART, goal, reason)
        for name, peer, goal, reason in (
            (
                "loop",
                "loop of jitted fits",
                5,
                "a step on rows is 60% products of 20 numbers and 40% the derivative of softplus",
            ),
            (
                "loop on columns",
                "loop of jitted fits on columns",
                None,
                "a step reads the records as fast as a core's cache gives them; there are two",
            ),
            (
                "scikit-learn",
                "scikit-learn, all cores",
                5,
                "it stops at convergence, after about ten steps of L-BFGS",
            ),
        )
    ]
    record(
        "optax training",
        rows,
        race=race,
        sizes={"n": N, "d": D, "steps": STEPS, "m": M, "m of the peers": PART},
        results={
            "estimate": found["estimate"],
            "largest difference over estimate": errors,
            "seconds of the parts of a step": parts,
        },
        work={"bytes": 8.0 * M * N * D, "flops": 8.0 * M * STEPS * N * D},
    )
    run_network()


def run_network() -> None:
    """A hidden layer, whose steps are products of matrices."""
    key_first, key_second, key = jax.random.split(jax.random.key(0), 3)
    start = {
        "first": jax.random.normal(key_first, (D, HIDDEN)) / 4,
        "bias": jnp.zeros(HIDDEN),
        "second": jax.random.normal(key_second, (HIDDEN,)) / 4,
    }
    target = targets.optax_training(network_loss, start, optax.sgd(0.1), steps=NETWORK_STEPS)
    fit, part = jax.jit(target), NETWORK_M // 10
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(part, dtype=jnp.uint32))
    pairs = jax.device_get(jax.vmap(lambda key: oracle(key, N + 1))(keys))
    found = {}

    def in_dpjax() -> None:
        found["ours"] = np.asarray(
            dpjax.sample_distances(
                key, target, oracle, n=N, norm="l2", m=NETWORK_M, mesh=every_device()
            )
        )

    def in_a_loop() -> None:
        found["loop"] = distances_in_a_loop(fit, pairs["x"], pairs["y"])

    race = Race({"dpjax, device per core": in_dpjax, "loop": in_a_loop}, rounds=3)
    error = float(np.max(np.abs(found["ours"][:part] / np.array(found["loop"]) - 1)))
    assert error < 1e-2, error
    job = f"network of {HIDDEN} by optax, {NETWORK_STEPS} steps, m = {NETWORK_M}"
    # Measured on a core of an AMD EPYC, in CPU time beside other work; flops and bytes of a step by
    # `cost_analysis()`.
    reason = (
        "a step is 2.9 Mflop, where products take 28 us at 98% of a core's 94 Gflop/s, and 1.4 MB"
        " of passes over activations, 22 us at 63 GB/s in cache: XLA fuses no pass into a product,"
        " so two cores would at most be 2.8x a loop whose step takes 71 us"
    )
    loop = race.seconds["loop"] * NETWORK_M / part
    record(
        "optax training of a network",
        [
            Row(
                job,
                f"loop of jitted fits ({part} pairs, scaled)",
                race.seconds["dpjax, device per core"],
                loop,
                3,
                reason,
            )
        ],
        race=race,
        sizes={"n": N, "d": D, "hidden": HIDDEN, "steps": NETWORK_STEPS, "m": NETWORK_M},
        results={"largest relative difference": error},
        work={
            "bytes": 8.0 * NETWORK_M * N * D,
            "flops": 8.0 * NETWORK_M * NETWORK_STEPS * N * D * HIDDEN,
        },
    )


if __name__ == "__main__":
    run()
