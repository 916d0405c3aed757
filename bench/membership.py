"""Shadow models for membership inference: one program against a loop of jitted trainings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import attacks, targets
from harness import Race, Row, record

N, D, HIDDEN, STEPS, MODELS, RATE = 200, 20, 16, 200, 1024, 0.5
PART = 64  # Models for the loop.


def population(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """Normal records, with labels of a logistic model."""
    key_x, key_y = jax.random.split(key)
    x = jax.random.normal(key_x, (n, D))
    return {"x": x, "y": jnp.sign(x[:, 0] - x[:, 1] + jax.random.logistic(key_y, (n,)))}


def linear(w: jax.Array, x: jax.Array) -> jax.Array:
    """Logistic regression: the logit of a record."""
    return x @ w


def perceptron(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One hidden layer."""
    return jnp.tanh(x @ parameters["in"]) @ parameters["out"]


def models() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Logits and parameters to start from."""
    drawn = np.random.default_rng(0).normal(size=(D, HIDDEN)) / np.sqrt(D)
    start = {"in": jnp.asarray(drawn, jnp.float32), "out": jnp.zeros(HIDDEN)}
    return {
        "logistic regression": (linear, jnp.zeros(D)),
        f"{D}-{HIDDEN}-1": (perceptron, start),
    }


def run() -> None:
    """Both models; a loop gets the databases of the first shadow models."""
    key_records, key = jax.random.split(jax.random.key(0))
    records = population(key_records, 2 * N)
    for name, (logit, start) in models().items():

        def margins(parameters: Any, of: Any, logit: Callable[..., Any] = logit) -> jax.Array:
            return of["y"] * logit(parameters, of["x"])

        def loss(parameters: Any, database: Any, margins: Callable[..., Any] = margins) -> Any:
            return jnp.mean(jax.nn.softplus(-margins(parameters, database)))

        train = targets.optax_training(loss, start, optax.sgd(RATE), steps=STEPS)
        one_model = jax.jit(lambda x, train=train, margins=margins: margins(train(x), records))
        found: dict[str, Any] = {}

        def in_dpjax(train: Any = train, margins: Any = margins, found: Any = found) -> None:
            made = attacks.shadow_models(
                key, lambda _, database: train(database), records, query=margins, models=MODELS
            )
            found["dpjax"] = jax.block_until_ready(made)

        def in_a_loop(one_model: Any = one_model, found: Any = found) -> None:
            found["loop"] = []
            for first in np.asarray(found["dpjax"].members)[:PART, :N]:
                places = np.where(first, np.arange(N), np.arange(N) + N)
                found["loop"].append(one_model(jax.tree.map(lambda x, at=places: x[at], records)))
            jax.block_until_ready(found["loop"])

        race = Race({"dpjax": in_dpjax, "loop": in_a_loop}, rounds=3)
        error = float(np.max(np.abs(np.stack(found["loop"]) - found["dpjax"].scores[:PART])))
        assert error < 1e-3, error
        attacked = attacks.lira(found["dpjax"].scores, found["dpjax"].members)
        curve = attacks.roc_curve(attacked, found["dpjax"].members, confidence=None)
        rows = [
            Row(
                f"shadow models of {name}, n = {N}, {STEPS} steps, {MODELS} models",
                f"loop of jitted trainings ({PART} models, scaled)",
                race.seconds["dpjax"],
                race.seconds["loop"] * MODELS / PART,
            )
        ]
        record(
            f"shadow models, {name}",
            rows,
            race=race,
            sizes={"n": N, "d": D, "steps": STEPS, "models": MODELS, "models of the loop": PART},
            results={
                "largest difference of scores": error,
                "true positive rate at .001": curve.true_positive_rate(0.001).estimate,
            },
        )


if __name__ == "__main__":
    run()
