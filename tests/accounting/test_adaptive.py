"""Filters and odometers: what is admitted stays within the budget, readings hold at all times."""

import contextlib
import copy
import functools
import math
import os
import pickle
import threading

import numpy as np
import pytest
import scipy

import dpjax
from dpjax import BudgetExceededError, Guarantee, SampledEvent
from dpjax.accounting import (
    PrivacyFilter,
    PrivacyOdometer,
    _adaptive,
    compose_at,
    zcdp_to_epsilon,
)

GAUSSIAN = dpjax.gaussian(1.0, 0.1, 1e-6)
RHO = GAUSSIAN.zcdp[0]


def fill(one, release):
    """How many are admitted."""
    for count in range(10**6):
        try:
            one.admit(release)
        except BudgetExceededError:
            return count
    raise AssertionError


@pytest.mark.parametrize(
    "release",
    # Where zCDP is better than adding.
    [GAUSSIAN, dpjax.exponential(1.0, 0.1), dpjax.laplace(1.0, 0.02), Guarantee(0.01)],
    ids=["gaussian", "exponential", "laplace", "guarantee"],
)
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-6), (3.0, 1e-9)])
def test_a_filter_admits_what_its_budget_is_worth(release, epsilon, delta):
    one = PrivacyFilter(epsilon=epsilon, delta=delta)
    count = fill(one, release)
    # As many as if their number had been known in advance, but for what covers the tables.
    together = compose_at(*[release] * count, delta=delta, method="zcdp")
    assert together.epsilon <= epsilon
    more = compose_at(*[release] * math.ceil(count * 1.003 + 1), delta=delta, method="zcdp")
    assert more.epsilon > epsilon
    assert repr(one.guarantee) == repr(Guarantee(epsilon, delta))
    assert 0 <= one.remaining < 1 / count


def test_what_is_refused_takes_nothing():
    one = PrivacyFilter(epsilon=1.0, delta=1e-6)
    for large in (dpjax.gaussian(1.0, 2.0, 1e-6), Guarantee(1.001), Guarantee(0.5, 1e-9)):
        with pytest.raises(
            BudgetExceededError, match=r"costs rho=.* what is left of the budget is rho="
        ):
            one.admit(large)
    for bad in (Guarantee(math.inf), dpjax.laplace(1.0, 1.0, noise="float")):
        with pytest.raises(BudgetExceededError, match=r"a finite epsilon.* got no guarantee"):
            one.admit(bad)
    with pytest.raises(TypeError, match="mechanisms or guarantees"):
        one.admit(0.1)
    assert one.remaining == 1
    one.admit(Guarantee(0.1))
    with pytest.raises(ValueError, match="same group size"):
        one.admit(Guarantee(0.1, group_size=2))
    assert fill(one, Guarantee(0.1)) + 1 == fill(
        PrivacyFilter(epsilon=1.0, delta=1e-6), Guarantee(0.1)
    )


def test_a_few_large_releases_are_added():
    assert fill(PrivacyFilter(epsilon=1.0, delta=1e-6), Guarantee(0.5)) == 2
    one, odometer = PrivacyFilter(epsilon=1.0, delta=1e-6), PrivacyOdometer(delta=1e-6)
    for release in (dpjax.laplace(1.0, 0.5), Guarantee(0.25)):
        one.admit(release)
        odometer.add(release)
    assert one.remaining == 0.25
    assert odometer.reading.epsilon == 0.75
    # A delta ends that: the loss is no longer bounded by the sum.
    with pytest.raises(BudgetExceededError):
        one.admit(GAUSSIAN)
    assert odometer.add(GAUSSIAN).epsilon > 2
    # A mixture that either sum admits.
    one = PrivacyFilter(epsilon=1.0, delta=1e-6)
    fill(one, Guarantee(0.01))
    assert fill(one, Guarantee(0.01)) == 0


