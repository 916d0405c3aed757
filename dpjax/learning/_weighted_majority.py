"""Randomized weighted majority: choosing among experts nearly as well as the best one of them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import Key, PyTree
from dpjax._core._values import Scalar
from dpjax._exact._numerics import compute_dtype
from dpjax.random._facade import check_sampling_key

MOST_STEPS = 2**20
_FINEST_BITS = 16


@frozen_pytree
class WeightedMajorityRun:
    """The choices of randomized weighted majority on a sequence of losses; they are not private.

    Attributes:
        choices: int32 of shape (T,), the expert that was followed at each step.
        losses: of shape (T,), of the choices.
        expected_losses: of shape (T,), over the randomness of the choices.
        regret: the average loss of the choices, minus that of the best expert.
        expected_regret: the same of the expected losses.

    Formal guarantees:
        Losses are those of the sequence rounded to 2^-16, or coarser from 2^14 steps on.
    """

    choices: jax.Array
    losses: jax.Array
    expected_losses: jax.Array
    regret: jax.Array
    expected_regret: jax.Array


def weighted_majority(
    key: Key, losses: jax.typing.ArrayLike, *, learning_rate: Scalar | None = None
) -> WeightedMajorityRun:
    """Randomized weighted majority (Hedge), not private: `private_weighted_majority` is.

    At each step expert i is followed with probability ~ exp(-eta L_i), L_i its loss in the steps
    before. Jit-able and vmap-able, over sequences too.

    Args:
        key: a typed key.
        losses: shape (T, k), of k experts at T steps, at least 2 and at most 2^20; clamped to
            [0, 1], NaN counts as 1.
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
    matrix = loss_matrix("losses", losses)
    steps, experts = matrix.shape
    rate = best_rate(steps, experts) if learning_rate is None else learning_rate
    rate = jnp.asarray(_checks.positive("learning_rate", rate), jnp.result_type(float))
    return _run(key, matrix, rate)


def regret_bound(*, steps: int, experts: int, learning_rate: Scalar | None = None) -> float:
    """A bound on the expected regret of randomized weighted majority.

    eta + ln k / (eta T), which is least, 2 sqrt(ln k / T), where eta = sqrt(ln k / T).

    Args:
        steps: T.
        experts: k, at least 2.
        learning_rate: eta, above 0; sqrt(ln k / T) if None.

    Returns:
        A bound on the expected average loss minus that of the best expert, at most 1.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if one is out of range.

    Formal guarantees:
        Holds for every sequence of losses in [0, 1].

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
    """The learning rate at which the bound on regret is least."""
    return math.sqrt(math.log(experts) / steps)


def loss_matrix(name: str, losses: PyTree) -> jax.Array:
    """Losses of at least two experts at a number of steps that integers can add up."""
    losses = _checks.real_arrays(name, losses)
    if not jax.tree_util.all_leaves([losses]) or losses.ndim != 2:
        raise ValueError(
            f"{name} must be one array of shape (steps, experts), got {_checks.described(losses)}"
        )
    _checks.integer("steps", losses.shape[0], least=1, most=MOST_STEPS)
    _checks.integer("experts", losses.shape[1], least=2)
    return losses


def loss_bits(steps: int) -> int:
    """Losses are multiples of 2^-bits. The sum of all steps is below 2^31 such units."""
    return min(_FINEST_BITS, 30 - steps.bit_length())


def clamped_losses(losses: jax.Array) -> jax.Array:
    """Losses in [0, 1], of the same dtype; NaN counts as 1."""
    if losses.dtype == bool:
        return losses
    if jnp.issubdtype(losses.dtype, jnp.floating):
        losses = jnp.where(jnp.isnan(losses), jnp.ones_like(losses), losses)
    return jnp.clip(losses, 0, 1)


def loss_units(losses: jax.Array, bits: int) -> jax.Array:
    """Losses as integers, in units of 2^-bits."""
    losses = clamped_losses(losses)
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        return losses.astype(jnp.int32) << bits
    return jnp.round(losses.astype(compute_dtype(losses.dtype)) * 2.0**bits).astype(jnp.int32)


def scan_steps(choose: Callable[[jax.Array, jax.Array], PyTree], losses: jax.Array) -> PyTree:
    """The choices of all steps: `choose(number, losses)`, with the sum of earlier losses.

    The sum is one of integers. A sum of floats is rounded at each step, so one loss could move it
    by more than itself.
    """
    bits = loss_bits(len(losses))

    def step(cumulative: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, PyTree]:
        number, row = now
        return cumulative + loss_units(row, bits), choose(number, cumulative)

    # Zeros that vary over devices as the losses do: under `shard_map` a loop has to start so.
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
    return WeightedMajorityRun(
        choices,
        taken.astype(dtype) * unit,
        expected,
        (jnp.sum(taken) - best).astype(dtype) * share,
        jnp.mean(expected) - best.astype(dtype) * share,
    )
