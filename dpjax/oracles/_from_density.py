"""`from_density`: an oracle of points in the unit cube, drawn by a piecewise constant density."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import PyTree
from dpjax.oracles._independent import IndependentRecords, WeightedChoice, words_of

_BITS = 24  # Coordinates are multiples of 2^-24, which are exact in float32.
_MOST_CELLS = 2**22
_DEFAULT_BITS = 14


@frozen_pytree
class PiecewiseUniform(IndependentRecords):
    """Draws points in the unit cube: first chooses one of many equal cells, then a point in it."""

    places: jax.Array  # The indices of the cells with positive mass, in row-major order.
    choice: WeightedChoice  # Chooses one of these cells.
    log_densities: jax.Array  # The log densities of all cells, with an axis for each coordinate.

    def record(self, key: jax.Array) -> jax.Array:
        key_cell, key_offset = jax.random.split(key)
        cells, dims = self.log_densities.shape[0], self.log_densities.ndim
        bits = cells.bit_length() - 1
        place = self.places[self.choice.draw(key_cell)]
        corner = jnp.stack(jnp.unravel_index(place, self.log_densities.shape)).astype(jnp.uint32)
        offset = jax.random.bits(key_offset, (dims,), jnp.uint32) >> jnp.uint32(32 - _BITS + bits)
        steps = (corner << jnp.uint32(_BITS - bits)) | offset
        return steps.astype(self.log_densities.dtype) * 2.0**-_BITS

    def log_prob(self, record: PyTree) -> jax.Array:
        shape, dtype = self.log_densities.shape, self.log_densities.dtype
        point = jnp.asarray(record, dtype)
        if point.shape != (len(shape),):
            raise ValueError(f"a record must have shape {(len(shape),)}, got {point.shape}")
        inside = jnp.all((point >= 0) & (point <= 1))
        cell = jnp.where(inside, point * shape[0], 0).astype(int)
        density = self.log_densities[tuple(jnp.minimum(cell, shape[0] - 1))]
        return jnp.where(inside, density, -jnp.inf)


def from_density(
    density: Callable[[jax.Array], ArrayLike], *, dims: int, cells: int | None = None
) -> IndependentRecords:
    """An oracle of points in [0, 1]^dims, drawn by a density that is known up to a factor.

    This oracle is meant for polynomials that the Bernstein mechanism releases. Because of noise,
    such a polynomial may be negative at some points, and its integral is not 1. The cube is cut
    into cells^dims cells. The probability of a cell is the density at its center, or 0 if this
    density is negative, divided by the sum of these numbers over all cells. Points are uniform in a
    cell. Masses are rounded to 2^-32, and coordinates are multiples of 2^-24. Apart from this
    rounding, draws follow the piecewise constant density exactly, and `log_prob` returns its
    logarithm.

    Args:
        density: maps points of shape (..., dims) to their densities, shape (...), like a
            `dpjax.BernsteinPolynomial`.
        dims: number of coordinates, at least 1.
        cells: the number of cells along each coordinate, a power of two up to 2^16; by default the
            largest with at most 2^14 cells in total. Doubling the cells doubles the memory, and
            adds a step to each draw.

    Returns:
        An oracle: `oracle(key, n)` draws n independent points, shape (n, dims).

    Raises:
        TypeError: if `density` is not a function, or is traced, or a number is not an integer.
        ValueError: if dims or cells is out of range, or cells^dims above 2^22; if the density has
            another shape, is NaN or infinite at a center, or is not above 0 at any center.

    Formal guarantees:
        Making the oracle from a release is post-processing. If the release was about other records
        than those to protect, this is an oracle like any other. If it was about the same records,
        epsilon and delta of both releases add up, but the gamma of `dpjax.accounting.compose` is
        not valid: the oracle was not fixed in advance, and depends on the records through the first
        release.

    Source:
        Rubinstein and Aldà, "diffpriv: An R package for easy differential privacy" (2017), Section
        3: "a density from data privately fit by the Bernstein mechanism"; Aldà and Rubinstein
        (2017).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import dpjax
        >>> key_release, key_draw = jax.random.split(dpjax.random.seeded_key(0))
        >>> mechanism = dpjax.bernstein(0.01, epsilon=1.0, degree=4, dims=1)
        >>> release = mechanism(key_release, jnp.array([0.0, 1.0, 2.0, 1.0, 0.0]))
        >>> oracle = dpjax.oracles.from_density(release.value, dims=1)
        >>> oracle(key_draw, 5).shape
        (5, 1)
    """
    _checks.function("density", density)
    dims = _checks.integer("dims", dims, least=1, most=_DEFAULT_BITS)
    cells = _cells(cells, dims)
    words = words_of(_masses(density, dims, cells))
    places = np.flatnonzero(words)
    with np.errstate(divide="ignore"):
        log_densities = np.log(words * (float(cells) ** dims / 2**32)).reshape((cells,) * dims)
    return PiecewiseUniform(
        jnp.asarray(places, jnp.int32),
        WeightedChoice.of(words[places]),
        jnp.asarray(log_densities, jnp.result_type(float)),
    )


def _cells(cells: int | None, dims: int) -> int:
    if cells is None:
        return 2 ** (_DEFAULT_BITS // dims)
    cells = _checks.integer("cells", cells, least=1, most=2**16)
    if cells & (cells - 1) or cells**dims > _MOST_CELLS:
        raise ValueError(
            f"cells must be a power of two, with cells^dims up to 2^22, got {cells=} and {dims=}"
        )
    return cells


def _masses(density: Callable[[jax.Array], ArrayLike], dims: int, cells: int) -> np.ndarray:
    """Returns the density at the centers of all cells as a flat array, clipped at 0."""
    axis = (np.arange(cells) + 0.5) / cells
    centers = np.stack(np.meshgrid(*[axis] * dims, indexing="ij"), axis=-1).reshape(-1, dims)
    found = density(jnp.asarray(centers, jnp.result_type(float)))
    _checks.host_only("from_density", found, "its oracle, made outside")
    values = np.asarray(found, np.float64)
    if values.shape != (len(centers),):
        raise ValueError(
            f"density must take points of shape (..., {dims}) to shape (...), but took"
            f" {centers.shape} to {values.shape}"
        )
    if not np.isfinite(values).all():
        raise ValueError("density must be finite at all centers of cells, got NaN or infinity")
    if values.max() <= 0:
        raise ValueError("density must be above 0 at the center of some cell, got none above 0")
    return np.maximum(values, 0)
