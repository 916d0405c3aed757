"""Claims of the selections, of the search for names and of unary encoding, put to the auditor."""

import dataclasses

import jax.numpy as jnp
import pytest

import dpjax
from dpjax.auditing import verify
from dpjax.queries import name_search, select_each, top_k
from dpjax.targets import encode_text

SAMPLES = 200_000
SCORES = {"value": jnp.asarray([2, 1, 0]), "neighbor": jnp.asarray([1, 2, 1])}
# The best falls while all others rise: the more of them, the nearer a loss is to epsilon.
FIRST = jnp.tile(jnp.arange(8) == 0, (2, 1)).astype(int)
ROWS = {"value": FIRST, "neighbor": 1 - FIRST}
ANSWERS = {"value": jnp.asarray([2]), "neighbor": jnp.asarray([0])}
PEOPLE = {
    "value": jnp.asarray(encode_text(["a"] * 20 + ["b"] * 20 + ["ab"], width=2)),
    "neighbor": jnp.asarray(encode_text(["a"] * 20 + ["b"] * 20 + ["ba"], width=2)),
}
SEARCH = name_search(2.0, width=2, threshold=1, capacity=2)

CLAIMS = {
    "top-k": (top_k(1.0, 2.0, k=2), SCORES),
    "selection in each row": (select_each(1.0, 2.0, count=2), ROWS),
    "unary encoding": (dpjax.unary_encoding(2.0, 3), ANSWERS),
    "unary encoding, symmetric": (dpjax.unary_encoding(2.0, 3, flips="symmetric"), ANSWERS),
    "two coins": (dpjax.two_coins(3), ANSWERS),
    "name search": (SEARCH, PEOPLE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_claims_are_not_refuted(name, key):
    """A false alarm once in a million keys; and the audit sees at least a part of epsilon."""
    mechanism, pair = CLAIMS[name]
    result = verify(key, mechanism, **pair, samples=SAMPLES)
    assert 0.5 < result.epsilon <= result.claimed


def each_at_all_of_epsilon(mechanism):
    return lambda key, scores: dataclasses.replace(mechanism, epsilon=4.0)(key, scores).value


def half_the_noise(key, codes):
    """Levels at the scale of add-or-remove-one, of which the claim does not speak."""
    return dataclasses.replace(SEARCH, epsilon=4.0)(key, codes).value


def symmetric_bits_at_all_of_epsilon(key, answers):
    """Flips by e^epsilon where each of two bits has e^(epsilon / 2)."""
    return dpjax.unary_encoding(4.0, 3, flips="symmetric")(key, answers).value


BROKEN = {
    "top-k": (each_at_all_of_epsilon(CLAIMS["top-k"][0]), SCORES),
    "selection in each row": (each_at_all_of_epsilon(CLAIMS["selection in each row"][0]), ROWS),
    "unary encoding": (symmetric_bits_at_all_of_epsilon, ANSWERS),
    "name search": (half_the_noise, PEOPLE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_faults_are_refuted(name, key):
    mechanism, pair = BROKEN[name]
    with pytest.raises(AssertionError, match="claims epsilon 2, delta 0; the auditor refutes"):
        verify(key, mechanism, **pair, epsilon=2.0, samples=SAMPLES)
