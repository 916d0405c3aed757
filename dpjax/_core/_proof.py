"""Proofs of sensitivities as text, and the bounds on records that proofs assume."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._types import Database, Value


@dataclasses.dataclass(eq=False)
class Proof:
    """The steps of a proof, as text.

    All proofs compare as equal, so that JAX's caches ignore them.

    Attributes:
        steps: one line of text for each step.
        losses: a function that measures how much each step loosens the bound. It returns the lines
            with these factors. After its first call, this is None.
        summary: a text that `repr` shows, too; "" if there is none. For a proved sensitivity, it
            compares the bound with the distance of the results on two concrete databases. For a
            sampled sensitivity, it states which bound can be proved.
    """

    steps: tuple[str, ...]
    losses: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None
    summary: str = ""

    def explained(self) -> str:
        """Returns the steps as text, with the factor by which each step loosens the bound.

        The first call measures these factors, and stores the result.
        """
        if self.losses is not None:
            self.steps, self.losses = self.losses(self.steps), None
        return "\n".join((*self.steps, self.summary) if self.summary else self.steps)

    def __getstate__(self) -> dict[str, object]:
        """Drops `losses`, because the program in it cannot be pickled."""
        return {"steps": self.steps, "losses": None, "summary": self.summary}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proof)

    def __hash__(self) -> int:
        return hash(Proof)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A bound on records: every coordinate is in [low, high], or missing.

    Attributes:
        low: a public number that the dtype of the array can represent.
        high: a public number above `low`.
        missing: whether a coordinate may also be NaN. If so, NaN is passed to the target, which
            must handle missing numbers, for example by `jnp.nansum`. Otherwise NaN becomes `low`.

    Formal guarantees:
        A release with a proved sensitivity clamps each number to [low, high]. Neighboring databases
        may differ by a NaN in place of a number. A target whose value may be NaN is refused.
    """

    low: float
    high: float
    missing: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest number of a coordinate."""
        return self.low, self.high

    @property
    def empty(self) -> float:
        """The public number, within the bounds, that fills empty slots."""
        return min(max(0.0, self.low), self.high)

    def clamp(self, x: jax.Array) -> jax.Array:
        """Clamps numbers to [low, high]. Subnormal numbers become 0, and NaN becomes `low`.

        If numbers may be missing, every NaN becomes JAX's default NaN instead, so that the payload
        bits of the old NaN are lost.
        """
        if x.dtype == bool:
            return (x & bool(self.high)) | bool(self.low)
        low, high = (jnp.asarray(end, x.dtype) for end in (self.low, self.high))
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        least = low
        if floats and self.low >= 0:
            least = jnp.maximum(low, jnp.asarray(np.finfo(x.dtype).tiny, x.dtype))
        # If x is NaN, `x >= least` is false, so the result is `low`.
        inside = jnp.where(x >= least, x, low)
        inside = jnp.where(inside <= high, inside, high)
        if floats and self.low < 0:
            inside = jnp.where(_is_normal(inside), inside, jnp.zeros((), x.dtype))
        if not self.missing:
            return inside
        return jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), inside)


def _is_normal(x: jax.Array) -> jax.Array:
    """Whether a float is neither 0 nor subnormal: some bit of its exponent is set."""
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")
    exponent = np.array(np.inf, x.dtype).view(integers)
    return (lax.bitcast_convert_type(x, integers) & exponent) != 0


@dataclasses.dataclass(frozen=True)
class Ball:
    """A bound on records: in each array, the l2 norm of a record is at most a radius.

    Attributes:
        radius: a public number from 2^-40 to 2^40.

    Formal guarantees:
        A release with a proved sensitivity scales longer records down to the radius. The proof
        covers the rounding error of the scaling. NaN becomes 0.
    """

    radius: float
    empty = 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value that a coordinate can have."""
        return -self.radius, self.radius

    def clamp(self, x: jax.Array) -> jax.Array:
        """Scales each record whose norm exceeds the radius to the radius. NaN becomes 0."""
        x = jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x)
        x = Interval(-self.radius, self.radius).clamp(x)
        axes = tuple(range(1, x.ndim))
        radius = jnp.asarray(self.radius, x.dtype)
        length = jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True))
        return Interval(-self.radius, self.radius).clamp(x * (radius / jnp.maximum(length, radius)))


@dataclasses.dataclass(frozen=True)
class Categories:
    """A bound on records: every coordinate is one of a few numbers.

    Attributes:
        values: public numbers that the dtype of the records can represent.

    Formal guarantees:
        A release with a proved sensitivity replaces any other number, including NaN, by the first
        of these values.
    """

    values: tuple[float, ...]

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest of the values."""
        return min(self.values), max(self.values)

    @property
    def empty(self) -> float:
        """The number that fills empty slots: 0 if it is one of the values, else the first value."""
        return 0.0 if 0.0 in self.values else self.values[0]

    def clamp(self, x: jax.Array) -> jax.Array:
        values = [jnp.asarray(value, x.dtype) for value in self.values]
        out = jnp.broadcast_to(values[0], x.shape)
        for value in values[1:]:
            out = jnp.where(x == value, value, out)
        return out


Bound = Interval | Ball | Categories


@dataclasses.dataclass(frozen=True)
class RecordBounds:
    """Bounds on the records of a database, one for each of its arrays.

    It is hashable, so that it can be a static argument of `jit`.

    Formal guarantees:
        `clamp` maps any database of the right structure, even with NaN or infinities, to a database
        within the bounds. It maps each record separately.
    """

    leaves: tuple[Bound, ...]

    def clamp(self, database: Database) -> Database:
        """Returns the database with every record clamped to the bounds."""
        leaves, structure = jax.tree.flatten(database)
        clamped = [b.clamp(x) for b, x in zip(self.leaves, leaves, strict=True)]
        return jax.tree.unflatten(structure, clamped)

    def enforced_on(self, target: Callable[[Database], Value]) -> Callable[[Database], Value]:
        """Returns the target composed with `clamp`.

        The proof is about the composed function, and releases evaluate this function, too.
        """

        @functools.wraps(target, updated=())
        def clamped_target(database: Database) -> Value:
            return target(jax.jit(self.clamp)(database))

        return clamped_target


@dataclasses.dataclass(frozen=True)
class PaddedRecordBounds(RecordBounds):
    """Bounds on `PaddedRecords`. The last entry of `leaves` is the bound on `present`.

    Formal guarantees:
        `clamp` also fills every empty slot with the same public row, so the old contents of the
        slot have no effect.
    """

    @property
    def empty_row(self) -> tuple[float, ...]:
        """The number that fills an empty slot, for each array."""
        return tuple(b.empty for b in self.leaves)

    def clamp(self, database: Database) -> Database:
        """Returns the database within the bounds, with public numbers in its empty slots."""
        leaves, structure = jax.tree.flatten(super().clamp(database))
        present = leaves[-1]
        filled = [
            jnp.where(present.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.asarray(number, x.dtype))
            for x, number in zip(leaves, self.empty_row, strict=True)
        ]
        return jax.tree.unflatten(structure, filled)


def is_tiny(number: float, dtype: np.dtype) -> bool:
    """Whether a number is subnormal in a dtype."""
    return 0 < abs(number) < float(np.finfo(dtype).tiny)
