"""Correlated noise (matrix factorization) for clipped sums, with exact sums and exact noise.

Step t publishes y_t = sum_j C[t, j] g_j + z_t, where g_j is the clipped sum of step j, C is a
banded strategy and z_t is fresh Gaussian noise. All of y_t is computed in integers: gradients are
rounded to a grid, rows of C are rational, and z_t is integer noise. The update of step t is entry t
of C^-1 y, which is computed from published numbers alone. docs/proofs/correlated-noise.md has the
proof.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NoiseKind, Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import outward
from dpjax.learning._gaussian_noise import (
    CorrelatedNoiseState,
    NoiseState,
    after_a_step,
    averaged,
    check_clipped,
    check_step,
    refuse_varying,
    rounded_down,
    transformation,
)
from dpjax.learning._sampling import Turn
from dpjax.learning._strategies import BITS, Strategy
from dpjax.learning._trainings import Trainings, key_of_each_lane
from dpjax.mechanisms._start import check_noise
from dpjax.random._keys import check_key, key_for_each
from dpjax.random._noise import GAUSSIAN
from dpjax.random._release import add_integer_noise
from dpjax.release._transaction import refuse_unpaid_steps

if TYPE_CHECKING:
    import optax

# This factor covers the rounding errors of the scale in float32.
_OUTWARD = 1 + 2.0**-18
# Products of integer gradients and entries of C, and the sums of these products, are below 2^62.
_SUM_BITS = 62


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
        strategy: C, from `optimized_strategy`, `toeplitz_strategy` or `banded_strategy`.
        noise_multiplier: sigma over the norm bound and the column norm, finite, above 0; see
            `accounting.dp_sgd_noise_multiplier`, with a `cyclic_sampling`.
        batch_size: B, as for `gaussian_noise`.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. Its
        state is a `CorrelatedNoiseState`. Updates are NaN in steps beyond the number of steps of
        the strategy, and from a state of another strategy.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: as `gaussian_noise` does, or if the strategy has too many bands for the batch.

    Formal guarantees:
        The numbers y_t of all steps are one adaptive Gaussian mechanism on the matrix C g; the
        updates are computed from them. If a record takes part in steps at least `bands` apart, no
        two of its steps enter the same y_t. So if a record takes part in k such steps, they cost no
        more than k steps of `gaussian_noise` at the same noise multiplier, whether or not batches
        are sampled within the record's group. `learning.guarantee` reads the steps from the state,
        and refuses a sampling with fewer groups than bands. Everything in y_t is computed in
        integers: sigma is increased to cover the rounding of gradients and rows. The state holds
            private sums: it
        must stay as secret as the key.

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
    check_key(key)
    if not isinstance(strategy, Strategy):
        raise TypeError(
            "strategy must be made by optimized_strategy, toeplitz_strategy or banded_strategy, got"
            f" {_checks.described(strategy)}"
        )
    multiplier = _checks.positive("noise_multiplier", noise_multiplier)
    _checks.host_only("noise_multiplier", multiplier, "correlated_noise")
    size = _checks.positive("batch_size", batch_size)
    check_noise(noise)
    trainings = Trainings(key)

    def init(parameters: PyTree) -> CorrelatedNoiseState:
        own_key = key_for_each(trainings.key(key), parameters)
        return initial_state(own_key, parameters, strategy, multiplier, noise)

    def update(
        updates: PyTree, state: CorrelatedNoiseState, params: PyTree = None
    ) -> tuple[PyTree, CorrelatedNoiseState]:
        del params
        if state.strategy != strategy:
            raise ValueError(
                "state must belong to the strategy of this noise, got a state of another "
                f"strategy, {state}: with entries of two strategies, the noise would not cover a "
                "record. Make the state by init of this noise"
            )
        # The multiplier is rounded up, because the program computes in float32.
        above = outward(multiplier, math.inf)
        return correlated_average(updates, state, above, rounded_down(multiplier), size)

    return transformation(init, update)


def initial_state(
    key: Key,
    parameters: PyTree,
    strategy: Strategy,
    multiplier: float,
    noise: NoiseKind = "exact",
) -> CorrelatedNoiseState:
    """The state before the first step, which has no sums yet."""
    dims = sum(jnp.size(leaf) for leaf in jax.tree.leaves(parameters))
    none = jnp.int32(0), rounded_down(multiplier), jnp.uint32(0)
    state = NoiseState(key, *none, dims, noise, strategy.bands, jnp.uint32(0))

    def empty(leaf: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(jnp.result_type(leaf), jnp.float32)
        return jnp.zeros((strategy.bands - 1, *jnp.shape(leaf)), dtype)

    return CorrelatedNoiseState(
        state,
        jnp.zeros((), jnp.result_type(float)),
        jax.tree.map(empty, parameters),
        jnp.uint32(strategy.number),
        jax.tree.map(empty, parameters),
        strategy,
        strategy.fineness(dims=dims, multiplier=multiplier),
    )


def correlated_average(
    updates: PyTree, state: CorrelatedNoiseState, multiplier: Scalar, least: Scalar, size: Scalar
) -> tuple[PyTree, CorrelatedNoiseState]:
    """One step: the update and the next state. `least` is the multiplier rounded down."""
    check_clipped(updates)
    state.noise.refuse_if_closed_over()
    _check_dtypes(state, updates._value)
    bound, drawn_by = outward(updates.norm_bound, math.inf), np.uint32(updates.drawn_by)
    found, after = _step(
        state, updates._value, bound, multiplier, least, drawn_by, updates.turn
    )  # fmt: skip
    return averaged(found, size), after


@jax.jit
def _step(
    state: CorrelatedNoiseState,
    value: PyTree,
    norm_bound: Scalar,
    multiplier: Scalar,
    least: Scalar,
    drawn_by: Scalar,
    turn: Turn,
) -> tuple[PyTree, CorrelatedNoiseState]:
    """The update of a step, and the state after it, as one program."""
    strategy = state.strategy
    check_step(state.noise, value, state.noise.noise)
    refuse_unpaid_steps()
    step = state.noise.step
    next_key, step_key = jax.random.split(key_of_each_lane(state.noise.key))
    refuse_varying(step_key, (value, norm_bound, multiplier, state._sums))
    first = jnp.asarray(norm_bound).astype(state.norm_bound.dtype)
    bound = jnp.where(step == 0, first, state.norm_bound)
    # The noise of this step and of later steps would not cover a larger norm bound, so the bound
    # becomes NaN in all these steps.
    usable = first <= bound
    # Loading a file may put the arrays of one strategy's state into the state of another strategy.
    # A column with entries of two strategies may have a larger norm than the columns of either
    # strategy.
    usable &= state.number == np.uint32(strategy.number)
    bound = jnp.where(usable, bound, jnp.nan)
    noisy = _noisy_rows(step_key, state, value, bound, multiplier)
    noisy = [jnp.where(step < strategy.steps, y, jnp.nan) for y in noisy]
    row = _row(strategy, step)
    structure = jax.tree.structure(value)
    published = jax.tree.leaves(state.published)
    # Post-processing: entry t of C^-1 y from y_t and the entries before it.
    found = [_solved(row, y, kept, step) for y, kept in zip(noisy, published, strict=True)]

    def kept(old: PyTree, new: list[jax.Array]) -> PyTree:
        pairs = zip(jax.tree.leaves(old), new, strict=True)
        return jax.tree.unflatten(structure, [_kept(x, y, step) for x, y in pairs])

    after = after_a_step(state.noise, drawn_by, next_key, least, turn)
    after = dataclasses.replace(
        state,
        noise=after,
        norm_bound=bound,
        published=kept(state.published, found),
        _sums=kept(state._sums, jax.tree.leaves(value)),
    )
    return jax.tree.unflatten(structure, found), after


def _check_dtypes(state: CorrelatedNoiseState, value: PyTree) -> None:
    """Refuses sums in other dtypes, because a cast would round a sum differently in later rows."""
    kept = [x.dtype for x in jax.tree.leaves(state._sums)]
    given = [x.dtype for x in jax.tree.leaves(value)]
    if kept != given:
        raise ValueError(
            f"state must have the dtypes of the parameters, {[*map(str, given)]}, got "
            f"{[*map(str, kept)]}: make it by init, from parameters with the dtypes that the "
            "training uses"
        )


def _noisy_rows(
    key: Key,
    state: CorrelatedNoiseState,
    value: PyTree,
    bound: jax.Array,
    multiplier: Scalar,
) -> list[jax.Array]:
    """y_t: row t of C times the clipped sums, plus noise, for each leaf."""
    leaves, strategy = jax.tree.leaves(value), state.strategy
    exponent, scale = _grid(bound, state, multiplier)
    step = state.noise.step
    row = _row(strategy, step)
    limit = 2 ** (_SUM_BITS - strategy.row_sum.bit_length())

    def rounded(x: jax.Array) -> Limbs:
        return _limbs.clip(round_to_grid(x, exponent), limit)

    def combined(leaf: jax.Array, kept: jax.Array) -> Limbs:
        total = _times(row[0], rounded(leaf))
        if len(kept):
            weights = _by_place(row, step, len(kept))

            def add(place: jax.Array, total: Limbs) -> Limbs:
                return _limbs.add(total, _times(weights[place], rounded(kept[place])))

            total = lax.fori_loop(0, len(kept), add, total)
        # This computes round(total / 2^18). If two totals differ by d steps of the grid before,
        # they differ by at most d + 1 after rounding.
        half = _limbs.constant(2 ** (BITS - 1))
        return _limbs.shift_right(_limbs.add(total, half), jnp.uint32(BITS))

    kept_sums = jax.tree.leaves(state._sums)
    rows = [combined(leaf, kept) for leaf, kept in zip(leaves, kept_sums, strict=True)]
    key = key_for_each(key, (value, bound, multiplier, state._sums))
    distribution = GAUSSIAN if state.noise.noise == "exact" else GAUSSIAN.in_floats()
    dtypes = [leaf.dtype for leaf in leaves]
    return add_integer_noise(key, rows, scale, exponent, dtypes, distribution)


def _grid(
    bound: jax.Array, state: CorrelatedNoiseState, multiplier: Scalar
) -> tuple[jax.Array, jax.Array]:
    """The exponent of the grid, and the scale of the noise in steps of this grid, rounded up.

    A record changes the gradient of a step by at most the norm bound. So it changes the rounded
    gradient, in d coordinates on a grid of spacing g, by at most bound / g + sqrt(d) steps. The
    gradient enters `bands` rows with the weights of a column of C, and each row is rounded again.
    """
    strategy, dims = state.strategy, state.noise.dims
    spread, norm = math.sqrt(dims), strategy.column_norm
    _, high = jnp.frexp(bound)
    exponent = high.astype(jnp.int32) - np.int32(state.fineness + math.ceil(math.log2(spread)))
    steps = bound.astype(jnp.float32) * power_of_two(-exponent, jnp.float32) * _OUTWARD + spread
    moved = norm * steps + math.sqrt(strategy.bands * dims)
    return exponent, jnp.asarray(multiplier).astype(jnp.float32) * moved * _OUTWARD


def _times(factor: jax.Array, x: Limbs) -> Limbs:
    return _limbs.multiply(_limbs.from_integers(factor), x)


def _row(strategy: Strategy, step: jax.Array) -> jax.Array:
    """The numerators of the row of a step: first the diagonal, then earlier steps."""
    rows = jnp.asarray(strategy.numerators)
    return rows[jnp.minimum(step, len(rows) - 1)]


def _by_place(row: jax.Array, step: jax.Array, places: int) -> jax.Array:
    """The weights of the stored steps. Step j is stored at index j modulo the number of places."""
    age = (step - 1 - jnp.arange(places)) % places + 1
    return row[age]


def _kept(old: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
    """Replaces the oldest stored array by the newest."""
    if not len(old):
        return old
    return lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), step % len(old), 0)


def _solved(row: jax.Array, noisy: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
    weights = row.astype(noisy.dtype)
    total = noisy * noisy.dtype.type(2**BITS)
    if len(kept):
        earlier = jnp.tensordot(
            _by_place(weights, step, len(kept)), kept.astype(noisy.dtype), 1,
            precision=lax.Precision.HIGHEST,
        )  # fmt: skip
        total = total - earlier
    return total / weights[0]
