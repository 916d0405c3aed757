"""Sampled sensitivities and CPU times of sums of floats and of exact sums, in float32.

The truth is the sensitivity of the same pairs in float64. `python bench/exact_sums.py [n]`.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax.proving import Ball
from dpjax.proving._prove_sensitivity import public_bounds

WEIGHTS = np.array([0.5, -1.0, 2.0], np.float32)
PLACES = np.linspace(-1, 1, 20, dtype=np.float32)


class Sampled(NamedTuple):
    """A target, its oracle, the bounds on a record, and a norm."""

    target: Callable[[Any], Any]
    oracle: Callable[[Any, int], Any]
    bounds: Any
    norm: str


def _numbers(key: Any, n: int) -> Any:
    return jax.random.uniform(key, (n,), jnp.float32, minval=-1)


def _shifted(key: Any, n: int) -> Any:
    return jax.random.uniform(key, (n,), jnp.float32)


def _labeled(key: Any, n: int) -> Any:
    first, second = jax.random.split(key)
    x = jax.random.uniform(first, (n, 3), jnp.float32, minval=-0.5, maxval=0.5)
    return x, jnp.float32(jax.random.uniform(second, (n,), jnp.float32) < 0.5)


def _gradient(d: Any) -> Any:
    x, y = d
    return x.T @ (jax.nn.sigmoid(x @ WEIGHTS.astype(x.dtype)) - y) / len(y)


def _density(x: Any) -> Any:
    return jnp.exp(-8 * (PLACES.astype(x.dtype)[:, None] - x) ** 2).mean(1)


TARGETS = {
    "mean": Sampled(jnp.mean, _numbers, (-1, 1), "l1"),
    "mean near .5": Sampled(jnp.mean, _shifted, (0, 1), "l1"),
    "variance": Sampled(jnp.var, _numbers, (-1, 1), "l1"),
    "variance by moments": Sampled(
        lambda x: (x * x).mean() - x.mean() ** 2, _numbers, (-1, 1), "l1"
    ),
    "logistic gradient": Sampled(_gradient, _labeled, (Ball(1.0), (0, 1)), "l2"),
    "last cumulative sum": Sampled(lambda x: jnp.cumsum(x)[-1], _numbers, (-1, 1), "l1"),
    "density at 20 points": Sampled(_density, _numbers, (-1, 1), "linf"),
    "mean distance from the mean": Sampled(
        lambda x: jnp.abs(x - x.mean()).mean(), _numbers, (-1, 1), "l1"
    ),
}


def _sampled(target: Callable[[Any], Any], one: Sampled, n: int) -> float:
    key = dpjax.random.seeded_key(0)
    try:
        found = dpjax.sample_sensitivity(
            key, target, one.oracle, n=n, norm=one.norm, m=100, gamma=0.1, confidence=None,
            allow_cancellation=True,
        )  # fmt: skip
    except ValueError as refusal:
        print("   ", str(refusal)[:200])
        return float("nan")
    return float(found.value)


def _milliseconds(functions: list[Callable[[Any], Any]], records: Any) -> list[float]:
    """The least CPU time of each function, run in turns."""
    least = [float("inf")] * len(functions)
    for _ in range(20):
        for k, function in enumerate(functions):
            jax.block_until_ready(function(records))
            start = time.process_time()
            for _ in range(5):
                jax.block_until_ready(function(records))
            least[k] = min(least[k], (time.process_time() - start) / 5)
    return [1000 * seconds for seconds in least]


def run(n: int) -> None:
    """Prints a row for each target."""
    print(f"n = {n}; sensitivities as multiples of the truth, and milliseconds of CPU")
    for name, one in TARGETS.items():
        exact = dpjax.targets.exact_sums(one.target, bounds=one.bounds)
        plain, found = (_sampled(target, one, n) for target in (one.target, exact))
        with jax.enable_x64(True):
            wide = jax.jit(lambda d, one=one: one.target(jax.tree.map(jnp.float64, d)))
            truth = _sampled(wide, one, n)
        records = one.oracle(jax.random.key(1), n)
        clamped = public_bounds(records, one.bounds)[1].enforced_on(one.target)
        ms = _milliseconds([jax.jit(f) for f in (one.target, clamped, exact)], records)
        print(
            f"{name:30} plain {plain / truth:9.4f}  exact {found / truth:8.4f}  "
            f"plain {ms[0]:7.3f}  clamped {ms[1]:7.3f}  exact {ms[2]:7.3f} ms, "
            f"{ms[2] / ms[0]:5.2f} times plain, {ms[2] / ms[1]:5.2f} times clamped",
            flush=True,
        )


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "allow")
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 10**6)
