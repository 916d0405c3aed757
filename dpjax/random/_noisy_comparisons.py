"""Comparisons of noisy numbers with a noisy threshold, in integers: no number that is drawn leaves.

Numbers and threshold are rounded to one grid, and what is drawn for them is divided by two integers
(see `_grid_fit`), so that two scales share the grid. Nothing that is compared is ever a float.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._exact import _limbs
from dpjax._exact._grid import round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax.random._grid_fit import Calibration, GridFit, divided
from dpjax.random._noise import LAPLACE


class ComparisonNoise(NamedTuple):
    """Two scales of Laplace noise on one grid.

    Attributes:
        numbers: of the noise of every number that is compared.
        threshold: of the noise of what they are compared with.

    Formal guarantees:
        None of its own.
    """

    numbers: GridFit
    threshold: GridFit

    @classmethod
    def of(cls, numbers: Calibration, threshold: Calibration) -> "ComparisonNoise":
        """On the grid of the numbers, whose noise is the larger one and needs the coarser grid.

        It is found in JAX's default float, whatever the numbers are: what is compared may come one
        by one, in several dtypes.
        """
        assert LAPLACE.lattice is not None
        dtype = jnp.result_type(float)
        fit = numbers.fit(LAPLACE.lattice, dtype)
        return cls(fit, threshold.fit(LAPLACE.lattice, dtype, fit.exponent))

    @property
    def is_usable(self) -> jax.Array:
        """Whether both scales can carry noise."""
        return ~(jnp.isnan(self.numbers.scale) | jnp.isnan(self.threshold.scale))


def lattice_noise(key: jax.Array, shape: tuple[int, ...]) -> Limbs:
    """Laplace noise that is yet to be divided."""
    assert LAPLACE.lattice is not None
    return LAPLACE.lattice.sample(key, shape)


def noisy_units(x: Any, drawn: Limbs, fit: GridFit) -> Limbs:
    """Numbers in steps of the grid, clamped to 2^61 of them, and their noise; NaN counts as 0."""
    return _limbs.add(round_to_grid(jnp.asarray(x), fit.exponent), divided(drawn, fit))


def first_above(
    key: jax.Array, numbers: jax.Array, threshold: Any, noise: ComparisonNoise, count: int
) -> jax.Array:
    """The first places whose noisy number is at least the noisy threshold.

    All numbers are compared, wherever the last place is: the time tells nothing.

    Args:
        key: a typed key.
        numbers: shape (K,).
        threshold: a public number.
        noise: the two scales.
        count: how many places are told.

    Returns:
        int32 places in order, shape (count,), K where there are no more; -1 throughout where the
        scales can carry no noise.
    """
    drawn = lattice_noise(key, (numbers.size + 1,))
    line = noisy_units(threshold, Limbs(drawn.high[0], drawn.low[0]), noise.threshold)
    noisy = noisy_units(numbers, Limbs(drawn.high[1:], drawn.low[1:]), noise.numbers)
    above = ~_limbs.less(noisy, line)
    rank = jnp.cumsum(above, dtype=jnp.int32) - 1
    places = jnp.full((count,), numbers.size, jnp.int32)
    told = jnp.where(above, rank, count)
    places = places.at[told].set(jnp.arange(numbers.size, dtype=jnp.int32), mode="drop")
    return jnp.where(noise.is_usable, places, -1)
