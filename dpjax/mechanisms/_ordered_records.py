"""Records between public bounds as integers in order, and how far neighbors can move a quantile.

A record becomes a number of steps of a public grid above the lower bound. Rounding and clamping act
on each record by itself, so neighbors stay neighbors, and all that follows is exact in integers.

Let x_1 <= ... <= x_n be the records in order, x_0 the lower bound and x_(n+1) the upper one. After
k replacements

    A_k = max of x_j - x_i over i <= r <= j, j - i = k + 1

is the largest local sensitivity of x_r, so A_k of a database is at most A_(k+1) of a neighbor
(docs/proofs/smooth-quantile.md).
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Value
from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype

# Bounds whose distance is this small a part of them would leave no room for a grid.
_NEAREST = 2.0**-20
_LEAST_WIDTH, _LARGEST_WIDTH = 1e-25, 1e25


def rounding_of_a_release(magnitude: Scalar) -> Scalar:
    """How far the last rounding, to float32, moves a release of at most this magnitude.

    That is half a unit in the last place. The other half covers the rounding of the bound itself.
    """
    return magnitude * float(jnp.finfo(jnp.float32).eps)


class OrderedRecords(NamedTuple):
    """Records in order, in steps of a grid above the lower bound.

    Attributes:
        steps: int32, shape (n + 2,): 0, the records in order, the upper bound.
        lowest: the lower bound in steps.
        exponent: the grid is 2^exponent.

    Formal guarantees:
        None of its own.
    """

    steps: jax.Array
    lowest: Limbs
    exponent: jax.Array

    @classmethod
    def of(cls, x: jax.Array, bounds: tuple[float, float], exponent: jax.Array) -> "OrderedRecords":
        """NaN counts as the lower bound; the bounds must be less than 2^31 steps apart."""
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
        """Steps above the lower bound as steps above 0."""
        return _limbs.add(self.lowest, _limbs.from_integers(steps))


def rank_of(probability: float, count: int) -> int:
    """Which of the records is a quantile, as `dpjax.targets.quantile` counts."""
    return math.ceil(Fraction(str(probability)) * count)


def smooth_bound(records: OrderedRecords, rank: int, decay: Scalar) -> jax.Array:
    """Max of 1 and e^(-k decay) A_k over all k, in steps: float32, at most the steps of the bounds.

    Replacing less than a step by 1 keeps it smooth. All factors come from one array, and
    only their quotients count: they are at most e^(decay + 2^-16), and products are rounded
    monotonically, so one record changes the result by a factor of at most that and 2^-23.
    """
    steps = records.steps.astype(jnp.float32)  # Exact up to 2^24.
    decay = jnp.asarray(decay, jnp.float32)
    # The first one is of i = j, whose gap is 0.
    factors = jnp.concatenate([jnp.ones(1, jnp.float32), discounts(decay, records.n)])
    right = steps[rank:]

    def widen(left: jax.Array, best: jax.Array) -> jax.Array:
        gaps = right - steps[rank - left]
        return jnp.maximum(best, jnp.max(gaps * lax.dynamic_slice(factors, (left,), right.shape)))

    # Beyond, all factors are below 2^-25. A NaN must not become a number of rounds.
    reach = jnp.where(decay > 0, jnp.minimum(jnp.ceil(18 / decay) + 1, float(rank)), 0)
    return lax.fori_loop(0, reach.astype(jnp.int32) + 1, widen, jnp.float32(1))


def discounts(decay: jax.Array, most: int) -> jax.Array:
    """e^(-k decay) for k from 0 to a most, in float32."""
    return jnp.exp(-decay * jnp.arange(most + 1, dtype=jnp.float32))


def replacements_until(records: OrderedRecords, rank: int, bound: jax.Array) -> jax.Array:
    """The least k with A_k > bound, in steps, else n + 1. One record moves it by 1.

    For every i the first j >= r with x_j - x_i > bound is found by bisection.
    """
    left = records.steps[: rank + 1]
    right = records.steps[rank:]
    first = jnp.searchsorted(right, left + bound, side="right").astype(jnp.int32)
    between = first + jnp.arange(rank, -1, -1, dtype=jnp.int32) - 1
    never = jnp.int32(records.n + 1)
    return jnp.min(jnp.where(first < right.size, between, never), initial=never)


def check_bounds(lower: float, upper: float) -> tuple[float, float]:
    """Two public numbers in order, far enough apart to be told from each other."""
    low, high = _checks.finite("lower", lower), _checks.finite("upper", upper)
    if _checks.is_traced(low) or _checks.is_traced(high):
        raise TypeError("lower and upper must be known when the mechanism is made")
    if not low < high:
        raise ValueError(f"lower must be below upper, got {low:g} and {high:g}")
    width = high - low
    if width < _NEAREST * max(abs(low), abs(high)) or not _LEAST_WIDTH < width < _LARGEST_WIDTH:
        raise ValueError(
            f"lower and upper must be further apart, and within 1e25, got {low:g} and {high:g}"
        )
    return low, high


def check_records(value: Value) -> None:
    """Refuses anything but one array of numbers."""
    if not jax.tree_util.all_leaves([value]) or value.ndim != 1:
        raise ValueError(
            "value must be one array of records, shape (n,), got"
            f" {jax.tree.map(lambda leaf: leaf.shape, value)}; use jax.vmap for a batch"
        )


def clamped_records(value: Value, lower: float, upper: float) -> jax.Array:
    """Records as floats between the bounds, NaN as the lower one."""
    x = _checks.real_arrays("value", value)
    x = x.astype(compute_dtype(x.dtype))
    low, high = (jnp.asarray(bound).astype(x.dtype) for bound in (lower, upper))
    return jnp.clip(jnp.where(jnp.isnan(x), low, x), low, high)
