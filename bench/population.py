"""A bank of simulated databases and a posterior from it, against bare JAX and the sampler."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dpjax
from harness import Race, Row, record

N, DRAWS, CHUNK = 1000, 10**6, 512


def prior(key: jax.Array) -> jax.Array:
    """Of the mean of a population."""
    return jax.random.uniform(key, minval=0.3, maxval=3.0)


def model(key: jax.Array, mean: jax.Array, n: int) -> jax.Array:
    """Exponential records."""
    return mean * jax.random.exponential(key, (n,))


def target(records: jax.Array) -> jax.Array:
    """A clamped mean."""
    return jnp.mean(jnp.clip(records, 0, 2))


def oracle(key: jax.Array, n: int) -> jax.Array:
    """The same databases for the sampler."""
    of_theta, of_records = jax.random.split(key)
    return model(of_records, prior(of_theta), n)


def cpu_seconds(job: Callable[[], Any]) -> float:
    """Of all threads: what a job costs on a machine that others use too."""
    start = time.process_time()
    job()
    return time.process_time() - start


def run(rounds: int = 2) -> None:
    """A million databases of a thousand records, and one release weighed by all."""
    private = dpjax.privatize(target, dpjax.laplace(2 / N, epsilon=0.5))
    key = dpjax.random.seeded_key(0)

    def simulated() -> dpjax.SimulationBank:
        return dpjax.simulation_bank(key, private, prior=prior, model=model, n=N, draws=DRAWS)

    def world(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_theta, of_records = jax.random.split(key)
        mean = prior(of_theta)
        return mean, target(model(of_records, mean, N))

    @jax.jit
    def bare(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(world, jax.random.split(key, DRAWS), batch_size=CHUNK)

    def sampled() -> dpjax.Sensitivity:
        # A pair draws its n + 1 records once.
        return dpjax.sample_sensitivity(key, target, oracle, n=N, m=DRAWS, gamma=0.01, norm="l1")

    race = Race(
        {
            "bank": simulated,
            "sampler": sampled,
            "bare": lambda: jax.block_until_ready(bare(jax.random.key(0))),
        },
        rounds=rounds,
    )
    bank = simulated()
    release = private(key, 1.5 * jax.random.exponential(jax.random.key(1), (N,)))

    def density(value: jax.Array) -> jax.Array:
        return private.mechanism.log_prob(release.value, value)

    @jax.jit
    def weights(values: jax.Array) -> jax.Array:
        return jax.nn.softmax(jax.vmap(density)(values))

    posterior = Race(
        {
            "posterior": lambda: bank.posterior(release),
            "softmax": lambda: weights(bank.values[0]).block_until_ready(),
        },
        rounds=5,
    )
    rows = [
        Row(
            f"bank of {DRAWS:,} databases of {N:,} records",
            "a bare map over the same draws",
            race.seconds["bank"],
            race.seconds["bare"],
            0.8,
        ),
        Row(
            f"bank of {DRAWS:,} databases of {N:,} records",
            "sample_sensitivity, as many pairs",
            race.seconds["bank"],
            race.seconds["sampler"],
            0.8,
        ),
        Row(
            f"posterior of a release from {DRAWS:,} databases",
            "a bare softmax of the densities",
            posterior.seconds["posterior"],
            posterior.seconds["softmax"],
            0.5,
            "ends are read, weights checked and copied to the host in float64",
        ),
    ]
    low, high = bank.posterior(release).interval()
    assert low < 1.5 < high
    sizes = {"n": N, "draws": DRAWS}
    found = bank.posterior(release)
    cpu = {
        "bank": cpu_seconds(simulated),
        "posterior": min(cpu_seconds(lambda: bank.posterior(release)) for _ in range(5)),
        "interval": min(cpu_seconds(found.interval) for _ in range(5)),
    }
    results = {"low": float(low), "high": float(high), "cpu_seconds": cpu}
    record("population", rows, race=race, sizes=sizes, results=results)


if __name__ == "__main__":
    run()
