"""What a table pays for, what it returns again, and what it refuses before it pays."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.accounting._prices import cost_of as cost_in_a_ledger
from dpjax.tables._question import cost_of

REPLACE, ADD = dpjax.NeighboringRelation
FRAME = {
    "g": np.array(["a", "b", "a", None], object),
    "x": np.array([1.0, np.nan, 3.0, 4.0]),
    "n": np.arange(4),
}
KEYS = {"g": ["a", "b"]}


@pytest.fixture
def opened(tmp_path):
    def opened(**settings):
        return dpjax.Ledger(tmp_path / "ledger.db", **{"epsilon": 1, "delta": 1e-6} | settings)

    return opened


def units_of(epsilon):
    return cost_in_a_ledger(dpjax.Guarantee(epsilon))[0]


def table(ledger=None, **settings):
    return dpjax.PrivateTable(FRAME, **{"ledger": ledger, "most_rows": 8} | settings)


def test_a_second_run_returns_what_was_paid_for(opened):
    def program():
        with opened() as ledger:
            asked = table(ledger)
            counts = asked.count(by=KEYS, epsilon=0.4)
            large = asked.count(where=lambda row: row["x"] > 2, share=0.4)
        return counts, large, ledger.spent

    *first, spent = program()
    *second, spent_twice = program()
    assert spent.epsilon == spent_twice.epsilon == 0.8
    for one, other in zip(first, second, strict=True):
        assert one.value.tolist() == other.value.tolist()
        assert one.labels == other.labels
        assert one.interval()[0].tolist() == other.interval()[0].tolist()


def test_another_question_pays(opened):
    with opened(epsilon=2) as ledger:
        asked = dpjax.PrivateTable({**FRAME, "m": np.zeros(4, int)}, ledger=ledger, most_rows=8)
        for how in (
            {},
            {"by": KEYS},
            {"by": {"g": ["b", "a"]}},
            {"by": {"g": ["a", "c"]}},
            {"where": lambda row: row["x"] > 2},
            {"where": lambda row: row["x"] > 3},
            {"where": lambda row: row["g"] == "a"},
            {"where": lambda row: row["g"] == "b"},
            {"where": lambda row: row["n"] > 1},
            {"where": lambda row: row["m"] > 1},  # The same program, of another column.
        ):
            before = ledger.spent.epsilon
            asked.count(epsilon=0.1, **how)
            assert ledger.spent.epsilon == pytest.approx(before + 0.1)
        assert [row["name"] for row in ledger.history()] != []
        assert "count by g" in repr(ledger.report())
        assert "#" not in repr(ledger.report())
        header, first, *_ = ledger.report().to_csv().splitlines()
        assert header == "time,what,name,version,guarantee,epsilon,delta,epsilon left,delta left"
        assert ",0.1,0,1.9,0.000001" in first.replace("E-7", "e-7")
        assert "count by g" in ledger.report()._repr_html_()


def test_bounds_are_found_and_paid_for_with_all_that_is_left(opened):
    """Both payments are rounded up to the digits of a ledger: .285 was not left of .38."""
    for epsilon in (0.38, 0.05, 1 / 3):
        part, rest = cost_of(epsilon, None, delta=None, budget=(0, 0), relation=ADD).split(4)
        assert sum(map(units_of, (part, rest.epsilon))) == units_of(epsilon)
    many = {"x": np.arange(1000.0) % 7}
    with opened(epsilon=0.38, delta=0) as ledger:
        found = dpjax.PrivateTable(many, ledger=ledger, most_rows=1000)
        found.sum("x", bounds=None, share=1.0, key=dpjax.random.seeded_key(0))
        assert ledger.remaining[0] == 0


def test_a_new_ledger_is_under_the_relation_of_its_table(opened):
    ledger = opened()
    assert ledger.relation is REPLACE
    table(ledger).count(epsilon=0.1)
    assert ledger.relation is opened().relation is ADD
    assert ledger.spent.epsilon == 0.1
    with pytest.raises(ValueError, match="the relation of the ledger"):
        table(ledger, relation=REPLACE)
    with pytest.raises(ValueError, match="relation must be"):
        opened(relation=REPLACE)


def test_a_ledger_under_another_relation_is_refused(opened):
    ledger = opened(relation=REPLACE)
    with pytest.raises(ValueError, match=r"relation=dpjax\.NeighboringRelation\.REPLACE_ONE"):
        table(ledger)
    with ledger, pytest.raises(ValueError, match="the relation of the ledger"):
        table()
    assert table(ledger, relation=REPLACE).relation is REPLACE
    assert ledger.spent.epsilon == 0


def test_a_name_stands_for_one_table(opened):
    ledger = opened()
    table(ledger)
    table(ledger)
    with pytest.raises(ValueError, match="name='' is already the name of another table"):
        dpjax.PrivateTable({"x": np.ones(3)}, most_rows=8, ledger=ledger)
    dpjax.PrivateTable({"x": np.ones(3)}, most_rows=8, ledger=ledger, name="other")


REFUSED = {
    "two prices": (TypeError, "exactly one", lambda t: t.count(epsilon=0.1, share=0.1)),
    "no price": (TypeError, "exactly one", lambda t: t.count()),
    "epsilon": (ValueError, "epsilon", lambda t: t.count(epsilon=-1)),
    "share": (ValueError, "share", lambda t: t.count(share=1.5)),
    "error": (ValueError, "error", lambda t: t.count(error=-1)),
    "column": (ValueError, "column", lambda t: t.sum("y", bounds=(0, 1), epsilon=0.1)),
    "text": (TypeError, "'g' must hold numbers", lambda t: t.mean("g", bounds=(0, 1), epsilon=1)),
    "bounds": (ValueError, "bounds", lambda t: t.mean("x", bounds={"y": (0, 1)}, epsilon=1)),
    "order": (ValueError, "upper", lambda t: t.mean("x", bounds=(1, 0), epsilon=1)),
    "keys": (TypeError, "keys", lambda t: t.count(by={"g": [1, 2]}, epsilon=0.1)),
    "crosstab": (ValueError, "keys", lambda t: t.crosstab(["g", "n"], keys=KEYS, epsilon=0.1)),
    "where": (TypeError, "where", lambda t: t.count(where=lambda row: row["x"], epsilon=0.1)),
    "no column": (ValueError, "column", lambda t: t.count(where=lambda r: r["y"] > 0, epsilon=1)),
    "nothing": (
        ValueError,
        "must depend on a column",
        lambda t: t.count(where=lambda r: True, epsilon=1),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_before_it_is_paid_for(what, opened):
    kind, told, ask = REFUSED[what]
    with opened() as ledger:
        with pytest.raises(kind, match=told):
            ask(table(ledger))
        assert ledger.spent.epsilon == 0


def test_a_list_is_refused_since_its_dtype_depends_on_its_entries():
    with pytest.raises(TypeError, match="column 'x' must be an array with a dtype, got a list"):
        dpjax.PrivateTable({"x": [1, 2]}, most_rows=8).sum("x", bounds=(0, 1), epsilon=1)


def test_rows_and_lengths_are_checked():
    with pytest.raises(ValueError, match="most_rows must be enough for every possible table"):
        table(most_rows=3)
    with pytest.raises(ValueError, match="columns of one length"):
        dpjax.PrivateTable({"x": np.ones(3), "y": np.ones(2)}, most_rows=8)
    with pytest.raises(TypeError, match="frame must be a table"):
        dpjax.PrivateTable(np.ones(3), most_rows=8)
    strange = {"x": np.ones(2), "when": np.array(["2020-01-01"] * 2, "datetime64[s]")}
    assert "when" in repr(dpjax.PrivateTable(strange, most_rows=8))  # Only what is used counts.


def test_an_error_buys_the_least_epsilon():
    release = table().count(by=KEYS, error=20, key=dpjax.random.seeded_key(0))
    low, high = release.interval()
    assert ((high - low) / 2).tolist() == [20, 20]
    epsilon = release.guarantee.epsilon
    narrower = table().count(by=KEYS, epsilon=epsilon * 0.998, key=dpjax.random.seeded_key(0))
    low, high = narrower.interval()
    assert ((high - low) / 2).tolist() == [21, 21]


def test_gaussian_noise_is_taken_where_it_is_smaller():
    many = {"g": [f"key {i}" for i in range(40)]}
    few = table().count(by=KEYS, epsilon=1.0, delta=1e-6)
    assert few.guarantee.delta == 0  # One row moves one count, so Laplace noise is smaller.
    assert table().count(by=many, epsilon=1.0, delta=1e-6).guarantee.delta == 0
    assert table().count(epsilon=1.0, delta=0.2).guarantee.delta == 0.2


def test_a_release_says_what_its_numbers_are_about():
    release = table().count(by=KEYS, epsilon=1.0, key=dpjax.random.seeded_key(0))
    frame = release.to_frame()
    assert frame.index.tolist() == ["a", "b"]
    assert frame.index.name == "g"
    assert frame["value"].tolist() == release.value.tolist()
    assert (frame["low"] < frame["value"]).all()
    again = dpjax.Release.from_dict(release.to_dict())
    assert again.labels == release.labels
    assert again.to_frame().equals(frame)
    assert "count by g" in release._repr_html_()
    forged = release.to_dict()
    forged["labels"] = forged["labels"] | {"statistic": "mean of x"}
    with pytest.raises(ValueError, match="must be unchanged"):
        dpjax.Release.from_dict(forged)
    assert release.plot().get_xticklabels()[0].get_text() == "a"
    assert isinstance(jnp.asarray(release.value), jnp.ndarray)


def test_bounds_are_not_paid_for_a_question_that_is_refused(tmp_path):
    frame = {"x": np.arange(900.0), "g": np.arange(900) % 2}
    with dpjax.Ledger(tmp_path / "found.db", epsilon=1) as ledger:
        table = dpjax.PrivateTable(frame, most_rows=1000, ledger=ledger)
        ask = {"bounds": None, "epsilon": 0.4}
        with pytest.raises(ValueError, match="column"):
            table.mean("x", by={"no": [1]}, **ask)
        with pytest.raises(ValueError, match="probabilit"):
            table.quantiles("x", [1.5], **ask)
        with pytest.raises(ValueError, match="delta"):
            table.sum("x", delta=2.0, **ask)
        table.count(epsilon=0.8)
        with pytest.raises(dpjax.BudgetExceededError, match="needs an extra release"):
            table.variance("x", **ask)
        assert ledger.spent.epsilon == pytest.approx(0.8)
