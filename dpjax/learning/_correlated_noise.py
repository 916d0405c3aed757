"""Correlated noise (matrix factorization) for clipped sums, exactly or by another library.

With the clipped sums g, a strategy C and fresh Gaussian noise z, updates are C^-1 (C g + z).
Step t draws y_t = sum_j C[t, j] (g_j - x_j) + C[t, t] g_t + z_t, over earlier steps j, and its
update is x_t = y_t / C[t, t]. Earlier updates are public, so publishing x_t is as private as
publishing row t of C g with noise. The difference g_j - x_j is the negative noise of an earlier
update. A state must hold nothing else: it holds the noise of the last bands - 1 updates, or sums of
noise in a few buffers. All of y_t is computed in integers: gradients are rounded to a grid, rows of
C are rational, and z_t is integer noise. docs/proofs/correlated-noise.md has the proof.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, frozen_pytree, static
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NoiseKind, Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_to_grid
from dpjax._exact._kernels import written
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import outward
from dpjax.learning._gaussian_noise import (
    NoiseState,
    OpenedSum,
    after_a_step,
    averaged,
    check_step,
    first_state,
    one_key,
    opened,
    rounded_down,
    transformation,
)
from dpjax.learning._strategies import BITS, MAKERS, Strategy
from dpjax.learning._trainings import Trainings, TrainingState, key_of_each_lane, training_state
from dpjax.mechanisms._start import check_noise
from dpjax.random._keys import check_key
from dpjax.random._noise import GAUSSIAN
from dpjax.random._release import add_integer_noise
from dpjax.release._transaction import refuse_unpaid_steps

if TYPE_CHECKING:
    import optax

# This factor covers the rounding of the noise scale to float32.
_OUTWARD = 1 + 2.0**-18
# Rounded sums are clamped to a magnitude of 2^_SUM_BITS. So a sum times an entry of the strategy's
# matrix is at most 2^61.
_SUM_BITS = 61 - BITS


@frozen_pytree
class CorrelatedNoiseState:
    """The state of correlated noise between two steps.

    Never publish this state: it contains the noise of earlier updates, or sums of this noise. An
    update without its noise is a clipped sum, which is private data, like the records.

    Attributes:
        noise: the `NoiseState`, which counts steps and has the key.
        norm_bound: the norm bound of the first step; 0 before it. If a later clipped sum has a
            larger norm bound, updates are NaN from then on.
        number: an identifier of strategy and grid. If a file puts the arrays of another strategy or
            grid into this state, updates are NaN from then on.
        strategy: the strategy of all steps.
        fineness: the spacing of the grid is at most the norm bound divided by 2^(fineness - 1).

    Formal guarantees:
        None of its own.
    """

    noise: NoiseState
    norm_bound: jax.Array
    number: jax.Array
    _noise: PyTree
    strategy: Strategy = static()
    fineness: int = static()

    def __repr__(self) -> str:
        bands, steps = self.strategy.bands, self.strategy.steps
        return f"CorrelatedNoiseState({self.noise}, bands={bands}, steps={steps})"


def correlated_noise(
    key: Key,
    *,
    strategy: Strategy,
    noise_multiplier: float,
    batch_size: float,
    noise: NoiseKind = "exact",
) -> "optax.GradientTransformation":
    r"""Noise that later steps partly cancel, so that sums of updates have less noise.

    With the strategy C, clipped sums g and fresh Gaussian noise z of standard deviation sigma, the
    updates are

        x = C^{-1} (C g + z) / B = (g + C^{-1} z) / B.

    sigma is the noise multiplier times the norm bound of g times the largest norm of a column of C.
    Put the noise first in a chain, in place of `gaussian_noise`. For the strategy [1], it is the
    same as `gaussian_noise`.

    Args:
        key: as for `gaussian_noise`.
        strategy: C, from `optimized_strategy`, `toeplitz_strategy`, `banded_strategy` or
            `buffered_strategy`.
        noise_multiplier: sigma divided by the norm bound and by the column norm, finite, above 0;
            see `accounting.dp_sgd_noise_multiplier`, with a `cyclic_sampling`.
        batch_size: B, as for `gaussian_noise`.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. Its
        state is a `CorrelatedNoiseState`. Updates are NaN in steps beyond the number of steps of
        the strategy, and from a state of another strategy or grid.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: as `gaussian_noise` does, or if the strategy has too many bands for the batch.

    Formal guarantees:
        The numbers y_t of all steps are one adaptive Gaussian mechanism on the matrix C g; updates
        are computed from them, and earlier updates are subtracted from g. If a record takes part in
        steps at least `bands` apart, no two of its steps enter the same y_t. So if a record takes
        part in k such steps, they cost no more than k steps of `gaussian_noise` at the same noise
        multiplier, whether or not batches are sampled within the record's group.
        `learning.guarantee` reads the steps from the state, and refuses a sampling with fewer
        groups than bands. Everything in y_t is computed in integers: sigma is increased to cover
        the rounding of gradients, rows and buffers. The state holds the noise of the last bands - 1
        updates, 4 bytes for each number, or buffers of 8 bytes: it must stay as secret as the key.

    Source:
        Denisov, McMahan, Rush, Smith and Thakurta (2022), Theorem 2.1, for adaptive gradients;
        Choquette-Choo et al. (2023), arXiv 2306.08153, Theorem 4, for sampled batches.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import learning
        >>> def loss(w, example):
        ...     return jnp.dot(w, example)
        >>> clipped = learning.clipped_gradients(loss, clip_norm=1.0)
        >>> sampling = learning.cyclic_sampling(400, groups=4, batch_size=50)
        >>> strategy = learning.toeplitz_strategy([1.0, 0.5], steps=8)
        >>> noise = learning.correlated_noise(
        ...     dpjax.random.secure_key(), strategy=strategy, noise_multiplier=2.0, batch_size=50
        ... )
        >>> state = noise.init(jnp.zeros(2))
        >>> records = jnp.ones((400, 2))
        >>> for step in range(8):
        ...     batch = sampling(dpjax.random.secure_key(), step=step)
        ...     total = clipped(jnp.zeros(2), records[batch.indices], batch)
        ...     gradient, state = noise.update(total, state)
        >>> learning.guarantee(state, sampling, delta=1e-5)
        (epsilon=1.83359, delta=1e-05)-DP, under add-or-remove-one, in 400 public slots
    """
    trainings = Trainings(check_key(key))
    _checks.instance("strategy", strategy, Strategy, MAKERS)
    multiplier = _checks.concrete_positive("noise_multiplier", noise_multiplier, "correlated_noise")
    size = _checks.positive("batch_size", batch_size)
    check_noise(noise)

    def init(parameters: PyTree) -> CorrelatedNoiseState:
        own_key = trainings.key(parameters)
        return initial_state(own_key, parameters, strategy, multiplier, noise)

    def update(
        updates: PyTree, state: CorrelatedNoiseState, params: PyTree = None
    ) -> tuple[PyTree, CorrelatedNoiseState]:
        del params
        if state.strategy != strategy:
            raise ValueError(
                f"state must come from init of this noise, got a state of another strategy, {state}"
            )
        # The multiplier is rounded up, because the compiled program computes in float32.
        above = outward(multiplier, math.inf)
        return correlated_average(updates, state, above, rounded_down(multiplier), size)

    return transformation(init, update)


def initial_state(
    key: Key, parameters: PyTree, strategy: Strategy, multiplier: float, noise: NoiseKind = "exact"
) -> CorrelatedNoiseState:
    """Returns the state before the first step, which contains no noise yet."""
    state = first_state(key, parameters, multiplier, noise, strategy.bands)
    fineness = strategy.fineness(dims=state.dims, multiplier=multiplier)
    no_bound, number = jnp.zeros((), jnp.result_type(float)), _number(strategy, fineness)
    kept = jax.tree.map(strategy.nothing_kept, parameters)
    return CorrelatedNoiseState(state, no_bound, jnp.asarray(number), kept, strategy, fineness)


def _number(strategy: Strategy, fineness: int) -> np.uint32:
    """Returns a number that identifies the strategy and the grid. It must be equal in all steps."""
    return np.uint32(strategy.number ^ fineness)


def correlated_average(
    updates: PyTree, state: CorrelatedNoiseState, multiplier: Scalar, least: Scalar, size: Scalar
) -> tuple[PyTree, CorrelatedNoiseState]:
    """Runs one step: returns the update and the next state.

    The next state records `least`, which is `multiplier` rounded down.
    """
    found, after = _step(state, opened(updates, state.noise), multiplier, least)
    return averaged(found, size), after


@jax.jit
def _step(
    state: CorrelatedNoiseState, total: OpenedSum, multiplier: Scalar, least: Scalar
) -> tuple[PyTree, CorrelatedNoiseState]:
    """Computes the update of a step and the state after it, in one compiled program."""
    strategy, value = state.strategy, total.value
    check_step(state.noise, value, state.noise.noise)
    _check_kept(state, value)
    refuse_unpaid_steps()
    step = state.noise.step
    next_key, step_key = jax.random.split(key_of_each_lane(state.noise.key))
    first = jnp.asarray(total.norm_bound).astype(state.norm_bound.dtype)
    bound = jnp.where(step == 0, first, state.norm_bound)
    # The noise of all steps is for the norm bound of the first step. If the sum of a later step has
    # a larger norm bound, this noise is too small. Then `bound`, and with it every update from this
    # step on, is NaN.
    usable = first <= bound
    # A checkpoint may be loaded into the state of another strategy or noise multiplier. Then the
    # noise may be too small, for two reasons. First, a column of the matrix C may contain entries
    # of both strategies. The norm of this column may exceed the column norms of each strategy.
    # Second, another multiplier may have a finer grid. The stored integers count units of the grid,
    # and a record changes them by more units on a finer grid.
    usable &= state.number == _number(strategy, state.fineness)
    # The updates of steps beyond the last step of the strategy are NaN.
    bound = jnp.where(usable & (step < strategy.steps), bound, jnp.nan)
    step_key = one_key(step_key, (value, bound, multiplier, state._noise))
    found, noise = _updates(step_key, state, value, bound, multiplier)
    after = after_a_step(state.noise, total, next_key, least)
    after = dataclasses.replace(state, noise=after, norm_bound=bound, _noise=noise)
    return jax.tree.unflatten(jax.tree.structure(value), found), after


def _check_kept(state: CorrelatedNoiseState, value: PyTree) -> None:
    """Raises an error if stored noise does not have the shapes and dtypes of `nothing_kept`."""
    kept = jax.eval_shape(lambda: jax.tree.map(state.strategy.nothing_kept, value))
    if TreeSpec.of(kept).leaves != TreeSpec.of(state._noise).leaves:
        raise ValueError(
            f"state must store its noise as {_checks.described(kept)}, got"
            f" {_checks.described(state._noise)}: cast the parameters only"
        )


def _updates(
    key: Key, state: CorrelatedNoiseState, value: PyTree, bound: jax.Array, multiplier: Scalar
) -> tuple[list[jax.Array], PyTree]:
    """Returns the noisy update of each leaf, and the noise to store for later steps.

    The updates are not yet divided by the batch size.
    """
    leaves, structure = jax.tree.flatten(value)
    kept = structure.flatten_up_to(state._noise)
    exponent, scale = _grid(bound, state, multiplier)
    strategy, step = state.strategy, state.noise.step
    diagonal = strategy.diagonal(step)
    sums = [round_to_grid(x, exponent, _SUM_BITS) for x in leaves]
    rows = [_combined(strategy, x, old, diagonal, step) for x, old in zip(sums, kept, strict=True)]
    distribution = GAUSSIAN if state.noise.noise == "exact" else GAUSSIAN.in_floats()
    dtypes = [leaf.dtype for leaf in leaves]
    noisy = add_integer_noise(key, rows, scale, jnp.int32(0), dtypes, distribution)
    found, after = list[jax.Array](), list[PyTree]()
    for y, total, old in zip(noisy, sums, kept, strict=True):
        # This is post-processing: y and `diagonal`, an entry of the strategy's matrix, are public.
        update = written(jnp.round(y * (2.0**BITS / diagonal.astype(y.dtype))))
        found.append(jnp.where(jnp.isnan(bound), jnp.nan, update * power_of_two(exponent, y.dtype)))
        # The noise is clamped to a bound before it is kept. The guarantee holds for any such bound.
        noise = _limbs.subtract(total, round_to_grid(update, 0))
        noise = _limbs.to_integers(_limbs.clip(noise, strategy.largest_noise), jnp.int32)
        after.append(strategy.keep(old, noise, step))
    return found, jax.tree.unflatten(structure, after)


def _combined(
    strategy: Strategy, newest: Limbs, kept: PyTree, diagonal: jax.Array, step: jax.Array
) -> Limbs:
    """Returns the integers to which step t adds its new noise.

    They are C[t, t] times `newest`, plus the sum of C[t, j] times the stored noise of step j over
    all earlier steps j. This total is rounded to integers.
    """
    total = _limbs.multiply(_limbs.from_integers(diagonal), newest)
    total = _limbs.add(total, strategy.earlier(kept, step))
    # The result is round(total / 2^18). If two totals differ by 2^18 d, the results differ by at
    # most d + 1.
    half = _limbs.constant(2 ** (BITS - 1))
    return _limbs.shift_right(_limbs.add(total, half), jnp.uint32(BITS))


def _grid(
    bound: jax.Array, state: CorrelatedNoiseState, multiplier: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Returns the grid's exponent, and the noise scale in units of the grid, rounded up.

    Let g be the spacing of the grid, and d the number of coordinates of the gradient. A record
    changes the gradient of a step by at most the norm bound. So it changes the rounded gradient by
    at most bound / g + sqrt(d) units. The rounded gradient is added to `bands` rows. Its weights in
    these rows are the entries of one column of C. Each row is then rounded again.
    """
    strategy, dims = state.strategy, state.noise.dims
    spread, norm = math.sqrt(dims), strategy.column_norm
    _, high = jnp.frexp(bound)
    exponent = high.astype(jnp.int32) - np.int32(state.fineness + math.ceil(math.log2(spread)))
    steps = bound.astype(jnp.float32) * power_of_two(-exponent, jnp.float32) * _OUTWARD + spread
    moved = norm * steps + math.sqrt(strategy.bands * dims) * strategy.rounding
    return exponent, jnp.asarray(multiplier).astype(jnp.float32) * moved * _OUTWARD


