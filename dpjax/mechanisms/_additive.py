"""Additive noise: independent coordinates at a scale proportional to the sensitivity."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks, _limbs
from dpjax._grid import power_of_two
from dpjax._numerics import outward
from dpjax._pytree import frozen_pytree, static, up
from dpjax.base import Norm, Scalar, Sensitivity
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin, count, tail_of_one
from dpjax.norms import grid_dtype, is_float, rounding_norm
from dpjax.random._grid_fit import Calibration, GridFit
from dpjax.random._noise import Lattice, Noise
from dpjax.random._release import add_noise, centered, check_scale, usable_scale

_NARROW = 2.0**-12


@frozen_pytree
class AdditiveMechanism(SensitivityMechanism):
    """Adds noise to every coordinate of a pytree; made by `additive`, `laplace` or `gaussian`.

    Attributes:
        sensitivity: what the noise is calibrated to.
        epsilon: of the guarantee.
        delta: of the guarantee.
        scale: of the noise, in the units of the value.
        norm: in which the sensitivity is measured.
        noise: the distribution at scale 1.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    delta: Scalar = up()
    scale: Scalar
    norm: Norm = static()
    noise: Noise = static()

    def _delta(self) -> Scalar:
        return self.delta

    @property
    def _is_exact(self) -> bool:
        return self.noise.lattice is not None

    def _calibration(self, value: Any) -> Calibration:
        calibration = Calibration(
            self.scale,
            self.sensitivity.value,
            self.epsilon,
            rounding_norm(self.norm, value),
            sum(leaf.size for leaf in jax.tree.leaves(value)),
            self.sensitivity.zero_allowed,
            grid_dtype(value),
        )
        return dataclasses.replace(calibration, scale=self._covered_scale(calibration))

    def _covered_scale(self, calibration: Calibration) -> Scalar:
        """The scale; NaN where a traced delta is too small for the tables of the noise."""
        lattice = self.noise.lattice
        if lattice is None or not _checks.is_traced(self.delta):
            return self.scale
        return jnp.where(calibration.covers(lattice, self.delta, jnp), self.scale, jnp.nan)

    def _draw(self, key: jax.Array, value: Any) -> Any:
        return add_noise(key, value, self._calibration(value), self.noise)

    def _check_value(self, value: Any) -> None:
        zero_allowed = self.sensitivity.zero_allowed
        check_scale("scale of the noise", self.scale, value, zero_allowed=zero_allowed)
        if self.noise.lattice is None or _checks.is_traced(self.epsilon):
            return
        calibration = self._calibration(value)
        coordinates = calibration.coordinates
        if not _checks.is_traced(self.delta) and not calibration.covers(
            self.noise.lattice, self.delta, np
        ):
            raise ValueError(
                f"delta={float(self.delta)!r} is too close to 0 or 1 for {coordinates} coordinates"
                f" at epsilon={float(self.epsilon):g}: the tables of the noise miss"
                f" {self.noise.lattice.certificate.delta:.1g} of its mass in each"
            )
        check_fit(calibration, self.noise.lattice, value)

    def _fit(self, shape: tuple[int, ...]) -> GridFit:
        assert self.noise.lattice is not None
        count(shape)
        value = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
        return self._calibration(value).fit(self.noise.lattice, value.dtype)

    @property
    def grid(self) -> Scalar:
        """The spacing of what is released for a scalar float; of integers it is 1."""
        return self.grid_for(())

    def grid_for(self, shape: tuple[int, ...]) -> Scalar:
        """The spacing of what is released for floats of a shape, a power of two.

        Args:
            shape: of the value.

        Returns:
            A scalar in the units of the value; 0 for noise in floats.
        """
        if self.noise.lattice is None or self.sensitivity.zero_allowed:
            return 0.0
        return as_number(power_of_two(self._fit(shape).exponent, jnp.result_type(float)))

    def effective_scale(self, shape: tuple[int, ...] = ()) -> Scalar:
        """The scale really drawn for floats of a shape.

        It covers rounding to the grid, as the norm of ones grows with the size, and the certificate
        of the noise's tables.

        Args:
            shape: of the value.

        Returns:
            A scalar in the units of the value; NaN where no grid can carry the noise.
        """
        if self.noise.lattice is None or self.sensitivity.zero_allowed:
            return self.scale
        return as_number(self._fit(shape).scale)

    def log_prob(self, output: Any, value: Any) -> jax.Array:
        value = _checks.real_arrays("value", value)
        calibration = self._calibration(value)
        return sum_over_leaves(
            lambda y, x: additive_log_prob(y, x, calibration, self.noise), output, value
        )

    def error_quantile(
        self, probability: float, *, shape: tuple[int, ...] = (), simultaneous: bool = False
    ) -> Scalar:
        tail = tail_of_one(probability, shape, simultaneous)
        return self.effective_scale(shape) * self.noise.tail_quantile(tail)

    @property
    def dp_event(self) -> Any:
        accounting = _checks.extra("dp_accounting", "accounting")
        if self.sensitivity.zero_allowed or not self._is_exact:
            return accounting.NonPrivateDpEvent()
        if self.noise.dp_event is None or self.noise.event_norm != self.norm:
            # In another norm the same noise multiplier means another mechanism.
            pure = np.array_equal(self.delta, 0)
            return super().dp_event if pure else accounting.UnsupportedDpEvent()
        # Of the ideal noise: accountants do not know the certificate's delta, for every coordinate
        # of Gaussian noise 2^-118 (1 + e^epsilon).
        return self.noise.dp_event(float(self.scale) / float(self.sensitivity.value))


