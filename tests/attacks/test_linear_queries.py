"""Random subset counts, by least squares and by linear programming."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import (
    guessing_bound,
    reconstruct_by_least_squares,
    reconstruct_by_linear_program,
)

N, RATIO, RELEASES = 32, 4, 200
# Of fair bits, each with its own release. The linear program takes one at a time.
PROGRAMS = 20


@pytest.fixture(scope="module")
def queries():
    return np.random.default_rng(0).integers(2, size=(RATIO * N, N))


@pytest.fixture(scope="module")
def databases():
    return np.random.default_rng(1).integers(2, size=(RELEASES, N))


def uniform_noise(c, shape, n=N):
    return c * math.sqrt(n) * np.random.default_rng(2).uniform(-1, 1, shape)


def by_least_squares(queries, answers):
    return np.asarray(
        reconstruct_by_least_squares(jnp.asarray(queries), jnp.asarray(answers, jnp.float32))
    )


def by_linear_program(queries, answers):
    return np.array([reconstruct_by_linear_program(queries, one) for one in answers])


def wrong(guesses, databases):
    return np.mean(guesses != databases[: len(guesses)])


def test_exact_counts_give_everything_away(queries, databases):
    exact = databases @ queries.T
    assert wrong(by_least_squares(queries, exact), databases) == 0
    assert wrong(by_linear_program(queries, exact[:PROGRAMS]), databases) == 0


def test_least_squares_fail_where_noise_is_of_the_order_of_the_root_of_n(queries, databases):
    """By the normal law for the error that noise in r n counts leaves: 2 c / sqrt(3 (r - 1))."""
    exact = databases @ queries.T
    for c in (0.1, 0.4, 1.0, 3.0):
        noise = uniform_noise(c, exact.shape)
        expected = scipy.special.ndtr(-math.sqrt(3 * (RATIO - 1)) / (4 * c))
        # 6400 bits, and one choice of queries.
        assert wrong(by_least_squares(queries, exact + noise), databases) == pytest.approx(
            expected, abs=0.03
        )


def test_linear_programs_fail_there_too(queries, databases):
    exact = (databases @ queries.T)[:PROGRAMS]
    found = [
        wrong(by_linear_program(queries, exact + uniform_noise(c, exact.shape)), databases)
        for c in (0.1, 0.4, 1.0, 3.0)
    ]
    assert found[0] < 0.01
    assert found == sorted(found)
    assert found[3] > 0.3


@pytest.mark.slow
def test_the_phase_change_is_at_the_root_of_n():
    """At c sqrt(n) as much is wrong for 32 as for 128 records, by both attacks."""
    c, found = (0.15, 0.5, 1.0), {}
    for n, releases in ((32, 80), (128, 20)):
        rng = np.random.default_rng(n)
        queries, bits = rng.integers(2, size=(4 * n, n)), rng.integers(2, size=(releases, n))
        exact = bits @ queries.T
        for attack in (by_least_squares, by_linear_program):
            for size in c:
                noisy = exact + uniform_noise(size, exact.shape, n)
                found[n, attack, size] = wrong(attack(queries, noisy), bits)
    for attack in (by_least_squares, by_linear_program):
        for size in c:
            # 2560 bits each: five standard deviations of the difference are .07.
            assert found[32, attack, size] == pytest.approx(found[128, attack, size], abs=0.07)
        assert found[128, attack, 0.15] < 0.01
        assert found[128, attack, 1.0] > 0.15


def test_linear_programs_forgive_answers_that_are_arbitrarily_wrong(queries, databases):
    """A tenth of them; least squares do not."""
    answers = (databases @ queries.T)[:PROGRAMS]
    answers[:, ::10] += 1000
    assert wrong(by_linear_program(queries, answers), databases) == 0
    assert wrong(by_least_squares(queries, answers), databases) > 0.3


@pytest.mark.parametrize("attack", [by_least_squares, by_linear_program])
def test_private_counts_resist(attack, queries, databases, key):
    """A record moves the counts of the subsets that it is in. False alarms: 1e-6."""
    exact = jnp.asarray(databases @ queries.T, jnp.float32)
    in_subsets = int(np.max(np.sum(queries, axis=0)))
    release = dpjax.gaussian(math.sqrt(in_subsets), 1.0, 1e-5)(key, exact)
    bound = guessing_bound(release.guarantee)
    releases = RELEASES if attack is by_least_squares else PROGRAMS

    def exceeds(answers):
        """How surely more is right than the guarantee allows."""
        guesses = attack(queries, np.asarray(answers)[:releases])
        right = int(np.sum(guesses == databases[: len(guesses)]))
        return scipy.stats.binomtest(right, guesses.size, bound, alternative="greater").pvalue

    assert exceeds(exact + (release.value - exact) / 32) < 1e-12  # The power of this test.
    assert exceeds(release.value) > 1e-6


def test_shapes_and_jit(queries, databases):
    exact = jnp.asarray(databases[:6].reshape(2, 3, N) @ queries.T, jnp.float32)
    found = jax.jit(reconstruct_by_least_squares)(jnp.asarray(queries), exact)
    assert np.array_equal(np.asarray(found), databases[:6].reshape(2, 3, N))
    with pytest.raises(ValueError, match="shape"):
        reconstruct_by_least_squares(jnp.zeros((2, 3)), jnp.zeros(3))
    with pytest.raises(ValueError, match="shape"):
        reconstruct_by_linear_program(np.zeros((2, 3)), np.zeros((1, 2)))


def test_a_linear_program_gives_up_when_its_time_is_over(queries, databases):
    with pytest.raises(RuntimeError, match="failed to solve the linear program"):
        reconstruct_by_linear_program(
            queries, databases[0] @ queries.T + uniform_noise(1, len(queries)), seconds=1e-9
        )
