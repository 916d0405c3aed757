"""Records in parts: the same bits as all at once, and nothing is read before it is paid for."""

import jax
import numpy as np
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax._core._records import PaddedRecords, Parts
from dpjax.mechanisms._several_selections import select_each
from tables import for_each

KEY = dpjax.random.seeded_key(3)
ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
N, SLOTS, ROWS = 1000, 1500, 64


def in_parts(records, rows=ROWS, slots=SLOTS):
    """The same records in parts, the last of which is partly empty."""
    n = len(jax.tree.leaves(records)[0])

    def part(start):
        here = jax.tree.map(lambda x: x[start : start + rows], records)
        return queries.padded_records(here, capacity=rows)

    def each(function):
        # Two processes may have the parts.
        yield function(part(start) for start in range(0, n, 2 * rows))
        yield function(part(start) for start in range(rows, n, 2 * rows))

    return Parts(each, part(0), slots)


GENERATOR = np.random.default_rng(0)
NUMBERS = GENERATOR.normal(50, 20, N)
LARGE = GENERATOR.integers(-(2**40), 2**40, N)
GROUPED = {"g": GENERATOR.integers(0, 4, N), "x": NUMBERS}
TEXTS = {"g": np.array(["a", "b", "ä"])[GENERATOR.integers(0, 3, N)], "x": NUMBERS}
VECTORS = GENERATOR.normal(size=(N, 3))
BOUNDS = {"lower": 0, "upper": 100}

QUERIES = {
    "count": (queries.counting_query(lambda x: x > 50), NUMBERS),
    "histogram": (queries.histogram_query([0, 20, 50, 90]), NUMBERS),
    "sum": (queries.sum_query(**BOUNDS, capacity=SLOTS), NUMBERS),
    "sum of 64 bits": (queries.sum_query(lower=0, upper=2**40, capacity=SLOTS), LARGE),
    "by group": (
        queries.by(queries.sum_query(**BOUNDS, capacity=SLOTS), column="g", keys=range(3)),
        GROUPED,
    ),
    "by text": (queries.by(queries.histogram_query([0, 50, 99]), column="g", keys=["b"]), TEXTS),
}


def mechanism_for(query):
    return dpjax.laplace(query.sensitivity("l1", relation=ADD), 1.0)


@pytest.mark.parametrize("name", QUERIES)
def test_parts_release_the_bits_of_all_records_at_once(name):
    query, records = QUERIES[name]
    private = dpjax.privatize(query, mechanism_for(query))
    whole = private(KEY, queries.padded_records(records, capacity=SLOTS))
    for rows in (ROWS, N):
        parts = private(KEY, in_parts(records, rows))
        np.testing.assert_array_equal(parts.value, whole.value)
        assert parts.guarantee == whole.guarantee
        assert repr(parts) == repr(whole)


STATISTICS = {
    "mean": (queries.private_mean, NUMBERS, BOUNDS),
    "variance": (queries.private_variance, NUMBERS, BOUNDS),
    "mean by group": (queries.private_mean, GROUPED, {**BOUNDS, "by": {"g": range(3)}}),
    "covariance": (queries.private_covariance, VECTORS, {"radius": 4.0}),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_parts_have_the_bits_of_all_records(name):
    private, records, options = STATISTICS[name]
    options = {**options, "epsilon": 1.0, "relation": ADD}
    whole = private(KEY, queries.padded_records(records, capacity=SLOTS), **options)
    parts = private(KEY, in_parts(records), **options)
    jax.tree.map(np.testing.assert_array_equal, parts.value, whole.value)


@pytest.mark.parametrize("by_group", [False, True], ids=["alone", "by group"])
def test_quantiles_of_parts_have_the_bits_of_all_records(by_group):
    query = queries.quantile_scores([0.1, 0.5], grid=np.arange(101))
    records = NUMBERS
    if by_group:
        query, records = queries.by(query, column="g", keys=range(4)), GROUPED
    sensitivity = query.sensitivity(query.norms[0], relation=ADD)
    private = dpjax.privatize(query, select_each(sensitivity, 1.0, count=2))
    whole = private(KEY, queries.padded_records(records, capacity=SLOTS))
    np.testing.assert_array_equal(private(KEY, in_parts(records)).value, whole.value)


def test_scores_of_all_parts_must_fit():
    """One part alone is small enough. Otherwise scores would wrap, and move far."""
    query = queries.quantile_scores(0.123456, grid=[0, 1])
    sensitivity = query.sensitivity("linf", relation=ADD)
    private = dpjax.privatize(query, select_each(sensitivity, 1.0, count=1))
    with pytest.raises(ValueError, match="too many"):
        private(KEY, in_parts(NUMBERS, slots=2**30))


def test_nothing_is_read_before_it_is_paid_for(tmp_path):
    query, records = QUERIES["count"]
    private, reads = dpjax.privatize(query, mechanism_for(query)), []
    given = in_parts(records)

    def each(function):
        reads.append(1)
        return given.each(function)

    counted = Parts(each, given.like, given.slots)
    with dpjax.Ledger(tmp_path / "a.db", epsilon=1.0, relation=ADD) as ledger:
        first = private(KEY, counted, name="visits")
        assert (len(reads), ledger.spent.epsilon) == (1, 1.0)
        again = private(dpjax.random.seeded_key(9), counted, name="visits")
        assert again.value == first.value
        with pytest.raises(dpjax.BudgetExceededError):
            private(dpjax.random.seeded_key(9), counted)
    assert len(reads) == 1


@for_each("rows", [ROWS, N])
def test_more_records_than_are_possible_are_refused(rows):
    query, records = QUERIES["count"]
    private = dpjax.privatize(query, mechanism_for(query))
    with pytest.raises(
        ValueError, match="enough for every possible table, got most_rows=999 for 1000"
    ):
        private(KEY, in_parts(records, rows, slots=N - 1))


def test_only_queries_take_parts_and_only_where_their_number_is_private():
    parts = in_parts(NUMBERS)
    bare = dpjax.laplace(dpjax.assume_sensitivity(1.0, norm="l1", relation=ADD), 1.0)
    with pytest.raises(TypeError, match="target must be a query of dpjax"):
        dpjax.privatize(lambda x: x.records.sum(), bare)(KEY, parts)
    query = queries.by_person(queries.counting_query(), person="p", rows=2)
    of_people = dpjax.laplace(query.sensitivity("l1", relation=ADD), 1.0)
    with pytest.raises(TypeError, match="a person may be in several parts"):
        dpjax.privatize(query, of_people)(KEY, in_parts({"p": np.arange(N)}))
    query = queries.histogram_query([0, 1])
    replace = dpjax.laplace(query.sensitivity("l1", relation=NeighboringRelation.REPLACE_ONE), 1.0)
    with pytest.raises(ValueError, match="must be add-or-remove-one for a database in parts"):
        dpjax.privatize(query, replace)(KEY, parts)


def test_no_part_without_records_is_needed():
    query = queries.counting_query()
    nobody = PaddedRecords(np.zeros(4), np.zeros(4, bool))
    parts = Parts(lambda function: iter([function(iter([]))]), nobody, 10)
    sharp = dpjax.laplace(query.sensitivity("l1", relation=ADD), 1e6)
    assert dpjax.privatize(query, sharp)(KEY, parts).value == 0
