"""What `check_conformance` must notice: mechanisms in plain JAX, each wrong in one way.

What else reaches these checks: noise may miss in one coordinate or be shared by two, wherever the
neighbor moves others; strange numbers may stand alone, at any place, and beside each other; a
density may be wrong by a constant, which no ratio shows; a guarantee may have no axis under vmap.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._core._pytree import frozen_pytree, static
from dpjax.auditing import _conformance as stated
from dpjax.auditing import check_conformance
from dpjax.auditing._moves import double_moves, single_moves, strange_values
from dpjax.mechanisms._start import begin
from dpjax.random import seeded_key
from dpjax.random._keys import check_key

FAR = 1e6
# The pair of the docstring: the second coordinate does not move.
PAIR = {"value": jnp.zeros(2), "neighbor": jnp.asarray([1.0, 0.0])}


@frozen_pytree
class Plain:
    """Laplace noise in floats, in the l1 norm, with a flaw: fast to compile."""

    sensitivity: dpjax.Sensitivity
    epsilon: float
    flaw: str = static()

    norm = "l1"

    @property
    def guarantee(self):
        sensitivity, epsilon = self.sensitivity, self.epsilon
        if self.flaw == "a guarantee without an axis" and not isinstance(epsilon, float):
            epsilon = 1.0
        events = () if sensitivity.identity is None else sampled_event(sensitivity)
        return dpjax.Guarantee(epsilon, 0.0, sensitivity.gamma, sensitivity.confidence, events)

    def clamped(self, value):
        return jnp.clip(jnp.where(jnp.isnan(value), 0.0, value), -FAR, FAR)

    def __call__(self, key, value):
        check_key(key)
        word = jax.random.bits(key, dtype="uint32")
        noise = jax.random.laplace(jax.random.key(word, impl="threefry2x32"), value.shape)
        noise = noise * (self.sensitivity.value / self.epsilon)
        safe, strange = self.clamped(value), ~jnp.isfinite(value)
        if self.flaw == "no noise in the second":
            noise = noise.at[1].set(0.0)
        if self.flaw == "one draw for both":
            noise = jnp.full_like(noise, noise[0])
        if self.flaw == "an infinity gives the others away":
            noise = jnp.where(jnp.any(strange) & ~jnp.all(strange), 0.0, noise)
        if self.flaw == "a far number gives the others away":
            far = jnp.isfinite(value) & (value != safe)
            noise = jnp.where(jnp.any(far) & ~jnp.all(far), 0.0, noise)
        if self.flaw == "-0.0 is told":
            noise = jnp.where((value == 0) & jnp.signbit(value), noise + 1.0, noise)
        if self.flaw == "infinities of both signs are told":
            both = jnp.any(value == jnp.inf) & jnp.any(value == -jnp.inf)
            noise = jnp.where(both, noise + 1.0, noise)
        bad = jnp.isnan(self.sensitivity.value / self.epsilon)
        return dpjax.Release(jnp.where(bad, jnp.nan, safe + noise), self.guarantee)

    def log_prob(self, output, value):
        scale = self.sensitivity.value / self.epsilon
        distances = jnp.abs(output - self.clamped(value)) / scale
        wrong = {"a density times e^5": 5.0, "a density over e^9": -9.0}.get(self.flaw, 0.0)
        return jnp.sum(-distances - jnp.log(2 * scale)) + wrong

    def error(self, *, confidence):
        return self.sensitivity.value / self.epsilon * -math.log(1 - confidence)


def sampled_event(sensitivity):
    return dpjax.laplace(sensitivity, 1.0).guarantee.events


def plain(flaw):
    return lambda sensitivity, epsilon: Plain(*begin("l1", sensitivity, epsilon), flaw)


@pytest.mark.slow
def test_a_mechanism_without_a_flaw_passes():
    """As those of dpjax do in tests/mechanisms/test_conformance.py."""
    check_conformance(seeded_key(1), plain(""), **PAIR)


FLAWS = {
    "no noise in the second": r"for value\[1\] moved by 1 the mean ratio is",
    "one draw for both": r"for value\[0\] and value\[1\] moved the mean ratio",
    "an infinity gives the others away": "a value of nan, alone or among others, must be",
    "a far number gives the others away": "a value of the largest float, alone or among",
    "-0.0 is told": "a value of -0.0, alone or among",
    "infinities of both signs are told": "a value of both infinities and nan, alone",
    "a density times e^5": "a density with integral 1: of a density fitted to the draws, the",
    "a density over e^9": "a density with integral 1",
    "a guarantee without an axis": "vmap must keep the guarantees apart",
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_found(flaw):
    with pytest.raises(AssertionError, match=FLAWS[flaw]):
        check_conformance(seeded_key(1), plain(flaw), **PAIR)


def test_every_coordinate_moves_alone_as_far_as_the_norm_allows():
    value = {"a": jnp.zeros(2), "b": jnp.asarray(3)}
    neighbor = {"a": jnp.asarray([1.0, 0.0]), "b": jnp.asarray(3)}
    moved = dict(single_moves("l1", 2.0, value, neighbor))
    assert len(moved) == 6
    np.testing.assert_allclose(moved["value['a'][1] moved by -2"]["a"], [0.0, -2.0], rtol=1e-6)
    assert moved["value['b'] moved by 2"]["b"] == 5
    # Integers that half a step cannot reach stay, and the ends of a dtype hold.
    assert len(single_moves("l1", 0.5, value, neighbor)) == 4
    ends = {"value": np.array([0, 255], "uint8"), "neighbor": np.array([1, 255], "uint8")}
    assert [int(x.sum()) for _, x in single_moves("linf", 1.0, **ends)] == [256, 254]
    # Where coordinates are counted, they move as far as the pair shows.
    ages = {"value": jnp.asarray([20.0, 60.0]), "neighbor": jnp.asarray([20.0, 90.0])}
    assert {float(np.ptp(x)) for _, x in single_moves("hamming", 1.0, **ages)} == {
        30.0,
        110.0,
    }
    assert len(double_moves("l1", 1.0, jnp.zeros(5), jnp.ones(5), 0)) == 10
    assert len(double_moves("l1", 1.0, jnp.zeros(50), jnp.ones(50), 0)) == 64


def test_every_coordinate_is_strange_alone():
    value = {"a": np.ones(2, "float32"), "b": np.ones((1, 1), "int32")}
    batches = dict(strange_values(value, 5))
    nan = batches["nan"]
    assert np.isnan(nan["a"]).tolist() == [
        [True] * 2,
        [True, False],
        [False, True],
        [False] * 2,
        [True] * 2,
    ]
    assert nan["b"].ravel().tolist() == [2**31 - 1, 1, 1, 2**31 - 1, 2**31 - 1]
    assert np.signbit(batches["-0.0"]["a"][0]).all()
    assert list(dict(strange_values(value["b"], 5))) == ["inf", "-inf"]


# The total of a density, by what has one.


def rows(count=20_000):
    return np.random.default_rng(5).standard_normal((count, 2))


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.1, 9.0, -9.0])
def test_the_total_of_a_density(shift):
    """A false alarm once in 500 million keys; a tenth is found, whichever way."""
    draws = rows()
    correlated = np.stack([draws[:, 0], draws[:, 0] + draws[:, 1] / 10], axis=1)
    log_probs = -(draws**2).sum(axis=1) / 2 - math.log(2 * math.pi) + math.log(10) + shift
    assert (stated.wrong_total(correlated, log_probs) is None) == (shift == 0)


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.1])
def test_the_total_of_integers_and_numbers_that_come_with_them(shift):
    """0 or 1; a float where it is 1, and else a constant."""
    draws, coin = rows()[:, 0], rows()[:, 1] > 1
    outputs = {"coin": coin, "number": np.where(coin, draws, 0.0)}
    rate = 0.158655
    log_normal = -(draws**2) / 2 - math.log(math.sqrt(2 * math.pi))
    log_probs = np.where(coin, math.log(rate) + log_normal, math.log(1 - rate)) + shift
    assert (stated.wrong_total(outputs, log_probs) is None) == (shift == 0)


def test_where_no_density_fits_nothing_is_said():
    wide = np.random.default_rng(0).standard_normal((4096, 64))
    assert stated.wrong_total(wide, np.zeros(4096)) is None
    assert stated.wrong_total(np.arange(4096), np.zeros(4096)) is None
    one = rows()[:, :1]
    assert stated.wrong_total(np.concatenate([one, 2 * one], axis=1), np.zeros(20_000)) is None
