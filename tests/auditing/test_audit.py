"""The auditor: bounds that hold, that are close to the truth, and that find what is broken.

Keys are fixed. A bound exceeds the truth with probability at most 5%, the complement of its
confidence, for a fresh key.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.auditing import AuditResult, audit, audit_curve
from dpjax.auditing._outputs import Sampler

# Where nothing hangs on it, mechanisms are not compiled: that would take the longest.
BIT = {"value": jnp.asarray(0), "neighbor": jnp.asarray(1), "jit": False}
REAL = {"value": jnp.asarray(0.0), "neighbor": jnp.asarray(1.0), "jit": False}
COMPILED = {"jit": True}
# Of Gaussian noise of scale 1 at distance 1 (Balle and Wang 2018).
GAUSSIAN_DELTA = stats.norm.cdf(0.0) - math.exp(0.5) * stats.norm.cdf(-1.0)


# Close to the truth, from below.


@pytest.mark.slow
def test_randomized_response_by_its_likelihood_ratio(release_key):
    answers = {"value": jnp.asarray([0]), "neighbor": jnp.asarray([1])}
    result = audit(release_key, dpjax.randomized_response(1.0), **answers)
    assert 0.9 < result.epsilon <= 1.0
    assert "likelihood ratio" in result.event.description
    assert result.claimed == 1.0
    assert (result.bounded, result.delta, result.bound) == ("epsilon", 0.0, result.epsilon)


def test_a_function_of_ones_own(key, flip):
    result = audit(key, flip(1.0), **BIT | COMPILED)
    assert 0.9 < result.epsilon <= 1.0
    assert result.claimed is None


def test_laplace_noise(key, rounded, discrete_laplace):
    assert 0.9 < audit(key, rounded(jax.random.laplace), **REAL | COMPILED).epsilon <= 1.0
    assert 0.9 < audit(key, discrete_laplace(1.0), **BIT).epsilon <= 1.0


def test_delta_of_gaussian_noise(key, rounded):
    result = audit(key, rounded(jax.random.normal), at_epsilon=0.5, **REAL)
    assert 0.9 * GAUSSIAN_DELTA < result.delta <= GAUSSIAN_DELTA
    assert (result.bounded, result.epsilon, result.bound) == ("delta", 0.5, result.delta)


def test_epsilon_of_gaussian_noise_at_a_delta(key, rounded):
    result = audit(key, rounded(jax.random.normal), delta=GAUSSIAN_DELTA, **REAL)
    assert 0.4 < result.epsilon <= 0.5
    assert result.delta == GAUSSIAN_DELTA


@pytest.mark.parametrize("epsilon", [0.3, 3.0, 6.0])
def test_small_and_large_epsilons(key, flip, epsilon):
    assert 0.8 * epsilon < audit(key, flip(epsilon), **BIT).epsilon <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "samples", "part"),
    [(1.0, 32_000, 0.93), (1.0, 830_000, 0.985), (0.1, 1_500_000, 0.94)],
)
def test_samples_needed(rounded, epsilon, samples, part):
    """Bounds of .95, .99 and .95 of the truth, less two standard deviations of three runs."""
    mechanism = rounded(jax.random.laplace, 1 / epsilon)
    results = audit_curve(jax.random.key(3), mechanism, samples=(samples,) * 3, **REAL | COMPILED)
    assert part * epsilon < np.mean([result.epsilon for result in results]) <= epsilon


# Bounds that hold.


@pytest.mark.slow
def test_bounds_keep_their_confidence(key, flip):
    """60 bounds at confidence .8: a false alarm in a million runs."""
    results = audit_curve(key, flip(1.0), samples=(400,) * 60, confidence=0.8, **BIT)
    assert sum(result.epsilon > 1 for result in results) <= stats.binom.isf(1e-6, 60, 0.2)
    assert np.mean([result.epsilon for result in results]) > 0.7


def test_nothing_is_found_where_there_is_nothing(key):
    """Events that are learned from noise do not survive the other half of the samples."""

    def independent(key, value):
        return jax.random.normal(key, (3,))

    results = audit_curve(key, independent, samples=(400,) * 15, confidence=0.8, **REAL)
    assert sum(result.epsilon > 0 for result in results) <= stats.binom.isf(1e-6, 15, 0.2)


def test_the_event_is_fixed_before_its_probabilities_are_bounded(key, flip):
    """So the limits can be found again from fresh outputs."""
    mechanism = flip(1.0)
    result = audit(key, mechanism, **BIT)
    bits = jnp.asarray([0, 1])
    inside = [result.event.contains(bit) for bit in bits]
    assert inside in ([True, False], [False, True])
    np.testing.assert_array_equal(result.event.predicate(bits), inside)
    assert result.event.contains(dpjax.Release(bits[0], dpjax.Guarantee(1.0))) == inside[0]
    truth = math.e / (1 + math.e)
    assert 0.99 * truth < result.probability <= truth
    assert 1 - truth <= result.other_probability < 1.01 * (1 - truth) + 0.01


def test_one_key_gives_one_result(key, flip):
    first, second = (audit(key, flip(1.0), samples=2_000, **BIT) for _ in range(2))
    assert str(first) == str(second)


# What is broken is found.


def test_bits_of_naive_laplace_noise(key, naive):
    result = audit(key, naive(jax.random.laplace), samples=40_000, **REAL | COMPILED)
    assert result.epsilon > 6
    assert "lowest set bit" in result.event.description
    # One release tells the two values apart with probability .38.
    assert 0.35 < result.probability < 0.4


def test_bits_of_naive_gaussian_noise(key, naive):
    """Operation by operation: compiled, a product and a sum become one and are rounded once."""
    mechanism = naive(jax.random.normal)
    result = audit(key, mechanism, at_epsilon=3.0, samples=40_000, **REAL)
    assert 0.4 < result.delta < 0.44


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_bits_of_naive_noise_in_float64(key, naive):
    pair = {"value": np.asarray(1.0), "neighbor": np.asarray(1.5), "jit": False}
    assert audit(key, naive(jax.random.laplace), samples=40_000, **pair).epsilon > 3


@pytest.mark.slow
def test_noise_on_a_grid_that_the_value_is_not_on(key, discrete_laplace):
    def mechanism(key, value):
        return value + discrete_laplace(1.0)(key, jnp.asarray(0)).astype(jnp.float32)

    pair = {"value": jnp.asarray(0.3), "neighbor": jnp.asarray(0.7), "jit": False}
    assert audit(key, mechanism, samples=10_000, **pair).epsilon > 6


def test_no_noise(key):
    result = audit(key, lambda key, value: value, samples=10_000, **REAL)
    assert result.epsilon > 6
    # All of 5,000 outputs against none: the limits in closed form, whatever the shares.
    assert result.probability * (1 - result.other_probability) > 0.99


def test_what_is_released_for_one_value_only(key):
    def mechanism(key, bit):
        return bit * jax.random.bernoulli(key).astype(jnp.int32)

    result = audit(key, mechanism, samples=10_000, **BIT)
    assert result.epsilon > 5
    assert result.swapped
    assert result.event.contains(jnp.asarray(1))
    assert not result.event.contains(jnp.asarray(0))


def test_not_a_number_is_an_output(key):
    def mechanism(key, value):
        return jnp.where(jax.random.uniform(key) < value, jnp.nan, 0.0)

    pair = {"value": jnp.asarray(0.1), "neighbor": jnp.asarray(0.2), "jit": False}
    result = audit(key, mechanism, samples=20_000, **pair)
    assert 0.5 < result.epsilon <= math.log(2)


def test_the_sign_of_zero_is_an_output(key):
    assert audit(key, lambda key, value: 0.0 * (0.5 - value), samples=2_000, **REAL).epsilon > 4


def test_values_that_change_the_spread(key):
    """No threshold on the output says as much as a set of intervals."""

    def mechanism(key, value):
        return jnp.round(1024 * jnp.exp2(value) * jax.random.normal(key)).astype(jnp.int32)

    result = audit(key, mechanism, at_epsilon=0.0, **REAL)
    # Total variation distance of N(0, 1) and N(0, 4).
    edge = math.sqrt(math.log(4) / (1 - 1 / 4))
    truth = 2 * (stats.norm.cdf(edge) - stats.norm.cdf(edge / 2))
    assert 0.85 * truth < result.delta <= truth


@pytest.mark.parametrize("spread", [1.0, 0.0], ids=["in one direction", "in one coordinate"])
def test_vectors_without_a_log_prob(key, rounded, spread):
    neighbor = jnp.asarray([1.0, spread, spread, spread])
    neighbor = neighbor / jnp.linalg.norm(neighbor)
    pair = {"value": jnp.zeros(4), "neighbor": neighbor, "jit": False}
    result = audit(key, rounded(jax.random.normal), at_epsilon=0.5, **pair)
    assert 0.85 * GAUSSIAN_DELTA < result.delta <= GAUSSIAN_DELTA


def test_pytrees(key, discrete_laplace):
    def mechanism(key, value):
        first, second = jax.random.split(key)
        noise = jax.vmap(discrete_laplace(1.0), in_axes=(0, None))(jax.random.split(first, 2), 0)
        return {"a": value["a"] + noise, "b": discrete_laplace(1.0)(second, value["b"])}

    value = {"a": jnp.asarray([3, 5]), "b": jnp.asarray(2)}
    pair = {"value": value, "neighbor": value | {"b": jnp.asarray(3)}, "jit": False}
    result = audit(key, mechanism, **pair)
    assert 0.9 < result.epsilon <= 1.0
    assert "output['b']" in result.event.description


def test_databases_of_different_sizes(key, discrete_laplace):
    def mechanism(key, records):
        return discrete_laplace(1.0)(key, jnp.sum(records))

    pair = {"value": jnp.ones(5, int), "neighbor": jnp.ones(4, int), "jit": False}
    result = audit(key, mechanism, **pair)
    assert 0.9 < result.epsilon <= 1.0


# The search over pairs.


def without_the_exp(key, scores):
    """The exponential mechanism of the predecessor, whose probabilities are the scores."""
    return jax.random.categorical(key, jnp.log(scores))


HARMLESS = [
    (jnp.asarray([50.0, 60.0, 70.0]), jnp.asarray([50.0, 61.0, 70.0])),
    (jnp.asarray([40.0, 60.0, 80.0]), jnp.asarray([41.0, 60.0, 80.0])),
]
ZERO = (jnp.asarray([0.0, 2.0, 3.0]), jnp.asarray([1.0, 2.0, 3.0]))


def test_harmless_scores_hide_a_missing_exp(key):
    assert audit(key, without_the_exp, pairs=HARMLESS, jit=False).epsilon < 0.1


def test_the_search_finds_the_scores_that_show_it(key):
    result = audit(key, without_the_exp, pairs=[HARMLESS[0], ZERO, HARMLESS[1]])
    assert result.epsilon > 6
    np.testing.assert_array_equal(result.value, ZERO[0])
    np.testing.assert_array_equal(result.neighbor, ZERO[1])
    assert result.swapped


def test_pairs_may_be_drawn(key):
    def pairs(key):
        for scores in jax.random.randint(key, (6, 3), 0, 3).astype(jnp.float32):
            yield scores, scores.at[0].add(1.0)

    result = audit(key, without_the_exp, pairs=pairs, samples=20_000, jit=False)
    assert result.epsilon > 3
    assert result.neighbor[0] == result.value[0] + 1


# Bookkeeping.


def test_the_delta_of_the_guarantee_is_the_default(key, flip, promising):
    def run(**options):
        return audit(key, promising(flip(1.0), 1.0, 0.02), samples=1_000, **BIT, **options)

    assert (run().delta, run().claimed) == (0.02, 1.0)
    assert run(delta=0.0).claimed is None
    assert run(at_epsilon=1.0).claimed == 0.02
    assert run(at_epsilon=0.9).claimed is None


def test_what_guarantees_nothing_claims_nothing(key, flip, promising):
    result = audit(key, promising(flip(1.0), math.inf, 1.0), samples=1_000, **BIT)
    assert (result.delta, result.claimed) == (0.0, None)


def test_results_say_everything(key, flip):
    result = audit(key, flip(1.0), samples=2_000, **BIT)
    assert isinstance(result, AuditResult)
    for text in ("epsilon is at least", "delta 0", "confidence 0.95", "2,000", "output"):
        assert text in str(result)
    assert str(result) in repr(result)


def test_curves_draw_every_result_afresh(key, flip):
    results = audit_curve(key, flip(1.0), samples=(500, 5_000, 5_000), **BIT)
    assert [result.samples for result in results] == [500, 5_000, 5_000]
    assert results[1].epsilon != results[2].epsilon


@pytest.mark.parametrize("shape", [(), (1000,), (10**6,)])
def test_memory_is_bounded(key, shape):
    sampler = Sampler(lambda key, value: jnp.zeros(shape) + value, jit=True)
    plan = sampler.plan(key, jnp.asarray(0.0), jnp.asarray(1.0), 10**7)
    assert 2 * plan.learning + plan.bounding == 10**7
    assert max(plan.batch, plan.learning) * math.prod(shape) <= 2**24
    assert plan.batch <= 2**17


def test_batches_hold_as_many_outputs_as_were_asked_for(key):
    sampler = Sampler(lambda key, value: jax.random.normal(key), jit=True)
    batches = list(sampler.batches(key, jnp.asarray(0.0), 2_500, 1_024))
    assert [len(batch) for batch in batches] == [1_024, 1_024, 452]
    assert len(np.unique(np.concatenate(batches))) > 2_490


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"value": None}, TypeError, "value and neighbor"),
        ({"pairs": [ZERO]}, TypeError, "got both"),
        ({"value": None, "neighbor": None, "pairs": []}, ValueError, "at least one pair"),
        ({"samples": 99}, ValueError, "samples"),
        ({"confidence": 1.0}, ValueError, "confidence"),
        ({"delta": 1.0}, ValueError, "delta"),
        ({"delta": -0.1}, ValueError, "delta"),
        ({"at_epsilon": -1.0}, ValueError, "at_epsilon"),
        ({"delta": 0.1, "at_epsilon": 1.0}, TypeError, "at_epsilon"),
        ({"neighbor": jnp.zeros(2, int)}, ValueError, "one shape"),
    ],
)
def test_bad_requests_are_refused(key, changes, error, message):
    with pytest.raises(error, match=message):
        audit(key, lambda key, value: value, **BIT | changes)


def test_bad_keys_are_refused():
    for bad in (0, jax.random.key_data(jax.random.key(0)), jax.random.key(0, impl="rbg")):
        with pytest.raises(TypeError, match="key"):
            audit(bad, lambda key, value: value, **BIT)


def test_bad_mechanisms_are_refused(key):
    with pytest.raises(TypeError, match="mechanism"):
        audit(key, 1.0, **BIT)
    with pytest.raises(TypeError, match="complex64"):
        audit(key, lambda key, value: value.astype(jnp.complex64), **REAL)
    with pytest.raises(ValueError, match="at least one array"):
        audit(key, lambda key, value: (), **REAL)


@pytest.mark.slow
def test_outputs_may_be_functions(release_key):
    """A release's value may be any pytree: here a polynomial, compared by its leaves."""
    mechanism = dpjax.bernstein(1.0, 1.0, degree=1, dims=1)
    pair = {"value": jnp.zeros(2), "neighbor": jnp.ones(2)}
    assert audit(release_key, mechanism, samples=2000, **pair).epsilon <= 1
