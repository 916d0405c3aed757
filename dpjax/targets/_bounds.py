"""Norms in exact rational arithmetic, rounded up: what analytic bounds are made of."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

from dpjax import _checks
from dpjax._numerics import round_up

VectorNorm = Literal["l1", "l2", "linf"]


def norm_up(magnitudes: Sequence[Fraction], norm: VectorNorm) -> float:
    """The least float64 that is not below the norm of a vector of these magnitudes."""
    _checks.choice("norm", norm, get_args(VectorNorm))
    if norm == "l1":
        return round_up(sum(magnitudes, Fraction(0)))
    if norm == "l2":
        return sqrt_up(sum((x**2 for x in magnitudes), Fraction(0)))
    return round_up(max(magnitudes))


def sqrt_up(exact: Fraction) -> float:
    """The least float64 that is not below the square root of an exact rational."""
    # The integer square root of 2^(2 shift) times the number has more bits than a float64 keeps.
    shift = 128 + max(0, exact.denominator.bit_length() - exact.numerator.bit_length())
    scaled = exact * 4**shift
    root = math.isqrt(math.ceil(scaled))
    root += root**2 < scaled
    return round_up(Fraction(root, 2**shift))
