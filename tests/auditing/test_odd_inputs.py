"""Audits under the inputs of tests/odd_inputs.py: their values, keys and outputs."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax._exact._numerics import TailBand
from dpjax.auditing import audit, check_conformance, one_run_epsilon, verify
from dpjax.auditing._privacy_profile import PairCurve, PrivacyProfile
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
    with pytest.raises(TypeError, match="the output of mechanism must contain real numbers"):
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


# What releases are worth: searches and samples, which no private number reaches.

COIN = dpjax.oracles.independent(lambda key: jax.random.bernoulli(key).astype(jnp.float32))
MEAN = dpjax.targets.summable(lambda x: x, average=True)
LIMIT = dpjax.assume_sensitivity(0.2, norm="l1")


def gammas(records, key=KEY):
    return dpjax.gamma_by_record(
        key, MEAN, COIN, sensitivity=LIMIT, n=8, records=records, pairs=20
    ).estimates


def profile(key=KEY):
    return dpjax.privacy_profile(key, (MEAN, dpjax.laplace(0.2, 1.0)), COIN, n=8, m=20)


def attacked(records, key=KEY):
    return dpjax.auditing.adversarial_pair(
        key, jnp.mean, records, bounds=(0, 1), norm="l1", steps=1, restarts=2
    ).distance


FRONTIER = {
    "gamma_by_record": lambda key: gammas(PLAIN.astype("float32"), key),
    "privacy_profile": profile,
    "adversarial_pair": lambda key: attacked(PLAIN.astype("float32"), key),
}


@pytest.mark.slow
def test_records_that_hide_something_are_refused():
    odd_inputs.assert_refused(gammas, odd_inputs.hiding(PLAIN), "^records ")
    odd_inputs.assert_refused(attacked, odd_inputs.hiding(PLAIN), "^records ")


@pytest.mark.slow
def test_records_in_another_dtype_are_right_or_refused():
    """A record that a coin shows has the gamma of its number; a mean of integers is searched."""
    reference = gammas(PLAIN.astype("float32"))
    odd_inputs.assert_right(
        gammas, odd_inputs.written_otherwise(PLAIN), "^records ", lambda _: reference
    )


@pytest.mark.parametrize("name", FRONTIER)
def test_the_frontier_refuses_what_is_no_key(name):
    for kind, key in odd_inputs.every_key():
        if kind in ("raw", "several", "a number", "none"):
            with pytest.raises((TypeError, ValueError), match=r"^key "):
                FRONTIER[name](key)


def test_epsilons_of_a_profile():
    band = TailBand.of(np.ones(100), Fraction(1, 100))
    curve = PairCurve("laplace", 1.0, 0.0, 0.0, 0.0)
    made = PrivacyProfile(1.0, 0.0, 8, 100, 0.99, band, curve, "")
    odds = [odd for odd in odd_inputs.hiding(PLAIN) if odd.name != "empty"]
    odd_inputs.assert_refused(made.delta, odds, "^epsilon ")
    odd_inputs.assert_right(
        made.delta,
        odd_inputs.written_otherwise(PLAIN),
        "^epsilon ",
        lambda x: np.array([made.delta(float(e)) for e in x]),
    )
    for bad in (*odd_inputs.NO_NUMBERS, *odd_inputs.NO_PARAMETERS):
        with pytest.raises((TypeError, ValueError), match=r"^epsilon "):
            made.gamma(bad)
    for bad in odd_inputs.NO_PARAMETERS:
        with pytest.raises((TypeError, ValueError), match=r"^delta "):
            made.gamma(1.0, bad)
