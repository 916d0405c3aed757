"""Shares of a ledger: what they cost on disk, and that all parts together keep the budget."""

import copy
import math
import os
import pickle
from decimal import Decimal

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.accounting._share import (
    _logit_of_half,
    _mu_of,
    epsilon_of,
    largest_mu,
    log_delta,
)
from dpjax.release._draw import Draw

BUDGETS = [(1.0, 1e-6), (0.1, 1e-9), (8.0, 1e-3), (0.01, 1e-5)]
TINY = [(1e-6, 1e-24), (1e-6, 1e-3), (100.0, 1e-24), (0.01, 1e-20)]


@pytest.fixture
def ledger(tmp_path):
    return dpjax.Ledger(tmp_path / "a.db", epsilon=1, delta="1e-6")


@pytest.fixture
def pure(tmp_path):
    return dpjax.Ledger(tmp_path / "pure.db", epsilon=1)


def gaussian(share):
    return dpjax.gaussian(1.0, share.epsilon, share.delta)


def delta_of(epsilon, mu):
    """By quadrature of the density in excess, not by the formula."""
    x = np.linspace(-40, 40, 400_001)
    excess = stats.norm.pdf(x, mu) - np.exp(epsilon) * stats.norm.pdf(x)
    return np.trapezoid(np.maximum(excess, 0), x)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_largest_mu_is_tight(epsilon, delta):
    mu = largest_mu(epsilon, delta)
    assert delta_of(epsilon, mu) <= delta
    assert delta_of(epsilon, mu * 1.0001) > delta
    assert math.exp(log_delta(epsilon, mu)) == pytest.approx(delta_of(epsilon, mu), rel=1e-4)
    assert 0 <= 1 - epsilon_of(mu, delta) / epsilon < 1e-5


@pytest.mark.parametrize(("epsilon", "delta"), [*BUDGETS, *TINY])
def test_the_largest_mu_keeps_delta_in_fifty_digits(epsilon, delta):
    with mpmath.workdps(50):
        mu, e = mpmath.mpf(largest_mu(epsilon, delta)), mpmath.mpf(epsilon)

        def exact(mu):
            x = mu / 2 - e / mu
            return mpmath.ncdf(x) - mpmath.exp(e) * mpmath.ncdf(x - mu)

        assert exact(mu) <= delta
        assert exact(mu * 1.001) > delta


@pytest.mark.parametrize("epsilon", [0.001, 0.1, 1.0, 5.0])
def test_releases_without_a_delta_are_above_the_curve_of_their_mu(epsilon):
    """The trade-off curve of any epsilon-DP release is above this one; see `Share`."""
    mu = _mu_of(dpjax.Guarantee(epsilon), None, 1)
    alpha = np.linspace(1e-9, 1 - 1e-9, 100_001)
    pure = np.maximum(0, np.maximum(1 - np.exp(epsilon) * alpha, np.exp(-epsilon) * (1 - alpha)))
    ours = stats.norm.cdf(stats.norm.isf(alpha) - mu)
    assert np.all(ours <= pure)
    less = stats.norm.cdf(stats.norm.isf(alpha) - mu * (1 - 1e-3))
    assert np.any(less > pure)
    assert 0 <= 1 - _logit_of_half(mu) / epsilon < 1e-4


@pytest.mark.parametrize("parts", [1, 4])
def test_parts_of_a_split_lose_nothing(parts, ledger, keys):
    """Each has sqrt(parts) times the noise of a release that takes the whole budget."""
    shares = ledger.split(parts)
    whole = dpjax.gaussian(1.0, 1.0, 1e-6).scale
    for i, share in enumerate(shares):
        mechanism = gaussian(share)
        assert 1 <= mechanism.scale / (whole * math.sqrt(parts)) < 1.002
        with share:
            mechanism(keys(i), 0.0)
    # All noise together, by the formula of one Gaussian release.
    together = math.sqrt(parts) / gaussian(shares[0]).scale
    assert delta_of(1.0, together) <= 1e-6
    assert ledger.remaining == (0, 0)
    assert (ledger.spent.epsilon, ledger.spent.delta) == (1.0, 1e-6)
    for share in shares:
        with share, pytest.raises(dpjax.BudgetExceededError, match="of the share, but only"):
            gaussian(share)(keys(parts), 0.0)


