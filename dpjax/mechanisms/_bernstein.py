"""The Bernstein mechanism: releases a function on the unit cube as a polynomial."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import (
    KnowsSensitivity,
    NeighboringRelation,
    NoiseKind,
    Scalar,
    Sensitivity,
    Target,
)
from dpjax._exact._numerics import compute_dtype
from dpjax.mechanisms._noisy_arrays import CoordinatewiseMechanism
from dpjax.mechanisms._start import begin, check_noise
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import LAPLACE, Noise
from dpjax.sensitivity._norms import grid_dtype


@frozen_pytree
class BernsteinPolynomial:
    """The iterated Bernstein polynomial of a function on [0, 1]^dims, from its lattice values.

    `polynomial(points)` evaluates it at points of shape (..., dims). With B the Bernstein operator
    and v the lattice values, the polynomial of order h is (I - (I - B)^h) v. Its coefficients in
    the Bernstein basis are sum_{i < h} (I - B)^i v.

    Attributes:
        values: the values on the lattice {0, 1/degree, ..., 1}^dims, shape (degree + 1,) * dims;
            axis i is coordinate i.
        order: h; 1 is the plain Bernstein polynomial.

    Formal guarantees:
        The polynomial is a function of the lattice values alone. If the lattice values are
        differentially private, evaluating the polynomial costs nothing more.
    """

    values: jax.Array
    order: int = static(default=1)

    @property
    def degree(self) -> int:
        """Degree in each coordinate."""
        return self.values.shape[-1] - 1

    @property
    def dims(self) -> int:
        """Number of coordinates."""
        return self.values.ndim

    @property
    def coefficients(self) -> jax.Array:
        """Coefficients in the Bernstein basis, of the shape of `values`."""
        operator = jnp.asarray(bernstein_matrix(self.degree), self.values.dtype)
        residual = self.values
        coefficients = residual
        for _ in range(self.order - 1):
            residual = residual - _along_every_axis(operator, residual)
            coefficients = coefficients + residual
        return coefficients

    def __call__(self, points: ArrayLike) -> jax.Array:
        """Evaluates the polynomial.

        Args:
            points: shape (..., dims), in [0, 1]; outside of [0, 1], the polynomial extrapolates.

        Returns:
            Shape (...).

        Raises:
            ValueError: if the last axis of `points` is not dims.
        """
        points = jnp.asarray(points, self.values.dtype)
        if points.ndim == 0 or points.shape[-1] != self.dims:
            raise ValueError(
                f"points must have shape (..., {self.dims}), got {points.shape}"
                + (": for an array x of numbers, pass x[..., None]" if self.dims == 1 else "")
            )
        flat = points.reshape(-1, self.dims)
        coefficients = self.coefficients
        return jax.vmap(lambda x: _evaluate(coefficients, x))(flat).reshape(points.shape[:-1])

    def __repr__(self) -> str:
        return f"BernsteinPolynomial(degree={self.degree}, dims={self.dims}, order={self.order})"


def lattice_values(function: Callable[[jax.Array], Value], degree: int, dims: int) -> Value:
    """Evaluates a function on the lattice {0, 1/degree, ..., 1}^dims.

    The function must return a scalar or pytree of scalars.
    """
    _checks.function("the value of the target", function)
    axes = np.meshgrid(*[np.linspace(0.0, 1.0, degree + 1)] * dims, indexing="ij")
    points = jnp.asarray(np.stack(axes, axis=-1).reshape(-1, dims), jnp.result_type(float))
    values = jax.vmap(function)(points)

    def reshaped(leaf: jax.Array) -> jax.Array:
        if leaf.ndim != 1:
            raise ValueError(
                f"the function must return scalars, got shape {leaf.shape[1:]}: return a tuple of"
                " scalars for one polynomial per output"
            )
        return leaf.reshape((degree + 1,) * dims)

    return jax.tree.map(reshaped, _checks.real_arrays("the value of the function", values))


def evaluate_on_lattice(
    target: Callable[[Database], Callable[[jax.Array], Value]], *, degree: int, dims: int
) -> Target:
    """Converts a target that returns a function to a target that returns values on a lattice.

    The lattice is {0, 1/degree, ..., 1}^dims; axis i is coordinate i.

    Args:
        target: maps a database to a function. This function maps a point of [0, 1]^dims, shape
            (dims,), to a scalar or a tuple of scalars. A tuple gives one lattice for each entry.
        degree: the degree of the polynomial, at least 1.
        dims: number of coordinates, at least 1.

    Returns:
        A target whose value has shape (degree + 1,) * dims. Sample its sensitivity in the norm
        "linf", and release it by `dpjax.bernstein` with the same degree and dims. A target with a
        known sensitivity, such as `dpjax.targets.kernel_density`, keeps it: the same bound is valid
        for its values on the lattice.

    Raises:
        TypeError: if the target is not a function, or does not return a function.
        ValueError: if degree or dims is below 1, or the function does not return scalars.

    Formal guarantees:
        The released polynomial depends on the database through these values alone, so only their
        sensitivity matters.

    Source:
        Aldà and Rubinstein (2017), Section 4; Rubinstein and Aldà (2017), Corollary 14.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> target = dpjax.evaluate_on_lattice(
        ...     lambda database: lambda x: jnp.mean(database <= x[0]), degree=4, dims=1
        ... )
        >>> target(jnp.array([0.1, 0.3, 0.6, 0.9])).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    _checks.function("target", target)
    degree = _checks.integer("degree", degree, least=1)
    dims = _checks.integer("dims", dims, least=1)

    known = isinstance(target, KnowsSensitivity) and "linf" in target.norms
    made = _KnownOnLattice if known else _OnLattice
    return made(target, degree, dims)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, eq=False)
