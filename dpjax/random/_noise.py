"""Distributions of noise, at scale 1 and centered at 0."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import scipy
from jax.scipy.special import log_ndtr
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import log_difference
from dpjax.random import _lattice


@dataclasses.dataclass(frozen=True)
class Lattice:
    """Noise that is drawn exactly, in integer multiples of 1 / resolution.

    Attributes:
        sample: draws it, `sample(key, shape)`.
        resolution: lattice points per unit.
        certificate: bounds how far the draws may be from the ideal noise, in every coordinate.

    Formal guarantees:
        Those of the certificate.
    """

    sample: Callable[[jax.Array, tuple[int, ...]], Limbs]
    resolution: float
    certificate: _lattice.Certificate


@dataclasses.dataclass(frozen=True)
class Noise:
    """A symmetric distribution of independent coordinates at scale 1.

    Attributes:
        name: the name in messages.
        sample: draws it in floats, `sample(key, shape, dtype)`.
        log_density: log density at a point, elementwise.
        log_cdf: log of the distribution function, elementwise.
        tail_quantile: maps p to the t with P(|Z| > t) = p, on the host.
        dp_event: maps the noise multiplier (scale / sensitivity) to an event of dp-accounting. None
            if it has no such event; then the event that dominates every pure mechanism is used.
        event_norm: the norm of the sensitivity in this event.
        lattice: draws it exactly. None for noise in floats, which promises nothing.

    Formal guarantees:
        None of its own: a mechanism pairs it with a norm and a scale.
    """

    name: str
    sample: Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]
    log_density: Callable[[jax.Array], jax.Array]
    log_cdf: Callable[[jax.Array], jax.Array]
    tail_quantile: Callable[[float], float]
    dp_event: Callable[[float], object] | None = None
    event_norm: str | None = None
    lattice: Lattice | None = None

    def in_floats(self) -> "Noise":
        """The same distribution drawn in floats, for sweeps where nothing is published."""
        return dataclasses.replace(self, lattice=None)

    def log_interval(self, lower: jax.Array, upper: jax.Array) -> jax.Array:
        """Log of the probability of (lower, upper), without cancellation in either tail."""
        right = lower > 0
        low, high = jnp.where(right, -upper, lower), jnp.where(right, -lower, upper)
        return log_difference(self.log_cdf(high), self.log_cdf(low))


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
    return abs(float(scipy.special.ndtri(tail / 2)))


def _laplace_event(noise_multiplier: float) -> object:
    return _checks.extra("dp_accounting", "accounting").LaplaceDpEvent(noise_multiplier)


def _gaussian_event(noise_multiplier: float) -> object:
    return _checks.extra("dp_accounting", "accounting").GaussianDpEvent(noise_multiplier)


LAPLACE_LATTICE = Lattice(
    _lattice.lattice_laplace, _lattice.EXPONENTIAL_RESOLUTION, _lattice.EXPONENTIAL_BOUND
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

GAUSSIAN = Noise(
    name="gaussian",
    sample=jax.random.normal,
    log_density=_gaussian_log_density,
    log_cdf=log_ndtr,
    tail_quantile=_gaussian_quantile,
    dp_event=_gaussian_event,
    event_norm="l2",
    lattice=Lattice(
        _lattice.lattice_gaussian, _lattice.GAUSSIAN_RESOLUTION, _lattice.GAUSSIAN_BOUND
    ),
)

# The exact noise of selections.
EXPONENTIAL = Lattice(
    _lattice.lattice_exponential, _lattice.EXPONENTIAL_RESOLUTION, _lattice.EXPONENTIAL_BOUND
)
