"""Noise of others: a transformation that adds noise to sums of vectors of norm at most 1."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax.learning._gaussian_noise import averaged, check_clipped, transformation
from dpjax.learning._trainings import Trainings

if TYPE_CHECKING:
    import optax


class PrivatizerState(NamedTuple):
    """The state of the other transformation, and the norm bound of the first sum.

    Attributes:
        inner: of the other transformation.
        norm_bound: 0 before the first step.

    Formal guarantees:
        None of its own.
    """

    inner: Any
    norm_bound: jax.Array


def with_privatizer(
    privatizer: "optax.GradientTransformation", *, batch_size: float
) -> "optax.GradientTransformation":
    """Noise of another library instead of `gaussian_noise`, such as that of a matrix mechanism.

    `jax_privacy.noise_addition.matrix_factorization_privatizer(strategy, stddev=z, prng_key=key)`
    adds noise that is correlated between the steps, to a sum of vectors of norm at most 1: sums are
    divided by their norm bound first, and multiplied by it again.

    Args:
        privatizer: a transformation that adds noise, for sums in which a record counts 1 at most.
        batch_size: B, public, that the sum is divided by.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. All
        sums must have one norm bound, as correlated noise is for one: another one gives NaN.

    Raises:
        TypeError: if a parameter is not a number, or an update is not a `ClippedSum`.
        ValueError: if a parameter is out of range, or `init` is called twice, mapped or compiled:
            a privatizer has one key, which is for one training.

    Formal guarantees:
        What the transformation promises for sums of vectors of norm 1, drawn as it draws: noise in
        floats is not exact, and `learning.guarantee` does not know it. Ask its own accountant.

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

    def init(parameters: Any) -> PrivatizerState:
        if trainings.number():
            raise ValueError(
                "init may be called once for each privatizer, whose key two trainings would share:"
                " make another privatizer, of a key of its own"
            )
        return PrivatizerState(privatizer.init(parameters), jnp.zeros((), jnp.result_type(float)))

    def update(
        updates: Any, state: PrivatizerState, params: Any = None
    ) -> tuple[Any, PrivatizerState]:
        check_clipped(updates)
        bound = jnp.asarray(updates.norm_bound, state.norm_bound.dtype)
        same = (state.norm_bound == 0) | (state.norm_bound == bound)
        bound = jnp.where(same, bound, jnp.nan)
        unit = jax.tree.map(lambda x: x / bound.astype(x.dtype), updates.value)
        noisy, inner = privatizer.update(unit, state.inner, params)
        noisy = jax.tree.map(lambda x: x * bound.astype(x.dtype), noisy)
        return averaged(noisy, size), PrivatizerState(inner, bound)

    return transformation(init, update)
