"""Confidence limits: known values, exact coverage, and what they say about epsilon and delta."""

import math

import numpy as np
import pytest
from scipy import stats

from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.auditing._events import Question


@pytest.mark.parametrize(
    ("hits", "trials", "lower", "upper"),
    [(10, 100, 0.04900, 0.17622), (0, 10, 0.0, 0.30850), (10, 10, 0.69150, 1.0)],
)
def test_two_sided_limits_are_those_of_tables(hits, trials, lower, upper):
    assert clopper_pearson_lower(hits, trials, 0.025) == pytest.approx(lower, abs=1e-5)
    assert clopper_pearson_upper(hits, trials, 0.025) == pytest.approx(upper, abs=1e-5)


@pytest.mark.parametrize("trials", [1, 7, 1000])
@pytest.mark.parametrize("error", [0.3, 1e-6])
def test_limits_without_hits_or_misses_have_a_closed_form(trials, error):
    assert clopper_pearson_upper(0, trials, error) == pytest.approx(1 - error ** (1 / trials))
    assert clopper_pearson_lower(trials, trials, error) == pytest.approx(error ** (1 / trials))


@pytest.mark.parametrize("hits", [0, 1, 37, 499, 500])
@pytest.mark.parametrize("error", [0.05, 1e-6])
def test_limits_are_the_probabilities_at_which_the_count_is_too_extreme(hits, error):
    lower = clopper_pearson_lower(hits, 500, error)
    upper = clopper_pearson_upper(hits, 500, error)
    # Just below the error, as limits are rounded outward: by 1e-9, which tells close to 1.
    if hits > 0:
        assert 0.4 * error < stats.binom.sf(hits - 1, 500, lower) < error
    if hits < 500:
        assert 0.4 * error < stats.binom.cdf(hits, 500, upper) < error


def test_limits_agree_with_scipy():
    exact = stats.binomtest(37, 500).proportion_ci(0.9, "exact")
    found = clopper_pearson_lower(37, 500, 0.05), clopper_pearson_upper(37, 500, 0.05)
    np.testing.assert_allclose(found, exact, rtol=1e-8)


def test_limits_cover_every_probability():
    """By enumeration: the chance of a limit on the wrong side is at most the error."""
    trials, error = 50, 0.1
    hits, probabilities = np.arange(trials + 1), np.linspace(0.001, 0.999, 500)[:, None]
    weights = stats.binom.pmf(hits, trials, probabilities)
    too_high = np.sum(weights * (clopper_pearson_lower(hits, trials, error) > probabilities), 1)
    too_low = np.sum(weights * (clopper_pearson_upper(hits, trials, error) < probabilities), 1)
    assert too_high.max() <= error
    assert too_low.max() <= error
    assert min(too_high.max(), too_low.max()) > 0.8 * error  # And not by being far off


def test_limits_answer_for_epsilon_and_delta():
    truth = math.e / (1 + math.e)  # Randomized response at epsilon 1
    assert Question("epsilon", 0.0).answer(truth, 1 - truth) == pytest.approx(1.0)
    assert Question("delta", 0.0).answer(truth, 1 - truth) == pytest.approx(2 * truth - 1)
    assert Question("delta", 1.0).answer(truth, 1 - truth) == pytest.approx(0.0)
    assert Question("epsilon", 0.1).answer(0.5, 0.1) == pytest.approx(math.log(4.0))
    assert Question("epsilon", 0.5).answer(0.4, 0.1) == -math.inf
    assert Question("delta", 1e6).answer(0.4, 0.1) == -math.inf
