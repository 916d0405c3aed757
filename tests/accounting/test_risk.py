"""What attacks can learn: against exact trade-off curves, and against enumerated mechanisms."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import laplace, norm

import dpjax
from dpjax import accounting
from dpjax.mechanisms import gaussian_for_advantage
from mechanism_table import TABLE

GRID = (np.arange(1000) + 0.5) / 1000
RATES = np.array([0.0, 1e-6, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])


def of_gaussian(mu, x):
    """The exact curve: G_mu(x) = Phi(Phi^-1(1 - x) - mu)."""
    return norm.cdf(norm.isf(x) - mu)


def enumerated(p, q, x):
    """The exact curve of two finite distributions: reject by decreasing likelihood ratio."""
    order = np.argsort(-p / q)
    false = np.concatenate([[0.0], np.cumsum(q[order])])
    true = np.concatenate([[0.0], np.cumsum(p[order])])
    return 1 - np.interp(x, false, true)


def check(found, exact, loose=1e-5):
    """Rounded toward more risk, and by little."""
    assert np.all(found <= exact + 1e-12)
    np.testing.assert_allclose(found, exact, atol=loose)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_gaussian_noise_has_its_exact_curve(epsilon):
    """At most the exact curve, and within 1e-5 of it. What else reaches it: k releases are one."""
    mechanism = dpjax.gaussian(1.0, epsilon, 1e-6)
    mu = 1 / mechanism.scale
    check(mechanism.tradeoff(RATES), of_gaussian(mu, RATES))
    exact = 2 * norm.cdf(mu / 2) - 1
    assert exact <= mechanism.advantage <= exact + 1e-6
    assert mechanism.risk.basis == "losses"
    four = accounting.risk(*[mechanism] * 4)
    check(four.tradeoff(RATES), of_gaussian(2 * mu, RATES))
    if epsilon == 1:  # By losses of dp-accounting, together with a release that tells nothing.
        both = accounting.risk(mechanism, dpjax.Guarantee(1e-9))
        check(both.tradeoff(RATES), of_gaussian(mu, RATES), 1e-4)


def test_laplace_noise_has_its_exact_curve():
    mechanism = dpjax.laplace(1.0, 1.5)
    exact = laplace.cdf(laplace.isf(RATES) - 1.5)
    check(mechanism.tradeoff(RATES), exact, 1e-4)


def test_randomized_response_is_enumerated():
    """One bit is exact. Of three bits, and of five categories, no test is better than the bound."""
    epsilon = 0.8
    truth = 1 / (1 + math.exp(-epsilon))
    p, q = np.array([truth, 1 - truth]), np.array([1 - truth, truth])
    mechanism = dpjax.randomized_response(epsilon)
    check(mechanism.tradeoff(RATES), enumerated(p, q, RATES), 1e-9)
    assert mechanism.advantage == pytest.approx(2 * truth - 1, abs=1e-9)
    triples = list(itertools.product((0, 1), repeat=3))
    joint = [np.array([math.prod(one[i] for i in bits) for bits in triples]) for one in (p, q)]
    found = accounting.risk(*[mechanism] * 3)
    check(found.tradeoff(RATES), enumerated(*joint, RATES), 1e-3)
    lie = 1 / (math.exp(epsilon) + 4)
    five = [np.where(np.arange(5) == i, 1 - 4 * lie, lie) for i in (0, 1)]
    bound = dpjax.randomized_response(epsilon, 5)
    assert np.all(bound.tradeoff(RATES) <= enumerated(*five, RATES) + 1e-12)
    assert bound.risk.basis == "epsilon and delta"


def test_no_reconstruction_of_an_enumerated_release_is_above_the_bound():
    """Bayes' guess of one of five values, which have unlike probabilities."""
    epsilon = 1.2
    prior = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    lie = 1 / (math.exp(epsilon) + 4)
    outputs = np.where(np.eye(5, dtype=bool), 1 - 4 * lie, lie)
    success = np.sum(np.max(prior[:, None] * outputs, axis=0))
    bound = dpjax.randomized_response(epsilon, 5).reconstruction_bound(0.4)
    assert 0.4 < success <= bound < 1
    gaussian = dpjax.gaussian(1.0, 1.0, 1e-6)
    exact = 1 - of_gaussian(1 / gaussian.scale, 0.01)
    assert exact <= gaussian.reconstruction_bound(0.01) <= exact + 1e-5
    assert gaussian.reconstruction_bound(0.0) <= 1e-6
    assert gaussian.reconstruction_bound(1.0) == 1.0


