"""A table that gives accurate counts can be attacked, and one that cannot gives inaccurate ones."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.attacks import guessing_bound, reconstruct_from_noisy_table, subset_error

N, EPSILON = 20_000, 1.0


@pytest.fixture(scope="module")
def bits():
    return np.random.default_rng(0).integers(2, size=N)


def guesses(table):
    return np.asarray(reconstruct_from_noisy_table(jnp.asarray(table, jnp.float32)))


def error(table, bits):
    return float(subset_error(jnp.asarray(table, jnp.float32), jnp.asarray(bits)))


def test_the_error_is_the_largest_over_all_subsets():
    rng = np.random.default_rng(0)
    subsets = (np.arange(2**8)[:, None] >> np.arange(8)) & 1
    for _ in range(20):
        table, truth = rng.integers(-8, 8, size=8) / 4, rng.integers(2, size=8)
        assert error(table, truth) == np.max(np.abs(subsets @ (table - truth)))


def test_at_most_four_e_are_wrong(bits):
    """Nearly attained: entries that are barely off by too much, of both kinds."""
    rng = np.random.default_rng(1)
    for size in (0.2, 0.6, 1.5):
        table = bits + rng.uniform(-size, size, N)
        assert np.sum(guesses(table) != bits) <= 4 * error(table, bits)
    barely = np.isin(np.arange(N), [np.flatnonzero(bits == bit)[:500] for bit in (0, 1)])
    table = np.where(barely, 0.5 + 0.001 * (1 - 2 * bits), bits)
    wrong = np.sum(guesses(table) != bits)
    assert wrong == 1000
    assert 0.99 * 4 * error(table, bits) < wrong <= 4 * error(table, bits)


def test_a_table_of_bits_has_at_most_two_e_wrong(bits):
    turned = bits ^ (np.random.default_rng(2).random(N) < 0.3)
    assert N / 4 < np.sum(guesses(turned) != bits) <= 2 * error(turned, bits)


def test_a_table_with_a_little_noise_gives_everything_away(bits):
    table = bits + np.random.default_rng(3).uniform(-0.499, 0.499, N)
    assert np.array_equal(guesses(table), bits)


def test_a_private_table_resists_and_is_inaccurate(bits, key):
    """Randomized response, which leaves just as much right as may be. False alarms: 1e-6."""
    mechanism = dpjax.randomized_response(EPSILON)
    table = np.asarray(mechanism(key, jnp.asarray(bits)).value)
    right = int(np.sum(guesses(table) == bits))
    bound = guessing_bound(mechanism.guarantee)
    assert scipy.stats.binomtest(right, N, bound).pvalue > 1e-6
    assert (N - right) / 2 <= error(table, bits)
    # Counts that are unbiased are no better: some subset is off by an eighth of the records.
    keep = bound
    unbiased = (table - (1 - keep)) / (2 * keep - 1)
    assert error(unbiased, bits) > N / 8


def test_tables_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="shape"):
        subset_error(jnp.zeros(2), jnp.zeros(3))
    with pytest.raises(TypeError, match="real"):
        reconstruct_from_noisy_table(jnp.zeros(2, complex))
