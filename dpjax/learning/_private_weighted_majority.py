"""Randomized weighted majority whose choices reveal little about the losses of any one step.

A choice is the exponential mechanism on minus the cumulative losses. Replacing the losses of one
step moves these by at most 1. So a choice is 2 eta-DP, and its log ratios of probabilities lie in
an interval of that length. It is (2 eta)^2 / 8 = eta^2 / 2-zCDP, and T choices are T times that.
"""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import down, frozen_pytree, static, up
from dpjax._core._types import Key, Value
from dpjax._core._values import Scalar, Sensitivity
from dpjax.accounting._concentrated import largest_rho
from dpjax.learning._weighted_majority import (
    MOST_STEPS,
    clamped_losses,
    loss_bits,
    loss_matrix,
    loss_units,
    scan_steps,
)
from dpjax.mechanisms._exponential import exponential
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin
from dpjax.mechanisms._selection import SelectionMechanism

RateMethod = Literal["zcdp", "drv"]
# Covers the roundings of a calibration in float64, and of one in float32.
_ROUNDING, _TRACED_ROUNDING = 1e-12, 2.0**-18


def replaced_steps(difference: Value) -> jax.Array:
    """The norm of private weighted majority: the number of steps with other losses."""
    (moved,) = jax.tree.leaves(difference)
    return jnp.sum(jnp.any(moved != 0, axis=-1), dtype=moved.dtype)


