"""The price of the best of a random number of runs, against the exact law of small mechanisms."""

import itertools
import math

import numpy as np
import pytest
import scipy

import dpjax
from dpjax.accounting import _repeat_and_select
from dpjax.accounting._composed_steps import ORDERS
from dpjax.accounting._dp_sgd import DpSgdRun
from dpjax.accounting._repeat_and_select import (
    OneRun,
    checked_repetitions,
    divergences_of_best,
    divergences_of_pure,
    selected,
)

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
SHAPES = [1.0, 0.0, -0.5, 0.5, math.inf]


def best_of(law, outcomes):
    """The distribution of the best of K independent outcomes, of which later ones are better.

    With K = 0 there is no outcome, which is the first entry. P(best <= y) is the generating
    function of K at P(outcome <= y).
    """

    def generating(x):
        if law.shape is None:
            return np.exp(float(law.poisson_mean) * (x - 1))
        gamma, shape = float(law.gamma), float(law.shape)
        if shape == 0:
            return np.log1p(-(1 - gamma) * x) / math.log(gamma)
        return ((1 - (1 - gamma) * x) ** -shape - 1) / (gamma**-shape - 1)

    below = np.minimum(np.concatenate([[0.0], np.cumsum(outcomes)]), 1.0)
    return np.diff(generating(below), prepend=0.0)


def hockey_stick(p, q, epsilon):
    return np.sum(np.maximum(p - math.exp(epsilon) * q, 0))


def pairs(epsilon, delta=0.0, size=4, seeds=6):
    """Pairs of distributions that are (epsilon, delta)-indistinguishable, some of them tightly."""
    kept = math.exp(epsilon) / (1 + math.exp(epsilon))
    for order in itertools.permutations([kept, 1 - kept]):
        yield np.array(order), np.array(order)[::-1]
        noisy = (1 - delta) * np.array(order)
        # Where one of the two databases is certain: at the worst and at the best outcome.
        yield np.array([0, *noisy, delta]), np.array([delta, *noisy[::-1], 0])
    rng = np.random.default_rng(0)
    for _ in range(seeds):
        mixed = rng.dirichlet(np.ones(size))
        ratio = np.exp(rng.choice([-1, 1], size) * epsilon / 4)
        p, q = mixed * ratio, mixed / ratio
        # Ratios are within e^(epsilon / 2), and so are the sums: quotients are within e^epsilon.
        yield p / p.sum(), q / q.sum()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_of_pure_and_approximate_runs_is_as_private_as_stated(shape):
    """By the exact law of the best run; one of the pairs reaches 80% of the stated epsilon."""
    reached = 0.0
    for epsilon, delta, runs in (
        (0.5, 0.0, 10),
        (1.0, 0.01, 3),
        (2.0, 1e-4, 50 if shape < 0 else 100),
    ):
        law = checked_repetitions(runs, shape)
        one = dpjax.Guarantee(epsilon, delta)
        stated = dpjax.accounting.best_of_runs(one, runs=runs, shape=shape)
        for p, q in pairs(epsilon, delta):
            for first, second in ((p, q), (q, p)):
                assert hockey_stick(first, second, epsilon) <= delta * (1 + 1e-9) + 1e-12
                best = best_of(law, first), best_of(law, second)
                found = hockey_stick(*best, float(stated.epsilon))
                assert found <= float(stated.delta) * (1 + 1e-9) + 1e-12
                if delta == 0:
                    seen = (best[0] > 0) & (best[1] > 0)
                    ratio = np.log(best[0][seen] / best[1][seen])
                    reached = max(reached, np.max(ratio) / float(stated.epsilon))
    assert shape == math.inf or reached > 0.6