def test_the_worst_analyst_stays_within_both_rules(monkeypatch):
    """docs/proofs/adaptive.md: each release is a coin, and chosen by all coins before it.

    Dynamic programming finds the largest (epsilon, delta) violation of any strategy. It is between
    a tenth of delta and delta, so a budget of ten times as much would fail.
    """
    unit, epsilon, delta = 0.1, 1.0, 0.02
    sizes = (1, 2, 5)  # Epsilons of releases, in units.
    releases = [Guarantee(unit * size) for size in sizes]
    # A filter looks for its largest rho for long, and here there are many alike.
    monkeypatch.setattr(_adaptive, "largest_rho", functools.cache(_adaptive.largest_rho))

    @functools.cache
    def admitted(counts):
        budget = PrivacyFilter(epsilon=epsilon, delta=delta)
        for release, count in zip(releases, counts, strict=True):
            for _ in range(count):
                try:
                    budget.admit(release)
                except BudgetExceededError:
                    return False
        return True

    @functools.cache
    def worst(loss, counts):
        """The largest mean of (1 - e^(epsilon - L))_+, from a loss of so many units on."""
        found = max(0.0, -math.expm1(epsilon - unit * loss))
        for k, size in enumerate(sizes):
            after = tuple(count + (j == k) for j, count in enumerate(counts))
            if admitted(after):
                up = 1 / (1 + math.exp(-unit * size))
                mean = up * worst(loss + size, after) + (1 - up) * worst(loss - size, after)
                found = max(found, mean)
        return found

    assert delta / 10 < worst(0, (0, 0, 0)) <= delta


def test_deltas_of_releases_need_a_reserve():
    with pytest.raises(BudgetExceededError):
        PrivacyFilter(epsilon=1.0, delta=1e-6).admit(Guarantee(0.01, 1e-12))
    one = PrivacyFilter(epsilon=1.0, delta=1e-6, reserved=1.05e-7)
    assert fill(one, Guarantee(0.001, 1e-8)) == 10
    one.admit(Guarantee(0.001))
    with pytest.raises(ValueError, match="reserved must be smaller than delta"):
        PrivacyFilter(epsilon=1.0, delta=1e-6, reserved=1e-6)


def test_tables_of_the_noise_are_charged():
    """Of a billion coordinates only so many releases fit."""
    one = PrivacyFilter(epsilon=0.01, delta=1e-6, dims=10**9)
    with pytest.raises(BudgetExceededError, match="does not cover noise for"):
        one.admit(dpjax.gaussian(1.0, 1e-4, 1e-9))
    PrivacyFilter(epsilon=0.01, delta=1e-6).admit(dpjax.gaussian(1.0, 1e-4, 1e-9))


def test_gamma_of_what_was_admitted_adds():
    def sampled(identity):
        return Guarantee(0.01, 0.0, 0.05, 0.99, (SampledEvent(0.05, 0.99, identity),))

    one, odometer = PrivacyFilter(epsilon=1.0, delta=1e-6), PrivacyOdometer(delta=1e-6)
    for identity in "aab":
        one.admit(sampled(identity))
        odometer.add(sampled(identity))
    for promised in (one.guarantee, odometer.reading):
        assert promised.gamma == pytest.approx(0.1, rel=1e-12)
        assert promised.confidence == pytest.approx(0.98, rel=1e-12)
    assert one.guarantee.epsilon == 1.0


@pytest.mark.parametrize(
    "bad", [{"epsilon": 0}, {"delta": 0}, {"delta": 1}, {"reserved": -1}, {"dims": 0}]
)
def test_parameters_out_of_range(bad):
    with pytest.raises(ValueError, match="must be"):
        PrivacyFilter(**{"epsilon": 1.0, "delta": 1e-6, **bad})
    bad.pop("epsilon", None), bad.pop("reserved", None)
    if bad:
        with pytest.raises(ValueError, match="must be"):
            PrivacyOdometer(**{"delta": 1e-6, **bad})


# Odometers.


def test_an_odometer_reads_a_little_more_than_a_count_that_is_known():
    odometer = PrivacyOdometer(delta=1e-6)
    assert repr(odometer.reading) == "(epsilon=0, delta=0)-DP, under replace-one"
    before = 0.0
    for count in range(1, 201):
        reading = odometer.add(GAUSSIAN)
        assert reading.epsilon > before
        assert reading.delta == 1e-6
        before = reading.epsilon
        if count in (1, 20, 200):
            fixed = zcdp_to_epsilon(count * RHO, delta=1e-6, method="simple")
            assert fixed < reading.epsilon < 1.35 * fixed


