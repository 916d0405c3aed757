"""The sparse vector technique: exact probabilities, what a record moves, and queries one by one.

Chi-square tests: a false alarm once in 10^6 keys each.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.random import KeyLedger

FALSE_ALARM = 1e-6
DRAWS = 2**14
K = 3
# Ordered places, K where there are no more, by the number of positive answers.
OUTPUTS = {
    1: np.arange(K + 1)[:, None],
    2: np.array([(i, j) for i in range(K + 1) for j in range(K + 1) if i < j or i == j == K]),
}
ANSWERS = np.array([1.0, 0.0, 2.0], "float32")
EPSILON = 1.0


@pytest.fixture(scope="module")
def mechanism():
    return dpjax.above_threshold(1.0, EPSILON, threshold=0.5, positives=2)


@pytest.fixture(scope="module")
def log_probs_of():
    """`log_probs_of(mechanism, values)`: of every output (columns) for every value (rows)."""

    @jax.jit
    def every(mechanism, values):
        def of(value):
            outputs = OUTPUTS[mechanism.positives]
            return jax.vmap(lambda output: mechanism.log_prob(output, value))(outputs)

        return jax.vmap(of)(values)

    return lambda m, values: np.asarray(every(m, jnp.asarray(values, "float32")), float)


def frequencies(places):
    counts = [np.sum(np.all(places == output, axis=1)) for output in OUTPUTS[2]]
    assert sum(counts) == len(places)
    return counts


def p_value(places, log_prob):
    expected = np.exp(log_prob) * len(places)
    assert expected.min() > 50
    return stats.chisquare(frequencies(places), expected, sum_check=False).pvalue


def test_draws_follow_the_exact_probabilities(mechanism, draws, log_probs_of):
    (log_prob,) = log_probs_of(mechanism, ANSWERS[None])
    assert np.exp(log_prob).sum() == pytest.approx(1, abs=1e-5)
    places = draws(mechanism, ANSWERS, DRAWS)
    assert places.dtype == np.int32
    assert p_value(places, log_prob) > FALSE_ALARM
    # Power: of noise that is a quarter off.
    other = dpjax.above_threshold(1.0, 1.25, threshold=0.5, positives=2)
    assert p_value(places, log_probs_of(other, ANSWERS[None])[0]) < FALSE_ALARM


@pytest.mark.parametrize(("positives", "monotone"), [(1, False), (1, True), (2, False)])
def test_no_pair_of_neighbors_loses_more_than_epsilon(positives, monotone, log_probs_of):
    """By exact probabilities of every output, over a grid of answers and all that moves them."""
    epsilon = 3.0
    mechanism = dpjax.above_threshold(
        1.0, epsilon, threshold=0.0, positives=positives, monotone=monotone
    )
    moves = (0, 1) if monotone else (-1, 0, 1)
    grid = np.array(list(itertools.product([-6.0, 0.0, 6.0], repeat=K)))
    here = log_probs_of(mechanism, grid)
    losses = [
        np.abs(here - log_probs_of(mechanism, grid + np.array(move))).max()
        for move in itertools.product(moves, repeat=K)
    ]
    assert max(losses) <= epsilon + 1e-3
    if positives == 1:  # Two queries far above that are said not to be, and one the other way.
        assert max(losses) > 0.9 * epsilon


def test_both_noises_share_a_grid_and_cover_rounding(mechanism):
    noise = mechanism._noise()
    assert noise.numbers.exponent == noise.threshold.exponent
    rounding = 1 + mechanism.grid
    # Epsilon is split by 1 to 4^(2/3).
    first = EPSILON / (1 + 4 ** (2 / 3))
    for fit, scale in ((noise.threshold, 1 / first), (noise.numbers, 4 / (EPSILON - first))):
        assert scale * rounding <= fit.scale <= scale * rounding * (1 + 1e-3)


def test_the_tables_of_all_charged_noise_are_paid_for(mechanism):
    """That of the threshold and of two positive answers, however many queries there are."""
    for answers in (jnp.zeros(1), jnp.zeros(5, int)):
        assert mechanism._calibration(answers).coordinates == 3
        assert mechanism._threshold_calibration(answers).coordinates == 3


def test_every_query_has_noise_of_its_own(mechanism, draws):
    """Of equal queries at the threshold, any may be above and any below."""
    counts = frequencies(draws(mechanism, np.full(K, 0.5, "float32"), DRAWS))
    assert min(counts) > DRAWS / 40


def test_far_answers_are_right_and_end_after_the_positives(mechanism, draws):
    for answers, places in (
        ([-1000.0, 1000.0, 2000.0], [1, 2]),
        ([1000.0, 2000.0, 3000.0], [0, 1]),
        ([-1000.0, -2000.0, 1000.0], [2, K]),
    ):
        released = draws(mechanism, np.array(answers, "float32") * 1e3, 1)
        np.testing.assert_array_equal(released, [places])
    bound = mechanism.margin(confidence=0.999, shape=(K,), simultaneous=True)
    assert mechanism.margin(confidence=0.999) < bound < 1000


# Queries that come one by one.


@pytest.mark.slow
def test_steps_have_the_same_distribution(mechanism, key, log_probs_of):
    def ask(key):
        _, above = jax.lax.scan(mechanism.step, mechanism.start(key), jnp.asarray(ANSWERS))
        return above

    above = np.asarray(jax.jit(jax.vmap(ask))(jax.random.split(key, DRAWS)))
    assert above.sum(axis=1).max() == 2
    places = np.full((DRAWS, 2), K)
    rows, columns = np.nonzero(above)
    places[rows, above.cumsum(axis=1)[rows, columns] - 1] = columns
    assert p_value(places, log_probs_of(mechanism, ANSWERS[None])[0]) > FALSE_ALARM


def test_a_state_serves_one_query_and_ends_with_the_positives(mechanism, key):
    state = mechanism.start(key)
    later, above = mechanism.step(state, 1000.0)
    again, same = mechanism.step(state, 1000.0)
    assert (bool(above), int(later.remaining), int(again.remaining)) == (True, 1, 1)
    assert above == same
    assert not np.array_equal(jax.random.key_data(state.key), jax.random.key_data(later.key))
    for answer, remaining in ((True, 0), (False, 0), (False, 0)):
        later, above = mechanism.step(later, 1000.0)
        assert (bool(above), int(later.remaining)) == (answer, remaining)
    assert "key" not in repr(state)
    assert "threshold" not in repr(state)
    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(lambda query: mechanism.step(state, query)[1])(jnp.zeros(3))
    with pytest.raises(ValueError, match="query must be a scalar"):
        mechanism.step(state, jnp.zeros(3))


def test_a_batch_of_mechanisms_answers_nothing(mechanism, key):
    """Its noises for one query would all be one draw, at several scales."""
    batch = jax.vmap(lambda epsilon: dpjax.above_threshold(1.0, epsilon, threshold=0.5))(
        jnp.array([0.5, 10.0])
    )
    state = mechanism.start(key)
    for use in (lambda: batch.start(key), lambda: batch.step(state, 0.0)):
        with pytest.raises(ValueError, match="must be a single mechanism, got a batch of shape"):
            use()


def test_a_start_is_told_to_ledgers(mechanism, key, tmp_path):
    with KeyLedger(tmp_path / "keys"):
        state = mechanism.start(key)
        mechanism.step(state, 0.0)
        with pytest.raises(ValueError, match="was used for a release before"):
            mechanism.start(key)


def test_queries_one_by_one_need_a_global_bound(key):
    """Of queries that are chosen by answers a sample says nothing."""
    sampled = dpjax.Sensitivity(1.0, 0.05, 0.99, "linf", None, m=90, k=90, identity="sampled")
    with pytest.raises(ValueError, match="sensitivity must be a global bound"):
        dpjax.above_threshold(sampled, 1.0, threshold=0.0).start(key)


# Parameters.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": np.inf}, "threshold must be a finite number, got inf"),
        ({"threshold": 0.0, "positives": 0}, "positives must be an integer of at least 1 and"),
        ({"threshold": 0.0, "positives": 2**31}, "at most 2147483647, got 2147483648"),
        ({"threshold": 0.0, "monotone": "yes"}, "monotone must be True or False"),
    ],
)
def test_bad_parameters_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        dpjax.above_threshold(1.0, 1.0, **arguments)


def test_no_noise_is_refused():
    zero = dpjax.Sensitivity(0.0, 0.0, 1.0, "linf", None, zero_allowed=True)
    with pytest.raises(ValueError, match="sensitivity must be above 0"):
        dpjax.above_threshold(zero, 1.0, threshold=0.0)


@pytest.mark.slow
def test_a_bad_threshold_that_is_traced_answers_nothing(key):
    def release(threshold):
        mechanism = dpjax.above_threshold(1.0, 1.0, threshold=threshold, positives=2)
        return mechanism(key, jnp.asarray(ANSWERS)), mechanism.start(key).remaining

    bad, remaining = jax.jit(release)(jnp.nan)
    np.testing.assert_array_equal(bad.value, [-1, -1])
    assert np.isnan(bad.guarantee.epsilon)
    assert remaining == 0
