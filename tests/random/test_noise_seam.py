"""The seam where noise meets values: exact facts, for one key and many values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.random import GAUSSIAN, LAPLACE
from dpjax.random._noise import gumbel
from dpjax.random._release import (
    add_noise,
    centered,
    keep_or_lie,
    noisy_argmax,
    score_gaps,
    usable_scale,
)

BOUND = 2**29
INT32 = st.integers(-(2**31), 2**31 - 1)
INSIDE = st.integers(-(2**28), 2**28)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
SCALES = st.floats(2.0**-10, 2.0**20, width=32)
SEEDS = st.integers(0, 2**32 - 1)
examples = settings(max_examples=50, deadline=None, derandomize=True)


@jax.jit
def laplace(seed, value, scale):
    return add_noise(jax.random.key(seed), value, scale, LAPLACE)


@jax.jit
def gaussian(seed, value, scale):
    return add_noise(jax.random.key(seed), value, scale, GAUSSIAN)


def release(seed, value, scale, draw=laplace):
    return draw(np.uint32(seed), value, np.float32(scale))[()]


# Integers.


@given(SEEDS, INSIDE, INSIDE, SCALES)
@examples
def test_shift_of_an_integer_shifts_its_release(seed, x, y, scale):
    first, second = (int(release(seed, np.int32(v), scale)) for v in (x, y))
    if max(abs(first), abs(second)) < BOUND:
        assert second - first == y - x


@given(SEEDS, SCALES)
@examples
def test_integer_noise_is_the_rounded_real_noise(seed, scale):
    for draw in (laplace, gaussian):
        real = release(seed, np.float32(0), scale, draw)  # The noise itself.
        whole = release(seed, np.int32(0), scale, draw)
        assert int(whole) == int(np.clip(np.rint(float(real)), -BOUND, BOUND))


@given(SEEDS, INT32, INT32, SCALES)
@examples
def test_integers_keep_their_order_and_do_not_move_apart(seed, x, y, scale):
    first, second = (int(release(seed, np.int32(v), scale)) for v in sorted((x, y)))
    assert -BOUND <= first <= second <= BOUND
    assert second - first <= abs(y - x)


# Floats.


@given(SEEDS, FLOATS, FLOATS, SCALES)
@examples
def test_floats_keep_their_order_and_stay_finite(seed, x, y, scale):
    values = sorted(0.0 if np.isnan(v) else v for v in (x, y))
    first, second = (float(release(seed, np.float32(v), scale)) for v in values)
    assert np.isfinite([first, second]).all()
    assert first <= second


@given(SEEDS, st.integers(-1000, 1000), st.integers(-3, 3))
@examples
def test_noise_scales_with_a_power_of_two(seed, x, power):
    plain = release(seed, np.float32(x), 1.0)
    scaled = release(seed, np.float32(x * 2.0**power), 2.0**power)
    assert scaled == plain * 2.0**power


@given(FLOATS)
@examples
def test_values_are_clamped_to_a_public_bound(x):
    bound = float(np.finfo("float32").max) / 2
    expected = 0.0 if np.isnan(x) else np.clip(np.float32(x), -bound, bound)
    assert float(centered(jnp.asarray(x, "float32"))) == expected


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-45])
def test_scale_that_carries_no_noise_gives_no_release(scale):
    assert np.isnan(usable_scale(scale, jnp.float32))
    assert np.isnan(release(0, np.float32(3), scale))
    assert release(0, np.int32(3), scale) == -(2**31)


def test_scale_of_zero_is_used_where_it_was_asked_for_by_name(key):
    value = {"a": jnp.asarray([1.5, -2.0]), "b": jnp.asarray(3)}
    released = jax.jit(lambda x: add_noise(key, x, 0.0, LAPLACE, zero_allowed=True))(value)
    assert released["a"].tolist() == [1.5, -2.0]
    assert released["b"] == 3


def test_every_leaf_has_its_own_noise(key):
    released = jax.jit(lambda x: add_noise(key, x, 1.0, LAPLACE))([jnp.zeros(3)] * 3)
    values = np.concatenate(released).tolist()
    assert len(set(values)) == 9


# Selection.


@given(st.lists(INT32, min_size=4, max_size=4))
@examples
def test_gaps_of_integer_scores_are_exact(scores):
    gaps = score_gaps(jnp.asarray(scores, "int32"))
    assert gaps.tolist() == [float(np.float32(max(scores) - score)) for score in scores]


@given(st.lists(FLOATS, min_size=4, max_size=4))
@examples
def test_gaps_of_float_scores_are_finite_and_ordered(scores):
    gaps = np.asarray(score_gaps(jnp.asarray(scores, "float32")))
    assert np.all(np.isfinite(gaps))
    assert gaps.min() == 0
    ranks = np.nan_to_num(np.array(scores, "float32"), nan=-np.inf)
    order = np.argsort(ranks)
    assert np.all(np.diff(gaps[order]) <= 0)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "uint32", "bfloat16", "float16"])
def test_gaps_of_any_real_dtype(dtype):
    scores = jnp.asarray([0, 1, 0, 1]).astype(dtype)
    assert score_gaps(scores).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert score_gaps(scores).dtype == "float32"


@given(SEEDS, st.lists(st.integers(-1000, 1000), min_size=4, max_size=4), INSIDE)
@examples
def test_shift_of_all_scores_selects_the_same(seed, scores, shift):
    chosen = [select(np.uint32(seed), np.array(scores, "int32") + s) for s in (0, shift)]
    assert chosen[0] == chosen[1]


@jax.jit
def select(seed, scores):
    return noisy_argmax(jax.random.key(seed), scores, 10.0, gumbel)


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf])
def test_temperature_that_carries_no_noise_selects_nothing(temperature, key):
    assert noisy_argmax(key, jnp.asarray([1.0, 2.0]), temperature, gumbel) == -1


# Randomized response.


@given(SEEDS, INT32, st.integers(2, 2**15), st.integers(1, 2**17 - 1))
@examples
def test_answers_stay_in_range_and_each_word_gives_each_truth_its_own(seed, truth, count, weight):
    answer = int(keep_or_lie(jax.random.key(seed), jnp.asarray(truth), np.uint32(weight), count))
    assert 0 <= answer < count


def test_lies_are_a_bijection_of_words(key):
    # With one word, the answers for all truths: those that lie give no truth away.
    @jax.jit
    @jax.vmap
    def answers_to_every_truth(key):
        return jax.vmap(lambda truth: keep_or_lie(key, truth, weight, 4))(jnp.arange(4))

    weight = np.uint32(2**32 // 5)
    lied = np.asarray(answers_to_every_truth(jax.random.split(key, 500))) != np.arange(4)
    # Whether it lies depends on the word alone, not on the truth.
    assert np.all(lied == lied[:, :1])
    assert 0.5 < lied[:, 0].mean() < 0.7


def test_weight_of_zero_gives_no_answer(key):
    assert keep_or_lie(key, jnp.asarray([0, 1]), np.uint32(0), 2).tolist() == [-1, -1]
