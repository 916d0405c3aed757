"""Discrete Laplace noise: its law, its loss on neighbors, and its exact error."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dpjax
from dpjax._exact._limbs import Limbs
from dpjax.auditing import _privacy_profile as sticks
from dpjax.mechanisms import additive
from dpjax.random._grid_fit import GridFit, divided
from dpjax.random._lattice import Pair, lattice_exponential
from dpjax.random._noise import DISCRETE_LAPLACE, EXPONENTIAL

FALSE_ALARM = 1e-6
INTEGER = jax.ShapeDtypeStruct((), jnp.int32)
EPSILONS = (0.01, 0.3, 1.0, 4.0, 20.0)


def ratio(mechanism):
    """The exact ratio of neighboring probabilities: exp(-c / T), as log, of what is drawn."""
    fit = mechanism._calibration(INTEGER).fit(DISCRETE_LAPLACE.lattice, jnp.int32)
    points = int(fit.divisor) << int(fit.shift)
    return Fraction(points) / Fraction(DISCRETE_LAPLACE.lattice.resolution)


def law(mechanism, largest):
    """The exact probabilities of the integers from -largest to largest."""
    return np.exp(log_law(mechanism, largest))


def log_law(mechanism, largest):
    step = float(ratio(mechanism))
    at_0 = math.log(-math.expm1(-step)) - math.log1p(math.exp(-step))
    return at_0 - step * np.abs(np.arange(-largest, largest + 1))


@jax.jit
def quotients(first, second, divisor, shift):
    fit = GridFit(jnp.int32(0), divisor, shift, jnp.float32(1))
    return divided(Pair(Limbs(*first), Limbs(*second)), fit)


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(1, 2**16 - 1), st.integers(0, 34))
@settings(max_examples=100, deadline=None)
def test_noise_is_a_difference_of_floors(first, second, divisor, shift):
    """floor(floor(T E) / c) = floor(T E / c), a geometric variable of ratio exp(-c / T)."""
    points = divisor << shift
    limbs = [(np.uint32(x >> 32), np.uint32(x & 0xFFFFFFFF)) for x in (first, second)]
    high, low = map(int, quotients(*limbs, np.uint32(divisor), np.uint32(shift)))
    assert high << 32 | low == (first // points - second // points) % 2**64


def test_a_pair_is_two_numbers_of_one_draw(key):
    """At each place the same two, however many are drawn: padding changes no release."""
    ten, three = (DISCRETE_LAPLACE.lattice.sample(key, (size,)) for size in (10, 3))
    flat = lattice_exponential(key, (20,))
    for limb in (0, 1):
        np.testing.assert_array_equal(ten.first[limb], flat[limb][0::2])
        np.testing.assert_array_equal(ten.second[limb], flat[limb][1::2])
        np.testing.assert_array_equal(three.second[limb], ten.second[limb][:3])


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("sensitivity", [1, 2, 7])
def test_what_is_drawn_never_loses_more_than_epsilon(epsilon, sensitivity):
    """Exactly, from the integers that divide the noise, and with all of the tables' loss."""
    mechanism = dpjax.discrete_laplace(sensitivity, epsilon)
    certificate = DISCRETE_LAPLACE.lattice.certificate
    lost = sensitivity * ratio(mechanism) + 2 * Fraction(certificate.loss)
    assert certificate.loss == 2 * EXPONENTIAL.certificate.loss  # Two variables in each number.
    assert 0.9999 * epsilon < lost <= Fraction(epsilon)
    assert certificate.delta == 0


