"""Comparisons of noisy numbers with a noisy threshold, in integers. No noisy number is released.

Numbers and threshold are rounded to one grid. Two integers divide their noise (see `_grid_fit`), so
two scales share the grid. Everything that is compared is an integer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpjax._exact import _limbs
from dpjax._exact._grid import round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax.random._grid_fit import Calibration, GridFit, divided
from dpjax.random._noise import LAPLACE_LATTICE


class ComparisonNoise(NamedTuple):
    """Two scales of Laplace noise on one grid: for every number, and for the threshold."""

    numbers: GridFit
    threshold: GridFit

    @classmethod
    def of(cls, numbers: Calibration, threshold: Calibration) -> "ComparisonNoise":
        """Fits both to the grid of the numbers, which have more noise and need the coarser grid.

        The grid is found in JAX's default float, because numbers may come one by one in several
        dtypes.
        """
        dtype = jnp.result_type(float)
        fit = numbers.fit(LAPLACE_LATTICE, dtype)
        return cls(fit, threshold.fit(LAPLACE_LATTICE, dtype, fit.exponent))

    @property
    def is_usable(self) -> jax.Array:
        """Whether both scales are valid: neither is NaN."""
        return ~(jnp.isnan(self.numbers.scale) | jnp.isnan(self.threshold.scale))


def lattice_noise(key: jax.Array, shape: tuple[int, ...]) -> Limbs:
    """Laplace noise on the lattice, not yet divided."""
    return LAPLACE_LATTICE.sample(key, shape)


def noisy_units(x: ArrayLike, drawn: Limbs, fit: GridFit) -> Limbs:
    """Numbers in steps of the grid plus noise. They are clamped to 2^61 steps; NaN counts as 0."""
    return _limbs.add(round_to_grid(jnp.asarray(x), fit.exponent), divided(drawn, fit))


def first_above(
    key: jax.Array, numbers: jax.Array, threshold: ArrayLike, noise: ComparisonNoise, count: int
) -> jax.Array:
    """The first `count` places whose noisy number is at least the noisy threshold, in order.

    The result is filled up with len(numbers); it is all -1 for a bad scale. All numbers are
    compared even after the last place, so the time reveals nothing.
    """
    drawn = lattice_noise(key, (numbers.size + 1,))
    line = noisy_units(threshold, Limbs(drawn.high[0], drawn.low[0]), noise.threshold)
    noisy = noisy_units(numbers, Limbs(drawn.high[1:], drawn.low[1:]), noise.numbers)
    above = ~_limbs.less(noisy, line)
    rank = jnp.cumsum(above, dtype=jnp.int32) - 1
    places = jnp.full((count,), numbers.size, jnp.int32)
    kept_at = jnp.where(above, rank, count)  # Beyond the end, where `mode="drop"` ignores it.
    places = places.at[kept_at].set(jnp.arange(numbers.size, dtype=jnp.int32), mode="drop")
    return jnp.where(noise.is_usable, places, -1)
