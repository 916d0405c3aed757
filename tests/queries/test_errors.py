"""`error(confidence=)` of every query holds for as many releases as it says, by simulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpjax
from dpjax import queries, targets
from dpjax.queries._second_moments import second_moments_query

DRAWS = 1000
# At confidence .9 more misses than this happen once in a million keys, for each row of the table.
MOST_MISSES = int(scipy.stats.binom.ppf(1 - 1e-6, DRAWS, 0.1))
NUMBERS = jnp.array([-3.0, 0.25, 0.5, 0.75, 9.0])


def errors_of_query(make, records, truth, mechanism_of):
    """The largest error of each release, in the units of the records, and `error`."""
    query = make()
    mechanism = mechanism_of(query)
    private = dpjax.privatize(query, mechanism)
    released = jax.jit(jax.vmap(lambda key: private(key, records).value))(keys())
    off = (
        np.abs(np.asarray(released, float) - np.asarray(truth, float))
        .reshape(DRAWS, -1)
        .max(axis=1)
    )
    return off, lambda confidence: query.error(mechanism, confidence=confidence)


def keys():
    return jax.random.split(dpjax.random.seeded_key(11), DRAWS)


def with_laplace(query):
    return dpjax.laplace(query.sensitivity(), 0.05)


def with_gaussian(query):
    return dpjax.gaussian(query.sensitivity("l2"), 0.05, 1e-6)


def count():
    return errors_of_query(
        lambda: queries.counting_query(lambda x: x > 0), NUMBERS, 4, with_laplace
    )


def histogram():
    return errors_of_query(
        lambda: queries.histogram_query([0, 0.5, 1]), NUMBERS, [1, 2], with_gaussian
    )


def contingency():
    people = {"a": jnp.array([0, 1, 1]), "b": jnp.array([1, 1, 1])}
    return errors_of_query(
        lambda: queries.contingency_query({"a": 2, "b": 2}), people, [[0, 1], [0, 2]], with_laplace
    )


def bounded_sum():
    return errors_of_query(
        lambda: queries.sum_query(lower=0, upper=1, capacity=10), NUMBERS, 2.5, with_laplace
    )


def workload():
    matrix = [[1, 0, 2], [1, 1, 0]]
    return errors_of_query(
        lambda: queries.linear_workload(matrix), jnp.array([0, 2, 2]), [5, 1], with_gaussian
    )


def names():
    search = queries.name_search(0.1, width=1, threshold=1, capacity=1)
    codes = jnp.asarray(targets.encode_text(["Ada", "Al", "Bo"], width=1))
    truth = np.zeros(27)
    truth[[1, 2]] = 2, 1
    release = jax.jit(jax.vmap(lambda key: search(key, codes).value))
    off = np.abs(np.asarray(release(keys()), float).reshape(DRAWS, -1) - truth).max(axis=1)
    return off, lambda confidence: float(search.error(confidence=confidence, simultaneous=True))


@pytest.mark.parametrize("row", [count, histogram, contingency, bounded_sum, workload, names])
def test_an_error_holds_as_often_as_it_says_and_not_much_more_often(row):
    off, error = row()
    assert np.sum(off > error(0.9)) <= MOST_MISSES
    # Power: a bound at a lower confidence is refuted, so this one is not much too large.
    assert np.sum(off > error(0.7)) > MOST_MISSES
    assert error(0.5) < error(0.9) < error(0.99)


def test_quantiles_keep_their_error():
    """The bound adds up over candidates, so it is loose: a smaller one holds as well."""
    scores = queries.quantile_scores((0.25, 0.75), grid=range(30))
    found = scores(jnp.arange(30.0))
    mechanism = queries.select_each(scores.sensitivity(), epsilon=2.0, count=2)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: mechanism(key, found).value))(keys()))
    missed = -np.asarray(found, float) / scores.denominator
    off = np.stack([row[x] - row.min() for row, x in zip(missed, drawn.T, strict=True)]).max(axis=0)
    assert np.sum(off > scores.error(mechanism, confidence=0.9)) <= MOST_MISSES
    # Power: a tenth of the bound at confidence 1/2 is refuted.
    assert np.sum(off > scores.error(mechanism, confidence=0.5) / 10) > MOST_MISSES


def test_a_table_of_mwem_keeps_its_error():
    """The bound is loose, so it holds for every draw here; `test_mwem` has a tight case."""
    matrix = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]])
    truth = queries.linear_workload(matrix)(jnp.zeros(100, int))
    mechanism = queries.mwem(queries.linear_workload(matrix), 20.0, rounds=3, records=100)
    tables = jax.jit(jax.vmap(lambda key: mechanism(key, truth).value.average))(keys()[:100])
    off = np.abs(np.asarray(tables, float) @ matrix.T - np.asarray(truth)).max(axis=1)
    assert np.all(off <= float(mechanism.error(confidence=0.9)))
    assert np.all(off > 1)  # The first table is uniform, so no average is exact.


def test_a_record_at_the_edge_of_a_ball_is_within_the_error():
    """It is scaled into the ball by more than rounding, and all records at once go one way."""
    n = 2000
    edge = jnp.full((n, 2), 2.0**-0.5)
    query = second_moments_query(lambda x: x, dims=2, capacity=n)
    off = np.max(
        np.abs(
            query.unit * np.asarray(query(edge))
            - n
            * np.array([1, 0.5, 0.5])[[0, 1, 1, 1, 1, 1]]
            * np.array([1, 2**0.5, 2**0.5, 1, 1, 1])
        )
    )
    exact = dpjax.laplace(query.sensitivity(), 1e9)
    error = query.error(exact, confidence=0.95, simultaneous=True)
    assert query.rounding * query.unit < off <= error < 3 * off
