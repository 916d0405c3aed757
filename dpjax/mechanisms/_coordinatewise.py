"""Mechanisms that add independent noise to every coordinate of arrays."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy
from dpjax._core._pair_loss import LossFamily, PairLoss
from dpjax._core._types import Key, PyTree, Scalar, Value
from dpjax._exact import _limbs
from dpjax.mechanisms._lattice_mechanism import (
    ArrayOrShape,
    LatticeMechanism,
    as_number,
    whole,
)
from dpjax.mechanisms._noise_intervals import around_noise, noise_quantile
from dpjax.mechanisms._start import sum_over_leaves
from dpjax.random._facade import (
    GAUSSIAN,
    LAPLACE,
    Lattice,
    Noise,
    add_noise,
    clamped,
    largest_release,
    largest_value,
    shares_programs,
    usable_scale,
)
from dpjax.sensitivity._norms import NORMS, is_float

# An interval narrower than this, in scales, has the density times the width for a probability.
_NARROW = 2.0**-12


class CoordinatewiseMechanism(LatticeMechanism):
    """Adds noise to arrays made of the value. The release is made of the noisy arrays.

    A subclass gives its `_calibration`. A linear map before the noise is `_before_noise`, its
    inverse `_after_noise`, and `_noisy` maps an output again. Sensitivity, norm, grid, scale, range
    and density are then those of the mapped arrays. An audit takes `grids` for that of the outputs
    and `clamped` for a value: a subclass whose map moves values overrides both.

    Attributes:
        sensitivity: of the arrays that get noise.
        epsilon: of the guarantee.
        norm: in which the sensitivity is measured.
        noise: the distribution at scale 1.

    Formal guarantees:
        None of its own.
    """

    noise: Noise

    @property
    def _lattice(self) -> Lattice | None:
        return self.noise.lattice

    def _after_noise(self, noisy: PyTree) -> Value:
        """What is released of noisy arrays."""
        return noisy

    def _noisy(self, output: Value) -> PyTree:
        """The noisy arrays that an output was made of."""
        return output

    def _compiles_in_pieces(self, value: Value) -> bool:
        return self._is_exact and shares_programs(value)

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
        moves = type(self)._before_noise is not LatticeMechanism._before_noise

        def shifts(difference: PyTree) -> list[jax.Array]:
            return [x / b for x, b in zip(jax.tree.leaves(difference), scales, strict=True)]

        return PairLoss(
            family,
            lambda difference: norm(shifts(difference)),
            float(self.epsilon if order == 1 else self.sensitivity.value / scales[0]),
            float(np.linalg.norm(np.concatenate(moved), order)),
            coordinates * certificate.loss,
            coordinates * certificate.delta,
            self._before_noise if moves else None,
            shifts if family == "laplace" else None,
        )

    def _accuracy(self, value: Value) -> Accuracy:
        if type(self)._after_noise is not CoordinatewiseMechanism._after_noise:
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
