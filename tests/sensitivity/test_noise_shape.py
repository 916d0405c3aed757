"""The shape of noise: learned from a sample of its own, and measured as it is released."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.random import CHACHA20, seeded_key
from dpjax.random._keys import sampling_key
from dpjax.sensitivity._pairs import neighboring_pair

DEVIATIONS = np.array([4.0, 1.0, 0.25])
N, M = 10, 300
KEY_SHAPE, KEY_SAMPLE = jax.random.split(seeded_key(13))


def target(database):
    mean = jnp.mean(database, axis=0)
    return {"a": mean[:2], "b": mean[2]}


def oracle(key, n):
    return jax.random.normal(key, (n, 3)) * jnp.asarray(DEVIATIONS)[None]


sample = functools.partial(dpjax.sample_sensitivity, target=target, oracle=oracle, n=N, m=M)


@pytest.fixture(scope="module")
def shape():
    return dpjax.noise_shape(KEY_SHAPE, target, oracle, n=N)


def moved(key, index):
    """The two values of a pair, by hand."""
    pair = neighboring_pair(oracle(jax.random.fold_in(sampling_key(key), index), N + 1))
    return [target(database) for database in pair]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_shape_is_the_fourth_root_of_the_second_moment(shape):
    """W is diagonal; the root of 1000 squares is off by 2%, its fourth root's by 1%."""
    expected = np.diag(np.sqrt(DEVIATIONS / 4))
    np.testing.assert_allclose(shape.matrix, expected, atol=0.05)
    assert shape.sampled_with is not None
    assert shape.outputs.tree().keys() == {"a", "b"}


def energy(matrix, differences):
    """Of noise that is calibrated to the largest 5% of the differences in its norm."""
    lengths = np.linalg.norm(np.linalg.solve(matrix, differences.T), axis=0)
    return np.quantile(lengths, 0.95) ** 2 * np.sum(matrix**2)


def test_shaped_noise_has_less_energy_than_isotropic_and_whitening(shape):
    differences = np.random.default_rng(0).normal(size=(4000, 3)) * DEVIATIONS
    shaped = energy(shape.matrix, differences)
    isotropic, whitening = (energy(x, differences) for x in (np.eye(3), np.diag(DEVIATIONS)))
    # For means of squares 28, 51 and 51.
    assert shaped < 0.8 * isotropic
    assert shaped < 0.8 * whitening


def test_directions_that_nothing_moves_get_some_noise():
    def constant(database):
        return jnp.mean(database, axis=0) * jnp.array([1.0, 0.0, 1.0])

    found = dpjax.noise_shape(KEY_SHAPE, constant, oracle, n=N, m=100)
    assert np.linalg.cond(found.matrix) == pytest.approx(1e6**0.25, rel=0.01)


def test_distances_are_of_what_gets_noise(shape):
    """To the last bit: of A^-1 f as a release computes it, not of a product in floats."""
    distances = dpjax.sample_distances(
        KEY_SAMPLE, target, oracle, n=N, norm=shape, m=4, chunk_size=4
    )
    for index, distance in enumerate(np.asarray(distances)):
        value, other = (np.asarray(shape.mapped(x), float) for x in moved(KEY_SAMPLE, index))
        assert distance == pytest.approx(np.linalg.norm(value - other), rel=1e-5)
        plain = flat(moved(KEY_SAMPLE, index)[0]) - flat(moved(KEY_SAMPLE, index)[1])
        assert abs(distance / np.linalg.norm(plain) - 1) > 1e-2


def test_the_grid_before_the_map_is_in_the_distances(shape):
    """A value on a coarse grid of a shape moves by its steps, or not at all."""
    coarse = type(shape)(
        shape.matrix, shape.inverse, shape.bits, 3, shape.outputs, shape.sampled_with
    )
    distances = dpjax.sample_distances(KEY_SAMPLE, target, oracle, n=N, norm=coarse, m=100)
    assert np.mean(np.asarray(distances) == 0) > 0.5


def test_sensitivity_knows_the_target_and_the_shape(shape):
    sensitivity = sample(KEY_SAMPLE, norm=shape)
    plain = sample(KEY_SAMPLE, norm="l2")
    assert sensitivity.norm == shape
    assert (sensitivity.target, sensitivity.outputs) == (plain.target, plain.outputs)
    assert sensitivity.identity != plain.identity
    again = dpjax.noise_shape(KEY_SHAPE, target, oracle, n=N)
    assert sample(KEY_SAMPLE, norm=again).identity == sensitivity.identity


@pytest.mark.parametrize(
    "same",
    [
        KEY_SHAPE,
        jax.random.wrap_key_data(jax.random.key_data(KEY_SHAPE), impl=CHACHA20),
        sampling_key(KEY_SHAPE),
    ],
    ids=["itself", "another implementation", "as threefry"],
)
def test_one_key_for_shape_and_sensitivity_is_refused(shape, same):
    with pytest.raises(ValueError, match="differ from the key that the shape"):
        sample(same, norm=shape)
    with pytest.raises(ValueError, match="differ from the key that the shape"):
        dpjax.sample_distances(same, target, oracle, n=N, norm=shape, m=4)


def test_a_shape_of_another_value_is_refused(shape):
    with pytest.raises(ValueError, match="value must fit the shape"):
        dpjax.sample_sensitivity(
            KEY_SAMPLE, lambda d: jnp.mean(d, axis=0), oracle, n=N, norm=shape, m=M
        )


def test_nothing_to_learn_from_is_refused():
    for constant in (0.0, jnp.nan):
        with pytest.raises(ValueError, match="no noise shape to learn from 50 random pairs"):
            dpjax.noise_shape(
                KEY_SHAPE, lambda d, c=constant: jnp.sum(0 * d) + c, oracle, n=N, m=50
            )
    with pytest.raises(ValueError, match="at most 4096 coordinates, got 4097"):
        dpjax.noise_shape(KEY_SHAPE, lambda d: jnp.zeros(4097) + jnp.sum(d), oracle, n=N)
    with pytest.raises(ValueError, match="m must be"):
        dpjax.noise_shape(KEY_SHAPE, target, oracle, n=N, m=0)


def test_shapes_are_made_on_the_host():
    with pytest.raises(TypeError, match="noise_shape runs on the host"):
        jax.jit(lambda key: dpjax.noise_shape(key, target, oracle, n=N).matrix)(KEY_SHAPE)
    with pytest.raises(TypeError, match="closes over a traced value"):
        jax.vmap(
            lambda c: dpjax.noise_shape(KEY_SHAPE, lambda d: c * jnp.sum(d), oracle, n=N).unit
        )(jnp.ones(2))


def test_infinite_differences_are_left_out():
    def sometimes(database):
        mean = jnp.mean(database, axis=0)
        return jnp.where(database[0, 0] > 8, jnp.inf, mean)

    found = dpjax.noise_shape(KEY_SHAPE, sometimes, oracle, n=N, m=200)
    assert np.all(np.isfinite(found.matrix))


def test_distances_are_of_the_target_that_a_release_is_compared_with(shape):
    """A target that reads state may compute something else when it is traced again."""

    def sampled(count):
        def stateful(database):
            factor = 0.01 if next(count) == 1 else 1.0
            return jax.tree.map(lambda x: factor * x, target(database))

        return sample(KEY_SAMPLE, target=stateful, norm=shape).value

    assert sampled(itertools.count()) == sampled(itertools.count(2))
