"""The ledger: releases are paid for before they are drawn, and what was released is free."""

import dataclasses
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Guarantee, Release, SampledEvent
from dpjax._core._open_ledgers import Request
from dpjax._core._pytree import TreeSpec
from dpjax.release._draw import Draw

LAPLACE = dpjax.laplace(1.0, 0.1)
RECORDS = np.linspace(0, 1, 5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path):
    return dpjax.Ledger(path, epsilon=1.0, delta="1e-6")


def paid(ledger):
    """How many releases were."""
    return len(ledger.history())


# The budget.


def test_ten_tenths_are_one(ledger, keys):
    with ledger:
        for i in range(10):
            LAPLACE(keys(i), 0.5)
        assert ledger.remaining == (0, Decimal("0.000001"))
        assert ledger.spent.epsilon == 1.0
        with pytest.raises(
            dpjax.BudgetExceededError, match=r"costs epsilon 0\.1, .* has epsilon 0 and .* left"
        ):
            LAPLACE(keys(10), 0.5)
    assert paid(ledger) == 10


@pytest.mark.parametrize("epsilon", [1 / 3, 1e-300, 0.1 + 0.2, 2 / 3 * 1e-9])
@pytest.mark.parametrize("delta", [0.0, 1e-7 / 3, 1e-250])
def test_costs_are_rounded_up(epsilon, delta, ledger):
    ledger.charge(Guarantee(epsilon, delta))
    (row,) = ledger.history()
    assert 0 <= Fraction(row["epsilon"]) - Fraction(repr(epsilon)) < Fraction("1e-12")
    assert 0 <= Fraction(row["delta"]) - Fraction(repr(delta)) < Fraction("1e-24")
    spent = ledger.spent
    assert 0 <= Fraction(repr(spent.epsilon)) - Fraction(row["epsilon"]) <= epsilon * 2**-51
    assert 0 <= Fraction(repr(spent.delta)) - Fraction(row["delta"]) <= delta * 2**-51 + 1e-39


@pytest.mark.parametrize("epsilon", ["0.3", "0.7", "1.2", "123.456789012345"])
def test_what_is_spent_is_the_decimal_that_was_paid(epsilon, path):
    """Neither in print nor as a float64 is it above the budget."""
    ledger = dpjax.Ledger(path, epsilon=epsilon, delta="1e-6")
    ledger.charge(Guarantee(float(epsilon), 1e-6))
    assert (ledger.spent.epsilon, ledger.spent.delta) == (float(epsilon), 1e-6)
    assert ledger.remaining == (0, 0)


@pytest.mark.parametrize("parts", [(1234567.0, 0.123456789012), (2.0**53, 1.0), (1e9, 3e-12)])
def test_what_is_spent_is_never_below_what_was_paid(parts, path):
    """A decimal of more digits than a float64 has is rounded up."""
    ledger = dpjax.Ledger(path, epsilon="1e18")
    for part in parts:
        ledger.charge(Guarantee(part))
    paid_for = sum(Fraction(row["epsilon"]) for row in ledger.history())
    assert paid_for <= Fraction(repr(ledger.spent.epsilon)) <= paid_for * (1 + Fraction(1, 2**51))


def test_what_is_spent_prints_as_it_was_paid(path):
    ledger = dpjax.Ledger(path, epsilon="0.3", delta="1e-6")
    for _ in range(3):
        ledger.charge(Guarantee(0.1, 1e-7))
    assert repr(ledger.spent) == "(epsilon=0.3, delta=3e-07)-DP, under replace-one"


@pytest.mark.parametrize("epsilon", [0.1, 3.3])
def test_noise_covers_the_decimal_that_is_charged(epsilon):
    """Which may be below the float64 by half a unit in its last place."""
    exact = Fraction(repr(epsilon))
    assert (
        Fraction(dpjax.laplace(1.0, epsilon).effective_scale()) > (1 + Fraction(1, 2**40)) / exact
    )
    lie = Fraction(int(dpjax.randomized_response(epsilon).lie_weight), 2**32)
    assert float((1 - lie) / lie) < np.exp(epsilon)