def test_neighbors_of_two_counts_are_within_epsilon(log_probs):
    """All neighbors at distance 2, enumerated: densities, and the curve of their loss."""
    mechanism = dpjax.discrete_laplace(2, 1.3)
    ends = np.arange(-40, 41)
    outputs = np.stack(np.meshgrid(ends, ends, indexing="ij"), axis=-1).reshape(-1, 2)
    outputs = outputs.astype(np.int32)
    moves = [x for x in itertools.product(range(-2, 3), repeat=2) if sum(map(abs, x)) <= 2]
    here = log_probs(mechanism, outputs, np.zeros(2, np.int32))
    assert np.exp(here).sum() == pytest.approx(1, abs=1e-5)
    loss_of = mechanism.pair_loss(jnp.zeros(2, int))
    at = np.linspace(0, 1.3, 14)
    for move in moves:
        there = log_probs(mechanism, outputs, np.array(move, np.int32))
        assert np.max(np.abs(here - there)) <= 1.3 + 1e-4
        apart = np.maximum(np.exp(here) - np.exp(at[:, None] + there), 0).sum(axis=1)
        shift = float(loss_of.shift(jnp.array(move, float)))
        assert shift == pytest.approx(1.3 * sum(map(abs, move)) / 2, rel=1e-4)
        assert np.all(apart <= getattr(sticks, loss_of.family)(np.array(shift), at) + 1e-5)
    # Power: two counts that move by 1 each lose all of it, and Laplace noise's curve is too low.
    one = dpjax.discrete_laplace(1, 1.3)
    here, there = (log_probs(one, ends.astype(np.int32), np.int32(x)) for x in (0, 1))
    apart = np.maximum(np.exp(here) - np.exp(0.5 + there), 0).sum()
    assert apart == pytest.approx(float(sticks.pure(np.array(1.3), np.array(0.5))), abs=1e-4)
    assert apart > float(sticks.laplace(np.array(1.3), np.array(0.5))) + 0.01


def test_the_event_is_that_of_any_mechanism():
    """It dominates randomized response; that of Laplace noise would not."""
    mechanism = dpjax.discrete_laplace(1, 1.3)
    shift = np.array(1 / mechanism.dp_event.noise_multiplier)
    at = np.linspace(0, 1.3, 14)
    assert np.all(sticks.laplace(shift, at) >= sticks.pure(np.array(1.3), at))
    assert shift > 1.3
    assert dpjax.discrete_laplace(1, 1.3, noise="float").guarantee.epsilon == math.inf


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_draws_have_the_law(epsilon, draws):
    """Chi-square with a fixed key, a false alarm once in 10^6 keys; two other laws fail."""
    mechanism, largest, count = dpjax.discrete_laplace(1, epsilon), int(12 / epsilon), 2**16
    drawn = np.asarray(draws(mechanism, np.int32(0), count))
    found = np.bincount(np.clip(drawn, -largest, largest) + largest, minlength=2 * largest + 1)

    def p_value(expected):
        expected = np.append(expected, max(1 - expected.sum(), 0))
        frequent = expected * count >= 5
        pooled = [np.append(x[frequent], x[~frequent].sum()) for x in (seen, expected * count)]
        return stats.chisquare(pooled[0] + 1e-9, pooled[1] + 1e-9, sum_check=False).pvalue

    seen = np.append(found, 0)
    seen[0], seen[2 * largest] = 0, 0
    exact = law(mechanism, largest)
    exact[0], exact[-1] = 0, 0
    seen[-1] = count - seen.sum()
    assert p_value(exact) > FALSE_ALARM
    wider = law(dpjax.discrete_laplace(1.1, epsilon), largest)
    wider[0], wider[-1] = 0, 0
    assert p_value(wider) < FALSE_ALARM
    edges = np.arange(-largest - 0.5, largest + 1)
    rounded = np.diff(stats.laplace(scale=1 / epsilon).cdf(edges))
    rounded[0], rounded[-1] = 0, 0
    assert p_value(rounded) < FALSE_ALARM
    assert np.var(drawn) == pytest.approx(variance(epsilon), rel=0.1)


