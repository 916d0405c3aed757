"""The Bernstein mechanism: private release of functions on the unit cube."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._grid import power_of_two
from dpjax._numerics import compute_dtype
from dpjax._pytree import frozen_pytree, static, up
from dpjax.base import NoiseKind, Scalar, Sensitivity
from dpjax.mechanisms._additive import (
    additive_log_prob,
    as_number,
    check_fit,
    clamped_leaves,
    grids_of_leaves,
    sum_over_leaves,
    symmetric,
)
from dpjax.mechanisms._bernstein_polynomial import BernsteinPolynomial, sup_norm_growth
from dpjax.mechanisms._mechanism import (
    SensitivityMechanism,
    begin,
    check_noise,
    tail_of_one,
)
from dpjax.norms import grid_dtype
from dpjax.random._grid_fit import Calibration, GridFit
from dpjax.random._noise import LAPLACE, Noise
from dpjax.random._release import add_noise, check_scale, largest_value, shares_programs


@frozen_pytree
class BernsteinMechanism(SensitivityMechanism):
    """Releases polynomials from lattice values; made by `bernstein`.

    Attributes:
        sensitivity: of the lattice values, norm "linf".
        epsilon: of the guarantee.
        degree: of the polynomial in each coordinate.
        dims: number of coordinates.
        order: h of the operator I - (I - B)^h.
        noise: the distribution of the noise in lattice values.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    degree: int = static()
    dims: int = static()
    order: int = static()
    noise: Noise = static(default=LAPLACE)

    norm = "linf"

    @property
    def _is_exact(self) -> bool:
        return self.noise.lattice is not None

    def _compiles_in_pieces(self, value: Any) -> bool:
        return self._is_exact and shares_programs(value)

    @property
    def lattice_shape(self) -> tuple[int, ...]:
        """The shape of a value."""
        return (self.degree + 1,) * self.dims

    @property
    def scale(self) -> Scalar:
        """Scale of the noise in a lattice value, where the value is one lattice."""
        return math.prod(self.lattice_shape) * self.sensitivity.value / self.epsilon

    def _calibration(self, lattices: int, dtype: Any) -> Calibration:
        # In the l1 norm: every one of the coordinates moves by the sensitivity.
        coordinates = lattices * math.prod(self.lattice_shape)
        return Calibration(
            lattices * self.scale,
            coordinates * self.sensitivity.value,
            self.epsilon,
            float(coordinates),
            coordinates,
            self.sensitivity.zero_allowed,
            dtype,
        )

    def _fit(self) -> GridFit:
        assert self.noise.lattice is not None
        dtype = jnp.result_type(float)
        return self._calibration(1, dtype).fit(self.noise.lattice, dtype)

    @property
    def grid(self) -> Scalar:
        """The spacing of noisy lattice values, where the value is one lattice."""
        if self.noise.lattice is None or self.sensitivity.zero_allowed:
            return 0.0
        return as_number(power_of_two(self._fit().exponent, jnp.result_type(float)))

    def grids(self, value: Any) -> Any:
        """The spacing of the noisy values of every lattice, a power of two.

        Args:
            value: a pytree of lattices.

        Returns:
            A pytree of the same structure; 0 for noise in floats.
        """
        value = jax.tree.map(_as_float, _checks.real_arrays("value", value))
        return grids_of_leaves(value, self._calibration_of(value), self.noise)

    def range(self, shape: tuple[int, ...] = (), dtype: Any = None) -> tuple[Scalar, Scalar]:
        """Between which lattice values nothing is clamped, where the value is one lattice.

        Args:
            shape: ignored: the shape of a value is the lattice's.
            dtype: of the value, a float; by default the default float.

        Returns:
            The two ends, in the units of the function.
        """
        del shape
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(float) if dtype is None else dtype)
        lattice = jax.ShapeDtypeStruct(self.lattice_shape, compute_dtype(dtype))
        return symmetric(largest_value(lattice.dtype, self._calibration_of(lattice), self.noise))

    def clamped(self, value: Any) -> Any:
        """Lattice values as they get noise: NaN becomes 0, what is out of `range` its nearer end.

        Args:
            value: a pytree of lattices.

        Returns:
            A pytree of the same structure and shapes, as private as the value.
        """
        value = jax.tree.map(_as_float, _checks.real_arrays("value", value))
        return clamped_leaves(value, self._calibration_of(value), self.noise)

    def effective_scale(self, shape: tuple[int, ...] = ()) -> Scalar:
        """The scale really drawn, where the value is one lattice; it covers rounding to the grid.

        Args:
            shape: ignored: the shape of a value is the lattice's.

        Returns:
            A scalar in the units of the function.
        """
        del shape
        if self.noise.lattice is None or self.sensitivity.zero_allowed:
            return self.scale
        return as_number(self._fit().scale)

    def _check_value(self, value: Any) -> None:
        for leaf in jax.tree.leaves(value):
            if leaf.shape != self.lattice_shape:
                raise ValueError(
                    f"value must be lattice values of shape {self.lattice_shape} (see"
                    f" dpjax.on_lattice), got shape {leaf.shape}"
                )

        zero_allowed = self.sensitivity.zero_allowed
        floats = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, float_dtype(x)), value)
        calibration = self._calibration_of(floats)
        check_scale("scale of the noise", calibration.scale, value, zero_allowed=zero_allowed)
        if self.noise.lattice is not None and not _checks.is_traced(self.epsilon):
            check_fit(calibration, self.noise.lattice, floats)

    def _calibration_of(self, floats: Any) -> Calibration:
        return self._calibration(len(jax.tree.leaves(floats)), grid_dtype(floats))

    def _draw(self, key: jax.Array, value: Any) -> Any:
        value = jax.tree.map(_as_float, value)
        calibration = self._calibration_of(value)
        noisy = add_noise(key, value, calibration, self.noise)
        return jax.tree.map(lambda leaf: BernsteinPolynomial(leaf, self.order), noisy)

    def log_prob(self, output: Any, value: Any) -> jax.Array:
        value = _checks.real_arrays("value", value)
        value = jax.tree.map(_as_float, value)
        calibration = self._calibration_of(value)

        def lattice(x: jax.Array, polynomial: BernsteinPolynomial) -> jax.Array:
            return additive_log_prob(polynomial.values, x, calibration, self.noise)

        return sum_over_leaves(lattice, value, output)

    def error_quantile(
        self, probability: float, *, shape: tuple[int, ...] = (), simultaneous: bool = False
    ) -> Scalar:
        """How far the noise takes a lattice value, or the released polynomial, from the truth.

        Args:
            probability: in (0, 1).
            shape: ignored: the shape of a value is the lattice's. For a pytree of J lattices the
                result is J times as large.
            simultaneous: a bound for the polynomial everywhere on the cube, against the polynomial
                without noise, instead of the quantile for each lattice value.

        Returns:
            A scalar in the units of the function.
        """
        del shape
        tail = tail_of_one(probability, self.lattice_shape, simultaneous)
        growth = sup_norm_growth(self.degree, self.dims, self.order) if simultaneous else 1.0
        return growth * self.effective_scale() * self.noise.tail_quantile(tail)

    @property
    def dp_event(self) -> Any:
        """The event of the Laplace mechanism on the lattice values."""
        if self.sensitivity.zero_allowed or not self._is_exact:
            return super().dp_event
        assert LAPLACE.dp_event is not None
        return LAPLACE.dp_event(1 / float(self.epsilon))


