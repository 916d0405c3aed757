"""Noise for clipped sums, as gradient transformations of optax."""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import static
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NoiseKind, Scalar
from dpjax._exact._numerics import outward
from dpjax._tracing import _shards
from dpjax.learning._clipped_sum import ClippedSum
from dpjax.learning._trainings import Trainings, TrainingState, key_of_each_lane, training_state
from dpjax.mechanisms._mechanism import check_noise
from dpjax.random._facade import GAUSSIAN, Calibration, Noise, add_noise, check_key, key_for_each
from dpjax.release._transaction import refuse_unpaid_steps
from dpjax.sensitivity._norms import grid_dtype, rounding_norm

if TYPE_CHECKING:
    import optax


# Stands for batches that were not all drawn in one way.
SEVERAL = np.uint32(2**32 - 1)


@training_state
class NoiseState(TrainingState):
    """What the next step of noise needs, and what `learning.guarantee` must know.

    Attributes:
        key: of the next step's noise. It does not reveal earlier keys.
        step: how many steps got noise.
        noise_multiplier: the least standard deviation of the noise of any step, relative to the
            norm bound. Another number in its place changes no noise.
        drawn_by: a number that says which sampling drew all batches; 0 if they were of the caller's
            own choice, and 2^32 - 1 if not all were drawn in one way.
        dims: how many numbers get noise in a step.
        noise: "exact" or "float".

    Formal guarantees:
        None of its own. It holds a secret, the key.
    """

    key: Key
    step: jax.Array
    noise_multiplier: Scalar
    drawn_by: jax.Array
    dims: int = static()
    noise: NoiseKind = static()

    def __repr__(self) -> str:
        return f"NoiseState(step={self.step}, noise_multiplier={self.noise_multiplier})"


