"""Mechanisms with integer noise: their grid, the scale they really draw, noise on coordinates."""

import abc
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy, Ends, intervals_of
from dpjax._core._pair_loss import LossFamily, PairLoss
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree, Scalar, Value
from dpjax._core._values import Norm
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._numerics import compute_dtype
from dpjax.mechanisms._start import count, sum_over_leaves
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import GAUSSIAN, LAPLACE, Lattice, Noise
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
from dpjax.sensitivity._norms import NORMS, grid_dtype, is_float, rounding_norm

ArrayOrShape: TypeAlias = jax.Array | jax.ShapeDtypeStruct


class OnGrid(abc.ABC):
    """The part of a mechanism that rounds arrays to a grid, and fits integer noise to them.

    The mechanism gives its `_lattice`, its `_calibration` and its draw. The arrays are those of the
    value, unless `_before_noise` makes others of them.

    Attributes:
        epsilon: of the guarantee.

    Formal guarantees:
        None of its own. The scale that a `Calibration` fits covers rounding to the grid and the
        tables of the noise. The mechanism must calibrate with the numbers that its `_draw` uses.
    """

    epsilon: Scalar
    _scale_name = "scale of the noise"  # For messages.

    @property
    @abc.abstractmethod
    def _lattice(self) -> Lattice | None:
        """The lattice of the noise; None for noise in floats."""

    @abc.abstractmethod
    def _calibration(self, arrays: PyTree) -> Calibration:
        """The numbers that the noise must cover, by the arrays' shapes and dtypes alone."""

    def _before_noise(self, value: Value) -> PyTree:
        """The arrays that are rounded and get noise."""
        return value

    def _example(self, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        """A value of this shape and dtype, for questions about a shape."""
        count(shape)
        return jax.ShapeDtypeStruct(shape, dtype)

    def _check_structure(self, value: Value) -> None:
        """Refuses values of a structure or shape that the mechanism cannot take."""
        del value  # Most mechanisms take any.

    @property
    def _is_exact(self) -> bool:
        return self._lattice is not None

    def _check_value(self, value: Value) -> None:
        self._check_structure(value)
        # Shapes and dtypes alone decide. The contents of a value may not.
        arrays = jax.eval_shape(self._before_noise, value)
        calibration = self._calibration(arrays)
        check_scale(self._scale_name, calibration, arrays)
        if self._is_exact and not _checks.is_traced(self.epsilon):
            self._check_fit(arrays, calibration)

    def _check_fit(self, arrays: PyTree, calibration: Calibration) -> None:
        """Refuses concrete parameters that no grid can carry for arrays of this size."""
        assert self._lattice is not None
        if calibration.zero_allowed or _checks.is_traced(calibration.scale):
            return
        for dtype in {leaf.dtype for leaf in jax.tree.leaves(arrays)}:
            if not calibration.fits(self._lattice, dtype):
                raise ValueError(
                    f"epsilon={float(calibration.epsilon):g} is too small for a value of"
                    f" {calibration.coordinates} coordinates of {dtype}: no grid can carry the"
                    f" noise, of scale {float(calibration.scale):g}"
                )

    def _asked(
        self, shape: tuple[int, ...] | None, like: PyTree, dtype: DTypeLike | None = None
    ) -> tuple[PyTree, Calibration]:
        """The arrays that a caller asks about, as shapes and dtypes, with their calibration."""
        if like is None:
            dtype = jnp.result_type(float) if dtype is None else dtype
            shape = () if shape is None else shape
            value = self._example(shape, jax.dtypes.canonicalize_dtype(dtype))
        elif shape is not None or dtype is not None:
            raise ValueError(
                f"like has shapes and dtypes of its own: leave out shape={shape}, dtype={dtype}"
            )
        else:
            value = _checks.real_shapes("like", like)
            self._check_structure(value)
        arrays = jax.eval_shape(self._before_noise, value)
        return arrays, self._calibration(arrays)

    @property
    def grid(self) -> Scalar:
        """The grid that a scalar float is rounded to; integers are not rounded."""
        return self.grid_for()

    def grid_for(self, shape: tuple[int, ...] | None = None, *, like: PyTree = None) -> PyTree:
        """The grid that arrays are rounded to before noise: a power of two, 1 for integers.

        Args:
            shape: of the value, of JAX's default float; () unless told.
            like: instead of a shape, a pytree of arrays or `jax.ShapeDtypeStruct`s.

        Returns:
            A scalar in the units of the value, one for every array of `like`; 0 where nothing is
            rounded: for noise in floats, and without noise.
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
            return math.ldexp(1.0, int(exponent))  # On the host: no program to compile.
        return power_of_two(exponent, compute_dtype(leaf.dtype))

    def effective_scale(
        self, shape: tuple[int, ...] | None = None, *, like: PyTree = None
    ) -> PyTree:
        """The scale really drawn; for selections, how far a score must fall for a factor e.

        It covers rounding floats to the grid, as the norm of ones grows with the size, and the
        certificate of the noise's tables. With T = 2^43 lattice points per scale b (Gaussian noise:
        2^35), it exceeds b by at most .01% and 2.5 sqrt(b ||1|| / (T Delta)), where that is below
        10%: for Laplace noise on d coordinates 8.5e-7 sqrt(d / epsilon). Integers are not rounded:
        noise on them exceeds b by at most .01% and 2 b / T.

        Args:
            shape: of the value, of JAX's default float; () unless told.
            like: instead of a shape, the value: a pytree of arrays or
                `jax.ShapeDtypeStruct`s.

        Returns:
            A scalar in the units of the value, one for every array of `like`. All arrays share the
            nominal scale, but the integer that divides the noise is rounded for each dtype. NaN
            where no grid can carry the noise.
        """
        arrays, calibration = self._asked(shape, like)
        return jax.tree.map(lambda leaf: self._scale_drawn(leaf, calibration), arrays)

    def _scale_drawn(self, leaf: ArrayOrShape, calibration: Calibration) -> Scalar:
        if self._lattice is None or calibration.zero_allowed:
            return calibration.scale
        return as_number(calibration.fit(self._lattice, leaf.dtype).scale)


def as_number(scalar: Scalar) -> Scalar:
    """A Python number, where it is known; integers stay integers."""
    if isinstance(scalar, int) or _checks.is_traced(scalar) or jnp.ndim(scalar) > 0:
        return scalar
    return float(scalar)


def whole(bound: Scalar) -> Scalar:
    """The largest integer within a bound, which an integer keeps if it keeps the bound."""
    return jnp.floor(bound) if isinstance(bound, jax.Array) else float(np.floor(bound))


# Covers the tables of the noise, and scales that are known in float32.
OUTWARD_QUANTILE = 1 + 2.0**-20
KNOWN_NOISE = {noise.name: noise for noise in (LAPLACE, GAUSSIAN)}


def noise_quantile(noise: Noise, confidence: float, together: int = 1) -> float:
    """The value, in scales, that so many coordinates of noise keep within at a confidence.

    Each of d independent coordinates may exceed it with probability 1 - confidence^(1/d).
    """
    confidence = _checks.fraction("confidence", confidence)
    return OUTWARD_QUANTILE * noise.tail_quantile(-math.expm1(math.log(confidence) / together))


def around_noise(
    noise: Noise,
    leaves: Sequence[tuple[int, bool]],
    scales: Sequence[ArrayLike],
    steps: Sequence[ArrayLike],
    **facts: object,
) -> Accuracy:
    """Describes arrays with noise, by their sizes, whether they hold integers, scales and grids."""
    known = KNOWN_NOISE.get(noise.name)
    if known is None or known.tail_quantile is not noise.tail_quantile:
        return Accuracy.of("", {"why": f"quantiles of {noise.name} noise are not stored"})
    arrays = [
        {"scale": np.asarray(scale).tolist(), "step": np.asarray(step).tolist(), "whole": whole}
        for (_, whole), scale, step in zip(leaves, scales, steps, strict=True)
    ]
    coordinates = sum(size for size, _ in leaves)
    about = {"noise": noise.name, "arrays": arrays, "coordinates": coordinates, **facts}
    return Accuracy.of("noise", about)


def noise_bounds(facts: dict[str, Any], confidence: float, together: int) -> list[np.ndarray]:
    """A bound on the distance of each array from the truth, for so many coordinates at once."""
    quantile = noise_quantile(KNOWN_NOISE[facts["noise"]], confidence, together)

    def bound(array: dict[str, Any]) -> np.ndarray:
        noise = np.asarray(array["scale"]) * quantile
        # An integer is wrong by an integer. Floats are rounded to a grid, and the noise too.
        return np.floor(noise + 0.5) if array["whole"] else noise + np.asarray(array["step"])

    return [bound(array) for array in facts["arrays"]]


@intervals_of("noise")
def _around_noise(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """The value plus and minus the noise and the rounding."""
    del measured
    leaves, structure = jax.tree.flatten(value)
    together = facts["coordinates"] if simultaneous else 1
    low, high = [], []
    for leaf, bound in zip(leaves, noise_bounds(facts, confidence, together), strict=True):
        center = as_floats(leaf)
        reach = bound + rounding_to(leaf.dtype) * np.abs(center)
        low.append(np.maximum(center - reach, facts.get("lower", -np.inf)))
        high.append(np.minimum(center + reach, facts.get("upper", np.inf)))
    return structure.unflatten(low), structure.unflatten(high)


def as_floats(array: np.ndarray) -> np.ndarray:
    """float64; NaN for the integer that marks a bad traced parameter."""
    if not np.issubdtype(array.dtype, np.signedinteger):
        return array.astype(np.float64)
    return np.where(array == np.iinfo(array.dtype).min, np.nan, array.astype(np.float64))


def rounding_to(dtype: np.dtype) -> float:
    """The relative error of a float that was rounded to a dtype, and is rounded in float64."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return max(2.0**-51, float(jnp.finfo(dtype).eps))