def additive(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    norm: Norm,
    noise: Noise,
    delta: Scalar = 0.0,
    multiplier: Callable[[Scalar, Scalar], Scalar] | None = None,
) -> AdditiveMechanism:
    """A mechanism of your own: a norm, and noise whose log density is Lipschitz in it.

    Releases value + scale * Z with scale = Delta * multiplier(epsilon, delta), by default
    Delta / epsilon.

    Args:
        sensitivity: a `Sensitivity` in `norm`, or a number, taken as a global bound in it.
        epsilon: finite, above 0.
        norm: "l1", "l2", "linf", or a norm of the difference of two values: a function that is
            homogeneous, subadditive, and monotone in the magnitudes of the coordinates.
        noise: the distribution of Z. Without a `lattice` it is drawn in floats, and the release's
            guarantee says that it is not private.
        delta: 0, or a number in (0, 1) that the multiplier takes into account.
        multiplier: scale over sensitivity. With GAUSSIAN noise it must leave (1 - 2^-24) delta, for
            the mass that the noise's tables miss.

    Returns:
        An `AdditiveMechanism`.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if a parameter is out of range or the sensitivity is in another norm.

    Formal guarantees:
        You promise that the noise at scale multiplier(epsilon, delta), shifted by any vector of
        norm 1, is (epsilon, delta)-indistinguishable from itself; for the default multiplier,
        that its log density changes by at most the norm of the shift. The rest follows:
        (epsilon, delta, gamma)-random DP under the sensitivity's neighboring relation.

    Source:
        Rubinstein and Aldà (2017), Definition 9.

    Example:
        >>> from dpjax.mechanisms import additive
        >>> from dpjax.random import LAPLACE
        >>> additive(0.5, 1.0, norm="l1", noise=LAPLACE).scale
        0.5
    """
    sensitivity, epsilon = begin(norm, sensitivity, epsilon)
    if norm == "hamming":
        raise ValueError("norm must be homogeneous, to bound what rounding to a grid adds")
    if noise.lattice is not None and noise.lattice.certificate.delta > 0:
        delta = _checks.fraction("delta", delta)
    if _checks.is_traced(delta) or not np.array_equal(delta, 0):
        delta = _checks.fraction("delta", delta)
    unit = 1 / epsilon if multiplier is None else multiplier(epsilon, delta)
    if _checks.is_traced(unit):
        epsilon = jnp.where(jnp.isnan(unit), jnp.nan, outward(epsilon, math.inf))
    scale = sensitivity.value * unit
    if not _checks.is_traced(scale) and not math.isfinite(scale):
        raise ValueError(f"epsilon={epsilon} is too small: the scale of the noise overflows")
    return AdditiveMechanism(sensitivity, epsilon, delta, scale, norm, noise)


def as_number(scalar: Any) -> Scalar:
    """A Python number, where it is known."""
    return scalar if _checks.is_traced(scalar) or jnp.ndim(scalar) > 0 else float(scalar)


def check_fit(calibration: Calibration, lattice: Lattice, value: Any) -> None:
    """Refuses a concrete calibration that no grid can carry for a value of this size."""
    if calibration.zero_allowed or _checks.is_traced(calibration.scale):
        return
    for dtype in {leaf.dtype for leaf in jax.tree.leaves(value)}:
        if not calibration.fits(lattice, dtype):
            raise ValueError(
                f"epsilon={float(calibration.epsilon):g} is too small for a value of"
                f" {calibration.coordinates} coordinates of {dtype}: no grid can carry the noise,"
                f" of scale {float(calibration.scale):g}"
            )


def scale_drawn(calibration: Calibration, noise: Noise, dtype: Any) -> jax.Array:
    """The scale of the noise that values of a dtype get."""
    if noise.lattice is None:
        return usable_scale(calibration.scale, dtype)
    return calibration.fit(noise.lattice, dtype).scale


def additive_log_prob(
    output: jax.Array, x: jax.Array, calibration: Calibration, noise: Noise
) -> jax.Array:
    """Log density of one noisy array; log probability where it holds integers."""
    usable = scale_drawn(calibration, noise, x.dtype)
    output = jnp.asarray(output)
    if output.shape != x.shape:
        raise ValueError(f"output must be of the value's shape {x.shape}, got {output.shape}")
    center = centered(x)
    given, output = output, output.astype(center.dtype)
    if is_float(x):
        error = (output - center) / usable
        return jnp.sum(noise.log_density(error) - jnp.log(usable))
    # Integers are subtracted as such, in 64 bits: floats would lose the last ones.
    difference = _limbs.subtract(_limbs.from_integers(output), _limbs.from_integers(center))
    error = _limbs.to_float(difference, usable.dtype) / usable
    half = 0.5 / usable
    mass = noise.log_interval(error - half, error + half)
    # In float32 the ends of a narrow interval coincide; there it is the density times the width.
    mass = jnp.where(half < _NARROW, noise.log_density(error) - jnp.log(usable), mass)
    whole = output.astype(given.dtype) == given  # A fraction is no release.
    return jnp.sum(jnp.where(whole, mass, -jnp.inf))


def sum_over_leaves(function: Callable[..., jax.Array], *trees: Any) -> jax.Array:
    """Sums a function of corresponding leaves."""
    terms = jax.tree.leaves(jax.tree.map(function, *trees))
    widest = max((term.dtype for term in terms), key=lambda dtype: dtype.itemsize)
    return jnp.sum(jnp.stack([term.astype(widest) for term in terms]))
