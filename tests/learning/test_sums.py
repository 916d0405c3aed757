"""Sums of clipped gradients, and what becomes of them before they get noise."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
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
    one, other = (clipped(WEIGHTS, EXAMPLES, True) for _ in range(2))
    with pytest.raises(TypeError):
        made.update(way(one, other), state)


N = 300
DATABASE = jax.random.normal(jax.random.key(0), (N, 3)) * jnp.arange(1.0, N + 1)[:, None]


def model(p, x):
    return jnp.dot(p["w"], x) + 1e-3 * p["b"] * jnp.sum(x)


PARAMETERS = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def in_parts(key, sampling, parts, *, database=DATABASE, clip_norm=None, of=None):
    return learning.clipped_in_parts(
        key,
        of or learning.clipped_gradients(model, clip_norm=1.0),
        PARAMETERS,
        sampling=sampling,
        examples=lambda indices: database[indices],
        parts=parts,
        clip_norm=clip_norm,
    )


@pytest.mark.parametrize("parts", [1, 2, 7, 100])
@pytest.mark.parametrize(
    "sampling",
    [learning.poisson_sampling(N, batch_size=90), learning.fixed_size_sampling(N, batch_size=100)],
    ids=["poisson", "fixed"],
)
def test_the_parts_of_a_batch_are_its_sum(sampling, parts, keys):
    """As a whole, and whatever is left for the last part: a slot is in one of them, or empty."""
    clipped = learning.clipped_gradients(model, clip_norm=1.0)
    batch = sampling(keys(1))
    whole = clipped(PARAMETERS, DATABASE[batch.indices], batch)
    found = in_parts(keys(1), sampling, parts)
    assert int(found.within) == int(whole.within)
    for name in PARAMETERS:
        np.testing.assert_allclose(found.value[name], whole.value[name], atol=1e-5)
    # Rounding is charged for a batch of at least 90, and no record is counted twice.
    assert 1 + 2 * 90 * jnp.finfo(found.value["w"].dtype).eps < found.norm_bound < 1.01


def test_a_record_moves_the_sum_of_all_parts_by_the_bound(keys):
    """In floats, with gradients that cancel: the bound of a part, and rounding of the sum."""
    sampling = learning.poisson_sampling(N, batch_size=N)
    largest = 0.0
    ends_part = int(sampling(keys(1)).indices[math.ceil(sampling.capacity / 7) - 1])
    for i in (0, ends_part, 299):
        one, other = (
            in_parts(keys(1), sampling, 7, database=DATABASE.at[i].set(x)) for x in (0.0, 1e3)
        )
        moved = jax.tree.map(jnp.subtract, one.value, other.value)
        distance = np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(moved)))
        largest = max(largest, distance / float(one.norm_bound))
        assert abs(int(one.within) - int(other.within)) == 2
    assert 0.98 < largest <= 1


def test_parts_of_another_clip_norm(keys):
    sampling = learning.poisson_sampling(N, batch_size=90)
    one, other = (in_parts(keys(1), sampling, 3, clip_norm=c) for c in (1.0, 0.25))
    assert float(other.norm_bound) == pytest.approx(0.25 * float(one.norm_bound))
    noise = learning.adaptive_noise(
        keys(3), noise_multiplier=1.0, batch_size=90, initial_clip_norm=1.0
    )
    _, state = noise.update(other, noise.init(PARAMETERS))
    assert int(state.noise.step) == 1


@pytest.mark.parametrize("lengths", [(60, 2), (2, 60)], ids=["longest first", "longest last"])
def test_parts_whose_bounds_differ_are_added_up_as_they_are(lengths, keys):
    """Examples that are padded to the longest of a part go through other numbers of roundings.

    So the norm bounds differ, and here a power of two lies between them: digits that were written
    by one and read by the other would count twice, or half. What else reaches the line: a load that
    changes the dtype of examples, or leaves arrays out.
    """

    def rows(w, indices):
        return jnp.sum(w[indices])

    clipped = learning.clipped_gradients(rows, clip_norm=1.99998)
    table, shapes = jnp.zeros((50, 3), "float32"), iter(lengths)
    bounds = [clipped(table, jnp.zeros((4, n), int), True).norm_bound for n in lengths]
    assert min(bounds) < 2 < max(bounds)
    found = learning.clipped_in_parts(
        keys(1),
        clipped,
        table,
        sampling=learning.fixed_size_sampling(8, batch_size=8),
        examples=lambda indices: jnp.zeros((len(indices), next(shapes)), int),
        parts=2,
    )
    assert float(jnp.linalg.norm(found.value)) == pytest.approx(8 * 1.99998, rel=1e-5)
    assert found.norm_bound > max(bounds)


def test_parts_that_are_none_are_refused(keys):
    sampling = learning.poisson_sampling(N, batch_size=90)
    for parts in (0, sampling.capacity + 1):
        with pytest.raises(ValueError, match="parts must be"):
            in_parts(keys(1), sampling, parts)
    for bad in ({"of": model}, {"sampling": (jnp.arange(3), True)}):
        with pytest.raises(TypeError, match="must be made by"):
            in_parts(keys(1), **{"sampling": sampling, "parts": 2, **bad})
