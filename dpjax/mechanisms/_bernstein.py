"""The Bernstein mechanism: private release of functions on the unit cube."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._types import PyTree, Value
from dpjax._core._values import NoiseKind, Norm, Scalar, Sensitivity
from dpjax._exact._numerics import compute_dtype
from dpjax.mechanisms._bernstein_polynomial import BernsteinPolynomial, sup_norm_growth
from dpjax.mechanisms._coordinatewise import CoordinatewiseMechanism
from dpjax.mechanisms._start import begin, check_noise
from dpjax.random._facade import LAPLACE, Calibration, Noise
from dpjax.sensitivity._norms import grid_dtype


@frozen_pytree
class BernsteinMechanism(CoordinatewiseMechanism):
    """Releases polynomials from lattice values; made by `bernstein`.

    `effective_scale`, `grid_for`, `range` and `error` ignore a shape, and assume one lattice. Give
    them `like` for a pytree of lattices.

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

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity."""
        return "linf"

    @property
    def lattice_shape(self) -> tuple[int, ...]:
        """The shape of a value."""
        return (self.degree + 1,) * self.dims

    @property
    def scale(self) -> Scalar:
        """Scale of the noise in a lattice value, if the value is one lattice."""
        return math.prod(self.lattice_shape) * self.sensitivity.value / self.epsilon

    def _example(self, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        """One lattice, whatever the shape."""
        del shape
        return jax.ShapeDtypeStruct(self.lattice_shape, dtype)

    def _check_structure(self, value: Value) -> None:
        for leaf in jax.tree.leaves(value):
            if leaf.shape != self.lattice_shape:
                raise ValueError(
                    f"value must be lattice values of shape {self.lattice_shape} (see"
                    f" dpjax.evaluate_on_lattice), got shape {leaf.shape}"
                )

    def _calibration(self, arrays: PyTree) -> Calibration:
        lattices = len(jax.tree.leaves(arrays))
        # In the l1 norm, since all coordinates may move by the sensitivity.
        coordinates = lattices * math.prod(self.lattice_shape)
        return Calibration(
            lattices * self.scale,
            coordinates * self.sensitivity.value,
            self.epsilon,
            float(coordinates),
            coordinates,
            self.sensitivity.zero_allowed,
            grid_dtype(arrays),
        )

    def _before_noise(self, value: Value) -> PyTree:
        return jax.tree.map(_as_float, value)

    def _after_noise(self, noisy: PyTree) -> Value:
        return jax.tree.map(lambda leaf: BernsteinPolynomial(leaf, self.order), noisy)

    def _noisy(self, output: Value) -> PyTree:
        def is_polynomial(x: object) -> bool:
            return isinstance(x, BernsteinPolynomial)

        return jax.tree.map(lambda x: x.values, output, is_leaf=is_polynomial)

    def error(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        like: PyTree = None,
        simultaneous: bool = False,
    ) -> PyTree:
        """As for additive noise; if simultaneous, for the polynomials everywhere on the cube."""
        bounds = super().error(
            confidence=confidence, shape=shape, like=like, simultaneous=simultaneous
        )
        growth = sup_norm_growth(self.degree, self.dims, self.order) if simultaneous else 1.0
        return jax.tree.map(lambda bound: growth * bound, bounds)

    @property
    def dp_event(self) -> Any:
        """The event of the Laplace mechanism on the lattice values."""
        if self.sensitivity.zero_allowed or not self._is_exact:
            return super().dp_event
        assert LAPLACE.dp_event is not None
        return LAPLACE.dp_event(1 / float(self.epsilon))


def _as_float(lattice: jax.Array) -> jax.Array:
    """Lattice values in floats; integers are first clamped to those that floats hold exactly."""
    dtype = compute_dtype(lattice.dtype)
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

    The lattice values get Laplace noise of scale (degree + 1)^dims Delta / epsilon. The iterated
    operator I - (I - B)^h is applied to the noisy values.

    Args:
        sensitivity: a `Sensitivity` of the lattice values in the norm "linf", or a number, taken as
            a global bound in it.
        epsilon: finite, above 0.
        degree: k, at least 1: the lattice is {0, 1/k, ..., 1}^dims.
        dims: number of coordinates, at least 1.
        order: h, at least 1; a higher order approximates smooth functions better.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        A `BernsteinMechanism`: `mechanism(key, lattice_values)` takes shape (degree + 1,) * dims,
        as `dpjax.evaluate_on_lattice` makes it, and releases a `BernsteinPolynomial`. For a pytree
        of J lattices the scale grows by J, and the release is a pytree of polynomials.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not linf; at a
            release, if a value does not have the shape of the lattice.

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP where
        the sensitivity is a global bound. The polynomial is post-processing: evaluate it anywhere,
        any number of times. Holds for the noise that is drawn, given uniform bits. The scale covers
        rounding to the grid and the tables of the noise (`effective_scale`). noise="float" promises
        nothing.

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
