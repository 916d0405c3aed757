"""Sums of clipped gradients, and what becomes of them before they get noise."""

import operator

import jax
import jax.numpy as jnp
import optax
import pytest

from dpjax import learning


def loss(w, x):
    return jnp.dot(w, x)


WEIGHTS, EXAMPLES = jnp.zeros(3), jnp.ones((4, 3))
WAYS = {
    "added": lambda one, other: jax.tree.map(jnp.add, one, other),
    "added by an operator": lambda one, other: jax.tree.map(operator.add, one, other),
    "added by optax": lambda one, other: optax.tree.add(one, other),
    "averaged": lambda one, other: jax.tree.map(lambda x, y: (x + y) / 2, one, other),
    "doubled": lambda one, other: optax.scale(2).update(one, optax.scale(2).init(one))[0],
    "accumulated": lambda one, other: jax.lax.fori_loop(
        0, 3, lambda _, total: jax.tree.map(jnp.add, total, other), one
    ),
    "subtracted": lambda one, other: jax.tree.map(jnp.subtract, one, other),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("noise", ["gaussian", "adaptive", "other"])
def test_sums_are_not_added_up(way, noise, keys):
    """A record may be in both: of two losses of a batch, or of two batches.

    With two losses, it moves the count of adaptive clipping by 2, where the noise is for 1. With
    independent batches, it is in one of them nearly twice as often as the accounting thinks. What
    else adds sums up: `optax.MultiSteps` and `apply_every`, `jax.lax.psum`, a scan that carries
    one. All of them compute with every part of it.
    """
    clipped = learning.clipped_gradients(loss, clip_norm=1.0)
    settings = {"noise_multiplier": 1.0, "batch_size": 4}
    made = {
        "gaussian": learning.gaussian_noise(keys(3), **settings),
        "adaptive": learning.adaptive_noise(keys(3), initial_clip_norm=1.0, **settings),
        "other": learning.with_privatizer(optax.identity(), batch_size=4),
    }[noise]
    state = made.init(WEIGHTS)
    one, other = (clipped(WEIGHTS, scale * EXAMPLES, True) for scale in (1, -2))
    with pytest.raises(TypeError):
        made.update(way(one, other), state)
    made.update(one, state)
