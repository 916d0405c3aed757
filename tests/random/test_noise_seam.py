"""The seam where noise meets values: exact facts, for one key and many values."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax._exact._limbs import Limbs
from dpjax.random import GAUSSIAN, LAPLACE, seeded_key
from dpjax.random._grid_fit import Calibration, GridFit, divided
from dpjax.random._noise import EXPONENTIAL
from dpjax.random._release import (
    add_noise,
    clamped,
    keep_or_lie,
    largest_value,
    usable_scale,
)
from dpjax.random._selected_index import exponential_index, permute_and_flip_index, score_gaps

INT32 = st.integers(-(2**31), 2**31 - 1)
INSIDE = st.integers(-(2**28), 2**28)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
SCALES = st.floats(2.0**-10, 2.0**20, width=32)
SEEDS = st.integers(0, 2**32 - 1)
examples = settings(max_examples=50, deadline=None, derandomize=True)


def calibration(scale, *, coordinates=1, rounding=None, epsilon=1.0, zero_allowed=False):
    rounding = float(coordinates) if rounding is None else rounding
    return Calibration(scale, scale, epsilon, rounding, coordinates, zero_allowed)


@jax.jit
def laplace(seed, value, scale):
    return add_noise(
        jax.random.wrap_key_data(jnp.full(8, seed), impl=KIND), value, calibration(scale), LAPLACE
    )


@jax.jit
def gaussian(seed, value, scale):
    return add_noise(
        jax.random.wrap_key_data(jnp.full(8, seed), impl=KIND), value, calibration(scale), GAUSSIAN
    )


KIND = jax.random.key_impl(seeded_key(0))


def release(seed, value, scale, draw=laplace):
    return draw(np.uint32(seed), value, np.float32(scale))[()]


# Integers.


@given(SEEDS, INSIDE, INSIDE, SCALES)
@examples
def test_shift_of_an_integer_shifts_its_release(seed, x, y, scale):
    first, second = (int(release(seed, np.int32(v), scale)) for v in (x, y))
    assert second - first == y - x


@given(SEEDS, INT32, INT32, SCALES)
@examples
def test_integers_keep_their_order_and_do_not_move_apart(seed, x, y, scale):
    first, second = (int(release(seed, np.int32(v), scale)) for v in sorted((x, y)))
    assert -(2**31) + 2 <= first <= second <= 2**31 - 2
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


@given(SEEDS, st.integers(-(2**20), 2**20))
@examples
def test_shift_by_the_grid_shifts_the_release(seed, steps):
    grid = 2.0 ** int(calibration(1.0).fit(LAPLACE.lattice, jnp.float32).exponent)
    first, second = (release(seed, np.float32(x * grid), 1.0) for x in (0, steps))
    assert second - first == steps * grid


@given(SEEDS, FLOATS)
@examples
def test_releases_are_points_of_the_grid(seed, x):
    grid = 2.0 ** int(calibration(1.0).fit(LAPLACE.lattice, jnp.float32).exponent)
    released = float(release(seed, np.float32(x), 1.0))
    assert released / grid == np.rint(released / grid)


@given(FLOATS)
@examples
def test_values_are_clamped_to_a_public_bound(x):
    bound = np.float32(largest_value(jnp.float32, calibration(1e-20), LAPLACE))
    assert 1e3 < bound < 1e4
    expected = 0.0 if np.isnan(x) else np.clip(np.float32(x), -bound, bound)
    # XLA may flush what is below the least normal number.
    found = float(clamped(jnp.asarray(x, "float32"), bound))
    assert found == expected or (found == 0 and abs(expected) < np.finfo(np.float32).tiny)
    assert release(0, np.float32(x), 1e-20) == release(0, expected, 1e-20)


@given(SEEDS, FLOATS, st.sampled_from([0, 50, 70, 93]))
@examples
def test_what_is_in_range_is_shifted_by_the_noise_of_zero(seed, x, steps):
    """The noise of a key does not depend on the value, up to 2^93 steps of the grid."""
    grid = 2.0 ** int(calibration(1.0).fit(LAPLACE.lattice, jnp.float32).exponent)
    x = np.float32(np.sign(np.nan_to_num(x)) * grid * 2.0**steps)
    noise = Fraction(float(release(seed, np.float32(0), 1.0)))
    released = Fraction(float(release(seed, x, 1.0)))
    assert abs(released - (Fraction(float(x)) + noise)) <= abs(released) * Fraction(1, 2**23)


def test_a_million_coordinates_reach_far(key):
    """The control of a smaller range: 2,000,000 at a scale of .001 came out as 524,288."""
    many = Calibration(1e-3, 1e-3, 1.0, 1e6, 10**6)
    released = add_noise(key, jnp.asarray([2e6, 1e14, -1e15]), many, LAPLACE)
    np.testing.assert_allclose(released, [2e6, 1e14, -1e15], rtol=1e-6)
    assert largest_value(jnp.float32, many, LAPLACE) >= 2.0**60 * 1e-3


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-45])
def test_scale_that_carries_no_noise_gives_no_release(scale):
    assert np.isnan(usable_scale(scale, jnp.float32))
    assert np.isnan(release(0, np.float32(3), scale))
    assert release(0, np.int32(3), scale) == -(2**31)


def test_scale_of_zero_is_used_where_it_was_asked_for_by_name(key):
    value = {"a": jnp.asarray([1.5, -2.0]), "b": jnp.asarray(3)}
    silent = calibration(0.0, coordinates=3, zero_allowed=True)
    released = jax.jit(lambda x: add_noise(key, x, silent, LAPLACE))(value)
    assert released["a"].tolist() == [1.5, -2.0]
    assert released["b"] == 3


def test_every_leaf_has_its_own_noise(key):
    wide = calibration(1.0, coordinates=9)
    released = jax.jit(lambda x: add_noise(key, x, wide, LAPLACE))([jnp.zeros(3)] * 3)
    values = np.concatenate(released).tolist()
    assert len(set(values)) == 9


# The fit: the scale on the grid covers rounding and tables, at every size.


def covered(made, lattice, nominal):
    """The exact scale of the integer noise, against what the charge asks for."""
    fit = made.fit(lattice, jnp.float32)
    grid = Fraction(2) ** int(fit.exponent)
    divisor = int(fit.divisor) << int(fit.shift)
    drawn = Fraction(lattice.resolution) * grid / divisor
    charge = 1 + Fraction(made.rounding) * grid / Fraction(made.sensitivity)
    loss = made.coordinates * Fraction(lattice.certificate.loss)
    certified = 1 / (1 - 2 * loss / Fraction(made.epsilon))
    assert drawn >= Fraction(nominal) * charge * certified
    assert float(fit.scale) == pytest.approx(float(drawn), rel=1e-6)
    return float(drawn / Fraction(nominal))


@given(st.floats(1e-20, 1e20), st.sampled_from([1, 10, 1000, 10**6]))
@examples
def test_scale_covers_rounding(scale, coordinates):
    for lattice, rounding in (
        (LAPLACE.lattice, float(coordinates)),
        (GAUSSIAN.lattice, math.sqrt(coordinates)),
        (EXPONENTIAL, 1.0),
    ):
        made = calibration(scale, coordinates=coordinates, rounding=rounding)
        lost = covered(made, lattice, np.float32(scale).item()) - 1
        # As `effective_scale` states it.
        assert lost < 1e-4 + 2.5 * math.sqrt(rounding / lattice.resolution)
        # Below .01% for scalars and .1% for vectors of a million, as the README says.
        assert lost < (1e-4 if coordinates == 1 else 1e-3)
        assert made.fits(lattice, jnp.float32)


@given(st.floats(-14, 5), st.floats(0, 20), st.floats(0.5, 2))
@examples
def test_scale_covers_rounding_at_any_epsilon(log_epsilon, log_coordinates, sensitivity):
    """Epsilons of 2^-14 to 2^5, up to 2^20 coordinates: what `effective_scale` states."""
    epsilon, coordinates = 2.0**log_epsilon, int(2**log_coordinates)
    for lattice, rounding in ((LAPLACE.lattice, coordinates), (GAUSSIAN.lattice, 1.0)):
        scale = np.float32(sensitivity / epsilon).item()
        made = Calibration(scale, sensitivity, epsilon, float(rounding), coordinates)
        charge = 1e-4 + 2.5 * math.sqrt(scale * rounding / sensitivity / lattice.resolution)
        if charge < 0.1 and 4 * coordinates * lattice.certificate.loss < 1e-6 * epsilon:
            assert covered(made, lattice, scale) - 1 < charge


@pytest.mark.parametrize(
    ("lattice", "coordinates"), [(LAPLACE.lattice, 2**30), (GAUSSIAN.lattice, 2**25)]
)
def test_scale_covers_the_tables(lattice, coordinates):
    """Where they cost a sixteenth of epsilon; above, all that shows is what rounding costs."""
    made = Calibration(2.0**16, 1.0, 2.0**-16, 1.0, coordinates)
    assert 1 / 15 <= covered(made, lattice, 2.0**16) - 1 < 1 / 14


@given(st.floats(-90, -1), st.integers(0, 30), st.floats(0.01, 20))
@examples
def test_delta_covers_what_the_tables_miss(log_delta, log_coordinates, epsilon):
    """2^-24 of delta and of 1 - delta is left for it; above .9 for what the scale cannot cover."""
    made = Calibration(1.0, 1.0, epsilon, 1.0, 2**log_coordinates)
    certificate = GAUSSIAN.lattice.certificate
    missed = made.coordinates * (1 + Fraction(math.exp(epsilon))) * Fraction(certificate.delta)
    for delta in (2.0**log_delta, 1 - 2.0 ** (log_delta / 3)):
        uncovered = made.coordinates * Fraction(certificate.loss) if delta > 0.9 else 0
        left = min(Fraction(delta), 1 - Fraction(delta)) / 2**24
        if made.covers(GAUSSIAN.lattice, delta, np):
            assert missed + uncovered <= left
        else:
            assert 8 * (missed + uncovered) > left


@given(st.floats(0, 41))
@examples
def test_noise_on_integers_is_as_large_as_stated(log_scale):
    scale = np.float32(2.0**log_scale).item()
    fit = calibration(scale, rounding=0.0).fit(LAPLACE.lattice, jnp.int32)
    drawn = Fraction(LAPLACE.lattice.resolution) / (int(fit.divisor) << int(fit.shift))
    assert 0 <= drawn / Fraction(scale) - 1 < 1e-4 + 2 * scale / LAPLACE.lattice.resolution


@jax.jit
def quotient(high, low, divisor, shift):
    fit = GridFit(jnp.int32(0), divisor, shift, jnp.float32(1))
    return divided(Limbs(high, low), fit)


@given(st.integers(-(2**62), 2**62), st.integers(1, 2**16 - 1), st.integers(0, 34))
@examples
def test_noise_is_rounded_to_the_grid_halves_up(noise, divisor, shift):
    points = divisor << shift
    half = noise // points * points + points // 2
    for whole in (noise, half):
        limbs = np.uint32(whole >> 32 & 0xFFFFFFFF), np.uint32(whole & 0xFFFFFFFF)
        high, low = map(int, quotient(*limbs, np.uint32(divisor), np.uint32(shift)))
        rounded = math.floor(Fraction(whole, points) + Fraction(1, 2))
        assert high << 32 | low == rounded % 2**64


@pytest.mark.slow
def test_no_grid_for_too_many_coordinates(key):
    made = Calibration(1e9, 1.0, 1e-9, 1e9, 10**9)
    assert not made.fits(LAPLACE.lattice, jnp.float32)
    assert np.isnan(made.fit(LAPLACE.lattice, jnp.float32).scale)
    released = add_noise(key, jnp.zeros(2), dataclasses.replace(made), LAPLACE)
    assert np.all(np.isnan(released))


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
    for index in range(2):
        chosen = [select(np.uint32(seed), np.array(scores, "int32") + s)[index] for s in (0, shift)]
        assert chosen[0] == chosen[1]


@jax.jit
def select(seed, scores):
    key = jax.random.wrap_key_data(jnp.full(8, seed), impl=KIND)
    made = calibration(10.0, coordinates=2, rounding=0.0)
    return exponential_index(key, scores, made), permute_and_flip_index(key, scores, made)


@functools.partial(jax.jit, static_argnums=3)
def selected(key, scores, temperature, index):
    return index(key, scores, calibration(temperature))


@pytest.mark.parametrize("index", [exponential_index, permute_and_flip_index])
@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf])
def test_temperature_that_carries_no_noise_selects_nothing(index, temperature, key):
    assert selected(key, jnp.asarray([1.0, 2.0]), np.float32(temperature), index) == -1


@pytest.mark.parametrize(
    "index", [pytest.param(exponential_index, marks=pytest.mark.slow), permute_and_flip_index]
)
def test_unlikely_options_are_possible(index, key):
    """Beyond a gap of 20.4 float Gumbel noise never selects: here the tail goes on."""
    made = calibration(1.0, coordinates=2, rounding=0.0)
    scores = jnp.asarray([8, 0], jnp.int32)
    drawn = jax.jit(jax.vmap(lambda k: index(k, scores, made)))(jax.random.split(key, 200_000))
    drawn = np.asarray(drawn)
    flipped = index is permute_and_flip_index
    expected = 200_000 * math.exp(-8) * (0.5 if flipped else 1 / (1 + math.exp(-8)))
    assert abs(np.sum(drawn) - expected) < 5 * math.sqrt(expected)


# Randomized response.


@given(SEEDS, INT32, st.integers(2, 2**15), st.integers(1, 2**17 - 1))
@examples
def test_answers_stay_in_range_and_each_word_gives_each_truth_its_own(seed, truth, count, weight):
    answer = int(keep_or_lie(seeded_key(seed), jnp.asarray(truth), np.uint32(weight), count))
    assert 0 <= answer < count


@pytest.mark.slow
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
