"""A median by five mechanisms on the same data: what docs/how-to/beyond-sensitivity.md shows."""

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import dpjax
from dpjax import oracles, targets

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "how-to" / "beyond-sensitivity.md"
START, END = "<!-- medians -->", "<!-- /medians -->"
EPSILON, DELTA, GAMMA = 1.0, 1e-6, 0.05
RELEASES = 2000  # What stands in the table is good to a few percent.
PUBLIC = 200  # Of the tumors, what the oracle is made of.
CANDIDATES = 2**14
DRAWN = 20  # Databases of the oracle, on which a bound is chosen that is proposed.


@dataclass
class Data:
    """Numbers, and what is public of them.

    Attributes:
        name: what the table calls them.
        records: shape (n,), private.
        oracle: a public model of databases.
        lower: public.
        upper: public.
    """

    name: str
    records: jax.Array
    oracle: dpjax.Oracle
    lower: float
    upper: float

    def median(self, database: Any) -> jax.Array:
        """The target."""
        return targets.quantile(probability=0.5, lower=self.lower, upper=self.upper)(database)


def salaries(key: jax.Array, n: int) -> jax.Array:
    """Log-normal: median 40,000, a tenth above 86,000."""
    return 40_000 * jnp.exp(0.6 * jax.random.normal(key, (n,)))


def tumors() -> Data:
    """Areas of the cell nuclei of 369 tumors, and a model made of 200 others."""
    areas = np.asarray(load_breast_cancer(return_X_y=True)[0][:, 3], "float32")
    shuffled = np.random.default_rng(0).permutation(areas)
    oracle = oracles.smoothed_resample(shuffled[:PUBLIC])
    private = jnp.asarray(shuffled[PUBLIC:])
    return Data(f"tumors, n = {len(private)}", private, oracle, 0.0, 5000.0)


def every_data() -> list[Data]:
    """From what is simulated to what was measured."""
    drawn = [
        Data(f"salaries, n = {n:,}", salaries(jax.random.key(n), n), salaries, 0.0, 1e6)
        for n in (1000, 10_000)
    ]
    return [*drawn, tumors()]


def by_global_bound(data: Data) -> Any:
    """Laplace noise of (upper - lower) / epsilon."""
    median = targets.quantile(probability=0.5, lower=data.lower, upper=data.upper)
    bound = median.sensitivity("l1").value
    return _of_median(dpjax.laplace(bound, EPSILON), data)


def by_sampled_sensitivity(data: Data) -> Any:
    """Laplace noise of a quantile of what random pairs show."""
    sensitivity = dpjax.sample_sensitivity(
        jax.random.key(1), data.median, data.oracle, n=data.records.size, norm="l1", gamma=GAMMA
    )
    return _of_median(dpjax.laplace(sensitivity, EPSILON), data)


def by_exponential(data: Data) -> Any:
    """A candidate by the number of records between it and the median, which moves by 1."""
    candidates = jnp.linspace(data.lower, data.upper, CANDIDATES)
    mechanism = dpjax.exponential(1.0, EPSILON)

    def release(key: jax.Array, records: jax.Array) -> jax.Array:
        below = jnp.searchsorted(jnp.sort(records), candidates, side="right")
        scores = -jnp.abs(below - (records.size + 1) // 2)
        return candidates[mechanism(key, scores).value]

    return release


def by_smooth_sensitivity(data: Data) -> Any:
    """Laplace noise of a private scale."""
    mechanism = dpjax.smooth_quantile(EPSILON, DELTA, lower=data.lower, upper=data.upper)
    return lambda key, records: mechanism(key, records).value


def by_propose_test_release(data: Data) -> Any:
    """The least bound that is nearly always answered on databases of the oracle."""
    propose = partial(dpjax.propose_test_release, lower=data.lower, upper=data.upper)
    keys = jax.random.split(jax.random.key(2), DRAWN)
    drawn = [data.oracle(key, data.records.size) for key in keys]
    low, high = 2.0**-16 * data.upper, data.upper
    for _ in range(12):
        middle = (low * high) ** 0.5
        mechanism = propose(EPSILON, DELTA, bound=middle)
        # Noise beyond seven scales more comes once in 2,000 tests.
        needed = float(mechanism.least_distance) + 7 * 2 / EPSILON
        if min(int(mechanism.distance(x)) for x in drawn) >= needed:
            high = middle
        else:
            low = middle
    mechanism = propose(EPSILON, DELTA, bound=high)

    def release(key: jax.Array, records: jax.Array) -> jax.Array:
        reply = mechanism(key, records).value
        return jnp.where(reply.answered == 1, reply.value, jnp.nan)

    return release


def _of_median(mechanism: Any, data: Data) -> Callable[[jax.Array, Any], jax.Array]:
    return lambda key, records: mechanism(key, data.median(records)).value


# By what they promise beyond epsilon = 1.
MECHANISMS = {
    "Laplace noise of the global bound": ("", by_global_bound),
    "the exponential mechanism": ("", by_exponential),
    "smooth sensitivity": (f"delta = {DELTA:g}", by_smooth_sensitivity),
    "propose-test-release": (f"delta = {DELTA:g}", by_propose_test_release),
    "Laplace noise of a sampled sensitivity": (f"gamma = {GAMMA:g}", by_sampled_sensitivity),
}


def error(release: Any, data: Data) -> str:
    """The median error, and how often there was no answer."""
    keys = jax.random.split(dpjax.random.seeded_key(3), RELEASES)  # Nothing here is published.

    @jax.jit
    def every(keys: jax.Array, records: jax.Array) -> jax.Array:
        return jax.lax.map(lambda key: release(key, records), keys, batch_size=50)

    released = every(keys, data.records)
    errors = np.abs(np.asarray(released) - float(data.median(data.records)))
    silent = np.mean(np.isnan(errors))
    typical = float(np.nanmedian(errors))
    text = f"{typical:.1f}" if typical < 10 else f"{float(f'{typical:.2g}'):,.0f}"
    return text + (f" ({silent:.1%} unanswered)" if silent > 0 else "")


def main() -> None:
    """Rewrites what stands between the markers."""
    every = every_data()
    spans = [f"{data.name}, [{data.lower:,.0f}, {data.upper:,.0f}]" for data in every]
    lines = [["Mechanism", "Promise beside epsilon = 1", *spans], ["---"] * (2 + len(every))]
    for name, (promise, make) in MECHANISMS.items():
        lines.append([name, promise, *(error(make(data), data) for data in every)])
    medians = [f"{float(data.median(data.records)):,.0f}" for data in every]
    lines.append(["*the median itself*", "", *medians])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    before, rest = PAGE.read_text().split(START)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{START}\n{table}\n{END}{after}")
    print(table)


if __name__ == "__main__":
    main()