# An interval narrower than this, in scales, has the density times the width for a probability.
_NARROW = 2.0**-12


class CoordinatewiseMechanism(OnGrid, SensitivityMechanism):
    """Adds noise to arrays made of the value. The release is made of the noisy arrays.

    A subclass may have a `_calibration` of its own. If it `_is_mapped`, a linear map is applied
    before the noise: `_before_noise`. `_after_noise` is its inverse, and `_noisy` maps an output
    again. Sensitivity, norm, grid, scale, range and density are then those of the mapped arrays. An
    audit takes `grids` for that of the outputs and `clamped` for a value: a subclass whose map
    moves values overrides both.

    Attributes:
        sensitivity: of the arrays that get noise.
        epsilon: of the guarantee.
        norm: in which the sensitivity is measured.
        noise: the distribution at scale 1.
        scale: of the noise.

    Formal guarantees:
        None of its own.
    """

    norm: Any
    noise: Noise
    scale: Any
    _is_mapped: ClassVar[bool] = False

    @property
    def _lattice(self) -> Lattice | None:
        return self.noise.lattice

    @property
    def _norm_of_noise(self) -> Norm:
        """The norm in which the noisy arrays are compared."""
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
        # Concrete parameters raise in `_check_fit`. Traced ones that ask more of the noise's tables
        # than they keep make the scale NaN.
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
            # In another norm the same noise multiplier means another mechanism.
            pure = np.array_equal(self.delta, 0)
            return super().dp_event if pure else accounting.UnsupportedDpEvent()
        # Of the ideal noise: accountants do not know the certificate's delta, for every coordinate
        # of Gaussian noise 2^-118 (1 + e^epsilon).
        return self.noise.dp_event(float(self.scale) / float(self.sensitivity.value))

    def _after_noise(self, noisy: PyTree) -> Value:
        """What is released of noisy arrays."""
        return noisy

    def _noisy(self, output: Value) -> PyTree:
        """The noisy arrays that an output was made of."""
        return output

    def _in_pieces(self, value: TreeSpec) -> Callable[[Key, Value], Value] | None:
        lattice, kind = self._lattice, value.tree()
        if lattice is None or not shares_programs(kind):
            return None
        of_arrays = jax.tree.map(jnp.asarray, self)
        if self._is_mapped:
            return of_arrays._draw
        return PaddedNoise(of_arrays._calibration(kind), lattice)

    def _draw(self, key: Key, value: Value) -> Value:
        arrays = self._before_noise(value)
        return self._after_noise(add_noise(key, arrays, self._calibration(arrays), self.noise))

    def grids(self, value: Value) -> PyTree:
        """The spacing of every array that gets noise: a power of two for floats, 1 for integers.

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
        """The interval in which nothing is clamped; a value outside is released as the nearer end.

        For floats 2^93 steps of the grid: more than 10^15 sensitivities for a vector of 10^9 at
        epsilon 1, where float64 no longer resolves one. For integers the range of their release.

        Args:
            shape: of the value; () unless told.
            dtype: of the value; by default JAX's default float.
            like: instead of both, a pytree of arrays or `jax.ShapeDtypeStruct`s.

        Returns:
            The two ends, in the units of the value; those of every array of `like`.
        """
        arrays, calibration = self._asked(shape, like, dtype)

        def upper_end(leaf: ArrayOrShape) -> Scalar:
            return as_number(largest_value(leaf.dtype, calibration, self.noise))

        high = jax.tree.map(upper_end, arrays)
        return jax.tree.map(operator.neg, high), high

    def clamped(self, value: Value) -> Value:
        """The arrays that get noise: NaN becomes 0, and a number out of `range` its nearer end.

        Args:
            value: a pytree of real arrays.

        Returns:
            A pytree of the same structure and shapes, as private as the value.
        """
        arrays = self._before_noise(_checks.real_arrays("value", value))
        calibration = self._calibration(arrays)

        def as_noised(x: jax.Array) -> jax.Array:
            within = clamped(x, largest_value(x.dtype, calibration, self.noise))
            return within.astype(x.dtype) if is_float(x) else within

        return jax.tree.map(as_noised, arrays)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        arrays = self._before_noise(_checks.real_arrays("value", value))
        calibration = self._calibration(arrays)

        def of_array(y: ArrayLike, x: jax.Array) -> jax.Array:
            center = clamped(x, largest_value(x.dtype, calibration, self.noise))
            scale = usable_scale(self._scale_drawn(x, calibration), x.dtype)
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

        It covers the noise and the rounding to the grid, or to integers. The true value is the
        `clamped` one. A float that is released is also rounded to its dtype, which adds half a unit
        in its last place.

        Args:
            confidence: the probability, at least, that a coordinate keeps the bound; in (0, 1).
            shape: of the value, of JAX's default float; () unless told.
            like: instead of a shape, a pytree of arrays or `jax.ShapeDtypeStruct`s.
            simultaneous: for all coordinates of all arrays at once, instead of for each one.

        Returns:
            A scalar in the units of the value, one for every array of `like`.
        """
        arrays, calibration = self._asked(shape, like)
        together = sum(leaf.size for leaf in jax.tree.leaves(arrays)) if simultaneous else 1
        quantile = noise_quantile(self.noise, confidence, together)

        def bound(leaf: ArrayOrShape) -> Scalar:
            noise = self._scale_drawn(leaf, calibration) * quantile
            if is_float(leaf):
                # Half a step for the value, and half a step for the noise.
                return noise + self._spacing(leaf, calibration)
            return whole(noise + 0.5)  # Of an integer by which integers differ.

        return jax.tree.map(bound, arrays)

    def pair_loss(self, value: Value) -> PairLoss:
        families: dict[Noise, LossFamily] = {LAPLACE: "laplace", GAUSSIAN: "gaussian"}
        family = families.get(self.noise)
        if family is None or self._lattice is None or self.sensitivity.zero_allowed:
            return super().pair_loss(value)
        norm = NORMS["l1" if family == "laplace" else "l2"]
        asked, calibration = self._asked(None, value)
        arrays = jax.tree.leaves(asked)
        scales = [float(self._scale_drawn(leaf, calibration)) for leaf in arrays]
        steps = [float(self._spacing(x, calibration)) if is_float(x) else 0.0 for x in arrays]
        # A step of the grid in every coordinate, in units of the noise.
        moved = [
            np.full(leaf.size, step / scale)
            for leaf, step, scale in zip(arrays, steps, scales, strict=True)
        ]
        order = 1 if family == "laplace" else 2
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
    """Log density of one noisy array; log probability where it holds integers.

    Args:
        output: the array.
        center: that the noise was added to, of the dtype of the computation.
        scale: of the noise.
        noise: the distribution at scale 1.
        end: the largest magnitude of a release.

    Returns:
        A scalar.
    """
    output = jnp.asarray(output)
    if output.shape != center.shape:
        raise ValueError(f"output must be of the value's shape {center.shape}, got {output.shape}")
    given, output = output, output.astype(center.dtype)
    if is_float(center):
        error, half = (output - center) / scale, 0.0
        inside = noise.log_density(error) - jnp.log(scale)
    else:
        # Subtracted as integers: floats would lose the last ones.
        error, half = _integer_difference(output, center, scale.dtype) / scale, 0.5 / scale
        mass = noise.log_interval(error - half, error + half)
        # In float32 the ends of a narrow interval coincide: there, the density times the width.
        inside = jnp.where(half < _NARROW, noise.log_density(error) - jnp.log(scale), mass)
    # What lies beyond the largest release is released as it: the ends have a probability.
    low, high = output <= -end, output >= end
    tail = noise.log_cdf(jnp.where(low, error, -error) + half)
    possible = (output >= -end) & (output <= end)
    possible &= output.astype(given.dtype) == given  # A fraction is no release of an integer.
    return jnp.sum(jnp.where(possible, jnp.where(low | high, tail, inside), -jnp.inf))


def _integer_difference(output: jax.Array, center: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The difference of two integers of a dtype, as a float: it may need one bit more."""
    one = _limbs.constant(1)
    negated = _limbs.add_to_wide(_limbs.widen(_limbs.invert(_limbs.from_integers(center))), one)
    return _limbs.wide_to_float(_limbs.add_to_wide(negated, _limbs.from_integers(output)), dtype)


def _too_much_missed(calibration: Calibration, lattice: Lattice, delta: float) -> str:
    """Says whether to change epsilon or delta, where delta does not cover the tables' error."""
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
