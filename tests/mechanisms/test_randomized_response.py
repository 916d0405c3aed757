"""Randomized response: its probabilities are multiples of 2^-32, so they are checked exactly."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

import dpjax

FALSE_ALARM = 1e-6
EPSILONS = [0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0]
CATEGORIES = [2, 3, 4, 10, 255, 1000, 2**15]


def exact_exp(epsilon):
    """e^epsilon as a rational, from below, good to 100 digits."""
    with mpmath.workdps(250):
        return Fraction(
            int(mpmath.floor(mpmath.exp(mpmath.mpf(float(epsilon))) * 10**100)), 10**100
        )


def shares(weight, count):
    """Exact probabilities of the truth and of each lie."""
    lie = Fraction(int(weight), 2**32)
    return 1 - (count - 1) * lie, lie


@pytest.mark.parametrize("count", CATEGORIES)
def test_truth_is_at_most_exp_epsilon_times_a_lie(count):
    for epsilon in EPSILONS:
        weight = dpjax.randomized_response(epsilon, count).lie_weight
        truth, lie = shares(weight, count)
        assert 0 < lie <= truth <= exact_exp(epsilon) * lie
        # The least such weight, or the next: the lies are rounded up and no further.
        truth, lie = shares(int(weight) - 2, count)
        assert truth > exact_exp(epsilon) * lie


def test_traced_weights_are_outward_too():
    for count in (2, 10, 1000):
        epsilons = jnp.asarray(EPSILONS, "float32")
        made = jax.jit(jax.vmap(lambda e, count=count: dpjax.randomized_response(e, count)))(
            epsilons
        )
        for epsilon, weight in zip(epsilons, made.lie_weight, strict=True):
            truth, lie = shares(weight, count)
            assert 0 < lie <= truth <= exact_exp(epsilon) * lie
            exact = 2**32 / (exact_exp(epsilon) + count - 1)
            assert int(weight) <= exact * Fraction(10001, 10000) + 3


def test_probabilities_agree_with_peers(reference):
    for row in reference("peers")["randomized_response"]:
        count = row.get("k", 2)
        weight = dpjax.randomized_response(row["exact"], count).lie_weight
        assert float(shares(weight, count)[0]) == pytest.approx(row["prob"], abs=1e-9)


def test_draws_follow_the_exact_probabilities(draws):
    def p_value(epsilon):
        truth, lie = shares(dpjax.randomized_response(epsilon, 4).lie_weight, 4)
        expected = 200_000 * np.array([lie, lie, truth, lie], float)
        return stats.chisquare(counts, expected).pvalue

    counts = np.bincount(draws(dpjax.randomized_response(1.0, 4), 2, 200_000), minlength=4)
    assert p_value(1.0) > FALSE_ALARM
    assert p_value(1.1) < FALSE_ALARM
    assert p_value(0.9) < FALSE_ALARM


def test_answers_are_drawn_independently(draws):
    answers = draws(dpjax.randomized_response(1.0, 3), np.array([0, 0], "int32"), 50_000)
    table = np.zeros((3, 3))
    np.add.at(table, (answers[:, 0], answers[:, 1]), 1)
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_log_prob_is_exact(log_probs):
    mechanism = dpjax.randomized_response(1.5, 5)
    truth, lie = (float(x) for x in shares(mechanism.lie_weight, 5))
    probabilities = np.exp(log_probs(mechanism, np.arange(5), 3))
    np.testing.assert_allclose(probabilities, [lie, lie, lie, truth, lie], rtol=1e-5)
    both = mechanism.log_prob(jnp.asarray([0, 3]), jnp.asarray([0, 0]))
    assert float(both) == pytest.approx(np.log(truth * lie), rel=1e-5)


# The answers.


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "uint32"])
def test_answers_of_any_integer_dtype(dtype, key):
    mechanism = dpjax.randomized_response(20.0, 300)  # More than 8 bits hold.
    answers = np.array([0, 1, 1, 0])
    released = mechanism(key, jnp.asarray(answers, dtype)).value
    assert released.dtype == "int32"
    np.testing.assert_array_equal(released, answers)
    log_prob = jax.jit(mechanism.log_prob)
    at_int32 = log_prob(released, jnp.asarray(answers, "int32"))
    assert log_prob(released, jnp.asarray(answers, dtype)) == at_int32


@pytest.mark.parametrize(
    ("answer", "clamped"), [(-1, 0), (-(2**31), 0), (7, 4), (2**31 - 1, 4), (2**40, 4)]
)
def test_answers_out_of_range_are_clamped(answer, clamped, key):
    mechanism = dpjax.randomized_response(1.0, 5)
    strange, ordinary = (np.full(200, x) for x in (answer, clamped))
    np.testing.assert_array_equal(mechanism(key, strange).value, mechanism(key, ordinary).value)


def test_large_unsigned_answers_do_not_wrap(key):
    mechanism = dpjax.randomized_response(20.0, 5)
    assert mechanism(key, jnp.full(3, 2**32 - 1, "uint32")).value.tolist() == [4, 4, 4]


def test_floats_are_refused(key):
    with pytest.raises(TypeError, match="integer categories, got dtype float32"):
        dpjax.randomized_response(1.0)(key, jnp.zeros(3))


def test_answers_in_a_pytree_get_independent_noise(key):
    released = dpjax.randomized_response(0.1)(
        key, {"a": jnp.zeros(64, int), "b": jnp.zeros(64, int)}
    )
    assert not np.array_equal(released.value["a"], released.value["b"])


# Parameters.


def test_largest_epsilon_still_lies():
    assert dpjax.randomized_response(22.0).lie_weight == 2
    # One lie in 2^32 words is the rarest: beyond, epsilon would promise less than it says.
    with pytest.raises(ValueError, match=r"epsilon must be at most 22\.0, got 23"):
        dpjax.randomized_response(23)


@pytest.mark.parametrize("count", [1, 0, -1, 2**15 + 1])
def test_categories_out_of_range_are_refused(count):
    with pytest.raises(ValueError, match=f"categories must be .* got {count}"):
        dpjax.randomized_response(1.0, count)


@pytest.mark.parametrize("count", [2.0, "2", None, True])
def test_categories_that_are_no_integer_are_refused(count):
    with pytest.raises(TypeError, match="categories"):
        dpjax.randomized_response(1.0, count)


def test_epsilon_below_the_resolution(key):
    with pytest.raises(ValueError, match="epsilon=1e-12 is too small for 1000 categories"):
        dpjax.randomized_response(1e-12, 1000)
    traced = jax.jit(jax.vmap(lambda e: dpjax.randomized_response(e, 1000)(key, 1).value))
    assert traced(jnp.asarray([1e-12])).tolist() == [-1]


def test_lies_are_counted():
    mechanism = dpjax.randomized_response(1.0, 4)
    lying = float(1 - shares(mechanism.lie_weight, 4)[0])
    assert mechanism.lies(confidence=lying * 0.9) == 0 or lying > 0.5
    assert mechanism.lies(confidence=0.99) == 1
    lies = mechanism.lies(confidence=0.9, shape=(10, 10), simultaneous=True)
    assert stats.binom.cdf(lies, 100, lying) >= 0.9 > stats.binom.cdf(lies - 1, 100, lying)


def test_uniform_answers_are_a_fixed_point():
    # Each column of the channel sums to 1, exactly.
    truth, lie = shares(dpjax.randomized_response(0.7, 7).lie_weight, 7)
    assert truth + 6 * lie == 1


def test_lies_in_what_is_to_be_released():
    mechanism = dpjax.randomized_response(1.0, 4)
    like = {"a": jnp.zeros((5, 10), "int8"), "b": jax.ShapeDtypeStruct((50,), "int32")}
    lies = mechanism.lies(confidence=0.9, shape=(10, 10), simultaneous=True)
    assert mechanism.lies(confidence=0.9, like=like, simultaneous=True) == lies
    assert mechanism.lies(confidence=0.9, like=like) == mechanism.lies(confidence=0.9) == 1
    with pytest.raises(ValueError, match="`like` already determines shapes and dtypes"):
        mechanism.lies(confidence=0.9, shape=(3,), like=like)
    with pytest.raises(TypeError, match="integer categories, got dtype float32"):
        mechanism.lies(confidence=0.9, like=jnp.zeros(3))


# The protocol of two coins.


def test_two_coins_have_the_probabilities_of_the_coins():
    """The truth 3/4 and the lie 1/4: by the second coin too, heads may tell the truth."""
    assert shares(dpjax.two_coins().lie_weight, 2) == (Fraction(3, 4), Fraction(1, 4))
    assert shares(dpjax.two_coins(4).lie_weight, 4) == (Fraction(5, 8), Fraction(1, 8))


@pytest.mark.parametrize("count", [2, 3, 4, 7, 1000, 2**15])
def test_two_coins_promise_the_logarithm_of_one_more_than_the_answers(count):
    mechanism = dpjax.two_coins(count)
    truth, lie = shares(mechanism.lie_weight, count)
    assert truth / lie <= count + 1 <= exact_exp(mechanism.epsilon) + Fraction(1, 10**90)
    assert mechanism.guarantee.epsilon == pytest.approx(np.log(count + 1), rel=1e-15)
    # The least such weight: the lies are rounded up and no further.
    truth, lie = shares(int(mechanism.lie_weight) - 1, count)
    assert truth / lie > count + 1
