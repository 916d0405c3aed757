"""Walsh-Hadamard queries: exact, and lost where noise is of order sqrt(n)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import (
    expected_recovered_fraction,
    guessing_bound,
    reconstruct_from_walsh_hadamard,
    recovered_fraction,
    walsh_hadamard,
)

N = 8192
EPSILON, DELTA = 1.0, 1e-5


@pytest.fixture(scope="module")
def bits():
    return np.random.default_rng(0).integers(2, size=N)


@pytest.fixture(scope="module")
def answers(bits):
    return walsh_hadamard(jnp.asarray(bits))


@pytest.mark.parametrize("n", [2, 256, pytest.param(4096, marks=pytest.mark.slow)])
def test_answers_are_those_of_the_matrix(n):
    matrix = scipy.linalg.hadamard(n)
    database = np.random.default_rng(n).integers(-9, 10, size=(2, n))
    assert walsh_hadamard(jnp.asarray(database)).tolist() == (database @ matrix).tolist()


def test_a_record_that_changes_moves_every_answer_by_one(bits, answers):
    """Hence the sensitivities n and sqrt(n)."""
    neighbor = bits.copy()
    neighbor[17] = 1 - neighbor[17]
    assert set(np.unique(np.abs(walsh_hadamard(jnp.asarray(neighbor)) - answers))) == {1.0}


def test_noise_up_to_e_leaves_at_most_four_e_squared_wrong(bits, answers):
    """For any noise: here all of it is spent on as few records as it takes."""
    for count in (1, 4, 25):
        turned = np.where(np.arange(N) < count, 1.001 * (0.5 - bits), 0)
        noise = walsh_hadamard(jnp.asarray(turned, jnp.float32))
        wrong = np.sum(np.asarray(reconstruct_from_walsh_hadamard(answers + noise)) != bits)
        assert wrong == count <= 4 * float(jnp.max(jnp.abs(noise))) ** 2
    # The bound speaks of the energy of the noise, which is attained: the sum of its squares over n.
    assert wrong == pytest.approx(4 * float(jnp.mean(noise**2)), rel=0.01)


def test_what_is_wrong_at_34_hundredths_of_the_root_of_n_and_at_the_root():
    """The figures: .5% and 19%. False alarms: below 2e-6 for each c, of independent bits."""
    c = jnp.asarray([0.0, 0.34, 1.0, 3.0])
    keys = jax.random.split(jax.random.key(0), 20)
    fractions = jax.jit(jax.vmap(lambda key: recovered_fraction(key, c, n=N)))(keys)
    recovered = np.mean(fractions, axis=0)
    expected = expected_recovered_fraction(np.asarray(c))
    deviation = np.sqrt(expected * (1 - expected) / (len(keys) * N))
    assert np.all(np.abs(recovered - expected) <= 5 * deviation)
    assert recovered[0] == 1
    assert [f"{1 - fraction:.1%}" for fraction in expected[1:3]] == ["0.5%", "19.3%"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2**8, 2**16])
def test_the_phase_change_is_at_the_root_of_n(n):
    """The same fractions at any n. False alarms: below 2e-5."""
    c = jnp.linspace(0.1, 3.0, 30)
    keys = jax.random.split(jax.random.key(n), 2**20 // n)
    fractions = jax.vmap(lambda key: recovered_fraction(key, c, n=n))(keys)
    expected = expected_recovered_fraction(np.asarray(c))
    # For few records, sums of uniform noise are not normal yet.
    slack = 5 * np.sqrt(expected * (1 - expected) / 2**20) + 0.1 / n
    assert np.all(np.abs(np.mean(fractions, axis=0) - expected) <= slack)


def test_private_answers_resist(bits, answers, key):
    """Gaussian noise for n answers is of order sqrt(n). False alarms: 2e-6."""
    mechanism = dpjax.gaussian(math.sqrt(N), EPSILON, DELTA)
    release = mechanism(key, answers)
    bound = guessing_bound(release.guarantee)

    def right(noisy):
        return int(np.sum(np.asarray(reconstruct_from_walsh_hadamard(noisy)) == bits))

    def exceeds(noisy):
        """How surely more is right than the guarantee allows."""
        return scipy.stats.binomtest(right(noisy), N, bound, alternative="greater").pvalue

    # Balle and Wang's noise for a sensitivity of 1: the best guess of who knows all other records.
    expected = scipy.special.ndtr(1 / (2 * 3.7306))
    assert scipy.stats.binomtest(right(release.value), N, expected).pvalue > 1e-6
    assert 0.5 < expected < bound
    assert exceeds(release.value) > 1e-6
    # The power of this test.
    assert exceeds(answers + (release.value - answers) / 8) < 1e-12


def test_many_databases_at_once_and_inside_jit(bits):
    databases = jnp.asarray(bits.reshape(2, 2, -1))
    found = jax.jit(lambda x: reconstruct_from_walsh_hadamard(walsh_hadamard(x)))(databases)
    assert np.array_equal(np.asarray(found), bits.reshape(2, 2, -1))


@pytest.mark.slow
def test_float64(x64):
    database = jnp.asarray(np.random.default_rng(0).normal(size=64))
    again = walsh_hadamard(walsh_hadamard(database)) / 64
    assert float(jnp.max(jnp.abs(again - database))) < 1e-14


def test_sizes_that_are_no_power_of_two_are_refused():
    for bad in (jnp.zeros(3), jnp.zeros(()), jnp.zeros((2, 6))):
        with pytest.raises(ValueError, match="power of two"):
            walsh_hadamard(bad)
    with pytest.raises(TypeError, match="real"):
        walsh_hadamard(jnp.zeros(2, complex))
