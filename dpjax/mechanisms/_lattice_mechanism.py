"""The base of mechanisms with integer noise: their grid, the scale really drawn, and its checks."""

import abc
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._types import PyTree, Value
from dpjax._core._values import Scalar
from dpjax._exact._grid import power_of_two
from dpjax._exact._numerics import compute_dtype
from dpjax.mechanisms._start import count
from dpjax.random._facade import Calibration, Lattice, check_scale
from dpjax.release._mechanism import SensitivityMechanism
from dpjax.sensitivity._norms import is_float

ArrayOrShape: TypeAlias = jax.Array | jax.ShapeDtypeStruct


class LatticeMechanism(SensitivityMechanism):
    """A mechanism that rounds arrays to a grid and draws integer noise for them.

    A subclass gives its `_lattice`, its `_calibration` and its draw. The arrays are those of the
    value, unless `_before_noise` makes others of them.

    Attributes:
        sensitivity: that the noise is calibrated to.
        epsilon: of the guarantee.
        norm: in which the sensitivity is measured.

    Formal guarantees:
        None of its own. The scale that a `Calibration` fits covers rounding to the grid and the
        tables of the noise. The subclass must calibrate with the numbers that its `_draw` uses.
    """

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
        """The value that a shape and a dtype stand for."""
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
        """The shapes and dtypes that a caller asks about, and their calibration."""
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
            A scalar in the units of the value, one for every array of `like`: the nominal scale is
            one, but what a grid step divides the noise by is rounded for every dtype. NaN where no
            grid can carry the noise.
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
