"""Gaussian noise for clipped sums, as optax gradient transformations."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import down, frozen_pytree, static
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NoiseKind, Scalar
from dpjax._exact._numerics import outward
from dpjax.learning._clipping import (
    LARGEST_NORM,
    LEAST_NORM,
    ClippedSum,
    checked_norm,
    refuse_varying,
)
from dpjax.learning._sampling import ANY_TURN, Turn
from dpjax.learning._trainings import Trainings, TrainingState, key_of_each_lane, training_state
from dpjax.mechanisms._start import check_noise
from dpjax.random._grid_fit import Calibration
from dpjax.random._keys import check_key, key_for_each
from dpjax.random._noise import GAUSSIAN
from dpjax.random._release import add_noise
from dpjax.release._transaction import refuse_unpaid_steps
from dpjax.sensitivity._norms import grid_dtype, rounding_norm

if TYPE_CHECKING:
    import optax


# The value of `drawn_by` in the state of a training whose batches come from several samplings.
SEVERAL = np.uint32(2**32 - 1)


@training_state
class NoiseState(TrainingState):
    """The state of the noise between two steps, with all information for `learning.guarantee`.

    Attributes:
        key: the key of the next step's noise. It does not reveal earlier keys.
        step: the number of steps so far.
        noise_multiplier: the least standard deviation of the noise of any step so far, relative to
            the norm bound. It is 0 if the noise of any step was drawn in floats, because such noise
            has no guarantee. This number only records past steps: changing it does not change any
            noise.
        drawn_by: an identifier of the sampling that drew all batches; 0 if the caller chose the
            records, and 2^32 - 1 if batches come from several samplings.
        dims: the number of coordinates that get noise in a step.
        noise: "exact" or "float".
        bands: the number of noisy sums that one batch affects: 1, except for `correlated_noise`.
        bins: if one key draws all batches, as in `balls_in_bins_sampling`, a number that identifies
            this key; 0 otherwise.

    Formal guarantees:
        None. It contains a secret, the key.
    """

    key: Key
    step: jax.Array
    noise_multiplier: Scalar = down()
    drawn_by: jax.Array
    dims: int = static()
    noise: NoiseKind = static()
    bands: int = static(default=1)
    bins: jax.Array | np.uint32 = np.uint32(0)

    def __repr__(self) -> str:
        return f"NoiseState(step={self.step}, noise_multiplier={self.noise_multiplier})"


def gaussian_noise(
    key: Key, *, noise_multiplier: Scalar, batch_size: float, noise: NoiseKind = "exact"
) -> "optax.GradientTransformation":
    """The noise of DP-SGD: (sum + sigma Z) / B, where sum is a `ClippedSum`.

    sigma is the noise multiplier times the `norm_bound` of the sum. The noise comes first in a
    chain. Transformations after it, such as `optax.adam`, are post-processing. A transformation
    before it is refused, because the sum and the bound of a `ClippedSum` cannot be separated.

    Inside `jax.shard_map` the state and the sum must be the same on all shards. Then all shards
    draw the same noise, as a single device would.

    Pass a state to `jit`, `scan` and `vmap` as an argument or a carry, never as a closure. Under
    `vmap`, lanes with copies of one state draw different noise.

    Args:
        key: a key from `dpjax.random.secure_key`, used for nothing else. The state contains the
            key, and replaces it in every step. Every call of `init` starts a training with its own
            key: the first call uses this key, and later calls fold their index into it. All
            optimizers made from the same secret key share this count, while optimizers from a
            seeded key are reproducible. An open `KeyLedger` records each key as used.
        noise_multiplier: sigma divided by the norm bound, finite, above 0; see
            `accounting.dp_sgd_noise_multiplier`.
        batch_size: B, a public number: the expected size of a batch, not the size of the current
            batch.
        noise: "exact", or "float" for sweeps whose results are not published.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. Its
        state is a `NoiseState`. A bad traced parameter, and a norm bound that is not above 0, give
        NaN.

    Raises:
        TypeError: if the key is not a typed key, or an update is not a `ClippedSum`.
        ValueError: if a parameter is out of range, or `vmap` maps over sums but not over keys; if
            the state varies over shards, or JAX's check for that is off (`check_vma=False`,
            `jax.pmap`); if a `jit`, `scan` or `vmap` closes over the state; if `init` is mapped,
            compiled or called in another process although the optimizer was made outside; if a
            compiled training does not take the key as an argument; if a `dpjax.Ledger` is open,
            because a training must pay by `charge`.

    Formal guarantees:
        Every step is a Gaussian mechanism on the sum of the batch. The noise is exact integer noise
        on a grid, and rounding to the grid is charged to sigma. No private number decides whether
        or how a step is made. A key is used for one step: it is split, and the state keeps one of
        the new keys. `learning.guarantee` computes the guarantee of all steps together. A program
        that reuses an old state uses its key again, which voids the guarantee.

    Source:
        Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang (2016).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import learning
        >>> def loss(w, example):
        ...     return jnp.dot(w, example)
        >>> clipped = learning.clipped_gradients(loss, clip_norm=1.0)
        >>> noise = learning.gaussian_noise(
        ...     dpjax.random.secure_key(), noise_multiplier=0.8, batch_size=100
        ... )
        >>> state = noise.init(jnp.zeros(2))
        >>> batch = clipped(jnp.zeros(2), jnp.ones((100, 2)), True)
        >>> gradient, state = noise.update(batch, state)
        >>> gradient.shape
        (2,)
    """
    trainings = Trainings(check_key(key))
    multiplier = _checks.positive("noise_multiplier", noise_multiplier)
    size = _checks.positive("batch_size", batch_size)
    check_noise(noise)

    def init(parameters: PyTree) -> NoiseState:
        return first_state(trainings.key(parameters), parameters, multiplier, noise)

    def update(
        updates: PyTree, state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        del params
        least = outward(multiplier, -math.inf)
        return noisy_average(updates, state, multiplier, least, size, noise)

    return transformation(init, update)


def first_state(
    key: Key, parameters: PyTree, multiplier: Scalar, noise: NoiseKind = "exact", bands: int = 1
) -> NoiseState:
    """Returns the state before the first step."""
    dims, none = sum(jnp.size(leaf) for leaf in jax.tree.leaves(parameters)), jnp.uint32(0)
    least = rounded_down(multiplier)
    return NoiseState(key, jnp.int32(0), least, none, dims, noise, bands, none)


class OpenedSum(NamedTuple):
    """What a step of the noise reads from a `ClippedSum`.

    Attributes:
        value: the sum.
        norm_bound: the norm bound of the sum, rounded up.
        drawn_by: the identifier of the sampling that drew the batch.
        turn: the step for which the batch was drawn.
    """

    value: PyTree
    norm_bound: Scalar
    drawn_by: Scalar | np.uint32
    turn: Turn


def opened(updates: object, state: TrainingState) -> OpenedSum:
    """Reads a `ClippedSum`. Raises an error for other updates, and if `state` is closed over."""
    if not isinstance(updates, ClippedSum):
        raise TypeError(
            "updates must be a ClippedSum, which has a norm bound for the noise, got"
            f" {_checks.described(updates)}: make it by learning.clipped_gradients, and put the"
            " noise first in a chain"
        )
    state.refuse_if_closed_over()
    # If x64 is disabled, JAX would round a float64 to the nearest float32, which may be lower. So
    # it is rounded up here.
    bound = outward(updates.norm_bound, math.inf)
    return OpenedSum(updates._value, bound, np.uint32(updates.drawn_by), updates.turn)


def noisy_average(
    updates: PyTree,
    state: NoiseState,
    multiplier: Scalar,
    least: Scalar,
    size: Scalar,
    noise: NoiseKind = "exact",
) -> tuple[PyTree, NoiseState]:
    """Runs one step: returns the noisy sum divided by `size`, and the next state.

    The next state records `least`, which is `multiplier` rounded down.
    """
    noisy, after = _noisy_sum(state, opened(updates, state), multiplier, least, noise)
    return averaged(noisy, size), after


def transformation(
    init: Callable[..., PyTree], update: Callable[..., tuple[PyTree, PyTree]]
) -> "optax.GradientTransformation":
    """Returns an optax `GradientTransformation` of these two functions."""
    import optax  # Importing optax takes half a second.

    return optax.GradientTransformation(init, update)


@functools.partial(jax.jit, static_argnames="noise")
def _noisy_sum(
    state: NoiseState, total: OpenedSum, multiplier: Scalar, least: Scalar, noise: NoiseKind
) -> tuple[PyTree, NoiseState]:
    """Returns the sum with noise and the state after the step, in one compiled program.

    The division by the batch size is not part of this program. Otherwise XLA would merge the
    division with the operation before it, and round differently.
    """
    check_step(state, total.value, noise)
    # The next key is a hash of the current key, so the state after a step does not reveal the noise
    # of the step.
    next_key, step_key = jax.random.split(key_of_each_lane(state.key))
    noisy = _with_noise(step_key, total.value, total.norm_bound, multiplier, noise)
    return noisy, after_a_step(state, total, next_key, least)


@functools.partial(jax.jit, static_argnames="noise")
def _with_noise(
    key: Key, value: PyTree, norm_bound: Scalar, multiplier: Scalar, noise: NoiseKind
) -> PyTree:
    """Adds Gaussian noise to a sum, with a scale of the multiplier times the norm bound."""
    refuse_unpaid_steps()
    bound = jnp.asarray(norm_bound)
    key = one_key(key, (value, bound, multiplier))
    dims = sum(leaf.size for leaf in jax.tree.leaves(value))
    shape = rounding_norm("l2", value), dims, False, grid_dtype(value)
    # A `Calibration` with a finite epsilon reserves a part of it for the errors of noise tables.
    # Here epsilon is infinite, because `learning.guarantee` reserves this part for the whole
    # training.
    calibration = Calibration(multiplier * bound, bound, math.inf, *shape)
    distribution = GAUSSIAN if noise == "exact" else GAUSSIAN.in_floats()
    return add_noise(key, value, calibration, distribution)


def one_key(key: Key, others: PyTree) -> Key:
    """Returns the key of a step's noise, which must be the same on all shards, like the sum."""
    refuse_varying("key", key)
    refuse_varying("the sum, its norm bound and noise_multiplier", others)
    return key_for_each(key, others)


