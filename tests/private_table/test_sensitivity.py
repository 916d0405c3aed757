"""Every statistic on all neighbors of small tables moves by no more than its noise is made for."""

import itertools

import numpy as np
import pytest

import dpjax
from dpjax._core._columns import fingerprints
from dpjax.queries import _k_means
from dpjax.tables import _counts, _relations
from dpjax.tables._groups import words_in_groups

REPLACE, ADD = dpjax.NeighboringRelation
# So large that the noise is far below what one row moves. That of counts is 0, except with a
# probability below 1e-20.
EPSILON, OF_COUNTS = 1e6, 100.0
SLOTS = 4
KEY = dpjax.random.seeded_key(0)
G, H = ["a", "b"], [0, 1]
BASE = [(5.0, "a", 1)]
# Clipped at both ends, missing, without a group, with a key that is not asked for.
ROWS = [
    (10.0, "a", 0),
    (0.0, "b", 1),
    (np.nan, "a", 1),
    (99.0, "b", 0),
    (10.0, None, 1),
    (-5.0, "z", 2),
]


def is_large(row):
    return row["x"] > 1


BOTH = {"x": (0, 10), "h": (0, 1)}
STATISTICS = {
    "count where": lambda t, **a: t.count(where=is_large, **a),
    "count by one key": lambda t, **a: t.count(by={"g": G[:1]}, **a),
    "count_distinct": lambda t, **a: t.count_distinct("x", **a),
    "count_distinct by": lambda t, **a: t.count_distinct("x", by={"g": G}, **a),
    "crosstab": lambda t, **a: t.crosstab(["g", "h"], keys={"g": G, "h": H}, **a),
    "histogram by": lambda t, **a: t.histogram("x", [0, 5, 10], by={"g": G}, **a),
    "mean": lambda t, **a: t.mean("x", bounds=(0, 10), **a),
    "mean by": lambda t, **a: t.mean("x", bounds=(0, 10), by={"g": G, "h": H}, **a),
    "regression": lambda t, **a: t.regression("x", ["h"], bounds=BOTH, **a),
    "correlation by": lambda t, **a: t.correlation("x", "h", bounds=BOTH, by={"g": G}, **a),
    "variance": lambda t, **a: t.variance("x", bounds=(0, 10), **a),
    "variance by": lambda t, **a: t.variance("x", bounds=(0, 10), by={"g": G}, **a),
    "covariance": lambda t, **a: t.covariance(["x", "h"], bounds=BOTH, **a),
    "covariance by": lambda t, **a: t.covariance(["x", "h"], bounds=BOTH, by={"g": G}, **a),
    "pca": lambda t, **a: t.pca(["x", "h"], components=1, bounds=BOTH, **a),
    "sum": lambda t, **a: t.sum("x", bounds=(-2, 10), **a),
    "sum by": lambda t, **a: t.sum("x", bounds=(-2, 10), by={"g": G}, **a),
}
WHOLE = ("count", "count_distinct", "crosstab", "histogram")
COUNTS = [name for name in STATISTICS if name.split()[0] in WHOLE]
# The share of the sensitivity that these rows attain. That of products is for all numbers.
ATTAINED = {"regression": 0.4, "correlation by": 0.4}
ATTAINED |= {"covariance": 0.5, "covariance by": 0.5, "pca": 0.5}


def table(rows, relation, missing, slots=SLOTS):
    x, g, h = zip(*rows, strict=True) if rows else ((), (), ())
    frame = {
        "x": np.array(x, float),
        "g": np.array(g, object),
        "h": np.array(h, np.int64),
    }
    return dpjax.PrivateTable(frame, most_rows=slots, relation=relation, missing=missing)


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_no_neighbor_moves_further_than_the_noise_covers(name, relation):
    moved, reach, noise = farthest(STATISTICS[name], relation, "drop")
    assert moved <= reach + noise
    assert moved >= ATTAINED.get(name, 0.95) * reach


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
def test_a_missing_number_that_counts_as_the_lower_end_moves_no_further(relation):
    moved, reach, noise = farthest(STATISTICS["mean"], relation, "lower")
    assert 0.95 * reach <= moved <= reach + noise


def farthest(statistic, relation, missing):
    """How far a row moves the numbers that get noise, how far it may, and how far noise may."""
    found, is_count = [], statistic in [STATISTICS[name] for name in COUNTS]
    epsilon = OF_COUNTS if is_count else EPSILON
    for added in [[], *([row] for row in ROWS)]:
        key = dpjax.random.seeded_key(len(found))
        asked = table([*BASE, *added], relation, missing)
        release = statistic(asked, epsilon=epsilon, key=key)
        is_sum = release.accuracy.kind == "noise"  # What gets noise is the value.
        numbers = release.value if is_sum else release.accuracy.measured["sums"]
        assert is_sum or release.accuracy.measured["n"] is None  # How many rows count is private.
        assert release.accuracy.facts["noise"] == ("discrete laplace" if is_count else "laplace")
        scale = release.accuracy.facts["arrays"][0]["scale"]
        found.append(np.asarray(numbers, float).ravel())
    pairs = [(found[0], x) for x in found[1:]]
    if relation is REPLACE:
        pairs = itertools.combinations(found[1:], 2)
    # Noise is below 50 scales everywhere, except with a probability below 1e-18.
    noise = 0 if is_count else 100 * len(found[0]) * scale
    return max(np.abs(x - y).sum() for x, y in pairs), scale * epsilon, noise


