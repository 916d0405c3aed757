"""Private selection: a noisy maximum over an array of scores."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax._grid import power_of_two
from dpjax._numerics import compute_dtype
from dpjax._pytree import frozen_pytree, static, up
from dpjax.base import NoiseKind, Scalar, Sensitivity
from dpjax.mechanisms._additive import as_number, check_fit
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin, check_noise, count
from dpjax.norms import grid_dtype, is_float, rounding_norm
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import EXPONENTIAL
from dpjax.random._release import check_scale, usable_scale
from dpjax.random._selection import clamped_scores, largest_gap, score_gaps


@dataclasses.dataclass(frozen=True)
class SelectionRule:
    """How to select: the noise of the race, and the log probabilities that it gives.

    Attributes:
        name: what messages call it.
        draw: draws an index, `draw(key, scores, calibration)`.
        draw_in_floats: the same with noise in floats.
        log_pmf: log probabilities from score / temperature, shape (K,) to (K,).
        bounded_range: whether log ratios of probabilities lie in an interval of length epsilon.

    Formal guarantees:
        None of its own.
    """

    name: str
    draw: Callable[[jax.Array, jax.Array, Calibration], jax.Array]
    draw_in_floats: Callable[[jax.Array, jax.Array, Calibration], jax.Array]
    log_pmf: Callable[[jax.Array], jax.Array]
    bounded_range: bool = False


@frozen_pytree
class SelectionMechanism(SensitivityMechanism):
    """Selects a response by its score; made by `exponential` or `permute_and_flip`.

    Attributes:
        sensitivity: how far any score moves, norm "linf".
        epsilon: of the guarantee.
        rule: how to select.
        exact: whether the noise is; nothing is promised under noise in floats.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    rule: SelectionRule = static()
    exact: bool = static(default=True)

    norm = "linf"

    @property
    def _is_exact(self) -> bool:
        return self.exact

    @property
    def zcdp(self) -> tuple[float, float]:
        """Of the exponential mechanism, whose range is bounded: epsilon^2 / 8 and 0.

        Dong, Durfee and Rogers (2020); Cesar and Rogers (2021).
        """
        rho, delta = super().zcdp
        return (rho / 4 if self.rule.bounded_range else rho), delta

    def _calibration(self, scores: Any) -> Calibration:
        # Of the noise of a single option at a time, on both of the neighbors.
        return Calibration(
            self._temperature,
            self.sensitivity.value,
            self.epsilon,
            rounding_norm("linf", scores),
            2,
            self.sensitivity.zero_allowed,
            grid_dtype(scores),
        )

    @property
    def grid(self) -> Scalar:
        """What float scores are rounded to; integers are not rounded."""
        if self.sensitivity.zero_allowed:
            return 0.0
        scores = jax.ShapeDtypeStruct((), jnp.result_type(float))
        exponent = self._calibration(scores).fit(EXPONENTIAL, scores.dtype).exponent
        return as_number(power_of_two(exponent, scores.dtype))

    def range(self, shape: tuple[int, ...] = (), dtype: Any = None) -> tuple[Scalar, Scalar]:
        """Which gaps to the best score are told apart: larger ones count as the largest of these.

        About 2^18 times the scale, where no response is ever selected. Scores themselves are not
        clamped, but floats to half of the largest one.

        Args:
            shape: ignored: it is the same for any number of scores.
            dtype: of the scores; by default the default float.

        Returns:
            0 and the largest gap, in the units of the scores.
        """
        del shape
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(float) if dtype is None else dtype)
        return 0.0, as_number(self._largest_gap(jax.ShapeDtypeStruct((), dtype)))

    def _largest_gap(self, scores: Any) -> jax.Array:
        dtype = compute_dtype(scores.dtype)
        if not self.exact or self.sensitivity.zero_allowed:
            return jnp.asarray(jnp.finfo(dtype).max, dtype)
        return largest_gap(self._calibration(scores).fit(EXPONENTIAL, scores.dtype), dtype)

    def clamped(self, value: Any) -> Any:
        """Scores as they are compared: finite, NaN as the lowest; integers as they are.

        Args:
            value: an array of scores.

        Returns:
            An array of the same shape, as private as the value.
        """
        scores = _checks.real_arrays("value", value)
        return clamped_scores(scores) if is_float(scores) else scores

    def effective_scale(self, shape: tuple[int, ...] = ()) -> Scalar:
        """By how much a score's gap must grow for a factor e; covers rounding float scores.

        Args:
            shape: ignored: the charge is the same for any number of scores.

        Returns:
            A scalar in the units of the scores.
        """
        del shape
        if self.sensitivity.zero_allowed:
            return self._temperature
        scores = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return as_number(self._scale_drawn(scores))

    def _scale_drawn(self, scores: Any) -> jax.Array:
        if not self.exact:
            return usable_scale(self._temperature, scores.dtype)
        return self._calibration(scores).fit(EXPONENTIAL, scores.dtype).scale

    @property
    def _temperature(self) -> Scalar:
        return 2 * self.sensitivity.value / self.epsilon

    def _check_value(self, value: Any) -> None:
        if not isinstance(value, jax.Array) or value.ndim != 1:
            raise ValueError(
                "value must be one array of scores over the response set, shape (K,), got"
                f" {jax.tree.map(jnp.shape, value)}; use jax.vmap for a batch"
            )

        zero_allowed = self.sensitivity.zero_allowed
        check_scale("2 sensitivity / epsilon", self._temperature, value, zero_allowed=zero_allowed)
        if self.exact and not _checks.is_traced(self.epsilon):
            check_fit(self._calibration(value), EXPONENTIAL, value)

    def _draw(self, key: jax.Array, value: Any) -> jax.Array:
        draw = self.rule.draw if self.exact else self.rule.draw_in_floats
        return draw(key, value, self._calibration(value))

    def log_prob(self, output: Any, value: Any) -> jax.Array:
        scores = _checks.real_arrays("value", value)
        self._check_value(scores)
        gaps = score_gaps(scores)
        gaps = jnp.minimum(gaps, self._largest_gap(scores).astype(gaps.dtype))
        log_pmf = self.rule.log_pmf(-gaps / self._scale_drawn(scores).astype(gaps.dtype))
        index = jnp.asarray(output)
        possible = (index >= 0) & (index < scores.size)
        return jnp.where(possible, log_pmf[jnp.clip(index, 0, scores.size - 1)], -jnp.inf)

    def error_quantile(
        self, probability: float, *, shape: tuple[int, ...] = (), simultaneous: bool = False
    ) -> Scalar:
        """A gap of scores that the selected one stays within.

        A response with a gap g is selected with probability at most exp(-epsilon g / (2 Delta)).
        For each response: one with a larger gap is selected with probability below 1 - p. For all
        K at once: whatever is selected has a gap of at most this, with probability p.

        Args:
            probability: p, in (0, 1).
            shape: (K,), the number of responses; needed where simultaneous.
            simultaneous: for all responses at once, instead of for each one of them.

        Returns:
            A scalar in the units of the scores.
        """
        if simultaneous and not shape:
            raise ValueError("shape must be (K,), the number of responses, got ()")
        tail = 1 - _checks.fraction("probability", probability)
        responses = count(shape) if simultaneous else 1
        return self.effective_scale() * math.log(responses / tail)


def select_by(
    rule: SelectionRule, sensitivity: Sensitivity | float, epsilon: Scalar, noise: NoiseKind
) -> SelectionMechanism:
    """Makes a selection mechanism."""
    exact = check_noise(noise)
    sensitivity, epsilon = begin("linf", sensitivity, epsilon)
    return SelectionMechanism(sensitivity, epsilon, rule, exact)
