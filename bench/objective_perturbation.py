"""Accuracy with noise in the objective or at the global bound, for docs/how-to/models.md."""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import dpjax
from dpjax import learning, targets

EPSILON, DELTA, RELEASES = 1.0, 1e-5, 200
RIDGES = (0.01, 0.1)


def patients() -> dict[str, jax.Array]:
    """All breast-cancer records, standardized and scaled into the unit ball."""
    data = load_breast_cancer()
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1)
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(data.target)}


def released(ridge: float, database: dict[str, jax.Array], keys: jax.Array) -> dict[str, jax.Array]:
    """Weights by method, of shape (releases, d)."""
    n, d = database["x"].shape
    fit = targets.logistic_regression(regularization=ridge, dims=d)
    weights = fit(database)
    bound = dpjax.gaussian(fit.sensitivity("l2", n=n).value, EPSILON, DELTA)
    training = learning.objective_perturbation(
        regularization=ridge, n=n, dims=d, epsilon=EPSILON, delta=DELTA
    )
    train = jax.jit(jax.vmap(lambda key: training(key, database).value))
    return {
        "without noise": weights[None],
        "noise at the global bound": jax.vmap(lambda key: bound(key, weights).value)(keys),
        "objective perturbation": train(keys),
    }


def run() -> None:
    """Prints the mean fraction of patients that released weights classify correctly."""
    database, keys = patients(), jax.random.split(dpjax.random.seeded_key(1), RELEASES)
    for ridge in RIDGES:
        for name, weights in released(ridge, database, keys).items():
            right = (weights @ database["x"].T > 0) == (database["y"] > 0)
            print(f"lambda = {ridge:g}, {name}: {float(jnp.mean(right)):.3f}")


if __name__ == "__main__":
    run()
