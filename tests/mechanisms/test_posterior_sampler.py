"""Draws from tempered posteriors, the range norm, and weights of options, by exact probabilities.

Chi-square tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.mechanisms import additive
from dpjax.random import LAPLACE

FALSE_ALARM = 1e-6
RATES = jnp.linspace(0.1, 0.9, 9)
MEANS = jnp.linspace(0.5, 8.0, 12)
RULES = {"exponential": dpjax.exponential, "permute_and_flip": dpjax.permute_and_flip}
each_rule = pytest.mark.parametrize("rule", RULES)


def bernoulli(x, rate):
    return jnp.where(x > 0, jnp.log(rate), jnp.log1p(-rate))


def poisson(x, mean):
    return x * jnp.log(mean) - mean


# name: (log likelihood, parameters, log prior, possible records, n)
MODELS = {
    "Beta-Bernoulli": (bernoulli, RATES, jnp.log(RATES) + 2 * jnp.log1p(-RATES), (0.0, 1.0), 6),
    "Poisson-Gamma": (poisson, MEANS, jnp.log(MEANS) - MEANS / 2, (0.0, 1.0, 3.0, 9.0), 3),
}


def pmf_of_all(mechanism, target, records, n):
    """All databases, and the exact log probabilities of all parameters for each."""
    databases = np.array(list(itertools.product(records, repeat=n)), np.float32)

    @jax.jit
    @jax.vmap
    def log_pmf(database):
        scores = target(database)
        return jax.vmap(mechanism.log_prob, (0, None))(jnp.arange(scores.size), scores)

    return databases, np.asarray(log_pmf(databases), float)


def loss_of_neighbors(databases, log_pmf):
    """The largest log ratio over all pairs that differ in one record."""
    apart = np.sum(databases[:, None] != databases[None], axis=-1) == 1
    ratios = np.abs(log_pmf[:, None] - log_pmf[None]).max(axis=-1)
    return ratios[apart].max()


def exact_range(log_likelihood, parameters, records):
    rows = np.stack(
        [
            np.asarray(jax.vmap(lambda p, x=x: log_likelihood(x, p))(parameters), float)
            for x in records
        ]
    )
    return max(np.ptp(a - b) for a, b in itertools.combinations(rows, 2)) * (1 + 1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_all_neighbors_keep_epsilon(name, epsilon):
    log_likelihood, parameters, log_prior, records, n = MODELS[name]
    target = dpjax.targets.log_likelihoods(log_likelihood, parameters)
    bound = exact_range(log_likelihood, parameters, records)
    mechanism = dpjax.posterior_sampler(bound, epsilon, log_prior=log_prior)
    loss = loss_of_neighbors(*pmf_of_all(mechanism, target, records, n))
    assert 0.5 * epsilon < loss <= epsilon + 1e-4
    # The same through linf costs more noise: less is lost, so less is learned.
    in_linf = dpjax.exponential(bound, epsilon, log_base=log_prior)
    assert loss_of_neighbors(*pmf_of_all(in_linf, target, records, n)) < 0.6 * epsilon


@pytest.mark.parametrize("times", [1, 10])
def test_a_large_epsilon_draws_from_the_posterior_itself(times, draws):
    """At temperature 1: no sharper, however much epsilon there is."""
    log_likelihood, parameters, log_prior, records, _ = MODELS["Beta-Bernoulli"]
    bound = exact_range(log_likelihood, parameters, records)
    mechanism = dpjax.posterior_sampler(bound, times * bound, log_prior=log_prior)
    assert mechanism.temperature == 1
    heads = jnp.array([1.0, 1.0, 1.0, 0.0, 1.0])
    scores = dpjax.targets.log_likelihoods(log_likelihood, parameters)(heads)
    rates = np.asarray(parameters, float)
    posterior = rates**4 * (1 - rates) * rates * (1 - rates) ** 2
    posterior /= posterior.sum()
    counts = np.bincount(draws(mechanism, scores, 2**15), minlength=9)
    expected = posterior * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > FALSE_ALARM
    # Power: twice the likelihood is seen.
    sharper = posterior * rates**4 * (1 - rates)
    expected = sharper / sharper.sum() * counts.sum()
    assert stats.chisquare(counts, expected).pvalue < FALSE_ALARM


def test_privacy_is_free_at_the_sensitivity():
    for epsilon, temperature in ((1.0, 3.0), (3.0, 1.0), (9.0, 1.0)):
        mechanism = dpjax.posterior_sampler(3.0, epsilon, log_prior=[0.0, 0.0])
        assert mechanism.temperature == temperature
        assert mechanism.guarantee.epsilon == epsilon
    assert mechanism.zcdp[0] == pytest.approx(81 / 8)


def test_draws_compose_by_bounded_range():
    ten = [dpjax.posterior_sampler(1.0, 0.1, log_prior=[0.0, 0.0])] * 10
    assert sum(one.zcdp[0] for one in ten) == pytest.approx(1 / 80)


def test_the_sampler_measures_the_range(key):
    """Two records each: the distance does not depend on n, nor on a shift of all values."""
    oracle = dpjax.oracles.independent(lambda key: jax.random.bernoulli(key, 0.3).astype(float))

    def sampled(shift):
        target = dpjax.targets.log_likelihoods(lambda x, p: bernoulli(x, p) + shift * x, RATES)
        return dpjax.sample_sensitivity(
            jax.random.key(1), target, oracle, n=50, norm="range", m=200, gamma=0.2
        )

    found = sampled(0.0)
    bound = exact_range(bernoulli, RATES, (0.0, 1.0))
    assert bound == pytest.approx(found.value, rel=1e-4)
    assert found.norm == "range"
    assert sampled(10.0).value == pytest.approx(bound, rel=1e-3)
    assert dpjax.posterior_sampler(found, 1.0, log_prior=jnp.zeros(9)).guarantee.gamma > 0


FAR_INTEGERS = jnp.array([[0, 0], [2**25, 2**25 + 2], [0, 1]], jnp.int32)


@pytest.mark.parametrize("targets", ["summable", "whole"])
def test_the_sampler_refuses_integers_in_the_range(targets):
    """In float32 row 1 is even, so its range of 2 was 0. The estimate was 1 at gamma .05."""
    oracle = dpjax.oracles.independent(lambda key: jax.random.randint(key, (), 0, 3))
    target = {
        "summable": dpjax.targets.summable(lambda x: FAR_INTEGERS[x]),
        "whole": lambda database: FAR_INTEGERS[database].sum(axis=0),
    }[targets]
    settings = {"n": 3, "norm": "range", "m": 200}
    with pytest.raises(ValueError, match="floats"):
        dpjax.sample_sensitivity(jax.random.key(0), target, oracle, gamma=0.2, **settings)
    with pytest.raises(ValueError, match="floats"):
        dpjax.sample_distances(jax.random.key(0), target, oracle, **settings)


def test_values_that_are_alike_are_rounded_all_the_same():
    """The range of a unit in the last place of each is 0 where all are as large."""
    found = dpjax.sample_sensitivity(
        jax.random.key(0),
        lambda database: 1e6 + database[0] * jnp.array([0.1, 0.2]),
        dpjax.oracles.independent(jax.random.uniform),
        n=1,
        norm="range",
        m=200,
        gamma=0.2,
        allow_cancellation=True,
    )
    # The range of the differences, which are multiples of 1/16, is at most 3/16.
    assert found.value > 0.0625 + 2e6 * np.finfo(np.float32).eps


def exact_weighted(scores, weights, temperature):
    logits = np.asarray(scores) / temperature + np.asarray(weights)
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


WEIGHTS = [0.0, -2.0, -np.inf, -40.0, 1.0]
SCORES = jnp.array([1.0, 4.0, 9.0, 80.0, 0.0])


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_weights_multiply_probabilities(dtype, draws, log_probs):
    """The best score has the least weight, so that uniform tries must not count from it."""
    mechanism = dpjax.exponential(1.0, 2.0, log_base=WEIGHTS)
    scores = SCORES.astype(dtype)
    expected = exact_weighted(SCORES, WEIGHTS, 1.0)
    stated = np.exp(log_probs(mechanism, np.arange(5), scores))
    np.testing.assert_allclose(stated, expected, atol=1e-4)
    mild = dpjax.exponential(1.0, 0.05, log_base=WEIGHTS)
    pmf = exact_weighted(SCORES, WEIGHTS, 40.0)
    counts = np.bincount(draws(mild, scores, 2**15), minlength=5)
    assert counts[2] == 0
    seen = pmf * counts.sum() >= 5
    assert stats.chisquare(counts[seen], pmf[seen] * counts.sum(), sum_check=False).pvalue > (
        FALSE_ALARM
    )
    flat = exact_weighted(SCORES, np.where(np.isinf(WEIGHTS), -np.inf, 0), 40.0)
    assert stats.chisquare(counts[seen], flat[seen] * counts.sum(), sum_check=False).pvalue < (
        FALSE_ALARM
    )


def test_weights_of_permute_and_flip_are_parts_of_scores(draws, log_probs):
    weights = np.array([0.0, -1.0, 0.5])
    scores = np.array([2.0, 3.0, 0.0], np.float32)
    weighted = dpjax.permute_and_flip(1.0, 1.0, log_base=weights)
    plain = dpjax.permute_and_flip(1.0, 1.0)
    expected = np.exp(log_probs(plain, np.arange(3), (scores + 2 * weights).astype(np.float32)))
    np.testing.assert_allclose(
        np.exp(log_probs(weighted, np.arange(3), scores)), expected, atol=1e-4
    )
    counts = np.bincount(draws(weighted, scores, 2**15), minlength=3)
    assert stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > FALSE_ALARM


@each_rule
def test_a_weight_of_zero_never_wins(rule, key):
    """Not even where all others are as far behind as a score can be, with noise or without."""
    scores, weights = jnp.array([1e30, 0.0, -1e30]), [-np.inf, -1e9, 0.0]
    assert int(RULES[rule](1.0, 1.0, log_base=weights)(key, scores).value) != 0
    nothing = dpjax.Sensitivity(0.0, 0.0, 1.0, "linf", None, zero_allowed=True)
    assert int(RULES[rule](nothing, 1.0, log_base=weights)(key, scores).value) == 1


@each_rule
def test_an_option_without_weight_hides_no_gap(rule, key, log_probs):
    """Its score was the best one, so all others were as far behind as a score can be: alike."""
    mechanism = RULES[rule](1.0, 2.0, log_base=[0.0, -np.inf, 0.0])
    scores = jnp.array([0.0, 1e7, -100.0])
    assert {int(mechanism(jax.random.fold_in(key, i), scores).value) for i in range(8)} == {0}
    assert log_probs(mechanism, np.arange(3), scores)[0] == pytest.approx(0, abs=1e-4)


@each_rule
def test_the_profile_charges_casts_of_large_integers(rule, key):
    """All scores rise by 2^27 at least, and in float32 by exactly that: their range of 10 was 0."""
    scores = jnp.array([[0, 0, 0], [2**27, 2**27 + 7, 2**27 - 3]], jnp.int32)
    profile = dpjax.privacy_profile(
        key,
        [(lambda database: scores[database].sum(axis=0), RULES[rule](1.0, epsilon=1.0))],
        dpjax.oracles.independent(lambda key: jax.random.randint(key, (), 0, 2)),
        n=1,
        m=200,
    )
    assert profile.gamma(4.9) >= 0.5


@each_rule
def test_scores_that_rise_alike_keep_their_gaps(rule, log_probs):
    """Near the largest float, too: clamping some of them would change what the range hides."""
    sensitivity = dpjax.assume_sensitivity(1e37, norm="range")
    mechanism = RULES[rule](sensitivity, 1.0)
    low = np.array([1.6e38, 1.5e38, 1.4e38], np.float32)
    there = log_probs(mechanism, np.arange(3), low + np.float32(1.2e38))
    np.testing.assert_allclose(log_probs(mechanism, np.arange(3), low), there, atol=1e-3)
    assert there[0] - there[1] > 0.99


def test_a_gap_is_bounded_with_weights_too(log_probs):
    weights = [-3.0, 0.0, 0.0]
    mechanism = dpjax.exponential(1.0, 2.0, log_base=weights)
    scores = np.array([6.0, 1.0, 0.0], np.float32)
    gap = mechanism.score_gap(confidence=0.5, shape=(3,), simultaneous=True)
    chosen = np.exp(log_probs(mechanism, np.arange(3), scores))
    assert chosen[6.0 - scores > gap].sum() <= 0.5
    assert gap > dpjax.exponential(1.0, 2.0).score_gap(
        confidence=0.5, shape=(3,), simultaneous=True
    )


def test_what_is_no_public_list_is_refused():
    with pytest.raises(TypeError, match="Markov chain"):
        dpjax.posterior_sampler(1.0, 1.0, log_prior=lambda theta: -(theta**2))
    linf = dpjax.assume_sensitivity(1.0, norm="linf")
    with pytest.raises(ValueError, match="norm range"):
        dpjax.posterior_sampler(linf, 1.0, log_prior=[0.0])
    for bad in ([], [[0.0]], [np.nan], [np.inf], [-np.inf, -np.inf]):
        with pytest.raises(ValueError, match="log_prior"):
            dpjax.posterior_sampler(1.0, 1.0, log_prior=bad)
    nothing = dpjax.Sensitivity(0.0, 0.0, 1.0, "range", None, zero_allowed=True)
    with pytest.raises(ValueError, match="sensitivity must be above 0"):
        dpjax.posterior_sampler(nothing, 1.0, log_prior=[0.0])
    for bad in ("abc", [1j], {"a": 0.0}, jax.random.key(0)):
        with pytest.raises(TypeError, match="log_prior must "):
            dpjax.posterior_sampler(1.0, 1.0, log_prior=bad)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda w: dpjax.exponential(1.0, 1.0, log_base=w).temperature)(jnp.zeros(2))
    with pytest.raises(ValueError, match="each of the 2 weights"):
        dpjax.exponential(1.0, 1.0, log_base=[0.0, 1.0])(dpjax.random.seeded_key(0), jnp.zeros(3))
    # A sum shows a shift of all coordinates.
    with pytest.raises(ValueError, match="range"):
        additive(dpjax.assume_sensitivity(1.0, norm="range"), 1.0, norm="range", noise=LAPLACE)
