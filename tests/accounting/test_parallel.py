"""Releases on disjoint parts: the largest counts, and under add-or-remove-one alone."""

import contextlib
import copy
import itertools
import math
import os
import pickle
import threading
from decimal import Decimal

import jax
import numpy as np
import pytest

import dpjax
from dpjax import Guarantee, NeighboringRelation, queries
from dpjax._core._open_ledgers import Payment
from dpjax.accounting import compose, group, parallel
from dpjax.release._draw import Draw

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
both_relations = pytest.mark.parametrize("relation", [REPLACE, ADD], ids=str)
TABLE = {
    "cut": np.repeat(["Fair", "Good", "Ideal"], [100, 200, 300]),
    "price": np.repeat([10.0, 50.0, 90.0], [100, 200, 300]),
}
SLOTS = queries.padded_records(TABLE, capacity=700)
CUTS = ("Fair", "Good", "Ideal")


def test_the_largest_counts():
    parts = [Guarantee(e, d, relation=ADD) for e, d in ((0.5, 1e-6), (1.0, 1e-9), (0.2, 0.0))]
    together = parallel(*parts)
    assert (together.epsilon, together.delta) == (1.0, 1e-6)
    assert together.relation is ADD
    assert parallel(parts[2]).epsilon == 0.2


def test_a_histogram_is_one_mechanism_for_every_bucket():
    """Counting buckets one by one costs what counting them at once does; replaced, twice."""
    query = dpjax.queries.histogram_query(100)
    at_once = dpjax.laplace(query.sensitivity(relation=ADD), epsilon=0.5)
    one = dpjax.laplace(dpjax.queries.counting_query().sensitivity(relation=ADD), epsilon=0.5)
    assert one.scale == at_once.scale
    assert parallel(*[one.guarantee] * 100).epsilon == at_once.guarantee.epsilon
    replaced = dpjax.laplace(query.sensitivity(), epsilon=1.0)
    assert replaced.scale == at_once.scale
    assert group(parallel(*[one.guarantee] * 100), 2).epsilon == replaced.guarantee.epsilon


def test_two_parts_of_binary_randomized_response_by_enumeration():
    """A record that is added to one part changes the joint distribution by the part's epsilon."""
    epsilons = 0.7, 1.2
    with_it = [np.array([np.exp(e), 1.0]) / (1 + np.exp(e)) for e in epsilons]
    without = [p[::-1] for p in with_it]
    joint = [np.outer(with_it[0], without[1]), np.outer(without[0], with_it[1])]
    nobody = np.outer(*without)
    worst = max(np.abs(np.log(p / nobody)).max() for p in joint)
    stated = parallel(*(Guarantee(e, relation=ADD) for e in epsilons)).epsilon
    assert worst == pytest.approx(stated, rel=1e-12)
    # Replaced from one part to the other it is more.
    assert np.abs(np.log(joint[0] / joint[1])).max() > stated


def test_replaced_records_and_groups_are_refused():
    with pytest.raises(ValueError, match="add-or-remove-one"):
        parallel(Guarantee(1.0), Guarantee(1.0))
    with pytest.raises(ValueError, match="groups"):
        parallel(group(Guarantee(1.0, relation=ADD), 2))
    with pytest.raises(ValueError, match="at least one"):
        parallel()


def test_notes_and_samplings_are_those_of_all():
    parts = [
        Guarantee(1.0, relation=ADD, notes=("seeded key",)),
        Guarantee(0.5, gamma=0.1, confidence=0.99, relation=ADD),
    ]
    together = parallel(*parts)
    assert (together.gamma, together.confidence) == (0.1, 0.99)
    assert together.notes == compose(*parts).notes


# The block of a ledger.


@pytest.fixture
def ledger(tmp_path):
    return dpjax.Ledger(tmp_path / "parts.db", epsilon=10, delta=1e-3, relation=ADD)


@pytest.fixture
def ledger_under(tmp_path):
    return lambda relation: dpjax.Ledger(
        tmp_path / "under.db", epsilon=10, delta=1e-3, relation=relation
    )


def count(epsilon, relation=ADD):
    query = queries.counting_query()
    sensitivity = (
        query.sensitivity(relation=relation)
        if relation is ADD
        else dpjax.assume_sensitivity(1.0, norm="l1", relation=relation)
    )
    return dpjax.privatize(query, dpjax.laplace(sensitivity, epsilon))


def release(records, epsilon, **options):
    return count(epsilon)(dpjax.random.secure_key(), records, **options)