@pytest.mark.parametrize("shape", SHAPES)
def test_divergences_of_the_best_run_are_not_above_the_stated_ones(shape):
    """Renyi divergences of the exact law, for all orders and several mechanisms."""
    orders = np.array(ORDERS)

    def divergence(p, q, order):
        seen = p > 0
        terms = order * np.log(p[seen]) + (1 - order) * np.log(q[seen])
        return scipy.special.logsumexp(terms) / (order - 1)

    normal = np.diff([0, *(0.5 * (1 + math.erf(x / 1.5)) for x in np.linspace(-4, 5, 60)), 1])
    cases = [*pairs(0.5, seeds=1), (normal, normal[::-1]), (normal[::-1], normal)]
    few = orders[::12]
    for runs, of_runs in ((2, cases[-1:]), (20, cases)):
        law = checked_repetitions(runs, shape)
        for p, q in of_runs:
            p, q = p[(p > 0) | (q > 0)], q[(p > 0) | (q > 0)]
            if np.any(p * q == 0):
                continue
            one = [max(divergence(p, q, x), divergence(q, p, x), 0) for x in orders]
            stated = divergences_of_best(np.array(one), law)[::12]
            best = best_of(law, p), best_of(law, q)
            seen = best[0] > 1e-13
            found = [divergence(best[0][seen], best[1][seen], x) for x in few]
            assert np.all(np.array(found) <= stated + 1e-6)


@pytest.mark.parametrize("shape", [1.0, 0.0, 0.5, math.inf])
def test_divergences_are_those_of_dp_accounting(shape):
    accounting = pytest.importorskip("dp_accounting")
    events = pytest.importorskip("dp_accounting.dp_event")
    event = accounting.GaussianDpEvent(3.0)
    for mean in (2, 30):
        law = checked_repetitions(mean, shape)
        theirs = accounting.rdp.RdpAccountant(ORDERS)
        theirs.compose(events.RepeatAndSelectDpEvent(event, mean, shape))
        ours = divergences_of_best(np.array(ORDERS) / 18, law)
        # dp-accounting makes divergences monotone in the order, which changes no epsilon here.
        best = np.minimum.accumulate(ours[::-1])[::-1] if law.shape is not None else ours
        assert np.all(best >= theirs.rdp * (1 - 1e-9))
        np.testing.assert_allclose(best, theirs.rdp, rtol=1e-6)


def test_divergences_of_a_pure_run_are_those_of_randomized_response():
    """By the definition at epsilon 1, and never above epsilon or order epsilon^2 / 2."""
    kept = math.e / (1 + math.e)
    orders = np.array(ORDERS)
    for order, found in zip(ORDERS, divergences_of_pure(1.0), strict=True):
        if order <= 64:
            moment = kept**order * (1 - kept) ** (1 - order) + (1 - kept) ** order * kept ** (
                1 - order
            )
            assert found == pytest.approx(math.log(moment) / (order - 1), rel=1e-6)
            assert found >= math.log(moment) / (order - 1) * (1 - 1e-12)
    for epsilon in (1e-3, 0.3, 3.0, 30.0):
        assert np.all(
            divergences_of_pure(epsilon) <= np.minimum(epsilon, orders * epsilon**2 / 2) + 1e-9
        )
    assert np.all(divergences_of_pure(0.0) == 0)


