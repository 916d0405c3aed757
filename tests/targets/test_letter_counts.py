"""Letter counts: the encoding, the counts, their bound, and the letter that is selected."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets

NAMES = ["Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov"]
NORMS = {"l1": 1, "l2": 2, "linf": np.inf}


def counts(codes):
    return np.asarray(targets.letter_counts(width=np.shape(codes)[-1])(jnp.asarray(codes)))


def direct(texts):
    tally = collections.Counter("".join(texts).lower())
    return [tally[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]


def test_encoding():
    codes = targets.encode_text(["Abz", "", "a-B c9!", "wxyzabc"], width=4)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(
        codes, [[1, 2, 26, 0], [0, 0, 0, 0], [1, 2, 3, 0], [23, 24, 25, 26]]
    )


def test_every_record_is_encoded_whatever_it_holds():
    texts = ["\u00e9t\u00e9", "\ud800x", "\u0130", None, float("nan"), b"bytes", "\u4e2d", "\0a"]
    codes = targets.encode_text(texts, width=3)
    np.testing.assert_array_equal(codes[:, 0], [20, 24, 9, 0, 0, 0, 0, 1])
    assert targets.encode_text([], width=3).shape == (0, 3)
    np.testing.assert_array_equal(targets.encode_text(iter(["b"]), width=1), [[2]])


def test_counts_are_those_of_python():
    np.testing.assert_array_equal(counts(targets.encode_text(NAMES, width=40)), direct(NAMES))


def test_letters_beyond_the_width_are_cut_off():
    codes = targets.encode_text(NAMES, width=3)
    np.testing.assert_array_equal(counts(codes), direct([name[:3] for name in NAMES]))


def test_other_codes_are_not_counted():
    assert counts(np.array([[0, 27, 255]], np.uint8)).sum() == 0
    assert counts(np.array([[-1, 0, 127]], np.int8)).sum() == 0
    wide = counts(np.full((3, 300), 5, np.int32))
    assert wide.dtype == "int32"
    assert wide[4] == 900


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16", "int32", "uint32"])
def test_codes_of_any_width(dtype):
    codes = jnp.asarray(np.array([[1, 7, 7, 0, 5]], np.uint8)).astype(dtype)
    found = counts(codes)
    assert found.sum() == 4
    assert (found[0], found[4], found[6]) == (1, 1, 2)


@pytest.mark.parametrize("norm", NORMS)
def test_bound_is_attained_and_never_exceeded(norm):
    width = 5
    bound = targets.letter_counts(width=width).sensitivity(norm).value
    others = ["lorem", "ipsum"]

    def moved(text, other):
        one, two = (
            targets.encode_text([*others, x], width=width).astype("int32") for x in (text, other)
        )
        return np.linalg.norm(counts(one) - counts(two), NORMS[norm])

    assert moved("aaaaa", "zzzzz") == pytest.approx(bound, rel=1e-15)
    texts = ["", "aaaaaaaaaa", "ab", "zyxwvutsr", "aazz", "qqqqqx"]
    assert max(moved(x, y) for x in texts for y in texts) <= bound


def test_the_most_frequent_letter_is_selected(key):
    codes = jnp.asarray(targets.encode_text(NAMES * 40, width=20))
    target = targets.letter_counts(width=20)
    sensitivity = target.sensitivity("linf")
    bound = sensitivity.value
    private = dpjax.privatize(target, dpjax.exponential(sensitivity, epsilon=10.0))
    # 'a' leads by 120 counts, so another one is chosen with probability below 25 exp(-30).
    assert np.argsort(direct(NAMES))[-1] == 0
    gaps = 40 * (np.sort(direct(NAMES))[-1] - np.sort(direct(NAMES))[-2])
    assert 25 * np.exp(-10 * gaps / (2 * bound)) < 1e-6
    assert private(key, codes).value == 0


@pytest.mark.slow
def test_sampling_from_public_names(key):
    oracle = dpjax.oracles.resample(targets.encode_text(NAMES, width=20))
    target = targets.letter_counts(width=20)
    sensitivity = dpjax.sample_sensitivity(key, target, oracle, n=10, norm="linf", gamma=0.1)
    # The furthest that two of the names are apart, in the count of one letter; no rounding.
    furthest = max(np.max(np.subtract(direct([x]), direct([y]))) for x in NAMES for y in NAMES)
    assert sensitivity.value == furthest
    assert furthest < target.sensitivity("linf").value
    private = dpjax.privatize(target, dpjax.exponential(sensitivity, epsilon=1.0))
    release = private(key, targets.encode_text([*NAMES, *NAMES], width=20))
    assert 0 <= release.value < 26


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="texts must be a sequence of strings, got str"):
        targets.encode_text("Ada", width=3)
    with pytest.raises(ValueError, match="width"):
        targets.encode_text(["Ada"], width=0)
    with pytest.raises(TypeError, match="width"):
        targets.letter_counts(width=2.5)
    with pytest.raises(ValueError, match="norm must be"):
        targets.letter_counts(width=2).sensitivity("l3")
    with pytest.raises(ValueError, match="width"):
        counts(np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="records must have width 2"):
        targets.letter_counts(width=2)(jnp.ones((3, 4), "int32"))
    with pytest.raises(TypeError, match="integer codes"):
        counts(np.zeros((3, 2), np.float32))
    large = jax.ShapeDtypeStruct((2**28, 8), np.uint8)
    with pytest.raises(ValueError, match="n times the width must be at most 2147483647"):
        jax.eval_shape(targets.letter_counts(width=8), large)