def test_parts_of_a_column_are_disjoint_and_show_no_size():
    found = queries.split_by(TABLE, column="cut", keys=["Ideal", "none", "Fair"], capacity=700)
    assert [int(part.present.sum()) for part in found.values()] == [300, 0, 100]
    assert {part.present.shape for part in found.values()} == {(700,)}
    assert max(sum(np.asarray(part.present, int) for part in found.values())) == 1
    assert float(found["Fair"].records[np.asarray(found["Fair"].present)].max()) == 10.0
    padded = queries.padded_records(TABLE, capacity=700)
    (part,) = queries.split_by(padded, column="cut", keys=["Good"], of="price").values()
    assert int(part.present.sum()) == 200


def test_parts_do_not_show_how_many_records_there_are():
    """In as many slots as records, a sum would: its grid has a step at each power of two.

    What else makes slots of arrays: `padded_records`, which takes a capacity; queries, `by` and the
    private statistics, which take plain arrays under replace-one alone; and `PaddedRecords` that
    somebody makes by hand, which is a promise.
    """

    def published(n, **options):
        table = {"sex": np.arange(n) % 2, "age": np.full(n, 40.0)}
        (part, _) = queries.split_by(table, column="sex", keys=[0, 1], **options).values()
        release = queries.private_mean(
            dpjax.random.seeded_key(n), part, lower=0, upper=100, epsilon=0.5, relation=ADD
        )
        return release.accuracy.public, part.present.shape

    assert published(2**14, capacity=20_000) == published(2**14 + 1, capacity=20_000)
    for options in ({}, {"capacity": None}):
        with pytest.raises(ValueError, match="capacity must be a public number of slots"):
            published(2**14, **options)
    with pytest.raises(ValueError, match="None for PaddedRecords, got 700 and PaddedRecords"):
        queries.split_by(SLOTS, column="cut", keys=CUTS, capacity=700)
    with pytest.raises(ValueError, match="capacity must be enough"):
        published(9, capacity=8)


@both_relations
def test_a_block_costs_the_part_that_costs_most(ledger_under, relation):
    """After every release the ledger has paid for all that was published so far: exactly."""
    ledger = ledger_under(relation)
    steps = [("Fair", "0.1"), ("Good", "0.1"), ("Fair", "0.2"), ("Good", "0.3"), ("Ideal", "0.05")]
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    times, of_part = (2 if relation is REPLACE else 1), dict.fromkeys(CUTS, Decimal(0))
    with ledger.parallel("cut") as part:
        for cut, epsilon in steps:
            with part(cut):
                value = release(found[cut], float(epsilon)).value
            of_part[cut] += Decimal(epsilon)
            assert abs(int(value) - {"Fair": 100, "Good": 200, "Ideal": 300}[cut]) < 800
            assert ledger.remaining[0] == 10 - times * max(of_part.values())
    assert ledger.spent.epsilon == float(times * Decimal("0.4"))
    assert ledger.spent.relation is relation
    rows = ledger.history()
    assert [row["epsilon"] for row in rows] == [
        times * Decimal(x) for x in ("0.1", "0", "0.2", "0.1", "0")
    ]
    assert rows[1]["what"] == "Query of cut 'Good'"
    # Outside of the block the ledger adds up again.
    ledger.charge(Guarantee(0.1, relation=relation))
    assert ledger.spent.epsilon == pytest.approx(times * 0.4 + 0.1)


@both_relations
def test_deltas_are_those_of_two_records_where_one_is_replaced(ledger_under, relation):
    ledger = ledger_under(relation)
    with ledger.parallel("g") as part:
        for name, epsilon, delta in (("a", 0.5, 1e-6), ("b", 1.0, 1e-5), ("a", 1.0, 1e-6)):
            mechanism = dpjax.Guarantee(epsilon, delta, relation=ADD)
            part(name).record(Payment(dpjax.random.secure_key(), mechanism, "x"))
    if relation is ADD:
        assert (ledger.spent.epsilon, ledger.spent.delta) == (1.5, 1e-5)
    else:
        stated = group(Guarantee(1.5, 1e-5), 2)
        assert ledger.spent.epsilon == stated.epsilon == 3.0
        assert stated.delta <= ledger.spent.delta <= stated.delta * (1 + 1e-9)
        assert ledger.spent.delta >= 1e-5 * (1 + math.exp(1.5))


def test_samplings_of_all_parts_count(ledger):
    sampled = Guarantee(0.5, gamma=0.01, confidence=0.99, relation=ADD)
    with ledger.parallel("g") as part:
        for name in "ab":
            part(name).record(Payment(dpjax.random.secure_key(), sampled, "x"))
    assert ledger.spent.epsilon == 0.5
    assert ledger.spent.gamma == pytest.approx(0.02)


def test_a_block_for_replaced_records_by_enumeration():
    """Randomized response in two parts; a replaced record leaves one and enters the other."""
    epsilons = 0.7, 1.2
    with_it = [np.array([np.exp(e), 1.0]) / (1 + np.exp(e)) for e in epsilons]
    without = [p[::-1] for p in with_it]
    moved = np.abs(
        np.log(np.outer(with_it[0], without[1]) / np.outer(without[0], with_it[1]))
    ).max()
    assert max(epsilons) < moved <= 2 * max(epsilons)


