"""The k largest of a race against the probabilities of Plackett and Luce, by enumeration.

Chi-square tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.queries import top_k
from dpjax.random._selected_index import remaining_scores

FALSE_ALARM = 1e-6
DRAWS = 2**15
SCORES = np.array([3, 1, 2, 0])
PAIRS = np.array(list(itertools.permutations(range(4), 2)))


@jax.jit
def _draws(mechanism, keys, scores):
    return jax.vmap(lambda key: mechanism(key, scores).value)(keys)


@jax.jit
def _log_probs(mechanism, outputs, scores):
    of_scores = jax.vmap(mechanism.log_prob, in_axes=(0, None))
    return jax.vmap(of_scores, in_axes=(None, 0))(outputs, scores)


def log_probs(mechanism, scores):
    """Of every ordered pair, a row for each vector of scores."""
    return np.asarray(_log_probs(mechanism, PAIRS, np.atleast_2d(scores)), float)


@pytest.fixture(scope="module")
def released():
    keys = jax.random.split(dpjax.random.seeded_key(1), DRAWS)
    return np.asarray(_draws(top_k(1.0, epsilon=2.0, k=2), keys, SCORES))


def plackett_luce(scores, epsilon, k=2, delta=1.0):
    """The product of softmaxes, at epsilon / k each."""
    weights = np.exp(np.asarray(scores, float) * epsilon / (2 * k * delta))
    first, second = weights[PAIRS.T]
    return first / weights.sum() * second / (weights.sum() - first)


def p_value(pairs, probabilities):
    counts = [np.sum(np.all(pairs == pair, axis=1)) for pair in PAIRS]
    assert sum(counts) == len(pairs)
    return stats.chisquare(counts, len(pairs) * np.asarray(probabilities), sum_check=False).pvalue


def one_shot(noise, temperature=2.0):
    """The two largest of scores with noise of the scale 2 k Delta / epsilon, drawn once."""
    noisy = SCORES + temperature * noise(size=(DRAWS, 4))
    return np.argsort(-noisy, axis=1)[:, :2]


def test_probabilities_are_products_of_softmaxes():
    for scores, epsilon in ((SCORES, 2.0), ([0, 40, -3, 39], 0.5), ([1, 1, 1, 1], 3.0)):
        found = log_probs(top_k(1.0, epsilon, k=2), np.asarray(scores))
        exact = np.log(plackett_luce(scores, epsilon))
        np.testing.assert_allclose(found[0], exact, rtol=5e-5, atol=1e-5)


def test_draws_are_those_of_a_race(released):
    exact = plackett_luce(SCORES, 2.0)
    assert p_value(released, exact) > FALSE_ALARM
    # Gumbel noise that is drawn once has this distribution, Laplace noise does not.
    generator = np.random.default_rng(3)
    assert p_value(one_shot(generator.gumbel), exact) > FALSE_ALARM
    assert p_value(one_shot(generator.laplace), exact) < FALSE_ALARM
    # Power: epsilon 10% off, each selection at all of epsilon.
    for wrong in (1.8, 2.2, 4.0):
        assert p_value(released, plackett_luce(SCORES, wrong)) < FALSE_ALARM


def test_nothing_is_selected_twice(released):
    assert np.all(released[:, 0] != released[:, 1])
    twice = np.repeat(PAIRS[:, :1], 2, axis=1)
    assert np.all(np.isneginf(_log_probs(top_k(1.0, epsilon=1.0, k=2), twice, SCORES[None])))


def worst_loss(mechanism, changes):
    here = log_probs(mechanism, SCORES)
    there = log_probs(mechanism, SCORES + np.array(changes))
    return np.abs(here - there).max()


def test_no_neighbor_loses_more_than_epsilon():
    """By enumeration: of any changes by at most 1, and of counts, which only rise or only fall."""
    up_or_down = list(itertools.product([-1, 1], repeat=4))
    up = list(itertools.product([0, 1], repeat=4))
    assert 0.75 < worst_loss(top_k(1.0, 1.0, k=2), up_or_down) <= 1.0 + 1e-5
    assert 0.75 < worst_loss(top_k(0.5, 1.0, k=2), up) <= 1.0 + 1e-5
    assert worst_loss(top_k(0.5, 1.0, k=2), up_or_down) > 1.0  # Then it is not enough.


def test_selections_are_composed_by_their_bounded_range():
    mechanism = top_k(1.0, epsilon=2.0, k=100)
    assert mechanism.zcdp == (pytest.approx(2.0**2 / 800, rel=1e-9), 0.0)
    at = dpjax.accounting.compose_at(mechanism, delta=1e-6, method="zcdp")
    assert at.epsilon < 0.6 < mechanism.guarantee.epsilon


def test_selected_scores_are_within_the_stated_gap():
    mechanism = top_k(1.0, epsilon=4.0, k=2)
    scores = 4 * SCORES
    probabilities = np.exp(log_probs(mechanism, scores)[0])
    gaps = np.sort(scores)[-2] - scores[PAIRS].min(axis=1)
    bound = mechanism.score_gap(confidence=0.5, shape=(4,), simultaneous=True)
    assert bound == pytest.approx(math.log(8 / 0.5), rel=1e-4)
    assert probabilities[gaps <= bound].sum() >= 0.5


@pytest.mark.slow
def test_nan_and_infinities_are_like_the_ends():
    mechanism, key = top_k(1.0, epsilon=1.0, k=2), dpjax.random.seeded_key(4)
    for strange, ordinary in ((np.nan, -np.inf), (-np.inf, -3e38), (np.inf, 3e38)):
        scores = np.array([[1.0, x, 0.0, 2.0] for x in (strange, ordinary)], "float32")
        here, there = (mechanism(key, row).value.tolist() for row in scores)
        assert here == there
        assert (1 in here) == (strange == np.inf)
    everything = mechanism(key, np.full(4, np.nan, "float32")).value
    assert len(set(everything.tolist())) == 2


@pytest.mark.slow
def test_without_noise_the_order_is_the_truth():
    public = dpjax.assume_sensitivity(0.0, norm="linf", allow_zero=True)
    mechanism = top_k(public, epsilon=1.0, k=4)
    assert mechanism(dpjax.random.seeded_key(0), SCORES).value.tolist() == [0, 2, 1, 3]
    ties = mechanism(dpjax.random.seeded_key(0), np.array([1, 1, 0, 0])).value
    assert ties.tolist() == [0, 1, 2, 3]


def test_what_cannot_be_selected_is_refused():
    key = dpjax.random.seeded_key(0)
    with pytest.raises(ValueError, match="value must hold at least k=5 scores, got 4"):
        top_k(1.0, 1.0, k=5)(key, SCORES)
    with pytest.raises(ValueError, match="one array of scores"):
        top_k(1.0, 1.0, k=1)(key, jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match="k must be an integer of at least 1, got 0"):
        top_k(1.0, 1.0, k=0)
    with pytest.raises(ValueError, match="norm linf"):
        top_k(dpjax.assume_sensitivity(1.0, norm="l1"), 1.0, k=1)


def test_scores_of_nan_end_in_a_large_batch():
    """What is taken is never better than what is left: else no option is ever kept.

    In batches of 2048, XLA's minimum of scores with NaN was another number, and `vmap` never ended.
    """
    scores = jnp.tile(jnp.asarray([[jnp.nan] * 3, [jnp.nan, 1, 0], [2, jnp.nan, 0]]), (2048, 1))
    for place in range(3):
        taken = jnp.zeros(scores.shape, bool).at[:, place].set(True)
        left = np.asarray(jax.jit(jax.vmap(remaining_scores))(scores, taken))
        assert np.isfinite(left).all()
        assert np.all(left[:, place] <= np.delete(left, place, axis=1).max(axis=1))