@pytest.mark.parametrize(
    ("epsilon", "delta", "expected"),
    [
        (0.1, 1e-5, ("0.1", "0.00001")),
        ("3", Decimal("0.5"), ("3", "0.5")),
        (1, 0, ("1", "0")),
        ("12345678901234567890.123456789012", 0, ("12345678901234567890.123456789012", "0")),
        # Rounded down: a budget never grows.
        ("1.0000000000009", "1.9e-24", ("1", "1e-24")),
        (1 / 3, Decimal(1) - Decimal("1e-25"), ("0.333333333333", "0." + "9" * 24)),
    ],
)
def test_budgets_are_decimals(epsilon, delta, expected, path):
    ledger = dpjax.Ledger(path, epsilon=epsilon, delta=delta)
    assert ledger.budget == ledger.remaining == tuple(map(Decimal, expected))
    assert f"spent epsilon 0, of epsilon {expected[0]}" in repr(ledger)


@pytest.mark.parametrize(
    ("budget", "error"),
    [
        ({"epsilon": 0}, ValueError),
        ({"epsilon": "0.9e-12"}, ValueError),
        ({"epsilon": -1.0}, ValueError),
        ({"epsilon": float("nan")}, ValueError),
        ({"epsilon": float("inf")}, ValueError),
        ({"epsilon": "much"}, ValueError),
        ({"epsilon": "1e1000000000"}, ValueError),
        ({"epsilon": Decimal("1e-1000000000")}, ValueError),
        ({"epsilon": None}, TypeError),
        ({"epsilon": True}, TypeError),
        ({"epsilon": 1, "delta": 1}, ValueError),
        ({"epsilon": 1, "delta": -1e-9}, ValueError),
        ({"epsilon": 1, "version": 2}, TypeError),
    ],
)
def test_budgets_out_of_range(budget, error, path):
    with pytest.raises(error, match="must be"):
        dpjax.Ledger(path, **budget)
    assert not path.exists()


@pytest.mark.parametrize(
    "promise",
    [
        Guarantee(float("inf"), 1.0),
        Guarantee(0.1, 1.0),
        dpjax.laplace(1.0, 0.1, noise="float").guarantee,
    ],
)
def test_no_budget_pays_for_nothing(promise, ledger):
    with pytest.raises(dpjax.BudgetExceededError, match="release must have a finite epsilon"):
        ledger.charge(promise)
    assert paid(ledger) == 0


@pytest.mark.parametrize("what", [None, 3, b"bytes", object()])
def test_a_description_is_a_text(what, ledger):
    with pytest.raises(TypeError, match="what must be a string, got"):
        ledger.charge(Guarantee(0.1), what=what)
    assert paid(ledger) == 0


def test_guarantees_that_do_not_add_up_are_refused(ledger):
    ledger.charge(Guarantee(0.1))
    with pytest.raises(ValueError, match="do not add up"):
        ledger.charge(dpjax.accounting.group(Guarantee(0.1), 2))
    for bad in (Guarantee(jnp.float32("nan")), Guarantee(np.ones(2))):
        with pytest.raises(ValueError, match=r"NaN|one number"):
            ledger.charge(bad)
    assert paid(ledger) == 1


def test_spent_is_what_compose_says(ledger, path):
    def sampled(identity, gamma=0.05):
        return Guarantee(0.125, 1e-8, gamma, 0.99, (SampledEvent(gamma, 0.99, identity),))

    by_hand = Guarantee(0.0625, gamma=0.01, confidence=0.9, notes=("seeded key",))
    for guarantee in (sampled("a"), sampled("b", 0.02), by_hand, sampled("a")):
        ledger.charge(guarantee)
    spent = dpjax.Ledger(path, epsilon=1, delta="1e-6").spent
    assert isinstance(spent, Guarantee)
    assert spent.epsilon == 0.4375
    assert 3e-8 <= spent.delta < 3.0001e-8
    assert spent.gamma == pytest.approx(0.08, rel=1e-12)
    assert spent.confidence == pytest.approx(0.88, rel=1e-12)
    assert spent.notes == ("seeded key",)
    # By now the one that was written by hand has an identity for good.
    assert dpjax.accounting.compose(spent, ledger.spent).gamma == spent.gamma


def test_a_new_ledger_has_spent_nothing(ledger):
    assert repr(ledger.spent) == "(epsilon=0, delta=0)-DP, under replace-one"
    assert ledger.history() == []


# Releases.


def test_a_debit_is_on_the_disk_before_noise_is_drawn(ledger, path, keys, monkeypatch):
    seen, draw = [], Draw.__call__

    def observed(self, key, value):
        if isinstance(key, jax.core.Tracer):  # Traced, to find out what is asked for.
            return draw(self, key, value)
        mark = int(path.with_name("ledger.db.mark").read_text().split()[0])
        other = dpjax.Ledger(path, epsilon=1.0, delta="1e-6")  # Which would raise the mark.
        seen.append((other.remaining[0], mark))
        return draw(self, key, value)

    monkeypatch.setattr(Draw, "__call__", observed)
    dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)(keys(0), RECORDS, name="ages")
    with ledger:
        LAPLACE(keys(1), 0.5)
    # The third entry is the second debit: between them what the first has released.
    assert seen == [(Decimal("0.9"), 1), (Decimal("0.8"), 3)]


