"""Tracing: strangers have scores of a known law, members of exact means have higher ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import guessing_bound, tracing_scores

STUDIES, MEMBERS, ATTRIBUTES = 1_000, 10, 120
THRESHOLD = 1.5
scores_of_studies = jax.jit(jax.vmap(tracing_scores, in_axes=(0, 0, None)))


@pytest.fixture(scope="module")
def population():
    return jnp.asarray(np.random.default_rng(0).uniform(0.2, 0.8, ATTRIBUTES), jnp.float32)


@pytest.fixture(scope="module")
def people(population):
    """In each study members, and one stranger for everyone of them."""
    draws = np.random.default_rng(1).random((2, STUDIES, MEMBERS, ATTRIBUTES), np.float32)
    members, strangers = draws < np.asarray(population)
    return members.astype(np.float32), strangers.astype(np.float32)


@pytest.fixture(scope="module")
def means(people):
    return jnp.mean(jnp.asarray(people[0]), axis=1)


def test_scores_by_hand():
    population, means = np.array([0.5, 0.2]), np.array([0.9, 0.1])
    record = np.array([1.0, 0.0])
    variance = population * (1 - population)
    score = np.sum((record - population) * (means - population) / variance)
    score /= math.sqrt(np.sum((means - population) ** 2 / variance))
    assert float(tracing_scores(record, means, population)) == pytest.approx(score, rel=1e-6)


def test_strangers_have_mean_zero_and_variance_one_exactly():
    """Over all records of five bits, with their probabilities, whatever was published."""
    population, means = np.array([0.5, 0.1, 0.3, 0.8, 0.6]), np.array([0.0, 0.9, 0.3, 0.7, 0.61])
    records = (np.arange(2**5)[:, None] >> np.arange(5)) & 1
    chances = np.prod(np.where(records, population, 1 - population), axis=1)
    scores = np.asarray(tracing_scores(records, means, population), np.float64)
    assert chances @ scores == pytest.approx(0, abs=1e-6)
    assert chances @ scores**2 == pytest.approx(1, rel=1e-6)


def test_exact_means_give_members_away(people, means, population):
    members, strangers = (np.asarray(scores_of_studies(x, means, population)) for x in people)
    expected = math.sqrt(ATTRIBUTES / MEMBERS)
    assert np.mean(members) == pytest.approx(expected, rel=0.03)
    assert np.mean(members > THRESHOLD) > 0.9
    # Strangers of different studies are independent, 5 standard deviations of one for each.
    beyond = scipy.stats.norm.sf(THRESHOLD)
    assert np.mean(strangers > THRESHOLD) == pytest.approx(
        beyond, abs=5 * (beyond / STUDIES) ** 0.5
    )


def test_private_means_hide_members(people, means, population, key):
    """All studies in one release: nobody is in two. False alarms: 1e-6, by Hoeffding.

    A member and a stranger of each study are compared: their difference is within [-1, 1], and
    independent of the other studies.
    """
    target = dpjax.targets.bounded_mean(lower=0, upper=1, dims=ATTRIBUTES)
    mechanism = dpjax.gaussian(target.sensitivity("l2", n=MEMBERS), 1.0, 1e-5)
    release = mechanism(key, jax.vmap(target)(jnp.asarray(people[0])))
    allowed = 2 * guessing_bound(release.guarantee) - 1
    slack = math.sqrt(2 * math.log(1e6) / STUDIES)

    def advantage(published):
        members, strangers = (
            np.asarray(scores_of_studies(x, published, population))[:, 0] for x in people
        )
        return np.mean(members > THRESHOLD) - np.mean(strangers > THRESHOLD)

    assert advantage(means) > allowed + slack  # The power of this test.
    assert advantage(release.value) < allowed + slack
    # What is left of a score: 1/n of its variance, over noise of multiplier / n in each attribute.
    assert advantage(release.value) < 0.1 + slack


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="means and population"):
        tracing_scores(jnp.zeros(3), jnp.zeros(2), jnp.zeros(3))
    with pytest.raises(ValueError, match="records"):
        tracing_scores(jnp.zeros((3, 2)), jnp.zeros(3), jnp.zeros(3))
