"""A guarantee says whose data it protects, and guarantees of two units never become one."""

import dataclasses
import json

import dp_accounting
import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import Guarantee, Release, accounting, learning
from dpjax._core._guarantee import concrete
from tables import for_each

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dpjax.NeighboringRelation.REPLACE_ONE
PERSON, HOUSEHOLD = "person (id)", "household (address)"
OF_ROWS = Guarantee(0.25, relation=ADD)
OF_PEOPLE = Guarantee(0.25, relation=ADD, privacy_unit=PERSON)
PEOPLE_REPLACED = dataclasses.replace(OF_PEOPLE, relation=REPLACE)
OF_HOUSEHOLDS = Guarantee(0.25, relation=ADD, privacy_unit=HOUSEHOLD)
RUN = {"noise_multiplier": 2.0, "steps": 3, "delta": 1e-5, "dims": 2, "method": "renyi"}


PEOPLE = dataclasses.replace(
    dpjax.assume_sensitivity(4.0, norm="l1", relation=ADD),
    privacy_unit=PERSON,
    notes=("at most 4 rows each",),
)
IN_L2 = dataclasses.replace(PEOPLE, norm="l2")
FOR_PEOPLE = dpjax.laplace(PEOPLE, 0.25)
FOR_ROWS = dpjax.laplace(dpjax.assume_sensitivity(4.0, norm="l1", relation=ADD), 0.25)


def read_back(guarantee):
    text = json.dumps(Release(1.0, guarantee).to_dict())
    return Release.from_dict(json.loads(text)).guarantee


@pytest.fixture
def ledger(tmp_path):
    return dpjax.Ledger(tmp_path / "ledger.db", epsilon=10, delta="1e-4", relation=ADD)


def test_the_unit_is_printed():
    assert str(OF_ROWS) == "(epsilon=0.25, delta=0)-DP, under add-or-remove-one"
    assert str(OF_PEOPLE) == "(epsilon=0.25, delta=0)-DP, under add-or-remove-one, per person (id)"
    assert str(FOR_PEOPLE.guarantee) == f"{OF_PEOPLE}, at most 4 rows each"
    assert "add-or-remove-one, per person (id), at most 4 rows each; assumed" in repr(PEOPLE)


@for_each("unit", [7, None, b"person", "", "  "])
def test_a_unit_is_a_text(unit):
    with pytest.raises((TypeError, ValueError), match="privacy_unit must"):
        Guarantee(1.0, privacy_unit=unit)
    with pytest.raises((TypeError, ValueError), match="privacy_unit must"):
        accounting.compose_events(dp_accounting.GaussianDpEvent(1.0), delta=0.1, privacy_unit=unit)
    with pytest.raises((TypeError, ValueError), match="privacy_unit must"):
        accounting.dp_sgd(learning.poisson_sampling(9, batch_size=3), privacy_unit=unit, **RUN)


KEPT = {
    "concrete": lambda: concrete(OF_PEOPLE),
    "compose": lambda: accounting.compose(OF_PEOPLE, OF_PEOPLE),
    "compose_at": lambda: accounting.compose_at(FOR_PEOPLE, FOR_PEOPLE, delta=1e-6, method="zcdp"),
    "group": lambda: accounting.group(OF_PEOPLE, 3),
    "under": lambda: accounting.compose(
        OF_PEOPLE, dataclasses.replace(OF_PEOPLE, relation=REPLACE)
    ),
    "compose_events": lambda: accounting.compose_events(
        FOR_PEOPLE.dp_event, delta=1e-6, relation=ADD, privacy_unit=PERSON
    ),
    "dp_sgd": lambda: accounting.dp_sgd(
        learning.poisson_sampling(9, batch_size=3), privacy_unit=PERSON, relation=ADD, **RUN
    ),
    "dp_sgd, replaced": lambda: accounting.dp_sgd(
        learning.poisson_sampling(9, batch_size=3), privacy_unit=PERSON, relation=REPLACE, **RUN
    ),
    "shifted": lambda: accounting.under_distribution_shift(
        dataclasses.replace(OF_PEOPLE, gamma=0.1, relation=REPLACE), n=4, kl=0.01
    ),
    "post_process": lambda: accounting.post_process(Release(1.0, OF_PEOPLE), abs).guarantee,
    "mechanism": lambda: FOR_PEOPLE.guarantee,
    "floats": lambda: dpjax.laplace(PEOPLE, 0.25, noise="float").guarantee,
    "gaussian": lambda: dpjax.gaussian(IN_L2, 0.25, 1e-6).guarantee,
    "release": lambda: FOR_PEOPLE(dpjax.random.seeded_key(0), 3).guarantee,
    "jit": lambda: jax.jit(lambda x: x)(OF_PEOPLE),
    "vmap": lambda: jax.vmap(lambda e: dpjax.laplace(PEOPLE, e).guarantee)(jnp.array([0.1, 0.2])),
    "json": lambda: read_back(OF_PEOPLE),
}


