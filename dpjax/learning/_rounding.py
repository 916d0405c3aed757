"""What rounding adds to how far a sum of clipped gradients moves, and sums that are exact.

A sum of b floats of magnitude C may be off by about b^2 eps C, and one record may turn the error
around. So only the examples of a microbatch are added up in floats. Sums of microbatches become
integers, and one record changes one of these sums. The rest of the error, relative to C, is charged
to the noise.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._exact._grid import power_of_two
from dpjax._exact._numerics import compute_dtype

# Bits below the clip norm that integers keep.
_BITS = {4: 40, 8: 70}


def slack(leaves: Sequence[jax.Array], *, terms: int, part: int, batch: int) -> float:
    """How much more than the clip norm one record may move a sum, relative to it.

    Args:
        leaves: of the parameters.
        terms: roundings of a squared norm.
        part: examples of a microbatch, that are added up in floats.
        batch: all examples.
    """
    narrowest = min((compute_dtype(x.dtype) for x in leaves), key=lambda dtype: dtype.itemsize)
    unit = float(np.finfo(narrowest).eps) / 2
    # First the norm, the factor and the product. Then the sum: in any order, each of `part`
    # additions is off by a unit of at most (part + 4) clip norms, on both neighbors.
    relative = (terms + 16) + 2 * part * (part + 4)
    if batch > part:  # The total of all digits is rounded as it becomes a float, on both neighbors.
        relative += 4 * batch
    dims = sum(leaf.size for leaf in leaves)
    # One sum of a microbatch differs, and its last digit is rounded on both neighbors.
    steps = 2 * math.sqrt(dims) * 2.0 ** -_BITS[narrowest.itemsize]
    return 1.01 * (relative * unit + steps)


class Digits(NamedTuple):
    """How sums of microbatches are written as integers, digit by digit.

    Attributes:
        dtype: of the sums.
        bits: of a digit. So many digits as the batch has examples add up without overflow.
        length: how many digits a number has.
        exponent: of a power of two above the clip norm, and at most twice as large.
    """

    dtype: np.dtype
    bits: int
    length: int
    exponent: jax.Array

    @classmethod
    def of(cls, dtype: np.dtype, *, clip_norm: jax.Array, batch: int) -> Self:
        """The digits for sums of a dtype.

        Args:
            dtype: of the sums.
            clip_norm: all sums that are added up have the same one.
            batch: all examples.
        """
        bits = 8 * dtype.itemsize - 3 - batch.bit_length()
        exponent = jnp.frexp(jnp.asarray(clip_norm).astype(dtype))[1].astype(jnp.int32)
        return cls(dtype, bits, math.ceil(_BITS[dtype.itemsize] / bits), exponent)

    def write(self, x: jax.Array) -> list[jax.Array]:
        """The digits of a sum; those of all microbatches may be added to them."""
        rest = x * power_of_two(self.bits - self.exponent, self.dtype)
        found: list[jax.Array] = []
        for _ in range(self.length):
            digit = jnp.round(rest)
            found.append(digit.astype(f"int{8 * self.dtype.itemsize}"))
            rest = (rest - digit) * power_of_two(self.bits, self.dtype)
        return found

    def read(self, digits: Sequence[jax.Array]) -> jax.Array:
        """The sum that the digits stand for."""
        total = jnp.zeros(digits[0].shape, self.dtype)
        for digit in reversed(digits):
            total = (total + digit.astype(self.dtype)) * power_of_two(-self.bits, self.dtype)
        return total * power_of_two(self.exponent, self.dtype)
