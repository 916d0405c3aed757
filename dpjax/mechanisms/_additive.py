"""Mechanisms that add noise of one scale to all coordinates: Laplace, Gaussian, or custom noise."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._pytree import made, made_by_factory, static, up
from dpjax._core._types import PyTree, Value
from dpjax._core._values import Guarantee, NeighboringRelation, NoiseKind, Norm, Scalar, Sensitivity
from dpjax._exact._numerics import bisect, compute_dtype, outward
from dpjax._tracing._shards import computing_now
from dpjax.mechanisms._gaussian_multipliers import (
    analytic_multiplier,
    classical_multiplier,
    epsilon_of_multiplier,
)
from dpjax.mechanisms._noisy_arrays import CoordinatewiseMechanism
from dpjax.mechanisms._start import begin, check_noise
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import DISCRETE_LAPLACE, GAUSSIAN, LAPLACE, Noise
from dpjax.sensitivity._shaped_norm import NoiseShape


@made_by_factory
class AdditiveMechanism(CoordinatewiseMechanism):
    """Adds noise to every coordinate of a pytree; made by `additive`, `laplace` or `gaussian`.

    Attributes:
        sensitivity: the sensitivity that the noise is calibrated to.
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee.
        scale: the scale of the noise, in the units of the value.
        noise: the distribution at scale 1.
        dims: the number of coordinates that a value must have; None for any number.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    delta: Scalar = up()
    scale: Scalar
    noise: Noise = static()
    dims: int | None = static(default=None)
    _scales = ("scale",)

    def _calibration(self, arrays: PyTree) -> Calibration:
        size = sum(leaf.size for leaf in jax.tree.leaves(arrays))
        if self.dims is not None and size != self.dims:
            raise ValueError(f"value must have dims={self.dims} coordinates, got {size}")
        return super()._calibration(arrays)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one release. For Gaussian noise, `replacing` is also set."""
        promised = super().guarantee
        numbers = (self.scale, self.sensitivity.value, self.epsilon, self.delta)
        unknown = _checks.any_traced(numbers) or any(map(np.ndim, numbers))
        added = promised.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        if unknown or not self._is_gaussian or not added:
            return promised
        scale, reach, epsilon, delta = map(float, numbers)
        replaced = epsilon_of_multiplier(scale / (2 * reach), delta, self.dims)
        if replaced is None:
            return promised
        return dataclasses.replace(promised, replacing=(replaced, delta, epsilon, delta))

    @property
    def _is_gaussian(self) -> bool:
        """Whether the noise is exact Gaussian noise for a sensitivity in the l2 norm."""
        in_l2 = self.noise is GAUSSIAN and self.norm == "l2"
        return in_l2 and not self.sensitivity.zero_allowed

    @property
    def zcdp(self) -> tuple[float, float]:
        """For Gaussian noise in the l2 norm, rho = (Delta / sigma)^2 / 2 and delta = 0.

        Bun and Steinke (2016), Proposition 1.6. For other noise, rho and delta are computed from
        epsilon and delta.
        """
        if not self._is_gaussian:
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
    dims: int | None = None,
) -> AdditiveMechanism:
    """An additive mechanism from your own noise distribution, norm and formula for the scale.

    It releases value + scale * Z with scale = Delta * multiplier(epsilon, delta), by default
    Delta / epsilon. With this default, the log density of Z must be 1-Lipschitz in the norm.

    Args:
        sensitivity: a `Sensitivity` in `norm`, or a number, which is taken as a global bound in
            that norm.
        epsilon: finite, above 0.
        norm: "l1", "l2", "linf", or a norm of the difference of two values: a function that is
            homogeneous, subadditive, and monotone in the magnitudes of the coordinates.
        noise: the distribution of Z. Noise without a `lattice` is drawn in floats, and then the
            guarantee says that the release is not private.
        delta: 0, or a number in (0, 1) that the multiplier takes into account.
        multiplier: maps epsilon and delta to the scale divided by the sensitivity. With GAUSSIAN
            noise, it must use at most (1 - 2^-24) delta, because the tables of the noise omit a
            small probability. The multiplier is called on the host with float64 numbers, even if it
            is written in `jax.numpy`. If a parameter is traced, it is called with the floats of the
            traced program, so it must be written in `jax.numpy`. Its rounding error is measured and
            added to the scale. A formula with catastrophic cancellation is refused.
        dims: the number of coordinates for which the multiplier is valid; values of another size
            are refused. None if the multiplier is valid for any number of coordinates.

    Returns:
        An `AdditiveMechanism`.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if a parameter is out of range, the sensitivity is in another norm, or the
            multiplier has a relative rounding error above 2^-20 in float64, or above 2^-10 in the
            floats of a program.

    Formal guarantees:
        You promise a property of the noise Z. With a multiplier of your own: multiplier(epsilon,
        delta) * Z and its shift by any vector of norm 1 are (epsilon, delta)-indistinguishable.
        With the default multiplier: the log density of Z changes by at most the norm of the shift.
        Then the mechanism is (epsilon, delta, gamma)-random DP under the sensitivity's neighboring
        relation.

        The rounding error of a multiplier is measured, not proved. For concrete parameters, it is
        measured by second differences in float64 over many widths around the parameters, for
        epsilon of at least 1e-9. For traced parameters, the formula is compared with float64 at 256
        points, with epsilon from 2^-14 to 64, and a traced delta of 0 or from 2^-60 to 1/4. Outside
        of these ranges the scale is NaN. Eight times the largest measured error is added.

    Source:
        Rubinstein and Aldà (2017), Definition 9.

    Example:
        >>> from dpjax.mechanisms import additive
        >>> from dpjax.random import LAPLACE
        >>> additive(0.5, 1.0, norm="l1", noise=LAPLACE).scale
        0.5
    """
    sensitivity, epsilon = begin(norm, sensitivity, epsilon)
    if dims is not None:
        dims = _checks.integer("dims", dims, least=1)
    if norm == "hamming":
        raise ValueError(
            'norm must be homogeneous, |c x| = |c| |x|, got "hamming": in other norms, the scale of'
            " the noise would not cover the rounding to a grid"
        )
    if norm == "range":
        raise ValueError(
            'norm must not be "range": it does not change if a number is added to all coordinates,'
            " so the noise would not hide this number"
        )
    if isinstance(norm, NoiseShape):
        raise ValueError(
            "norm must be monotone in the magnitudes of the coordinates, and a NoiseShape is not:"
            " use dpjax.shaped_gaussian"
        )
    # If the tables from which the noise is drawn omit some probability, delta must be above 0 to
    # cover it.
    missed = noise.lattice is not None and noise.lattice.certificate.delta > 0
    if missed or _checks.is_traced(delta) or not np.array_equal(delta, 0):
        delta = _checks.fraction("delta", delta)
    if multiplier is None:
        unit = 1 / epsilon
    elif multiplier in _CALIBRATIONS.values():
        unit = multiplier(epsilon, delta)
    else:
        unit = multiple_of(multiplier, epsilon, delta)
    if _checks.is_traced(unit):
        epsilon = jnp.where(jnp.isnan(unit), jnp.nan, outward(epsilon, math.inf))
    scale = sensitivity.value * unit
    if not _checks.is_traced(scale) and not math.isfinite(scale):
        raise ValueError(f"epsilon={epsilon} is too small: the scale of the noise overflows")
    return made(AdditiveMechanism, sensitivity, epsilon, delta, scale, noise, dims)


def laplace(
    sensitivity: Sensitivity | float, epsilon: Scalar, *, noise: NoiseKind = "exact"
) -> AdditiveMechanism:
    """The Laplace mechanism: independent noise of scale b = Delta / epsilon on every coordinate.

    Its density is proportional to exp(-||output - value||_1 / b).

    Args:
        sensitivity: a `Sensitivity` in the norm "l1", or a number, which is taken as a global bound
            in that norm.
        epsilon: finite, above 0.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `AdditiveMechanism`: `mechanism(key, value)` releases any pytree of real arrays. Noise
        for integers is rounded to integers; `discrete_laplace` adds less noise to integers.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if one of them is not positive and finite, or the sensitivity's norm is not l1.

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP if
        the sensitivity is a global bound (gamma 0). The guarantee holds for the noise that is
        actually drawn, given uniform random bits: the scale covers rounding to the grid and the
        errors of the noise's tables, see `effective_scale`. noise="float" has no guarantee.

        `dp_event` is the event of the scalar mechanism, even for vectors. It is valid for vectors
        because a single coordinate that shifts by a + b, in units of the scale, dominates two
        coordinates that shift by a and b, where a >= b. Proof: for t >= 0, the hockey-stick
        divergence of the single coordinate at epsilon t is 1 - exp((t - a - b) / 2). Let s = t - a.
        The divergence of the two coordinates is smaller: by (b - s) exp((s - b) / 2) / 4 if |s| <=
        b, and by b exp((s - b) / 2) / 2 if s < -b. For negative t, use symmetry.

    Source:
        Dwork, McSherry, Nissim and Smith (2006); Rubinstein and Aldà (2017), Corollary 10.

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.laplace(1 / 100, epsilon=0.5)
        >>> mechanism.scale
        0.02
        >>> mechanism.guarantee
        (epsilon=0.5, delta=0)-DP, under replace-one
    """
    drawn = LAPLACE if check_noise(noise) else LAPLACE.in_floats()
    return additive(sensitivity, epsilon, norm="l1", noise=drawn)


def discrete_laplace(
    sensitivity: Sensitivity | float, epsilon: Scalar, *, noise: NoiseKind = "exact"
) -> AdditiveMechanism:
    """The discrete Laplace mechanism, also called geometric, for integers such as counts.

    Let b = Delta / epsilon and a = exp(-1 / b). The noise of each coordinate is the integer k with
    probability (1 - a) / (1 + a) a^|k|. It is the difference of two geometric random variables.

    Args:
        sensitivity: a `Sensitivity` in the norm "l1", or a number, which is taken as a global bound
            in that norm.
        epsilon: finite, above 0.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `AdditiveMechanism`: `mechanism(key, value)` releases any pytree of arrays of integers or
        booleans.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number; on a value, if it holds floats.
        ValueError: if one of them is not positive and finite, or the sensitivity's norm is not l1.

    Formal guarantees:
        As for `laplace`: probabilities change by a factor of at most exp(||x - y||_1 / b) between
        two values x and y. The variance is 2 a / (1 - a)^2, and the variance of rounded Laplace
        noise is larger by a factor of cosh(1 / (2 b)). For a count with sensitivity 1, this
        mechanism is universally optimal: for every prior that its reader may have, and every loss
        that grows with the error, no other epsilon-DP count has a smaller expected loss. With
        probability at least 1 - beta, the error of a coordinate is at most t, the least integer
        with 2 a^(t + 1) / (1 + a) <= beta (see `error`). `dp_event` is the event of any epsilon-DP
        mechanism.

    Source:
        Ghosh, Roughgarden and Sundararajan, "Universally utility-maximizing privacy mechanisms"
        (2009); Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy"
        (2020), for an exact sampler. docs/proofs/exact-noise.md proves the sampler that is used
        here.

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.discrete_laplace(1, epsilon=1.0)
        >>> mechanism.guarantee
        (epsilon=1, delta=0)-DP, under replace-one
        >>> mechanism.error(confidence=0.95)
        3.0
    """
    drawn = DISCRETE_LAPLACE if check_noise(noise) else DISCRETE_LAPLACE.in_floats()
    return additive(sensitivity, epsilon, norm="l1", noise=drawn)


# These multipliers already round outward, so `additive` does not measure their rounding error.
_CALIBRATIONS = {"analytic": analytic_multiplier, "classical": classical_multiplier}


def gaussian(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    delta: Scalar,
    *,
    calibration: Literal["analytic", "classical"] = "analytic",
    noise: NoiseKind = "exact",
) -> AdditiveMechanism:
    """The Gaussian mechanism: independent normal noise of standard deviation sigma.

    The analytic sigma is the least one with Phi(x) - exp(epsilon) Phi(x - mu) <= delta, where
    mu = Delta / sigma and x = mu / 2 - epsilon / mu. The classical one is
    Delta sqrt(2 log(1.25 / delta)) / epsilon.

    Args:
        sensitivity: a `Sensitivity` in the norm "l2", or a number, which is taken as a global bound
            in that norm.
        epsilon: finite, above 0. For the classical calibration at most 1, because above 1 its noise
            would be too small.
        delta: at most 1 - 1e-9; at most .999 if traced. The tables of the noise also require that
            delta, divided by the number of released coordinates, is at least about
            2e-28 exp(epsilon), and that delta is at most about 1 - 5e-7. Other values raise an
            error, or give NaN if traced.
        calibration: "analytic" or "classical".
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `AdditiveMechanism` whose `scale` is sigma: `mechanism(key, value)` releases any pytree
        of real arrays. Noise for integers is rounded to integers.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not l2.

    Formal guarantees:
        (epsilon, delta, gamma)-random DP under the sensitivity's neighboring relation;
        (epsilon, delta)-DP if the sensitivity is a global bound. sigma is rounded up: by a relative
        amount below 1e-6 for concrete parameters, and below 0.2% for traced parameters. The
        guarantee holds for the noise that is actually drawn, in any dimension. The noise is drawn
        as a discrete Gaussian on a lattice of spacing 2^-35 sigma, and is then divided and rounded
        to the grid. The probabilities of the result are within a factor of e^(2^-46) of the rounded
        normal distribution, except for a total probability of 2^-118. noise="float" has no
        guarantee.

    Source:
        Balle and Wang (2018), Theorem 8; Dwork and Roth (2014), Theorem A.1, for the classical
        calibration; Rubinstein and Aldà (2017), Corollary 12.

    Example:
        >>> import dpjax
        >>> round(dpjax.gaussian(1.0, 1.0, 1e-5).scale, 4)
        3.7306
    """
    multiplier = _CALIBRATIONS[_checks.choice("calibration", calibration, tuple(_CALIBRATIONS))]
    delta = _checks.fraction("delta", delta)
    epsilon = _checks.positive("epsilon", epsilon)
    if not _checks.is_traced(delta) and not 1e-300 <= delta <= 1 - 1e-9:
        raise ValueError(f"delta must be from 1e-300 to 1 - 1e-9, got {delta}")
    if calibration == "classical" and not _checks.is_traced(epsilon) and epsilon > 1:
        raise ValueError(
            f"epsilon must be at most 1 for the classical calibration, got {epsilon}: above 1 it"
            ' would add too little noise; use calibration="analytic"'
        )
    drawn = GAUSSIAN if check_noise(noise) else GAUSSIAN.in_floats()
    return additive(
        sensitivity, epsilon, norm="l2", noise=drawn, delta=delta, multiplier=multiplier
    )


def gaussian_for_advantage(
    sensitivity: Sensitivity | float, advantage: float, *, delta: float = 1e-6
) -> AdditiveMechanism:
    """The Gaussian mechanism with the least noise that keeps membership attacks below an advantage.

    The advantage of an attack is its true positive rate minus its false positive rate. The best
    attack on Gaussian noise has an advantage of 2 Phi(Delta / (2 sigma)) - 1. So sigma is Delta /
    (2 Phi^-1((1 + advantage) / 2)). A pair of epsilon and delta also bounds the advantage, but
    calibrating to a pair that gives the same bound takes several times more noise.

    Args:
        sensitivity: as for `gaussian`.
        advantage: the largest advantage, from 1e-5 to .999.
        delta: the delta of the guarantee that the mechanism states; it does not change the noise.

    Returns:
        An `AdditiveMechanism`, with the least epsilon for this noise and delta.

    Raises:
        TypeError: if a parameter is not a concrete number.
        ValueError: if a parameter is out of range, or the sensitivity's norm is not l2.

    Formal guarantees:
        Those of `gaussian` at the epsilon and delta of the mechanism. Its `advantage` is at most
        the given one, in up to 2^20 coordinates.

    Source:
        Kulynych, Gomez, Kaissis, du Pin Calmon and Troncoso, "Attack-aware noise calibration for
        differential privacy" (2024).

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.mechanisms.gaussian_for_advantage(1.0, 0.2, delta=1e-5)
        >>> round(mechanism.scale, 2)
        1.97
    """
    largest = _checks.finite("advantage", advantage)
    delta = _checks.fraction("delta", delta)
    for name, number in (("advantage", largest), ("delta", delta)):
        _checks.host_only(name, number, "a concrete number")
    if not 1e-5 <= largest <= 0.999:
        raise ValueError(f"advantage must be from 1e-5 to .999, got {largest}")
    # A small margin covers the errors of the tables from which noise is drawn, and the rounding of
    # privacy loss distributions.
    ideal = float(largest) * (1 - 1e-6) - 1e-7
    if delta >= ideal:
        raise ValueError(
            f"delta must be below advantage={largest:g}, because the advantage is delta at an"
            f" epsilon of 0, got {delta:g}"
        )
    needed = 0.5 / float(scipy.special.ndtri((1 + ideal) / 2)) * (1 + 1e-9)

    def is_enough(epsilon: float) -> bool:
        return bool(analytic_multiplier(epsilon, delta) >= needed)

    epsilon, _ = bisect(is_enough, 1e-12, 500.0, in_logarithms=True)
    return gaussian(sensitivity, epsilon, delta)


# Margins for the rounding errors of a multiplier, which is a user's formula for the ratio of the
# noise scale to the sensitivity. The rounding error of the formula is measured, and eight times the
# largest error is added to the scale. For concrete parameters, the formula is evaluated in float64
# on the host, and its value is compared with its values at nearby parameters. For traced
# parameters, it is evaluated in the float dtype of the program, and its values in float32 are
# compared with values in float64 at many parameters. A formula with catastrophic cancellation is
# refused.


Multiplier = Callable[[Scalar, Scalar], Scalar]

# A relative error below this needs no margin, because the scale that is actually used exceeds the
# nominal scale by more than this error.
_COVERED = 2.0**-40
_FACTOR = 8  # The scale is increased by this many times the largest measured error.
_MOST_LOST, _MOST_LOST_TRACED = 2.0**-20, 2.0**-10
# The error of a formula is measured by comparing its value with its values at nearby parameters.
# `_STEPS` are the relative distances to the nearby parameters, from 2^-8 to 2^-48. A step up is
# longer than a step down by the irrational factor `_LONGER`. Equal steps could miss errors that are
# symmetric about the parameter.
_STEPS, _LONGER = [0.618034**power for power in range(12, 70, 2)], 1.618034
# The least epsilon that is accepted. A formula may subtract logarithms, whose magnitudes reach 745
# in float64. For a smaller epsilon, rounding could make the formula equally wrong at all nearby
# parameters, so comparing its values would not reveal the error.
_LEAST_EPSILON = 1e-9
# Traced parameters are tested in these ranges. The scale is NaN for parameters outside of these
# ranges.
_EPSILONS, _DELTAS = (2.0**-14, 2.0**6), (2.0**-60, 2.0**-2)
_TRIED = 256


def multiple_of(multiplier: Multiplier, epsilon: Scalar, delta: Scalar) -> Scalar:
    """Returns the ratio of scale to sensitivity, with a margin for the formula's rounding error."""
    if _checks.is_traced(epsilon) or _checks.is_traced(delta):
        return _traced(multiplier, epsilon, delta)
    if epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {_LEAST_EPSILON:g} for a multiplier of your own, got"
            f" {epsilon}: below this limit, rounding errors of the multiplier cannot be measured"
        )
    numbers = np.float64(epsilon), np.float64(delta)
    with jax.enable_x64(True), computing_now():
        unit = _in_float64(multiplier(*numbers))
        # `additive` refuses an infinite scale later.
        around = _lost_around(lambda *moved: _in_float64(multiplier(*moved)), numbers, unit)
        lost = float(around) if math.isfinite(unit) else 0.0
    if lost > _MOST_LOST:
        raise ValueError(_cancels(f"{lost:.2g} of its value at epsilon={epsilon:g}"))
    return unit * (1 + (0 if lost <= _COVERED else _FACTOR * lost))


