"""AIM: what it spends, how far neighbors move what it reads, and whether its model is right."""

import itertools
import math

import numpy as np
import pytest

import dpjax
from dpjax.accounting import PrivacyFilter, compose_at
from dpjax.accounting._concentrated import largest_rho
from dpjax.queries import _aim
from dpjax.queries._aim import (
    Estimator,
    Measurement,
    Plan,
    aim,
    cells_of_model,
    check_budget,
    gaussian_at,
    independent,
    model_of,
    plan_of,
    selection_at,
    total_of,
)

REPLACE, ADD = dpjax.NeighboringRelation
SIZES = {"a": 2, "b": 3, "c": 2, "d": 4}
PAIRS = dict.fromkeys(itertools.combinations(SIZES, 2), 1.0)
SETS = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]  # A cycle.


def plan(workload=PAIRS, sizes=SIZES, most_cells=1000, relation=ADD):
    return plan_of(sizes, workload, most_cells, relation, lambda query: query)


@pytest.fixture
def potentials():
    rng = np.random.default_rng(3)
    return {one: rng.normal(size=[SIZES[name] for name in one]) for one in SETS}


def joint(potentials):
    """The whole distribution, by its definition."""
    total = np.zeros(tuple(SIZES.values()))
    for one, table in potentials.items():
        total += (
            table.reshape([SIZES[x] if x in one else 1 for x in SIZES])
            if one
            != (
                "a",
                "d",
            )
            else table[:, None, None, :]
        )
    return np.exp(total) / np.exp(total).sum()


def test_marginals_of_a_model_are_those_of_the_whole_distribution(potentials):
    model, whole = model_of(SIZES, potentials, 50.0), 50 * joint(potentials)
    for size in (1, 2, 3, 4):
        for columns in itertools.combinations(SIZES, size):
            others = tuple(i for i, name in enumerate(SIZES) if name not in columns)
            np.testing.assert_allclose(model.counts(columns), whole.sum(axis=others), rtol=1e-10)
    np.testing.assert_allclose(model.counts(("d", "a")), whole.sum(axis=(1, 2)).T, rtol=1e-10)
    assert cells_of_model(SIZES, SETS) == sum(one.table.size for one in model.conditionals)


def test_drawn_rows_have_the_marginals_of_the_model(potentials):
    """A share of 100,000 rows is off by .01 with a probability below 1e-8 (Hoeffding)."""
    model = model_of(SIZES, potentials, 1.0)
    drawn = model.rows(np.random.default_rng(0), 100_000)
    for columns in itertools.combinations(SIZES, 2):
        found = np.zeros([SIZES[name] for name in columns])
        np.add.at(found, tuple(drawn[name] for name in columns), 1e-5)
        assert np.abs(found - model.counts(columns)).max() < 0.01
    first = model.conditionals[0]
    counted = np.bincount(drawn[first.name], minlength=len(first.table))
    assert np.abs(counted - 100_000 * first.table).max() <= 2  # Stratified.
    assert not np.all(np.diff(drawn[first.name]) >= 0)  # In no order.


def test_no_cell_of_probability_0_is_drawn():
    logs = {("a",): np.array([0.0, -np.inf]), ("b",): np.zeros(3)}
    model = model_of({"a": 2, "b": 3}, logs, 1.0)
    assert not model.rows(np.random.default_rng(0), 1000)["a"].any()
    assert model.rows(np.random.default_rng(0), 0)["b"].shape == (0,)


def test_an_estimate_fits_consistent_marginals(potentials):
    """Marginals of one distribution determine the model of the largest entropy."""
    whole = 1000 * joint(potentials)
    others = {one: tuple(i for i, x in enumerate(SIZES) if x not in one) for one in SETS}
    exact = [Measurement(one, whole.sum(axis=others[one]), 1.0) for one in SETS]
    estimate = Estimator(SIZES)
    estimate(exact[:2])
    for _ in range(4):  # Each call goes on from the one before.
        model = estimate(exact)
    np.testing.assert_allclose(model.counts(tuple(SIZES)), whole, atol=2)


def test_a_measurement_with_less_noise_counts_more():
    some = [Measurement(("a",), np.array([60.0, 40.0]), 1.0)]
    some.append(Measurement(("a",), np.array([0.0, 200.0]), 10.0))
    assert total_of(some) == pytest.approx(101.0, abs=0.02)
    found = Estimator({"a": 2})(some).counts(("a",))
    assert found[0] == pytest.approx(59.4, abs=1)
    # Negative counts leave a distribution.
    assert independent({"a": 2}, [Measurement(("a",), np.array([-5.0, 10.0]), 1.0)]).counts(
        ("a",)
    ).tolist() == [0, 5]


