"""Differencing: exact on exact answers, and bounded by the composed guarantee on private ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import differencing, guessing_bound

PEOPLE, GROUPS, EPSILON = 5, 20_000, 1.0
EVERYONE_AND_ALL_BUT_ONE = np.ones((2, PEOPLE)) - np.outer([0, 1], np.eye(PEOPLE)[0])


@pytest.fixture(scope="module")
def has_diabetes():
    """Bits of many groups, which have no person in common."""
    return np.random.default_rng(0).integers(2, size=(GROUPS, PEOPLE), dtype="int32")


def test_two_counts_give_a_person_away(has_diabetes):
    found = differencing(EVERYONE_AND_ALL_BUT_ONE, has_diabetes @ EVERYONE_AND_ALL_BUT_ONE.T)
    assert found.exposed.tolist() == [True, False, False, False, False]
    assert np.max(np.abs(found.values[:, 0] - has_diabetes[:, 0])) < 1e-9
    assert found.gain[0] == pytest.approx(math.sqrt(2))


def test_noise_of_questions_that_are_asked_again_averages_out(has_diabetes):
    """Noise that is "done naively": fresh for each of many answers."""
    again = np.tile(EVERYONE_AND_ALL_BUT_ONE, (400, 1))
    noise = np.random.default_rng(1).laplace(scale=2.0, size=(100, len(again)))
    found = differencing(again, has_diabetes[:100] @ again.T + noise)
    assert found.gain[0] == pytest.approx(math.sqrt(2 / 400))
    # Four standard deviations of what is left are .8.
    assert np.mean((found.values[:, 0] > 0.5) == has_diabetes[:100, 0]) > 0.95


@pytest.mark.parametrize("m", [3, 5, 8])
def test_exposed_are_those_that_some_combination_singles_out(m):
    rng = np.random.default_rng(m)
    seen = set()
    for _ in range(40):
        queries, people = rng.integers(2, size=(m, 6)), rng.normal(size=6)
        found = differencing(queries, queries @ people)
        rank = np.linalg.matrix_rank(queries)
        alone = [np.linalg.matrix_rank(np.vstack([queries, row])) == rank for row in np.eye(6)]
        assert found.exposed.tolist() == alone
        assert found.values[found.exposed] == pytest.approx(people[found.exposed], abs=1e-8)
        seen |= set(alone)
    assert seen == {True, False}


def test_private_counts_hide_a_person(has_diabetes, keys):
    """Two releases, at half of epsilon each. False alarms: 2e-6; without noise all are right."""
    mechanism = dpjax.laplace(1.0, EPSILON / 2)

    def everyone(bits):
        return jnp.sum(bits, axis=-1).astype(float)

    def all_but_one(bits):
        return everyone(bits[:, 1:])

    private = [dpjax.privatize(target, mechanism) for target in (everyone, all_but_one)]
    releases = [release(keys(i), has_diabetes) for i, release in enumerate(private)]
    answers = np.stack([release.value for release in releases], axis=-1)
    guesses = differencing(EVERYONE_AND_ALL_BUT_ONE, answers).values[:, 0] > 0.5
    right = int(np.sum(guesses == has_diabetes[:, 0]))

    together = dpjax.accounting.compose(*(release.guarantee for release in releases))
    bound = guessing_bound(together)
    # The difference of two Laplace variables of scale b exceeds t with this probability.
    t, b = 0.5, 2 / EPSILON
    expected = 1 - math.exp(-t / b) * (0.5 + t / (4 * b))
    assert scipy.stats.binomtest(right, GROUPS, expected).pvalue > 1e-6
    assert expected < bound
    assert scipy.stats.binomtest(right, GROUPS, bound, alternative="greater").pvalue > 1e-6
    assert bound == pytest.approx(1 / (1 + math.exp(-EPSILON)))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="shape"):
        differencing(np.ones((2, 3)), np.ones(3))
    with pytest.raises(ValueError, match="shape"):
        differencing(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="finite"):
        differencing(np.ones((2, 3)), [1, math.nan])
    with pytest.raises(TypeError, match="answers"):
        differencing(np.ones((2, 3)), ["a", "b"])
    with pytest.raises(TypeError, match="host"):
        jax.jit(lambda answers: differencing(np.ones((2, 3)), answers).values)(jnp.ones(2))
