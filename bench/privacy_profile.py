"""The privacy profile of 10^5 pairs, against sampling a sensitivity from as many."""

import jax
import jax.numpy as jnp

import dpjax
from dpjax import oracles, targets
from harness import Race, Row, record

N, M = 1000, 10**5


def twenty_means(database: jax.Array) -> jax.Array:
    """Of functions of a record; their noise adds up, so one release for each pair is drawn."""
    return jnp.stack([jnp.mean(jnp.exp(-jnp.square(database - i / 4))) for i in range(20)])


def run(rounds: int = 3) -> None:
    """For a mean that needs two records of a pair, for one that needs all, and for 20 means."""
    declared = oracles.independent(jax.random.exponential)
    jobs = {
        "two records": (targets.summable(lambda x: x, average=True), declared),
        "all records": (lambda x: x.mean(), lambda key, n: jax.random.exponential(key, (n,))),
        "20 means": (twenty_means, lambda key, n: jax.random.exponential(key, (n,))),
    }
    rows, results = [], {}
    for name, (target, oracle) in jobs.items():
        key, other = jax.random.split(jax.random.key(0))

        def sampled(target=target, oracle=oracle, key=key) -> dpjax.Sensitivity:
            return dpjax.sample_sensitivity(key, target, oracle, n=N, norm="l1", gamma=0.05, m=M)

        release = target, dpjax.laplace(sampled(), 1.0)

        def profiled(release=release, oracle=oracle, key=other) -> dpjax.PrivacyProfile:
            return dpjax.privacy_profile(key, release, oracle, n=N, m=M)

        race = Race({"profile": profiled, "sample": sampled}, rounds=rounds)
        found = profiled()
        results[name] = {"gamma": found.gamma(1.0), "delta": found.delta(1.0)}
        assert found.gamma(1.0) < 0.055
        rows.append(
            Row(
                f"privacy profile of 10^5 pairs, n = 1000, {name}",
                "sampling the sensitivity",
                race.seconds["profile"],
                race.seconds["sample"],
                0.77,  # At most 1.3 times the time.
                "about 10 ms of the host: it traces the release, and sorts distances",
            )
        )
        print(name, race.seconds["profile"] / race.seconds["sample"], results[name])
    record("privacy profile", rows, race=race, sizes={"n": N, "m": M}, results=results)


if __name__ == "__main__":
    run()
