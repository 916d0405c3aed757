"""Bounds of the coordinates of a record: a search draws from them, and returns to them."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import PyTree


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
        direction = (2 * uniform - 1).astype(dtype) ** 3
        return self.projected(direction * jnp.asarray(1e9 * self.radius, dtype))

    def projected(self, records: jax.Array) -> jax.Array:
        """Records outside are scaled down, to a hair inside the ball."""
        axes = tuple(range(1, records.ndim))
        norms = jnp.sqrt(jnp.sum(jnp.square(records), axis=axes, keepdims=True))
        inward = self.radius * (1 - 4 * float(jnp.finfo(records.dtype).eps))
        return jnp.where(norms > inward, records * (inward / norms), records)

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
        return bound
    if not isinstance(bound, tuple) or len(bound) != 2:
        raise ValueError(f"bounds must be pairs (low, high) or balls, got {_checks.shown(bound)}")
    low, high = (_checks.finite("bounds", number) for number in bound)
    if not low < high:
        raise ValueError(f"bounds must have low < high, got {bound}")
    if not floats and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"bounds of integers must be integers, got {bound}")
    return Interval(low, high)