def _in_float64(unit: object) -> float:
    dtype = getattr(unit, "dtype", np.dtype(np.float64))
    if _checks.is_traced(unit):
        raise TypeError("multiplier closes over a traced value: make the mechanism outside of jit")
    if dtype != np.float64:
        raise TypeError(
            f"multiplier must return float64 for float64 parameters, got {dtype}: find the cast or"
            " the array that reduces the precision, and remove it"
        )
    return float(unit)  # pyright: ignore[reportArgumentType]


def _lost_around(
    formula: Callable[..., Value], numbers: tuple[Value, ...], unit: Value
) -> np.ndarray:
    """Estimates the relative rounding error of a formula f by its deviation from a straight line.

    The line goes through the values of f at two points near x. Let d be twice the relative
    deviation of f(x) from the line, s the relative step, and c = `_LONGER`. Without rounding, d is
    about c s^2 |x^2 f''(x) / f(x)|, because f is curved. For example, this is 56 c s^2 if f is
    x^-7, and c s^2 x^2 if f is e^x. So c s^2 (64 + x^2) is subtracted from d, and the rest counts
    as rounding error. Several steps are tried, because an error need not show at every step.
    """
    worst = np.zeros(np.shape(unit))
    for place, number in enumerate(numbers):
        if np.all(number == 0):
            continue
        for step in _STEPS:
            down, up = (
                formula(*numbers[:place], number * factor, *numbers[place + 1 :])
                for factor in (1 - step, 1 + _LONGER * step)
            )
            between = (_LONGER * np.asarray(down) + np.asarray(up)) / (1 + _LONGER)
            with np.errstate(all="ignore"):
                bent = 2 * np.abs(between / np.asarray(unit) - 1)
            lost = bent - _LONGER * (64 + number**2) * step**2
            worst = np.maximum(worst, np.where(np.isnan(lost), np.inf, lost))
    return worst