class Spent:
    """A filter that notes what it admits, and whether draws came after."""

    def __init__(self, monkeypatch, epsilon, delta, of):
        self.admitted, self.drawn = [], []
        self.filter = PrivacyFilter(epsilon=epsilon, delta=delta, dims=of.most_drawn, relation=ADD)
        admit = self.filter.admit

        def noted(mechanism):
            admit(mechanism)
            self.admitted.append(mechanism)

        monkeypatch.setattr(self.filter, "admit", noted)
        for made in ("gaussian_at", "selection_at"):
            monkeypatch.setattr(_aim, made, self._watched(getattr(_aim, made)))

    def _watched(self, make):
        def made(*given):
            mechanism = make(*given)
            draw = mechanism.unpaid_draw

            def watched(*given):
                self.drawn.append(mechanism)
                assert any(
                    x is mechanism for x in self.admitted[-1:]
                )  # Paid for before it is drawn.
                return draw(*given)

            object.__setattr__(mechanism, "unpaid_draw", watched)
            return mechanism

        return made


def stub(measured):
    """A model without mirror descent, for tests of what is spent."""
    return independent(SIZES, [one for one in measured if len(one.columns) == 1])


def exact_counts(columns, rows=600):
    cells = {name: np.arange(rows) // (i + 1) % SIZES[name] for i, name in enumerate(SIZES)}
    found = np.zeros([SIZES[name] for name in columns], int)
    np.add.at(found, tuple(cells[name] for name in columns), 1)
    return found


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (3.0, 1e-9)])
def test_all_that_is_drawn_was_paid_for_and_costs_no_more_than_the_budget(
    monkeypatch, epsilon, delta
):
    spent = Spent(monkeypatch, epsilon, delta, plan())
    aim(dpjax.random.seeded_key(1), exact_counts, plan(), spent.filter, stub)
    assert spent.drawn == spent.admitted
    rho = math.fsum(mechanism.zcdp[0] for mechanism in spent.admitted)
    assert 0.995 * largest_rho(epsilon, delta) < rho <= largest_rho(epsilon, delta)
    assert compose_at(*spent.admitted, delta=delta, method="zcdp").epsilon <= epsilon
    # As many releases as `check_budget` counts, at most.
    assert len(spent.drawn) <= 8 * len(SIZES)


def test_one_column_is_measured_once_with_the_whole_budget(monkeypatch):
    one = plan({("a",): 1.0}, {"a": 2})
    spent = Spent(monkeypatch, 1.0, 1e-6, one)
    model = aim(dpjax.random.seeded_key(1), exact_counts, one, spent.filter, stub)
    (mechanism,) = spent.admitted
    assert mechanism.zcdp[0] > 0.995 * largest_rho(1.0, 1e-6)
    assert model.total == pytest.approx(600, abs=60)


@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.5])
def test_mechanisms_cost_hardly_less_than_asked(rho):
    reach = plan().reach(("a",), "l2")
    assert 0.999 * rho < gaussian_at(reach, rho).zcdp[0] <= rho
    selection = selection_at(plan().reach_of_scores, rho)
    assert 0.999 * rho < selection.zcdp[0] <= rho
    assert float(selection.epsilon) == pytest.approx(math.sqrt(8 * rho))


def test_weights_are_shares_of_the_workload():
    """A pair shares one column with each of four other pairs."""
    weights = plan().weights
    assert weights[("a", "b")] == 64
    assert weights[("a",)] == round(64 * 3 / 6)
    assert set(plan(most_cells=6).weights) == {
        one for one in weights if math.prod(SIZES[name] for name in one) <= 6
    }
    weighed = plan({("a", "b"): 9.0, ("c", "d"): 1.0}).weights
    assert weighed[("a", "b")] == 64
    assert weighed[("c", "d")] == round(64 / 9)


class Chooser:
    """A run whose budget is so large that the best score is chosen."""

    def __init__(self, plan, spent=1.0):
        self.run = _aim._Run(dpjax.random.seeded_key(2), exact_counts, plan, self)
        self.remaining, self._most, self.delta = 1 - spent, 1e6, 1e-6

    def admit(self, mechanism):
        pass


