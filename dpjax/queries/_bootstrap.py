"""Simulated intervals: the statistic of the noisy sums, again with noise of the same scale.

A parametric bootstrap. The released sums play the part of the truth, and draws of the noise show
how far a statistic of noisy sums is from that of the sums. It is right where the statistic is
nearly linear over the noise, and only approximate elsewhere.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._types import PyTree, Value
from dpjax.queries._second_moments import Moments, averages

Statistic = Callable[[Moments, dict[str, Any]], PyTree]
"""Takes noisy averages and public facts to the value of a release."""

STATISTICS: dict[str, Statistic] = {}
_DRAWS = 1999
_LARGEST_CONFIDENCE = 0.995


@intervals_of("bootstrap")
def _of_draws(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """The value, plus and minus a quantile of its distance from draws around it."""
    if confidence > _LARGEST_CONFIDENCE:
        raise ValueError(
            f"confidence must be at most {_LARGEST_CONFIDENCE} for an interval that is simulated,"
            f" got {confidence}"
        )
    draws = _draws(measured, facts)
    groups = measured["sums"].ndim - 1

    def distance(draws: jax.Array, value: np.ndarray) -> np.ndarray:
        return np.abs(_turned(np.asarray(draws), value, groups) - value)

    distances = jax.tree.map(distance, draws, value)
    rank = math.ceil((_DRAWS + 1) * confidence) - 1
    reach = jax.tree.map(lambda x: np.sort(x, axis=0)[rank], distances)
    if simultaneous:
        # The largest distance of a draw, in units of each number's own reach.
        ratios = jax.tree.map(
            lambda x, r: np.divide(x, r, where=r > 0, out=0 * x), distances, reach
        )
        flat = np.concatenate([x.reshape(_DRAWS, -1) for x in jax.tree.leaves(ratios)], axis=1)
        factor = np.sort(flat.max(axis=1))[rank]
        reach = jax.tree.map(lambda r: r * factor, reach)
    return jax.tree.map(np.subtract, value, reach), jax.tree.map(np.add, value, reach)


def _turned(draws: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """Rows as directions have no sign: those of draws take that of the value."""
    if value.ndim - groups < 2:
        return draws
    return draws * np.where(np.sum(draws * value, axis=-1, keepdims=True) < 0, -1, 1)


def _draws(measured: PyTree, facts: dict[str, Any]) -> PyTree:
    """The statistic of sums with one more draw of the noise, many times."""
    sums, n = np.asarray(measured["sums"], np.float64), measured["n"]
    if n is not None and sums.ndim > 1:
        raise ValueError("no interval is simulated for a batch of releases: take them one by one")
    scale = facts["arrays"][0]["scale"]
    # The release is public, so a public seed serves: an interval is the same whenever it is asked.
    generator = np.random.default_rng(0)
    sampler = {"laplace": generator.laplace, "gaussian": generator.normal}[facts["noise"]]
    noisy = sums + scale * sampler(size=(_DRAWS, *sums.shape))
    statistic = _program(json.dumps(facts))
    for _ in range(sums.ndim - 1):  # An axis of groups, whose sizes are private.
        statistic = jax.vmap(statistic, (1, None), out_axes=1)
    return statistic(jnp.asarray(noisy, float), n)


@functools.lru_cache
def _program(text: str) -> Callable[[jax.Array, jax.Array | None], PyTree]:
    """The statistic of rows of noisy sums, compiled; the facts are in JSON."""
    facts = json.loads(text)
    statistic, unit = STATISTICS[facts["statistic"]], facts["unit"]
    noise = facts["arrays"][0]["scale"] * unit

    weight, left_out = facts.get("weight", 1.0), facts.get("left_out", 0)

    def of_row(sums: jax.Array, n: jax.Array | None) -> PyTree:
        triangle = jnp.append(sums * unit, jnp.zeros(left_out))
        return statistic(averages(triangle, n, noise, weight=weight), facts)

    return jax.jit(jax.vmap(of_row, (0, None)))
