"""The shaped Gaussian mechanism: correlated Gaussian noise A z for a public matrix A."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._pytree import made, made_by_factory, static, up
from dpjax._core._types import PyTree, Value
from dpjax._core._values import NoiseKind, Norm, Scalar, Sensitivity, norm_name
from dpjax.mechanisms._additive import gaussian
from dpjax.mechanisms._noise_intervals import around_noise
from dpjax.mechanisms._noisy_arrays import ArrayOrShape, CoordinatewiseMechanism
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import Noise
from dpjax.sensitivity._shaped_norm import NoiseShape


@made_by_factory
class ShapedGaussianMechanism(CoordinatewiseMechanism):
    """Adds Gaussian noise to A^-1 f, and releases A times the sum; made by `shaped_gaussian`.

    `scale`, `effective_scale` and `grid_for` are about the array A^-1 f, which gets the noise.
    `range`, `clamped`, `error` and `log_prob` are about the value and its release. Arguments
    `shape` and `dtype` are ignored, because the `NoiseShape` determines the shape of the value.
    Releases are not multiples of a grid spacing.

    Attributes:
        sensitivity: the sensitivity that the noise is calibrated to.
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee.
        scale: the scale of the noise in A^-1 f.
        noise: the distribution at scale 1.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    delta: Scalar = up()
    scale: Scalar
    noise: Noise = static()
    _is_mapped = True

    @property
    def _shape(self) -> NoiseShape:
        assert isinstance(self.norm, NoiseShape)
        return self.norm

    @property
    def _norm_of_noise(self) -> Norm:
        return "l2"

    def _example(self, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        del shape, dtype
        return self._shape.outputs.tree()

    def _check_structure(self, value: Value) -> None:
        self._shape.check_fits(value)

    def _before_noise(self, value: Value) -> PyTree:
        return self._shape.mapped(value)

    def _after_noise(self, noisy: PyTree) -> Value:
        return self._shape.shaped(noisy)

    def _noisy(self, output: Value) -> PyTree:
        return self._shape.mapped_in_floats(output)

    def grids(self, value: Value) -> PyTree:
        return jax.tree.map(lambda leaf: 0.0, value)

    def range(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
        *,
        like: PyTree = None,
    ) -> tuple[PyTree, PyTree]:
        """The interval to which values are clamped: [-2^36 g, 2^36 g], if g is their grid spacing.

        `noise_shape` sampled values of the target. The ends of the interval are at least 16 times
        as far from 0 as any of these values.
        """
        del shape, dtype
        high = jax.tree.map(lambda leaf: self._shape.largest_value, 0 if like is None else like)
        return jax.tree.map(operator.neg, high), high

    def clamped(self, value: Value) -> Value:
        """The value after clamping: NaN becomes 0, and other numbers are clamped to `range`."""
        return self._shape.clamped(_checks.real_arrays("value", value))

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        return super().log_prob(output, value) + self._shape.log_determinant

    def _errors(
        self, arrays: PyTree, calibration: Calibration, quantile: float, *, everywhere: bool
    ) -> PyTree:
        """Bounds the error of each number. It consists of noise and of two rounding errors.

        Values are rounded to one grid, and noisy values are on another grid.

        Simultaneous bounds assume independent coordinates, which is the worst case (Šidák 1967).
        """
        del everywhere
        scales, steps = self._scales_and_steps(arrays, calibration)
        return self._shape.unflattened(jnp.asarray(scales * quantile + steps))

    def _scales_and_steps(
        self, array: ArrayOrShape, calibration: Calibration
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each coordinate's scale of noise, and its rounding error (of noise and value)."""
        matrix = self._shape.matrix
        scales = self._scale_drawn(array, calibration) * np.linalg.norm(matrix, axis=1)
        # The error of rounding to the grid of the noise is also multiplied by the matrix A.
        # Rounding the value itself to its grid adds half a step.
        steps = self._spacing(array, calibration) * np.abs(matrix).sum(axis=1)
        return scales, steps + 2.0 ** (self._shape.unit - 1)

    def _accuracy(self, value: Value) -> Accuracy:
        scales_and_steps = self._scales_and_steps(*self._asked(None, value))
        each = (self._shape.unflattened(jnp.asarray(x)) for x in scales_and_steps)
        leaves = [(leaf.size, False) for leaf in jax.tree.leaves(value)]
        return around_noise(self.noise, leaves, *map(jax.tree.leaves, each))


def shaped_gaussian(
    sensitivity: Sensitivity,
    epsilon: Scalar,
    delta: Scalar,
    *,
    noise: NoiseKind = "exact",
) -> ShapedGaussianMechanism:
    """The Gaussian mechanism with correlated noise: A times normal noise, for a public matrix A.

    For a value f and standard normal z, the mechanism releases A (A^-1 f + sigma z) = f + sigma A
    z. Here sigma is calibrated to ||A^-1 (f - f')||_2, where f' is the value of a neighboring
    database. With A from `dpjax.noise_shape`, the noise is large in directions in which a replaced
    record changes the value much, and small in other directions. For a logistic regression with 30
    features, the expected squared error is .47 to .75 of the error of isotropic noise, depending on
    the correlations in the oracle.

    Args:
        sensitivity: a `Sensitivity` whose norm is a `NoiseShape`: sampled with `norm=shape`, or a
            bound of your own, by `dpjax.assume_sensitivity(bound, norm=shape)`.
        epsilon: finite, above 0.
        delta: as for `dpjax.gaussian`.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        A `ShapedGaussianMechanism`: `mechanism(key, value)` releases floats, in a pytree like the
        values from which the shape was learned. `error` returns a bound for each coordinate.

    Raises:
        TypeError: if a parameter is not a number, or the sensitivity not a `Sensitivity`.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not a `NoiseShape`.

    Formal guarantees:
        (epsilon, delta, gamma)-random DP under the sensitivity's neighboring relation, because it
        is the mechanism `dpjax.gaussian` on A^-1 f. Values are rounded to a fine grid, and
        multiplied by a matrix of integers without rounding. So the sampler and a release compute
        the same A^-1 f, and the sampled distances are valid for a release. Then A^-1 f is rounded
        to the grid of the noise, and the scale covers this rounding. Multiplying the noisy numbers
        by A is post-processing. A does not depend on the sampled pairs, because
        `dpjax.sample_sensitivity` refuses the key that the shape was learned with. A bound of your
        own must be true of A^-1 f as `shape.mapped` computes it. noise="float" has no guarantee.

    Source:
        Balle and Wang (2018), Theorem 8, on A^-1 f; Dwork and Roth (2014), Proposition 2.1, for
        post-processing.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> def oracle(key, n):
        ...     return jax.random.normal(key, (n, 2)) * jnp.array([[1.0, 0.01]])
        >>> key_shape, key_sample = jax.random.split(dpjax.random.seeded_key(0))
        >>> mean = lambda database: jnp.mean(database, axis=0)
        >>> shape = dpjax.noise_shape(key_shape, mean, oracle, n=100)
        >>> sensitivity = dpjax.sample_sensitivity(
        ...     key_sample, mean, oracle, n=100, norm=shape, gamma=0.05
        ... )
        >>> mechanism = dpjax.shaped_gaussian(sensitivity, epsilon=1.0, delta=1e-5)
        >>> first, second = mechanism.error(confidence=0.95)
        >>> bool(second < 0.2 * first)
        True
    """
    if not isinstance(sensitivity, Sensitivity):
        raise TypeError(
            "sensitivity must be a dpjax.Sensitivity whose norm is a NoiseShape, got"
            f" {_checks.shown(sensitivity)}"
        )
    if not isinstance(sensitivity.norm, NoiseShape):
        raise ValueError(
            "sensitivity must be in the norm of a NoiseShape, got a sensitivity in the norm"
            f" {norm_name(sensitivity.norm)}: sample it with norm=dpjax.noise_shape(...)"
        )
    isotropic = gaussian(dataclasses.replace(sensitivity, norm="l2"), epsilon, delta, noise=noise)
    shaped = dataclasses.replace(isotropic.sensitivity, norm=sensitivity.norm)
    calibrated = isotropic.epsilon, isotropic.delta, isotropic.scale
    return made(ShapedGaussianMechanism, shaped, *calibrated, isotropic.noise)
