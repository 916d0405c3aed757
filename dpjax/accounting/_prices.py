"""Costs of releases as integers, in the units of a ledger; conversion to and from decimals."""

import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TypeAlias

from dpjax._core import _checks
from dpjax._core._values import Guarantee
from dpjax._exact._numerics import round_up
from dpjax._files._ledger_file import DELTA_DIGITS, EPSILON_DIGITS, BudgetExceededError, decimal

# The largest number of digits before or after the decimal point that is accepted. No float64 is
# printed with as many digits.
_MOST_DIGITS = 400


Amount: TypeAlias = tuple[int, int]
"""Epsilon and delta, in units of 10^-12 and 10^-24."""


def cost_of(promised: Guarantee) -> Amount:
    """Returns the cost of a guarantee, rounded up. Raises an error if no budget can pay for it."""
    if not (math.isfinite(promised.epsilon) and promised.delta < 1):
        raise BudgetExceededError(
            f"release must have a finite epsilon and a delta below 1, got {promised}"
        )
    return (
        units("epsilon", promised.epsilon, EPSILON_DIGITS, math.ceil),
        units("delta", promised.delta, DELTA_DIGITS, math.ceil),
    )


def units(name: str, value: object, digits: int, rounded: Callable[[Fraction], int]) -> int:
    """Converts a number to a multiple of 10^-digits, rounded by the function `rounded`.

    A float counts as the decimal that Python prints for it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise TypeError(
            f"{name} must be a Python number, a string or a Decimal, got {_checks.shown(value)}"
        )
    try:
        exact = Decimal(str(float(value)) if isinstance(value, float) else value)
    except InvalidOperation as error:
        raise ValueError(f"{name} must be a number, got {_checks.shown(value)}") from error
    if not exact.is_finite() or abs(exact.adjusted()) > _MOST_DIGITS:
        raise ValueError(f"{name} must be a finite number in the range of floats, got {value}")
    return rounded(Fraction(exact) * 10**digits)


def as_decimals(epsilon: int, delta: int) -> tuple[Decimal, Decimal]:
    return Decimal(decimal(epsilon, EPSILON_DIGITS)), Decimal(decimal(delta, DELTA_DIGITS))


def as_float(units: int, digits: int) -> float:
    """Returns the float64 nearest to `units` times 10^-digits.

    If Python prints the nearest float64 as a smaller decimal, the result is rounded up instead.
    """
    exact = Fraction(units, 10**digits)
    nearest = float(exact)
    return nearest if Fraction(repr(nearest)) >= exact else round_up(exact)


def float_down(exact: Fraction) -> float:
    """Returns the nearest float64.

    If Python prints the nearest float64 as a decimal above `exact`, the result is the next smaller
    float64 instead.
    """
    nearest = float(exact)
    return nearest if Fraction(repr(nearest)) <= exact else math.nextafter(nearest, 0)
