"""What rounding adds to how far a sum of clipped gradients moves, and sums that are exact.

A sum of b floats of magnitude C may be off by about b^2 eps C, and one record may turn that around.
So no more than a microbatch of examples is added up in floats; sums of microbatches are integers,
of which one record changes one. What is left, relative to C, is charged to the noise.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._exact._grid import power_of_two

# Bits below the clip norm that integers keep.
_BITS = {4: 40, 8: 70}


def slack(leaves: Sequence[jax.Array], *, terms: int, part: int, batch: int, dtype: Any) -> float:
    """How much more than the clip norm one record may move a sum, relative to it.

    Args:
        leaves: of the parameters.
        terms: roundings of a squared norm.
        part: examples of a microbatch, that are added up in floats.
        batch: all examples.
        dtype: the narrowest float of a sum.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    # The norm, the factor and the product; then the sum, in any order, of both neighbors.
    relative = (terms + 16) + 2 * part * (part + 4)
    if batch > part:
        relative += 4 * batch
    dimension = sum(leaf.size for leaf in leaves)
    steps = 2 * math.sqrt(dimension) * 2.0 ** -_BITS[np.dtype(dtype).itemsize]
    return 1.01 * (relative * unit + steps)


def no_digits(shape: tuple[int, ...], dtype: Any, batch: int) -> list[jax.Array]:
    """The digits of zero."""
    integers, _, count = _format(dtype, batch)
    return [jnp.zeros(shape, integers)] * count


def to_digits(x: jax.Array, clip_norm: jax.Array, batch: int) -> list[jax.Array]:
    """A sum of a microbatch as digits, which those of all microbatches may be added to."""
    integers, bits, digits = _format(x.dtype, batch)
    rest = x * power_of_two(bits - _exponent(clip_norm), x.dtype)
    found = []
    for _ in range(digits):
        digit = jnp.round(rest)
        found.append(digit.astype(integers))
        rest = (rest - digit) * power_of_two(bits, x.dtype)
    return found


def from_digits(
    digits: Sequence[jax.Array], clip_norm: jax.Array, batch: int, dtype: Any
) -> jax.Array:
    """The sum that the digits stand for."""
    _, bits, _ = _format(dtype, batch)
    total = jnp.zeros(digits[0].shape, dtype)
    for digit in reversed(digits):
        total = (total + digit.astype(dtype)) * power_of_two(-bits, dtype)
    return total * power_of_two(_exponent(clip_norm), dtype)


def _format(dtype: Any, batch: int) -> tuple[Any, int, int]:
    """The dtype of a digit, its bits, and how many there are."""
    size = np.dtype(dtype).itemsize
    bits = 8 * size - 3 - batch.bit_length()
    return np.dtype(f"int{8 * size}"), bits, math.ceil(_BITS[size] / bits)


def _exponent(clip_norm: jax.Array) -> jax.Array:
    """Of a power of two above the clip norm, and at most twice as large."""
    return jnp.frexp(clip_norm)[1].astype(jnp.int32)
