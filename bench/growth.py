"""How cost grows with the number of pairs and of records, over three decades of each."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import dpjax
from dpjax import targets
from harness import RESULTS, Race, record

N_AT_PAIRS, M_AT_RECORDS = 100, 1000
SMALL = 10  # What a call at this size takes is its fixed cost: tracing and checks.


def oracle(key: jax.Array, n: int) -> jax.Array:
    """Standard normal records."""
    return jax.random.normal(key, (n,))


INDEPENDENT = dpjax.oracles.independent(jax.random.normal)


def sample(target: dpjax.Target, n: int, m: int, oracle: dpjax.Oracle = oracle) -> None:
    """One estimate."""
    key = jax.random.key(0)
    dpjax.sample_sensitivity(
        key,
        target,
        oracle,
        n=n,
        norm="l1",
        m=m,
        gamma=0.1,
        confidence=None,
        allow_cancellation=True,
    )


MEAN = targets.summable(lambda x: x, average=True)


def median(database: jax.Array) -> jax.Array:
    """A target that is no sum over records."""
    return targets.quantile(probability=0.5, lower=-4, upper=4)(database)


# Sizes at which the fixed cost of a call is not most of the time.
PANELS: dict[str, dict[str, tuple[range, Callable[[int], None]]]] = {
    f"pairs m, at n = {N_AT_PAIRS}": {
        "mean, dense": (range(4, 8), lambda m: sample(jnp.mean, N_AT_PAIRS, m)),
        "median": (range(3, 7), lambda m: sample(median, N_AT_PAIRS, m)),
        "mean, summable": (
            range(5, 9),
            lambda m: sample(MEAN, N_AT_PAIRS, m, INDEPENDENT),
        ),
    },
    f"records n, at m = {M_AT_RECORDS}": {
        "mean, dense": (range(3, 7), lambda n: sample(jnp.mean, n, M_AT_RECORDS)),
        "median": (range(2, 6), lambda n: sample(median, n, M_AT_RECORDS)),
        "mean, summable": (
            range(3, 7),
            lambda n: sample(MEAN, n, M_AT_RECORDS, INDEPENDENT),
        ),
    },
}


def run() -> None:
    """Times three decades, fits a power of the size to each, and plots them."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, (label, jobs) in zip(axes, PANELS.items(), strict=True):
        for name, (decades, job) in jobs.items():
            sizes = [10**decade for decade in decades]
            seconds, exponent = _grown(f"{name}, {label}", sizes, job)
            (line,) = axis.loglog(sizes, seconds, "o-", label=f"{name}: {exponent:.2f}")
            linear = [seconds[-1] * size / sizes[-1] for size in sizes]
            axis.loglog(sizes, linear, ":", color=line.get_color())
        axis.set_xlabel(label)
        axis.legend(title="exponent beyond the fixed cost\n(dotted: linear)")
    axes[0].set_ylabel("seconds")
    figure.savefig(RESULTS / f"growth-{jax.default_backend()}.png", dpi=120)


def _grown(label: str, sizes: list[int], job: Callable[[int], None]) -> tuple[list[float], float]:
    """Seconds at each size, and the exponent of what they are beyond the fixed cost."""
    fixed = Race({"fixed": lambda: job(SMALL)}, rounds=5).seconds["fixed"]
    race = Race({f"{size:.0e}": lambda size=size: job(size) for size in sizes}, rounds=1)
    seconds = list(race.seconds.values())
    growing = [(n, t - fixed) for n, t in zip(sizes, seconds, strict=True) if t > 2 * fixed]
    # Of a single size nothing follows.
    exponent = float(np.polyfit(*np.log(growing).T, 1)[0]) if len(growing) > 1 else math.nan
    race.seconds["fixed"] = fixed
    record(f"growth: {label}", [], race=race, sizes={"sizes": sizes}, results=exponent)
    print(
        f"{label}: {', '.join(f'{x:.3g}' for x in seconds)} s, exponent {exponent:.2f}", flush=True
    )
    return seconds, exponent


if __name__ == "__main__":
    run()
