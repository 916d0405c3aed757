"""Distributions of noise, at scale 1 and centered at 0."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._types import PyTree, Scalar
from dpjax._exact._numerics import log_difference
from dpjax.random import _lattice

# If an interval is narrower than this, in units of the scale, its probability is computed as
# density times width.
_NARROW = 2.0**-12
# This factor covers the error of rounding scales to float32.
_OUTWARD = 1 + 2.0**-20


@dataclasses.dataclass(frozen=True)
class Lattice:
    """Noise that is drawn exactly, as integer multiples of 1 / resolution.

    Attributes:
        variables: `variables(key, shape)` draws independent variables. Lattices with the same
            `variables` share a compiled program.
        each: how many variables are needed for one lattice point, or for one `Pair` of lattice
            points.
        combined: a function from these variables to lattice points, or to a `Pair` of them.
        resolution: the number of lattice points per unit.
        certificate: bounds on the difference from the ideal distribution, for every coordinate.

    Formal guarantees:
        Those of the certificate.
    """

    variables: Callable[[jax.Array, tuple[int, ...]], PyTree]
    each: int
    combined: Callable[[PyTree], _lattice.LatticeNoise]
    resolution: float
    certificate: _lattice.Certificate

    def sample(self, key: jax.Array, shape: tuple[int, ...]) -> _lattice.LatticeNoise:
        """Draws noise for an array of this shape: one or two lattice points for each number."""
        drawn = self.combined(self.variables(key, (self.each * math.prod(shape),)))
        return jax.tree.map(lambda x: x.reshape(shape), drawn)


@dataclasses.dataclass(frozen=True)
class Noise:
    """A symmetric distribution of independent coordinates at scale 1.

    Attributes:
        name: the name in messages.
        sample: `sample(key, shape, dtype)` draws the noise in floats.
        log_density: the log density at a point, elementwise.
        log_cdf: the log of the distribution function, elementwise.
        tail_quantile: maps p to the t with P(|Z| > t) = p, on the host.
        dp_event: maps the noise multiplier (scale / sensitivity) to an event of dp-accounting. None
            if there is no such event; then an event that dominates every epsilon-DP mechanism is
            used.
        event_norm: the norm of the sensitivity in this event.
        lattice: the exact noise. None for noise in floats, which has no guarantee.

    Formal guarantees:
        None of its own: a mechanism combines the noise with a norm and a scale.
    """

    name: str
    sample: Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]
    log_density: Callable[[jax.Array], jax.Array]
    log_cdf: Callable[[jax.Array], jax.Array]
    tail_quantile: Callable[[float], float]
    dp_event: Callable[[float], object] | None = None
    event_norm: str | None = None
    lattice: Lattice | None = None
    is_whole: ClassVar[bool] = False  # Whether the noise can only be added to integers.

    def in_floats(self) -> "Noise":
        """The same distribution drawn in floats, for sweeps where nothing is published."""
        return dataclasses.replace(self, lattice=None)

    def whole_sample(self, key: jax.Array, shape: tuple[int, ...], scale: jax.Array) -> jax.Array:
        """Integer noise of the given scale, drawn in floats."""
        return jnp.round(scale * self.sample(key, shape, scale.dtype))

    def log_mass(self, whole: jax.Array, scale: jax.Array) -> jax.Array:
        """Log of the probability that integer noise equals `whole`."""
        error, half = whole / scale, 0.5 / scale
        mass = self.log_interval(error - half, error + half)
        # In float32, both ends of a narrow interval may round to the same number. So the
        # probability of a narrow interval is computed as density times width.
        return jnp.where(half < _NARROW, self.log_density(error) - jnp.log(scale), mass)

    def log_whole_cdf(self, whole: jax.Array, scale: jax.Array) -> jax.Array:
        """Log of the probability that integer noise is at most `whole`."""
        return self.log_cdf((whole + 0.5) / scale)

    def whole_bound(self, quantile: float, scale: ArrayLike) -> Scalar | np.ndarray:
        """A t with P(|integer noise| > t) <= P(|Z| > quantile), for noise Z of scale 1."""
        return _numpy_of(scale).floor(scale * quantile + 0.5)

    def log_interval(self, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Log of the probability of (lower, upper), without cancellation in either tail."""
        right = lower > 0
        low, high = jnp.where(right, -upper, lower), jnp.where(right, -lower, upper)
        return log_difference(self.log_cdf(high), self.log_cdf(low))