class _OnLattice:
    """A target that evaluates, at lattice points, the function that another target returns."""

    target: Callable[[Database], Callable[[jax.Array], Value]]
    degree: int
    dims: int

    def __call__(self, database: Database) -> Value:
        return lattice_values(self.target(database), self.degree, self.dims)


class _KnownOnLattice(_OnLattice, KnowsSensitivity):
    """An `_OnLattice` of a target that knows its sensitivity in the norm "linf"."""

    norms = ("linf",)
    relations = (NeighboringRelation.REPLACE_ONE,)
    reads = "floats"

    def _bound(self, norm: Any, relation: NeighboringRelation, n: int | None, dtype: Any) -> float:
        assert isinstance(self.target, KnowsSensitivity)
        return self.target._bound(norm, relation, n, dtype)


def approximate_bernstein(
    function: Callable[[jax.Array], Value], *, degree: int, dims: int, order: int = 1
) -> PyTree:
    """The iterated Bernstein approximation of a function, without any privacy.

    The Bernstein mechanism would release this polynomial if it added no noise.

    Args:
        function: maps a point of [0, 1]^dims, shape (dims,), to a scalar or a pytree of scalars.
        degree: the degree of the polynomial, at least 1.
        dims: number of coordinates, at least 1.
        order: h of the operator I - (I - B)^h, at least 1.

    Returns:
        A `BernsteinPolynomial`, or a pytree of polynomials if the function returns a pytree of
        scalars.

    Raises:
        TypeError: if `function` is not a function.
        ValueError: if a number is below 1, or the function does not return scalars.

    Formal guarantees:
        None. It is not private.

    Source:
        Micchelli (1973) for the iterated operator; Aldà and Rubinstein (2017), Section 4.

    Example:
        >>> import dpjax
        >>> line = dpjax.approximate_bernstein(lambda x: 2 * x[0], degree=3, dims=1)
        >>> round(float(line([0.25])), 6)
        0.5
    """
    degree = _checks.integer("degree", degree, least=1)
    dims = _checks.integer("dims", dims, least=1)
    order = _checks.integer("order", order, least=1)
    values = lattice_values(function, degree, dims)
    return jax.tree.map(
        lambda leaf: BernsteinPolynomial(leaf.astype(compute_dtype(leaf.dtype)), order), values
    )


def bernstein_matrix(degree: int) -> np.ndarray:
    """Returns the matrix of the Bernstein operator, which maps lattice values to lattice values.

    Entry (j, i) is the Bernstein basis polynomial i at j / degree.
    """
    lattice = np.linspace(0.0, 1.0, degree + 1)
    return scipy.stats.binom.pmf(np.arange(degree + 1)[None, :], degree, lattice[:, None])


def sup_norm_growth(degree: int, dims: int, order: int) -> float:
    """Bounds the ratio of sup |polynomial| and max |lattice values|.

    In one dimension, this ratio is the maximum of the Lebesgue function. The code computes the
    maximum over n Chebyshev nodes. Dividing it by cos(pi degree / (2 n)) bounds the maximum between
    the nodes, too (Ehlich and Zeller 1964).
    """
    if order == 1:
        return 1.0  # The values of the polynomial are convex combinations of lattice values.
    if dims > 1:
        return float(2**order - 1)  # The norm of B is 1, so the norm of (I - B)^i is at most 2^i.
    matrix = bernstein_matrix(degree)
    residual = total = np.eye(degree + 1)
    for _ in range(order - 1):
        residual = residual - matrix @ residual
        total = total + residual
    count = 16 * degree
    nodes = (1 + np.cos((np.arange(count) + 0.5) * np.pi / count)) / 2
    basis = scipy.stats.binom.pmf(np.arange(degree + 1)[None, :], degree, nodes[:, None])
    largest = np.abs(basis @ total).sum(axis=1).max()
    return float(largest / np.cos(np.pi * degree / (2 * count)))