def test_the_first_release_pays_for_all_parts_before_it_is_drawn(ledger, keys, monkeypatch):
    first, second = ledger.split(2)
    assert ledger.remaining == (1, Decimal("1e-6"))  # Parts that were never used cost nothing.

    def killed(*_):
        raise KeyboardInterrupt

    mechanism = gaussian(first)
    with monkeypatch.context() as patched:
        patched.setattr(Draw, "__call__", killed)
        with first, pytest.raises(KeyboardInterrupt):
            mechanism(keys(0), jnp.zeros(7))
    assert ledger.remaining == (0, 0)
    assert first.remaining == pytest.approx(0, abs=1e-5)
    with second:
        mechanism(keys(1), 0.0)
    assert [row["epsilon"] for row in ledger.history()] == [1, 0]
    assert ledger.history()[1]["guarantee"].startswith("(epsilon=0.68")


def test_a_share_is_a_part_of_the_whole_budget(ledger, keys):
    for i in range(4):
        with ledger.share(0.25) as share:
            twice = 2 * gaussian(share).scale
            for j in range(4):
                dpjax.mechanisms.additive(
                    1.0,
                    share.epsilon,
                    norm="l2",
                    noise=dpjax.random.GAUSSIAN,
                    delta=share.delta,
                    multiplier=lambda *_, twice=twice: twice,
                )(keys(4 * i + j), 0.0)
        assert ledger.remaining[0] == 1 - Decimal("0.25") * (i + 1)
    with ledger.share("0.25") as share, pytest.raises(dpjax.BudgetExceededError, match="has ep"):
        gaussian(share)(keys(16), 0.0)
    with pytest.raises(dpjax.BudgetExceededError, match="the share is too small"):
        ledger.split(2)


def test_shares_without_a_delta_add_up_and_the_rest_stays(pure, keys):
    first, second, third = pure.split(3)
    assert first.epsilon == first.pure_epsilon == 0.333333333333
    with first:
        dpjax.laplace(1.0, 0.2)(keys(0), 0.0)
        with pytest.raises(dpjax.BudgetExceededError, match="of the share"):
            dpjax.laplace(1.0, 0.2)(keys(1), 0.0)
        dpjax.laplace(1.0, 0.1333)(keys(2), 0.0)
    with second:
        dpjax.laplace(1.0, second.epsilon)(keys(3), 0.0)
    assert pure.remaining == (1 - Decimal("0.3333") - Decimal("0.333333333333"), 0)
    assert third.remaining == 1
    with third, pytest.raises(dpjax.BudgetExceededError):
        dpjax.gaussian(1.0, 0.1, 1e-6)(keys(4), 0.0)


def test_costs_of_a_share_are_those_of_the_file(pure, keys):
    """Rounded up to 10^-12; otherwise the last of many shares could find nothing left."""
    first, second = pure.split(2)
    with first:
        dpjax.laplace(1.0, 1.2345678e-6)(keys(0), 0.0)
        assert first.spent == 1_234_568
        with pytest.raises(dpjax.BudgetExceededError, match="of the share"):
            dpjax.laplace(1.0, 0.5)(keys(1), 0.0)
    with second:
        dpjax.laplace(1.0, 0.5)(keys(2), 0.0)
    assert pure.remaining[0] == Decimal("0.5") - Decimal("0.000001234568")