def float_dtype(lattice: Any) -> Any:
    """The dtype in which lattice values are released."""
    return compute_dtype(lattice.dtype)


def _as_float(lattice: jax.Array) -> jax.Array:
    """Lattice values in floats; integers are first clamped to those that a float can tell apart."""
    dtype = float_dtype(lattice)
    if jnp.issubdtype(lattice.dtype, jnp.integer):
        limits, exact = jnp.iinfo(lattice.dtype), 2 ** (jnp.finfo(dtype).nmant + 1)
        lattice = jnp.clip(lattice, max(limits.min, -exact), min(limits.max, exact))
    return lattice.astype(dtype)


def bernstein(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    degree: int,
    dims: int,
    order: int = 1,
    noise: NoiseKind = "exact",
) -> BernsteinMechanism:
    """The Bernstein mechanism: releases a function on [0, 1]^dims as a polynomial.

    Laplace noise of scale (degree + 1)^dims Delta / epsilon enters the lattice values; the iterated
    operator I - (I - B)^h is applied to the noisy values, as post-processing.

    Args:
        sensitivity: a `Sensitivity` of the lattice values in the norm "linf", or a number, taken as
            a global bound in it.
        epsilon: finite, above 0.
        degree: k, at least 1: the lattice is {0, 1/k, ..., 1}^dims.
        dims: number of coordinates, at least 1.
        order: h, at least 1; smooth functions are approximated better at higher orders.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        A `BernsteinMechanism`: `mechanism(key, lattice_values)` takes shape (degree + 1,) * dims,
        as `dpjax.on_lattice` makes it, and releases a `BernsteinPolynomial`. A pytree of J lattices
        gets J times the scale and gives a pytree of polynomials.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not linf; at a
            release, if a value has not the shape of the lattice.

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP where
        the sensitivity is a global bound. The polynomial may be evaluated anywhere, any number of
        times. Holds for what is really drawn, given uniform bits: the scale covers rounding to the
        grid and the tables of the noise, see `effective_scale`. With noise="float" nothing is
        promised.

    Source:
        Aldà and Rubinstein (2017), Theorem 1; Rubinstein and Aldà (2017), Corollary 14.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.bernstein(0.01, epsilon=1.0, degree=4, dims=1)
        >>> round(mechanism.scale, 6)
        0.05
        >>> release = mechanism(dpjax.random.seeded_key(0), jnp.zeros(5))
        >>> release.value(jnp.array([[0.0], [0.5]])).shape
        (2,)
    """
    sensitivity, epsilon = begin("linf", sensitivity, epsilon)
    return BernsteinMechanism(
        sensitivity,
        epsilon,
        _checks.integer("degree", degree, least=1),
        _checks.integer("dims", dims, least=1),
        _checks.integer("order", order, least=1),
        LAPLACE if check_noise(noise) else LAPLACE.in_floats(),
    )
