"""Unary encoding: its probabilities are multiples of 2^-32, so they are checked exactly."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

import dpjax

FALSE_ALARM = 1e-6
EPSILONS = [1e-6, 0.01, 0.5, 1.0, 2.0, 5.0, 15.0, 22.0]
each_flip = pytest.mark.parametrize("flips", ["optimized", "symmetric"])


def exact_exp(epsilon):
    """e^epsilon as a rational, from below, good to 100 digits."""
    with mpmath.workdps(250):
        return Fraction(
            int(mpmath.floor(mpmath.exp(mpmath.mpf(float(epsilon))) * 10**100)), 10**100
        )


def odds_ratio(truth, lie):
    """Of the two bits that another answer changes: the largest ratio of two probabilities."""
    p, q = Fraction(int(truth), 2**32), Fraction(int(lie), 2**32)
    return p * (1 - q) / (q * (1 - p))


@each_flip
def test_no_report_is_likelier_by_more_than_exp_epsilon(flips):
    for epsilon in EPSILONS:
        truth, lie = dpjax.unary_encoding(epsilon, 5, flips=flips).report_weights
        assert 0 < lie <= truth < 2**32
        assert odds_ratio(truth, lie) <= exact_exp(epsilon)
        # The least such weight, or the next: rounded up and no further.
        fewer = max(lie - 2, 1)
        assert odds_ratio(2**32 - fewer if flips == "symmetric" else truth, fewer) > exact_exp(
            epsilon
        )
    assert dpjax.unary_encoding(1.0, 5).report_weights[0] == 2**31


@each_flip
def test_traced_weights_are_outward_too(flips):
    epsilons = jnp.asarray(EPSILONS[1:], "float32")
    made = jax.jit(jax.vmap(lambda e: dpjax.unary_encoding(e, 5, flips=flips)))(epsilons)
    for epsilon, truth, lie in zip(epsilons, made.truth_weight, made.lie_weight, strict=True):
        assert 1 < odds_ratio(truth, lie) <= exact_exp(epsilon)


@each_flip
def test_probabilities_of_all_reports(flips, log_probs):
    """By enumeration: they add up to 1, and no neighbor's is further than e^epsilon."""
    mechanism = dpjax.unary_encoding(1.5, 3, flips=flips)
    p, q = (weight / 2**32 for weight in mechanism.report_weights)
    reports = np.array(list(itertools.product([0, 1], repeat=3)))
    here, there = (log_probs(mechanism, reports, np.int32(answer)) for answer in (1, 2))
    shares = np.where(np.arange(3) == 1, p, q)
    exact = np.log(np.where(reports == 1, shares, 1 - shares)).sum(axis=1)
    np.testing.assert_allclose(here, exact, rtol=1e-5)
    assert np.exp(here).sum() == pytest.approx(1, abs=1e-5)
    assert np.abs(here - there).max() == pytest.approx(1.5, abs=1e-5)
    assert np.isneginf(mechanism.log_prob(jnp.array([0, 2, 1]), jnp.int32(0)))


@each_flip
def test_bits_are_drawn_by_their_probabilities(flips, key):
    mechanism = dpjax.unary_encoding(1.0, 4, flips=flips)
    bits = np.asarray(mechanism(key, jnp.full(50_000, 2)).value)
    assert (bits.dtype, bits.shape) == ("int8", (50_000, 4))

    def p_value(category, weight):
        return stats.binomtest(int(bits[:, category].sum()), 50_000, weight / 2**32).pvalue

    truth, lie = mechanism.report_weights
    for category in range(4):
        assert p_value(category, truth if category == 2 else lie) > FALSE_ALARM
        assert p_value(category, lie if category == 2 else truth) < FALSE_ALARM
        # Power: a weight that is 6% off.
        assert p_value(category, 1.06 * (truth if category == 2 else lie)) < FALSE_ALARM
    # Independently of each other.
    table = np.zeros((2, 2))
    np.add.at(table, (bits[:, 0], bits[:, 2]), 1)
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_flipped_bits_are_counted():
    mechanism = dpjax.unary_encoding(1.0, 4, flips="symmetric")
    flipped = mechanism.report_weights[1] / 2**32
    for shape in ((), (10, 10)):
        bits = 4 * int(np.prod(shape))
        bound = mechanism.lies(confidence=0.9, shape=shape, simultaneous=True)
        assert stats.binom.cdf(bound, bits, flipped) >= 0.9
        assert stats.binom.cdf(bound // 2, bits, flipped) < 0.9
    like = {"a": jnp.zeros((5, 10), "int8"), "b": jax.ShapeDtypeStruct((50,), "int32")}
    assert mechanism.lies(confidence=0.9, like=like, simultaneous=True) == bound


def test_answers_are_clamped_and_floats_are_refused(key):
    mechanism = dpjax.unary_encoding(20.0, 3)
    strange, ordinary = (mechanism(key, jnp.array(x)).value for x in ([-5, 99], [0, 2]))
    np.testing.assert_array_equal(strange, ordinary)
    with pytest.raises(TypeError, match="integer categories, got dtype float32"):
        mechanism(key, jnp.zeros(3))


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match=r"epsilon must be at most 22\.0, got 23"):
        dpjax.unary_encoding(23.0, 5)
    with pytest.raises(ValueError, match="categories must be"):
        dpjax.unary_encoding(1.0, 1)
    with pytest.raises(ValueError, match="flips must be one of"):
        dpjax.unary_encoding(1.0, 2, flips="both")
