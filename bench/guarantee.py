"""The same guarantee, gamma = .01, at the least m of each method: a mean of 10^4 exponentials."""

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from harness import Race, Row, record

N, GAMMA = 10_000, 0.01
EXACT = "of each pair, D is also evaluated with its records rotated: three evaluations for two"
METHODS = {
    "exact": {"method": "exact"},
    "marginal": {"method": "exact", "confidence": None},
    "dkw": {"method": "dkw"},
}
KEYS = 10  # For the average estimate.


def oracle(key: jax.Array, n: int) -> jax.Array:
    """Standard exponential records."""
    return jax.random.exponential(key, (n,))


def estimate(seed: int, method: str) -> dpjax.Sensitivity:
    """The sensitivity at the least m."""
    options = METHODS[method]
    m = dpjax.operating_point(gamma=GAMMA, **options).m
    key = jax.random.key(seed)
    return dpjax.sample_sensitivity(
        key, jnp.mean, oracle, n=N, norm="l1", m=m, gamma=GAMMA, **options
    )


def run() -> None:
    """The dkw method is run once, after one run that compiled it."""
    few = Race(
        {name: lambda name=name: estimate(0, name) for name in ("exact", "marginal")}, rounds=5
    )
    race = Race({name: lambda name=name: estimate(0, name) for name in METHODS}, rounds=2)
    race.seconds.update({name: min(t, race.seconds[name]) for name, t in few.seconds.items()})
    sampled = {
        name: [estimate(seed, name) for seed in range(2 if name == "dkw" else KEYS)]
        for name in METHODS
    }
    averages = {name: float(np.mean([s.value for s in sampled[name]])) for name in METHODS}
    sizes = {name: sampled[name][0].m for name in METHODS}
    assert sizes == {"exact": 459, "marginal": 99, "dkw": 41_971}, sizes
    # |x - y| of two exponentials is exponential: its quantile at .99 is -log(.01).
    needed = -np.log(GAMMA) / N
    assert min(averages["exact"], averages["dkw"]) > needed, averages

    def row(name: str, label: str) -> Row:
        return Row(
            f"gamma = .01, {label}, m = {sizes[name]}: averages"
            f" {averages[name] / needed:.2f} times the true quantile",
            f"dkw, m = {sizes['dkw']:,}: {averages['dkw'] / needed:.2f} times",
            race.seconds[name],
            race.seconds["dkw"],
            60,
            EXACT,
        )

    record(
        "same guarantee",
        [row("exact", "exact, C = .99"), row("marginal", "marginal")],
        race=race,
        sizes={"n": N, "m": sizes},
        results={"average estimates": averages, "true quantile": float(needed)},
        work={"bytes": 8.0 * sizes["exact"] * N, "flops": 2.0 * sizes["exact"] * N},
    )


if __name__ == "__main__":
    run()
