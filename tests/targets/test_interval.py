"""Clamping to public intervals: never outside, never NaN."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.targets._clamping import check_interval, clamp

EXTREMES = [-np.inf, -1e30, 0.1, 0.2, 0.3, 1e30, np.inf, np.nan]


def clamped(x, lower, upper):
    return np.asarray(clamp(jnp.asarray(x), lower, upper))


@pytest.mark.parametrize(
    ("lower", "upper"), [(0.1, 0.3), (0.7, 0.9), (-0.3, -0.1), (-1e300, 1e300), (1 / 3, 2 / 3)]
)
def test_float32_never_leaves_the_exact_interval(lower, upper):
    inside = clamped(np.float32(EXTREMES), lower, upper)
    assert inside.dtype == "float32"
    assert all(Fraction(lower) <= Fraction(float(x)) <= Fraction(upper) for x in inside)
    # Both ends are reached, but for a rounding.
    np.testing.assert_allclose(inside.min(), max(lower, -3.4028235e38), rtol=2e-7)
    np.testing.assert_allclose(inside.max(), min(upper, 3.4028235e38), rtol=2e-7)


def test_nan_counts_as_lower():
    np.testing.assert_array_equal(clamped(np.float32([np.nan, 7, -7]), -2, 3), [-2, 3, -2])


def test_integers_and_booleans_become_floats(x64):
    for x in (np.array([1, 5], "int32"), np.array([True, False]), np.array([0.5], "float16")):
        assert clamped(x, 0, 3).dtype == ("float32" if x.dtype == "float16" else "float64")
    np.testing.assert_array_equal(clamped([0.1, 0.3], 0.1, 0.3), [0.1, 0.3])
    np.testing.assert_array_equal(clamped([9, 300], np.uint8(0), np.uint8(10)), [9, 10])
    np.testing.assert_array_equal(clamped([0, -300], -200, np.int8(-128)), [-128, -200])


def test_an_interval_without_a_float32_is_refused():
    for lower, upper in ((1 + 1e-12, 1 + 2e-12), (1e39, 1e40)):
        with pytest.raises(ValueError, match="float32 number between"):
            clamped(np.float32([1]), lower, upper)


@pytest.mark.parametrize(
    ("lower", "upper", "error", "message"),
    [
        (1, 1, ValueError, "lower must be below upper, got 1 and 1"),
        (2, 1, ValueError, "lower must be below upper, got 2 and 1"),
        (-np.inf, 1, ValueError, "lower must be a finite number, got -inf"),
        (0, np.nan, ValueError, "upper must be a finite number, got nan"),
        (None, 1, TypeError, "lower must be a finite number, got None"),
        (0, True, TypeError, "upper must be a finite number, got True"),
        (0, "1", TypeError, "upper must be a finite number, got '1'"),
        (0, [1], TypeError, "upper must be a finite number"),
    ],
)
def test_bad_intervals_are_refused(lower, upper, error, message):
    with pytest.raises(error, match=message):
        check_interval(lower, upper)