# The following noise is drawn by other libraries.


@training_state
class PrivatizerState(TrainingState):
    """The state of the wrapped transformation, and the norm bound of the first sum.

    Attributes:
        inner: the state of the wrapped transformation.
        norm_bound: 0 before the first step.

    Formal guarantees:
        None of its own.
    """

    inner: PyTree
    norm_bound: jax.Array


def with_privatizer(
    privatizer: "optax.GradientTransformation", *, batch_size: float
) -> "optax.GradientTransformation":
    """Replaces `gaussian_noise` by noise of another library, such as that of a matrix mechanism.

    `jax_privacy.noise_addition.matrix_factorization_privatizer(strategy, stddev=z, prng_key=key)`
    adds noise that is correlated between the steps, to a sum of vectors of norm at most 1. So
    `with_privatizer` divides a sum by its norm bound, adds the noise, and multiplies the result by
    the norm bound. The divisor slightly exceeds the norm bound, to cover the rounding of the
    division.

    Args:
        privatizer: a transformation that adds noise to sums to which a record contributes a norm of
            at most 1.
        batch_size: B, the public number that the sum is divided by.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. All
        sums must have the same norm bound, because correlated noise assumes a constant bound. A
        different bound gives NaN.

    Raises:
        TypeError: if a parameter is not a number, or an update is not a `ClippedSum`.
        ValueError: if a parameter is out of range, or `init` is called twice, mapped or compiled: a
            privatizer has one key, for one training; at a step, if a function closes over the
            state, or `vmap` maps over sums but not over states.

    Formal guarantees:
        The guarantee of the transformation for sums of vectors of norm 1. Its floating-point noise
        is not exact, and `learning.guarantee` does not cover it: use the other library's
        accountant.

    Source:
        Kairouz, McMahan, Song, Thakkar, Thakurta and Xu, "Practical and private (deep) learning
        without sampling or shuffling" (2021); the matrices are those of jax_privacy.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from dpjax import learning
        >>> def loss(w, example):
        ...     return jnp.dot(w, example)
        >>> clipped = learning.clipped_gradients(loss, clip_norm=0.5)
        >>> noise = learning.with_privatizer(optax.identity(), batch_size=10)
        >>> state = noise.init(jnp.zeros(2))
        >>> noise.update(clipped(jnp.zeros(2), jnp.eye(2), True), state)[0].round(3)
        Array([0.05, 0.05], dtype=float32)
    """
    size = _checks.positive("batch_size", batch_size)
    trainings = Trainings()

    def init(parameters: PyTree) -> PrivatizerState:
        if trainings.number():
            raise ValueError(
                "init may be called only once for each privatizer: make another, with its own key"
            )
        return PrivatizerState(privatizer.init(parameters), jnp.zeros((), jnp.result_type(float)))

    def update(
        updates: PyTree, state: PrivatizerState, params: PyTree = None
    ) -> tuple[PyTree, PrivatizerState]:
        total = opened(updates, state)
        values = lax.stop_gradient(total.value)
        before = _state_of_each_lane(state.norm_bound, state.inner, values)
        bound = jnp.asarray(total.norm_bound, before.dtype)
        bound = jnp.where((before == 0) | (before == bound), bound, jnp.nan)

        def divisor(dtype: np.dtype) -> jax.Array:
            """Returns a divisor of sums. A record changes the divided sum by at most 1.

            The divisor is the norm bound, increased for rounding. A division has a relative
            rounding error of at most eps / 2. The norm of a sum is at most `slots` times the bound.
            So rounding increases the distance between the quotients of neighbors by at most eps
            times `slots`. Another 4 eps covers the three roundings of the divisor itself.
            """
            charged = 1 + 1.01 * (updates.slots + 4) * float(np.finfo(dtype).eps)
            return bound.astype(dtype) * charged

        unit = jax.tree.map(lambda x: x / divisor(x.dtype), total.value)
        noisy, inner = privatizer.update(unit, state.inner, params)
        noisy = jax.tree.map(lambda x: x * divisor(x.dtype), noisy)
        return averaged(noisy, size), PrivatizerState(inner, bound)

    return transformation(init, update)


@custom_vmap
def _state_of_each_lane(norm_bound: jax.Array, inner: PyTree, values: PyTree) -> jax.Array:
    """Returns the norm bound. Under `vmap`, raises an error if only the values are mapped over."""
    del inner, values
    return norm_bound


@_state_of_each_lane.def_vmap
def _(
    _: int, mapped: tuple[bool, PyTree, PyTree], norm_bound: jax.Array, *others: PyTree
) -> tuple[jax.Array, bool]:
    bound_is_mapped, of_inner, of_values = mapped
    if any(jax.tree.leaves(of_values)) and not any(jax.tree.leaves(of_inner)):
        raise ValueError(
            "state must be mapped over together with the sums: jax.vmap maps over sums but not "
            "over states of the privatizer, so all sums would get the same noise. Make the "
            "privatizer inside the mapped function, from keys that are mapped over"
        )
    return _state_of_each_lane(norm_bound, *others), bound_is_mapped
