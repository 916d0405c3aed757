"""Bounds of the coordinates of a record: a search draws from them, and returns to them."""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax._exact._numerics import compute_dtype

# Integers are drawn by products of floats and int32, so their bounds stay below.
_LARGEST_INTEGER = 2**30


class RecordBound(Protocol):
    """The values that one array of a record may take, made of uniform numbers in [0, 1)."""

    def inside(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Values from the inside."""
        ...

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Values at the ends."""
        ...

    def projected(self, records: jax.Array) -> jax.Array:
        """The closest values within bounds, for arrays of floats."""
        ...

    def opposite(self, records: jax.Array) -> jax.Array:
        """The records on the other side of the middle."""
        ...

    def width(self) -> float:
        """How far apart two values of a coordinate may be."""
        ...


@dataclasses.dataclass(frozen=True)
class Ball:
    """Records whose l2 norm is at most a radius.

    Attributes:
        radius: above 0.

    Formal guarantees:
        None of its own: it names a set of records, for `dpjax.auditing.adversarial_pair`.
    """

    radius: float

    def __post_init__(self) -> None:
        _checks.positive("radius", self.radius)

    def inside(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """From a cube; what sticks out is moved to the ball."""
        return self.projected(self.radius * (2 * uniform - 1).astype(dtype))

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """At the full length, often nearly along an axis."""
        direction = (2 * uniform - 1) ** 3
        return self.projected((direction * (self.radius / _norms(direction))).astype(dtype))

    def projected(self, records: jax.Array) -> jax.Array:
        """Records outside are scaled down, to a hair inside the ball."""
        wide = records.astype(compute_dtype(records.dtype))
        # In radii, squares neither overflow nor underflow.
        norms = _norms(wide / self.radius)
        # A narrow dtype rounds the result. The sum of squares and the products round before.
        inward = 1 - _eps(records) - (_size(records) + 10) * _eps(wide)
        return jnp.where(norms > inward, wide * (inward / norms), wide).astype(records.dtype)

    def opposite(self, records: jax.Array) -> jax.Array:
        """Across the origin."""
        return -records

    def width(self) -> float:
        """The diameter."""
        return 2 * self.radius


@dataclasses.dataclass(frozen=True)
class Interval:
    """Coordinates between two numbers, both included; for integers any code between them."""

    low: float
    high: float

    def inside(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Uniform numbers."""
        if jnp.issubdtype(dtype, jnp.floating):
            return self.projected((self.low + self.width() * uniform).astype(dtype))
        steps = jnp.floor(uniform * (self.width() + 1)).astype(int)
        return (int(self.low) + jnp.minimum(steps, int(self.width()))).astype(dtype)

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """The two ends; for integers any of them."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.inside(uniform, dtype)
        return jnp.where(uniform < 0.5, self.low, self.high).astype(dtype)

    def projected(self, records: jax.Array) -> jax.Array:
        """Clipped."""
        return jnp.clip(records, self.low, self.high)

    def opposite(self, records: jax.Array) -> jax.Array:
        """As far from the other end."""
        if jnp.issubdtype(records.dtype, jnp.floating):
            return self.projected((self.low + self.high) - records)
        return (int(self.low) + int(self.high) - records.astype(int)).astype(records.dtype)

    def width(self) -> float:
        """The length of the interval."""
        return self.high - self.low


def _eps(array: jax.Array) -> float:
    return float(jnp.finfo(array.dtype).eps)


def _size(records: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Coordinates of a record."""
    return math.prod(records.shape[1:])


def _norms(records: jax.Array) -> jax.Array:
    """The l2 norm of each record, above 0."""
    axes = tuple(range(1, records.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(records), axis=axes, keepdims=True)) + 1e-30


def record_bounds(records: PyTree, bounds: PyTree) -> PyTree:
    """A bound for each array of `records`: one for all of them, or a tree of bounds like theirs.

    A bound is a pair (low, high) or a `Ball`.
    """
    is_bound = lambda one: isinstance(one, Ball | tuple) and not _holds_bounds(one)  # noqa: E731
    if is_bound(bounds):
        return jax.tree.map(lambda leaf: _bound(leaf, bounds), records)
    try:
        return jax.tree.map(
            lambda bound, leaf: _bound(leaf, bound), bounds, records, is_leaf=is_bound
        )
    except ValueError as error:
        if "bounds" in str(error):
            raise
        raise ValueError(
            f"bounds must be one bound, or a tree of bounds like the records, got {bounds}"
        ) from error


def _holds_bounds(candidate: object) -> bool:
    """Whether a tuple is a tree of bounds and not a pair of numbers."""
    return isinstance(candidate, tuple) and any(isinstance(one, tuple | Ball) for one in candidate)


def _bound(leaf: jax.ShapeDtypeStruct, bound: object) -> RecordBound:
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    if isinstance(bound, Ball):
        if not floats:
            raise ValueError(f"bounds: a Ball is for floats, got {leaf.dtype}")
        info = jnp.finfo(leaf.dtype)
        # Subnormal numbers would round out of a smaller ball.
        if not _size(leaf) * float(info.tiny) <= bound.radius <= float(info.max):
            raise ValueError(f"bounds must be finite in {leaf.dtype}, and normal, got {bound}")
        return bound
    if not isinstance(bound, tuple) or len(bound) != 2:
        raise ValueError(f"bounds must be pairs (low, high) or balls, got {_checks.shown(bound)}")
    low, high = (_checks.finite("bounds", number) for number in bound)
    if floats:
        low, high = _inward(low, leaf.dtype, math.inf), _inward(high, leaf.dtype, -math.inf)
    elif not (float(low).is_integer() and float(high).is_integer()):
        raise ValueError(f"bounds of integers must be integers, got {bound}")
    else:
        known = (0, 1) if leaf.dtype == bool else _range_of_integers(leaf.dtype)
        if low < known[0] or high > known[1]:
            raise ValueError(f"bounds of {leaf.dtype} must be from {known[0]} to {known[1]}")
    if not low < high:
        raise ValueError(f"bounds must have low < high in {leaf.dtype}, got {bound}")
    return Interval(low, high)


def _range_of_integers(dtype: np.dtype) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return max(int(info.min), -_LARGEST_INTEGER), min(int(info.max), _LARGEST_INTEGER)


def _inward(number: float, dtype: np.dtype, toward: float) -> float:
    """The first number of a dtype in a direction."""
    if abs(number) > float(jnp.finfo(dtype).max):
        raise ValueError(f"bounds must be finite in {dtype}, got {number}")
    near = jnp.asarray(number, dtype)
    if float(near) != number and (float(near) < number) == (toward > 0):
        near = jnp.nextafter(near, jnp.asarray(toward, dtype))
    return float(near)
