"""Simulated intervals: the statistic of the noisy sums, again with noise of the same scale.

A parametric bootstrap. The released sums play the part of the truth, and draws of the noise show
how far a statistic of noisy sums is from that of the sums. It is right where the statistic is
nearly linear over the noise. These statistics come from the eigenvectors of a noisy matrix, so that
is where the noise is small against a gap between eigenvalues. Elsewhere the statistic states
itself how far it may be off.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._types import PyTree, Value
from dpjax.queries._second_moments import Moments, averages


class Statistic(NamedTuple):
    """What a release computes from noisy averages.

    Attributes:
        value: takes averages and public facts to the value of a release.
        matrix: takes them to the symmetric matrix whose eigenvectors the value comes from.
        least_reach: takes eigenvalues of the released matrix in ascending order, and how far they
            may be off, to how far each number may be off at least: where a draw does not tell.
        largest: no number has a larger magnitude.
    """

    value: Callable[[Moments, dict[str, Any]], PyTree]
    matrix: Callable[[Moments, dict[str, Any]], jax.Array]
    least_reach: Callable[[np.ndarray, np.ndarray, dict[str, Any]], PyTree]
    largest: PyTree


STATISTICS: dict[str, Statistic] = {}
# A gap between released eigenvalues of so many times their error: then draws tell how far their
# eigenvectors are off. Eigenvalues that tie are never so far apart, by Weyl's inequality.
CLEAR = 3
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
    statistic = STATISTICS[facts["statistic"]]
    draws, matrices = jax.tree.map(np.asarray, _draws(measured, facts))
    groups = measured["sums"].ndim - 1
    rank = math.ceil((_DRAWS + 1) * confidence) - 1

    def distance(draws: np.ndarray, value: np.ndarray) -> np.ndarray:
        return np.abs(_turned(draws[1:], value, groups) - value)

    errors = np.linalg.norm(matrices[1:] - matrices[0], 2, axis=(-2, -1))
    error = np.sort(errors, axis=0)[rank]
    least = statistic.least_reach(np.linalg.eigvalsh(matrices[0]), error, facts)
    distances = jax.tree.map(distance, draws, value)
    reach = jax.tree.map(lambda x, r: np.maximum(np.sort(x, axis=0)[rank], r), distances, least)
    if simultaneous:
        # The largest distance of a draw, in units of each number's own reach.
        numbers = jax.tree.leaves((distances, errors)), jax.tree.leaves((reach, error))
        ratios = [np.divide(x, r, where=r > 0, out=0 * x) for x, r in zip(*numbers, strict=True)]
        flat = np.concatenate([x.reshape(_DRAWS, -1) for x in ratios], axis=1)
        factor = np.sort(flat.max(axis=1))[rank]
        reach = jax.tree.map(lambda r: r * factor, reach)
    low, high = jax.tree.map(np.subtract, value, reach), jax.tree.map(np.add, value, reach)
    largest = statistic.largest
    return (
        jax.tree.map(lambda x, end: np.maximum(x, -end), low, largest),
        jax.tree.map(np.minimum, high, largest),
    )


def _turned(draws: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """Rows as directions have no sign: those of draws take that of the value."""
    if value.ndim - groups < 2:
        return draws
    return draws * np.where(np.sum(draws * value, axis=-1, keepdims=True) < 0, -1, 1)


def _draws(measured: PyTree, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Statistics and matrices of the sums, and then with one more draw of the noise, many times."""
    sums, n = np.asarray(measured["sums"], np.float64), measured["n"]
    if n is not None and sums.ndim > 1:
        raise ValueError("no interval is simulated for a batch of releases: take them one by one")
    scale = facts["arrays"][0]["scale"]
    # The release is public, so its sums may be the seed: an interval is the same whenever it is
    # asked. One seed for all would make all intervals too short, or too long, by the same part.
    seed = hashlib.sha256(np.ascontiguousarray(sums).tobytes()).digest()
    generator = np.random.default_rng(list(seed))
    sampler = {"laplace": generator.laplace, "gaussian": generator.normal}[facts["noise"]]
    noise = scale * sampler(size=(_DRAWS, *sums.shape))
    noisy = np.concatenate([sums[None], sums + noise])
    statistic = _program(json.dumps(facts))
    for _ in range(sums.ndim - 1):  # An axis of groups, whose sizes are private.
        statistic = jax.vmap(statistic, (1, None), out_axes=1)
    return statistic(jnp.asarray(noisy, float), n)


@functools.lru_cache
def _program(text: str) -> Callable[[jax.Array, jax.Array | None], tuple[PyTree, jax.Array]]:
    """Statistic and matrix of rows of noisy sums, compiled; the facts are in JSON."""
    facts = json.loads(text)
    statistic, unit = STATISTICS[facts["statistic"]], facts["unit"]
    noise = facts["arrays"][0]["scale"] * unit

    weight, left_out = facts.get("weight", 1.0), facts.get("left_out", 0)

    def of_row(sums: jax.Array, n: jax.Array | None) -> tuple[PyTree, jax.Array]:
        triangle = jnp.append(sums * unit, jnp.zeros(left_out))
        moments = averages(triangle, n, noise, weight=weight)
        return statistic.value(moments, facts), statistic.matrix(moments, facts)

    return jax.jit(jax.vmap(of_row, (0, None)))
