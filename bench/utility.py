"""What noise costs beside what sampling people costs anyway: the table of docs/when-it-works.md."""

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import queries, targets

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "when-it-works.md"
START, END = "<!-- utility -->", "<!-- /utility -->"
EPSILON, DELTA, GAMMA = 1.0, 1e-5, 0.05
REPEATS = 1000  # What stands in the table is good to a few percent.


@dataclass
class Job:
    """A target on databases of n records.

    Attributes:
        name: what the table calls it.
        target: of a database.
        oracle: of the databases.
        n: records.
        norm: "l1" for Laplace noise, "l2" for Gaussian.
        accuracy: of a value on fresh records, for targets that learn to classify.
        m: number of pairs; None for ten times the least.
    """

    name: str
    target: Callable[[Any], Any]
    oracle: dpjax.Oracle
    n: int
    norm: dpjax.Norm = "l1"
    accuracy: Callable[[Any, Any], jax.Array] | None = None
    m: int | None = None


def ages(key: jax.Array, n: int) -> jax.Array:
    """Uniform numbers: what a sensible clip makes of ages."""
    return jax.random.uniform(key, (n,))


def moons(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """Two interleaved half circles, with noise."""
    key_class, key_angle, key_noise = jax.random.split(key, 3)
    y = jax.random.bernoulli(key_class, 0.5, (n,))
    t = jnp.pi * jax.random.uniform(key_angle, (n,))
    upper = jnp.stack([jnp.cos(t), jnp.sin(t)], 1)
    lower = jnp.stack([1 - jnp.cos(t), 0.5 - jnp.sin(t)], 1)
    x = jnp.where(y[:, None], upper, lower) + 0.2 * jax.random.normal(key_noise, (n, 2))
    return {"x": x - jnp.array([0.5, 0.25]), "y": y}


def lengthened(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """The same for a linear model, with a constant feature, in the unit ball."""
    drawn = moons(key, n)
    features = jnp.concatenate([drawn["x"], jnp.ones((n, 1))], 1)
    return {"x": features / 3, "y": drawn["y"]}


def _logits(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights["w"] + weights["b"][None]) @ weights["v"] + weights["c"]


def _loss(weights: Any, database: Any) -> jax.Array:
    signs = jnp.where(database["y"], 1.0, -1.0)
    return jnp.mean(jax.nn.softplus(-signs * _logits(weights, database["x"])))


def network() -> Callable[[Any], Any]:
    """A network of one layer of 64 units, 257 weights, trained by Adam."""
    key_w, key_v = jax.random.split(jax.random.key(0))
    start = {
        "w": jax.random.normal(key_w, (2, 64)),
        "b": jnp.zeros(64),
        "v": jax.random.normal(key_v, (64,)) / 8,
        "c": jnp.zeros(()),
    }
    return targets.optax_training(_loss, start, optax.adam(0.05), steps=100)


def _share_right(scores: jax.Array, database: Any) -> jax.Array:
    return jnp.mean((scores > 0) == database["y"])


def jobs() -> list[Job]:
    """From what works to what does not."""
    mean = targets.summable(lambda age: age, average=True)
    wide, fine = (queries.histogram_query(np.linspace(0, 1, k + 1)) for k in (10, 1000))
    linear = {
        "target": targets.logistic_regression(regularization=0.01),
        "oracle": lengthened,
        "norm": "l2",
        "accuracy": lambda w, d: _share_right(d["x"] @ w, d),
    }
    deep = {
        "target": network(),
        "oracle": moons,
        "norm": "l2",
        "accuracy": lambda w, d: _share_right(_logits(w, d["x"]), d),
        "m": 90,
    }
    return [
        Job("mean", mean, ages, 1000),
        Job("mean", mean, ages, 50),
        Job("histogram, 10 bins", wide, ages, 1000),
        Job("histogram, 1000 bins", fine, ages, 1000),
        Job("logistic regression, 3 weights", n=1000, **linear),
        Job("logistic regression, 3 weights", n=10_000, **linear),
        Job("network, 257 weights", n=500, **deep),
    ]


def row(number: int, job: Job) -> str:
    """A line of the table."""
    key_sample, _, key_data, key_test = jax.random.split(jax.random.key(number), 4)
    sensitivity = dpjax.sample_sensitivity(
        key_sample, job.target, job.oracle, n=job.n, norm=job.norm, gamma=GAMMA, m=job.m
    )
    make = dpjax.laplace if job.norm == "l1" else partial(dpjax.gaussian, delta=DELTA)
    mechanism = make(sensitivity, epsilon=EPSILON)

    # Nothing here is published.
    rehearsal = dpjax.rehearse(
        dpjax.random.seeded_key(number),
        job.target,
        job.oracle,
        n=job.n,
        mechanisms={"": mechanism},
        draws=REPEATS,
    )
    value = jax.jit(lambda key: job.target(job.oracle(key, job.n)))(key_data)
    outcome = ""
    if job.accuracy is not None:
        test = job.oracle(key_test, 10_000)
        noisy_keys = jax.random.split(dpjax.random.seeded_key(100 + number), REPEATS)
        released = jax.vmap(lambda key: mechanism(key, value).value)(noisy_keys)
        after = jnp.mean(jax.vmap(lambda learned: job.accuracy(learned, test))(released))
        outcome = f"accuracy {job.accuracy(value, test):.2f}, released {after:.2f}"
    size = sum(leaf.size for leaf in jax.tree.leaves(value))
    ratio = rehearsal.noise_over_spread.item()
    return f"| {job.name} | {job.n:,} | {size:,} | {ratio:.2g} | {outcome} |"


def main() -> None:
    """Rewrites what stands between the markers."""
    header = "| Target | n | Numbers | Noise over spread | |\n|---|---|---|---|---|"
    rows = [row(number, job) for number, job in enumerate(jobs())]
    table = "\n".join([header, *rows])
    before, rest = PAGE.read_text().split(START)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{START}\n{table}\n{END}{after}")
    print(table)


if __name__ == "__main__":
    main()
