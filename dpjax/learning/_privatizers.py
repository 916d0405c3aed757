"""Adapts noise of other libraries to clipped sums, which they receive with norm bound 1."""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax._exact._numerics import outward
from dpjax.learning._gaussian_noise import averaged, check_clipped, transformation
from dpjax.learning._trainings import Trainings, TrainingState, training_state

if TYPE_CHECKING:
    import optax


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
                "init may be called only once for each privatizer, because two trainings would "
                "share its key: make another privatizer, with its own key"
            )
        return PrivatizerState(privatizer.init(parameters), jnp.zeros((), jnp.result_type(float)))

    def update(
        updates: PyTree, state: PrivatizerState, params: PyTree = None
    ) -> tuple[PyTree, PrivatizerState]:
        check_clipped(updates)
        state.refuse_if_closed_over()
        values = lax.stop_gradient(updates.value)
        before = _state_of_each_lane(state.norm_bound, state.inner, values)
        bound = jnp.asarray(outward(updates.norm_bound, math.inf), before.dtype)
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

        unit = jax.tree.map(lambda x: x / divisor(x.dtype), updates.value)
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
