"""Neighboring databases: alike but for one record."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.sensitivity._pairs import neighboring_pair, rotated

RECORDS = {
    "age": jnp.arange(6),
    "smoker": jnp.array([True, False, True, True, False, False]),
    "image": jnp.arange(6 * 4.0).reshape(6, 2, 2),
}


@pytest.mark.parametrize("position", [None, 0, 2, 4])
def test_one_record_is_replaced_by_the_spare_one(position):
    database, neighbor = neighboring_pair(RECORDS, position)
    changed = 4 if position is None else position
    for leaf, d, e in zip(*map(jax.tree.leaves, (RECORDS, database, neighbor)), strict=True):
        assert d.dtype == e.dtype == leaf.dtype
        np.testing.assert_array_equal(d, leaf[:5])
        np.testing.assert_array_equal(e[changed], leaf[5])
        np.testing.assert_array_equal(np.delete(e, changed, 0), np.delete(d, changed, 0))


def test_position_may_be_traced():
    pairs = jax.vmap(neighboring_pair, in_axes=(None, 0))(jnp.arange(4), jnp.arange(3))
    np.testing.assert_array_equal(pairs[1], [[3, 1, 2], [0, 3, 2], [0, 1, 3]])


def test_a_database_of_one_record():
    database, neighbor = neighboring_pair(jnp.array([1.0, 2.0]))
    assert (database.tolist(), neighbor.tolist()) == ([1.0], [2.0])


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_rotating_keeps_records_whole(steps):
    database, _ = neighboring_pair(RECORDS)
    moved = rotated(database, jnp.asarray(steps))
    order = np.roll(np.arange(5), steps)
    for before, after in zip(*map(jax.tree.leaves, (database, moved)), strict=True):
        np.testing.assert_array_equal(after, np.asarray(before)[order])


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
def test_each_of_many_databases_is_rotated_by_steps_of_its_own(axes):
    databases, steps = np.arange(30).reshape(3, 5, 2), np.array([0, 2, 4])
    given = [x if axis == 0 else x[1] for x, axis in zip((databases, steps), axes, strict=True)]
    found = jax.jit(jax.vmap(rotated, axes))(*map(jnp.asarray, given))
    for i, one in enumerate(found):
        database, step = (x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True))
        np.testing.assert_array_equal(one, np.roll(database, step, axis=0))
