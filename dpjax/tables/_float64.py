"""Computes the value of a release in float64 on the host, from its noisy integers.

JAX computes in float32 by default. This loses the seconds of times and the last digits of large
numbers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax._core._checks import any_traced
from dpjax._core._types import Database, Key, PyTree
from dpjax._core._values import Release
from dpjax._tracing._programs import Unchanging
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.mechanisms._noise_intervals import as_floats
from dpjax.queries._private_quantiles import _estimates
from dpjax.queries._query import Query
from dpjax.queries._rank_search import Ranks
from dpjax.queries._second_moments import combinations_of
from dpjax.release._privatize import privatize
from dpjax.targets._clamping import middle_and_half


def in_float64(
    release: Release, compute: Callable[[dict[str, Any], dict[str, Any]], PyTree]
) -> Release:
    """Replaces a release's value by what `compute` makes of its noisy integers and public facts.

    The value of a simulated release is not replaced, because its integers are traced.
    """
    measured = release.accuracy.measured
    if measured is None or any_traced(release.value, measured):
        return release
    found = compute(measured, release.accuracy.facts)
    value = jax.tree.map(lambda x, like: x.reshape(np.shape(like)), found, release.value)
    return dataclasses.replace(release, value=value)


def sums_in_float64(query: Query, mechanism: AdditiveMechanism) -> Callable[..., Release]:
    """Returns the private version of a query of sums. The released sums are float64."""
    private = privatize(Unchanging("sum", query._integers), query._on_integers(mechanism))

    def ask(key: Key, database: Database, *, name: str) -> Release:
        release = private(key, database, name=name)
        value = release.value
        if any_traced(value):
            value = query._in_units(value)
        else:
            value = as_floats(np.asarray(value)) * query._integers.unit
        relation = mechanism.sensitivity.relation
        accuracy = query._accuracy_of(release.accuracy, relation, value, database)
        return dataclasses.replace(release, value=value, accuracy=accuracy)

    return ask


def mean_of(measured: dict[str, Any], facts: dict[str, Any]) -> np.ndarray:
    """Computes averages in float64, by the formula of `private_mean`."""
    middle, half = middle_and_half(facts["lower"], facts["upper"])
    sums = np.asarray(measured["sums"], np.float64) * facts["unit"]
    if facts["from_ends"]:
        sums = np.stack([sums[..., 0] + sums[..., 1], sums[..., 1] - sums[..., 0]], axis=-1) / 2
    count = measured["n"]
    if count is None:
        count = np.maximum(sums[..., :1], facts["unit"]) / half
    return np.clip(middle + sums[..., 1:] / count, facts["lower"], facts["upper"])


def quantiles_of(measured: dict[str, Any], facts: dict[str, Any]) -> np.ndarray:
    """Computes quantiles in float64, by the formula of `private_quantiles`."""
    return _estimates(Ranks(**measured), facts)


def variance_of(measured: dict[str, Any], facts: dict[str, Any]) -> dict[str, np.ndarray]:
    """Computes an average and a variance in float64, by the formula of `private_variance`."""
    means, second = _averages(measured, facts)
    (middle,), half = facts["middle"], facts["size"]
    mean = np.clip(means[..., 0], -1, 1)
    variance = np.clip(second[..., 0, 0] - mean**2, 0, 1)
    return {"mean": middle + half * mean, "variance": half**2 * variance}


def covariance_of(measured: dict[str, Any], facts: dict[str, Any]) -> dict[str, np.ndarray]:
    """Computes averages and covariances in float64, as in `PrivateTable.covariance`."""
    means, second = _averages(measured, facts)
    middle, size = np.asarray(facts["middle"]), np.asarray(facts["size"])
    covariance = second - means[..., :, None] * means[..., None, :]
    return {"mean": middle + size * means, "covariance": np.outer(size, size) * covariance}


def _averages(measured: dict[str, Any], facts: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the averages of x and of x x^T.

    They are computed from the upper triangle of the sum of z z^T over the records, for z = (1, x).
    """
    released = np.asarray(measured["sums"], np.float64) * facts["unit"]
    triangle = released @ combinations_of(facts, released.shape[-1]).T
    size = 1 + len(facts["middle"])
    rows, columns = np.triu_indices(size)
    sums = np.zeros((*triangle.shape[:-1], size, size))
    sums[..., rows, columns] = sums[..., columns, rows] = triangle
    n = measured["n"]
    count = np.maximum(sums[..., :1, :1] if n is None else np.asarray(n)[..., None, None], 1)
    # The first row is the average of x. The other rows are the average of x x^T.
    averages = sums[..., 1:] / count
    center = facts.get("center", 0.0)
    return averages[..., 0, :], averages[..., 1:, :] + center * np.eye(size - 1)