def test_a_release_that_fails_has_paid(ledger, keys, monkeypatch):
    draw = Draw.__call__

    def fail(self, key, value):
        if isinstance(key, jax.core.Tracer):  # Traced, to find out what is asked for.
            return draw(self, key, value)
        raise MemoryError

    monkeypatch.setattr(Draw, "__call__", fail)
    with pytest.raises(MemoryError):
        dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)(keys(0), RECORDS)
    assert (paid(ledger), ledger.history()[0]["kept"]) == (1, False)


def test_what_is_refused_before_a_release_costs_nothing(ledger, keys):
    private = dpjax.privatize(jnp.mean, dpjax.randomized_response(0.1), ledger=ledger)
    with pytest.raises(TypeError, match="integer categories"):
        private(keys(0), RECORDS)
    assert paid(ledger) == 0
    bound = dpjax.assume_sensitivity(1.0, norm="l1", n=3)
    with pytest.raises(ValueError, match="n=3"):
        dpjax.privatize(jnp.mean, dpjax.laplace(bound, 0.1), ledger=ledger)(keys(0), RECORDS)
    with pytest.raises(dpjax.BudgetExceededError):
        dpjax.privatize(jnp.mean, dpjax.laplace(1.0, 1.1), ledger=ledger)(keys(0), RECORDS)
    assert paid(ledger) == 0
    with ledger:
        LAPLACE(keys(0), 0.5)  # Nor does it use up a key.


def test_the_same_request_has_the_same_release(ledger, path, keys):
    private = dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)
    first = private(keys(0), RECORDS, name="ages")
    again = dpjax.Ledger(path, epsilon=1.0, delta="1e-6")
    with again:
        # Another key, other functions, another mechanism of the same numbers, other records.
        twin = dpjax.privatize(lambda x: jnp.mean(x), dpjax.laplace(1.0, 0.1))
        second = twin(keys(1), RECORDS + 1, name=np.str_("ages"))
        third = twin(keys(0), RECORDS, name="ages")
    for release in (second, third):
        assert release.value == first.value
        assert release.value.dtype == first.value.dtype
        assert repr(release.guarantee) == repr(first.guarantee)
    (row,) = again.history()
    assert (row["kept"], row["what"], row["name"]) == (True, "mean", "ages")
    with again:
        LAPLACE(keys(1), 0.5)  # Its key was not used.


def test_what_was_released_stays_free_when_nothing_is_left(path, keys):
    ledger = dpjax.Ledger(path, epsilon=0.1)
    private = dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)
    first = private(keys(0), RECORDS, name="ages")
    assert private(keys(1), RECORDS, name="ages").value == first.value
    for other in (
        lambda: dpjax.privatize(jnp.sum, LAPLACE, ledger=ledger)(keys(1), RECORDS, name="ages"),
        lambda: private(keys(1), RECORDS, name="heights"),
        lambda: private(keys(1), RECORDS),
    ):
        with pytest.raises(dpjax.BudgetExceededError):
            other()


def scaled(factor):
    return lambda records: factor * jnp.mean(records)


def sampled(identity):
    made = dpjax.assume_sensitivity(1.0, norm="l1")
    return dataclasses.replace(made, gamma=0.01, confidence=0.9, identity=identity)


def test_requests_that_differ_in_anything_pay(path, keys):
    ledger = dpjax.Ledger(path, epsilon=10)
    later = dpjax.Ledger(path, epsilon=10, version="2027")
    bound = dpjax.assume_sensitivity(1.0, norm="l1", n=5)
    small = RECORDS.astype("float16")
    asked = [
        (scaled(1.0), LAPLACE, RECORDS, ledger),
        (scaled(1.0), LAPLACE, RECORDS, later),
        (scaled(2.0), LAPLACE, RECORDS, ledger),
        (scaled(1.0), LAPLACE, small, ledger),
        (scaled(1.0), LAPLACE, RECORDS.reshape(5, 1), ledger),
        (scaled(1.0), dpjax.laplace(1.0, np.nextafter(0.1, 1)), RECORDS, ledger),
        (scaled(1.0), dpjax.laplace(np.nextafter(1.0, 2), 0.1), RECORDS, ledger),
        (scaled(1.0), dpjax.laplace(bound, 0.1), RECORDS, ledger),
        (scaled(1.0), dpjax.laplace(sampled("a"), 0.1), RECORDS, ledger),
        (scaled(1.0), dpjax.laplace(sampled("b"), 0.1), RECORDS, ledger),
    ]
    made = [(dpjax.privatize(f, mechanism, ledger=one), x) for f, mechanism, x, one in asked]
    for i, (private, records) in enumerate(made):
        private(keys(i), records, name="ages")
        assert paid(ledger) == i + 1
    for i, (private, records) in enumerate(made):
        private(keys(i), records, name="ages")
    assert paid(ledger) == len(asked)
    assert len({row["request"] for row in ledger.history()}) == len(asked)