def gaussian_noise(
    key: Key,
    *,
    noise_multiplier: Scalar,
    batch_size: float,
    noise: NoiseKind = "exact",
) -> "optax.GradientTransformation":
    """The noise of DP-SGD: (sum + sigma Z) / B, where sum is a `ClippedSum`.

    sigma is the noise multiplier times the `norm_bound` of the sum. The noise comes first in a
    chain. Transformations after it, such as `optax.adam`, are post-processing. A transformation in
    front of it is refused, because a `ClippedSum` cannot be taken apart.

    Inside `jax.shard_map` the state and the sum must be the same on all shards. Then all shards
    draw the same noise, as one device does.

    A state enters `jit`, `scan` and `vmap` as an argument or a carry. Under `vmap`, lanes with
    copies of one state draw noise of their own.

    Args:
        key: a key from `dpjax.random.secure_key`, used for nothing else. The state holds it, and
            replaces it in every step. Every call of `init` starts a training with a key of its own:
            the first takes this key, later ones fold their number into it. All optimizers of a
            secret key share the count; those of a seeded key repeat themselves. An open `KeyLedger`
            claims each of them.
        noise_multiplier: sigma over the norm bound, finite, above 0; see
            `accounting.dp_sgd_noise_multiplier`.
        batch_size: B, a public number: the expected size of a batch, not that of the one at hand.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. Its
        state is a `NoiseState`. A bad traced parameter, and a norm bound that is not above 0, give
        NaN.

    Raises:
        TypeError: if the key is not a typed key, or an update is not a `ClippedSum`.
        ValueError: if a parameter is out of range, or `vmap` maps over sums and not over keys; if
            the state varies over shards, or JAX does not check it (`check_vma=False`, `jax.pmap`);
            if the state was closed over by a `jit`, `scan` or `vmap`; if `init` is mapped, compiled
            or called in another process and the optimizer was made outside, or a compiled training
            does not take the key as an argument; if a `dpjax.Ledger` is open, which a training pays
            by `charge`.

    Formal guarantees:
        Every step is a Gaussian mechanism on the sum of the batch. The noise is exact integer noise
        on a grid, and rounding to the grid is charged to sigma. No private number decides whether
        or how a step is taken. A key serves one step: it is split, and its successor takes its
        place. `learning.guarantee` says what all steps promise together. A program that puts an
        old state back in place uses its key again.

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
    check_key(key)
    multiplier = _checks.positive("noise_multiplier", noise_multiplier)
    size = _checks.positive("batch_size", batch_size)
    distribution = GAUSSIAN if check_noise(noise) else GAUSSIAN.in_floats()
    trainings = Trainings(key)

    def init(parameters: PyTree) -> NoiseState:
        dims = sum(jnp.size(leaf) for leaf in jax.tree.leaves(parameters))
        own_key = key_for_each(trainings.key(key), parameters)
        least = rounded_down(multiplier)
        return NoiseState(own_key, jnp.int32(0), least, jnp.uint32(0), dims, noise)

    def update(
        updates: PyTree, state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        del params
        check_step(updates, state, noise)
        next_key, step_key = jax.random.split(key_of_each_lane(state.key))
        noisy = with_noise(step_key, updates, multiplier, distribution)
        return averaged(noisy, size), after_a_step(state, updates, next_key, multiplier)

    return transformation(init, update)


def transformation(
    init: Callable[..., PyTree], update: Callable[..., tuple[PyTree, PyTree]]
) -> "optax.GradientTransformation":
    """The pair of functions as optax has it."""
    import optax  # Takes half a second.

    return optax.GradientTransformation(init, update)


def with_noise(key: Key, clipped: ClippedSum, multiplier: Scalar, noise: Noise) -> PyTree:
    """The sum with noise of a multiple of its norm bound."""
    bound = outward(clipped.norm_bound, math.inf)
    return _with_noise(key, clipped.value, bound, multiplier, noise)


@functools.partial(jax.jit, static_argnames="noise")
def _with_noise(
    key: Key, value: PyTree, norm_bound: Scalar, multiplier: Scalar, noise: Noise
) -> PyTree:
    refuse_unpaid_steps()
    bound = jnp.asarray(norm_bound)
    _refuse_shards(key, (value, bound, multiplier))
    key = key_for_each(key, (value, bound, multiplier))
    calibration = Calibration(
        multiplier * bound,
        bound,
        # The certificate of the tables is charged to the run, by `learning.guarantee`.
        math.inf,
        rounding_norm("l2", value),
        sum(leaf.size for leaf in jax.tree.leaves(value)),
        False,
        grid_dtype(value),
    )
    return add_noise(key, value, calibration, noise)


def _refuse_shards(key: Key, others: PyTree) -> None:
    """One sum gets one draw: under `jax.shard_map`, all shards draw the same noise."""
    for name, tree in (("key", key), ("the sum, its norm bound and noise_multiplier", others)):
        if axes := _shards.varying_axes(tree):
            raise ValueError(
                f"{name} must be the same on all shards, got some that vary over {sorted(axes)}:"
                " give the state in_specs=PartitionSpec(), without jax.lax.pcast; trainings of"
                " their own go under jax.vmap"
            )


def check_clipped(updates: object) -> None:
    """Refuses updates that have no norm bound."""
    if not isinstance(updates, ClippedSum):
        raise TypeError(
            "updates must be a ClippedSum, which has a norm bound for the noise, got"
            f" {_checks.described(updates)}: make it by learning.clipped_gradients, and put the"
            " noise first in a chain"
        )


def check_step(updates: PyTree, state: NoiseState, noise: NoiseKind, *, more: int = 0) -> None:
    """Refuses a sum, or a kind of noise, that is not that of the state."""
    check_clipped(updates)
    state.refuse_if_closed_over()
    size = more + sum(jnp.size(leaf) for leaf in jax.tree.leaves(updates.value))
    if (size, noise) != (state.dims, state.noise):
        raise ValueError(
            f"state must be of dims={size} and noise={noise!r}, as this step is, got one of"
            f" dims={state.dims} and noise={state.noise!r}: make it by init, of all parameters"
        )
    check_precision(state)


def check_precision(state: NoiseState) -> None:
    """Refuses a noise multiplier that a cast may have rounded up."""
    dtype = jnp.result_type(state.noise_multiplier)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"state must have a noise multiplier of at least float32, got {dtype}, which may have"
            " rounded it up: cast parameters alone"
        )


def averaged(tree: PyTree, size: Scalar) -> PyTree:
    """Post-processing: a sum over a batch as an average."""

    def average(total: jax.Array) -> jax.Array:
        return total / jnp.asarray(size).astype(total.dtype)

    return jax.tree.map(average, tree)


def after_a_step(
    state: NoiseState, updates: ClippedSum, key: Key, multiplier: Scalar
) -> NoiseState:
    """The state after one more step, with its next key and the least noise so far."""
    least = jnp.minimum(rounded_down(state.noise_multiplier), rounded_down(multiplier))
    drawn_by = jnp.uint32(updates.drawn_by)
    same = (state.step == 0) | (state.drawn_by == drawn_by)
    drawn_by = jnp.where(same, drawn_by, SEVERAL)
    return NoiseState(key, state.step + 1, least, drawn_by, state.dims, state.noise)


def rounded_down(multiplier: Scalar) -> jax.Array:
    """A noise multiplier as an array, of the same type in every step."""
    return jnp.asarray(outward(multiplier, -math.inf)).astype(jnp.result_type(float))