@pytest.fixture
def model():
    exact = [Measurement((name,), exact_counts((name,)), 1.0) for name in SIZES]
    return independent(SIZES, exact)


def test_a_marginal_is_chosen_where_the_model_is_furthest_off(model):
    chooser, rho = Chooser(plan()), 1e5
    scores = {one: chooser.run._score(one, model, rho) for one in PAIRS}
    first, second, *_ = sorted(scores, key=scores.get, reverse=True)
    assert chooser.run.choose(model, rho, [], []) == first
    assert chooser.run.choose(model, rho, [], [first]) == second
    far = {one: np.abs(exact_counts(one) - np.rint(model.counts(one))).sum() for one in PAIRS}
    assert all(scores[one] == 64 * far[one] for one in PAIRS)  # The noise is far below 1.


def test_noise_that_a_marginal_would_have_lowers_its_score(model):
    """A tenth of the budget chooses, and the measurement has the rest."""
    run, rho = Chooser(plan()).run, 0.01
    noise = math.sqrt(2 / math.pi) / math.sqrt(2 * rho)
    distance = np.abs(exact_counts(("b", "d")) - np.rint(model.counts(("b", "d")))).sum()
    assert run._score(("b", "d"), model, rho) == 64 * (distance - int(12 * noise))


def test_the_model_stays_small():
    small = plan(most_cells=24)
    chooser = Chooser(small)
    names = list(small.weights)
    fitting = {names[i] for i in chooser.run._fitting([("a", "b"), ("b", "c")], 1.0)}
    assert fitting == {
        one for one in names if cells_of_model(SIZES, [("a", "b"), ("b", "c"), one]) <= 24
    }
    assert ("b", "d") not in fitting
    # Early in a run, even less may be added.
    assert not {names[i] for i in chooser.run._fitting([], 0.1)}


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
def test_no_neighbor_moves_a_marginal_or_a_score_further_than_noise_covers(relation, model):
    """All pairs of tables that differ in one row, for a model that is no distribution of theirs."""
    sizes = {"a": 2, "b": 3}
    of = plan_of(sizes, {("a", "b"): 1.0}, 100, relation, lambda query: query)
    model = model_of(sizes, {("a", "b"): np.arange(6.0).reshape(2, 3) / 3}, 2.7)
    rows = [None, *itertools.product(range(2), range(3))]  # None counts nowhere.

    def read(table):
        def counts(columns):
            found = np.zeros([sizes[name] for name in columns], int)
            for row in table:
                if row is not None:
                    found[tuple(row["ab".index(name)] for name in columns)] += 1
            return found

        run = _aim._Run(dpjax.random.seeded_key(0), counts, of, None)
        return {one: (counts(one), run._score(one, model, 0.3)) for one in of.weights}

    moved = {one: [0.0, 0.0] for one in of.weights}
    scores = 0
    for rest in itertools.product(rows, repeat=2):
        reads = [read([*rest, row]) for row in rows]
        pairs = itertools.combinations(reads, 2)
        for before, after in pairs if relation is REPLACE else ((reads[0], x) for x in reads[1:]):
            for one in of.weights:
                change = np.abs(before[one][0] - after[one][0])
                moved[one][0] = max(moved[one][0], change.sum())
                moved[one][1] = max(moved[one][1], math.sqrt((change**2).sum()))
                scores = max(scores, abs(before[one][1] - after[one][1]))
    for one, (l1, l2) in moved.items():
        assert l1 == of.reach(one, "l1").value
        assert l2 == pytest.approx(of.reach(one, "l2").value, rel=1e-6)
        assert l2 <= of.reach(one, "l2").value
    assert scores == of.reach_of_scores.value


def test_scores_are_clamped_and_fit_into_32_bits(model):
    large = Plan(SIZES, {("a", "b"): 64}, 1000, ADD, lambda query: query)
    run = _aim._Run(
        dpjax.random.seeded_key(0), lambda _: np.full((2, 3), 2**30), large, Chooser(large)
    )
    assert run.choose(model, 1.0, [], []) == ("a", "b")


def test_a_budget_that_no_noise_fits_is_refused_before_anything_is_paid():
    wide = plan({("a", "z"): 1.0}, {"a": 2, "z": 2**24}, 2**26)
    with pytest.raises(ValueError, match=r"epsilon=1e-07 and delta=1e-06 are too small for noise"):
        check_budget(wide, PrivacyFilter(epsilon=1e-7, delta=1e-6, dims=2**25, relation=ADD))