def test_a_replay_in_a_part_is_of_that_part(ledger):
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    keys = map(dpjax.random.seeded_key, itertools.count())

    def answers(column):
        with ledger.parallel(column) as part:
            private = {
                cut: dpjax.privatize(
                    queries.counting_query(),
                    dpjax.laplace(queries.counting_query().sensitivity(relation=ADD), 1.0),
                    ledger=part(cut),
                )
                for cut in CUTS
            }
            return [int(private[cut](next(keys), found[cut], name="count").value) for cut in CUTS]

    first = answers("cut")
    assert [abs(x - y) < 60 for x, y in zip(first, (100, 200, 300), strict=True)] == [True] * 3
    assert ledger.spent.epsilon == 1.0
    assert answers("cut") == first
    assert ledger.spent.epsilon == 1.0
    # Parts of the same names in another division are other records.
    assert answers("color") != first
    assert ledger.spent.epsilon == 2.0


def test_private_statistics_of_parts_cost_once(ledger):
    """Used to raise BudgetExceededError at the second group of a budget for one."""
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    means = []
    with ledger.parallel("cut") as part:
        for cut, records in found.items():
            with part(cut):
                mean = queries.private_mean(
                    dpjax.random.secure_key(),
                    records,
                    lower=0,
                    upper=100,
                    epsilon=9.0,
                    relation=ADD,
                )
            means.append(float(mean.value))
    np.testing.assert_allclose(means, [10, 50, 90], atol=5)
    assert ledger.spent.epsilon == 9.0


def test_an_exception_or_a_refusal_in_the_block_loses_nothing(ledger):
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    with contextlib.suppress(RuntimeError), ledger.parallel("cut") as part:
        with part("Fair"):
            release(found["Fair"], 2.0)
        raise RuntimeError
    assert ledger.spent.epsilon == 2.0
    endless = Guarantee(math.inf, 1.0, relation=ADD)
    with ledger.parallel("cut") as part:
        with part("Fair"):
            release(found["Fair"], 7.0)
            with pytest.raises(dpjax.BudgetExceededError):
                release(found["Fair"], 1.5)
            with pytest.raises(dpjax.BudgetExceededError):
                part("Fair").record(Payment(dpjax.random.secure_key(), endless, ""))
        assert ledger.spent.epsilon == 9.0
        # What was refused is not counted as spent: 8 of another part costs 1 more.
        with part("Good"):
            release(found["Good"], 8.0)
        assert ledger.spent.epsilon == 10.0
    with pytest.raises(ValueError, match="block"), part("Good"):
        release(found["Good"], 0.1)


def test_every_nesting_of_blocks_charges_one_account_once_or_nothing(tmp_path, ledger):
    """Up to two blocks, and a ledger that is given: all 105 of them, against a rule of their own.

    A ledger pays unless a part or share of it is farther inside. Two payers are refused.
    """
    other = dpjax.Ledger(tmp_path / "other.db", epsilon=10, delta=1e-3, relation=ADD)
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    mechanism = dpjax.laplace(queries.counting_query().sensitivity(relation=ADD), 0.01)
    paid = {"ledger": Decimal(0), "a": Decimal(0), "b": Decimal(0), "other": Decimal(0)}
    outcomes = set[int]()

    def spent():
        of_ledger = paid["ledger"] + max(paid["a"], paid["b"])
        assert ledger.remaining[0] == 10 - of_ledger
        assert other.remaining[0] == 10 - paid["other"]

    with ledger.parallel("cut") as part:

        def account(name):
            return {"ledger": ledger, "other": other}.get(name) or part(name)

        for depth in range(3):
            for *blocks, given in itertools.product(*[paid] * depth, [None, *paid]):
                inside = [*blocks, *([] if given is None else [given])]
                payers = {
                    name
                    for i, name in enumerate(inside)
                    if name != "ledger" or not {"a", "b"}.intersection(inside[i:])
                }
                private = dpjax.privatize(
                    queries.counting_query(),
                    mechanism,
                    ledger=None if given is None else account(given),
                )
                with contextlib.ExitStack() as stack:
                    for name in blocks:
                        stack.enter_context(account(name))
                    try:
                        private(dpjax.random.secure_key(), found["Fair"])
                        refused = False
                    except ValueError as error:
                        refused = "one ledger pays" in str(error)
                assert refused is (len(payers) > 1), (blocks, given)
                if not refused:
                    # In a block of `parallel`, the ledger pays for the rest.
                    paid[payers.pop() if payers else "ledger"] += Decimal("0.01")
                    outcomes.add(depth)
                spent()
    assert outcomes == {0, 1, 2}
    assert all(paid.values())