def test_releases_of_every_kind_are_read_back(ledger, path):
    promise = Guarantee(0.1, 1e-9, 0.05, None, (SampledEvent(0.05, None, "a"),), notes=("note",))
    kinds = [
        {"a": jnp.float32(np.nan), "b": (jnp.array([True, False]), jnp.int8(3))},
        dpjax.BernsteinPolynomial(jnp.arange(4.0).reshape(2, 2)),
        jnp.arange(3, dtype=jnp.bfloat16),
        jnp.zeros((0, 2)),
    ]
    again = dpjax.Ledger(path, epsilon=1, delta="1e-6")
    for i, value in enumerate(kinds):
        request = Request("name", str(i), TreeSpec.of(value))
        assert again.released(request) is None
        ledger.keep(request, Release(value, promise))
        # Of several the first counts.
        other = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), value)
        kept = again.keep(request, Release(other, promise))
        assert jax.tree.structure(kept) == jax.tree.structure(Release(value, promise))
        for one, two in zip(jax.tree.leaves(kept), jax.tree.leaves((value, promise)), strict=True):
            np.testing.assert_array_equal(one, two)
            assert getattr(one, "dtype", None) == getattr(two, "dtype", None)
    assert dpjax.Ledger(path, epsilon=1, delta="1e-6", version="2").released(request) is None


def test_refusals_do_not_depend_on_the_database(tmp_path, keys):
    """All that the ledger says of neighbors is the same, whatever the records hold."""

    def said(folder, records):
        (tmp_path / folder).mkdir()
        ledger = dpjax.Ledger(tmp_path / folder / "ledger.db", epsilon=0.25)
        errors = []
        for target, key in ((jnp.mean, 0), (jnp.mean, 1), (jnp.sum, 0), (jnp.sum, 1), (jnp.max, 2)):
            try:
                private = dpjax.privatize(target, LAPLACE, ledger=ledger)
                private(keys(key), records, name="ages")
                errors.append(None)
            except (ValueError, dpjax.BudgetExceededError) as error:
                errors.append(str(error))
        rows = [{**row, "time": None} for row in ledger.history()]
        return errors, rows, repr(ledger.spent)

    ordinary = said("ordinary", RECORDS)
    assert [error is None for error in ordinary[0]] == [True, True, False, True, False]
    for strange in (np.nan, np.inf, 1e300):
        assert said(str(strange), np.append(RECORDS[:-1], strange)) == ordinary


# Keys, and other ledgers.


def test_a_key_that_comes_again_is_refused_and_pays_nothing(ledger, path, keys):
    with ledger:
        LAPLACE(keys(0), 0.5)
    again = dpjax.Ledger(path, epsilon=1, delta="1e-6")
    with again, pytest.raises(ValueError, match="was used for a release before"):
        LAPLACE(keys(0), 0.5)
    with pytest.raises(ValueError, match="was used for a release before"):
        again.charge(Guarantee(0.1), key=keys(0))
    again.charge(Guarantee(0.1), key=keys(1), what="by hand")
    with pytest.raises(ValueError, match="was used for a release before"):
        dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)(keys(1), RECORDS)
    assert [row["what"] for row in ledger.history()] == ["AdditiveMechanism", "by hand"]


def test_a_key_that_a_ledger_of_keys_refuses_pays_nothing(ledger, keys):
    used = dpjax.random.KeyLedger()
    used.claim(keys(0))
    with ledger, used:
        with pytest.raises(ValueError, match="was used"):
            LAPLACE(keys(0), 0.5)
        LAPLACE(keys(1), 0.5)
    assert (paid(ledger), len(used)) == (1, 2)


