"""Figure 6 of the paper in full: a private linear SVM against epsilon, as a sweep and as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import dpjax
from dpjax import targets
from harness import Race, Row, every_device, record

N, D, COST, GAMMA, M = 1000, 2, 3.0, 0.05, 1500
REPEATS, EPSILONS = 500, np.logspace(-2, 2, 20)
FRESH = 1000  # Records to classify.
PART = 50  # Repeats at one epsilon that the loop does, for each curve.
# Proposition 19.
GLOBAL = 2 + 2 * COST * D**0.5 + 4 * COST * D / N


def records(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """The paper's two Gaussians, clipped to the unit square."""
    key_x, key_y = jax.random.split(key)
    positive = jax.random.bernoulli(key_y, shape=(n,))
    center = jnp.where(positive, 0.2, 0.8)[:, None]
    x = jnp.clip(center + 0.1 * jax.random.normal(key_x, (n, D)), 0, 1)
    return {"x": x, "y": jnp.where(positive, 1.0, -1.0)}


# Two clouds this far apart need no more steps.
train = targets.linear_svm(regularization=1 / COST, steps=8)


def misclassified(key: jax.Array, epsilon: jax.Array, curve: dpjax.Sensitivity | None) -> jax.Array:
    """Which share of fresh records a machine gets wrong, released at a sensitivity or not."""
    key_train, key_release, key_fresh = jax.random.split(key, 3)
    # Sampling holds no secret, and threefry is fast.
    key_train, key_fresh = (
        jax.random.wrap_key_data(jax.random.key_data(key)[:2], impl="threefry2x32")
        for key in (key_train, key_fresh)
    )
    model, fresh = train(records(key_train, N)), records(key_fresh, FRESH)
    if curve is not None:
        model = dpjax.laplace(curve, epsilon)(key_release, model).value
    scores = jnp.sum(fresh["x"] * model["w"][None], axis=1) + model["b"]
    return jnp.mean(jnp.where(fresh["y"] > 0, scores <= 0, scores > 0).astype(jnp.float32))


def run(rounds: int = 1) -> None:
    """All three curves."""
    sampled = dpjax.sample_sensitivity(
        jax.random.key(0), train, records, n=N, norm="l1", m=M, gamma=GAMMA
    )
    curves = {
        "non-private": None,
        "sampled": sampled,
        "global": dpjax.assume_sensitivity(GLOBAL, norm="l1", n=N),
    }
    key, found = dpjax.random.seeded_key(6), {}
    epsilon = float(np.float32(EPSILONS[9]))
    loop = {
        name: jax.jit(lambda key, x, c=c: misclassified(key, x, c)) for name, c in curves.items()
    }

    keys = {
        name: [
            dpjax.cell_key(key, {"epsilon": epsilon, "curve": name}, repeat=repeat)
            for repeat in range(PART)
        ]
        for name in curves
    }

    def in_a_sweep(mesh: Mesh | None = None) -> None:
        found["sweep"] = dpjax.sweep(
            key,
            misclassified,
            traced={"epsilon": EPSILONS},
            static={"curve": curves},
            repeats=REPEATS,
            mesh=mesh,
        )

    def in_a_loop() -> None:
        found["loop"] = [
            float(one(key, jnp.float32(epsilon)))
            for name, one in loop.items()
            for key in keys[name]
        ]

    race = Race(
        {
            "dpjax": in_a_sweep,
            "dpjax, device per core": lambda: in_a_sweep(every_device()),
            "loop": in_a_loop,
        },
        rounds=rounds,
    )
    there = found["sweep"].value.isel(epsilon=9, repeat=slice(PART)).values
    # A record on the line may fall to either side where a batch is rounded otherwise.
    assert np.abs(there.ravel() - found["loop"]).max() <= 2 / FRESH, (there, found["loop"])
    errors = found["sweep"].value.mean("repeat")
    assert errors.sel(curve="sampled")[-1] < 1.1 * errors.sel(curve="non-private")[-1] + 0.001
    assert errors.sel(curve="global")[9] > 10 * errors.sel(curve="sampled")[9]
    cells = len(curves) * len(EPSILONS) * REPEATS
    seconds = race.seconds["loop"] * cells / len(found["loop"])
    record(
        "sweep",
        [
            Row(
                f"Figure 6: SVM, d = {D}, {REPEATS} repeats x {len(EPSILONS)} epsilons x 3 curves",
                f"loop over a jitted function ({len(found['loop'])} cells, scaled)",
                min(race.seconds["dpjax"], race.seconds["dpjax, device per core"]),
                seconds,
            )
        ],
        race=race,
        sizes={"n": N, "d": D, "m": M, "cells": cells, "cells of the loop": len(found["loop"])},
        results={
            "sampled sensitivity": float(sampled.value),
            "global sensitivity": GLOBAL,
            **{
                f"error of {name} at epsilon {EPSILONS[i]:.3g}": float(errors.sel(curve=name)[i])
                for name in curves
                for i in (0, 9, 19)
            },
        },
    )


if __name__ == "__main__":
    run()
