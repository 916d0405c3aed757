"""The evaluations of a subset envelope, against a bare vmap over the same subsets."""

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from harness import Race, Row, record

N, FEATURES = 1100, 10


def r_squared(database: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Of a linear regression on all features."""
    x, y = database
    x, y = x - x.mean(0), y - y.mean()
    weights = jnp.linalg.solve(x.T @ x + 1e-6 * jnp.eye(FEATURES), x.T @ y)
    return 1 - jnp.mean(jnp.square(y - x @ weights)) / jnp.mean(jnp.square(y))


def run(rounds: int = 5) -> None:
    """A whole release: evaluations, losses, the exact draw and what a release writes down."""
    one, other = jax.random.split(jax.random.key(0))
    x = jax.random.normal(one, (N, FEATURES))
    database = x, x @ jnp.full(FEATURES, 0.2) + jax.random.normal(other, (N,))
    mechanism = dpjax.subset_envelope(r_squared, 1.0, lower=0.0, upper=1.0)
    key, design = dpjax.random.seeded_key(0), mechanism.design
    # Record i is in block i modulo 38.
    records = np.arange(N // design.blocks * design.blocks).reshape(-1, design.blocks).T
    chosen = jnp.asarray(records[design.subsets].reshape(design.evaluations, -1))

    @jax.jit
    def evaluated(database: tuple[jax.Array, jax.Array], chosen: jax.Array) -> jax.Array:
        return jax.vmap(lambda rows: r_squared((database[0][rows], database[1][rows])))(chosen)

    race = Race(
        {
            "release": lambda: jax.block_until_ready(mechanism(key, database).value),
            "vmap": lambda: evaluated(database, chosen).block_until_ready(),
        },
        rounds=rounds,
    )
    ours, theirs = race.seconds["release"], race.seconds["vmap"]
    row = Row(
        f"subset envelope of R^2, {design.evaluations:,} evaluations",
        "a bare vmap of the target",
        ours,
        theirs,
        0.67,  # At most 1.5 times the time.
    )
    results = {
        "released": float(mechanism(key, database).value.value),
        "true": float(r_squared(database)),
        "median of results": float(jnp.median(evaluated(database, chosen))),
    }
    assert abs(results["released"] - results["true"]) < 0.2
    sizes = {"n": N, "features": FEATURES, "evaluations": design.evaluations}
    record("subset envelope", [row], race=race, sizes=sizes, results=results)


if __name__ == "__main__":
    run()
