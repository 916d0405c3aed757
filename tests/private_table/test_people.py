"""Statistics of people with several rows: all rows of a person move them by what noise covers."""

import collections
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries
from dpjax.queries import _group_keys, _k_means
from dpjax.queries._people import integers_by
from dpjax.queries._sums import centered_sums
from dpjax.queries._truncation import Truncation
from dpjax.tables import _asked_table, _counts, _relations
from dpjax.tables._distinct import CELL, WORDS, DistinctCount, words_of
from tables import for_each

REPLACE, ADD = dpjax.NeighboringRelation
KEY = dpjax.random.seeded_key(0)
# So large that the noise is far below what a person moves. That of counts rounds to 0, except with
# a probability below 1e-20.
EPSILON, OF_COUNTS = 1e6, 100.0
SLOTS = 8
G = ["a", "b", "c", "d"]
LOW, HIGH = (0.0, "a"), (10.0, "a")
# The rows of one person between those of another. Of each only two count, in two groups.
OTHERS = [(5.0, "a"), (5.0, "b")]
PEOPLE = [
    [],
    [LOW],
    [HIGH, HIGH, HIGH],
    [LOW, LOW],
    [(10.0, "a"), (10.0, "b"), (10.0, "a"), (10.0, "b"), (10.0, "c")],
    [(0.0, "c"), (0.0, "c"), (0.0, "d"), (0.0, "d")],
    [(0.0, "a"), (0.0, "b"), (0.0, "b"), (0.0, "a")],
    [(np.nan, "a"), (99.0, "z"), (99.0, "b"), (-5.0, None), (99.0, "b")],
    [(1.0, "a"), (1.0, "a"), (2.0, "a"), (3.0, "a")],
    [(1.0, "c"), (2.0, "c")],
    [(-9.0, "d")],
    [(9.0, "d"), (9.0, "d"), (9.0, "b"), (9.0, "a"), (9.0, "b"), (9.0, "c")],
    [(99.0, "a"), (99.0, "b")],
    [(99.0, "c"), (99.0, "d")],
]


def table(rows, relation, **of_people):
    who, x, g = zip(*rows, strict=True)
    frame = {"id": np.array(who), "x": np.array(x, float), "g": np.array(g, object)}
    frame["y"] = 10 - frame["x"]
    frame["y"] = 10 - frame["x"]
    return dpjax.PrivateTable(
        frame, most_rows=SLOTS, relation=relation, person="id", rows=2, **of_people
    )