def _along_every_axis(operator: jax.Array, values: jax.Array) -> jax.Array:
    for axis in range(values.ndim):
        product = jnp.tensordot(operator, values, axes=(1, axis), precision=lax.Precision.HIGHEST)
        values = jnp.moveaxis(product, 0, axis)
    return values


def _evaluate(coefficients: jax.Array, x: jax.Array) -> jax.Array:
    """Evaluates the polynomial by De Casteljau's algorithm on each axis, stable at any degree."""
    for coordinate in range(x.shape[0]):
        t = x[coordinate]

        def combine(_: int, c: jax.Array, t: jax.Array = t) -> jax.Array:
            # `roll` moves the first entry to the end, which makes the last entry wrong. Wrong
            # entries spread by one index in each step, but never reach the first entry, which is
            # the result.
            return (1 - t) * c + t * jnp.roll(c, -1, axis=0)

        coefficients = lax.fori_loop(0, coefficients.shape[0] - 1, combine, coefficients)[0]
    return coefficients


@frozen_pytree
class BernsteinMechanism(CoordinatewiseMechanism):
    """Releases polynomials from lattice values; made by `bernstein`.

    `effective_scale`, `grid_for`, `range` and `error` ignore the argument `shape`, and assume one
    lattice. For a pytree of lattices, pass `like`. With `simultaneous=True`, `error` bounds the
    error of the polynomials at all points of the cube at once.

    Attributes:
        sensitivity: the sensitivity of the lattice values, norm "linf".
        epsilon: the epsilon of the guarantee.
        degree: the degree of the polynomial in each coordinate.
        dims: number of coordinates.
        order: h of the operator I - (I - B)^h.
        noise: the distribution of the noise in lattice values.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    degree: int = static()
    dims: int = static()
    order: int = static()
    noise: Noise = static(default=LAPLACE)
    _is_mapped = True

    @property
    def lattice_shape(self) -> tuple[int, ...]:
        """The shape of a value."""
        return (self.degree + 1,) * self.dims

    @property
    def scale(self) -> Scalar:
        """The scale of the noise that is added to each number, if the value is one lattice.

        If the value consists of k lattices, the scale is k times as large.
        """
        return math.prod(self.lattice_shape) * self.sensitivity.value / self.epsilon

    def _example(self, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        """Returns the spec of one lattice, and ignores the shape."""
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
        # Laplace noise is calibrated in the l1 norm. This norm is at most the number of coordinates
        # times the sensitivity in linf.
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
        return jax.tree.map(
            lambda x: x.values, output, is_leaf=lambda x: isinstance(x, BernsteinPolynomial)
        )

    def _errors(
        self, arrays: PyTree, calibration: Calibration, quantile: float, *, everywhere: bool
    ) -> PyTree:
        """Bounds the errors of the values at lattice points.

        If `everywhere`, it bounds the errors of the polynomials at all points of the cube.
        """
        bounds = super()._errors(arrays, calibration, quantile, everywhere=everywhere)
        growth = sup_norm_growth(self.degree, self.dims, self.order) if everywhere else 1.0
        return jax.tree.map(lambda bound: growth * bound, bounds)

    @property
    def dp_event(self) -> Any:
        """The event of the Laplace mechanism on the lattice values."""
        if self.sensitivity.zero_allowed or not self._is_exact:
            return super().dp_event
        assert LAPLACE.dp_event is not None
        return LAPLACE.dp_event(1 / float(self.epsilon))


def _as_float(lattice: jax.Array) -> jax.Array:
    """Casts lattice values to floats.

    Integers are first clamped to a range that floats represent.
    """
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
        sensitivity: a `Sensitivity` of the lattice values in the norm "linf", or a number, which is
            taken as a global bound in that norm.
        epsilon: finite, above 0.
        degree: k, at least 1: the lattice is {0, 1/k, ..., 1}^dims.
        dims: number of coordinates, at least 1.
        order: h, at least 1; a higher order approximates smooth functions better.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        A `BernsteinMechanism`: `mechanism(key, lattice_values)` takes values of shape
        (degree + 1,) * dims from `dpjax.evaluate_on_lattice`, and releases a `BernsteinPolynomial`.
        For a pytree of J lattices, the scale is J times as large, and the release is a pytree of
        polynomials.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not linf; at a
            release, if a value does not have the shape of the lattice.

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP if
        the sensitivity is a global bound. The polynomial is post-processing, so you may evaluate it
        anywhere, any number of times. The guarantee holds for the noise that is actually drawn,
        given uniform random bits: the scale covers rounding to the grid and the errors of the
        noise's tables, see `effective_scale`. noise="float" has no guarantee.

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
