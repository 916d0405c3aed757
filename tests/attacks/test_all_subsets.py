"""All subset counts with noise up to E: 4 E entries wrong, never more, and exactly that."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import (
    guessing_bound,
    max_wrong_guesses,
    reconstruct_from_all_subsets,
    subset_counts,
    subset_distortions,
)

SIZES = [pytest.param(n, marks=() if n == 5 else pytest.mark.slow) for n in range(1, 15)]
sizes = pytest.mark.parametrize("n", SIZES)
GROUPS, RECORDS = 512, 6


def bits_of(numbers, n):
    return (np.asarray(numbers)[..., None] >> np.arange(n)) & 1


def counts(databases):
    """Of one database, or of each row of many, by a table of all subsets."""
    n = np.shape(databases)[-1]
    return np.asarray(databases) @ bits_of(np.arange(2**n), n).T


def test_counts_are_in_the_order_of_bits():
    database = np.array([3, 1, 4, 1, 5])
    assert subset_counts(jnp.asarray(database)).tolist() == counts(database).tolist()
    assert subset_counts(np.array([200, 100, 1, 1, 1], np.uint8))[3] == 300


def test_distortions_are_the_largest_over_all_subsets():
    answers = np.random.default_rng(0).integers(-20, 20, size=2**5) / 2
    every = counts(bits_of(np.arange(2**5), 5))
    expected = np.max(np.abs(every - answers), axis=1)
    assert subset_distortions(jnp.asarray(answers, jnp.float32)).tolist() == expected.tolist()


@sizes
def test_at_most_four_e_are_wrong_and_that_happens(n):
    """For every E, by exhaustion over databases (up to their order), candidates and subsets.

    A candidate can be within E of answers that are within E of the truth if and only if no subset
    tells it from the truth by more than 2 E: then the answers in the middle of both are.
    """
    databases = np.tri(n + 1, n, -1, dtype=int)  # With 0, ..., n ones.
    apart = jax.vmap(subset_distortions)(jnp.asarray(counts(databases), jnp.float32))
    wrong = np.sum(databases[:, None] != bits_of(np.arange(2**n), n), axis=-1)
    for halves in range(n + 3):
        error = Fraction(halves, 2)
        possible = np.asarray(apart) <= float(2 * error)
        assert np.max(wrong[possible]) == max_wrong_guesses(n, error=error) == min(n, 4 * error)


@sizes
def test_an_attack_that_goes_as_wrong_as_can_be(n):
    """The first candidate that fits best is taken; here it is the truth with 4 E bits turned."""
    ones = n // 2
    error = Fraction(ones, 2)
    decoy = np.arange(n) < ones
    truth = (np.arange(n) >= ones) & (np.arange(n) < 2 * ones)
    answers = (counts(truth) + counts(decoy)) / 2
    assert np.max(np.abs(answers - counts(truth))) == error
    guesses = reconstruct_from_all_subsets(jnp.asarray(answers, jnp.float32))
    assert guesses.tolist() == decoy.tolist()
    assert np.sum(np.asarray(guesses) != truth) == 4 * error == max_wrong_guesses(n, error=error)


@sizes
def test_random_noise_is_within_the_theorem(n):
    rng = np.random.default_rng(n)
    truth = rng.integers(2, size=n)
    for halves in range(4):
        noise = rng.integers(-halves, halves + 1, size=2**n) / 2
        guesses = reconstruct_from_all_subsets(jnp.asarray(counts(truth) + noise, jnp.float32))
        assert np.sum(np.asarray(guesses) != truth) <= max_wrong_guesses(
            n, error=Fraction(halves, 2)
        )


def test_nothing_happens_between_n_over_400_and_n_over_401():
    """Both leave 99% right, which is blatant non-privacy; so do larger errors, and more than half
    is right up to n/8."""
    for n in range(1, 2_001):
        for parts in (401, 400, 399):
            wrong = max_wrong_guesses(n, error=Fraction(n, parts))
            assert wrong <= Fraction(4 * n, parts)
        assert max_wrong_guesses(n, error=Fraction(n, 400)) <= Fraction(n, 100)
        assert max_wrong_guesses(n, error=Fraction(n, 401)) < Fraction(n, 100)
    assert max_wrong_guesses(200, error=Fraction(200, 400)) == 2 == 200 // 100
    assert [max_wrong_guesses(10_000, error=Fraction(10_000, x)) for x in (401, 400, 399)] == [
        98,
        100,
        100,
    ]
    assert max_wrong_guesses(8_000, error=1_000) == 4_000
    assert max_wrong_guesses(8_000, error=2_000) == 8_000


def test_private_counts_resist(key):
    """All 2^n counts of many groups at once. False alarms: 1e-6."""
    databases = np.random.default_rng(0).integers(2, size=(GROUPS, RECORDS))
    exact = jnp.asarray(counts(databases), jnp.float32)
    attack = jax.jit(jax.vmap(reconstruct_from_all_subsets))
    # A record is in half of the subsets of its group.
    mechanism = dpjax.gaussian(2 ** ((RECORDS - 1) / 2), 1.0, 1e-5)
    release = mechanism(key, exact)

    def exceeds(answers):
        """How surely more is right than the guarantee allows."""
        right = int(np.sum(np.asarray(attack(answers)) == databases))
        bound = guessing_bound(release.guarantee)
        return scipy.stats.binomtest(right, databases.size, bound, alternative="greater").pvalue

    assert np.array_equal(np.asarray(attack(exact)), databases)
    assert exceeds(exact + (release.value - exact) / 32) < 1e-12  # The power of this test.
    assert exceeds(release.value) > 1e-6


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2\\^n"):
        subset_distortions(jnp.zeros(3))
    with pytest.raises(ValueError, match="2\\^n"):
        reconstruct_from_all_subsets(jnp.zeros(1))
    with pytest.raises(ValueError, match="at most 20"):
        subset_counts(jnp.zeros(21))
    with pytest.raises(ValueError, match="error"):
        max_wrong_guesses(10, error=-1)
    with pytest.raises(ValueError, match="error"):
        max_wrong_guesses(10, error=Fraction(-1, 2))