def check_step(state: NoiseState, value: PyTree, noise: NoiseKind) -> None:
    """Raises an error for a state made for other arrays or for another kind of noise."""
    check_precision(state)
    size = sum(leaf.size for leaf in jax.tree.leaves(value))
    if (size, noise) != (state.dims, state.noise):
        raise ValueError(
            f"state must have dims={size} and noise={noise!r} for this step, got "
            f"dims={state.dims} and noise={state.noise!r}: make it by init, from all parameters"
        )


def check_precision(state: NoiseState) -> None:
    """Raises an error if the noise multiplier has less precision than float32.

    A cast to a lower precision may have rounded the noise multiplier up.
    """
    dtype = jnp.result_type(state.noise_multiplier)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"state must have a noise multiplier in float32 or a wider dtype, got {dtype}: a cast"
            " to this dtype may have rounded the multiplier up. Cast the parameters only"
        )


def averaged(tree: PyTree, size: Scalar) -> PyTree:
    """Divides a noisy sum by the batch size. This is post-processing."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([x / jnp.asarray(size).astype(x.dtype) for x in leaves])


def after_a_step(state: NoiseState, total: OpenedSum, key: Key, multiplier: Scalar) -> NoiseState:
    """Returns the state after a step, with the next key and the least noise multiplier so far."""
    # Noise in floats has no guarantee, so its multiplier is recorded as 0. The 0 is stored in an
    # array. So it is kept if a user saves the arrays and loads them into a state whose `noise` is
    # "exact".
    promised = multiplier if state.noise == "exact" else 0.0
    least = jnp.minimum(rounded_down(state.noise_multiplier), rounded_down(promised))
    drawn_by, turn = jnp.uint32(total.drawn_by), total.turn
    bins = jnp.asarray(turn.bins).astype(jnp.uint32)
    # The guarantee assumes that one sampling drew all batches. If not, `drawn_by` becomes SEVERAL.
    # The same happens if a batch was drawn for another step than this one, or if batches came from
    # different keys although all steps need the same key.
    same = (state.step == 0) | ((state.drawn_by == drawn_by) & (state.bins == bins))
    same &= (jnp.asarray(turn.step) == ANY_TURN) | (jnp.asarray(turn.step) == state.step)
    drawn_by = jnp.where(same, drawn_by, SEVERAL)
    return dataclasses.replace(
        state, key=key, step=state.step + 1, noise_multiplier=least, drawn_by=drawn_by, bins=bins
    )


def rounded_down(multiplier: Scalar) -> jax.Array:
    """Rounds a noise multiplier down to an array of JAX's default float dtype."""
    return jnp.asarray(outward(multiplier, -math.inf)).astype(jnp.result_type(float))