def _traced(multiplier: Multiplier, epsilon: Scalar, delta: Scalar) -> jax.Array:
    """Returns scale / sensitivity for traced parameters; NaN outside of the tested ranges."""
    epsilon, delta = jnp.asarray(epsilon), jnp.asarray(delta)
    dtype = max(compute_dtype(epsilon.dtype), compute_dtype(delta.dtype))
    known = None if _checks.is_traced(delta) else float(delta)
    lost, at = _lost_in(multiplier, dtype, known)
    if not lost <= _MOST_LOST_TRACED:
        raise ValueError(_cancels(f"{lost:.2g} of its value in {dtype} at epsilon={at:g}"))
    tried = (epsilon >= _EPSILONS[0]) & (epsilon <= _EPSILONS[1])
    if known is None:
        tried &= (delta == 0) | ((delta >= _DELTAS[0]) & (delta <= _DELTAS[1]))
    unit = multiplier(epsilon.astype(dtype), delta.astype(dtype))
    return jnp.where(tried, unit * (1 + _FACTOR * lost + 2.0**-20), jnp.nan)


def _lost_in(multiplier: Multiplier, dtype: DTypeLike, delta: float | None) -> tuple[float, float]:
    """Returns a formula's largest relative error at random parameters, and the epsilon there."""
    generator = np.random.default_rng(0)
    epsilons = _between(generator, *_EPSILONS)
    deltas = _between(generator, *_DELTAS) if delta is None else np.full(_TRIED, delta)
    # Both dtypes are tested at the same parameters, which the narrower of the two dtypes represents
    # exactly.
    epsilons, deltas = (np.asarray(x, dtype).astype(np.float64) for x in (epsilons, deltas))
    try:
        with computing_now():
            short = jax.vmap(multiplier)(jnp.asarray(epsilons, dtype), jnp.asarray(deltas, dtype))
            short = np.asarray(short, np.float64)
            with jax.enable_x64(True):
                formula = jax.jit(jax.vmap(multiplier))
                exact = np.asarray(formula(epsilons, deltas))
                errors = np.abs(short / exact - 1)
                if dtype == np.float64:
                    errors = _lost_around(formula, (epsilons, deltas), exact)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            "multiplier must be written in jax.numpy if its parameters are traced. This function"
            " reads their values, which are not known inside of jit: rewrite it, or make the"
            " mechanism outside of jit"
        ) from error
    worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    found = np.broadcast_to(errors, (_TRIED,))[worst]
    return (math.inf if np.isnan(found) else float(found)), float(epsilons[worst])


def _between(generator: np.random.Generator, low: float, high: float) -> np.ndarray:
    return np.exp(generator.uniform(math.log(low), math.log(high), _TRIED))


def _cancels(loss: str) -> str:
    return (
        f"multiplier loses {loss}, because it subtracts nearly equal numbers: rewrite the formula,"
        " for example 1 / (sqrt(a) - sqrt(b)) as (sqrt(a) + sqrt(b)) / (a - b)"
    )
