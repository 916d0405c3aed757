"""Counts and workloads against NumPy; how far a record moves them, by enumeration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax._core._pytree import TreeSpec
from dpjax._tracing._programs import Program
from dpjax.queries import _workload
from query_table import ATTRIBUTES, CASES, MATRIX

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
ORDS = {"l1": 1, "l2": 2, "linf": np.inf}
cases = pytest.mark.parametrize("name", CASES)


@functools.cache
def values_of_one(name):
    """The value on a database of one record, for each of some."""
    query, records, *_ = CASES[name]
    one_each = jax.tree.map(lambda x: jnp.asarray(x)[:, None], records)
    return np.asarray(jax.vmap(query)(one_each)).reshape(len(jax.tree.leaves(one_each)[0]), -1)


@cases
def test_no_record_reaches_further_and_one_reaches_as_far(name):
    query, _, replaced, added = CASES[name]
    values = values_of_one(name)
    for norm, order in ORDS.items():
        lengths = np.linalg.norm(values, order, axis=1)
        apart = np.linalg.norm(values[:, None] - values[None], order, axis=2)
        for relation, found, stated in (
            (REPLACE, apart.max(), replaced),
            (ADD, lengths.max(), added),
        ):
            sensitivity = query.sensitivity(norm, relation=relation)
            assert sensitivity.relation is relation
            assert found <= sensitivity.value == pytest.approx(found, rel=1e-12)
            if norm == "l1":
                assert sensitivity.value == stated[0]
            if norm == "l2":
                assert sensitivity.value == pytest.approx(stated[1] ** 0.5, rel=1e-12)


@cases
def test_records_add_up(name):
    """So that what was enumerated for one record holds in any database."""
    query, records, *_ = CASES[name]
    values = values_of_one(name)
    chosen = np.random.default_rng(0).integers(0, len(values), 500)
    database = jax.tree.map(lambda x: jnp.asarray(x)[chosen], records)
    got = np.asarray(query(database))
    assert got.dtype == np.int32
    assert got.shape == query.shape
    np.testing.assert_array_equal(got.ravel(), values[chosen].sum(axis=0))


@cases
def test_empty_slots_count_nowhere(name):
    query, records, *_ = CASES[name]
    n = len(jax.tree.leaves(records)[0])
    padded = queries.padded_records(records, capacity=n + 3)
    total = values_of_one(name).sum(axis=0).reshape(query.shape)
    np.testing.assert_array_equal(query(padded), total)
    nobody = queries.PaddedRecords(padded.records, jnp.zeros(n + 3, bool))
    assert not np.any(query(nobody))


def test_buckets_are_those_of_numpy():
    """A number on an edge is in the bucket above it, and one on the last edge in the last bucket.

    What else has a last edge: one that is infinite, edges that a narrow dtype makes equal, outliers
    that are clipped, and a histogram of every group.
    """
    edges = np.linspace(-2, 2, 42, dtype="float32")  # None is 0: next to it are subnormal numbers.
    beside = [np.nextafter(edges, np.float32(end)) for end in (-np.inf, np.inf)]
    x = np.random.default_rng(0).normal(size=1000).astype("float32")
    x = np.concatenate([x, edges, *beside])
    counts = queries.histogram_query(edges)(jnp.asarray(x))
    np.testing.assert_array_equal(counts, np.histogram(x, edges)[0])
    assert queries.histogram_query(edges)(jnp.asarray(edges)).tolist() == [1] * 40 + [2]
    assert queries.histogram_query(edges, outliers="clip")(edges).tolist() == [1] * 40 + [2]
    to_the_end = queries.histogram_query([0, 1, np.inf])
    assert to_the_end(np.float32([0.5, 1, np.inf, np.nan, -1])).tolist() == [1, 2]
    narrow = queries.histogram_query([0, 2048, 2049])  # The last two are one in float16.
    assert narrow(np.float16([0, 2047, 2048, 2050])).tolist() == [2, 1]
    grouped = queries.by(queries.histogram_query([0, 1, 2]), column="sex", keys=[0, 1])
    people = {"sex": np.array([0, 1, 1]), "age": np.array([2.0, 2.0, 0.0])}
    assert grouped(people).tolist() == [[0, 1], [1, 1]]
    codes = np.random.default_rng(1).integers(0, 10**6, 2000)
    np.testing.assert_array_equal(
        queries.histogram_query(10**6)(jnp.asarray(codes, "int32")),
        np.bincount(codes, minlength=10**6),
    )


def test_outliers_that_are_clipped_count_at_their_end():
    """So that every record counts once: NaN, and what is no code, in the first bucket."""
    low, high = (jnp.asarray([end, end * 9, np.nan], "float32") for end in (-np.inf, np.inf))
    edges = queries.histogram_query([-1, 0, 0.5, 2], outliers="clip")
    codes = queries.histogram_query(3, outliers="clip")
    assert edges(low).tolist() == codes(low).tolist() == codes(high).tolist() == [3, 0, 0]
    assert edges(high).tolist() == [1, 0, 2]
    assert edges(jnp.arange(-3, 4)).tolist() == [3, 1, 3]
    assert codes(jnp.arange(-3, 6)).tolist() == [4, 1, 4]


def test_floats_that_are_whole_numbers_are_codes(x64):
    """One missing value makes floats of a column of integers: that must not be refused."""
    strange = [np.nan, np.inf, -np.inf, 0.5, -1, 3, 6e4]
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        column = jnp.asarray([0, 1, 2, 2, *strange], dtype)
        assert queries.histogram_query(3)(column).tolist() == [1, 1, 2]
        assert queries.linear_workload([[1, 1, 1]])(column).tolist() == [4]
        people = {"a": column, "b": jnp.zeros(11, int)}
        both = {"a": 3, "b": 2}
        assert queries.contingency_query(both)(people).tolist() == [[1, 0], [1, 0], [2, 0]]
        assert queries.marginal_workload(both, [("a",)])(people).tolist() == [1, 1, 2]
    # From here on a float32 stands for several integers.
    last = jnp.asarray([2**24 - 1, 2**24], "float32")
    assert queries.histogram_query(2**24 + 1)(last)[-2:].tolist() == [1, 0]


def test_a_column_with_a_missing_value_is_a_column_of_codes():
    counted = queries.contingency_query({"a": 2, "b": 2})
    table = pd.DataFrame({"a": [0, 1, None, 1], "b": [1, 0, 1, 1]})
    assert counted(table).tolist() == [[0, 1], [1, 1]]


def test_a_column_of_any_integers_counts(x64):
    counted = queries.histogram_query(300)
    assert counted(jnp.array([-1, 127], "int8"))[127] == 1
    assert counted(jnp.array([2**64 - 1, 5], "uint64")).sum() == 1
    assert counted(jnp.array([True, False])).tolist()[:3] == [1, 1, 0]


def test_where_columns_are_too_many_to_compare_twice_the_longest_counts(monkeypatch):
    monkeypatch.setattr(_workload, "_MOST_COMPARED", 10)
    # A matrix of its own: what is known of others was computed with the real limit.
    workload = queries.linear_workload(np.asarray(MATRIX)[::-1])
    assert [workload.sensitivity(norm).value for norm in ORDS] == [8, 2 * 10**0.5, 4]


def test_answers_are_products_of_the_table():
    for name in ("matrix", "marginals"):
        workload, records, *_ = CASES[name]
        database = jax.tree.map(jnp.asarray, records)
        table = jnp.asarray(workload.table(database), "float32")
        assert table.shape == workload.cells
        np.testing.assert_array_equal(jax.jit(workload.answers)(table), workload(database))
        rows = np.asarray(jax.jit(jax.vmap(workload.row))(jnp.arange(workload.shape[0])))
        np.testing.assert_array_equal(np.tensordot(rows, table, table.ndim), workload(database))
        weights = jnp.arange(1.0, workload.shape[0] + 1)
        np.testing.assert_allclose(
            jax.jit(workload.combination)(weights), np.tensordot(weights, rows, 1), rtol=1e-6
        )
        if name == "matrix":
            np.testing.assert_array_equal(rows, MATRIX)


def test_marginals_of_one_size_are_one_sum_elsewhere(monkeypatch):
    """Sums of whole numbers are exact. Marginals are of four sizes, and list attributes anyhow."""
    marginals = ["a", "ca", "d", "ab", "ba", "bcad"]
    workload = queries.marginal_workload(
        {"a": 2, "b": 3, "c": 4, "d": 2}, [tuple(names) for names in marginals]
    )

    def elsewhere(*operands, default, **_):
        return default(*operands)

    monkeypatch.setattr(_workload.lax, "platform_dependent", elsewhere)
    table = np.arange(48, dtype=np.float32).reshape(workload.cells)
    expected = [np.einsum(f"abcd->{names}", table).ravel() for names in marginals]
    found = jax.jit(workload.answers)(table)
    np.testing.assert_array_equal(found, np.concatenate(expected))
    rows = np.asarray(jax.jit(jax.vmap(workload.row))(jnp.arange(workload.shape[0])))
    np.testing.assert_array_equal(np.tensordot(rows, table, 4), found)


def test_answers_beyond_the_integers_stop_at_their_end():
    """And do not wrap, which would move neighbors apart."""
    steep = queries.linear_workload([[2**15, 0], [-(2**15), 1]])
    records = jnp.zeros(70_000, "int32")
    assert steep(records).tolist() == [2**31 - 2, -(2**31 - 2)]
    assert steep(records[:1]).tolist() == [2**15, -(2**15)]


def test_all_buckets_cost_one_epsilon(key):
    query = queries.histogram_query(1000)
    records = queries.padded_records(np.arange(5000) % 1000, capacity=5000)
    for relation, scale in ((REPLACE, 4), (ADD, 2)):
        mechanism = dpjax.laplace(query.sensitivity(relation=relation), epsilon=0.5)
        assert mechanism.scale == scale
        release = dpjax.privatize(query, mechanism)(key, records)
        assert release.guarantee.epsilon == 0.5
        assert release.guarantee.relation is relation
        noise = np.asarray(release.value) - 5
        # The average of 1000 |noise| of scale b varies by b / sqrt(1000).
        assert np.abs(noise).mean() == pytest.approx(scale, rel=5 / 1000**0.5)


@pytest.mark.slow
def test_an_error_holds_for_all_buckets_at_once():
    query = queries.histogram_query(1000)
    mechanism = dpjax.laplace(query.sensitivity(), epsilon=0.5)
    keys = jax.random.split(dpjax.random.seeded_key(1), 2000)
    release = jax.jit(jax.vmap(lambda key: mechanism(key, jnp.zeros(1000, "int32")).value))
    worst = np.abs(np.asarray(release(keys))).max(axis=1)
    error = query.error(mechanism, confidence=0.9)
    # Of 2000 releases 200 miss it, 4 deviations are 54; it is not much too large either.
    assert 130 < (worst > error).sum() < 254
    assert error == pytest.approx(4 * -np.log(1 - 0.9 ** (1 / 1000)), rel=0.02)


def present(booleans):
    """How many of 4 slots are taken, by booleans of any shape."""
    return queries.counting_query()(queries.PaddedRecords(jnp.zeros(4), booleans))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: queries.histogram_query(0), ValueError, "buckets must be"),
        (lambda: queries.histogram_query(1, outliers="bin"), ValueError, "outliers must be"),
        (lambda: queries.histogram_query(2**31 - 1), ValueError, "buckets must be"),
        (lambda: queries.histogram_query(1.5), TypeError, "buckets must be"),
        (lambda: queries.histogram_query([1, 1]), ValueError, "increasing edges"),
        (lambda: queries.histogram_query([1, np.nan]), ValueError, "increasing edges"),
        (lambda: queries.histogram_query(["a", "b"]), TypeError, "increasing edges"),
        (lambda: queries.histogram_query(3)(jnp.ones((3, 1), int)), ValueError, "numbers"),
        (lambda: queries.counting_query().sensitivity(), ValueError, "no record can change"),
        (lambda: queries.counting_query(3), TypeError, "predicate"),
        (lambda: queries.counting_query(lambda x: x)(jnp.ones(3)), TypeError, "boolean"),
        (lambda: queries.counting_query(lambda x: None)(jnp.ones(3)), TypeError, "boolean"),
        (lambda: queries.counting_query(lambda x: (x, x))(jnp.ones(3)), TypeError, "boolean"),
        (lambda: queries.contingency_query({}), ValueError, "one or more names"),
        (lambda: queries.contingency_query({"a": 1}), ValueError, "at least 2"),
        (lambda: queries.contingency_query({"a": 2**16, "b": 2**16}), ValueError, "cells"),
        (lambda: queries.contingency_query({"a": 2})({"b": jnp.ones(3, int)}), ValueError, "colum"),
        (lambda: queries.linear_workload([[0.5]]), TypeError, "integers"),
        (lambda: queries.linear_workload([[0]]), ValueError, "not all 0"),
        (lambda: queries.linear_workload([1, 2]), ValueError, "shape"),
        (lambda: queries.linear_workload([[2**15 + 1]]), ValueError, "integers from"),
        (lambda: queries.marginal_workload(ATTRIBUTES, []), ValueError, "at least one"),
        (lambda: queries.marginal_workload(ATTRIBUTES, ["a"]), ValueError, "distinct"),
        (lambda: queries.marginal_workload(ATTRIBUTES, [("a", "a")]), ValueError, "distinct"),
        (lambda: queries.marginal_workload(ATTRIBUTES, [("z",)]), ValueError, "distinct"),
        (lambda: present(jnp.ones((4, 3), bool)), ValueError, "one boolean for each of 4 slots"),
        (lambda: present(jnp.ones((4, 1), bool)), ValueError, "one boolean for each of 4 slots"),
        (lambda: present(jnp.ones(3, bool)), ValueError, "common leading axis"),
        (lambda: present(jnp.ones((), bool)), ValueError, "common leading axis"),
        (lambda: queries.padded_records(np.ones(3), capacity=2), ValueError, "capacity"),
        (lambda: queries.padded_records(np.float32(1), capacity=2), ValueError, "leading axis"),
    ],
)
def test_what_is_public_and_wrong_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_a_predicate_closes_over_is_looked_at_anew():
    """A ledger would answer the new question with the release of the old one."""
    limit, records = 18, jax.ShapeDtypeStruct((5,), "float32")
    counted = queries.counting_query(lambda age: age >= limit)
    asked = Program.trace("target", counted, records).fingerprint
    limit = 65
    assert Program.trace("target", counted, records).fingerprint != asked


def test_missing_values_decide_on_no_dtype():
    """Which is public, and would be refused by a histogram of codes."""
    told = set()
    for column in ([1, 2, 3], [1, None, 3]):
        nullable = pd.Series(column, dtype="Int64")
        slots = queries.padded_records({"x": nullable}, capacity=4)
        told.add(TreeSpec.of(slots))
        known = [x for x in column if x]
        expected = [known.count(code) for code in range(4)]
        assert queries.histogram_query(4)(slots.records["x"]).tolist()[1:] == expected[1:]
        assert queries.histogram_query(4)(nullable).tolist() == expected
    assert len(told) == 1


def test_edges_are_those_that_were_given():
    edges = np.array([0.0, 1.0, 2.0])
    counted = queries.histogram_query(edges)
    edges[:] = 9, 10, 11
    assert counted(jnp.array([0.5, 1.5, 1.7])).tolist() == [1, 2]


def test_a_database_without_records_is_padded():
    nobody = queries.padded_records(np.zeros((0, 2)), capacity=3)
    assert nobody.records.shape == (3, 2)
    assert not nobody.present.any()


def test_a_release_shows_no_private_number_of_records(key):
    """Whatever the target is: one of the caller's too, unless the slots are public by name."""
    counted, scores = queries.counting_query(), queries.quantile_scores(0.5, grid=[0, 1])
    bound = dpjax.assume_sensitivity(1.0, norm="l1", relation=ADD)
    records = np.ones(4, "float32")
    for target, mechanism in (
        (counted, dpjax.laplace(counted.sensitivity(relation=ADD), 1.0)),
        (scores, queries.select_each(scores.sensitivity(relation=ADD), 1.0, count=1)),
        (lambda x: jnp.float32(len(x)), dpjax.laplace(bound, 1.0)),
    ):
        private = dpjax.privatize(target, mechanism)
        for plain in (records, {"x": records}, [queries.padded_records(records, capacity=4)]):
            with pytest.raises(ValueError, match="padded_records"):
                private(key, plain)
    slots = dpjax.assume_sensitivity(1.0, norm="l1", relation=ADD, n=4)
    private = dpjax.privatize(jnp.sum, dpjax.laplace(slots, 1.0))
    assert private(key, records).guarantee.relation is ADD


def test_the_number_of_records_is_in_no_shape(compilations):
    counted = queries.counting_query()
    mechanism = dpjax.laplace(counted.sensitivity(relation=ADD), epsilon=1.0)
    private = dpjax.privatize(counted, mechanism)

    def release(n):
        database = queries.padded_records(np.ones(n, "float32"), capacity=8)
        return private(dpjax.random.seeded_key(n), database).value

    release(3)
    assert compilations(lambda: [release(n) for n in (0, 1, 8)]) == []