STATISTICS = {
    "count": (lambda t, **a: t.count(**a), {}),
    "count by": (lambda t, **a: t.count(by={"g": G}, **a), {}),
    "count in two groups": (lambda t, **a: t.count(by={"g": G}, **a), {"groups": {"g": 2}}),
    "count_distinct": (lambda t, **a: t.count_distinct("x", **a), {}),
    "count_distinct by": (lambda t, **a: t.count_distinct("x", by={"g": G}, **a), {}),
    "count_distinct in one entry": (
        lambda t, **a: t.count_distinct("g", **a),
        {"groups": {"g": 1}},
    ),
    "histogram": (lambda t, **a: t.histogram("x", [0, 5, 10], **a), {}),
    "histogram of sums": (
        lambda t, **a: t.histogram("x", [-5, 15, 200], per_person="sum", **a),
        {},
    ),
    "sum of sums": (lambda t, **a: t.sum("x", bounds=(-4, 15), per_person="sum", **a), {}),
    "sums by": (
        lambda t, **a: t.sum("x", bounds=(-4, 15), by={"g": G}, per_person="sum", **a),
        {},
    ),
    "sums in two groups": (
        lambda t, **a: t.sum("x", bounds=(-4, 15), by={"g": G}, per_person="sum", **a),
        {"groups": {"g": 2}},
    ),
    "mean of sums": (lambda t, **a: t.mean("x", bounds=(0, 15), per_person="sum", **a), {}),
    "mean of sums in one group": (
        lambda t, **a: t.mean("x", bounds=(0, 15), by={"g": G}, per_person="sum", **a),
        {"groups": {"g": 1}},
    ),
    "mean": (lambda t, **a: t.mean("x", bounds=(0, 10), **a), {}),
    "mean in two groups": (
        lambda t, **a: t.mean("x", bounds=(0, 10), by={"g": G}, **a),
        {"groups": {"g": 2}},
    ),
    "variance of sums": (lambda t, **a: t.variance("x", bounds=(0, 15), per_person="sum", **a), {}),
    "variance in two groups": (
        lambda t, **a: t.variance("x", bounds=(0, 10), by={"g": G}, **a),
        {"groups": {"g": 2}},
    ),
    "covariance": (lambda t, **a: t.covariance(["x", "y"], bounds=(0, 10), **a), {}),
    "correlation by": (
        lambda t, **a: t.correlation("x", "y", bounds=(0, 10), by={"g": G}, **a),
        {"groups": {"g": 2}},
    ),
    "regression": (lambda t, **a: t.regression("x", ["y"], bounds=(0, 10), **a), {}),
}
# The share of the sensitivity that these rows attain. That of products is for all numbers.
ATTAINED = {"variance of sums": 0.5, "covariance": 0.5, "correlation by": 0.5, "regression": 0.5}


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_no_person_moves_a_statistic_further_than_the_noise_covers(name, relation):
    statistic, of_people = STATISTICS[name]
    is_count, found = name.startswith(("count", "histogram")), []
    is_sum = name.startswith("sum")
    epsilon = OF_COUNTS if is_count else EPSILON
    for rows in PEOPLE:
        asked = among_others(rows, relation, **of_people)
        release = statistic(asked, epsilon=epsilon, key=dpjax.random.seeded_key(len(found)))
        assert release.guarantee.privacy_unit == "person (id)"
        numbers = release.value if is_count or is_sum else release.accuracy.measured["sums"]
        scale = release.accuracy.facts["arrays"][0]["scale"]
        found.append(np.asarray(numbers, float).ravel())
    pairs = [(found[0], x) for x in found[1:]]
    pairs = pairs if relation is ADD else itertools.combinations(found, 2)
    moved = max(np.abs(x - y).sum() for x, y in pairs)
    # Noise is below 50 scales everywhere, except with a probability below 1e-18.
    noise = 0 if is_count else 100 * len(found[0]) * scale
    assert ATTAINED.get(name, 0.95) * scale * epsilon <= moved <= scale * epsilon + noise


def test_only_rows_that_are_asked_about_take_a_place():
    """Neither a row without a number, nor one of another group, nor one without an id."""
    rows = [
        ("p", np.nan, "a"),
        ("p", 1.0, "z"),
        ("p", 1.0, "a"),
        (None, 1.0, "a"),
        ("p", 2.0, "b"),
        ("p", 3.0, "a"),
    ]
    asked = table(rows, ADD)._asked("mean", ["x"], by={"g": G})
    assert np.flatnonzero(asked.present).tolist() == [2, 4]
    asked = table(rows, ADD, groups={"g": 2})._asked("mean", ["x"], by={"g": G})
    assert np.flatnonzero(asked.present).tolist() == [2, 4, 5]
    asked = table(rows, ADD, groups={"g": 2}, order="x")._asked("mean", ["x"])
    assert np.flatnonzero(asked.present).tolist() == [1, 2]


def test_which_rows_count_is_what_the_engine_says():
    rng = np.random.default_rng(0)
    ids = 2**60 + rng.integers(0, 3, SLOTS)
    asked = table(list(zip(ids, rng.normal(size=SLOTS), "abababab", strict=True)), ADD)
    found = asked._asked("count", ()).present
    kept, _ = Truncation("id", 2).kept({"id": jnp.asarray(ids - 2**60)}, jnp.ones(SLOTS, bool))
    assert found.tolist() == kept.tolist()


def test_a_question_about_other_people_is_another_question():
    rows = [("p", *LOW), ("q", *HIGH)]
    names = {
        table(rows, ADD, **of)._asked("count", (), by={"g": G}).name
        for of in ({}, {"groups": {"g": 1}}, {"groups": {"g": 2}}, {"order": "x"})
    }
    assert len(names) == 4
    sums = {table(rows, ADD)._asked("sum", ["x"], per_person=per).name for per in (None, "sum")}
    assert len(sums) == 2


def test_statistics_that_say_nothing_about_people_are_refused():
    """A new method is refused until it scales its noise."""
    with pytest.raises(ValueError, match=r"a new one is not supported for a table with person="):
        table([("p", *LOW)], ADD)._asked("a new one", ["x"])


# All sequences of up to three rows of one person: clipped, negative, or missing.
KINDS = [(99.0, "a"), (-9.0, "b"), (2.0, "c"), (np.nan, "a")]
SEQUENCES = [rows for n in range(4) for rows in itertools.product(KINDS, repeat=n)]


