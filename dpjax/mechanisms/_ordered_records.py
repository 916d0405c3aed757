"""Records in order, as integers between public bounds, and how far neighbors move a quantile.

A record becomes a number of steps of a public grid above the lower bound. Each record is rounded
and clamped by itself, so neighbors stay neighbors. All later steps are exact in integers.

Let x_1 <= ... <= x_n be the records in order, x_0 the lower bound and x_(n+1) the upper one. After
k replacements, the largest local sensitivity of x_r is

    A_k = max of x_j - x_i over i <= r <= j, j - i = k + 1.

So A_k of a database is at most A_(k+1) of a neighbor (docs/proofs/smooth-quantile.md).
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import count_below


class OrderedRecords(NamedTuple):
    """Records in order, in steps of a grid above the lower bound.

    Attributes:
        steps: int32, shape (n + 2,): 0, the records in order, the upper bound.
        lowest: the lower bound in steps.
        exponent: the grid is 2^exponent.
    """

    steps: jax.Array
    lowest: Limbs
    exponent: jax.Array

    @classmethod
    def of(cls, x: jax.Array, bounds: tuple[float, float], exponent: jax.Array) -> "OrderedRecords":
        """Sorts records, NaN as the lower bound; the bounds are less than 2^31 steps apart."""
        low, high = (round_to_grid(jnp.asarray(bound, float), exponent) for bound in bounds)
        above = _limbs.subtract(round_to_grid(x, exponent), low)
        width = _limbs.subtract(high, low)
        above = _limbs.where(_limbs.less(width, above), width, above)
        outside = _limbs.is_negative(above) | jnp.isnan(x)
        steps = jnp.sort(jnp.where(outside, 0, _limbs.to_integers(above, "int32")))
        top = _limbs.to_integers(width, "int32")
        return cls(jnp.concatenate([jnp.zeros(1, "int32"), steps, top[None]]), low, exponent)

    @property
    def n(self) -> int:
        """The number of records."""
        return self.steps.size - 2

    def absolute(self, steps: jax.Array) -> Limbs:
        """Converts steps above the lower bound to steps above 0."""
        return _limbs.add(self.lowest, _limbs.from_integers(steps))


def rank_of(probability: float, count: int) -> int:
    """The rank of a quantile among the records, as in `dpjax.targets.quantile`."""
    return math.ceil(Fraction(str(probability)) * count)


def smooth_bound(records: OrderedRecords, rank: int, decay: Scalar) -> jax.Array:
    """The largest of 1 and of e^(-k decay) A_k over all k, in steps; at most the width in steps.

    The 1 keeps it smooth. All factors come from one array, and only quotients of neighboring
    factors matter, which are at most e^(decay + 2^-16). Products round monotonically. So one record
    changes the result by a factor of at most e^(decay + 2^-16) (1 + 2^-23).
    """
    steps = records.steps.astype(jnp.float32)  # Exact up to 2^24.
    decay = jnp.asarray(decay, jnp.float32)
    # The first factor is for i = j, where the gap is 0.
    factors = jnp.concatenate([jnp.ones(1, jnp.float32), discounts(decay, records.n)])
    right = steps[rank:]

    def widen(left: jax.Array, best: jax.Array) -> jax.Array:
        gaps = right - steps[rank - left]
        return jnp.maximum(best, jnp.max(gaps * lax.dynamic_slice(factors, (left,), right.shape)))

    # All further factors are below 2^-25. A NaN must not become a number of rounds.
    reach = jnp.where(decay > 0, jnp.minimum(jnp.ceil(18 / decay) + 1, float(rank)), 0)
    return lax.fori_loop(0, reach.astype(jnp.int32) + 1, widen, jnp.float32(1))


def discounts(decay: jax.Array, most: int) -> jax.Array:
    """e^(-k decay) for k = 0, ..., most, in float32."""
    return jnp.exp(-decay * jnp.arange(most + 1, dtype=jnp.float32))


def replacements_until(records: OrderedRecords, rank: int, bound: jax.Array) -> jax.Array:
    """The least k with A_k > bound, in steps; n + 1 if there is none. One record moves it by 1.

    For every i, a binary search finds the first j >= r with x_j - x_i > bound.
    """
    left = records.steps[: rank + 1]
    right = records.steps[rank:]
    first = count_below(right, left + bound, or_equal=True)
    between = first + jnp.arange(rank, -1, -1, dtype=jnp.int32) - 1
    never = jnp.int32(records.n + 1)
    return jnp.min(jnp.where(first < right.size, between, never), initial=never)
