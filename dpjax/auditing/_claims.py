"""A mechanism's own statements: its guarantee, its grid, and its treatment of strange values."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import PyTree, Value
from dpjax._core._values import Guarantee, guarantee_in
from dpjax.auditing import _bits
from dpjax.auditing import _features as features


def claim_of(mechanism: object) -> Guarantee | None:
    """The guarantee of a mechanism; None if it has none, or an infinite epsilon."""
    guarantee = guarantee_in(mechanism)
    return guarantee if guarantee and math.isfinite(float(guarantee.epsilon)) else None


def as_clamped(mechanism: object, value: Value) -> Value:
    """The value that gets noise, by `mechanism.clamped`.

    Without that method, NaN becomes 0, and infinities the largest floats.
    """
    clamped = getattr(mechanism, "clamped", None)
    return jax.tree.map(_finite, value) if clamped is None else clamped(value)


@dataclasses.dataclass(frozen=True)
class StatedGrid:
    """The grid that a mechanism states for each array of its outputs."""

    exponents: tuple[int | None, ...]  # Of powers of two; None for an array without a grid.

    @classmethod
    def of(cls, mechanism: object, value: Value) -> "StatedGrid":
        """Reads `mechanism.grids`; without that method, no array has a grid."""
        grids = getattr(mechanism, "grids", None)
        spacings = () if grids is None else map(float, jax.tree.leaves(grids(value)))
        return cls(tuple(math.frexp(x)[1] - 1 if x > 0 else None for x in spacings))

    def misses(self, outputs: PyTree) -> np.ndarray:
        """Whether each output of a batch is off the grid; half of the spacing still counts as on.

        A compiled mechanism may round differently, and choose half of the spacing that it states.
        """
        arrays = features.matrices(outputs)
        missed = np.zeros(len(arrays[0]), bool)
        for array, exponent in zip(arrays, self.exponents, strict=False):
            if exponent is not None:
                flat = np.ascontiguousarray(array).reshape(-1)
                lowest = _bits.lowest_set_bit(_bits.exact_numbers(flat)).reshape(array.shape)
                missed |= np.any(lowest < exponent - 1, axis=1)
        return missed

    def __str__(self) -> str:
        powers = sorted({x for x in self.exponents if x is not None})
        return "multiples of " + " or ".join(f"2^{power}" for power in powers) if powers else ""


def _finite(leaf: jax.Array) -> jax.Array:
    floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.nan_to_num(leaf) if floating else leaf
