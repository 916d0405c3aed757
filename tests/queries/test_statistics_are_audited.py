"""Claims of queries and of private statistics, put to the auditor on neighbors."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax.auditing import verify

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
SAMPLES = 200_000
NUMBERS = {
    REPLACE: {"value": jnp.array([5.0, 7.0, 7.0, 7.0]), "neighbor": jnp.array([5.0, 7.0, 7.0, 5.0])}
}
NUMBERS[ADD] = {
    "value": queries.padded_records(np.float32([5, 7, 7, 7]), capacity=4),
    "neighbor": queries.padded_records(np.float32([5, 7, 7]), capacity=4),
}
VECTORS = {
    "value": jnp.array([[0.6, 0.8], [-0.3, 0.2], [1.0, 0.0]]),
    "neighbor": jnp.array([[0.6, 0.8], [-0.3, 0.2], [-0.5, 0.75**0.5]]),
}
LINE = {name: {"x": records[:, :1], "y": records[:, 1]} for name, records in VECTORS.items()}
BUCKETS = {"value": jnp.array([0, 1, 1]), "neighbor": jnp.array([0, 1, 2])}
IN_SLOTS = {name: queries.padded_records(codes, capacity=3) for name, codes in BUCKETS.items()}


def query_at(query, pair_relation, told=None):
    """A release of a query, calibrated to the relation that it is told."""
    sensitivity = query.sensitivity(relation=pair_relation if told is None else told)
    return dpjax.privatize(query, dpjax.laplace(sensitivity, epsilon=1.0))


def statistic(function, **parameters):
    return lambda key, database: function(key, database, **parameters)


SUM = queries.sum_query(lower=5, upper=7, capacity=4)
INTERVAL = {"lower": 5, "upper": 7, "epsilon": 1.0}
GAUSSIAN = {"radius": 1.0, "epsilon": 1.0, "delta": 1e-3}
CLAIMS = {
    "sum, replaced": (query_at(SUM, REPLACE), NUMBERS[REPLACE], 0.0),
    "sum, added": (query_at(SUM, ADD), NUMBERS[ADD], 0.0),
    "histogram": (query_at(queries.histogram_query(3), REPLACE), BUCKETS, 0.0),
    "mean, replaced": (statistic(queries.private_mean, **INTERVAL), NUMBERS[REPLACE], 0.0),
    "mean, added": (
        statistic(queries.private_mean, **INTERVAL, relation=ADD),
        NUMBERS[ADD],
        0.0,
    ),
    "variance": (statistic(queries.private_variance, **INTERVAL), NUMBERS[REPLACE], 0.0),
    "covariance": (statistic(queries.private_covariance, **GAUSSIAN), VECTORS, 1e-3),
    "regression": (
        statistic(
            queries.private_linear_regression, x_radius=1.0, y_radius=1.0, epsilon=1.0, delta=1e-3
        ),
        LINE,
        1e-3,
    ),
    "k-means": (
        statistic(queries.private_k_means, clusters=2, iterations=2, **GAUSSIAN),
        VECTORS,
        1e-3,
    ),
}

# At least so much is found. What is made of noisy sums shows less than they do.
SEEN = {"sum, replaced": 0.9, "sum, added": 0.9, "histogram": 0.85, "mean, replaced": 0.9}
SEEN |= {"mean, added": 0.6, "variance": 0.75, "covariance": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_claims_are_not_refuted(name, key):
    """A false alarm once in a million keys."""
    release, pair, delta = CLAIMS[name]
    result = verify(key, release, **pair, epsilon=1.0, delta=delta, samples=SAMPLES)
    assert SEEN.get(name, 0.0) <= result.epsilon <= 1


BROKEN = {
    # Three and a half times as far.
    "a sum by its width where records are added": (query_at(SUM, ADD, told=REPLACE), NUMBERS[ADD]),
    "a histogram at half scale": (
        query_at(queries.histogram_query(3), REPLACE, told=ADD),
        IN_SLOTS,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_faults_are_refuted(name, key):
    release, pair = BROKEN[name]
    with pytest.raises(AssertionError, match="claims epsilon 1, delta 0; the auditor refutes"):
        verify(key, release, **pair, epsilon=1.0, delta=0.0, samples=SAMPLES)