def test_laplace_and_gaussian_noise_share_a_part(ledger, keys):
    (share,) = ledger.split(1)
    with share:
        gaussian_noise = dpjax.gaussian(1.0, 0.7, 1e-6)
        gaussian_noise(keys(0), 0.0)
        spent = (1 / gaussian_noise.scale) ** 2
        left = math.sqrt(largest_mu(1.0, 1e-6) ** 2 - spent)
        pure = _logit_of_half(left * 0.998)
        with pytest.raises(dpjax.BudgetExceededError):
            dpjax.laplace(1.0, pure * 1.01)(keys(1), 0.0)
        dpjax.laplace(1.0, pure)(keys(2), 0.0)
        for other in (
            dpjax.smooth_quantile(0.1, 1e-7, lower=0, upper=1),
            dpjax.mechanisms.additive(
                1.0,
                0.1,
                norm="l1",
                noise=dpjax.random.GAUSSIAN,
                delta=1e-7,
                multiplier=lambda e, d: 100.0,
            ),
        ):
            with pytest.raises(dpjax.BudgetExceededError, match="pay for this release from the"):
                other(keys(3), jnp.linspace(0, 1, 9))
        with pytest.raises(dpjax.BudgetExceededError, match="release must have a finite epsilon"):
            dpjax.laplace(1.0, 0.1, noise="float")(keys(4), 0.0)


def test_named_releases_are_those_of_the_ledger(ledger, keys):
    (share,) = ledger.split(1)
    private = dpjax.privatize(jnp.mean, dpjax.gaussian(0.01, 0.5, 1e-6), ledger=share)
    first = private(keys(0), jnp.ones(100), name="ages")
    again = private(keys(1), jnp.ones(100), name="ages")
    assert again.value == first.value
    assert again.interval() == first.interval()
    assert len(ledger.history()) == 1


def test_a_share_is_not_copied_and_belongs_to_its_process(ledger, keys, monkeypatch):
    (share,) = ledger.split(1)
    for duplicated in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicated(share)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with share, pytest.raises(dpjax.BudgetExceededError, match="can only be used in the process"):
        gaussian(share)(keys(0), 0.0)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_odd_fractions_are_refused(fraction, ledger):
    with pytest.raises(ValueError, match="fraction must be"):
        ledger.share(fraction)
    with pytest.raises(ValueError, match="parts must be"):
        ledger.split(0)


def test_a_split_is_of_what_is_left(ledger, keys):
    with ledger:
        dpjax.laplace(1.0, 0.5)(keys(0), 0.0)
    first, second = ledger.split(2)
    whole = dpjax.gaussian(1.0, 0.5, 1e-6).scale
    assert gaussian(first).scale == pytest.approx(math.sqrt(2) * whole, rel=2e-3)
    for i, share in enumerate((first, second)):
        with share:
            gaussian(share)(keys(1 + i), 0.0)
    assert ledger.remaining == (0, 0)


def test_a_report_says_what_was_published_and_what_is_left(ledger, keys):
    assert repr(ledger.report()).endswith("left epsilon 1 of 1 and delta 0.000001 of 0.000001")

    def average(x):
        return jnp.mean(x)

    private = dpjax.privatize(average, dpjax.laplace(0.01, 0.1), ledger=ledger)
    private(keys(0), jnp.ones(100), name="ages")
    ledger.charge(dpjax.Guarantee(0.2, 1e-7), what="a table")
    report = ledger.report()
    rows = report.rows
    assert [row["what"] for row in rows] == ["average", "a table"]
    assert [row["epsilon left"] for row in rows] == [Decimal("0.9"), Decimal("0.7")]
    assert rows[-1]["delta left"] == Decimal("9e-7")
    text = repr(report)
    assert "left epsilon 0.7 of 1 and delta 0.0000009 of 0.000001" in text
    assert "ages" in text
    assert "(epsilon=0.1, delta=0)-DP, under replace-one" in text
    frame = report.to_frame()
    assert frame["epsilon"].sum() == Decimal("0.3")
    assert list(frame.columns) == list(rows[0])


def test_a_report_without_a_delta_is_short(pure, keys):
    with pure:
        dpjax.laplace(1.0, 0.1)(keys(0), 0.0)
    text = repr(pure.report())
    assert "delta  " not in text.splitlines()[1].replace("guarantee", "")
    assert text.splitlines()[0].endswith("left epsilon 0.9 of 1")
    assert jax.tree.leaves(pure.report().rows[0]["epsilon"]) == [Decimal("0.1")]