def test_a_guarantee_has_the_curve_of_epsilon_and_delta():
    epsilon, delta = 0.7, 0.01
    exact = np.maximum(1 - delta - np.exp(epsilon) * RATES, np.exp(-epsilon) * (1 - delta - RATES))
    found = accounting.risk(dpjax.Guarantee(epsilon, delta))
    check(found.tradeoff(RATES), np.maximum(exact, 0), 1e-9)
    bound = dpjax.attacks.guessing_bound(dpjax.Guarantee(epsilon, delta))
    assert dpjax.attacks.guessing_bound(found) == pytest.approx(bound, abs=1e-9)
    nothing = accounting.risk(dpjax.Guarantee(math.inf))
    assert nothing.advantage == 1
    assert np.all(nothing.tradeoff(RATES) == 0)


def test_every_mechanism_and_composition_has_a_risk_that_its_epsilon_allows():
    """At most what epsilon and delta allow, and at least what a guess finds; two releases add."""
    for name, (factory, arguments) in TABLE.items():
        sensitivity = arguments.get("sensitivity", 1.0)
        given = () if sensitivity is None else (sensitivity,)
        mechanism = factory(*given, arguments.get("epsilon", 1.0))
        allowed = accounting.risk(mechanism.guarantee)
        kept, curve = mechanism.risk, mechanism.tradeoff(RATES)
        assert kept.basis in ("losses", "epsilon and delta"), name
        assert 0 < mechanism.advantage <= allowed.advantage + 1e-4 < 1, name
        assert np.all(curve >= allowed.tradeoff(RATES) - 1e-4), name
        assert np.all(curve <= 1 - RATES + 1e-12), name
        assert np.all(np.diff(curve) <= 0), name
        assert 1 - curve[-2] <= mechanism.reconstruction_bound(0.9) <= 1, name
        assert mechanism.reconstruction_bound(0.1) > 0.1, name
        both = accounting.risk(mechanism, mechanism)
        assert np.all(both.tradeoff(RATES) <= curve + 1e-9), name
        assert both.advantage >= mechanism.advantage - 1e-9, name


def test_a_profile_has_the_risk_of_a_random_pair(keys):
    """Smaller than that of the pair which the noise was calibrated to."""
    oracle = dpjax.oracles.independent(jax.random.uniform)
    mechanism = dpjax.gaussian(1.0, 1.0, 1e-5)
    profile = dpjax.privacy_profile(keys(0), (jnp.sum, mechanism), oracle, n=20, m=20_000)
    risk = profile.risk
    assert risk.advantage == profile.advantage < mechanism.advantage
    assert np.all(risk.tradeoff(RATES) >= mechanism.tradeoff(RATES) - 1e-3)
    # Distances of two uniform numbers, as a fraction of the sensitivity.
    mean = np.mean([of_gaussian(d / mechanism.scale, RATES) for d in 1 - np.sqrt(GRID)], axis=0)
    assert np.all(risk.tradeoff(RATES) <= mean + 1e-3)
    assert 0.01 < risk.reconstruction_bound(0.01) < mechanism.reconstruction_bound(0.01)


def test_the_numbers_of_the_guide():
    """Epsilon and delta allow 73.1% right guesses, where the best attack has 54.7%."""
    mechanism = dpjax.gaussian(1.0, epsilon=1.0, delta=1e-6)
    by_epsilon = dpjax.attacks.guessing_bound(mechanism.guarantee)
    by_losses = dpjax.attacks.guessing_bound(mechanism.risk)
    assert (round(by_epsilon, 3), round(by_losses, 3)) == (0.731, 0.547)
    least = gaussian_for_advantage(1.0, 0.2, delta=1e-5)
    epsilon = math.log((1 + 0.2 - 2e-5) / (1 - 0.2))
    through = dpjax.gaussian(1.0, epsilon, 1e-5)
    assert accounting.risk(through.guarantee).advantage == pytest.approx(0.2, abs=1e-4)
    assert (round(least.scale, 2), round(through.scale, 2)) == (1.97, 8.52)


@pytest.mark.parametrize("advantage", [1e-5, 1e-3, 0.2, 0.9, 0.999])
@pytest.mark.parametrize("delta", [1e-10, 9e-6])
def test_noise_for_an_advantage_keeps_it(advantage, delta):
    """The charges of tables are 3e-8, which show at the least advantage."""
    mechanism = gaussian_for_advantage(2.0, advantage, delta=delta)
    assert mechanism.advantage <= advantage
    exact = 1 / norm.isf((1 - advantage) / 2)
    assert exact <= mechanism.scale <= exact * 1.03
    assert float(mechanism.guarantee.delta) == delta