def among_others(rows, relation, **of_people):
    """A table with these rows of a person, among those of another."""
    ours, others = [("p", *row) for row in rows], [("q", *row) for row in OTHERS]
    return table([others[0], *ours, others[1]], relation, **of_people)


def asked_of(rows, statistic="count", *, of_people, **question):
    """What a statistic of this table asks about."""
    return among_others(rows, ADD, **of_people)._asked(statistic, ["x"], **question)


def first_rows(rows, most, groups):
    """The rows of a person that count, one after the other, as the documentation says."""
    kept, taken = [], {}
    for i, (x, g) in enumerate(rows):
        group = g if groups else None
        if np.isnan(x) or (group not in taken and len(taken) >= (groups or 1)):
            continue
        taken[group] = taken.get(group, 0) + 1
        if taken[group] <= most:
            kept.append(i)
    return kept


def of_sums(table, by):
    """The integers of a sum of sums, and the query whose sensitivity they have."""
    asked = table._asked("sum", ["x"], by=by, per_person="sum")
    query = asked.in_groups(queries.sum_query(lower=-3, upper=8, capacity=SLOTS))._integers
    return query(asked.database(table._leaf(asked, "x"))), query


def of_averages(table, by):
    asked = table._asked("mean", ["x"], by=by, per_person="sum")
    query = integers_by(centered_sums(-3, 8, SLOTS, 1), asked.by)
    return query(asked.database(table._leaf(asked, "x"))), query


def of_entries(table, by):
    asked = table._asked("count_distinct", ["x"], by=by, once=True)
    query = DistinctCount(asked.cells.shape, asked.people, **asked.people.about)
    records = {CELL: asked.cells.codes, WORDS: words_of(table._frame["x"])}
    return query(queries.PaddedRecords(records, asked.present)), query


def asked_by(ask, name):
    """The arguments that a statistic passes to a method that makes the release."""
    read = []

    def released(*given):
        read.extend(given)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpjax.PrivateTable, name, released)
        with pytest.raises(KeyboardInterrupt):
            ask()
    return read


def of_top(table, by):
    """How many people have each of three public keys."""
    _, asked, axes, cells_of, _, _ = asked_by(
        lambda: table.top("x", 1, keys=[99, -9, 2], by=by, epsilon=1.0), "_counted"
    )
    axes = (*asked.cells.axes, *axes)
    query = asked.of_people(queries.histogram_query(math.prod(len(keys) for _, keys in axes)))
    return query(queries.PaddedRecords(cells_of(table, asked).codes, asked.present)), query


def of_ranges(table, by):
    """How many sums are in each bucket of a search for bounds."""
    how = {"bounds": None, "per_person": "sum", "epsilon": 1.0, "by": by}
    _, asked, *_ = asked_by(lambda: table.sum("x", **how), "_range")
    query = asked.of_people(queries.histogram_query(_counts.BUCKETS))
    codes = _counts.powers_of(asked.sums)
    assert asked.cells.size == 1
    return query(queries.PaddedRecords(codes, asked.present & (asked.cells.codes == 0))), query


@pytest.mark.parametrize("ask", [of_sums, of_averages, of_entries, of_top, of_ranges])
@for_each("by, groups", itertools.product((None, {"g": G}), (None, 2)))
def test_no_neighbor_is_further_than_the_bound_in_any_norm(ask, by, groups):
    """All sequences of rows: a person with them is removed, or replaced by one with any others."""
    of_people = {"groups": {"g": groups}} if groups else {}
    found = [ask(among_others(rows, ADD, **of_people), by) for rows in SEQUENCES]
    values = np.array([np.ravel(value) for value, _ in found], float)
    pairs = {
        ADD: values[:1] - values,
        REPLACE: (values[:, None] - values).reshape(-1, values.shape[1]),
    }
    for relation, difference in pairs.items():
        for norm, order in {"l1": 1, "l2": 2, "linf": np.inf}.items():
            bound = found[0][1]._bound(norm, relation, None, "float32")
            moved = np.linalg.norm(difference, order, axis=1).max()
            assert moved <= bound * (1 + 1e-12)
            # Two rows attain the bounds, but not in the same bucket of a range.
            attained = {of_top: ("l1", "l2", "linf"), of_ranges: ("l1",)}.get(ask, ())
            if norm in attained and relation is ADD and groups is None:
                assert moved >= bound * (1 - 1e-12)


