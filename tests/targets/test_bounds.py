"""Norms of rationals, rounded up and by no more than needed, for the dtype that runs."""

import math
from fractions import Fraction

import jax
import pytest

from dpjax import targets
from dpjax.targets._bounds import norm_up, sqrt_up

EXACT = [
    Fraction(2),
    Fraction(1, 3),
    Fraction(10**40 + 1),
    Fraction(1, 7**90),
    Fraction(math.pi) ** 5,
    Fraction(5e-324),
    9 + Fraction(1, 2**400),  # Its root begins with the digits of a float.
]


@pytest.mark.parametrize("exact", EXACT, ids=lambda exact: f"{float(exact):.3g}")
def test_square_roots_are_the_least_float_above(exact):
    root = sqrt_up(exact)
    assert Fraction(root) ** 2 >= exact
    assert Fraction(math.nextafter(root, 0)) ** 2 < exact


@pytest.mark.parametrize("root", [0.0, 3.0, 0.1, 1e-150, 123456789.125])
def test_square_roots_that_are_floats_are_exact(root):
    assert sqrt_up(Fraction(root) ** 2) == root


def test_norms():
    third = Fraction(1, 3)
    assert norm_up([Fraction(3), Fraction(4)], "l2") == 5
    assert norm_up([Fraction(3), Fraction(4)], "l1") == 7
    assert norm_up([Fraction(3), Fraction(4)], "linf") == 4
    assert 2 * third <= Fraction(norm_up([third] * 2, "l1"))
    assert third <= Fraction(norm_up([third] * 2, "linf"))
    with pytest.raises(ValueError, match="hamming"):
        norm_up([third], "hamming")


def test_float64_records_run_in_float32_where_jax_has_no_float64():
    narrow = targets.bounded_mean_bound(d=1, lower=0, upper=1, n=10**6)
    assert targets.bounded_mean_bound(d=1, lower=0, upper=1, n=10**6, dtype="float64") == narrow
    with jax.enable_x64(True):
        assert targets.bounded_mean_bound(d=1, lower=0, upper=1, n=10**6, dtype="float64") < narrow
