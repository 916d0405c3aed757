"""Linkage: a table without names has them again, and private counts of the same table do not."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import anonymity, guessing_bound, linkage, synthetic_register
from dpjax.attacks._linkage import _AGES, _FEMALE, _YEARS

QUASI_IDENTIFIERS = ["zip", "birth_day", "female"]
PEOPLE, ZIPS, DIAGNOSES, EPSILON = 3_000, 1, 3, 1.0


@pytest.fixture(scope="module")
def register():
    return synthetic_register(jax.random.key(0), PEOPLE, zips=ZIPS, diagnoses=DIAGNOSES)


@pytest.fixture(scope="module")
def anonymized(register):
    """A third of the people, in another order, and their diagnoses."""
    rows = np.random.default_rng(0).permutation(PEOPLE)[: PEOPLE // 3]
    return rows, {name: column[rows] for name, column in register.items()}


def expected_unique(people, zips):
    """The share of people who are alone in their cell, from the marginals."""
    days = 365 * np.asarray(_YEARS)
    cells = np.outer(_AGES, [_FEMALE, 1 - _FEMALE]) / 100 / days[:, None] / zips
    return np.sum(zips * days[:, None] * cells * (1 - cells) ** (people - 1))


def test_a_register_is_that_of_its_key(register):
    """The same people under the same key, others under another."""

    def drawn(key):
        return synthetic_register(jax.random.key(key), PEOPLE, zips=5, diagnoses=DIAGNOSES)

    first, again, other = drawn(0), drawn(0), drawn(1)
    for name in register:
        np.testing.assert_array_equal(first[name], again[name])
        assert np.mean(first[name] == other[name]) < 0.6  # Sex agrees in half of the rows.


def test_matches_are_those_of_a_search():
    rng = np.random.default_rng(1)
    table = {"a": rng.integers(12, size=30), "b": rng.choice(["x", "y"], 30)}
    register = {"a": rng.integers(16, size=40), "b": rng.choice(["x", "y", "z"], 40)}
    found = linkage(table, register, on=["a", "b"])
    rows = list(zip(table["a"], table["b"], strict=True))
    known = list(zip(register["a"], register["b"], strict=True))
    counts = [(rows.count(row), known.count(row)) for row in rows]
    assert {(1, 0), (1, 1), (1, 2), (3, 1)} <= set(counts)
    assert found.candidates.tolist() == [candidates for _, candidates in counts]
    assert found.row.tolist() == [
        known.index(row) if count == (1, 1) else -1 for row, count in zip(rows, counts, strict=True)
    ]
    assert anonymity(table, on=["a", "b"]).tolist() == [alike for alike, _ in counts]


def test_most_rows_are_linked_and_none_wrongly(register, anonymized):
    rows, table = anonymized
    found = linkage(table, register, on=QUASI_IDENTIFIERS)
    linked = found.row >= 0
    assert np.array_equal(found.row[linked], rows[linked])
    assert np.mean(linked) > 0.85
    # Without the date of birth every row has company.
    assert np.all(linkage(table, register, on=["zip", "female"]).row == -1)


def test_as_many_are_unique_as_the_marginals_say(register):
    """False alarms: 1e-6, by McDiarmid: a person changes the number of unique ones by 2 at most."""
    unique = np.mean(anonymity(register, on=QUASI_IDENTIFIERS) == 1)
    slack = math.sqrt(2 * math.log(2e6) / PEOPLE)
    assert unique == pytest.approx(expected_unique(PEOPLE, ZIPS), abs=slack)
    # Sweeney's 87%, in a ZIP code of the mean size of 1990.
    assert expected_unique(8_500, 1) == pytest.approx(0.87, abs=0.01)


def test_private_counts_of_the_same_table_tell_no_diagnosis(register, anonymized, key):
    """All counts of (ZIP, date of birth, sex) by diagnosis: the table itself, as a table of counts.

    Without noise they give away the diagnosis of everyone who is alone in a cell. False alarms:
    1e-6.
    """
    _, table = anonymized
    days = 365 * sum(_YEARS)
    cell = (table["zip"] * days + table["birth_day"]) * 2 + table["female"]
    cells = ZIPS * days * 2

    def counts(codes):
        return jnp.zeros(cells * DIAGNOSES, int).at[codes].add(1)

    codes = jnp.asarray(cell * DIAGNOSES + table["diagnosis"])
    # Under replace-one a record leaves one cell and enters another.
    mechanism = dpjax.laplace(dpjax.assume_sensitivity(2, norm="l1"), EPSILON)
    release = dpjax.privatize(counts, mechanism)(key, codes)
    bound = guessing_bound(release.guarantee, categories=DIAGNOSES)
    alone = anonymity(table, on=QUASI_IDENTIFIERS) == 1

    def right(published):
        likeliest = np.argmax(np.asarray(published).reshape(cells, DIAGNOSES), axis=1)
        return int(np.sum((likeliest[cell] == table["diagnosis"])[alone]))

    def exceeds(hits):
        return scipy.stats.binomtest(hits, int(sum(alone)), bound, alternative="greater").pvalue

    assert right(counts(codes)) == sum(alone) > 900
    assert exceeds(right(counts(codes))) < 1e-12  # The power of this test.
    assert exceeds(right(release.value)) > 1e-6


def test_tables_without_the_columns_are_refused(register):
    with pytest.raises(ValueError, match="register"):
        linkage(register, {"name": np.arange(3)}, on=["zip"])
    with pytest.raises(ValueError, match="lacks"):
        anonymity(register, on=["shoe_size"])
    with pytest.raises(ValueError, match="columns"):
        anonymity(register, on=[])
    with pytest.raises(TypeError, match="sequence"):
        anonymity(register, on="zip")
    with pytest.raises(ValueError, match="length"):
        anonymity({"a": np.arange(2), "b": np.arange(3)}, on=["a", "b"])


def test_a_data_frame_is_a_table(register):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(register)
    assert np.array_equal(
        anonymity(frame, on=QUASI_IDENTIFIERS), anonymity(register, on=QUASI_IDENTIFIERS)
    )
