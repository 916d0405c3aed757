"""Missing numbers: statistics beside NumPy's nan-functions, and all neighbors of small domains."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax.queries._groups import of_complete
from dpjax.queries._padded_records import complete, may_miss, present_records
from dpjax.queries._second_moments import _line_query, second_moments_query
from dpjax.queries._sums import centered_sums
from tables import for_each

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
ORDS = {"l1": 1, "l2": 2, "linf": np.inf}
KEY = dpjax.random.seeded_key(5)
N = 4000


def dirty(shape=(N,)):
    """Numbers around 70 of 100, and a fifth of the records misses one."""
    generator = np.random.default_rng(0)
    x = generator.uniform(45, 95, shape).astype("float32")
    x[generator.random(shape) < 0.2] = np.nan
    return x


SHARP = {"epsilon": 1e4, "relation": REPLACE}


def test_a_mean_is_that_of_those_who_answered():
    x = dirty()
    found = queries.private_mean(KEY, x, lower=0, upper=100, **SHARP)
    assert float(found.value) == pytest.approx(np.nanmean(x, dtype=float), abs=0.01)
    low, high = found.interval(0.999)
    assert low <= np.nanmean(x, dtype=float) <= high
    # As a record at the lower end it counts if that is asked for.
    at_lower = queries.private_mean(KEY, x, lower=0, upper=100, missing="lower", **SHARP)
    assert float(at_lower.value) == pytest.approx(np.nan_to_num(x).mean(), abs=0.01)
    vectors = dirty((N, 2))
    whole = vectors[~np.isnan(vectors).any(axis=1)]
    both = queries.private_mean(KEY, vectors, lower=0, upper=100, **SHARP)
    np.testing.assert_allclose(both.value, whole.mean(axis=0), atol=0.01)


def test_a_variance_is_that_of_those_who_answered():
    x = dirty()
    found = queries.private_variance(KEY, x, lower=0, upper=100, **SHARP)
    assert float(found.value["mean"]) == pytest.approx(np.nanmean(x, dtype=float), abs=0.1)
    assert float(found.value["variance"]) == pytest.approx(np.nanvar(x, dtype=float), abs=1)
    low, high = found.interval(0.999)
    assert low["variance"] <= np.nanvar(x, dtype=float) <= high["variance"]


def test_statistics_of_vectors_are_those_of_complete_records():
    x = (dirty((N, 2)) - 70) / 30
    x[:, 1] += x[:, 0]
    whole = x[~np.isnan(x).any(axis=1)]
    ball = {"radius": 4.0, **SHARP}
    spread = np.cov(whole.T, ddof=0)
    found = queries.private_covariance(KEY, x, **ball).value
    np.testing.assert_allclose(found["covariance"], spread, atol=0.01)
    np.testing.assert_allclose(found["mean"], whole.mean(axis=0), atol=0.01)
    first = np.linalg.eigh(spread)[1][:, -1]
    component = queries.private_pca(KEY, x, components=1, **ball).value["components"][0]
    assert abs(np.dot(component, first)) == pytest.approx(1, abs=1e-3)
    line = queries.private_linear_regression(
        KEY, {"x": x[:, :1], "y": x[:, 1]}, x_radius=4.0, y_radius=4.0, **SHARP
    ).value
    slope, intercept = np.polyfit(whole[:, 0], whole[:, 1], 1)
    assert float(line["weights"][0]) == pytest.approx(slope, abs=0.02)
    assert float(line["intercept"]) == pytest.approx(intercept, abs=0.02)
    clusters = queries.private_k_means(
        KEY, x, clusters=1, radius=4.0, epsilon=50.0, delta=1e-6, iterations=1
    ).value
    assert float(clusters["counts"][0]) == pytest.approx(len(whole), abs=20)
    np.testing.assert_allclose(clusters["centers"][0], whole.mean(axis=0), atol=0.05)


def test_quantiles_are_those_of_those_who_answered():
    x = dirty()
    found = queries.private_quantiles(KEY, x, [0.1, 0.5], lower=0, upper=100, epsilon=100.0)
    np.testing.assert_allclose(found.value, np.nanquantile(x, [0.1, 0.5]), atol=0.3)
    at_lower = queries.private_quantiles(
        KEY, x, 0.1, lower=0, upper=100, epsilon=100.0, missing="lower"
    )
    assert float(at_lower.value) < 1


def test_a_sum_is_that_of_those_who_answered():
    x = dirty()
    for low, high in ((0, 100), (50, 100), (-100, 0)):
        query = queries.sum_query(lower=low, upper=high, capacity=N)
        assert float(query(x)) == pytest.approx(np.nansum(np.clip(x, low, high)), rel=1e-3, abs=9)
    at_lower = queries.sum_query(lower=50, upper=100, capacity=N, missing="lower")
    truth = np.clip(np.nan_to_num(x, nan=50), 50, 100).sum()
    assert float(at_lower(x)) == pytest.approx(truth, rel=1e-3)


def test_groups_have_the_answers_of_their_own():
    x, g = dirty(), np.arange(N) % 3
    table = {"g": g, "x": x}
    found = queries.private_mean(KEY, table, lower=0, upper=100, by={"g": [0, 1]}, **SHARP).value
    expected = [np.nanmean(x[g == j], dtype=float) for j in (0, 1)]
    np.testing.assert_allclose(found, expected, atol=0.05)


@for_each("column", [pd.Series([1, None, 3], dtype="Int64"), np.float64([1, np.nan, 3])])
def test_columns_of_tables_and_of_64_bits_may_miss_numbers(column):
    found = queries.private_mean(KEY, column, lower=0, upper=4, epsilon=1e5).value
    assert float(found) == pytest.approx(2, abs=0.05)


@for_each(
    "one",
    [
        np.float32([1, 2, 3]),
        np.int32([1, 2, 3]),
        pd.Series([1, 2, 3], dtype="Int64"),
        np.float64([1, 2, 3]),
    ],
)
def test_the_dtype_decides_and_not_the_numbers(one):
    """Whether a number is missing is private: the same law of the release with and without one."""
    floats = "float" in str(getattr(one, "dtype", "")) or "Int64" in str(one.dtype)
    assert may_miss(present_records(one)[0]) == floats
    if not floats:
        return
    other = one.copy()
    other[1] = np.nan if "float" in str(one.dtype) else None
    laws = []
    for column in (one, other):
        release = queries.private_mean(KEY, column, lower=0, upper=4, epsilon=1.0)
        laws.append((release.guarantee, release.accuracy.facts, release.accuracy.measured["n"]))
    assert repr(laws[0]) == repr(laws[1])
    assert laws[0][2] is None


DOMAIN = np.float32([np.nan, -1, 0, 0.5, 2, np.inf, -np.inf])
SMALL = {
    "sum": queries.sum_query(lower=0.5, upper=2, capacity=4)._integers,
    "wide sum": queries.sum_query(lower=-1, upper=2, capacity=4)._integers,
    "mean": of_complete(centered_sums(-1.0, 2.0, 4, 1)),
    "variance": of_complete(second_moments_query(lambda x: x[:, None] / 2, dims=1, capacity=4)),
    "line": of_complete(
        _line_query(lambda x: (x[:, None] / 2, x[:, None] / 4 + 0.5), dims=1, capacity=4)
    ),
    "buckets": of_complete(queries.histogram_query([-1, 0, 2], outliers="clip")._integers),
}


@pytest.mark.parametrize("name", SMALL)
def test_no_record_that_comes_to_miss_a_number_moves_further(name):
    """All databases of two slots and all that differ in one of them, under both relations."""
    query = SMALL[name]
    rows = [*((x, True) for x in DOMAIN), (np.float32(0), False)]
    slots = np.array(list(itertools.product(range(len(rows)), repeat=2)))
    numbers, there = (np.array([row[k] for row in rows])[slots] for k in (0, 1))
    values = jax.vmap(lambda x, p: query(queries.PaddedRecords(x, p)))
    found = np.asarray(values(numbers, there), np.int64).reshape(len(slots), -1)
    same = slots[:, None, 1] == slots[None, :, 1]
    present = there[:, 0]
    pairs = {
        REPLACE: same & present[:, None] & present[None],
        ADD: same & present[:, None] & ~present[None],
    }
    for relation, chosen in pairs.items():
        moved = (found[:, None] - found[None])[chosen]
        for norm, order in ORDS.items():
            farthest = np.linalg.norm(moved, order, axis=1).max()
            assert farthest <= query.reach(norm, relation)


@for_each("case", [(0.5, 2.0, 2.0), (-1.0, 2.0, 3.0), (-3.0, -1.0, 3.0)])
def test_a_sum_of_answers_moves_as_far_as_one_that_appears(case):
    """And it attains that: from missing to the end that is further from 0."""
    low, high, moved = case
    query = queries.sum_query(lower=low, upper=high, capacity=4)
    assert query.sensitivity("l1").value == moved
    kept = queries.sum_query(lower=low, upper=high, capacity=4, missing="lower")
    assert kept.sensitivity("l1").value == high - low


def test_a_record_is_complete_if_all_its_numbers_are_there():
    records = {"x": jnp.array([[1, 2], [jnp.nan, 1], [1, jnp.inf]]), "k": jnp.array([1, 2, 3])}
    assert complete(records).tolist() == [True, False, True]
    assert bool(complete({"k": jnp.array([1, 2])}))


def test_another_word_is_refused():
    for missing in ("center", "mean", None):
        with pytest.raises(ValueError, match="missing must be"):
            queries.private_mean(KEY, dirty(), lower=0, upper=1, epsilon=1.0, missing=missing)
