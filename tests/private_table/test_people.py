"""Statistics of people with several rows: all rows of a person move them by what noise covers."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.queries._truncation import Truncation
from tables import for_each

REPLACE, ADD = dpjax.NeighboringRelation
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
]


def table(rows, relation, **of_people):
    who, x, g = zip(*rows, strict=True)
    frame = {"id": np.array(who), "x": np.array(x, float), "g": np.array(g, object)}
    return dpjax.PrivateTable(
        frame, most_rows=SLOTS, relation=relation, person="id", rows=2, **of_people
    )


STATISTICS = {
    "count": (lambda t, **a: t.count(**a), {}),
    "count by": (lambda t, **a: t.count(by={"g": G}, **a), {}),
    "count in two groups": (lambda t, **a: t.count(by={"g": G}, **a), {"groups": {"g": 2}}),
    "histogram": (lambda t, **a: t.histogram("x", [0, 5, 10], **a), {}),
    "mean": (lambda t, **a: t.mean("x", bounds=(0, 10), **a), {}),
    "mean in two groups": (
        lambda t, **a: t.mean("x", bounds=(0, 10), by={"g": G}, **a),
        {"groups": {"g": 2}},
    ),
}


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_no_person_moves_a_statistic_further_than_the_noise_covers(name, relation):
    statistic, of_people = STATISTICS[name]
    is_count, found = name.startswith(("count", "histogram")), []
    epsilon = OF_COUNTS if is_count else EPSILON
    for rows in PEOPLE:
        ours, others = [("p", *row) for row in rows], [("q", *row) for row in OTHERS]
        asked = table([others[0], *ours, others[1]], relation, **of_people)
        release = statistic(asked, epsilon=epsilon, key=dpjax.random.seeded_key(len(found)))
        assert release.guarantee.privacy_unit == "person (id)"
        numbers = release.value if is_count else release.accuracy.measured["sums"]
        scale = release.accuracy.facts["arrays"][0]["scale"]
        found.append(np.asarray(numbers, float).ravel())
    pairs = [(found[0], x) for x in found[1:]]
    pairs = pairs if relation is ADD else itertools.combinations(found, 2)
    moved = max(np.abs(x - y).sum() for x, y in pairs)
    # Noise is below 50 scales everywhere, except with a probability below 1e-18.
    noise = 0 if is_count else 100 * len(found[0]) * scale
    assert 0.95 * scale * epsilon <= moved <= scale * epsilon + noise


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


def test_statistics_that_say_nothing_about_people_are_refused():
    """A new method is refused until it scales its noise."""
    with pytest.raises(ValueError, match=r"a new one is not supported for a table with person="):
        table([("p", *LOW)], ADD)._asked("a new one", ["x"])


REFUSED = {
    "k_means": lambda t: t.k_means(["x", "id"], clusters=2, bounds=(0, 1), epsilon=1.0, delta=1e-6),
    "count_distinct": lambda t: t.count_distinct("g", epsilon=1.0),
    "keys": lambda t: t.keys("g", epsilon=1.0, delta=1e-6),
    "top": lambda t: t.top("g", 1, epsilon=1.0, delta=1e-6),
}


@for_each("name", REFUSED)
def test_a_statistic_that_people_move_in_unknown_ways_is_refused(name):
    with pytest.raises(ValueError, match=r"is not supported for a table with person="):
        REFUSED[name](table([("p", *LOW)], ADD))


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
