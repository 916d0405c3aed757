"""Base classes of mechanisms that round arrays to a grid and add integer noise."""

import abc
import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy
from dpjax._core._losses import LossFamily, PairLoss
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree, Scalar, Value
from dpjax._core._values import Norm
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._numerics import compute_dtype, is_float
from dpjax.mechanisms._noise_intervals import around_noise, noise_quantile
from dpjax.mechanisms._start import count, sum_over_leaves
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import DISCRETE_LAPLACE, GAUSSIAN, LAPLACE, Lattice, Noise
from dpjax.random._release import (
    PaddedNoise,
    add_noise,
    check_scale,
    clamped,
    largest_release,
    largest_value,
    shares_programs,
    usable_scale,
)
from dpjax.release._mechanism import SensitivityMechanism
from dpjax.sensitivity._norms import NORMS, grid_dtype, rounding_norm

ArrayOrShape: TypeAlias = jax.Array | jax.ShapeDtypeStruct


class OnGrid(abc.ABC):
    """A mixin for mechanisms that round arrays to a grid and add integer noise.

    A subclass defines `_lattice`, `_calibration` and `_draw`. `_before_noise` maps a value to the
    arrays that get noise. By default it is the identity.

    Attributes:
        epsilon: the epsilon of the guarantee.

    Formal guarantees:
        None of its own. The scale that `Calibration.fit` returns covers rounding to the grid and
        the errors of the noise's tables. So `_draw` of a subclass must use the scale from
        `_calibration`.
    """

    epsilon: Scalar
    _scale_name = "scale of the noise"  # The name of the scale in error messages.

    @property
    @abc.abstractmethod
    def _lattice(self) -> Lattice | None:
        """Returns the lattice of the noise; None for noise in floats."""

    @abc.abstractmethod
    def _calibration(self, arrays: PyTree) -> Calibration:
        """Returns the parameters that determine scale and grid, from shapes and dtypes alone."""

    def _before_noise(self, value: Value) -> PyTree:
        """Returns the arrays that are rounded and to which noise is added."""
        return value

    def _example(self, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        """Returns the spec of a value of this shape and dtype, for methods that take `shape`."""
        count(shape)
        return jax.ShapeDtypeStruct(shape, dtype)

    def _check_structure(self, value: Value) -> None:
        """Raises an error for values of a structure or shape that the mechanism does not accept."""
        del value  # By default, all structures and shapes are accepted.

    @property
    def _is_exact(self) -> bool:
        return self._lattice is not None

    def _check_value(self, value: Value) -> None:
        self._check_structure(value)
        # The check may depend on shapes and dtypes, but not on the contents of the value, which are
        # private.
        arrays = jax.eval_shape(self._before_noise, value)
        calibration = self._calibration(arrays)
        check_scale(self._scale_name, calibration, arrays)
        if self._is_exact and not _checks.is_traced(self.epsilon):
            self._check_fit(arrays, calibration)

    def _check_fit(self, arrays: PyTree, calibration: Calibration) -> None:
        """Raises an error for concrete parameters if no grid suits noise of this scale."""
        assert self._lattice is not None
        if calibration.zero_allowed or _checks.is_traced(calibration.scale):
            return
        for dtype in {leaf.dtype for leaf in jax.tree.leaves(arrays)}:
            if not calibration.fits(self._lattice, dtype):
                raise ValueError(
                    f"epsilon={float(calibration.epsilon):g} is too small for a value of"
                    f" {calibration.coordinates} coordinates of {dtype}: no grid can hold noise of"
                    f" scale {float(calibration.scale):g}; take a larger epsilon"
                )

    def _asked(
        self, shape: tuple[int, ...] | None, like: PyTree, dtype: DTypeLike | None = None
    ) -> tuple[PyTree, Calibration]:
        """Returns the specs of the arrays that get noise, and their `Calibration`."""
        if like is None:
            dtype = jnp.result_type(float) if dtype is None else dtype
            shape = () if shape is None else shape
            value = self._example(shape, jax.dtypes.canonicalize_dtype(dtype))
        elif shape is not None or dtype is not None:
            raise ValueError(
                f"`like` already determines shapes and dtypes: leave out shape={shape} and"
                f" dtype={dtype}"
            )
        else:
            value = _checks.real_shapes("like", like)
            self._check_structure(value)
        arrays = jax.eval_shape(self._before_noise, value)
        return arrays, self._calibration(arrays)

    @property
    def grid(self) -> Scalar:
        """The spacing of the grid for a scalar float. Integers are not rounded."""
        return self.grid_for()

    def grid_for(self, shape: tuple[int, ...] | None = None, *, like: PyTree = None) -> PyTree:
        """The spacing of the grid to which arrays are rounded: a power of two; 1 for integers.

        Args:
            shape: the shape of a value of JAX's default float; () by default.
            like: instead of a shape, a pytree of arrays or `jax.ShapeDtypeStruct`s.

        Returns:
            A scalar in the units of the value, or one scalar for every array of `like`. It is 0 if
            nothing is rounded: for noise in floats, and without noise.
        """
        arrays, calibration = self._asked(shape, like)

        return jax.tree.map(lambda leaf: self._spacing(leaf, calibration), arrays)

    def _spacing(self, leaf: ArrayOrShape, calibration: Calibration) -> Scalar:
        if self._lattice is None or calibration.zero_allowed:
            return 0.0
        if not is_float(leaf):
            return 1.0
        exponent = calibration.fit(self._lattice, leaf.dtype).exponent
        if not _checks.is_traced(exponent) and exponent.ndim == 0:
            return math.ldexp(1.0, int(exponent))  # On the host, this needs no compilation.
        return power_of_two(exponent, compute_dtype(leaf.dtype))

    def effective_scale(
        self, shape: tuple[int, ...] | None = None, *, like: PyTree = None
    ) -> PyTree:
        """The scale of the drawn noise. It is slightly above the nominal scale b.

        The excess covers rounding to the grid, and the errors of the noise's tables. For
        selections, the scale has the units of scores: an option whose score is lower by one scale
        is e times less likely.

        The points of the noise's lattice are 1 / T of the scale apart. T is 2^35 for Gaussian
        noise, and 2^43 for other noise. Let Delta be the sensitivity, ||1|| the norm of a vector of
        ones, and r = 2.5 sqrt(b ||1|| / (T Delta)). For floats, the scale exceeds b by at most the
        fraction .01% + r of b, if r is below 10%. For Laplace noise on d coordinates, r is 8.5e-7
        sqrt(d / epsilon). Integers are not rounded. For them, the fraction is at most .01% + 2 b /
        T.

        Args:
            shape: the shape of a value of JAX's default float; () by default.
            like: instead of a shape, the value: a pytree of arrays or
                `jax.ShapeDtypeStruct`s.

        Returns:
            A scalar in the units of the value, or one scalar for every array of `like`. All arrays
            have the same nominal scale, but the effective scales of different dtypes may differ
            slightly. NaN if no grid suits the noise.
        """
        arrays, calibration = self._asked(shape, like)
        return jax.tree.map(lambda leaf: self._scale_drawn(leaf, calibration), arrays)

    def _scale_drawn(self, leaf: ArrayOrShape, calibration: Calibration) -> Scalar:
        if self._lattice is None or calibration.zero_allowed:
            return calibration.scale
        return as_number(calibration.fit(self._lattice, leaf.dtype).scale)


def as_number(scalar: Scalar) -> Scalar:
    """Converts a concrete scalar to a Python number. Returns batches and tracers unchanged."""
    if isinstance(scalar, int) or _checks.is_traced(scalar) or jnp.ndim(scalar) > 0:
        return scalar
    return float(scalar)


def whole(bound: Scalar) -> Scalar:
    """Rounds a bound on an integer down to an integer. The result is still a bound."""
    return jnp.floor(bound) if isinstance(bound, jax.Array) else float(np.floor(bound))


# Discrete Laplace noise is in the family "pure", because its privacy profile can be as large as
# that of any epsilon-DP mechanism.
_FAMILIES: dict[Noise, LossFamily] = {
    LAPLACE: "laplace",
    DISCRETE_LAPLACE: "pure",
    GAUSSIAN: "gaussian",
}


class CoordinatewiseMechanism(OnGrid, SensitivityMechanism):
    """A base class of mechanisms that add noise to every coordinate.

    The noise is added to the value, or to a linear map of the value. For a linear map, a subclass
    sets `_is_mapped`. Then `_before_noise` applies the map, `_after_noise` applies its inverse, and
    `_noisy` recovers the noisy arrays from an output. Sensitivity, norm, grid, scale, range and
    density then refer to the mapped arrays. But audits need the grids of outputs and the clamp of
    values, which are not mapped. So a subclass with a map may override `grids` and `clamped`. Any
    subclass may override `_calibration`.

    Attributes:
        sensitivity: the sensitivity of the arrays that get noise.
        epsilon: the epsilon of the guarantee.
        noise: the distribution at scale 1.
        scale: the scale of the noise.

    Formal guarantees:
        None of its own.
    """

    noise: Noise
    scale: Any
    _is_mapped: ClassVar[bool] = False

    @property
    def _lattice(self) -> Lattice | None:
        return self.noise.lattice

    def _example(self, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return super()._example(shape, jnp.int32 if self.noise.is_whole and is_float else dtype)

    def _check_structure(self, value: Value) -> None:
        floats = [leaf.dtype for leaf in jax.tree.leaves(value) if is_float(leaf)]
        if self.noise.is_whole and floats:
            raise TypeError(
                f"value must hold integers, because {self.noise.name} noise is only for integers,"
                f" got {floats[0]}: use dpjax.laplace for floats"
            )

    @property
    def _norm_of_noise(self) -> Norm:
        """Returns the norm in which the distance of two values determines the privacy loss."""
        return self.norm

    def _calibration(self, arrays: PyTree) -> Calibration:
        calibration = Calibration(
            self.scale,
            self.sensitivity.value,
            self.epsilon,
            rounding_norm(self._norm_of_noise, arrays),
            sum(leaf.size for leaf in jax.tree.leaves(arrays)),
            self.sensitivity.zero_allowed,
            grid_dtype(arrays),
        )
        lattice, delta = self._lattice, self.delta
        if lattice is None or not (_checks.is_traced(self.epsilon) or _checks.is_traced(delta)):
            return calibration
        # If delta does not cover the errors of the noise tables, `_check_fit` raises an error for
        # concrete parameters. For traced parameters it cannot, so the scale becomes NaN.
        covered = calibration.covers(lattice, delta, jnp)
        return dataclasses.replace(calibration, scale=jnp.where(covered, self.scale, jnp.nan))

    def _check_fit(self, arrays: PyTree, calibration: Calibration) -> None:
        lattice, delta = self._lattice, self.delta
        assert lattice is not None
        if not _checks.is_traced(delta) and not calibration.covers(lattice, delta, np):
            raise ValueError(_too_much_missed(calibration, lattice, float(delta)))
        super()._check_fit(arrays, calibration)

    @property
    def dp_event(self) -> Any:
        accounting = _checks.extra("dp_accounting", "accounting")
        if self.sensitivity.zero_allowed or not self._is_exact:
            return accounting.NonPrivateDpEvent()
        if self.noise.dp_event is None or self.noise.event_norm != self._norm_of_noise:
            # Accountants assume the norm in which the event is defined. In another norm, the same
            # noise multiplier has another guarantee.
            pure = np.array_equal(self.delta, 0)
            return super().dp_event if pure else accounting.UnsupportedDpEvent()
        # The event describes ideal noise. It does not include the delta of the noise tables, which
        # is 2^-118 (1 + e^epsilon) for each coordinate of Gaussian noise.
        return self.noise.dp_event(float(self.scale) / float(self.sensitivity.value))

    def _after_noise(self, noisy: PyTree) -> Value:
        """Computes the published value from the noisy arrays."""
        return noisy

    def _noisy(self, output: Value) -> PyTree:
        """Recovers the noisy arrays from which an output was computed."""
        return output

    def _in_pieces(self, value: TreeSpec) -> Callable[[Key, Value], Value] | None:
        lattice, kind = self._lattice, value.tree()
        if lattice is None or not shares_programs(kind):
            return None
        of_arrays = jax.device_put(self)
        if self._is_mapped:
            return of_arrays._draw
        return PaddedNoise(of_arrays._calibration(kind), lattice)

    def _draw(self, key: Key, value: Value) -> Value:
        arrays = self._before_noise(value)
        return self._after_noise(add_noise(key, arrays, self._calibration(arrays), self.noise))

    def grids(self, value: Value) -> PyTree:
        """The grid spacing of every array that gets noise: a power of two, or 1 for integers.

        Args:
            value: a pytree of real arrays, or of `jax.ShapeDtypeStruct`s.

        Returns:
            A pytree of the same structure; 0 for noise in floats.
        """
        return self.grid_for(like=value)

    def range(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
        *,
        like: PyTree = None,
    ) -> tuple[PyTree, PyTree]:
        """The interval to which values are clamped.

        For floats it is 2^93 steps of the grid on either side of 0. For a vector of 10^9 numbers at
        epsilon 1, this is more than 10^15 sensitivities. Two neighboring float64 numbers of this
        size are further apart than a sensitivity. For integers it is the range of the released
        dtype.

        Args:
            shape: the shape of the value; () by default.
            dtype: the dtype of the value; by default JAX's default float.
            like: instead of both, a pytree of arrays or `jax.ShapeDtypeStruct`s.

        Returns:
            The lower and the upper end, in the units of the value. With `like`, each is a pytree
            with one end for every array.
        """
        arrays, calibration = self._asked(shape, like, dtype)

        def upper_end(leaf: ArrayOrShape) -> Scalar:
            return as_number(largest_value(leaf.dtype, calibration, self.noise))

        high = jax.tree.map(upper_end, arrays)
        return jax.tree.map(operator.neg, high), high

    def clamped(self, value: Value) -> Value:
        """The arrays that get noise: NaN becomes 0, and other numbers are clamped to `range`.

        Args:
            value: a pytree of real arrays.

        Returns:
            A pytree of the same structure and shapes. It is private data, like the value itself.
        """
        arrays = self._before_noise(_checks.real_arrays("value", value))
        calibration = self._calibration(arrays)

        def as_noised(x: jax.Array) -> jax.Array:
            within = clamped(x, largest_value(x.dtype, calibration, self.noise))
            return within.astype(x.dtype) if is_float(x) else within

        return jax.tree.map(as_noised, arrays)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        value = _checks.real_arrays("value", value)
        self._check_structure(value)
        arrays = self._before_noise(value)
        calibration = self._calibration(arrays)

        def of_array(y: ArrayLike, x: jax.Array) -> jax.Array:
            center = clamped(x, largest_value(x.dtype, calibration, self.noise))
            scale = self._scale_drawn(x, calibration)
            scale = jnp.where(scale == 0, 0, usable_scale(scale, x.dtype))
            return _log_prob(y, center, scale, self.noise, largest_release(x.dtype))

        return sum_over_leaves(of_array, self._noisy(output), arrays)

    def error(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        like: PyTree = None,
        simultaneous: bool = False,
    ) -> PyTree:
        """A bound on the distance of a release from the true value, at a confidence.

        The bound covers the noise, and the rounding to the grid or to integers. The true value is
        the value after `clamped`. A released float is also rounded to its dtype, which adds half a
        unit in its last place to the error.

        Args:
            confidence: in (0, 1). The error of a coordinate is within the bound with at least this
                probability.
            shape: the shape of a value of JAX's default float; () by default.
            like: instead of a shape, a pytree of arrays or `jax.ShapeDtypeStruct`s.
            simultaneous: whether the confidence is for all coordinates of all arrays together,
                instead of for each coordinate.

        Returns:
            A scalar in the units of the value, or one scalar for every array of `like`.
        """
        arrays, calibration = self._asked(shape, like)
        together = sum(leaf.size for leaf in jax.tree.leaves(arrays)) if simultaneous else 1
        quantile = noise_quantile(self.noise, confidence, together)
        return self._errors(arrays, calibration, quantile, everywhere=simultaneous)

    def _errors(
        self, arrays: PyTree, calibration: Calibration, quantile: float, *, everywhere: bool
    ) -> PyTree:
        """Bounds the error of a release whose noise is at most `quantile` scales.

        If the release is a function, `everywhere` asks for a bound on all of its values.
        """
        del everywhere

        def bound(leaf: ArrayOrShape) -> Scalar:
            scale = self._scale_drawn(leaf, calibration)
            if is_float(leaf):
                # The value and the noise are each rounded by at most half a step of the grid.
                return scale * quantile + self._spacing(leaf, calibration)
            most = self.noise.whole_bound(quantile, scale)
            return most if isinstance(most, jax.Array) else float(most)

        return jax.tree.map(bound, arrays)

    def pair_loss(self, value: Value) -> PairLoss:
        family = _FAMILIES.get(self.noise)
        if family is None or self._lattice is None or self.sensitivity.zero_allowed:
            return super().pair_loss(value)
        norm = NORMS["l2" if family == "gaussian" else "l1"]
        asked, calibration = self._asked(None, value)
        arrays = jax.tree.leaves(asked)
        scales = [float(self._scale_drawn(leaf, calibration)) for leaf in arrays]
        steps = [float(self._spacing(x, calibration)) if is_float(x) else 0.0 for x in arrays]
        # The values of two neighbors are both rounded, so their difference changes by at most one
        # step of the grid in each coordinate. `moved` is this step divided by the scale of the
        # noise.
        moved = [
            np.full(leaf.size, step / scale)
            for leaf, step, scale in zip(arrays, steps, scales, strict=True)
        ]
        order = 2 if family == "gaussian" else 1
        certificate, coordinates = self._lattice.certificate, sum(leaf.size for leaf in arrays)

        def shifts(difference: PyTree) -> list[jax.Array]:
            return [x / b for x, b in zip(jax.tree.leaves(difference), scales, strict=True)]

        return PairLoss(
            family,
            lambda difference: norm(shifts(difference)),
            float(self.epsilon if order == 1 else self.sensitivity.value / scales[0]),
            float(np.linalg.norm(np.concatenate(moved), order)),
            coordinates * certificate.loss,
            coordinates * certificate.delta,
            self._before_noise if self._is_mapped else None,
            shifts if family == "laplace" else None,
        )

    def _accuracy(self, value: Value) -> Accuracy:
        if self._is_mapped:
            return UNKNOWN
        leaves = jax.tree.leaves(value)
        scales, steps = self.effective_scale(like=value), self.grid_for(like=value)
        return around_noise(
            self.noise,
            [(leaf.size, not is_float(leaf)) for leaf in leaves],
            *map(jax.tree.leaves, (scales, steps)),
        )


def _log_prob(
    output: Value, center: jax.Array, scale: jax.Array, noise: Noise, end: float
) -> jax.Array:
    """Returns the log density of one noisy array, or the log probability if it contains integers.

    Args:
        output: the noisy array.
        center: the array without noise, in the dtype of the computation.
        scale: the scale of the noise.
        noise: the distribution at scale 1.
        end: the largest magnitude of a release.

    Returns:
        A scalar.
    """
    output = jnp.asarray(output)
    if output.shape != center.shape:
        raise ValueError(f"output must have the value's shape {center.shape}, got {output.shape}")
    given, output = output, output.astype(center.dtype)
    # Noisy numbers beyond the largest possible release are clamped to it. So each end of the range
    # has the probability of a whole tail.
    low, high = output <= -end, output >= end
    if is_float(center):
        error = (output - center) / scale
        inside = noise.log_density(error) - jnp.log(scale)
        tail = noise.log_cdf(jnp.where(low, error, -error))
    else:
        # The integers are subtracted first, because a conversion to floats could lose their last
        # digits.
        error = _integer_difference(output, center, scale.dtype)
        silent, drawn = scale == 0, jnp.where(scale == 0, 1, scale)
        unmoved = jnp.where(error == 0, 0.0, -jnp.inf)
        inside = jnp.where(silent, unmoved, noise.log_mass(error, drawn))
        beyond = noise.log_whole_cdf(jnp.where(low, error, -error), drawn)
        tail = jnp.where(silent, unmoved, beyond)
    possible = (output >= -end) & (output <= end)
    possible &= output.astype(given.dtype) == given  # Integers are never released as fractions.
    return jnp.sum(jnp.where(possible, jnp.where(low | high, tail, inside), -jnp.inf))


def _integer_difference(output: jax.Array, center: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Subtracts integers and returns a float, without overflow in the integer dtype."""
    one = _limbs.constant(1)
    negated = _limbs.add_to_wide(_limbs.widen(_limbs.invert(_limbs.from_integers(center))), one)
    return _limbs.wide_to_float(_limbs.add_to_wide(negated, _limbs.from_integers(output)), dtype)


def _too_much_missed(calibration: Calibration, lattice: Lattice, delta: float) -> str:
    """Returns an error message: delta does not cover the probability that noise tables omit."""
    missed = (
        f"the tables of the noise omit a probability of {lattice.certificate.delta:.1g} in each of"
        f" {calibration.coordinates} coordinates"
    )
    epsilon, largest = float(calibration.epsilon), calibration.largest_epsilon(lattice, delta)
    if 0 < largest < epsilon:
        return (
            f"epsilon={epsilon:g} is too large for delta={delta!r}, which allows at most"
            f" {largest:.3g}: {missed}, and e^epsilon times this probability must be far below"
            " delta"
        )
    return f"delta={delta!r} is too close to 0 or 1 at epsilon={epsilon:g}: {missed}"