@frozen_pytree
class PrivateWeightedMajority(SensitivityMechanism):
    """Follows experts privately; made by `private_weighted_majority`.

    Attributes:
        sensitivity: the losses of one step are replaced.
        epsilon: of the guarantee.
        delta: of the guarantee.
        learning_rate: eta.
        steps: T.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    delta: Scalar = up()
    learning_rate: Scalar = down()
    steps: int = static()

    norm = staticmethod(replaced_steps)

    @property
    def choice(self) -> SelectionMechanism:
        """The exponential mechanism of each step, on minus the losses in units of their grid."""
        return exponential(2.0 ** loss_bits(self.steps), 2 * self.learning_rate)

    def units(self, losses: jax.typing.ArrayLike) -> jax.Array:
        """Losses as they are added up, clamped and in units of their grid; private.

        If losses come one step at a time, the choice of step t, from 0, is `mechanism.choice(
        jax.random.fold_in(key, t), -total)`, with the total of the earlier units.

        Args:
            losses: of some steps, one after the other along the leading axis, or of one.

        Returns:
            An int32 array of the same shape.
        """
        return loss_units(_checks.real_arrays("losses", losses), loss_bits(self.steps))

    def _delta(self) -> Scalar:
        return self.delta

    @property
    def zcdp(self) -> tuple[float, float]:
        """Of T choices with bounded range: T eta^2 / 2 and 0."""
        rho, delta = self.choice.zcdp
        return self.steps * rho * (1 + _ROUNDING), delta

    @property
    def dp_event(self) -> Any:
        return _checks.extra("dp_accounting", "accounting").ZCDpEvent(self.zcdp[0])

    def _check_value(self, value: Value) -> None:
        losses = loss_matrix("value", value)
        if len(losses) != self.steps:
            raise ValueError(f"value must have {self.steps} steps, got {len(losses)}")
        self.choice._check_value(jax.ShapeDtypeStruct(losses.shape[1:], jnp.int32))

    def _draw(self, key: Key, value: Value) -> jax.Array:
        choice = self.choice

        def choose(number: jax.Array, cumulative: jax.Array) -> jax.Array:
            return choice._draw(jax.random.fold_in(key, number), -cumulative)

        return scan_steps(choose, value)

    def clamped(self, value: Value) -> Value:
        """Losses as they count: in [0, 1], NaN as 1.

        Args:
            value: an array of losses.

        Returns:
            An array of the same shape, as private as the value.
        """
        return clamped_losses(_checks.real_arrays("value", value))

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        losses = loss_matrix("value", value)
        scores = scan_steps(lambda _, cumulative: -cumulative, losses)
        return jnp.sum(jax.vmap(self.choice.log_prob)(jnp.asarray(output), scores))

    def excess_loss(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        simultaneous: bool = False,
    ) -> Scalar:
        """A bound on the loss so far of an expert that is followed, minus that of the best.

        Args:
            confidence: the probability, at least, that the bound is kept; in (0, 1).
            shape: (T, k); it is needed where simultaneous.
            simultaneous: for all experts at all steps, instead of for each one of them.

        Returns:
            A scalar, a sum of losses in units of their grid.
        """
        confidence = _checks.fraction("confidence", confidence)
        if simultaneous and shape is not None:
            confidence = 1 - (1 - confidence) / self.steps
        experts = None if shape is None else tuple(shape)[1:]
        gap = self.choice.score_gap(confidence=confidence, shape=experts, simultaneous=simultaneous)
        return gap / 2.0 ** loss_bits(self.steps)


def private_weighted_majority(
    epsilon: Scalar, delta: Scalar, *, steps: int, method: RateMethod = "zcdp"
) -> PrivateWeightedMajority:
    """Randomized weighted majority under differential privacy: the choices may be published.

    The learning rate is the largest at which all T choices together keep (epsilon, delta), by

    - "zcdp": T eta^2 / 2-zCDP, since every choice has bounded range. Where epsilon is traced by the
      conversion in closed form, sqrt(T eta^2 / 2) = sqrt(ln(1 / delta) + epsilon) - sqrt(ln(1 /
      delta)); else by the optimal one, which leaves more: 18% at epsilon = 1, delta = 1e-6.
    - "drv": eta = epsilon / sqrt(32 T ln(1 / delta)), by advanced composition of T choices that are
      2 eta-DP: the lecture's, about a quarter of the other, for comparison.

    The price is `regret_bound(steps=, experts=, learning_rate=mechanism.learning_rate)`.

    Args:
        epsilon: above 0; with "drv" at most 2 ln(1 / delta) and sqrt(8 T ln(1 / delta)).
        delta: strictly between 0 and 1.
        steps: T, at most 2^20.
        method: see above.

    Returns:
        A `PrivateWeightedMajority`: `mechanism(key, losses)` takes losses of shape (T, k), clamped
        to [0, 1] where NaN counts as 1, and releases choices, int32 of shape (T,). The choice of a
        step sees the losses before it alone, rounded to 2^-16, or coarser from 2^14 steps on.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if one is out of range; at a release, if the losses have another shape, or the
            learning rate is too small for noise on their grid.

    Formal guarantees:
        (epsilon, delta)-DP if the losses of all experts at one step are replaced: a record is a
        step. A person who contributes to t steps has t times the distance: see `accounting.group`.
        Losses of a later step may depend on earlier choices. Then only the replaced losses are
        protected. Exact: cumulative losses are integers, every choice has a key of its own, and the
        scale of each covers the tables of the noise, so its range is at most 2 eta as drawn.

    Source:
        McSherry and Talwar (2007); Dwork, Rothblum and Vadhan (2010); Dong, Durfee and Rogers
        (2020) for bounded range; Cesar and Rogers (2021) for its zCDP.

    Example:
        >>> import dpjax
        >>> from dpjax import learning
        >>> mechanism = learning.private_weighted_majority(1.0, 1e-6, steps=100)
        >>> losses = learning.adversarial_losses("one-good-expert", steps=100, experts=3)
        >>> mechanism(dpjax.random.seeded_key(0), losses).value.shape
        (100,)
    """
    sensitivity, epsilon = begin(replaced_steps, 1.0, epsilon)
    delta = _checks.fraction("delta", delta)
    steps = _checks.integer("steps", steps, least=1, most=MOST_STEPS)
    _checks.choice("method", method, get_args(RateMethod))
    traced = _checks.is_traced(epsilon) or _checks.is_traced(delta)
    log = -(jnp.log(delta) if _checks.is_traced(delta) else math.log(delta))
    if method == "drv":
        epsilon = _within_lecture(epsilon, log, steps, traced)
        rate = epsilon / (32 * steps * log) ** 0.5
    else:
        rho = _simple_rho(epsilon, log) if traced else largest_rho(float(epsilon), float(delta))
        rate = (2 * rho / steps) ** 0.5
    rate *= 1 - (_TRACED_ROUNDING if traced else 4 * _ROUNDING)
    return PrivateWeightedMajority(sensitivity, epsilon, delta, rate, steps)


def _simple_rho(epsilon: Scalar, log: Scalar) -> Scalar:
    """The rho with rho + 2 sqrt(rho ln(1 / delta)) = epsilon, without a difference of roots."""
    return (epsilon / ((log + epsilon) ** 0.5 + log**0.5)) ** 2


def _within_lecture(epsilon: Scalar, log: Scalar, steps: int, traced: bool) -> Scalar:
    """Refuses an epsilon at which the rate in closed form may not be private, NaN where traced.

    With x = 2 eta, advanced composition is epsilon / 2 + T x (e^x - 1), and for x <= 1 the second
    term is at most 2 T x^2 = epsilon^2 / (4 ln(1 / delta)).
    """
    if traced:
        private = (epsilon <= 2 * log) & (epsilon <= (8 * steps * log) ** 0.5)
        return jnp.where(private, epsilon, jnp.nan)
    most = min(2 * log, (8 * steps * log) ** 0.5)
    if epsilon > most:
        raise ValueError(f'epsilon must be at most {most:.6g} with method "drv", got {epsilon:g}')
    return epsilon