@dataclasses.dataclass(frozen=True)
class DiscreteLaplace(Noise):
    """Noise for integers: k has a probability proportional to exp(-|k| / scale).

    For a scale s, let a = exp(-1 / s). Then k has the probability (1 - a) / (1 + a) a^|k|, and
    P(|k| > t) = 2 a^(t + 1) / (1 + a). docs/proofs/exact-noise.md has the proofs.
    """

    is_whole: ClassVar[bool] = True

    def whole_sample(self, key: jax.Array, shape: tuple[int, ...], scale: jax.Array) -> jax.Array:
        """Draws the difference of two geometric variables."""
        drawn = jnp.floor(scale * jax.random.exponential(key, (2, *shape), scale.dtype))
        return drawn[0] - drawn[1]

    def log_mass(self, whole: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns the log of the probability of each integer in `whole`."""
        return jnp.log(-jnp.expm1(-1 / scale)) - _log_both(scale) - jnp.abs(whole) / scale

    def log_whole_cdf(self, whole: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns the log of the probability that the noise is at most `whole`."""
        beyond = jnp.where(whole < 0, whole, -whole - 1) / scale - _log_both(scale)
        return jnp.where(whole < 0, beyond, jnp.log1p(-jnp.exp(beyond)))

    def whole_bound(self, quantile: float, scale: ArrayLike) -> Scalar | np.ndarray:
        """Returns the least t with P(|noise| > t) <= P(|Z| > quantile), for standard Laplace Z."""
        numpy = _numpy_of(scale)
        # P(|Z| > quantile) = exp(-quantile). So 2 a^(t + 1) / (1 + a) must be at most this number,
        # with a = exp(-1 / scale). At scale 0, which means no noise, t is 0.
        both = math.log(2) - numpy.log1p(numpy.exp(-1 / numpy.where(scale == 0, 1.0, scale)))
        return numpy.maximum(numpy.ceil(scale * (quantile + _OUTWARD * both)) - 1, 0)


def _numpy_of(number: ArrayLike) -> ModuleType:
    """Returns `jax.numpy` for JAX arrays, which may be traced, and otherwise NumPy (float64)."""
    return jnp if isinstance(number, jax.Array) else np


def _log_both(scale: jax.Array) -> jax.Array:
    """Returns log(1 + a) for a = exp(-1 / scale).

    The probabilities of discrete Laplace noise contain the factor 1 / (1 + a).
    """
    return jnp.log1p(jnp.exp(-1 / scale))


def _laplace_log_density(x: jax.Array) -> jax.Array:
    return -jnp.abs(x) - math.log(2)


def _laplace_log_cdf(x: jax.Array) -> jax.Array:
    tail = -jnp.abs(x) - math.log(2)
    return jnp.where(x < 0, tail, jnp.log1p(-jnp.exp(tail)))


def _laplace_quantile(tail: float) -> float:
    return -math.log(tail)


def _gaussian_log_density(x: jax.Array) -> jax.Array:
    return -(x**2 + math.log(2 * math.pi)) / 2


def _gaussian_quantile(tail: float) -> float:
    # Importing `scipy.special` instead would take longer than counting the rows of a table.
    return abs(statistics.NormalDist().inv_cdf(tail / 2))


def _laplace_event(noise_multiplier: float) -> object:
    return _checks.extra("dp_accounting", "accounting").LaplaceDpEvent(noise_multiplier)


def _gaussian_event(noise_multiplier: float) -> object:
    return _checks.extra("dp_accounting", "accounting").GaussianDpEvent(noise_multiplier)


LAPLACE_LATTICE = Lattice(
    _lattice.signed_exponentials,
    1,
    _lattice.laplace_of,
    _lattice.EXPONENTIAL_RESOLUTION,
    _lattice.EXPONENTIAL_BOUND,
)
LAPLACE = Noise(
    name="laplace",
    sample=jax.random.laplace,
    log_density=_laplace_log_density,
    log_cdf=_laplace_log_cdf,
    tail_quantile=_laplace_quantile,
    dp_event=_laplace_event,
    event_norm="l1",
    lattice=LAPLACE_LATTICE,
)

DISCRETE_LAPLACE = DiscreteLaplace(
    name="discrete laplace",
    sample=jax.random.laplace,
    log_density=_laplace_log_density,
    log_cdf=_laplace_log_cdf,
    tail_quantile=_laplace_quantile,
    lattice=dataclasses.replace(
        LAPLACE_LATTICE, each=2, combined=_lattice.pair_of, certificate=_lattice.PAIR_BOUND
    ),
)

GAUSSIAN = Noise(
    name="gaussian",
    sample=jax.random.normal,
    log_density=_gaussian_log_density,
    log_cdf=log_ndtr,
    tail_quantile=_gaussian_quantile,
    dp_event=_gaussian_event,
    event_norm="l2",
    lattice=Lattice(
        _lattice.lattice_gaussian,
        1,
        _lattice.unchanged,
        _lattice.GAUSSIAN_RESOLUTION,
        _lattice.GAUSSIAN_BOUND,
    ),
)

# The exact noise for private selections.
EXPONENTIAL = dataclasses.replace(LAPLACE_LATTICE, combined=_lattice.exponential_of)
