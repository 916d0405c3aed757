"""Audits under the inputs of tests/odd_inputs.py: their values, keys and outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax.auditing import audit, check_conformance, one_run_epsilon, verify
from dpjax.random import seeded_key

PLAIN = np.asarray([1.0, 0.0, 1.0])
KEY = seeded_key(15)


def noise(key, value):
    return jnp.round(value + 2.0 * jax.random.normal(key, value.shape))


ENTRIES = {
    "audit": lambda key, x, y: audit(key, noise, value=x, neighbor=y, samples=200),
    "verify": lambda key, x, y: verify(key, noise, value=x, neighbor=y, epsilon=9.0, samples=200),
    "check_conformance": lambda key, x, y: check_conformance(
        key, dpjax.laplace, value=x, neighbor=y
    ),
}
every = pytest.mark.parametrize("name", ENTRIES)


@every
def test_what_hides_something_is_refused(name):
    entry = ENTRIES[name]
    odds = [odd for odd in odd_inputs.hiding(PLAIN)]
    odd_inputs.assert_refused(lambda x: entry(KEY, x, PLAIN), odds, "^value ")
    odd_inputs.assert_refused(lambda x: entry(KEY, PLAIN, x), odds, "^neighbor ")


@every
def test_what_is_no_key_is_refused(name):
    for kind, key in odd_inputs.every_key():
        if kind in ("raw", "several", "a number", "none"):
            with pytest.raises((TypeError, ValueError), match=r"^key "):
                ENTRIES[name](key, PLAIN, PLAIN)


def test_outputs_must_be_real():
    with pytest.raises(TypeError, match="mechanism must give real arrays, got dtype complex64"):
        audit(
            KEY,
            lambda key, x: jax.lax.complex(x, x),
            value=PLAIN.astype("float32"),
            neighbor=PLAIN.astype("float32"),
            samples=200,
        )


def test_guesses_and_truth_are_counted():
    found = one_run_epsilon(canaries=100, correct=90, guesses=100, delta=1e-5)
    same = one_run_epsilon(
        canaries=np.int8(100), correct=np.int64(90), guesses=np.uint8(100), delta=np.float32(1e-5)
    )
    assert same == pytest.approx(found)
