"""What a mechanism says about itself: its guarantee, its grid, what becomes of strange values."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._values import Guarantee, guarantee_in, is_mechanism
from dpjax.auditing import _bits
from dpjax.auditing import _features as features


def claim_of(mechanism: object) -> Guarantee | None:
    """The guarantee of a mechanism; None where it promises nothing."""
    guarantee = guarantee_in(mechanism)
    return guarantee if guarantee and math.isfinite(float(guarantee.epsilon)) else None


def as_clamped(mechanism: object, value: Any) -> Any:
    """A value as a mechanism releases it.

    Of a function that is no mechanism: NaN as 0, and infinities as the largest floats.
    """
    if is_mechanism(mechanism):
        return mechanism.clamped(value)
    return jax.tree.map(lambda x: jnp.nan_to_num(x) if _is_float(x) else x, value)


@dataclasses.dataclass(frozen=True)
class StatedGrid:
    """The grid that a mechanism says its outputs lie on, for each array of an output.

    Attributes:
        exponents: the spacings are powers of two; None for an array without a grid.

    Formal guarantees:
        None of its own.
    """

    exponents: tuple[int | None, ...]

    @classmethod
    def of(cls, mechanism: object, value: Any) -> "StatedGrid":
        """By `mechanism.grids`; a function that is no mechanism states nothing."""
        grids = mechanism.grids(value) if is_mechanism(mechanism) else ()
        steps = map(float, jax.tree.leaves(grids))
        return cls(tuple(math.frexp(step)[1] - 1 if step > 0 else None for step in steps))

    def misses(self, outputs: Any) -> np.ndarray:
        """Which outputs of a batch are not on it; a program may find half of the spacing."""
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


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))
