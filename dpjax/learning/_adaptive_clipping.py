"""Clip norms that follow a quantile of the gradients' norms, privately."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import Key, PyTree
from dpjax._core._values import NoiseKind, Scalar
from dpjax.learning._clipped_sum import sealed
from dpjax.learning._clipping import LARGEST_NORM, LEAST_NORM
from dpjax.learning._gaussian_noise import (
    NoiseState,
    after_a_step,
    averaged,
    check_step,
    gaussian_noise,
    transformation,
    with_noise,
)
from dpjax.learning._trainings import key_of_each_lane
from dpjax.mechanisms._mechanism import check_noise
from dpjax.random._facade import GAUSSIAN

if TYPE_CHECKING:
    import optax


@frozen_pytree
class AdaptiveNoiseState:
    """The state of adaptive clipping.

    Attributes:
        noise: the `NoiseState`, which `learning.guarantee` takes.
        clip_norm: for the next `clipped(..., clip_norm=)`; public.

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
    """The noise of DP-SGD with a clip norm that moves to a quantile of the gradients' norms.

    Each step also counts, with noise, the gradients within the clip norm C, and multiplies C by
    exp(-learning_rate (fraction - quantile)). Both releases together are one Gaussian mechanism
    with the noise multiplier z. A record has the weight 1/2 in the count, which gets noise sigma_b.
    So the gradients get the noise multiplier (z^-2 - (2 sigma_b)^-2)^(-1/2).

    Args:
        key: as for `gaussian_noise`.
        noise_multiplier: z, of the whole step.
        batch_size: B, the expected size of a batch, public.
        initial_clip_norm: of the first step, from 1e-10 to 1e10.
        quantile: of the gradients' norms, in (0, 1). The clip norm moves to it.
        learning_rate: above 0.
        count_noise: sigma_b, above z / 2; B / 20, but at least z, if None.
        noise: "exact", or "float" for sweeps where nothing is published.

    Returns:
        An `optax.GradientTransformation` from a `ClippedSum` to a pytree like the parameters. Its
        state is an `AdaptiveNoiseState`: hand its `clip_norm` to the next call of the
        `ClippedGradients`.

    Raises:
        TypeError: if the key is not a typed key or a parameter not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Those of `gaussian_noise` at the same noise multiplier: the count is paid for. The clip norm
        is made of noisy counts alone, so it is public.

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
    total = _checks.positive("noise_multiplier", noise_multiplier)
    _checks.host_only("noise_multiplier", total, "gaussian_noise")
    size = _checks.positive("batch_size", batch_size)
    quantile = _checks.fraction("quantile", quantile)
    rate = _checks.positive("learning_rate", learning_rate)
    start = _checks.positive("initial_clip_norm", initial_clip_norm)
    if not LEAST_NORM <= start <= LARGEST_NORM:
        raise ValueError(f"initial_clip_norm must be from 1e-10 to 1e10, got {start:g}")
    counted = max(size / 20, total) if count_noise is None else count_noise
    counted = _checks.positive("count_noise", counted)
    multiplier = gradient_noise_multiplier(total, counted)
    distribution = GAUSSIAN if check_noise(noise) else GAUSSIAN.in_floats()
    plain = gaussian_noise(key, noise_multiplier=total, batch_size=size, noise=noise)

    def init(parameters: PyTree) -> AdaptiveNoiseState:
        state = plain.init(parameters)
        assert isinstance(state, NoiseState)
        both = dataclasses.replace(state, dims=state.dims + 1)
        return AdaptiveNoiseState(both, jnp.asarray(start, jnp.result_type(float)))

    def update(
        updates: PyTree, state: AdaptiveNoiseState, params: PyTree = None
    ) -> tuple[PyTree, AdaptiveNoiseState]:
        del params
        check_step(updates, state.noise, noise, more=1)
        next_key, gradient_key, count_key = jax.random.split(key_of_each_lane(state.noise.key), 3)
        gradient = averaged(with_noise(gradient_key, updates, multiplier, distribution), size)
        # Each example counts 1 or -1, so that adding or removing one moves the count by 1.
        count = sealed(updates.within, 1.0, updates.within, slots=updates.slots)
        noisy = with_noise(count_key, count, 2 * counted, distribution)
        fraction = jnp.clip(0.5 + noisy.astype(state.clip_norm.dtype) / (2 * size), 0, 1)
        norm = state.clip_norm * jnp.exp(-rate * (fraction - quantile))
        norm = jnp.clip(norm, LEAST_NORM, LARGEST_NORM)
        after = after_a_step(state.noise, updates, next_key, total)
        return gradient, AdaptiveNoiseState(after, norm)

    return transformation(init, update)


def gradient_noise_multiplier(total: Scalar, count_noise: float) -> float:
    """The noise multiplier of the gradients, if the count takes its part; rounded up."""
    left = float(total) ** -2 - (2 * count_noise) ** -2
    if left <= 0:
        raise ValueError(
            f"count_noise must be above noise_multiplier / 2 = {total / 2:g}, got {count_noise:g}"
        )
    return left**-0.5 * (1 + 1e-12)
