"""The bits of numbers, against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.auditing import _outputs

FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(np.float32),
    st.floats(allow_nan=False, allow_infinity=False).map(np.float64),
)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1).map(np.int64)


def lowest_set_bit(number):
    """The largest power of two that divides it, by its definition."""
    fraction = Fraction(int(number)) if isinstance(number, np.integer) else Fraction(float(number))
    if fraction == 0:
        return _outputs.NO_BIT
    twos = (fraction.numerator & -fraction.numerator).bit_length() - 1
    return twos - (fraction.denominator.bit_length() - 1)


@given(st.one_of(FLOATS, INTEGERS))
def test_lowest_set_bit_is_that_of_the_fraction(number):
    assert _outputs.lowest_set_bit(np.array([number]))[0] == lowest_set_bit(number)


@given(FLOATS)
def test_binade_is_the_exponent(number):
    if abs(number) >= np.finfo(number.dtype).tiny:
        assert _outputs.binade(np.array([number]))[0] == math.frexp(float(number))[1] - 1


@given(FLOATS, st.data())
def test_a_difference_counts_where_it_can_be_represented(number, data):
    value = data.draw(st.floats(allow_nan=False, allow_infinity=False, width=32))
    value = number.dtype.type(value)
    with np.errstate(over="ignore"):
        difference = number - value
    found = _outputs.lowest_set_bit_of_difference(np.array([number]), np.array([value]))[0]
    exact = Fraction(float(number)) - Fraction(float(value))
    if np.isfinite(difference) and Fraction(float(difference)) == exact:
        assert found == lowest_set_bit(difference)
    else:
        assert found == _outputs.NO_NUMBER


@given(INTEGERS)
def test_low_bits_of_integers_are_remainders(number):
    assert _outputs.low_bits(np.array([number]), 8)[0] == int(number) % 256


def test_low_bits_of_floats_end_the_significand():
    ulp = np.float32(2.0**-23)
    numbers = np.array([1, 1 + ulp, 1 + 255 * ulp, 1 + 256 * ulp, -1 - ulp], np.float32)
    assert _outputs.low_bits(numbers, 8).tolist() == [0, 1, 255, 0, 1]


def test_what_is_not_a_number_has_no_bits():
    strange = np.array([np.nan, np.inf, -np.inf])
    assert set(_outputs.lowest_set_bit(strange)) == {_outputs.NO_NUMBER}
    assert set(_outputs.lowest_set_bit_of_difference(strange, np.zeros(1))) == {_outputs.NO_NUMBER}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "uint64", "float16", "bfloat16"])
def test_every_dtype_becomes_one_with_bits(dtype):
    column = np.array([0, 1, 1, 0]).astype(np.dtype(dtype))
    assert _outputs.lowest_set_bit(_outputs.exact_numbers(column)).tolist() == [
        _outputs.NO_BIT,
        0,
        0,
        4000,
    ]