@for_each("name", KEPT)
def test_no_computation_forgets_the_unit(name):
    assert KEPT[name]().privacy_unit == PERSON


MIXED = {
    "compose": lambda: accounting.compose(OF_ROWS, OF_PEOPLE),
    "two units of people": lambda: accounting.compose(OF_PEOPLE, OF_HOUSEHOLDS),
    "under two relations": lambda: accounting.compose(
        OF_PEOPLE, dataclasses.replace(OF_ROWS, relation=REPLACE)
    ),
    "parallel": lambda: accounting.parallel(OF_ROWS, OF_PEOPLE),
    **{
        method: lambda method=method: accounting.compose_at(
            FOR_ROWS, FOR_PEOPLE, delta=1e-6, method=method
        )
        for method in ("optimal", "drv", "kov", "zcdp", "renyi", "pld")
    },
}


@for_each("name", MIXED)
def test_two_units_do_not_add_up(name):
    with pytest.raises(ValueError, match=r"same privacy unit.* got '.*' and '.*'"):
        MIXED[name]()


def test_a_filter_and_an_odometer_are_about_one_unit():
    for account in (
        accounting.PrivacyFilter(epsilon=1.0, delta=1e-6, relation=ADD).admit,
        accounting.PrivacyOdometer(delta=1e-6, relation=ADD).add,
    ):
        account(FOR_PEOPLE)
        account(OF_PEOPLE)
        with pytest.raises(ValueError, match=r"got 'person \(id\)' and 'record'"):
            account(FOR_ROWS)


def test_rows_of_a_person_lie_in_several_parts(ledger):
    with pytest.raises(ValueError, match="may be in several parts"):
        accounting.parallel(OF_PEOPLE, OF_PEOPLE)
    with (
        ledger.parallel("cut") as part,
        part("Fair"),
        pytest.raises(ValueError, match="may be in several parts"),
    ):
        FOR_PEOPLE(dpjax.random.seeded_key(0), 3)
    assert ledger.spent.epsilon == 0


@for_each("first", [OF_ROWS, OF_PEOPLE])
def test_a_ledger_refuses_to_mix_units(first, tmp_path):
    path = tmp_path / f"{first.privacy_unit}.db"
    ledger = dpjax.Ledger(path, epsilon=1, relation=ADD)
    ledger.charge(first)
    (other,) = {OF_ROWS, OF_PEOPLE} - {first}
    for opened in (ledger, dpjax.Ledger(path, epsilon=1)):
        with pytest.raises(ValueError, match=r"per .*per .* do not add up") as refused:
            opened.charge(other)
        assert "per person (id)" in str(refused.value)
        assert "per record" in str(refused.value)
        assert opened.spent == first
        assert "per record" not in opened.history()[0]["guarantee"]


def test_a_share_refuses_to_mix_units(ledger):
    for share in (ledger.share(0.5), ledger.share(0.25)):
        with share:
            FOR_PEOPLE(dpjax.random.secure_key(), 3)
            with pytest.raises(ValueError, match=r"per person \(id\).*per record"):
                FOR_ROWS(dpjax.random.secure_key(), 3)
    assert ledger.spent.privacy_unit == PERSON
    assert {row["guarantee"].count(PERSON) for row in ledger.history()} == {1}


def test_files_of_records_are_as_before(ledger):
    """A reader of an earlier format would overlook the unit."""
    of_rows, people = Release(1.0, OF_ROWS).to_dict(), Release(1.0, OF_PEOPLE).to_dict()
    assert "privacy_unit" not in of_rows["guarantee"]
    assert (of_rows["format"], people["format"]) == (2, 3)
    assert Release.from_dict(of_rows).guarantee.privacy_unit == "record"
    ledger.charge(OF_ROWS)
    (debit,) = ledger._file.chain.debits()
    assert debit.body["neighbors"] == "add-or-remove-one, groups of 1"
    assert "privacy_unit" not in debit.body["guarantee"]


def test_a_sweep_names_the_unit():
    swept = dpjax.sweep(
        dpjax.random.seeded_key(0),
        lambda key, of: {"people": OF_PEOPLE, "rows": OF_ROWS}[of],
        static={"of": ["people", "rows"]},
    )
    assert swept["relation"].values.tolist() == [
        "add-or-remove-one, per person (id)",
        "add-or-remove-one",
    ]


def test_noise_for_another_unit_is_refused():
    """A number may be large enough and still belong to another pair of databases."""
    count = dpjax.queries.counting_query()
    slots = dpjax.queries.padded_records(jnp.ones(3), capacity=4)
    with pytest.raises(ValueError, match=r"'record', got a sensitivity for 'person \(id\)'"):
        dpjax.privatize(count, FOR_PEOPLE)(dpjax.random.seeded_key(0), slots)
    dpjax.privatize(count, FOR_ROWS)(dpjax.random.seeded_key(0), slots)