def test_the_delta_of_an_odometer_is_known_in_advance():
    """A reading whose delta grew with what answers chose would be no bound on anything."""
    odometer = PrivacyOdometer(delta=1e-6)
    with pytest.raises(BudgetExceededError, match="this release has delta=1e-07, but only"):
        odometer.add(Guarantee(0.1, 1e-7))
    assert repr(odometer.reading) == "(epsilon=0, delta=0)-DP, under replace-one"
    odometer = PrivacyOdometer(delta=1e-6, reserved=2.5e-7)
    for _ in range(2):
        assert odometer.add(Guarantee(0.1, 1e-7)).delta == 1e-6
    with pytest.raises(BudgetExceededError, match="but only 5e-08 of the reserved delta is left"):
        odometer.add(Guarantee(0.1, 1e-7))
    whole = PrivacyOdometer(delta=1e-6)
    for _ in range(200):
        whole.add(GAUSSIAN), odometer.add(GAUSSIAN)
    assert odometer.reading.epsilon > whole.reading.epsilon
    with pytest.raises(ValueError, match="reserved must be smaller than delta"):
        PrivacyOdometer(delta=1e-6, reserved=1e-6)
    # Nor does it grow with the tables of the noise: there is no finite reading then.
    odometer = PrivacyOdometer(delta=1e-6, dims=10**12)
    reading = odometer.add(dpjax.gaussian(1.0, 1e-4, 1e-9))
    assert (reading.epsilon, reading.delta) == (math.inf, 1e-6)


def test_readings_hold_at_all_times():
    """Losses of Gaussian noise are normal, of mean rho and variance 2 rho for each release.

    With probability .05 at most a reading at delta = .05 is ever exceeded: in 2,000 runs more than
    150 times with probability below 1e-6. The quantile at each single moment is exceeded far more.
    """
    runs, times, delta = 2000, 400, 0.05
    mechanism = dpjax.gaussian(1.0, 0.5, 0.01)
    rho, _ = mechanism.zcdp
    odometer = PrivacyOdometer(delta=delta, dims=1)
    readings = [odometer.add(mechanism).epsilon for _ in range(times)]
    losses = np.random.default_rng(17).normal(rho, math.sqrt(2 * rho), (runs, times))
    losses = losses.cumsum(axis=1)
    moments = np.arange(1, times + 1)
    at_one_moment = moments * rho - scipy.special.ndtri(delta) * np.sqrt(2 * rho * moments)
    assert (losses > readings).any(axis=1).sum() <= 150
    assert (losses > at_one_moment).any(axis=1).sum() > 400


BUDGETS = {
    "filter": lambda: PrivacyFilter(epsilon=1.0, delta=1e-6),
    "odometer": lambda: PrivacyOdometer(delta=1e-6),
}


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_budget_in_memory_has_no_copies(name, copied):
    """Each of ten copies admitted a release of epsilon 1."""
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copied(BUDGETS[name]())


@pytest.mark.parametrize("name", BUDGETS)
def test_a_fork_has_no_budget(name, monkeypatch):
    budget = BUDGETS[name]()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="in the process that made it"):
        (budget.admit if name == "filter" else budget.add)(GAUSSIAN)
    with pytest.raises(RuntimeError, match="in the process that made it"):
        _ = budget.guarantee if name == "filter" else budget.reading


def test_threads_share_one_budget(monkeypatch):
    """All of them look before any of them pays, if nothing stops them."""
    budget = PrivacyFilter(epsilon=1.0, delta=1e-6)
    looked, admitted, look = threading.Barrier(4), [], PrivacyFilter._with

    def slow(self, release):
        found = look(self, release)
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(0.2)
        return found

    def admit():
        with contextlib.suppress(BudgetExceededError):
            budget.admit(dpjax.laplace(1.0, 0.9))
            admitted.append(True)

    monkeypatch.setattr(PrivacyFilter, "_with", slow)
    threads = [threading.Thread(target=admit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(admitted) == 1
