"""What a guarantee allows an attack: closed forms, tight mechanisms, and faults that are found."""

import math

import numpy as np
import pytest
import scipy

from dpjax import Guarantee, NeighboringRelation
from dpjax.attacks import compare_with_claim, highest_true_positive_rate, roc_curve

RATES = np.linspace(0, 1, 101)


def trials(random, count, truth_told, shown=1.0):
    """Randomized response on the coin itself, in a part of the trials; 0 in the others."""
    coins = random.random(count) < 0.5
    answers = np.where(random.random(count) < truth_told, coins, ~coins)
    return np.where(random.random(count) < shown, 2.0 * answers - 1, 0.0), coins


def compared(scores, coins, guarantee, confidence=0.95):
    return compare_with_claim(roc_curve(scores, coins, confidence=confidence), guarantee)


def test_randomized_response_is_the_worst_that_epsilon_allows():
    """Its curve is made of two lines, through (lie, truth)."""
    epsilon = 1.2
    lie = 1 / (1 + math.exp(epsilon))
    exact = np.interp(RATES, [0, lie, 1], [0, 1 - lie, 1])
    assert np.allclose(highest_true_positive_rate(Guarantee(epsilon), RATES), exact)


def test_the_gaussian_mechanism_touches_what_its_delta_allows():
    """At each epsilon, delta is the largest of TPR - e^epsilon FPR, which one threshold attains."""
    epsilon, mu = 0.7, 1.0
    rates = scipy.stats.norm.sf(np.linspace(-6, 6, 2001))
    found = scipy.stats.norm.sf(scipy.stats.norm.isf(rates) - mu)
    delta = np.max(found - math.exp(epsilon) * rates)
    gap = highest_true_positive_rate(Guarantee(epsilon, delta), rates) - found
    assert -1e-9 < np.min(gap) < 1e-9


def test_what_is_not_covered_adds_up():
    rates = np.array([0.0, 0.1])
    by_hand = math.e * rates + 1e-3 + 0.05 + 0.01
    sampled = Guarantee(1.0, 1e-3, 0.05, 0.99)
    assert np.allclose(highest_true_positive_rate(sampled, rates), by_hand)
    marginal = Guarantee(1.0, 1e-3, 0.05, None)
    assert np.allclose(highest_true_positive_rate(marginal, rates), by_hand - 0.01)
    assert np.all(highest_true_positive_rate(Guarantee(math.inf), rates) == 1)


@pytest.mark.parametrize("guarantee", [Guarantee(0.4), Guarantee(0.0, gamma=0.3)])
def test_claims_that_are_tight_are_contradicted_no_more_often_than_stated(guarantee):
    """At 80%, of 300 claims 87 or more are contradicted with probability 1e-4 at most."""
    random = np.random.default_rng(0)
    epsilon, shown = (0.4, 1.0) if guarantee.gamma == 0 else (math.inf, 0.3)
    truth_told = 1 / (1 + math.exp(-epsilon))
    found = [
        compared(*trials(random, 1000, truth_told, shown), guarantee, 0.8).contradicted
        for _ in range(300)
    ]
    assert np.sum(found) <= scipy.stats.binom.isf(1e-4, 300, 0.2)


def test_a_claim_of_too_little_is_contradicted():
    """20,000 trials show .9 of epsilon 1, and gamma .3 with 2% to spare."""
    random = np.random.default_rng(1)
    scores, coins = trials(random, 20_000, 1 / (1 + math.exp(-1.0)))
    comparison = compared(scores, coins, Guarantee(0.9))
    assert comparison.contradicted
    assert 0.9 < comparison.epsilon < 1.0
    assert "is contradicted" in repr(comparison)
    assert not compared(scores, coins, Guarantee(1.0)).contradicted
    scores, coins = trials(random, 20_000, 1.0, shown=0.3)
    assert compared(scores, coins, Guarantee(1.0, gamma=0.28)).contradicted
    assert not compared(scores, coins, Guarantee(0.0, gamma=0.3)).contradicted


def test_negatives_can_contradict_where_positives_do_not():
    """What is seen of one coin only, seldom: that it is tails."""
    random = np.random.default_rng(2)
    coins = random.random(20_000) < 0.5
    scores = np.where(~coins & (random.random(20_000) < 0.1), -1.0, 0.0)
    comparison = compared(scores, coins, Guarantee(1.0, delta=0.01))
    assert comparison.contradicted
    assert comparison.epsilon > 3
    assert comparison.true_positive_rate > 0.99


def test_guarantees_about_other_neighbors_are_refused():
    for guarantee in (
        Guarantee(1.0, relation=NeighboringRelation.ADD_OR_REMOVE_ONE),
        Guarantee(1.0, group_size=2),
    ):
        with pytest.raises(ValueError, match="must be under replace-one and not for groups"):
            highest_true_positive_rate(guarantee, 0.1)


def test_dependent_scores_contradict_nothing():
    curve = roc_curve([[0.0, 1.0]], [[False, True]], confidence=None)
    with pytest.raises(ValueError, match="independent"):
        compare_with_claim(curve, Guarantee(1.0))