def test_a_training_costs_the_smaller_bound_and_its_tables_are_charged(monkeypatch):
    """Both bounds, for steps of all records, whose divergences are order / (2 z^2) each."""
    sampling = dpjax.learning.poisson_sampling(100, batch_size=100, capacity=100)
    given = {"noise_multiplier": 20.0, "steps": 4, "dims": 10}
    for runs, shape in ((10, 0.0), (3, -0.5)):
        law = checked_repetitions(runs, shape)
        found = dpjax.accounting.dp_sgd_best_of_runs(
            sampling, delta=1e-6, runs=runs, shape=shape, **given
        )
        one = dpjax.accounting.dp_sgd(sampling, delta=1e-6 / law.mean, **given)
        by_ratios = (2 + shape) * one.epsilon
        assert found.epsilon <= by_ratios * (1 + 1e-6)
        assert found.relation is ADD
        assert found.notes == ("in 100 public slots", "best of a random number of runs")
        run = DpSgdRun(sampling, 4, 1e-6, 10, ADD, "pld").checked()
        single = OneRun(dpjax.Guarantee(0.0, relation=ADD), (run, 20.0))
        by_divergences = _repeat_and_select._by_divergences([single], law, 1e-6)
        assert float(found.epsilon) == pytest.approx(min(by_ratios, by_divergences), rel=1e-6)
        # A candidate with less noise determines the price, and so does a released score.
        louder = OneRun(single.guarantee, (run, 10.0))
        alone = selected([louder], law, 1e-6).epsilon
        assert selected([single, louder], law, 1e-6).epsilon == alone > 1.5 * found.epsilon
        scored = selected([single._replace(score_epsilon=0.1)], law, 1e-6).epsilon
        assert found.epsilon + 0.05 < scored <= found.epsilon + 0.1 * (2 + shape) + 1e-6
    # In two runs, the probability to leave the ideal run uses up delta; in one run, it does not.
    monkeypatch.setattr(DpSgdRun, "missed", 3e-7)
    law = checked_repetitions(2, 1.0)
    assert math.isinf(_repeat_and_select._by_divergences([single], law, 1e-6))
    monkeypatch.setattr(DpSgdRun, "missed", 1e-12)
    # With losses of 1e-3 in a run, the price grows by twice the loss of the largest number of runs.
    monkeypatch.setattr(DpSgdRun, "loss", 1e-3)
    law = checked_repetitions(2, 1.0)
    more = _repeat_and_select._by_divergences([single], law, 1e-6)
    most = _repeat_and_select._most_runs(law, 1e-12)
    assert law.tail(most) <= 1e-12 < law.tail(most - 1)
    assert more >= 2 * most * 1e-3


def test_batches_that_overlap_in_a_strategy_cost_the_best_run_too():
    """Two batches of a record enter one row: one Gaussian mechanism, with less noise."""
    strategy = dpjax.learning.toeplitz_strategy([1.0, 0.5], steps=4)
    sampling = dpjax.learning.poisson_sampling(100, batch_size=100, capacity=100)
    plain = DpSgdRun(sampling, 4, 1e-6, 10, ADD, "pld").checked()
    run = DpSgdRun(sampling, 4, 1e-6, 10, ADD, "pld", strategy=strategy).checked()
    z, count = run.gaussians(20.0)
    found = [
        _repeat_and_select._divergences_of_one(OneRun(dpjax.Guarantee(0.0), (one, 20.0)))
        for one in (run, plain)
    ]
    np.testing.assert_allclose(found[0], count * np.array(ORDERS) / (2 * z**2), rtol=1e-6)
    assert np.all(found[0] > 1.2 * found[1])


def test_what_no_price_covers_is_refused():
    guarantee = dpjax.Guarantee
    for one, given, error, message in (
        (guarantee(1.0, gamma=0.1), {"runs": 5}, ValueError, "gamma=0"),
        (guarantee(1.0, confidence=0.9), {"runs": 5}, ValueError, "confidence=1"),
        (guarantee(1.0), {"runs": 1.0}, ValueError, "runs must be above 1"),
        (guarantee(1.0), {"runs": "5"}, TypeError, "runs must be a number"),
        (guarantee(1.0), {"runs": math.nan}, ValueError, "runs must be above 1"),
        (guarantee(1.0), {"runs": 5, "shape": -1.0}, ValueError, "shape must be above -1"),
        (guarantee(1.0), {"runs": 5, "shape": 1.5}, ValueError, "shape must be above -1"),
    ):
        with pytest.raises(error, match=message):
            dpjax.accounting.best_of_runs(one, **given)
    law = checked_repetitions(10, 1.0)
    approximate = OneRun(guarantee(1.0, 1e-5))
    with pytest.raises(ValueError, match="too small for the best of"):
        selected([approximate], law, 1e-5)
    assert selected([approximate], law, 1.1e-4).epsilon == 3.0
    full = dpjax.learning.poisson_sampling(100, batch_size=10, capacity=11)
    with pytest.raises(ValueError, match="too small for the best of"):
        dpjax.accounting.dp_sgd_best_of_runs(
            full, noise_multiplier=2.0, steps=2, delta=1e-5, dims=2, runs=10, shape=0
        )
    assert dpjax.accounting.best_of_runs(guarantee(1.0, 0.3), runs=10).delta == 1.0