@frozen_pytree
class AdaptiveNoiseState:
    """The state of adaptive clipping.

    Attributes:
        noise: the `NoiseState`, which `learning.guarantee` takes.
        clip_norm: the clip norm of the next step, public; for `clipped(..., clip_norm=)`.

    Formal guarantees:
        None of its own.
    """

    noise: NoiseState
    clip_norm: jax.Array


def adaptive_noise(
    key: Key,
    *,
    noise_multiplier: float,
    batch_size: float,
    initial_clip_norm: float,
    quantile: float = 0.5,
    learning_rate: float = 0.2,
    count_noise: float | None = None,
    noise: NoiseKind = "exact",
) -> "optax.GradientTransformation":
    """The noise of DP-SGD with a clip norm that adapts to a quantile of the gradients' norms.

    Each step also counts, with noise, the gradients within the clip norm C, and multiplies C by
    exp(-learning_rate (fraction - quantile)). Both releases together are one Gaussian mechanism
    with the noise multiplier z. The count has noise of standard deviation sigma_b, and a record
    changes it by 1/2. So the gradients get the noise multiplier (z^-2 - (2 sigma_b)^-2)^(-1/2).

    Args:
        key: as for `gaussian_noise`.
        noise_multiplier: z, for both releases of a step together.
        batch_size: B, the expected size of a batch, public.
        initial_clip_norm: the clip norm of the first step, from 1e-10 to 1e10.
        quantile: the quantile of the gradients' norms, in (0, 1), that the clip norm approaches.
        learning_rate: above 0.
        count_noise: sigma_b, above z / 2; if None, B / 20, but at least z.
        noise: "exact", or "float" for sweeps whose results are not published.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. Its
        state is an `AdaptiveNoiseState`: pass its `clip_norm` to the next call of the
        `ClippedGradients`.

    Raises:
        TypeError: if the key is not a typed key or a parameter not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        The guarantee of `gaussian_noise` at the same noise multiplier, which includes the cost of
        the count. The clip norm is computed from noisy counts alone, so it is public.

    Source:
        Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private learning with adaptive
        clipping" (2021), Theorem 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import learning
        >>> def loss(w, example):
        ...     return jnp.dot(w, example)
        >>> clipped = learning.clipped_gradients(loss, clip_norm=1.0)
        >>> noise = learning.adaptive_noise(
        ...     dpjax.random.secure_key(), noise_multiplier=0.8, batch_size=100,
        ...     initial_clip_norm=1.0,
        ... )
        >>> state = noise.init(jnp.zeros(2))
        >>> examples = 9 * jnp.ones((100, 2))
        >>> batch = clipped(jnp.zeros(2), examples, True, clip_norm=state.clip_norm)
        >>> gradient, state = noise.update(batch, state)
        >>> bool(state.clip_norm > 1)
        True
    """
    planned = _checks.concrete_positive("noise_multiplier", noise_multiplier, "gaussian_noise")
    size = _checks.positive("batch_size", batch_size)
    quantile = _checks.fraction("quantile", quantile)
    rate = _checks.positive("learning_rate", learning_rate)
    start = checked_norm("initial_clip_norm", initial_clip_norm)
    counted = max(size / 20, planned) if count_noise is None else count_noise
    counted = _checks.positive("count_noise", counted)
    multiplier = gradient_noise_multiplier(planned, counted)
    plain = gaussian_noise(key, noise_multiplier=planned, batch_size=size, noise=noise)

    def init(parameters: PyTree) -> AdaptiveNoiseState:
        state = plain.init(parameters)
        assert isinstance(state, NoiseState)
        # The tables from which noise is drawn have small errors, which are charged for each noisy
        # coordinate. The count is one more noisy coordinate.
        both = dataclasses.replace(state, dims=state.dims + 1)
        return AdaptiveNoiseState(both, jnp.asarray(start, jnp.result_type(float)))

    def update(
        updates: PyTree, state: AdaptiveNoiseState, params: PyTree = None
    ) -> tuple[PyTree, AdaptiveNoiseState]:
        del params
        total = opened(updates, state.noise)
        check_step(state.noise, (total.value, updates.within), noise)
        next_key, gradient_key, count_key = jax.random.split(key_of_each_lane(state.noise.key), 3)
        gradient = _with_noise(gradient_key, total.value, total.norm_bound, multiplier, noise)
        # An example within the clip norm counts as 1, and any other example as -1. So adding
        # or removing an example changes the count by 1.
        noisy = _with_noise(count_key, updates.within, 1.0, 2 * counted, noise)
        # If there are B examples, (B + count) / 2 of them are within the clip norm.
        fraction = jnp.clip(0.5 + noisy.astype(state.clip_norm.dtype) / (2 * size), 0, 1)
        norm = state.clip_norm * jnp.exp(-rate * (fraction - quantile))
        norm = jnp.clip(norm, LEAST_NORM, LARGEST_NORM)
        after = after_a_step(state.noise, total, next_key, planned)
        return averaged(gradient, size), AdaptiveNoiseState(after, norm)

    return transformation(init, update)


def gradient_noise_multiplier(total: Scalar, count_noise: float) -> float:
    """Returns the noise multiplier of the gradients, rounded up.

    With it, the releases of the gradients and of the count together cost as much as one release
    with the noise multiplier `total`.
    """
    left = float(total) ** -2 - (2 * count_noise) ** -2
    if left <= 0:
        raise ValueError(
            f"count_noise must be above noise_multiplier / 2 = {total / 2:g}, got {count_noise:g}"
        )
    return left**-0.5 * (1 + 1e-12)