def test_the_most_frequent_of_public_keys_are_those_of_most_people():
    """As without public keys: equal entries count once, and other keys take no place."""
    many = {"id": np.repeat(np.arange(300), 4), "g": np.tile(["z", "a", "a", "b"], 300)}
    some = {"id": np.arange(300, 520), "g": np.repeat(["b", "c"], [100, 120])}
    frame = {name: np.concatenate([many[name], some[name]]) for name in many}
    asked = dpjax.PrivateTable(frame, most_rows=2000, person="id", rows=2)
    how = {"epsilon": 20.0, "key": KEY}
    assert asked.top("g", 3, keys=["a", "b", "c", "d"], **how).value == ("b", "a", "c")
    assert asked.top("g", 3, delta=1e-6, **how).value == ("a", "z", "c")
    single = dpjax.PrivateTable(frame, most_rows=2000, person="id", rows=2, groups={"g": 1})
    assert single.top("g", 2, keys=["b", "a", "c"], **how).value == ("a", "c")


@for_each("groups", [None, 1, 2])
def test_a_sum_of_a_person_is_that_of_the_rows_that_count(groups):
    """Over all sequences of rows, by group. The sums of another person stay as they are."""
    of_people = {"groups": {"g": groups}} if groups else {}
    for rows in SEQUENCES:
        asked = asked_of(rows, of_people=of_people, by={"g": G}, per_person="sum")
        found = {}
        for i in np.flatnonzero(asked.present):
            who, cell = "q" if i in (0, len(rows) + 1) else "p", G[asked.cells.codes[i]]
            assert (who, cell) not in found
            found[who, cell] = float(asked.sums.entries[i])
        expected = {("q", "a"): 5.0, ("q", "b"): 5.0} if groups != 1 else {("q", "a"): 5.0}
        for i in first_rows(rows, 2, groups):
            x, g = rows[i]
            expected["p", g] = expected.get(("p", g), 0.0) + x
        assert found == expected
        assert sum(who == "p" for who, _ in found) <= asked.people.blocks
        assert asked.people.rows == 1


def test_equal_entries_of_a_person_count_once():
    """Over all sequences of rows: the first two different numbers, or the first of them."""
    for rows in SEQUENCES:
        for groups, most in (({}, 2), ({"groups": {"x": 1}}, 1)):
            asked = asked_of(rows, "keys", of_people=groups, once=True)
            found = [rows[i - 1][0] for i in np.flatnonzero(asked.present) if 0 < i <= len(rows)]
            assert found == list(dict.fromkeys(x for x, _ in rows if x == x))[:most]
            assert (asked.people.rows, asked.people.blocks) == (most, 1)
            # The two rows of another person have equal entries.
            assert asked.present[[0, len(rows) + 1]].tolist() == [True, False]
    rows = [(np.nan, 1.0, "a"), (0.0, 1.0, "a"), (0.0, np.nan, "a"), (1.0, 1.0, "a")]
    asked = table(rows, ADD)._asked("keys", ["x"], once=True)
    assert np.flatnonzero(asked.present).tolist() == [1, 3]


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
def test_a_person_moves_keys_by_one_for_each_of_their_entries(relation, monkeypatch):
    """Counts of keys before noise, over all pairs: a person alone has one of each, in few keys."""
    read = []

    def group_keys(key, column, **how):
        words = np.asarray(column.database.records)[np.asarray(column.database.present)]
        entries = collections.Counter(map(tuple, words.tolist()))
        read.append((entries, column.people, how))
        raise KeyboardInterrupt

    monkeypatch.setattr(_asked_table, "group_keys", group_keys)
    ours = [[("p", *row) for row in rows] for rows in SEQUENCES]
    for by in ({"by": {"x": [2, 5, 99]}}, {}):
        read.clear()
        for rows in ours:
            with pytest.raises(KeyboardInterrupt):
                table([("q", 2.0, "a"), *rows], relation).keys("g", epsilon=1.0, delta=0.1, **by)
        counts, (_, people, how) = [found for found, _, _ in read], read[0]
        pairs = [(counts[0], one) for one in counts]
        pairs = itertools.combinations(counts, 2) if relation is REPLACE else pairs
        moved = max(sum(((a - b) + (b - a)).values()) for a, b in pairs)
        most = people.rows * people.blocks
        assert most == 2
        assert most <= moved <= most * (1 if relation is ADD else 2)
        assert how["capacity"] == SLOTS
        for found in counts:
            assert all((found - counts[0])[key] <= 1 for key in found)


