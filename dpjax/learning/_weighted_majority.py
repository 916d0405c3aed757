"""Randomized weighted majority: follows one of several experts, nearly as well as the best one."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import down, frozen_pytree, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Scalar, Sensitivity
from dpjax._exact._numerics import compute_dtype
from dpjax.accounting._concentrated import largest_rho
from dpjax.mechanisms._selection import SelectionMechanism, exponential
from dpjax.mechanisms._start import begin
from dpjax.random._keys import check_sampling_key
from dpjax.release._mechanism import SensitivityMechanism

MOST_STEPS = 2**20
_FINEST_BITS = 16


@frozen_pytree
class WeightedMajorityRun:
    """The choices of randomized weighted majority on a sequence of losses; not private.

    Attributes:
        choices: int32 of shape (T,), the expert that was followed at each step.
        losses: shape (T,), the losses of the choices.
        expected_losses: shape (T,), expected over the randomness of the choices.
        regret: the average loss of the choices, minus the average loss of the best expert.
        expected_regret: the regret with expected losses instead of the losses of the choices.

    Formal guarantees:
        Losses are rounded to multiples of 2^-16; with 2^14 steps or more, to coarser multiples.
    """

    choices: jax.Array
    losses: jax.Array
    expected_losses: jax.Array
    regret: jax.Array
    expected_regret: jax.Array


def weighted_majority(
    key: Key, losses: jax.typing.ArrayLike, *, learning_rate: Scalar | None = None
) -> WeightedMajorityRun:
    """Randomized weighted majority (Hedge), without privacy; see `private_weighted_majority`.

    Each step follows expert i with probability proportional to exp(-eta L_i), where L_i is the
    expert's total loss in earlier steps. The function works in `jit`, and `vmap` may map over keys
    and over sequences of losses.

    Args:
        key: a typed key.
        losses: shape (T, k), the losses of k experts at T steps. k is at least 2, and T is at most
            2^20. Losses are clamped to [0, 1], and NaN counts as 1.
        learning_rate: eta, above 0; sqrt(ln k / T) if None.

    Returns:
        A `WeightedMajorityRun`.

    Raises:
        TypeError: if the key is not a typed key, or the losses are not real numbers.
        ValueError: if the losses have another shape, or the learning rate is out of range.

    Formal guarantees:
        The expected regret is at most `regret_bound`, for any losses, even if they depend on
        earlier choices. Cumulative losses are integers, so no rounding adds up.

    Source:
        Littlestone and Warmuth (1994); Freund and Schapire (1997).

    Example:
        >>> import jax
        >>> from dpjax import learning
        >>> losses = learning.adversarial_losses("one-good-expert", steps=1000, experts=10)
        >>> run = learning.weighted_majority(jax.random.key(0), losses)
        >>> float(run.regret) < learning.regret_bound(steps=1000, experts=10)
        True
    """
    check_sampling_key(key)
    matrix = check_loss_matrix("losses", _checks.real_arrays("losses", losses))
    steps, experts = matrix.shape
    rate = best_rate(steps, experts) if learning_rate is None else learning_rate
    rate = jnp.asarray(_checks.positive("learning_rate", rate), jnp.result_type(float))
    return _run(key, matrix, rate)


def regret_bound(*, steps: int, experts: int, learning_rate: Scalar | None = None) -> float:
    """A bound on the expected regret of randomized weighted majority.

    The bound is eta + ln k / (eta T). Its least value, 2 sqrt(ln k / T), is at eta = sqrt(ln k /
    T).

    Args:
        steps: T.
        experts: k, at least 2.
        learning_rate: eta, above 0; sqrt(ln k / T) if None.

    Returns:
        A bound on the expected average loss minus the average loss of the best expert, at most 1.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        The bound is valid for every sequence of losses in [0, 1].

    Source:
        Freund and Schapire (1997); Arora, Hazan and Kale (2012), Theorem 2.1.

    Example:
        >>> from dpjax import learning
        >>> round(learning.regret_bound(steps=10_000, experts=10), 4)
        0.0303
    """
    steps = _checks.integer("steps", steps, least=1)
    experts = _checks.integer("experts", experts, least=2)
    rate = best_rate(steps, experts) if learning_rate is None else learning_rate
    rate = _checks.positive("learning_rate", rate)
    _checks.host_only("regret_bound", rate, "the formula")
    return min(1.0, float(rate + math.log(experts) / (rate * steps)))


def best_rate(steps: int, experts: int) -> float:
    """Returns the learning rate at which the bound on the regret is least."""
    return math.sqrt(math.log(experts) / steps)


def check_loss_matrix(name: str, losses: PyTree) -> PyTree:
    """Returns the losses. Raises an error if they do not have the shape of a loss matrix.

    There must be at least two experts, and sums over all steps must not overflow.
    """
    if not jax.tree_util.all_leaves([losses]) or losses.ndim != 2:
        raise ValueError(
            f"{name} must be one array of shape (steps, experts), got {_checks.described(losses)}"
        )
    _checks.integer("steps", losses.shape[0], least=1, most=MOST_STEPS)
    _checks.integer("experts", losses.shape[1], least=2)
    return losses


def loss_bits(steps: int) -> int:
    """Returns b such that losses in units of 2^-b, summed over all steps, fit in int32."""
    return min(_FINEST_BITS, 30 - steps.bit_length())


def clamped_losses(losses: jax.Array) -> jax.Array:
    """Clips losses to [0, 1], in the same dtype. NaN becomes 1."""
    if losses.dtype == bool:
        return losses
    if jnp.issubdtype(losses.dtype, jnp.floating):
        losses = jnp.where(jnp.isnan(losses), jnp.ones_like(losses), losses)
    return jnp.clip(losses, 0, 1)


def loss_units(losses: jax.Array, bits: int) -> jax.Array:
    """Converts losses to integers in units of 2^-bits."""
    losses = clamped_losses(losses)
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        return losses.astype(jnp.int32) << bits
    return jnp.round(losses.astype(compute_dtype(losses.dtype)) * 2.0**bits).astype(jnp.int32)


def scan_steps(choose: Callable[[jax.Array, jax.Array], PyTree], losses: jax.Array) -> PyTree:
    """Calls `choose(number, cumulative)` at every step, and returns all results.

    `number` is the number of the step. `cumulative` has each expert's sum of earlier losses. The
    sums are integers. A sum of floats would be rounded at every step, so one loss could change it
    by more than the loss itself.
    """
    bits = loss_bits(len(losses))

    def step(cumulative: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, PyTree]:
        number, row = now
        return cumulative + loss_units(row, bits), choose(number, cumulative)

    # Under `shard_map`, the initial carry of a loop must vary over devices like the losses. So the
    # zeros are computed from the losses.
    nothing = 0 * loss_units(losses[0], bits)
    numbers = jnp.arange(len(losses), dtype=jnp.uint32)
    return lax.scan(step, nothing, (numbers, losses))[1]


@jax.jit
def _run(key: Key, losses: jax.Array, rate: jax.Array) -> WeightedMajorityRun:
    steps, dtype = len(losses), rate.dtype
    unit = 2.0 ** -loss_bits(steps)

    def choose(number: jax.Array, cumulative: jax.Array) -> tuple[jax.Array, jax.Array]:
        behind = (cumulative - jnp.min(cumulative)).astype(dtype)
        weights = jnp.exp(-rate * unit * behind)
        reached = jnp.cumsum(weights)
        point = jax.random.uniform(jax.random.fold_in(key, number), (), dtype) * reached[-1]
        return jnp.sum(reached[:-1] <= point, dtype=jnp.int32), weights / reached[-1]

    choices, probabilities = scan_steps(choose, losses)
    units = loss_units(losses, loss_bits(steps))
    taken = jnp.take_along_axis(units, choices[:, None], axis=1)[:, 0]
    best = jnp.min(jnp.sum(units, axis=0))
    expected = jnp.sum(probabilities * (units.astype(dtype) * unit), axis=1)
    share = unit / steps
    regret = (jnp.sum(taken) - best).astype(dtype) * share
    expected_regret = jnp.mean(expected) - best.astype(dtype) * share
    of_choices = taken.astype(dtype) * unit
    return WeightedMajorityRun(choices, of_choices, expected, regret, expected_regret)


Adversary = Literal["punish-the-likeliest", "alternating", "one-good-expert"]


def adversarial_losses(adversary: Adversary, *, steps: int, experts: int) -> jax.Array:
    """A sequence of losses on which following the leader, or exploring for long, performs badly.

    - "punish-the-likeliest": at each step, only the expert with the least loss so far errs (in a
      tie, the first of them). Randomized weighted majority is likeliest to follow this expert, at
      any learning rate. A learner that always follows this expert errs at every step. The best
      expert errs at one step in k.
    - "alternating": the first two experts err in alternation, starting with a loss of 1/2, so the
      leader always errs next. The others always err.
    - "one-good-expert": the last expert never errs, and the others always do. A low learning rate
      costs the most here: the regret approaches ln k / (eta T).

    Args:
        adversary: one of the names above.
        steps: T, at most 2^20.
        experts: k, at least 2.

    Returns:
        An array of shape (T, k), in [0, 1].

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        None: the losses are public.

    Source:
        Cesa-Bianchi and Lugosi, "Prediction, learning, and games" (2006), chapters 2 and 4.

    Example:
        >>> from dpjax import learning
        >>> learning.adversarial_losses("alternating", steps=3, experts=2).tolist()
        [[0.5, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    _checks.choice("adversary", adversary, get_args(Adversary))
    steps = _checks.integer("steps", steps, least=1, most=MOST_STEPS)
    experts = _checks.integer("experts", experts, least=2)
    turns = np.arange(steps)
    losses = np.zeros((steps, experts), np.float32)
    if adversary == "punish-the-likeliest":
        losses[turns, turns % experts] = 1
    elif adversary == "one-good-expert":
        losses[:, :-1] = 1
    else:
        losses[:, 2:] = 1
        losses[turns, turns % 2] = 1
        losses[0, 0] = 0.5
    return jnp.asarray(losses)


# The following functions make private choices. A choice is the exponential mechanism whose scores
# are the negative cumulative losses. Replacing the losses of one step changes these sums by at most
# 1. So a choice is (2 eta)-DP, and its log ratios of probabilities are in an interval of length 2
# eta. Hence it satisfies zCDP with rho = (2 eta)^2 / 8 = eta^2 / 2, and T choices satisfy zCDP with
# rho = T eta^2 / 2.

RateMethod = Literal["zcdp", "drv"]
# These margins cover the rounding errors of a calibration in float64 and in float32.
_ROUNDING, _TRACED_ROUNDING = 1e-12, 2.0**-18


def replaced_steps(difference: Value) -> jax.Array:
    """Returns the number of steps whose losses differ.

    Private weighted majority measures the distance of two values by this number.
    """
    (moved,) = jax.tree.leaves(difference)
    return jnp.sum(jnp.any(moved != 0, axis=-1), dtype=moved.dtype)


@frozen_pytree
class PrivateWeightedMajority(SensitivityMechanism):
    """Follows experts privately; made by `private_weighted_majority`.

    Attributes:
        sensitivity: 1, for one step whose losses are replaced.
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee.
        learning_rate: eta.
        steps: T.

    Formal guarantees:
        See `private_weighted_majority`.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    delta: Scalar = up()
    learning_rate: Scalar = down()
    steps: int = static()

    @property
    def choice(self) -> SelectionMechanism:
        """The exponential mechanism of each step, on the negative losses in units of their grid."""
        return exponential(2.0 ** loss_bits(self.steps), 2 * self.learning_rate)

    def units(self, losses: jax.typing.ArrayLike) -> jax.Array:
        """Losses as they are added up: clamped, and in units of their grid. They are private.

        If losses come one step at a time, call `mechanism.choice(jax.random.fold_in(key, t),
        -total)` at step t = 0, 1, ... Here `total` is the sum of the units of all earlier steps.

        Args:
            losses: the losses of one step, or of several steps along the leading axis.

        Returns:
            An int32 array of the same shape.
        """
        return loss_units(_checks.real_arrays("losses", losses), loss_bits(self.steps))

    @property
    def zcdp(self) -> tuple[float, float]:
        """The cost of T choices with bounded range: rho = T eta^2 / 2, delta = 0."""
        rho, delta = self.choice.zcdp
        return self.steps * rho * (1 + _ROUNDING), delta

    @property
    def dp_event(self) -> Any:
        return _checks.extra("dp_accounting", "accounting").ZCDpEvent(self.zcdp[0])

    def _check_value(self, value: Value) -> None:
        steps, experts = check_loss_matrix("value", value).shape
        if steps != self.steps:
            raise ValueError(f"value must have {self.steps} steps, got {steps}")
        self.choice._check_value(jax.ShapeDtypeStruct((experts,), jnp.int32))

    def _draw(self, key: Key, value: Value) -> jax.Array:
        choice = self.choice

        def choose(number: jax.Array, cumulative: jax.Array) -> jax.Array:
            return choice._draw(jax.random.fold_in(key, number), -cumulative)

        return scan_steps(choose, value)

    def clamped(self, value: Value) -> Value:
        """Losses as the mechanism counts them: clamped to [0, 1], with NaN as 1.

        Args:
            value: an array of losses.

        Returns:
            An array of the same shape. It is private data, like the value itself.
        """
        return clamped_losses(_checks.real_arrays("value", value))

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        losses = check_loss_matrix("value", _checks.real_arrays("value", value))
        scores = scan_steps(lambda _, cumulative: -cumulative, losses)
        return jnp.sum(jax.vmap(self.choice.log_prob)(jnp.asarray(output), scores))

    def excess_loss(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        simultaneous: bool = False,
    ) -> Scalar:
        """Bounds the total loss so far of the chosen expert, minus that of the best expert so far.

        Args:
            confidence: the bound is correct with at least this probability; in (0, 1).
            shape: (T, k); required if simultaneous.
            simultaneous: whether the bound is correct for all experts at all steps at once, instead
                of for each expert and step alone.

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

    The learning rate eta is the largest for which `method` shows that all T choices together are
    (epsilon, delta)-DP:

    - "zcdp": the choices satisfy zCDP with rho = T eta^2 / 2, since every choice has bounded range.
      If epsilon is traced, rho is converted in closed form: sqrt(rho) = sqrt(ln(1 / delta) +
      epsilon) - sqrt(ln(1 / delta)). Otherwise the optimal conversion gives a larger eta: by 18% at
      epsilon = 1, delta = 1e-6.
    - "drv": eta = epsilon / sqrt(32 T ln(1 / delta)), by advanced composition of T choices that are
      2 eta-DP. This is the textbook rate, about a quarter of the rate of "zcdp". Use it only for
      comparison.

    The regret is at most `regret_bound(steps=, experts=, learning_rate=mechanism.learning_rate)`.

    Args:
        epsilon: above 0; with "drv" at most 2 ln(1 / delta) and sqrt(8 T ln(1 / delta)).
        delta: strictly between 0 and 1.
        steps: T, at most 2^20.
        method: see above.

    Returns:
        A `PrivateWeightedMajority`: `mechanism(key, losses)` takes losses of shape (T, k), clamped
        to [0, 1] where NaN counts as 1, and releases choices, int32 of shape (T,). The choice of a
        step depends only on earlier losses, which are rounded to 2^-16, or coarser for 2^14 steps
        and more.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; at a release, if the losses have another shape,
            or the learning rate is too small for noise on their grid.

    Formal guarantees:
        (epsilon, delta)-DP if the losses of all experts at one step are replaced: a record is a
        step. A person who contributes to t steps has t times the distance: see `accounting.group`.
        Losses of a later step may depend on earlier choices. Then only the replaced losses are
        protected. The guarantee is valid for the actual draws: cumulative losses are integers,
        every choice has a separate key, and the scale covers the error of the noise tables.

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
        # If traced, rho + 2 sqrt(rho log) = epsilon is solved for rho, without cancellation.
        simple = (epsilon / ((log + epsilon) ** 0.5 + log**0.5)) ** 2
        rho = simple if traced else largest_rho(float(epsilon), float(delta))
        rate = (2 * rho / steps) ** 0.5
    rate *= 1 - (_TRACED_ROUNDING if traced else 4 * _ROUNDING)
    return PrivateWeightedMajority(sensitivity, epsilon, delta, rate, steps)


def _within_lecture(epsilon: Scalar, log: Scalar, steps: int, traced: bool) -> Scalar:
    """Refuses an epsilon at which the closed-form rate may not be private; returns NaN if traced.

    Let x = 2 eta, the epsilon of one step. By advanced composition, the epsilon of T steps is at
    most epsilon / 2 + T x (e^x - 1). For x <= 1, the second term is at most 2 T x^2 = epsilon^2 /
    (4 ln(1 / delta)).
    """
    limits = 2 * log, (8 * steps * log) ** 0.5
    if traced:
        return jnp.where(epsilon <= jnp.minimum(*limits), epsilon, jnp.nan)
    if epsilon > (most := min(limits)):
        raise ValueError(f'epsilon must be at most {most:.6g} with method "drv", got {epsilon:g}')
    return epsilon
