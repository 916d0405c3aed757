"""People with several rows: all databases of a few rows, with a person removed or replaced.

The rows of a database are its slots: each is empty, or holds a row of one of two people.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries
from dpjax._core._columns import Numbers, Texts, fingerprints
from dpjax.queries._people import exact_totals
from dpjax.queries._truncation import Truncation
from tables import for_each

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dpjax.NeighboringRelation.REPLACE_ONE
WARDS = (0, 1, 2, 3)
VALUES = (-1.0, 2.0)
SLOTS = 4
COUNT = queries.counting_query()
TOTAL = queries.sum_query(lower=-1, upper=2, capacity=SLOTS)
BY_WARD = {"column": "ward", "keys": WARDS}


def reference(person, ward, value, rows, groups):
    """The rows that count, one after the other: what the truncation is documented to be."""
    kept, seen, opened = [], {}, {}
    for i, who in enumerate(person):
        if who is None:
            continue
        wards = opened.setdefault(who, [])
        if groups is not None and ward[i] not in wards:
            wards.append(ward[i])
        if groups is not None and wards.index(ward[i]) >= groups:
            continue
        cell = (who, ward[i] if groups is not None else None)
        seen[cell] = seen.get(cell, 0) + 1
        if seen[cell] <= rows:
            kept.append(i)
    return kept


@functools.cache
def databases(slots, wards, values):
    """Every database: arrays of shape (databases, slots) of person, ward and value; 0 is nobody."""
    entries = [(0, 0, 0.0), *itertools.product((7, 8), range(wards), values)]
    table = np.array(entries, np.float32)[
        np.array([*itertools.product(range(len(entries)), repeat=slots)])
    ]
    return table[..., 0].astype(np.int32), table[..., 1].astype(np.int32), table[..., 2]


def answers(query, person, ward, value):
    """The integers of a query on every database."""
    inside = query._integers if hasattr(query, "_integers") else query

    @jax.jit
    @jax.vmap
    def of_one(person, ward, value):
        records = {"id": person, "ward": ward, "value": value}
        slots = queries.PaddedRecords(records, person > 0)
        return inside(slots).astype(float).ravel()

    return np.asarray(of_one(person, ward, value), np.float64)


def norms(differences):
    sizes = np.abs(differences)
    return {"l1": sizes.sum(1).max(), "l2": np.sqrt((sizes**2).sum(1)).max(), "linf": sizes.max()}


def moved(query, slots=SLOTS, wards=2, values=VALUES):
    """How far the value moves if all rows of person 7 are removed, or replaced by any others."""
    person, ward, value = databases(slots, wards, values)
    found = answers(query, person, ward, value)
    without = answers(query, np.where(person == 7, 0, person), ward, value)
    # Databases that agree in the rows of person 8, in their order, whatever their places.
    others = np.where(person == 8, 1 + ward * len(values) + (value == values[-1]), 0)
    order = np.argsort(others == 0, axis=1, kind="stable")
    rest = np.take_along_axis(others, order, axis=1)
    _, which = np.unique(rest, axis=0, return_inverse=True)
    replaced = {"l1": 0.0, "l2": 0.0, "linf": 0.0}
    for k in range(which.max() + 1):
        few = np.unique(found[which.ravel() == k], axis=0)
        pairs = norms((few[:, None] - few[None]).reshape(-1, found.shape[1]))
        replaced = {norm: max(replaced[norm], pairs[norm]) for norm in pairs}
    return {ADD: norms(found - without), REPLACE: replaced}


PEOPLE = functools.partial(queries.by_person, person="id")
POSITIVE = queries.counting_query(lambda x: x > 0)
COUNTS_BY_WARD = queries.by(COUNT, **BY_WARD)
# Databases of rows that are wide in wards, to leave two and enter two others.
MANY_WARDS = {"wards": 4, "values": (2.0,)}
CASES = {
    "people": (PEOPLE(COUNT, rows=1), [{}]),
    "two rows each": (PEOPLE(COUNT, rows=2), [{}]),
    "a predicate": (PEOPLE(POSITIVE, rows=2, of="value"), [{}]),
    "a histogram": (PEOPLE(queries.histogram_query(2), rows=2, of="ward"), [{}]),
    "a sum": (PEOPLE(TOTAL, rows=2, of="value"), [{}]),
    "by ward": (PEOPLE(COUNTS_BY_WARD, rows=2), [MANY_WARDS]),
    "in one ward": (PEOPLE(COUNTS_BY_WARD, rows=2, groups={"ward": 1}), [MANY_WARDS]),
    "in two wards": (PEOPLE(COUNTS_BY_WARD, rows=1, groups={"ward": 2}), [MANY_WARDS]),
    "sums by ward": (
        PEOPLE(queries.by(TOTAL, **BY_WARD, of="value"), rows=2, groups={"ward": 2}),
        [{}, MANY_WARDS],
    ),
    "a sum of sums": (PEOPLE(TOTAL, rows=3, of="value", per_person="sum"), [{}]),
    "sums of sums by ward": (
        PEOPLE(
            queries.by(TOTAL, **BY_WARD), rows=2, groups={"ward": 2}, of="value", per_person="sum"
        ),
        [{}, MANY_WARDS],
    ),
    "sums of sums of what is left": (
        PEOPLE(queries.by(TOTAL, **BY_WARD), rows=2, groups={"ward": 2}, per_person="sum"),
        [{}, MANY_WARDS],
    ),
    "groups of another column": (PEOPLE(POSITIVE, rows=2, groups={"ward": 2}, of="value"), [{}]),
    "quantiles": (
        PEOPLE(queries.quantile_scores((0.5, 0.25), grid=[0, 1]), rows=2, of="value"),
        [{}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_all_rows_of_a_person_move_a_value_as_far_as_is_said(name):
    """Every bound is attained, and none exceeded."""
    query, all_sizes = CASES[name]
    found = [moved(query, **sizes) for sizes in all_sizes]
    inside = getattr(query, "_integers", query)
    for relation, norm in itertools.product((ADD, REPLACE), ("l1", "l2", "linf")):
        if norm in query.norms:
            distance = max(one[relation][norm] for one in found)
            bound = inside._bound(norm, relation, None, "float32")
            assert distance <= bound * (1 + 1e-12)
            assert distance == pytest.approx(bound, rel=1e-12)


def rows_that_count(truncation, records, present):
    return np.flatnonzero(truncation.kept(records, jnp.asarray(present))[0]).tolist()


def some_table(rng, n):
    person, ward = rng.integers(1, 5, n), rng.integers(0, 4, n)
    return person, ward, rng.random(n) < 0.85


@for_each("seed", range(6))
def test_the_rows_that_count_are_the_first(seed):
    rng = np.random.default_rng(seed)
    person, ward, present = some_table(rng, 12)
    records = {"id": jnp.asarray(person), "ward": jnp.asarray(ward)}
    who = [int(p) if here else None for p, here in zip(person, present, strict=True)]
    for rows, groups in itertools.product((1, 2, 3), (None, 1, 2)):
        of = () if groups is None else (("ward", groups),)
        found = rows_that_count(Truncation("id", rows, of), records, present)
        assert found == reference(who, ward, None, rows, groups)


@for_each("seed", range(5))
def test_the_truncation_of_a_union_is_the_union_of_truncations(seed):
    """Also in two columns of groups, and in the order of a column."""
    rng = np.random.default_rng(seed)
    n = 16
    person, ward, present = some_table(rng, n)
    records = {
        "id": jnp.asarray(person),
        "ward": jnp.asarray(ward),
        "kind": jnp.asarray(rng.integers(0, 3, n)),
        "day": jnp.asarray(rng.choice([3.0, 1.0, np.nan, -np.inf], n), jnp.float32),
    }
    truncation = Truncation("id", 2, (("ward", 2), ("kind", 1)), "day")
    together = rows_that_count(truncation, records, present)
    alone = [rows_that_count(truncation, records, present & (person == who)) for who in range(1, 5)]
    assert together == sorted(itertools.chain(*alone))
    assert together


def test_the_first_rows_are_those_of_the_order():
    """Ties have the order of the table, and a missing number is last."""
    days = jnp.array([5.0, 2.0, jnp.nan, 2.0, -jnp.inf])
    records = {"id": jnp.zeros(5, int), "day": days}
    present = np.ones(5, bool)
    counts = [
        rows_that_count(Truncation("id", k, (), "day"), records, present) for k in range(1, 6)
    ]
    assert counts == [[4], [1, 4], [1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]
    dates = Numbers.of(np.array([2**53 + 1, 2**53, 2**53 + 2]), np.array([True, True, False]))
    records = {"id": jnp.zeros(3, int), "day": dates}
    assert rows_that_count(Truncation("id", 1, (), "day"), records, np.ones(3, bool)) == [1]
    assert rows_that_count(Truncation("id", 2, (), "day"), records, np.ones(3, bool)) == [0, 1]


IDS = {
    "texts": (Texts(fingerprints(["a", "b", None, "a", "c"])), [0, 1, 4]),
    "integers": (jnp.array([5, 6, 5, 5, 7]), [0, 1, 4]),
    "integers of 64 bits": (
        Numbers.of(np.array([2**60, 2**60 + 1, 2**60, 0, -(2**60)])),
        [0, 1, 3, 4],
    ),
    "some missing": (
        Numbers.of(np.array([5, 6, 0, 5, 0], np.int32), np.array([True, True, False, True, False])),
        [0, 1],
    ),
    "floats": (jnp.array([5.0, jnp.nan, 5.5, 5.0, jnp.inf]), [0]),
    "booleans": (jnp.array([True, False, True, True, False]), [0, 1]),
}


@for_each("name", IDS)
def test_ids_are_texts_or_whole_numbers_and_a_row_without_one_counts_for_nobody(name):
    ids, expected = IDS[name]
    assert rows_that_count(Truncation("id", 1), {"id": ids}, np.ones(5, bool)) == expected


def sums_of_people(person, numbers, present, rows):
    """The sum of each person who is present, as a dict."""
    records = {"id": jnp.asarray(person)}
    kept, cells = Truncation("id", rows).kept(records, jnp.asarray(present))
    totals, _ = exact_totals(Numbers.of(numbers), kept, cells, rows).on_host()
    opens = np.asarray(kept & (cells.rank(kept) == 0))
    return dict(zip(person[opens].tolist(), totals[opens].tolist(), strict=True))


def test_a_sum_of_a_person_is_not_rounded_by_others():
    rng = np.random.default_rng(0)
    n, k = 40, 3
    person = rng.integers(1, 6, n)
    numbers = rng.normal(size=n) * 10.0 ** rng.integers(-3, 4, n)
    numbers[:3] = np.nan
    together = sums_of_people(person, numbers, np.ones(n, bool), k)
    for who in range(1, 6):
        first = np.nan_to_num(numbers[person == who][:k]).tolist()
        assert together[who] == functools.reduce(lambda total, x: total + x, first)
        assert sums_of_people(person, numbers, person == who, k)[who] == together[who]


def test_a_sum_of_integers_does_not_wrap():
    largest = 2**63 - 1
    numbers = np.array([largest, largest, 7, -largest, -largest, 2**53 + 1])
    found = sums_of_people(np.array([1, 1, 2, 3, 3, 2]), numbers, np.ones(6, bool), 2)
    assert found == {1: largest // 2 * 2, 2: 2**53 + 8, 3: -(largest // 2 * 2)}


def test_a_release_says_whom_it_protects():
    table = {
        "id": np.array(["ann", "bob", "ann", "ann", None]),
        "ward": np.array(["A", "A", "B", "B", "A"]),
        "value": np.array([1.0, 2.0, 3.0, np.nan, 5.0]),
    }
    slots = queries.padded_records(table, capacity=8)
    wards = queries.by(COUNT, column="ward", keys=["A", "B"])
    query = PEOPLE(wards, rows=1, groups={"ward": 2})
    assert query(slots).tolist() == [2, 1]
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(relation=ADD), 1.0))
    release = private(dpjax.random.seeded_key(0), slots)
    assert release.guarantee.privacy_unit == "person (id)"
    assert "per person (id), at most 1 row each, in 2 of ward" in str(release)
    scores = PEOPLE(queries.quantile_scores((0.25, 0.5, 0.75), grid=range(9)), rows=2, of="value")
    selecting = queries.select_each(scores.sensitivity(), 1.0, count=3)
    release = dpjax.privatize(scores, selecting)(dpjax.random.seeded_key(0), slots)
    assert release.guarantee.privacy_unit == "person (id)"
    # The number of rows that count is private, also if a person is replaced.
    with pytest.raises(ValueError, match="at_least"):
        release.interval()


def test_an_array_shows_how_many_rows_people_have():
    query = PEOPLE(COUNT, rows=1)
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), 1.0))
    with pytest.raises(ValueError, match="people with several rows, the number of records is"):
        private(dpjax.random.seeded_key(0), {"id": np.arange(3)})


def test_noise_of_a_query_of_rows_is_refused():
    query = PEOPLE(COUNT, rows=1)
    slots = queries.padded_records({"id": np.arange(3)}, capacity=4)
    private = dpjax.privatize(query, dpjax.laplace(COUNT.sensitivity(relation=ADD), 1.0))
    with pytest.raises(
        ValueError, match=r"unit of this target, 'person \(id\)', got a sensitivity for 'rec"
    ):
        private(dpjax.random.seeded_key(0), slots)


DAYS_AS_TEXTS = {"id": np.arange(2), "day": np.array(["a", "b"])}
REFUSED = {
    "by person twice": (
        lambda: PEOPLE(PEOPLE(COUNT, rows=1), rows=1),
        "and not the result of by_person",
    ),
    "by group of people": (
        lambda: queries.by(PEOPLE(COUNT, rows=1), **BY_WARD),
        "Group the rows first",
    ),
    "no query": (lambda: PEOPLE(len, rows=1), "query must be a Query or scores"),
    "no rows": (lambda: PEOPLE(COUNT, rows=0), "rows must be an integer of at least 1"),
    "no column": (lambda: queries.by_person(COUNT, person=len, rows=1), "person must be the name"),
    "groups": (lambda: PEOPLE(COUNT, rows=1, groups={"ward": 0}), r"groups\['ward'\] must be an"),
    "a list": (
        lambda: PEOPLE(COUNT, rows=1, groups=["ward"]),
        "groups must map columns to the number",
    ),
    "people": (
        lambda: PEOPLE(COUNT, rows=1, groups={"id": 1}),
        "must not name the column of",
    ),
    "order": (lambda: PEOPLE(COUNT, rows=1, order=1.5), "order must be the name or index"),
    "a word": (lambda: PEOPLE(COUNT, rows=1, per_person="mean"), "per_person must be"),
    "of": (
        lambda: PEOPLE(COUNTS_BY_WARD, rows=1, of="value"),
        "must be left out here, because the query is by group",
    ),
    "sums": (
        lambda: PEOPLE(COUNTS_BY_WARD, rows=1, of="value", per_person="sum"),
        r"must name the columns that the query is grouped by.*\['ward'\]",
    ),
    "texts": (
        lambda: PEOPLE(COUNT, rows=1, order="day")(
            {"id": np.arange(2), "day": np.array(["a", "b"])}
        ),
        "order must be a column of numbers, got texts in 'day'",
    ),
    "texts to add": (
        lambda: PEOPLE(COUNT, rows=1, of="day", per_person="sum")(DAYS_AS_TEXTS),
        "adds up one column of numbers, got texts",
    ),
}


@for_each("name", REFUSED)
def test_what_cannot_be_asked_is_refused(name):
    ask, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        ask()


def test_only_a_column_with_a_name_is_known_to_be_that_of_groups():
    """An index may mean another column once that of people is left out."""
    by_index = queries.by(COUNT, column=0, keys=WARDS)
    for query, groups, expected in (
        (by_index, {0: 2}, 2.0),
        (by_index, {1: 2}, 2.0),
        (COUNTS_BY_WARD, {"ward": 2}, 2**0.5),
        (queries.by(COUNTS_BY_WARD, column="kind", keys=[0, 1], of="nest"), {"ward": 2}, 2.0),
        (queries.by(COUNTS_BY_WARD, column="kind", keys=[0, 1]), {"ward": 2}, 2**0.5),
        (queries.by(COUNT, column=lambda row: row["ward"], keys=WARDS), {"ward": 2}, 2.0),
        (queries.by(COUNT, column="ward", keys=[0]), {"ward": 2}, 1.0),
    ):
        found = queries.by_person(query, person="id", rows=1, groups=groups)
        assert found.sensitivity("l2", relation=ADD).value == pytest.approx(expected, rel=1e-12)


def test_keys_of_groups_are_published_for_people():
    column = np.array([["a", "b"], ["a", None], ["c", "b"]] * 300, object)
    how = {"epsilon": 1.0, "delta": 1e-6, "at_most": 2, "capacity": 1000, "relation": ADD}
    key = dpjax.random.seeded_key(0)
    found = queries.group_keys(key, column, privacy_unit="person (id)", **how)
    assert found.value == ("a", "b", "c")
    assert found.guarantee.privacy_unit == "person (id)"
    assert queries.group_keys(key, column, **how).guarantee.privacy_unit == "record"
    with pytest.raises(TypeError, match="privacy_unit must be a string, got 7"):
        queries.group_keys(key, column, privacy_unit=7, **how)
