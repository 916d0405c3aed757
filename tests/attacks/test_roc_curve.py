"""Curves of attacks: exact on small examples, and limits that hold as often as they say."""

import numpy as np
import pytest
import scipy

from dpjax.attacks import roc_curve
from dpjax.attacks._roc_curve import RocCurve

GRID = np.array([0.02, 0.1, 0.3, 0.5, 0.8])
EVERYWHERE = np.linspace(0.004, 0.996, 249)
RUNS, CONFIDENCE = 400, 0.8


def curve_of(members, non_members, confidence=0.95):
    inside = np.arange(len(members) + len(non_members)) < len(members)
    return roc_curve(np.concatenate([members, non_members]), inside, confidence=confidence)


def gaussian_curve(random, n, confidence, steps=None):
    """A shift of one standard deviation; scores in steps have many ties."""
    scores = [random.normal(size=n) + shift for shift in (1.0, 0.0)]
    if steps is not None:
        scores = [np.floor(values * steps) / steps for values in scores]
    return curve_of(*scores, confidence)


def truth(steps=None, at=GRID):
    """The true positive rates: of the lowest threshold with no more false positives."""
    if steps is None:
        return scipy.stats.norm.sf(scipy.stats.norm.isf(at) - 1)
    thresholds = np.arange(-10, 10, 1 / steps)
    false_positives, true_positives = scipy.stats.norm.sf(thresholds[None] - [[0.0], [1.0]])
    return np.array([true_positives[false_positives <= rate].max() for rate in at])


def test_points_and_area_of_a_small_example():
    curve = curve_of([3.0, 2.0, np.nan], [2.0, 1.0])
    false_positives, true_positives = curve.points()
    assert false_positives.tolist() == [0, 0, 0.5, 1, 1]
    assert np.allclose(true_positives, [0, 1 / 3, 2 / 3, 2 / 3, 1])
    # Of 6 pairs the member is higher in 3, and level in 1: NaN is lowest.
    assert curve.area == pytest.approx(3.5 / 6)


def test_the_estimate_is_the_part_above_the_threshold():
    """Of 1,000 non-members the eleventh highest has ten above it."""
    curve = curve_of(np.arange(980.0, 1000) + 0.5, np.arange(1000.0))
    assert curve.true_positive_rate(0.01).estimate == pytest.approx(11 / 20)


def test_scores_that_tell_nothing_are_no_better_than_false_positives():
    curve = curve_of(np.zeros(500), np.zeros(500))
    assert curve.area == 0.5
    assert curve.true_positive_rate(0.5).estimate == 0
    lower, upper = curve.limits(GRID)
    assert np.all(lower == 0)
    assert np.all(upper == 1)


@pytest.mark.parametrize("steps", [None, 4])
def test_limits_hold_together_as_often_as_they_say(steps):
    """At confidence .8, of 400 curves 112 or more fail with probability 1e-4 at most."""
    random, true = np.random.default_rng(0), truth(steps, EVERYWHERE)
    failed = 0
    for _ in range(RUNS):
        lower, upper = gaussian_curve(random, 300, CONFIDENCE, steps).limits(EVERYWHERE)
        failed += np.any((lower > true) | (upper < true))
    assert failed <= scipy.stats.binom.isf(1e-4, RUNS, 1 - CONFIDENCE)


@pytest.mark.parametrize("steps", [None, 4])
def test_limits_at_one_rate_hold_as_often_as_they_say(steps):
    """And are not idle: at confidence .8 more than 1 in 100 fail."""
    random = np.random.default_rng(1)
    failed = np.zeros(len(GRID))
    for _ in range(RUNS):
        curve = gaussian_curve(random, 600, CONFIDENCE, steps)
        found = [curve.true_positive_rate(rate) for rate in GRID]
        failed += [
            not x.lower <= true <= x.upper for x, true in zip(found, truth(steps), strict=True)
        ]
    assert np.all(failed <= scipy.stats.binom.isf(1e-5, RUNS, 1 - CONFIDENCE))
    assert np.sum(failed) > RUNS * len(GRID) / 100


@pytest.mark.parametrize(
    ("n", "rate", "confidence"),
    [(1000, 0.05, 0.95), (300, 0.1, 0.8), (50, 0.4, 0.99), (10, 1 - 1e-10, 0.9)],
)
def test_limits_at_one_rate_are_those_of_their_definition(n, rate, confidence):
    """Of ranks that a sum of probabilities finds, among scores with many ties.

    Four events share the error: each of two thresholds, and the members above each.
    """
    random, error = np.random.default_rng(4), (1 - confidence) / 4
    members, non_members = (np.sort(random.integers(0, n, size=n)) for _ in range(2))
    found = curve_of(members, non_members, confidence).true_positive_rate(rate)
    mass = scipy.stats.binom.pmf(np.arange(n + 1), n, rate)
    # Fewer than k false positives: then the k-th highest score has a rate above this one.
    below = max(k for k in range(n + 1) if mass[:k].sum() < error)
    above = min(k for k in range(n + 2) if mass[k:].sum() <= error)
    lower, upper = 0.0, 1.0
    if below > 0:
        hits = np.sum(members > non_members[n - below])
        lower = scipy.stats.beta.ppf(error, hits, n - hits + 1)
    if above <= n:
        hits = np.sum(members >= non_members[n - above])
        upper = scipy.stats.beta.isf(error, hits + 1, n - hits)
    assert (found.lower, found.upper) == pytest.approx((lower, upper), rel=1e-6)


def test_limits_close_in_on_the_truth():
    """With 10^5 scores of each kind, at 99% confidence for all rates, and at one in a thousand."""
    curve = gaussian_curve(np.random.default_rng(2), 100_000, 0.99)
    lower, upper = curve.limits(GRID)
    assert np.all((lower < truth()) & (truth() < upper))
    assert np.all(upper - lower < 0.04)
    at = curve.true_positive_rate(0.001)
    true = scipy.stats.norm.sf(scipy.stats.norm.isf(0.001) - 1)
    assert at.lower < true < at.upper
    assert at.upper < 2 * at.lower


def test_a_rate_takes_ten_false_positives():
    curve = curve_of(np.zeros(10), np.arange(9_999.0))
    with pytest.raises(ValueError, match="take at least 10,000"):
        curve.true_positive_rate(0.001)
    assert curve_of(np.zeros(10), np.arange(10_000.0)).true_positive_rate(0.001).upper < 1


def test_scores_of_one_model_have_no_limits():
    random = np.random.default_rng(3)
    scores, members = random.normal(size=(4, 100)), random.random((4, 100)) < 0.5
    with pytest.raises(ValueError, match="confidence must be None"):
        roc_curve(scores, members)
    curve = roc_curve(scores, members, confidence=None)
    assert curve.true_positive_rate(0.1).lower is None
    with pytest.raises(ValueError, match="independent"):
        curve.limits(GRID)


@pytest.mark.parametrize(
    ("scores", "members", "named"),
    [
        (np.zeros(3), np.zeros(2, bool), "shape"),
        (np.zeros(3), np.zeros(3, bool), "both True and False"),
        (np.zeros(3), np.ones(3, bool), "both True and False"),
    ],
)
def test_what_has_no_curve_is_refused(scores, members, named):
    with pytest.raises(ValueError, match=named):
        roc_curve(scores, members)


def test_ranks_are_those_of_non_members():
    for n in (1, 2, 3, 10, 1001):
        ranks = RocCurve(np.zeros(1), np.zeros(n), 0.95)._ranks()
        assert ranks[0] == 1
        assert ranks[-1] == n
        assert np.all(np.diff(ranks) > 0)