def variance(epsilon):
    return 1 / (math.cosh(epsilon) - 1)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_density_is_the_law_and_knows_the_ends(epsilon, log_probs):
    mechanism, largest = dpjax.discrete_laplace(1, epsilon), 50
    outputs = np.arange(-largest, largest + 1, dtype=np.int32)
    found = log_probs(mechanism, outputs, np.int32(0))
    np.testing.assert_allclose(found, log_law(mechanism, largest), rtol=1e-4, atol=1e-4)
    end, a = 2**31 - 2, math.exp(-float(ratio(mechanism)))
    for value, beyond in ((end, 1 / (1 + a)), (end - 3, a**3 / (1 + a))):
        for sign in (1, -1):
            at_end = log_probs(mechanism, np.array([sign * end], np.int32), np.int32(sign * value))
            assert float(at_end[0]) == pytest.approx(math.log(beyond), rel=1e-4, abs=1e-5)
    outside = log_probs(mechanism, np.array([2**31 - 1, -(2**31)]).astype(np.int32), np.int32(0))
    assert outside.tolist() == [-np.inf] * 2


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_error_is_the_least_integer(epsilon):
    mechanism = dpjax.discrete_laplace(1, epsilon)
    with mpmath.workdps(40):
        a = mpmath.exp(-mpmath.mpf(ratio(mechanism).numerator) / ratio(mechanism).denominator)
        for confidence in (0.01, 0.2, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9):
            for together in (1, 5):
                like = jax.ShapeDtypeStruct((together,), jnp.int32)
                how = {"confidence": confidence, "like": like, "simultaneous": together > 1}
                bound = round(mechanism.error(**how))
                tail = 1 - mpmath.mpf(confidence) ** (mpmath.mpf(1) / together)
                assert 2 * a ** (bound + 1) / (1 + a) <= tail
                # The margin of 2^-20 of the quantile may cost one more, where it is that far away.
                less = bound - 1 - math.ceil(bound * 2.0**-18 - 0.5)
                assert bound == 0 or 2 * a ** (less + 1) / (1 + a) > tail


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 5.0])
def test_intervals_of_counts_are_those_of_the_error(epsilon):
    query = dpjax.queries.histogram_query(3)
    mechanism = dpjax.discrete_laplace(query.sensitivity(), epsilon)
    key = dpjax.random.seeded_key(0)
    release = dpjax.privatize(query, mechanism)(key, jnp.array([0, 1, 1, 2, 2, 2]))
    low, high = release.interval(0.9)
    bound = query.error(mechanism, confidence=0.9, simultaneous=False)
    np.testing.assert_array_equal(high - low, np.full(3, 2 * bound))
    rounded = query.error(
        dpjax.laplace(query.sensitivity(), epsilon), confidence=0.9, simultaneous=False
    )
    assert bound <= rounded


def test_noise_is_less_than_rounded_laplace_noise(draws):
    """The variance of rounded noise is cosh(epsilon / 2) times as large: 3.8 at epsilon 4."""
    spread = [np.var(draws(make(1.0, 4.0), np.int32(0), 2**14)) for make in KINDS]
    assert spread[1] / spread[0] == pytest.approx(math.cosh(2.0), rel=0.2)
    floats = dpjax.discrete_laplace(1.0, 4.0, noise="float")
    assert np.var(draws(floats, np.int32(0), 2**14)) == pytest.approx(variance(4.0), rel=0.2)


KINDS = (dpjax.discrete_laplace, dpjax.laplace)


def test_floats_are_refused_and_trees_are_not(key):
    mechanism = dpjax.discrete_laplace(1, 1.0)
    with pytest.raises(TypeError, match=r"value must hold integers.*float32: use dpjax\.laplace"):
        mechanism(key, {"a": jnp.zeros(2, int), "b": jnp.zeros(2)})
    released = mechanism(key, {"a": jnp.zeros((2, 3), bool), "b": jnp.int32(5)}).value
    assert released["a"].shape == (2, 3)
    assert released["a"].dtype == released["b"].dtype == jnp.int32
    assert mechanism.grid_for((3,)) == 1.0
    with pytest.raises(ValueError, match="norm"):
        additive(1.0, 1.0, norm="hamming", noise=DISCRETE_LAPLACE)
    assert additive(1, 1.0, norm="l1", noise=DISCRETE_LAPLACE).scale == mechanism.scale


def test_the_law_of_a_traced_epsilon_is_that_of_a_number(key):
    release = jax.jit(lambda e: dpjax.discrete_laplace(1, e)(key, jnp.zeros(50, int)).value)
    np.testing.assert_array_equal(
        release(0.5), dpjax.discrete_laplace(1, 0.5)(key, jnp.zeros(50, int)).value
    )
    assert np.all(release(jnp.nan) == np.iinfo(np.int32).min)


def test_a_sensitivity_of_0_means_no_noise():
    still = dpjax.assume_sensitivity(0.0, norm="l1", allow_zero=True)
    for mechanism in (dpjax.discrete_laplace(still, 1.0), dpjax.laplace(still, 1.0)):
        assert float(mechanism.error(like=jnp.int32(0))) == 0
        assert mechanism.log_prob(5, 5) == 0
        assert mechanism.log_prob(6, 5) == -jnp.inf


def test_floats_have_no_probability():
    with pytest.raises(TypeError, match="must hold integers"):
        dpjax.discrete_laplace(1, 1.0).log_prob(3, 2.0)


def test_intervals_cover_integers_that_floats_round():
    with jax.enable_x64(True):
        truth = 2**60 + 1
        released = dpjax.discrete_laplace(1, 30.0)(dpjax.random.seeded_key(0), jnp.int64(truth))
        low, high = released.interval()
    assert int(low) <= truth <= int(high)
