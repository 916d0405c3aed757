"""The auditor against every mechanism, at four million releases each.

The neighbors are no multiples of anything, so that bits and grids would show. A mechanism that
keeps its promise is refuted once in a million runs, and one that loses 2% more is refuted.
"""

import jax.numpy as jnp
import pytest

import dpjax
from dpjax.auditing import verify
from dpjax.mechanisms import additive
from dpjax.random import LAPLACE, seeded_key

SAMPLES = 2 * 10**6
MOVE = 0.7310586

REAL = {"value": jnp.asarray(0.1), "neighbor": jnp.asarray(0.1 + MOVE)}
PAIR = {"value": jnp.asarray([0.1, 0.3]), "neighbor": jnp.asarray([0.1 + MOVE, 0.3 - MOVE])}
COUNT = {"value": jnp.asarray(3), "neighbor": jnp.asarray(4)}
SCORES = {
    "value": jnp.asarray([2.0, 1.0, 0.1]) * MOVE,
    "neighbor": jnp.asarray([1.0, 2.0, 1.1]) * MOVE,
}
ANSWERS = {"value": jnp.asarray([2]), "neighbor": jnp.asarray([0])}

TABLE = {
    "laplace": (dpjax.laplace(MOVE, 1.0), REAL),
    "laplace, two coordinates": (dpjax.laplace(2 * MOVE, 1.0), PAIR),
    "laplace, integers": (dpjax.laplace(1.0, 1.0), COUNT),
    "gaussian": (dpjax.gaussian(MOVE, 1.0, 1e-3), REAL),
    "gaussian, integers": (dpjax.gaussian(1.0, 1.0, 1e-3), COUNT),
    "bernstein": (dpjax.bernstein(MOVE, 1.0, degree=1, dims=1), PAIR),
    "exponential": (dpjax.exponential(MOVE, 1.0), SCORES),
    "permute-and-flip": (dpjax.permute_and_flip(MOVE, 1.0), SCORES),
    "randomized response": (dpjax.randomized_response(1.0, categories=3), ANSWERS),
    "one's own": (
        additive(MOVE, 1.0, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 2 / e),
        PAIR,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_nothing_tells_neighbors_apart_beyond_epsilon(name):
    mechanism, pair = TABLE[name]
    result = verify(seeded_key(20261121), mechanism, samples=SAMPLES, **pair)
    assert result.epsilon <= result.claimed


@pytest.mark.slow
def test_two_percent_more_are_told_apart():
    """The power of this test: noise for epsilon 1 does not pass for noise for .98."""
    mechanism, pair = TABLE["laplace"]
    with pytest.raises(AssertionError, match=r"claims epsilon 0\.98"):
        verify(seeded_key(20261121), mechanism, epsilon=0.98, samples=SAMPLES, **pair)
