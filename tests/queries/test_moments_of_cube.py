"""Moments of records whose coordinates have bounds of their own: how far a record moves them."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import NeighboringRelation
from dpjax.queries._second_moments import _moved, _moved_in_cube, second_moments_query

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
ORDS = {"l1": 1, "l2": 2, "linf": np.inf}


def cube(dims):
    """Vectors of the lattice between -1 and 1, beyond it, and strange ones."""
    ends = [-1.0, -0.5, -1 / (dims + 1), 0.0, 1.0] if dims < 3 else [-1.0, -1 / (dims + 1), 1.0]
    lattice = np.array(list(itertools.product(ends, repeat=dims)))
    beyond = [lattice[:3] * 7, lattice[-2:] * 1e30]
    strange = [np.full((1, dims), x) for x in (np.nan, np.inf, 1e-45)]
    return np.concatenate([lattice, *beyond, *strange]).astype(np.float32)


@functools.cache
def query_of(dims):
    return second_moments_query(lambda x: x, dims=dims, capacity=4, in_cube=True)


@functools.cache
def totals(dims):
    """What is released, before noise: of each record alone, and of no record."""
    query, records = query_of(dims), cube(dims)
    alone = jax.jit(jax.vmap(lambda x: query.of_present(x[None], jnp.ones(1, bool))))
    none = query.of_present(records[:1], jnp.zeros(1, bool))
    return np.asarray(alone(records), np.int64), np.asarray(none, np.int64)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_no_record_moves_the_released_integers_further(dims):
    """All pairs of records, enumerated. One of them attains each bound."""
    query, (values, empty) = query_of(dims), totals(dims)
    assert not empty.any()
    pairs = values[:, None] - values[None]
    for norm, order in ORDS.items():
        for relation, moves in ((ADD, values), (REPLACE, pairs)):
            moved = np.linalg.norm(moves, order, axis=-1).max()
            reach = query.sensitivity(norm, relation=relation).value
            assert moved <= reach
            assert moved >= 0.999 * reach, (norm, relation)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_integers_are_products_without_the_middle_of_squares(dims):
    query, (values, _) = query_of(dims), totals(dims)
    x = cube(dims).astype(float)
    x = np.clip(np.where(np.isfinite(x).all(axis=1, keepdims=True), x, 0), -1, 1)
    z = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    rows, columns = np.triu_indices(1 + dims)
    exact = z[:, rows] * z[:, columns] - 0.5 * ((rows == columns) & (rows > 0))
    assert np.abs(values * query.unit - exact).max() <= query.rounding * query.unit
    assert query.clipping == 0
    assert query.rounding * query.unit < 1e-4


def test_no_bound_is_larger_than_that_of_the_ball_around_the_cube():
    """In units of the cube, the ball through its corners has the radius sqrt(d)."""
    for dims in range(1, 40):
        for relation in (ADD, REPLACE):
            for norm in ORDS:
                ball = float(_moved(dims, relation)[norm]) * dims
                assert float(_moved_in_cube(dims, relation)[norm]) <= ball * (1 + 1e-12)
    assert _moved_in_cube(2, ADD)["l1"] == 5  # 7.8 in the ball.
    assert float(_moved(2, ADD)["l1"]) * 2 == pytest.approx(5 + 2 * math.sqrt(2))


@pytest.mark.parametrize("dims", [1, 2, 3, 6])
def test_no_search_finds_a_pair_that_moves_further(dims):
    """Hill climbing from 100 pairs in each norm; a proof is in docs/proofs/learners.md."""
    generator = np.random.default_rng(dims)
    rows, columns = np.triu_indices(1 + dims)

    def moved(pairs, order):
        z = np.concatenate([np.ones((*pairs.shape[:2], 1)), np.clip(pairs, -1, 1)], axis=2)
        products = z[..., rows] * z[..., columns]
        return np.linalg.norm(products[:, 0] - products[:, 1], order, axis=1)

    for norm, order in ORDS.items():
        pairs = generator.uniform(-1.5, 1.5, (100, 2, dims))
        best = moved(pairs, order)
        for step in np.geomspace(1, 0.01, 200):
            tried = pairs + step * generator.normal(size=pairs.shape)
            found = moved(tried, order)
            better = found > best
            pairs, best = np.where(better[:, None, None], tried, pairs), np.maximum(best, found)
        reach = float(_moved_in_cube(dims, REPLACE)[norm])
        assert 0.95 * reach <= best.max() <= reach * (1 + 1e-12), norm
