"""Ranges hold what is computed, also at their end nearest to 0.

A comparison with a number that no value is thought to reach counts as public, so a range that is
too narrow by one rounding loses all of a jump. What else reaches `lipschitz` is here: sums,
products, quotients, powers and casts, with signs of both kinds.
"""

from fractions import Fraction

import numpy as np
import pytest

from dpjax.proving import _choices as choices
from dpjax.proving import _elementwise as elementwise
from dpjax.proving import _functions as functions
from dpjax.proving import _lemmas as lemmas
from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, Difference, RefusalError, constant

FLOAT = np.dtype(np.float32)
COUNT = 20_000


def known(numbers):
    """Intervals of one number each, which may move."""
    none = Difference(np.zeros(numbers.shape), 0.0, 0.0)
    numbers = numbers.astype(float)
    return Abstract(numbers.shape, FLOAT, numbers, numbers, None, none, none, apart=0.0)


def drawn(seed):
    rng = np.random.default_rng(seed)
    numbers = rng.uniform(1, 2, COUNT) * 2.0 ** rng.integers(-6, 6, COUNT)
    return (numbers * rng.choice([-1, 1], COUNT)).astype(np.float32)


A, B = drawn(0), drawn(1)
POSITIVE = np.abs(A)
OPERATIONS = {
    "add": (A + B, lambda: elementwise.add(known(A), known(B))),
    "sub": (A - B, lambda: elementwise.add(known(A), known(B), sign=-1)),
    "mul": (A * B, lambda: elementwise.multiply(known(A), known(B))),
    "div": (A / B, lambda: elementwise.quotient(known(A), known(B))),
    "square": (A * A, lambda: elementwise.SQUARE(known(A))),
    "cube": (A * A * A, lambda: elementwise.integer_power(known(A), 3)),
    "ninth power": (
        A * np.square(np.square(A * A)),
        lambda: elementwise.integer_power(known(A), 9),
    ),
    "reciprocal": (
        np.float32(1) / (A * A), lambda: elementwise.integer_power(known(A), -2)
    ),
    "power": (
        POSITIVE ** np.float32(1.7),
        lambda: functions.power(known(POSITIVE), constant(np.float32(1.7))),
    ),
    "cast": (
        (A.astype(float) * (1 + 2.0**-25)).astype(np.float32),
        lambda: choices.convert(known64(A.astype(float) * (1 + 2.0**-25)), FLOAT),
    ),
}  # fmt: skip


def known64(numbers):
    none = Difference(np.zeros(numbers.shape), 0.0, 0.0)
    return Abstract(
        numbers.shape, np.dtype(float), numbers, numbers, None, none, none, apart=0.0
    )  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_range_of_one_exact_number_holds_the_computed_one(name):
    """Of 20,000 numbers about half are rounded toward 0, and half away from it."""
    computed, rule = OPERATIONS[name]
    found = rule()
    assert (found.low <= computed).all()
    assert (computed <= found.high).all()
    # And a range is no wider than what is charged, so that it says something.
    assert (found.high - found.low).max() <= 2.0**-10 * np.abs(computed).max()


def test_no_relative_error_reaches_all_digits():
    x = known(POSITIVE)
    for relative in (1.0, 2.0, np.inf, np.nan):
        with pytest.raises(RefusalError, match="all digits"):
            elementwise.lipschitz((x,), (x.low, x.high), (1.0,), relative=relative)


@pytest.mark.parametrize("error", [2.0**-30, 2.0**-8, 0.024, 2.0**-4, 1 / 15, 0.3, 1 / 3])
def test_a_quotient_of_two_numbers_that_are_off(error):
    """2.05 times the error, as one might think, is too little from 2.4% on."""
    exact = Fraction(error)
    u = Fraction(rounding.unit(FLOAT))
    most = (1 + exact) / (1 - exact) * (1 + rounding.DIVISION * u) - 1
    assert most <= Fraction(rounding.of_quotient(error, FLOAT)) * (1 + Fraction(2) ** -44)
    least = 1 - (1 - exact) / (1 + exact) * (1 - rounding.DIVISION * u)
    assert least <= Fraction(rounding.of_quotient(error, FLOAT))


LEMMAS = {
    "softmax": lambda x: lemmas.softmax(x, (0,)),
    "log_softmax": lambda x: lemmas.log_softmax(x, (0,)),
    "logsumexp": lambda x: lemmas.logsumexp(x, (0,)),
}


@pytest.mark.parametrize("lemma", LEMMAS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_lemma_charges_what_the_functions_in_it_may_be_off_by(dtype, lemma):
    """128 units in float32, and 1024 in float64."""
    dtype, moves = np.dtype(dtype), Difference(np.ones(3), 3.0, 2.0)
    x = Abstract((3,), dtype, np.zeros(3), np.ones(3), None, moves, moves, apart=0.0)
    units = LEMMAS[lemma](x).apart / rounding.unit(dtype) / 2
    assert rounding.elementary(dtype) == (1024 if dtype.itemsize == 8 else 128)
    assert units >= 2 * rounding.elementary(dtype)
