"""Published variants of the sparse vector technique that are not private, and those that are.

Lyu, Su and Li (2017), Figure 1, numbers six of them: 1 and 2 are private, 3 to 6 are not. All run
in floats here, on queries that one record moves by 1, under a claim of epsilon = 1; the pairs
follow the counterexamples of their section 3. A claim that holds is refuted once in a million runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.auditing import verify

EPSILON = 1.0
SAMPLES = 200_000

pytestmark = pytest.mark.slow


def _laplace(key, scale, shape=()):
    return scale * jax.random.laplace(key, shape)


def sparse_vector(*, threshold, queries, positives=None, numbers=False):
    """Compares with one noisy threshold; ends after so many positive answers, or never."""

    def mechanism(key, answers):
        first, second = jax.random.split(key)
        noisy = answers + _laplace(second, queries, answers.shape)
        above = noisy >= _laplace(first, threshold)
        if positives is not None:
            above &= jnp.cumsum(above) <= positives
        return jnp.where(above, noisy, -1e6) if numbers else above

    return mechanism


def with_fresh_thresholds(positives):
    """Algorithm 2, of Dwork and Roth: larger noise of the threshold, drawn anew."""

    def mechanism(key, answers):
        first, second, third = jax.random.split(key, 3)
        scale = 2 * positives / EPSILON
        noisy = answers + _laplace(second, 2 * scale, answers.shape)
        lines = _laplace(third, scale, answers.shape)

        def compare(state, query):
            line, count = state
            answer, fresh = query
            above = (answer >= line) & (count < positives)
            return (jnp.where(above, fresh, line), count + above.astype(jnp.int32)), above

        start = (_laplace(first, scale), jnp.int32(0))
        return jax.lax.scan(compare, start, (noisy, lines))[1]

    return mechanism


def one_noise_for_all(positives):
    """The fault that is easiest to make: noise of the shape ()."""

    def mechanism(key, answers):
        first, second = jax.random.split(key)
        noisy = answers + _laplace(second, 4 * positives / EPSILON)
        above = noisy >= _laplace(first, 2 / EPSILON)
        return above & (jnp.cumsum(above) <= positives)

    return mechanism


def ends(*numbers):
    return np.concatenate([np.full(count, number, np.float32) for number, count in numbers])


PRIVATE = {
    "algorithm 1": (
        sparse_vector(threshold=2 / EPSILON, queries=8 / EPSILON, positives=2),
        ends((0.0, 6)),
        ends((1.0, 3), (-1.0, 3)),
    ),
    "algorithm 2": (with_fresh_thresholds(2), ends((0.0, 6)), ends((1.0, 3), (-1.0, 3))),
}
BROKEN = {
    # A number above the threshold tells that the threshold is lower.
    "algorithm 3, which releases the noisy numbers": (
        sparse_vector(threshold=2 / EPSILON, queries=2 / EPSILON, positives=1, numbers=True),
        ends((0.0, 9), (1.0, 1)),
        ends((1.0, 9), (0.0, 1)),
    ),
    "algorithm 4, whose noise does not grow with the positives": (
        sparse_vector(threshold=4 / EPSILON, queries=4 / (3 * EPSILON), positives=4),
        ends((0.0, 8)),
        ends((1.0, 4), (-1.0, 4)),
    ),
    "algorithm 5, without noise of queries": (
        sparse_vector(threshold=2 / EPSILON, queries=0.0),
        ends((0.0, 1), (1.0, 1)),
        ends((1.0, 1), (0.0, 1)),
    ),
    "algorithm 6, without an end": (
        sparse_vector(threshold=2 / EPSILON, queries=2 / EPSILON),
        ends((0.0, 8)),
        ends((1.0, 4), (-1.0, 4)),
    ),
    "one noise for all queries": (
        one_noise_for_all(2),
        ends((0.0, 1), (1.0, 1)),
        ends((1.0, 1), (0.0, 1)),
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_variants_that_are_private_pass(name):
    mechanism, value, neighbor = PRIVATE[name]
    key = jax.random.key(0)
    found = verify(key, mechanism, value=value, neighbor=neighbor, epsilon=EPSILON, samples=SAMPLES)
    assert found.epsilon > 0.2


@pytest.mark.parametrize("name", BROKEN)
def test_variants_that_are_not_are_refuted(name):
    mechanism, value, neighbor = BROKEN[name]
    with pytest.raises(AssertionError, match="claims epsilon 1, delta 0; the auditor refutes"):
        verify(
            jax.random.key(0),
            mechanism,
            value=value,
            neighbor=neighbor,
            epsilon=EPSILON,
            samples=SAMPLES,
        )


@pytest.mark.parametrize("pair", BROKEN)
def test_what_ships_passes_on_all_of_these_pairs(pair):
    """Under its own claim, with noise as it is released."""
    _, value, neighbor = BROKEN[pair]
    mechanism = dpjax.above_threshold(1.0, EPSILON, threshold=0.0, positives=2)
    key = dpjax.random.seeded_key(7)
    verify(key, mechanism, value=value, neighbor=neighbor, samples=SAMPLES)
