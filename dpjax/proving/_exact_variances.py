"""Variances and covariances of records, from exact sums of numbers and of their products.

Let a_j be record j minus a public center, rounded to a grid, and b_j its square, also rounded to a
grid. The program computes (sum b_j - (sum a_j)^2 / n) / divisor from exact sums. If one record
changes, no other a_j or b_j changes. In a float variance, the mean would change, so all squares
would be rounded differently.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.proving import _exact_sums as exact_sums
from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, Pending, RefusalError, make

_MOST = 60
# All columns share one center and one grid. The largest distance of a number from the center may be
# at most this many times the width of the narrowest column.
_MOST_UNLIKE = 2.0**10


@dataclasses.dataclass(frozen=True)
class ExactVariance(exact_sums.Named):
    """The variances of columns, or their covariance matrix, over the first axis.

    Attributes:
        center: a public number near the middle of the range.
        exponent: all numbers are within 2^exponent of the center.
        divisor: n, or n minus a correction.
        matrix: whether the result is the covariance matrix of the columns, instead of their
            variances.
    """

    center: float
    exponent: int
    divisor: float
    matrix: bool = False
    title: ClassVar = "exact variance"

    def compute(self, x: jax.Array) -> jax.Array:
        y = lax.convert_element_type(x, jnp.float64) - self.center
        squares = y[:, :, None] * y[:, None, :] if self.matrix else y * y
        n, exponents = len(x), (self.exponent, 2 * self.exponent)
        steps = [exact_sums.steps_of(z, e, n) for z, e in zip((y, squares), exponents, strict=True)]
        if self.matrix:
            sums = [z for one in steps for z in exact_sums.sums_over([one], (0,))]
        else:
            sums = exact_sums.sums_over(steps, (0,))
        total, whole = (
            exact_sums.total_of_steps(z, e, n) for z, e in zip(sums, exponents, strict=True)
        )
        outer = total[:, None] * total[None] if self.matrix else total * total
        rest = whole - outer / n
        found = rest / self.divisor
        if not self.matrix:
            found = lax.max(found, lax.full_like(found, 0.0))
        return lax.convert_element_type(found, x.dtype)

    def value(self, x: Abstract) -> Abstract:
        """Returns the abstract value of an exact variance or covariance matrix.

        docs/proofs/global-sensitivity.md has the proof.
        """
        n, divisor = x.shape[0], self.divisor
        top = 2.0**self.exponent
        by_record = x.axis == 0 and x.others.is_zero and not x.nan and x.is_finite
        if not by_record or x.pending.coarse or (len(x.shape) > 2 and self.matrix):
            raise RefusalError("proofs support an exact variance only over the axis of the records")
        if not (
            _largest(x, self.center) <= top and 1 <= divisor <= n and abs(self.exponent) <= _MOST
        ):
            raise RefusalError(
                "the records or the divisor are outside of the range that this exact variance "
                "supports"
            )
        if 2 * (x.pending.bits + abs(self.exponent)) + _MOST > rounding.most_bits(
            exact_sums.FLOAT64
        ):
            raise RefusalError(
                "the public numbers that multiply the records in a variance have a product that "
                "may overflow. Rescale the records"
            )
        apart = x.apart + 4 * 2.0**-53 * top
        off = apart + exact_sums.step_of(self.exponent, n) / 2
        square_apart = 2 * top * apart + apart**2 + 4 * 2.0**-53 * top**2
        square_off = square_apart + exact_sums.step_of(2 * self.exponent, n) / 2
        # `loose` bounds |b_j - a_j^2|.
        loose = square_off + 2 * top * off + off**2
        low, high = x.low.min(axis=0), x.high.max(axis=0)
        width = rounding.up(np.broadcast_to(high - low + 2 * off, x.changed.each[0].shape))
        still = np.broadcast_to(x.changed.each[0] == 0, width.shape)
        l2 = math.inf
        if self.matrix:
            width = np.broadcast_to(width, x.shape[1:])
            still = np.broadcast_to(still, width.shape)
            still, products = still[:, None] & still, rounding.up(width[:, None] * width)
        else:
            products = rounding.up(width**2)
        share = (n - 1) / n / divisor
        largest = rounding.up(products * (n / divisor) / 4 + loose * n / divisor)
        error = 8 * exact_sums.OF_FLOAT64 * n * top**2 / divisor + 4 * rounding.tiny(x.dtype)
        error = error + exact_sums.nearest(np.maximum(largest, 2.0**-500), rounding.unit(x.dtype))
        slip = rounding.up(2 * loose / divisor + 2 * error)
        each = np.where(still, 0.0, rounding.up(products * share + slip))
        if self.matrix:
            radius = x.l2_of_row + off * math.sqrt(math.prod(x.shape[1:]))
            whole = min(float(rounding.norm2(width)) ** 2, 4 * radius**2)
            l2 = float(rounding.up(whole * share + rounding.norm2(np.where(still, 0.0, slip))))
        moved, high = (each, math.inf, l2), rounding.up(largest + error)
        return make(
            each.shape if self.matrix else x.shape[1:], x.dtype, -high if self.matrix else 0 * high,
            high, None, moved, moved, pending=Pending().having(**Pending.flags([x.pending])),
        )  # fmt: skip


def planned(x: Abstract, divisor: float, *, matrix: bool = False) -> ExactVariance | None:
    """Returns how to compute a variance of x exactly; None if it stays a variance of floats."""
    if not (exact_sums.worth_it(x.n, x.dtype) and 1 <= divisor <= x.n) or (
        matrix and len(x.shape) != 2
    ):
        return None
    center = float((x.low.min() + x.high.max()) / 2)
    largest = _largest(x, center)
    moving = (x.high.max(axis=0) - x.low.min(axis=0))[x.changed.each[0] > 0]
    exponent = math.frexp(largest)[1]
    if not abs(exponent) <= _MOST or not largest <= _MOST_UNLIKE * moving.min(initial=math.inf):
        return None
    return ExactVariance(center, exponent, divisor, matrix)


def _largest(x: Abstract, center: float) -> float:
    """Bounds the distance of numbers from the center, including the rounding of the difference."""
    return float(np.maximum(np.abs(x.low - center), np.abs(x.high - center)).max()) * (1 + 2.0**-18)
