"""Exact integer sums of clipped gradients, and a bound on the effect of rounding.

The error of a sum of b floats of magnitude C may be about b^2 eps C, and one changed record may
flip the sign of this error. So only the examples of a microbatch are added up in floats. The sums
of microbatches are converted to integers, which are added exactly. Adding or removing a record
changes one microbatch, and replacing it changes two. The remaining error, relative to C, is charged
to the noise. docs/proofs/dp-sgd.md has the proof.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._types import Database, PyTree
from dpjax._exact._grid import power_of_two
from dpjax._exact._numerics import compute_dtype

# The sum of a microbatch, and a count: the number of examples whose gradient is within the clip
# norm, minus the number of the other examples.
Sum = tuple[list[jax.Array], jax.Array]
# The unit of the last digit of a sum is at most 2^(1 - bits) clip norms. These are the bits for
# floats of 4 and of 8 bytes.
_BITS = {4: 40, 8: 70}


def slack(leaves: Sequence[jax.Array], *, terms: int, part: int, batch: int) -> float:
    """Returns rho such that one record changes the computed sum by at most (1 + rho) clip norms.

    With several clip norms, this is true for each of them, and therefore for the root of the sum of
    their squares.

    Args:
        leaves: the leaves of the parameters.
        terms: the number of roundings in a squared norm, of all parameters together.
        part: the number of examples in a microbatch, which are added up in floats.
        batch: the number of all examples.
    """
    narrowest = min((compute_dtype(x.dtype) for x in leaves), key=lambda dtype: dtype.itemsize)
    unit = float(np.finfo(narrowest).eps) / 2
    # `terms + 16` covers the rounding of a norm, of its clipping factor, and of the product of this
    # factor with the gradient. The second summand covers the rounding of the sums of two
    # microbatches: the microbatch with the removed record, and the microbatch with the record that
    # takes its place. Each of the two is summed once on each of the two neighboring databases. Let
    # p be the number of gradients in a microbatch. In each coordinate, p floats are added up. The
    # result of each addition is called a partial sum. The error of the addition is at most one unit
    # of rounding times this partial sum. In each coordinate, sort the partial sums by their number
    # of terms, the longest first. Whatever the order of the additions, the j-th partial sum has at
    # most p - j + 1 terms. The j-th partial sums of all coordinates form a vector. Its norm is at
    # most sqrt(p (p - j + 1)) clip norms. The norms for all j add up to at most 2 / 3 (p + 1)^2
    # clip norms.
    relative = (terms + 16) + 3 * part * (part + 4)
    if batch > part:  # Converting the digits to a float rounds the total of each neighbor.
        relative += 4 * batch
    dims = sum(leaf.size for leaf in leaves)
    # On each of the two neighboring databases, the sums of the same two microbatches are converted
    # to digits. Each of these four conversions rounds the last digit.
    steps = 4 * math.sqrt(dims) * 2.0 ** -_BITS[narrowest.itemsize]
    return 1.01 * (relative * unit + steps)


def root_of_squares(norms: Sequence[jax.Array]) -> jax.Array:
    """Returns the root of the sum of squares, rounded up: the norm bound of several clip norms.

    Let u be the unit of rounding. k squares and k - 1 additions change the sum by a factor of at
    most 1 + k u, and the root halves this error. The root itself adds u on a CPU, and 4 u on a GPU,
    where it may be off by two units in the last place. The multiplication that rounds up adds u.
    Proof: docs/proofs/shorter.md.
    """
    if len(norms) == 1:
        return norms[0]
    total = jnp.sqrt(sum(jnp.square(norm) for norm in norms))
    return total * (1 + (len(norms) + 2) * float(np.finfo(total.dtype).eps))


class Digits(NamedTuple):
    """A format in which sums of microbatches are stored as several integer digits.

    Attributes:
        dtype: the dtype of the sums.
        bits: the number of bits of a digit, small enough that the digits of a whole batch add up
            without overflow.
        length: the number of digits of a number.
        exponent: the integer e for which clip norm < 2^e <= 2 * clip norm.
    """

    dtype: np.dtype
    bits: int
    length: int
    exponent: jax.Array

    @classmethod
    def of(cls, dtype: np.dtype, *, clip_norm: jax.Array, batch: int) -> Self:
        """Returns the format for sums of a dtype.

        Args:
            dtype: the dtype of the sums.
            clip_norm: the clip norm, the same for all sums that are added up.
            batch: the number of all examples.
        """
        bits = 8 * dtype.itemsize - 3 - batch.bit_length()
        exponent = jnp.frexp(jnp.asarray(clip_norm).astype(dtype))[1].astype(jnp.int32)
        return cls(dtype, bits, math.ceil(_BITS[dtype.itemsize] / bits), exponent)

    def write(self, x: jax.Array) -> list[jax.Array]:
        """Converts a sum to digits. The digits of all microbatches can be added."""
        rest = x * power_of_two(self.bits - self.exponent, self.dtype)
        found: list[jax.Array] = []
        for _ in range(self.length):
            digit = jnp.round(rest)
            found.append(digit.astype(f"int{8 * self.dtype.itemsize}"))
            rest = (rest - digit) * power_of_two(self.bits, self.dtype)
        return found

    def read(self, digits: Sequence[jax.Array]) -> jax.Array:
        """Converts digits back to the sum that they represent."""
        total = jnp.zeros(digits[0].shape, self.dtype)
        for digit in reversed(digits):
            total = (total + digit.astype(self.dtype)) * power_of_two(-self.bits, self.dtype)
        return total * power_of_two(self.exponent, self.dtype)


def in_microbatches(
    add_up: Callable[..., tuple[Sum, PyTree]],
    batch: tuple[Database, jax.Array],
    part: int,
    leaves: Sequence[jax.Array],
    written: Sequence[Digits],
) -> tuple[PyTree, PyTree]:
    """Adds up microbatches one after the other as integers, so their order does not matter.

    Padding repeats the first example, with mask False. A microbatch takes slots from the whole
    batch, at equal distances. So if each device stores a contiguous block of the batch, all devices
    work on every microbatch.
    """
    held = len(batch[1])

    def parted(x: jax.Array) -> jax.Array:
        if missing := -held % part:
            first = jnp.zeros_like(x[:1]) if x is batch[1] else x[:1]
            x = jnp.concatenate([x, *[first] * missing])
        return jnp.swapaxes(x.reshape(part, -1, *x.shape[1:]), 0, 1)

    def step(carry: PyTree, microbatch: PyTree) -> tuple[PyTree, PyTree]:
        (total, within), of_records = add_up(*microbatch)
        digits = [x.write(leaf) for x, leaf in zip(written, total, strict=True)]
        return jax.tree.map(jnp.add, carry, (digits, within)), of_records

    def joined(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])[:held]

    pairs = zip(written, leaves, strict=True)
    nothing = [x.write(jnp.zeros(leaf.shape, x.dtype)) for x, leaf in pairs]
    parts = jax.tree.map(parted, batch)
    total, of_records = lax.scan(step, (nothing, jnp.int32(0)), parts)
    return total, jax.tree.map(joined, of_records)