def test_whether_a_row_counts_and_where_depends_on_this_row_alone():
    together = table(ROWS, ADD, "drop", slots=len(ROWS))
    asked = together._asked("mean", ["x"], by={"g": G, "h": H}, where=is_large)
    assert asked.present.tolist() == [True, False, False, True, True, False]
    assert asked.cells.codes.tolist() == [0, 3, 1, 2, -1, -1]
    assert together._asked("mean", ["x"]).present.tolist() == [True, True, False, True, True, True]
    for i, row in enumerate(ROWS):
        alone = table([row], ADD, "drop", slots=len(ROWS))
        one = alone._asked("mean", ["x"], by={"g": G, "h": H}, where=is_large)
        assert one.present.tolist() == [asked.present[i], *[False] * 5]
        assert one.cells.codes[0] == asked.cells.codes[i]


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
def test_clusters_get_one_slot_of_each_row(relation, monkeypatch):
    """What `private_k_means` is asked about: neighbors differ in one slot, and how it counts."""
    asked = []

    def private_k_means(key, partition, **how):
        asked.append((partition.database, how))
        raise KeyboardInterrupt

    monkeypatch.setattr(_relations, "private_k_means", private_k_means)
    of = {"clusters": 2, "bounds": BOTH, "epsilon": 1.0, "delta": 1e-6}
    for row in (*ROWS, None):
        rows = BASE if row is None else [*BASE, row]
        with pytest.raises(KeyboardInterrupt):
            table(rows, relation, "drop").k_means(["x", "h"], key=KEY, **of)
    for database, how in asked:
        assert how["relation"] is relation
        records, present = np.asarray(database.records), np.asarray(database.present)
        assert np.all(np.linalg.norm(records, axis=1) <= 1 + 1e-6)
        first = asked[-1][0]
        np.testing.assert_array_equal(records[0], np.asarray(first.records)[0])
        assert present.tolist() == [True, present[1], False, False]
    known = [not np.isnan(x) for x, _, _ in ROWS]
    assert [bool(database.present[1]) for database, _ in asked] == [*known, False]


def test_clusters_by_group_get_each_row_in_one_group(monkeypatch):
    """So all groups together cost what one costs: a row moves the totals of one group alone."""
    read = []

    def totals(records, present, centers, *, bits):
        read.append(np.asarray(present))
        return kept(records, present, centers, bits=bits)

    kept = _k_means._totals
    monkeypatch.setattr(_k_means, "_totals", totals)
    of = {"clusters": 1, "bounds": BOTH, "epsilon": 1.0, "delta": 1e-6, "by": {"g": G}}
    of["key"] = KEY
    for row in (ROWS[2], ROWS[3], ROWS[4], None):  # Missing, in the second group, in none.
        read.clear()
        release = table(BASE if row is None else [*BASE, row], ADD, "drop").k_means(
            ["x", "h"], **of
        )
        assert release.value["centers"].shape == (2, 1, 2)
        first, second = read[::2], read[1::2]
        assert len(second) == 5  # The start and four iterations.
        assert all(present.tolist() == [True, False, False, False] for present in first)
        there = [False, row == ROWS[3], False, False]
        assert all(present.tolist() == there for present in second)
    with pytest.raises(ValueError, match="by must be None for k-means under replace-one"):
        table(ROWS[:3], REPLACE, "drop").k_means(["x", "h"], **of)


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
def test_no_row_moves_the_counts_of_ranges_by_group_further_than_noise_covers(
    relation, monkeypatch
):
    read = []

    def range_of(counts, mechanism):
        read.append((np.array(counts), float(mechanism.scale)))
        return np.zeros(2)

    monkeypatch.setattr(_counts, "range_of", range_of)

    def counts(rows):
        read.clear()
        table(rows, relation, "drop").bounds("x", by={"g": G}, epsilon=OF_COUNTS, key=KEY)
        return np.concatenate([one for one, _ in read])

    found = [counts(BASE), *(counts([*BASE, row]) for row in ROWS)]
    pairs = [(found[0], x) for x in found[1:]]
    pairs = itertools.combinations(found[1:], 2) if relation is REPLACE else pairs
    moved = max(np.abs(x - y).sum() for x, y in pairs)
    assert moved == (2 if relation is REPLACE else 1)
    assert read[0][1] * OF_COUNTS >= moved


def test_a_row_is_one_key_of_one_group_whatever_the_others_are():
    """So keys by group cost what keys cost."""

    def entries(rows, column):
        one = table(rows, ADD, "drop", slots=len(rows))
        asked = one._asked("keys", [column], by={"g": G}, where=is_large)
        found = words_in_groups(asked.cells, one._frame[column], asked.present)
        every = zip(found.records.tolist(), found.present.tolist(), strict=True)
        return [words if counts else None for words, counts in every]

    for column in ("x", "g"):
        together = entries(ROWS, column)
        assert [one for row in ROWS for one in entries([row], column)] == together
    assert entries(ROWS, "x") == [[0, 2**31, 10], None, None, [1, 2**31, 99], None, None]
    assert entries(ROWS, "g")[::3] == [[0, *word] for word in fingerprints(["a"]).tolist()] + [
        [1, *word] for word in fingerprints(["b"]).tolist()
    ]


def test_keys_that_differ_in_their_ends_are_different_keys():
    """An array of texts would lose NUL characters, and a missing entry makes one of objects."""
    ends = ["a", "a\0", "a\0\0"]
    for texts in (ends * 9, [*ends * 9, None]):
        frame = {"t": np.array(texts, object), "g": np.array(["a"] * len(texts))}
        one = dpjax.PrivateTable(frame, most_rows=40)
        for by in ({}, {"by": {"g": ["a"]}}):
            found = one.keys("t", epsilon=20.0, delta=1e-6, key=KEY, **by).value
            assert (found["a"] if by else found) == tuple(ends)