def test_a_share_pays_in_place_of_its_ledger_once(ledger):
    """Without a budget of delta, a share pays the epsilon of each release."""
    pure = dpjax.Ledger(ledger.path.with_name("pure.db"), epsilon=1, relation=ADD)
    share, part = pure.share(0.5), pure.parallel("cut")
    private = dpjax.privatize(
        queries.counting_query(),
        dpjax.laplace(queries.counting_query().sensitivity(relation=ADD), 0.2),
        ledger=share,
    )
    with pure:
        private(dpjax.random.secure_key(), SLOTS)
        with share:
            private(dpjax.random.secure_key(), SLOTS)
        with part, part("Fair"), pytest.raises(ValueError, match="one ledger pays"):
            private(dpjax.random.secure_key(), SLOTS)
        with pytest.raises(dpjax.BudgetExceededError):
            private(dpjax.random.secure_key(), SLOTS)
    assert pure.remaining == (Decimal("0.6"), 0)


def test_parts_pay_inside_of_the_block_of_their_ledger(ledger):
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    with ledger:
        release(found["Fair"], 1.0)
        with ledger.parallel("cut") as part:
            for cut in CUTS[:2]:
                with part(cut):
                    release(found[cut], 2.0)
            assert ledger.spent.epsilon == 3.0
            release(found["Fair"], 0.5)
    assert ledger.spent.epsilon == 3.5


def test_a_table_of_a_part_is_paid_by_the_part(ledger):
    frame = {"cut": np.arange(300) % 3, "price": np.ones(300)}
    with ledger, ledger.parallel("cut") as part:
        for cut in range(3):
            prices = {"price": frame["price"][frame["cut"] == cut]}
            table = dpjax.PrivateTable(prices, most_rows=300, name=f"cut {cut}")
            with part(cut):
                first = table.count(epsilon=1.0)
                again = table.count(epsilon=1.0)
            assert first.value == again.value
            paid = dpjax.PrivateTable(frame, most_rows=300, ledger=ledger, name=f"all {cut}")
            with part(cut), pytest.raises(ValueError, match="one ledger pays"):
                paid.count(epsilon=1.0)
    assert ledger.spent.epsilon == 1.0


def test_the_debit_is_on_the_disk_before_the_noise_is_drawn(ledger, monkeypatch):
    """A crash in the draw, in the middle of a block, leaves what it would have published paid."""
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    seen, draw = [], Draw.__call__

    def crash(self, key, value):
        if isinstance(value, jax.core.Tracer):  # A trial, before anything is paid.
            return draw(self, key, value)
        seen.append(dpjax.Ledger(ledger.path, epsilon=10, delta=1e-3).spent.epsilon)
        raise KeyboardInterrupt

    with ledger.parallel("cut") as part:
        with part("Fair"):
            release(found["Fair"], 1.0)
        with monkeypatch.context() as patch, part("Good"):
            private = count(3.0)
            patch.setattr(Draw, "__call__", crash)
            with pytest.raises(KeyboardInterrupt):
                private(dpjax.random.secure_key(), found["Good"])
        with part("Good"):
            release(found["Good"], 1.0)
    assert seen == [3.0]
    assert ledger.spent.epsilon == 4.0


def test_threads_of_a_block_share_its_sums(ledger):
    guarantee = Guarantee(0.01, relation=ADD)
    with ledger.parallel("g") as part:

        def work(name):
            for _ in range(10):
                part(name).record(Payment(dpjax.random.secure_key(), guarantee, "x"))

        threads = [threading.Thread(target=work, args=(name,)) for name in "aab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ledger.spent.epsilon == 0.2


def test_what_is_no_part_is_refused(ledger, monkeypatch):
    found = queries.split_by(SLOTS, column="cut", keys=CUTS)
    with ledger.parallel("cut") as part:
        with part("Fair"), pytest.raises(ValueError, match="add-or-remove-one"):
            count(1.0, REPLACE)(dpjax.random.secure_key(), found["Fair"])
        with part("Fair"), part("Good"), pytest.raises(ValueError, match="one ledger pays"):
            release(found["Fair"], 1.0)
        with part("Good"), ledger, pytest.raises(ValueError, match="one ledger pays"):
            release(found["Fair"], 1.0)
        other = part("Good")
        with ledger, other, part("Fair"), pytest.raises(ValueError, match="one ledger pays"):
            release(found["Fair"], 1.0)
        for name in (None, 1.5, True):
            with pytest.raises(TypeError, match="part must be"):
                part(name)
        for taken in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="copied"):
                taken(part)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ValueError, match="process"):
            part("Fair").record(
                Payment(dpjax.random.secure_key(), Guarantee(1.0, relation=ADD), "")
            )
    with pytest.raises(TypeError, match="column must be"):
        ledger.parallel(3)
    assert not ledger.history()
