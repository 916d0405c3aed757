"""The map before shaped noise: exact in every program, whatever the value holds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import NoiseShape
from dpjax._core._pytree import TreeSpec
from dpjax.sensitivity._shaped_norm import shape_of

MATRIX = np.array([[1.0, 0.3, 0.0], [0.3, 0.5, -0.1], [0.0, -0.1, 0.2]])
VALUE = {"a": jnp.asarray([0.3, -1.7]), "b": jnp.asarray(5)}
LARGEST = 2.0**16  # 2^36 units of 2^-20


def like(value):
    return TreeSpec.of(value)


SHAPE = shape_of(MATRIX, like(VALUE), 2.0**-20, None)


def exactly(shape, numbers):
    """A^-1 f in integers of Python, in units of the two grids."""
    largest = 2**36

    def units(x):
        if math.isnan(x):
            return 0
        if math.isinf(x):
            return largest if x > 0 else -largest
        return max(-largest, min(math.floor(x * 2.0**-shape.unit + 0.5), largest))

    flat = [units(float(x)) for x in numbers]
    return [sum(int(b) * u for b, u in zip(row, flat, strict=True)) for row in shape.inverse]


def flat(value):
    return np.concatenate([np.ravel(leaf).astype(float) for leaf in jax.tree.leaves(value)])


STRANGE = [0.1, -0.1, 1e-9, 700.0, -7e4, 3e38, math.inf, -math.inf, math.nan]


def values():
    generator = np.random.default_rng(0)
    drawn = [
        {"a": jnp.asarray(x, jnp.float32), "b": jnp.asarray(b, jnp.int32)}
        for x, b in zip(generator.normal(size=(20, 2)) * 100, range(-10, 10), strict=True)
    ]
    return drawn + [VALUE | {"a": jnp.asarray([x, 1.0])} for x in STRANGE]


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_mapped_is_exact_in_every_program():
    """To the last bit: alone, in a batch, and fused with what comes before and after."""
    together = jax.jit(jax.vmap(SHAPE.mapped))(stacked(values()))
    fused = jax.jit(lambda x: jax.lax.map(lambda v: 1 * SHAPE.mapped(v), x))(stacked(values()))
    np.testing.assert_array_equal(together, fused)
    for value, found in zip(values(), np.asarray(together), strict=True):
        np.testing.assert_array_equal(SHAPE.mapped(value), found)
        exact = np.array(exactly(SHAPE, flat(value)), float) * 2.0 ** (SHAPE.unit - SHAPE.bits)
        assert np.all(np.abs(found - exact) <= np.spacing(np.abs(found)))


def test_mapped_keeps_float64(x64):
    value = {"a": jnp.asarray([0.3, -1.7]), "b": jnp.asarray(5)}
    shape = shape_of(MATRIX, like(value), 2.0**-20, None)
    found = shape.mapped(value)
    assert found.dtype == np.float64
    exact = [x * 2.0 ** (shape.unit - shape.bits) for x in exactly(shape, flat(value))]
    np.testing.assert_array_equal(found, exact)  # Fewer than 53 bits
    assert shape.shaped(found)["a"].dtype == np.float64


@pytest.mark.parametrize("size", [1, 65, 2048])
def test_products_never_wrap(size):
    """At the largest entries that a matrix of this size gets, on the largest values."""
    entry = int(shape_of(np.eye(size), like(jnp.zeros(size)), 1.0, None).inverse.max())
    assert size * entry * (2**6 - 1) < 2**31
    assert size * entry * 2**36 < 2**63
    full = np.full((size, size), -entry, np.int32)
    shape = NoiseShape(np.eye(1), full, 0, 0, like(jnp.zeros(size)))
    exact = size * entry * (2.0**36 - 2.0**12)
    for sign in (1.0, -1.0):
        found = shape.mapped(jnp.full(size, sign * (2.0**36 - 2.0**12)))
        np.testing.assert_allclose(found, np.full(size, -sign * exact), rtol=2e-7)


def test_released_is_what_was_mapped():
    """A is the inverse of the integers, not of what they were rounded from."""
    value = {"a": jnp.asarray([0.3, -1.7]), "b": jnp.asarray(5)}
    back = SHAPE.shaped(SHAPE.mapped(value))
    assert jax.tree.structure(back) == jax.tree.structure(value)
    np.testing.assert_allclose(flat(back), flat(value), atol=2e-5)
    np.testing.assert_allclose(SHAPE.matrix @ SHAPE.inverse / 2.0**SHAPE.bits, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(SHAPE.matrix, MATRIX, atol=1e-3)


def test_clamped_values_are_mapped_to_the_same():
    for value in values():
        clamped = SHAPE.clamped(value)
        assert np.all(np.abs(flat(clamped)) <= LARGEST)
        np.testing.assert_array_equal(SHAPE.mapped(clamped), SHAPE.mapped(value))


def test_shapes_are_compared_by_their_contents():
    again = shape_of(MATRIX, like(VALUE), 2.0**-20, None)
    assert (again, hash(again)) == (SHAPE, hash(SHAPE))
    others = [
        shape_of(2 * MATRIX, like(VALUE), 2.0**-20, None),
        shape_of(MATRIX, like(VALUE), 2.0**-21, None),
        shape_of(MATRIX, like(VALUE), 2.0**-20, "key"),
        shape_of(MATRIX, like(jnp.zeros(3)), 2.0**-20, None),
    ]
    assert len({SHAPE, *others}) == 5
    for array in (SHAPE.matrix, SHAPE.inverse):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 0


def test_resolution_is_the_worst_that_last_places_can_do():
    """Also where large coordinates cancel in A^-1 f."""
    eps = float(jnp.finfo(jnp.float32).eps)
    shape = shape_of(np.array([[2.0, 1.0], [1.0, 2.0]]), like(jnp.zeros(2)), 2.0**-20, None)
    value = np.array([100.0, 100.0])
    off = [value * (1 + eps * np.array([i, j])) for i in (-1, 1) for j in (-1, 1)]
    inverse = shape.inverse / 2.0**shape.bits
    worst = max(np.linalg.norm(inverse @ (x - value)) for x in off)
    assert worst <= float(shape.resolution(shape.mapped(jnp.asarray(value)))) * (1 + 1e-5)


@pytest.mark.parametrize("unit", [2.0**-20, 1.01 * 2.0**-20, 1.99 * 2.0**-20, 0.75, 12.0])
def test_the_grid_is_the_coarsest_of_at_most_a_unit(unit):
    grid = 2.0 ** shape_of(MATRIX, like(VALUE), unit, None).unit
    assert grid <= unit < 2 * grid


def test_out_of_range_of_float32_is_refused():
    for unit in (1e-30, 1e20):
        with pytest.raises(ValueError, match="rescale"):
            shape_of(MATRIX, like(VALUE), unit, None)