def test_a_training_has_its_exact_risk():
    """Whole batches are one Gaussian release; one sampled step has rate times its advantage."""
    z, steps = 3.0, 5
    whole = dpjax.learning.poisson_sampling(50, batch_size=50)
    found = accounting.dp_sgd_risk(whole, noise_multiplier=z, steps=steps, dims=3)
    check(found.tradeoff(RATES), of_gaussian(math.sqrt(steps) / z, RATES))
    sampled = dpjax.learning.poisson_sampling(50, batch_size=10, capacity=50)
    one = accounting.dp_sgd_risk(sampled, noise_multiplier=z, steps=1, dims=3)
    exact = sampled.rate * (2 * norm.cdf(0.5 / z) - 1)
    assert exact <= one.advantage <= exact + 1e-6
    given = {"steps": 3, "dims": 3}
    least = accounting.dp_sgd_noise_multiplier(sampled, advantage=0.1, **given)
    kept, less = (
        accounting.dp_sgd_risk(sampled, noise_multiplier=z, **given).advantage
        for z in (least, 0.997 * least)
    )
    assert kept <= 0.1 < less


def test_what_noise_tables_and_full_batches_miss_is_charged():
    mechanism = dpjax.gaussian(1.0, 1.0, 1e-6)
    few, many = (accounting.risk(mechanism, dims=dims).advantage for dims in (1, 2**40))
    exact = 2 * norm.cdf(0.5 / mechanism.scale) - 1
    assert exact <= few < exact + 1e-6
    assert many >= exact + 2**-6 / 2
    full = dpjax.learning.poisson_sampling(50, batch_size=10, capacity=14)
    roomy = dpjax.learning.poisson_sampling(50, batch_size=10, capacity=50)
    risks = [
        accounting.dp_sgd_risk(x, noise_multiplier=3.0, steps=1, dims=1).advantage
        for x in (full, roomy)
    ]
    assert risks[0] - risks[1] > 0.05


def test_a_release_of_another_relation_moves_twice_as_far():
    """Under replace-one, a record leaves and another one joins."""
    added = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
    sensitivity = dpjax.assume_sensitivity(1.0, norm="l2", relation=added)
    mechanism = dpjax.gaussian(sensitivity, 1.0, 1e-6)
    mu = 1 / mechanism.scale
    assert mechanism.risk.relation is added
    check(mechanism.tradeoff(RATES), of_gaussian(mu, RATES))
    both = accounting.risk(mechanism, dpjax.Guarantee(1e-9))
    assert both.relation is dpjax.NeighboringRelation.REPLACE_ONE
    check(both.tradeoff(RATES), of_gaussian(2 * mu, RATES), 1e-4)


def test_what_is_wrong_is_refused():
    mechanism = dpjax.laplace(1.0, 1.0)
    with pytest.raises(ValueError, match=r"false_positive_rate must be in \[0, 1\], got 1.5"):
        mechanism.tradeoff(1.5)
    with pytest.raises(ValueError, match=r"prior must be in \[0, 1\], got -0.1"):
        mechanism.reconstruction_bound(-0.1)
    with pytest.raises(ValueError, match=r"advantage must be from 1e-5 to \.999, got 1"):
        gaussian_for_advantage(1.0, 1.0)
    with pytest.raises(ValueError, match=r"delta must be below advantage=0\.01"):
        gaussian_for_advantage(1.0, 0.01, delta=0.1)
    sampling = dpjax.learning.poisson_sampling(50, batch_size=10)
    for given in ({"epsilon": 1.0, "delta": 1e-5}, {"method": "renyi"}):
        with pytest.raises(ValueError, match="advantage must be given without epsilon"):
            accounting.dp_sgd_noise_multiplier(sampling, advantage=0.1, steps=1, dims=1, **given)
    with pytest.raises(ValueError, match="epsilon and delta, or advantage alone, must be given"):
        accounting.dp_sgd_noise_multiplier(sampling, epsilon=1.0, steps=1, dims=1)
    full = dpjax.learning.poisson_sampling(100, batch_size=10, capacity=11)
    with pytest.raises(ValueError, match=r"no noise multiplier .* reaches advantage=0\.1"):
        accounting.dp_sgd_noise_multiplier(full, advantage=0.1, steps=2, dims=1)
    with pytest.raises(TypeError, match="releases must be mechanisms or guarantees"):
        accounting.risk(1.0)
