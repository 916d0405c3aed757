"""Propose-test-release: what passes the test, and with what noise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._exact import _limbs

LOW, HIGH = 0.0, 100.0
RECORDS = 51
DENSE = jnp.linspace(49.0, 51.0, RECORDS)
LUMPS = jnp.where(jnp.arange(RECORDS) < 26, LOW, HIGH)
COUNT = 4096


@pytest.fixture(scope="module")
def mechanism():
    return dpjax.propose_test_release(2.0, 1e-2, bound=1.0, lower=LOW, upper=HIGH)


@jax.jit
def noises(mechanism):
    """The noise of the distance and of the answer, and the least distance that is answered."""
    return *mechanism._fits(), mechanism.least_distance


def passes_at_0(mechanism):
    """The exact probability that noise, as it is drawn, passes the test at distance 0."""
    fit, _, least = noises(mechanism)
    points, first = int(fit.divisor) << int(fit.shift), int(least) + 1  # The least that passes.
    return math.exp(-(points * first - points // 2) / 2.0**43) / 2


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-2, 0.4])
def test_an_unstable_database_passes_with_probability_delta(epsilon, delta):
    mechanism = dpjax.propose_test_release(epsilon, delta, bound=1.0, lower=LOW, upper=HIGH)
    passes = passes_at_0(mechanism)
    assert passes <= delta * (1 - 1e-9)
    # A distance of one less would be too little, but for half a step.
    assert passes * math.exp(1.5 * epsilon / 2) > delta


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(1.0, 1e-40), (1.0, 1e-300), (1e-8, 0.49999999), (1e-8, 0.4999)]
)
def test_a_delta_that_float32_would_round_up_is_kept(epsilon, delta):
    """The guarantee says what was asked for, in float64."""
    mechanism = dpjax.propose_test_release(epsilon, delta, bound=1.0, lower=LOW, upper=HIGH)
    assert mechanism.guarantee.delta == delta
    assert passes_at_0(mechanism) <= delta


def test_noise_is_that_of_half_an_epsilon_each(mechanism):
    test, answer, _ = noises(mechanism)
    assert 1 <= test.scale <= 1 + 1e-3
    step = float(mechanism.grids(DENSE).value)
    # The bound is rounded down to a step of at most 2^-11 of it.
    assert 1 - 2**-11 <= answer.scale * step <= 1 + 1e-3
    assert mechanism.error(confidence=0.5) == pytest.approx(math.log(2), rel=1e-3)


@pytest.mark.slow
def test_dense_records_are_answered_and_lumps_are_not(mechanism, draws):
    assert int(mechanism.distance(LUMPS)) == 0
    replies = draws(mechanism, LUMPS, COUNT)
    # Of 4,096 at most 1% on average: more than 90 once in 10^7 keys.
    assert 0 < replies.answered.sum() < 90
    np.testing.assert_array_equal(replies.value[replies.answered == 0], 0)
    assert int(mechanism.distance(DENSE)) == 25
    replies = draws(mechanism, DENSE, COUNT)
    assert np.all(replies.answered == 1)
    # The mean of |Z| has a standard error of scale / 64.
    assert np.mean(np.abs(replies.value - 50.0)) == pytest.approx(1.0, abs=1 / 12)


@pytest.mark.slow
def test_test_and_answer_have_noise_of_their_own(mechanism, draws):
    """Else a low answer would tell that the distance hardly passed."""
    least = int(mechanism.least_distance)
    borderline = next(
        x
        for x in (jnp.linspace(50 - w, 50 + w, RECORDS) for w in np.arange(1.0, 50.0, 0.25))
        if int(mechanism.distance(x)) == least
    )
    replies = draws(mechanism, borderline, COUNT)
    passed = replies.answered == 1
    assert 0.3 < passed.mean() < 0.7
    # A mean of 1,200 and more, of which the standard error is below .05.
    assert abs(np.mean(replies.value[passed]) - 50) < 0.25


def test_a_range_of_quantiles():
    def make(probability):
        return dpjax.propose_test_release(
            6.0, 1e-2, bound=0.3, lower=LOW, upper=HIGH, probability=probability
        )

    @jax.jit
    def statistics(records):
        found = [make(p)._measured(records) for p in (0.25, 0.75, (0.25, 0.75))]
        steps = [_limbs.to_integers(statistic, "int32") for statistic, _ in found]
        return steps, [distance for _, distance in found]

    # The lesser distance counts: below, there is a lump.
    lump = jnp.where(jnp.arange(RECORDS) < 10, LOW, DENSE)
    (low, high, width), (from_low, from_high, from_both) = statistics(lump)
    assert width == high - low > 0
    assert int(width) * float(make(0.5).grids(lump).value) == pytest.approx(26 * 0.04, abs=1e-3)
    assert from_both == from_low < from_high


@pytest.mark.slow
def test_a_range_is_released(draws):
    mechanism = dpjax.propose_test_release(
        6.0, 1e-2, bound=0.3, lower=LOW, upper=HIGH, probability=(0.25, 0.75)
    )
    replies = draws(mechanism, DENSE, COUNT)
    assert np.all(replies.answered == 1)
    # The standard deviation is .14.
    assert np.mean(replies.value) == pytest.approx(26 * 0.04, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("records", [DENSE, LUMPS], ids=["dense", "lumps"])
def test_what_ships_passes_the_auditor(mechanism, records):
    """On replacements anywhere: a claim that holds is refuted once in a million runs."""
    middle = RECORDS // 2
    pairs = [
        (records, records.at[position].set(number))
        for position, number in ((0, HIGH), (middle, LOW), (middle, HIGH), (-1, 49.5))
    ]
    key = dpjax.random.seeded_key(3)
    found = dpjax.auditing.verify(key, mechanism, pairs=pairs, samples=200_000)
    assert found.off_grid == 0


@pytest.mark.slow
def test_a_test_without_noise_is_refuted(mechanism):
    """The auditor sees the difference between neighbors on either side of the bound."""

    def release(key, records):
        return (mechanism.distance(records) > 4).astype(jnp.float32) + 0 * jax.random.normal(key)

    inside = next(
        x
        for x in (jnp.linspace(50 - w, 50 + w, RECORDS) for w in np.arange(1.0, 50.0, 0.25))
        if int(mechanism.distance(x)) == 5
    )
    outside = next(
        y
        for y in (inside.at[i].set(end) for i in range(RECORDS) for end in (LOW, HIGH))
        if int(mechanism.distance(y)) == 4
    )
    with pytest.raises(AssertionError, match="refutes"):
        dpjax.auditing.verify(
            jax.random.key(0), release, value=inside, neighbor=outside, epsilon=2.0, delta=1e-2
        )


def test_bad_parameters_are_refused():
    def make(epsilon=1.0, **arguments):
        arguments = {"bound": 1.0, "lower": LOW, "upper": HIGH} | arguments
        return dpjax.propose_test_release(epsilon, 1e-6, **arguments)

    with pytest.raises(ValueError, match="bound must be in"):
        make(bound=1e-4)
    with pytest.raises(ValueError, match="bound must be in"):
        make(bound=101.0)
    with pytest.raises(ValueError, match="epsilon=4e-08 is too small for delta=1e-06"):
        make(epsilon=4e-8)
    assert passes_at_0(make(epsilon=5e-8)) <= 1e-6
    with pytest.raises(ValueError, match="two in increasing order"):
        make(probability=(0.75, 0.25))
    with pytest.raises(ValueError, match="value must be one array of records"):
        make()(dpjax.random.seeded_key(0), jnp.zeros((2, 2)))


@pytest.mark.slow
def test_bad_traced_parameters_release_nothing(key):
    def release(epsilon, delta, bound):
        mechanism = dpjax.propose_test_release(epsilon, delta, bound=bound, lower=LOW, upper=HIGH)
        return mechanism(key, jnp.linspace(LOW, HIGH, 5))

    bad = jax.jit(jax.vmap(release))(
        jnp.asarray([1.0, 1.0, 1e-12, jnp.nan]),
        jnp.asarray([1e-6, jnp.nan, 1e-6, 1e-6]),
        jnp.asarray([0.0, 1.0, 1.0, 1.0]),
    )
    np.testing.assert_array_equal(bad.value.answered, -1)
    assert np.all(np.isnan(bad.value.value))
    assert np.all(np.isnan(bad.guarantee.epsilon))