@for_each("relation", [ADD, REPLACE])
def test_the_noise_of_keys_is_that_of_all_entries_of_a_person(relation):
    noise = []

    def drawn(mechanism, size, passed):
        noise.append((float(mechanism.scale), passed))
        return 10**9

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_group_keys, "_threshold", drawn)
        release = table([("p", *LOW)], relation).keys("g", epsilon=0.5, delta=0.1)
        table([("p", *LOW)], relation, groups={"g": 3}).keys("g", epsilon=0.5, delta=0.1)
        table([("p", *LOW)], relation, groups={"g": 3}).count_distinct("g", epsilon=0.5)
    assert release.value == ()
    assert release.guarantee.privacy_unit == "person (id)"
    times = 2 if relation is REPLACE else 1
    assert noise == [(4.0 * times, 0.05 / times), (6.0 * times, pytest.approx(0.1 / 3 / times))]


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
def test_a_person_moves_the_totals_of_clusters_no_further_than_their_noise_covers(
    relation, monkeypatch
):
    read = []

    def private_k_means(key, partition, **how):
        read.append(partition)
        raise KeyboardInterrupt

    monkeypatch.setattr(_relations, "private_k_means", private_k_means)
    centers = jnp.array([[-1.0], [1.0]])
    asks = [({}, {}), ({"by": {"g": G}}, {"groups": {"g": 2}})]
    for by, groups in asks[: 1 if relation is REPLACE else 2]:  # By group it is refused.
        read.clear()
        for rows in SEQUENCES:
            asked = table([(None, *LOW), *(("p", *row) for row in rows)], relation, **groups)
            with pytest.raises(KeyboardInterrupt):
                asked.k_means(["x"], clusters=2, bounds=(0, 9), epsilon=1.0, delta=0.1, **by)
        totals = [totals_of_clusters(x.database, x.groups, centers) for x in read]
        pairs = [(totals[0], one) for one in totals]
        pairs = itertools.combinations(totals, 2) if relation is REPLACE else pairs
        moved = max(np.linalg.norm(a - b) for a, b in pairs)
        people = read[0].people
        found = _k_means._sensitivity(relation, 14 + 20 - 30, people, dims=4)
        assert (people.rows, people.blocks) == ((2, 2) if by else (2, 1))
        assert 0.75 * found.value <= moved <= found.value
        assert found.privacy_unit == "person (id)"


def totals_of_clusters(database, groups, centers):
    records, codes, count = database.records, np.zeros(SLOTS, int), 1
    if groups is not None:
        (records, codes), count = records, groups
    inside = _k_means._placed(jnp.asarray(records), jnp.asarray(database.present))
    each = [
        _k_means._totals(inside, jnp.asarray(database.present & (codes == g)), centers, bits=4)
        for g in range(count)
    ]
    return np.stack(each).astype(float)


def test_the_error_of_the_noise_is_that_of_the_clusters_of_all_groups(monkeypatch):
    """A person may change all groups, so their noise is one draw of so many numbers."""
    read = []

    def share_of(sensitivity, releases, epsilon, delta, dims):
        read.append(dims)
        raise KeyboardInterrupt

    monkeypatch.setattr(_k_means, "_share_of", share_of)
    for by in ({}, {"by": {"g": G}}):
        with pytest.raises(KeyboardInterrupt):
            table([("p", *LOW)], ADD).k_means(
                ["x"], clusters=2, bounds=(0, 9), epsilon=1.0, delta=0.1, **by
            )
    assert read == [32 * 2, len(G) * 32 * 2]


def test_an_id_is_one_entry_of_its_person():
    asked = table([("p", *LOW), ("p", *HIGH)], ADD)
    release = asked.count_distinct("id", epsilon=OF_COUNTS, key=KEY)
    assert int(release.value) == 1
    assert release.accuracy.facts["arrays"][0]["scale"] == pytest.approx(1 / OF_COUNTS, rel=1e-3)


