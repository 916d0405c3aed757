"""Private selection: an option with a high score, found by a noisy maximum."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._pair_loss import LogPmf, PairLoss
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import NoiseKind, Norm, Scalar, Sensitivity
from dpjax._exact._numerics import compute_dtype
from dpjax.mechanisms._lattice_mechanism import (
    ArrayOrShape,
    LatticeMechanism,
    as_number,
    whole,
)
from dpjax.mechanisms._start import begin, check_noise, check_one_array
from dpjax.random._facade import (
    EXPONENTIAL,
    Calibration,
    Lattice,
    clamped_scores,
    largest_gap,
    remaining_scores,
    score_gaps,
    usable_scale,
    without_weight,
)
from dpjax.sensitivity._norms import grid_dtype, is_float, rounding_norm


@dataclasses.dataclass(frozen=True)
class SelectionRule:
    """How to select: the noise of the race, and its log probabilities.

    Attributes:
        name: for messages.
        draw: draws an index, `draw(key, scores, calibration)`, or with a fourth argument of log
            weights.
        draw_in_floats: the same with noise in floats.
        log_pmf: takes score / temperature, shape (K,), to log probabilities, shape (K,).
        bounded_range: whether log ratios of probabilities lie in an interval of length epsilon.

    Formal guarantees:
        None of its own.
    """

    name: str
    draw: Callable[..., jax.Array]
    draw_in_floats: Callable[..., jax.Array]
    log_pmf: LogPmf
    bounded_range: bool = False


@frozen_pytree
class SelectionMechanism(LatticeMechanism):
    """Selects a response by its score; made by `exponential` or `permute_and_flip`.

    Attributes:
        sensitivity: how far scores move, norm "linf" or "range".
        epsilon: of the guarantee.
        rule: how to select.
        exact: whether the noise is exact; noise in floats promises nothing.
        log_base: log weights of the responses; None for equal ones.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    rule: SelectionRule = static()
    exact: bool = static(default=True)
    log_base: tuple[float, ...] | None = static(default=None)

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity: "linf" or "range"."""
        return self.sensitivity.norm

    _scale_name = "2 sensitivity / epsilon"

    @property
    def _most_range(self) -> Scalar:
        """How far the gap of two scores moves at most."""
        return self.sensitivity.value * (1 if self.norm == "range" else 2)

    @property
    def zcdp(self) -> tuple[float, float]:
        """For the exponential mechanism epsilon^2 / 8 and 0, since its range is bounded.

        Dong, Durfee and Rogers (2020); Cesar and Rogers (2021).
        """
        rho, delta = super().zcdp
        return (rho / 4 if self.rule.bounded_range else rho), delta

    @property
    def _lattice(self) -> Lattice | None:
        return EXPONENTIAL if self.exact else None

    def _check_structure(self, value: Value) -> None:
        check_one_array(value, "scores over the response set, shape (K,)")
        if self.log_base is not None and value.size != len(self.log_base):
            raise ValueError(
                f"value must have a score for each of the {len(self.log_base)} weights of the base,"
                f" got {value.size}"
            )

    def _calibration(self, arrays: PyTree) -> Calibration:
        # A proof compares the noise of one option, on both neighbors.
        return Calibration(
            self._most_range / self.epsilon,
            self.sensitivity.value,
            self.epsilon,
            self._rounding(arrays),
            2,
            self.sensitivity.zero_allowed,
            grid_dtype(arrays),
        )

    def _rounding(self, arrays: PyTree) -> Scalar:
        return rounding_norm(self.norm, arrays)

    def _draw(self, key: Key, value: Value) -> jax.Array:
        draw = self.rule.draw if self.exact else self.rule.draw_in_floats
        base = () if self.log_base is None else (self.log_base,)
        return draw(key, value, self._calibration(value), *base)

    def range(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
        *,
        like: PyTree = None,
    ) -> tuple[Scalar, Scalar]:
        """The range of gaps to the best score; a larger gap counts as the largest in it.

        The largest gap is about 2^18 scales. No response is ever selected there. Scores are not
        clamped, except infinite ones to the largest float.

        Args:
            shape: of the scores; the range does not depend on it.
            dtype: of the scores; by default JAX's default float.
            like: instead of both, an array or `jax.ShapeDtypeStruct` of scores.

        Returns:
            0 and the largest gap, in the units of the scores.
        """
        scores, calibration = self._asked(shape, like, dtype)
        return 0.0, as_number(self._largest_gap(scores, calibration))

    def pair_loss(self, value: Value) -> PairLoss:
        lattice = self._lattice
        if lattice is None or self.sensitivity.zero_allowed:
            return super().pair_loss(value)
        scores, calibration = self._asked(None, value)
        scale = float(self._scale_drawn(scores, calibration))
        step = float(self._spacing(scores, calibration)) if is_float(scores) else 0.0
        return PairLoss(
            "range" if self.rule.bounded_range else "pure",
            # Adding one number to all scores changes nothing: the range of the difference counts.
            lambda moved: _range_at_most(moved, exact=is_float(scores)) / scale,
            float(self.epsilon),
            2 * step / scale,
            float(calibration.coordinates) * lattice.certificate.loss,
            0.0,
            lambda scores: (scores, -scores if is_float(scores) else ~scores),
            logits=lambda arrays: self._logits(arrays[0]),
            log_pmf=self.rule.log_pmf,
            options=scores.size,
        )

    def _largest_gap(self, scores: ArrayOrShape, calibration: Calibration) -> jax.Array:
        dtype = compute_dtype(scores.dtype)
        if not self.exact or calibration.zero_allowed:
            return jnp.asarray(jnp.finfo(dtype).max, dtype)
        return largest_gap(calibration.fit(EXPONENTIAL, scores.dtype), dtype)

    def clamped(self, value: Value) -> Value:
        """The scores that are compared: integers as they are; floats finite, and NaN the lowest.

        Args:
            value: an array of scores.

        Returns:
            An array of the same shape, as private as the value.
        """
        scores = _checks.real_arrays("value", value)
        return clamped_scores(scores) if is_float(scores) else scores

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        scores = _checks.real_arrays("value", value)
        self._check_value(scores)
        return log_prob_of_index(self.rule.log_pmf(self._logits(scores)), jnp.asarray(output))

    def _logits(self, scores: jax.Array) -> jax.Array:
        """Minus the gap of each score, over the drawn scale, plus its log weight; at most 0."""
        calibration = self._calibration(scores)
        # The best score is one of those that can be selected.
        gaps = score_gaps(remaining_scores(scores, without_weight(self.log_base)))
        gaps = jnp.minimum(gaps, self._largest_gap(scores, calibration).astype(gaps.dtype))
        logits = -gaps / usable_scale(self._scale_drawn(scores, calibration), gaps.dtype)
        if self.log_base is None:
            return logits
        return logits + jnp.asarray(np.subtract(self.log_base, max(self.log_base)), gaps.dtype)

    def score_gap(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        like: PyTree = None,
        simultaneous: bool = False,
    ) -> Scalar:
        """A bound on the gap of the selected response to the best score, at a confidence.

        A response with gap g is selected with probability at most exp(-epsilon g / (2 Delta)), and
        with a base at most so often as the largest weight is larger than the smallest. The
        bound for each response: if its gap is larger, it is not selected with probability at least
        `confidence`. The bound for all K: the selected one keeps it, with that probability.

        Args:
            confidence: in (0, 1).
            shape: (K,), for K responses; simultaneous bounds need it, or `like`.
            like: instead of a shape, an array or `jax.ShapeDtypeStruct` of scores.
            simultaneous: for all responses at once, instead of for each one of them.

        Returns:
            A scalar in the units of the scores; it covers their rounding to the grid.
        """
        if simultaneous and not shape and like is None:
            raise ValueError("shape must be (K,), the number of responses, got ()")
        scores, calibration = self._asked(shape, like)
        tail = 1 - _checks.fraction("confidence", confidence)
        responses = self._responses(scores) if simultaneous else 1
        weights = 0.0 if self.log_base is None else max(self.log_base) - min(self.log_base)
        gap = self._scale_drawn(scores, calibration) * (math.log(responses / tail) + weights)
        # Rounding moves both scores of a gap by up to half a step.
        return gap + self._spacing(scores, calibration) if is_float(scores) else whole(gap)

    def _responses(self, scores: jax.ShapeDtypeStruct) -> int:
        """The number of options, over all selections."""
        return scores.size


def _range_at_most(moved: tuple[jax.Array, jax.Array], *, exact: bool) -> jax.Array:
    """The range of a difference, from it and its negative; casts of large integers may hide some.

    What the subtraction of floats hides is charged as their resolution.
    """
    upper, lower = map(jnp.max, moved)
    largest, eps = jnp.maximum(upper, lower), float(jnp.finfo(jnp.float32).eps)
    hidden = jnp.where(largest < 1 / eps, 0, 2 * eps * largest)
    return upper + lower if exact else upper + lower + hidden


def log_prob_of_index(log_pmf: jax.Array, index: jax.Array) -> jax.Array:
    """The log probability of an index; -inf if it is out of range."""
    possible = (index >= 0) & (index < log_pmf.size)
    return jnp.where(possible, log_pmf[jnp.clip(index, 0, log_pmf.size - 1)], -jnp.inf)


def select_by(
    rule: SelectionRule,
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    noise: NoiseKind,
    log_base: ArrayLike | None,
) -> SelectionMechanism:
    """Makes a selection mechanism."""
    exact = check_noise(noise)
    norm = "range" if getattr(sensitivity, "norm", "linf") == "range" else "linf"
    sensitivity, epsilon = begin(norm, sensitivity, epsilon)
    base = None if log_base is None else log_weights("log_base", log_base)
    return SelectionMechanism(sensitivity, epsilon, rule, exact, base)


def log_weights(name: str, weights: ArrayLike) -> tuple[float, ...]:
    """Public log weights of all responses; not all of them are -inf."""
    if _checks.is_traced(weights):
        raise TypeError(f"{name} must be known when the mechanism is made, got a traced array")
    found = _checks.host_numbers(name, weights).astype(np.float64)
    if found.ndim != 1 or not found.size or np.isnan(found).any() or not found.max() < math.inf:
        raise ValueError(f"{name} must be log weights, shape (K,), got {_checks.shown(weights)}")
    if found.max() == -math.inf:
        raise ValueError(f"{name} must give a weight to one response at least, got only -inf")
    return tuple(found.tolist())
