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
from dpjax._numerics import compute_dtype, outward
from dpjax._pytree import frozen_pytree, static, up
from dpjax.base import Norm, Scalar, Sensitivity
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin, count, tail_of_one
from dpjax.norms import grid_dtype, is_float, rounding_norm
from dpjax.random._grid_fit import Calibration, GridFit
from dpjax.random._noise import GAUSSIAN, Lattice, Noise
from dpjax.random._release import (
    add_noise,
    check_scale,
    clamped,
    largest_release,
    largest_value,
    shares_programs,
    usable_scale,
)

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

    def _compiles_in_pieces(self, value: Any) -> bool:
        return self._is_exact and shares_programs(value)

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
        if not _checks.is_traced(self.delta) and not calibration.covers(
            self.noise.lattice, self.delta, np
        ):
            raise ValueError(_too_much_missed(calibration, self.noise.lattice, float(self.delta)))
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

    def grids(self, value: Any) -> Any:
        """The spacing of every array of a release: a power of two for floats, 1 for integers.

        Args:
            value: a pytree of real arrays.

        Returns:
            A pytree of the same structure; 0 for noise in floats.
        """
        value = _checks.real_arrays("value", value)
        return grids_of_leaves(value, self._calibration(value), self.noise)

    def range(self, shape: tuple[int, ...] = (), dtype: Any = None) -> tuple[Scalar, Scalar]:
        """Between which values nothing is clamped; what lies outside is released as the nearer end.

        For floats 2^93 steps of the grid: more than 10^15 sensitivities for a vector of 10^9 at
        epsilon 1, where float64 no longer resolves one. For integers what their release can hold.

        Args:
            shape: of the value; of several arrays, one of as many floats.
            dtype: of the value; by default the default float.

        Returns:
            The two ends, in the units of the value.
        """
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(float) if dtype is None else dtype)
        count(shape)
        value = jax.ShapeDtypeStruct(shape, dtype)
        return symmetric(largest_value(dtype, self._calibration(value), self.noise))

    def clamped(self, value: Any) -> Any:
        """A value as it gets noise: NaN becomes 0, what is out of `range` its nearer end.

        Args:
            value: a pytree of real arrays.

        Returns:
            A pytree of the same structure and shapes, as private as the value.
        """
        value = _checks.real_arrays("value", value)
        return clamped_leaves(value, self._calibration(value), self.noise)

    def effective_scale(self, shape: tuple[int, ...] = ()) -> Scalar:
        """The scale really drawn for floats of a shape.

        It covers rounding to the grid, as the norm of ones grows with the size, and the certificate
        of the noise's tables. With T = 2^43 lattice points per scale b (Gaussian noise: 2^35), it
        exceeds b by at most .01% and 2.5 sqrt(b ||1|| / (T Delta)), where that is below 10%: for
        Laplace noise on d coordinates 8.5e-7 sqrt(d / epsilon). Integers are not rounded: noise on
        them exceeds b by at most .01% and 2 b / T.

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

    @property
    def zcdp(self) -> tuple[float, float]:
        """Of Gaussian noise in the l2 norm: (Delta / sigma)^2 / 2 and 0; else as of any mechanism.

        Bun and Steinke (2016), Proposition 1.6.
        """
        if self.noise is not GAUSSIAN or self.norm != "l2" or self.sensitivity.zero_allowed:
            return super().zcdp
        return (float(self.sensitivity.value) / float(self.scale)) ** 2 / 2 * (1 + 1e-12), 0.0


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


def _too_much_missed(calibration: Calibration, lattice: Lattice, delta: float) -> str:
    """Which of epsilon and delta to change, where delta does not cover what the tables miss."""
    missed = (
        f"the tables of the noise miss {lattice.certificate.delta:.1g} of its mass in each of"
        f" {calibration.coordinates} coordinates"
    )
    epsilon, largest = float(calibration.epsilon), calibration.largest_epsilon(lattice, delta)
    if 0 < largest < epsilon:
        return (
            f"epsilon={epsilon:g} is too large for delta={delta!r}, which allows {largest:.3g} at"
            f" most: {missed}, and e^epsilon times that must be small against delta"
        )
    return f"delta={delta!r} is too close to 0 or 1 at epsilon={epsilon:g}: {missed}"


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
    center = clamped(x, largest_value(x.dtype, calibration, noise))
    given, output = output, output.astype(center.dtype)
    if is_float(x):
        error, half = (output - center) / usable, 0.0
        inside = noise.log_density(error) - jnp.log(usable)
    else:
        # Subtracted as integers: floats would lose the last ones.
        error, half = _difference(output, center, usable.dtype) / usable, 0.5 / usable
        mass = noise.log_interval(error - half, error + half)
        # In float32 the ends of a narrow interval coincide: there, the density times the width.
        inside = jnp.where(half < _NARROW, noise.log_density(error) - jnp.log(usable), mass)
    # What lies beyond the largest release is released as it: the ends have a probability.
    end = largest_release(x.dtype)
    low, high = output <= -end, output >= end
    tail = noise.log_cdf(jnp.where(low, error, -error) + half)
    possible = (output >= -end) & (output <= end)
    possible &= output.astype(given.dtype) == given  # A fraction is no release of an integer.
    return jnp.sum(jnp.where(possible, jnp.where(low | high, tail, inside), -jnp.inf))


def _difference(output: jax.Array, center: jax.Array, dtype: Any) -> jax.Array:
    """The difference of two integers of a dtype, as a float: it may need one bit more."""
    one = _limbs.constant(1)
    negated = _limbs.add_to_wide(_limbs.widen(_limbs.invert(_limbs.from_integers(center))), one)
    return _limbs.wide_to_float(_limbs.add_to_wide(negated, _limbs.from_integers(output)), dtype)


def clamped_leaves(value: Any, calibration: Calibration, noise: Noise) -> Any:
    """A pytree as it gets noise; floats keep their dtype."""

    def as_noised(x: jax.Array) -> jax.Array:
        within = clamped(x, largest_value(x.dtype, calibration, noise))
        return within.astype(x.dtype) if is_float(x) else within

    return jax.tree.map(as_noised, value)


def grids_of_leaves(value: Any, calibration: Calibration, noise: Noise) -> Any:
    """The spacing of every array of what is released."""

    def spacing(leaf: jax.Array) -> Scalar:
        if noise.lattice is None or calibration.zero_allowed:
            return 0.0
        if not is_float(leaf):
            return 1.0
        exponent = calibration.fit(noise.lattice, leaf.dtype).exponent
        return as_number(power_of_two(exponent, compute_dtype(leaf.dtype)))

    return jax.tree.map(spacing, value)


def symmetric(bound: Any) -> tuple[Scalar, Scalar]:
    """The interval up to a bound, in Python numbers where it is known; integers stay integers."""
    bound = bound if isinstance(bound, int) else as_number(bound)
    return -bound, bound


def sum_over_leaves(function: Callable[..., jax.Array], *trees: Any) -> jax.Array:
    """Sums a function of corresponding leaves."""
    terms = jax.tree.leaves(jax.tree.map(function, *trees))
    widest = max((term.dtype for term in terms), key=lambda dtype: dtype.itemsize)
    return jnp.sum(jnp.stack([term.astype(widest) for term in terms]))