def test_clusters_of_people_have_the_noise_of_all_their_rows():
    many = [("p" + str(i // 2), float(i % 3), "a") for i in range(60)]
    frame = {"id": np.array([row[0] for row in many]), "x": np.array([row[1] for row in many])}
    scales = []
    for of_people in ({"person": "id", "rows": 1}, {"person": "id", "rows": 3}, {}):
        asked = dpjax.PrivateTable(frame, most_rows=100, **of_people)
        release = asked.k_means(["x"], clusters=1, bounds=(0, 2), epsilon=1.0, delta=1e-6)
        scales.append(release.accuracy.facts["arrays"][0]["scale"])
    assert scales == [pytest.approx(scales[2]), pytest.approx(3 * scales[2], rel=1e-3), scales[2]]


REFUSED = {
    "no people": (
        lambda: dpjax.PrivateTable({"x": np.ones(3)}, most_rows=4),
        "per_person='sum' needs the column of people's ids: make the table with person=",
    ),
    "missing": (
        lambda: table([("p", *LOW)], ADD, missing="lower"),
        "per_person='sum' needs a table with missing=\"drop\", got missing='lower'",
    ),
    "dates": (
        lambda: dpjax.PrivateTable(
            {"id": np.arange(1), "x": np.array(["2024-01-01"], "M8[D]")},
            **{"most_rows": 4, "person": "id", "rows": 1},
        ),
        "per_person='sum' adds up numbers, but column 'x' has dates: leave it out",
    ),
    "texts": (
        lambda: dpjax.PrivateTable(
            {"id": np.arange(1), "x": np.array(["a"])}, most_rows=4, person="id", rows=1
        ),
        "column 'x' must hold numbers",
    ),
}


@for_each("name", REFUSED)
def test_a_person_without_a_sum_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make().sum("x", bounds=(0, 1), per_person="sum", epsilon=1.0)
    with pytest.raises(ValueError, match="per_person must be one of"):
        table([("p", *LOW)], ADD).sum("x", bounds=(0, 1), per_person="mean", epsilon=1.0)


def test_a_range_of_sums_is_searched_among_sums():
    """Sums are far from all numbers."""
    frame = {"id": np.repeat(np.arange(500), 4), "x": np.tile([100.0, -90.0, 500.0, 0.0], 500)}
    asked = dpjax.PrivateTable(frame, most_rows=4000, person="id", rows=4)
    found = asked.bounds("x", per_person="sum", epsilon=5.0, key=KEY)
    assert found.value.tolist() == [256, 512]
    mean = asked.mean("x", bounds=None, per_person="sum", epsilon=20.0, key=KEY)
    assert abs(float(mean.value) - 510) < 2
    assert "found in [256, 512]" in repr(mean)
    assert mean.labels.statistic.startswith("mean of x per person")
    by = {"g": ["a", "b"]}
    frame["g"] = np.tile(["a", "a", "b", "b"], 500)  # Sums of 10 and 500.
    asked = dpjax.PrivateTable(frame, most_rows=4000, person="id", rows=4)
    mean = asked.mean("x", bounds=None, by=by, per_person="sum", epsilon=20.0, key=KEY)
    assert "found in [8, 512]" in repr(mean)
    np.testing.assert_allclose(mean.value, [10, 500], atol=5)


def test_a_synthetic_table_of_people_finds_its_keys():
    frame = {"id": np.repeat(np.arange(2000), 2), "g": np.tile(["a", "b"], 2000)}
    asked = dpjax.PrivateTable(frame, most_rows=5000, person="id", rows=2)
    release = asked.synthetic(rows=100, epsilon=20.0, delta=1e-6, key=KEY)
    assert release.labels.statistic == "synthetic of g; g in ('a', 'b')"
    assert sorted(set(release.value["g"])) == ["a", "b"]
    assert release.guarantee.privacy_unit == "person (id)"
    assert release.guarantee.epsilon <= 20


def test_people_need_a_number_of_rows():
    frame = {"id": np.arange(3)}
    with pytest.raises(TypeError, match="rows must be given together with person="):
        dpjax.PrivateTable(frame, most_rows=4, person="id")
    with pytest.raises(
        TypeError, match="person must name the column of people's ids if rows is given"
    ):
        dpjax.PrivateTable(frame, most_rows=4, rows=2)


def test_a_ledger_of_people_refuses_rows(tmp_path):
    with dpjax.Ledger(tmp_path / "ledger.db", epsilon=10, relation=ADD) as ledger:
        frame = {"id": np.arange(3)}
        people = dpjax.PrivateTable(frame, most_rows=4, ledger=ledger, person="id", rows=1)
        people.count(epsilon=1.0)
        people = dpjax.PrivateTable(frame, most_rows=4, ledger=ledger, person="id", rows=2)
        people.count(epsilon=1.0)
        with pytest.raises(ValueError, match=r"per person \(id\).*per record"):
            dpjax.PrivateTable(frame, most_rows=4, ledger=ledger).count(epsilon=1.0)