def test_one_release_is_paid_for_once(ledger, tmp_path, keys):
    private = dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)
    with ledger as opened, ledger:
        assert opened is ledger
        private(keys(0), RECORDS)
        LAPLACE(keys(1), 0.5)
    assert paid(ledger) == 2
    LAPLACE(keys(1), 0.5)  # Closed.
    other = dpjax.Ledger(tmp_path / "other.db", epsilon=1)
    with other, pytest.raises(ValueError, match="one ledger pays for a release, got 2 open"):
        private(keys(2), RECORDS)
    assert (paid(ledger), paid(other)) == (2, 0)


def test_what_may_release_many_times_is_refused(ledger, keys):
    private = dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)
    many = jax.random.split(keys(0))
    with ledger:
        for release in (
            lambda: jax.jit(private)(keys(0), RECORDS),
            lambda: jax.vmap(private, (0, None))(many, RECORDS),
            lambda: jax.jit(LAPLACE)(keys(0), 0.5),
            lambda: jax.vmap(lambda k: LAPLACE(k, 0.5).value)(many),
            lambda: jax.vmap(lambda e: dpjax.laplace(1.0, e)(keys(0), 0.5).value)(jnp.ones(2)),
            lambda: jax.vmap(lambda c: dpjax.privatize(scaled(c), LAPLACE)(keys(0), RECORDS).value)(
                jnp.ones(2)
            ),
            lambda: jax.jit(lambda g: ledger.charge(g))(Guarantee(0.1)),
            lambda: jax.jit(lambda k: ledger.charge(Guarantee(0.1), key=k))(keys(0)),
        ):
            with pytest.raises(TypeError, match="host"):
                release()
    assert paid(ledger) == 0


def test_what_is_no_ledger_is_told():
    with pytest.raises(TypeError, match=r"ledger must be a dpjax\.Ledger"):
        dpjax.privatize(jnp.mean, LAPLACE, ledger="ledger.db")


def test_a_file_that_cannot_be_trusted_releases_nothing(ledger, path, keys, monkeypatch):
    drawn = []
    monkeypatch.setattr(Draw, "__call__", lambda *_: drawn.append(1))
    path.with_name("ledger.db.mark").write_text("0 0 0")
    with ledger, pytest.raises(dpjax.LedgerError, match="corrupted"):
        LAPLACE(keys(0), 0.5)
    assert not drawn


# What it says.


def test_history_is_a_table(ledger, keys):
    pandas = pytest.importorskip("pandas")
    dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)(keys(0), RECORDS, name="ages")
    with ledger:
        dpjax.gaussian(1.0, 0.25, 1e-7)(keys(1), 0.5)
    table = pandas.DataFrame(ledger.history())
    assert list(table["what"]) == ["mean", "AdditiveMechanism"]
    assert list(table["spent_epsilon"]) == [Decimal("0.1"), Decimal("0.35")]
    assert list(table["spent_delta"]) == [0, Decimal("1e-7")]
    assert list(table["name"]) == ["ages", ""]
    assert list(table["kept"]) == [True, False]
    assert list(table["notes"]) == ["seeded key"] * 2
    assert table["time"].is_monotonic_increasing
    assert repr(ledger).endswith(
        "spent epsilon 0.35 and delta 0.0000001, of epsilon 1 and delta 0.000001)"
    )


def test_nothing_of_key_or_database_is_in_the_files(ledger, path):
    key = dpjax.random.secure_key()
    records = np.random.default_rng(0).normal(size=50).astype("float32")
    exact = np.float32(np.mean(records))
    dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)(key, records)
    data = b"".join(file.read_bytes() for file in path.parent.iterdir())
    words = np.asarray(jax.random.key_data(key)).tobytes()
    secrets = [words[i : i + 4] for i in range(0, 32, 4)]
    secrets += [x.tobytes() for x in records] + [exact.tobytes(), repr(float(exact)).encode()]
    assert not [secret for secret in secrets if secret in data]


@pytest.mark.slow
def test_another_process_asks_for_the_same(ledger, path, run_python):
    code = f"""
import jax.numpy as jnp, numpy as np, dpjax
ledger = dpjax.Ledger({str(path)!r}, epsilon=1, delta="1e-6")
weights = np.linspace(0, 1, 5)
private = dpjax.privatize(lambda x: jnp.dot(x, weights), dpjax.laplace(1.0, 0.1), ledger=ledger)
print(float(private(dpjax.random.secure_key(), np.ones(5), name="ones").value))
"""
    assert run_python(code) == run_python(code)
    assert paid(ledger) == 1
