"""Membership trials: what an attack finds where the best one is known, and faults that it finds."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax import Guarantee
from dpjax.attacks import compare_with_claim, likelihood_ratio, membership_trials, roc_curve

TRIALS, N = 20_000, 3


def distinct(key, n):
    """Rows of a unit matrix from a random one on: any two are sqrt(2) apart."""
    return jnp.roll(jnp.eye(N + 1), jax.random.randint(key, (), 0, N + 1), axis=0)[:n]


def average(database):
    return jnp.mean(database, axis=0)


@pytest.fixture(scope="module")
def gaussian_trials():
    """`gaussian_trials(scale)`: of Gaussian noise, one program for all scales."""

    @jax.jit
    def run(scale):
        def release(key, database):
            return average(database) + scale * jax.random.normal(key, (N + 1,))

        def score(value, database, neighbor):
            one, other = (jnp.sum((value - average(x)) ** 2) for x in (database, neighbor))
            return (other - one) / (2 * scale**2)

        return membership_trials(
            jax.random.key(0), release, distinct, score=score, n=N, trials=TRIALS
        )

    return run


def test_the_curve_of_gaussian_noise_is_the_closed_form(gaussian_trials):
    """TPR = Phi(Phi^-1(FPR) + mu), mu the distance over the noise, at 99.9% confidence."""
    mu = 1.0
    curve = roc_curve(*gaussian_trials(math.sqrt(2) / (N * mu)), confidence=0.999)
    rates = np.linspace(0.001, 0.999, 50)
    exact = scipy.stats.norm.cdf(scipy.stats.norm.ppf(rates) + mu)
    lower, upper = curve.limits(rates)
    assert np.all((lower <= exact) & (exact <= upper))
    assert np.max(upper - lower) < 0.15
    assert curve.area == pytest.approx(scipy.stats.norm.cdf(mu / math.sqrt(2)), abs=0.02)


def test_a_claim_holds_and_a_tenth_of_its_noise_does_not(gaussian_trials):
    scale = float(dpjax.gaussian(math.sqrt(2) / N, 1.0, 1e-3).scale)
    claim = Guarantee(1.0, 1e-3)
    assert not compare_with_claim(roc_curve(*gaussian_trials(scale)), claim).contradicted
    faulty = compare_with_claim(roc_curve(*gaussian_trials(scale / 10)), claim)
    assert faulty.contradicted
    assert faulty.epsilon > 4


def test_releases_of_dpjax_keep_their_claim_and_use_most_of_it(key):
    """Epsilon 1 on the worst pairs, which differ by the sensitivity: .85 of it at least is seen."""
    mechanism = dpjax.laplace(1.0, 1.0)

    def one_of_two(key, n):
        return (jnp.arange(n) == jax.random.bernoulli(key).astype(jnp.int32)).astype(jnp.float32)

    trials = membership_trials(
        key,
        dpjax.privatize(jnp.sum, mechanism),
        one_of_two,
        score=likelihood_ratio(jnp.sum, mechanism),
        n=1,
        trials=TRIALS,
    )
    found = compare_with_claim(roc_curve(*trials), mechanism.guarantee)
    assert 0.85 < found.epsilon <= 1.0
    assert not found.contradicted


@pytest.mark.slow
def test_gamma_is_what_pairs_beyond_the_sensitivity_show():
    """Pairs that differ are known, others tell nothing: gamma is the probability of the former."""
    p = 0.1
    gamma = 2 * p * (1 - p)

    def oracle(key, n):
        return jax.random.bernoulli(key, p, (n,)).astype(jnp.float32)

    def score(value, database, neighbor):
        return jnp.abs(value - jnp.sum(neighbor)) - jnp.abs(value - jnp.sum(database))

    curve = roc_curve(
        *membership_trials(
            jax.random.key(1),
            lambda key, database: jnp.sum(database),
            oracle,
            score=score,
            n=10,
            trials=TRIALS,
        )
    )
    claims = {part: Guarantee(0.0, gamma=part * gamma) for part in (0.9, 1.0)}
    assert compare_with_claim(curve, claims[0.9]).contradicted
    assert not compare_with_claim(curve, claims[1.0]).contradicted
    doubtful = dataclasses.replace(claims[0.9], confidence=1 - 0.1 * gamma)
    assert not compare_with_claim(curve, doubtful).contradicted


def test_pairs_differ_in_one_place_and_coins_are_fair():
    """4,000 coins: a fair one is within 4 standard deviations, but for 1 in 10,000."""

    def score(value, database, neighbor):
        """Which is released, the place, and a draw, in one number."""
        released, draw = value
        known = jnp.where(jnp.all(released == database), 10.0, jnp.nan)
        known = jnp.where(jnp.all(released == neighbor), 20.0, known)
        place = jnp.argmax(database != neighbor).astype(jnp.float32)
        return known + place + 0.9 * draw

    scores, members = membership_trials(
        jax.random.key(2),
        lambda key, database: (database, jax.random.uniform(key)),
        lambda key, n: jax.random.uniform(key, (n,)),
        score=score,
        n=5,
        trials=4000,
    )
    places, draws = np.divmod(np.asarray(scores) - np.where(members, 10, 20), 1)
    assert set(places) == set(range(5))
    assert np.max(draws) < 0.91
    assert len(np.unique(draws)) > 3900  # A key for each release.
    assert scipy.stats.chisquare(np.unique(places, return_counts=True)[1]).pvalue > 1e-4
    assert abs(np.mean(members) - 0.5) < 4 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"score": lambda *_: jnp.zeros(2)}, ValueError, "score"),
        ({"score": None}, TypeError, "score"),
        ({"trials": 0}, ValueError, "trials"),
        ({"n": 0}, ValueError, "n must be"),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
    ],
)
def test_what_cannot_run_is_refused(change, error, named):
    arguments = {"score": lambda *_: jnp.zeros(()), "n": 2, "trials": 2} | change
    run = functools.partial(membership_trials, jax.random.key(0), lambda key, x: x, distinct)
    with pytest.raises(error, match=named):
        run(**arguments)


def test_a_mechanism_must_state_its_distribution():
    with pytest.raises(TypeError, match="log_prob"):
        likelihood_ratio(jnp.sum, object())
