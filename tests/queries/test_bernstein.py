"""Sums of Bernstein polynomials: what a record adds to them, and which moments they are."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.queries._people import integers_by
from dpjax.queries._private_release import _laplace_sum, _laplace_sum_of_many
from dpjax.queries._second_moments import (
    CENTER,
    _shares,
    as_cube,
    bernstein_query,
    combinations_of,
    moments_of,
    moments_query,
    sizes_differ,
    sums_of_moments,
)

REPLACE, ADD = dpjax.NeighboringRelation
ORDS = {"l1": 1, "l2": 2, "linf": np.inf}
DEGREES = [(1,), (2,), (2, 2), (2, 1), (2, 2, 2, 1)]
WHOLE = 2**30


def records(dims, n=2000):
    """Records in the cube, on its faces and corners, outside of it, and not finite."""
    x = np.random.default_rng(dims).normal(0, 0.7, (n, dims))
    corners = list(itertools.product([-1.0, 1.0], repeat=dims))
    odd = [np.full(dims, one) for one in (0, -0.0, 1e-30, 9e9, np.inf, -np.inf, np.nan)]
    return np.concatenate([x, corners, odd]).astype(np.float32)


def shares_of(x, degrees):
    inside = as_cube(jnp.asarray(x), jnp.ones(len(x), bool))
    return np.asarray(_shares(inside, degrees), np.int64)


def polynomials(x, degrees):
    """The products in float64, in the order of the cells."""
    shares = np.ones((len(x), 1))
    for column, degree in zip(x.T, degrees, strict=True):
        t = (1 + column) / 2
        factors = [math.comb(degree, k) * t**k * (1 - t) ** (degree - k) for k in range(degree + 1)]
        shares = (shares[:, :, None] * np.stack(factors, axis=1)[:, None, :]).reshape(len(x), -1)
    return shares


@pytest.mark.parametrize("degrees", DEGREES)
def test_a_record_divides_one_unit_exactly(degrees):
    """So it moves all sums together by one unit, whatever it is and however floats are rounded."""
    x = records(len(degrees))
    shares = shares_of(x, degrees)
    assert np.all(shares >= 0)
    assert np.all(shares.sum(axis=1) == WHOLE)
    clipped = np.where(np.isfinite(x).all(axis=1, keepdims=True), np.clip(x, -1, 1), 0)
    error = np.abs(shares - WHOLE * polynomials(clipped.astype(float), degrees)).max()
    assert error <= 385 * sum(degrees)  # What the query states as its rounding.


@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
def test_no_record_moves_the_sums_further_and_corners_move_them_as_far(relation):
    degrees = (2, 1)
    query = bernstein_query(lambda x: [x], degrees=degrees, capacity=1, in_cube=True)
    total = jax.jit(jax.vmap(lambda x: query.of_present(x[None], jnp.ones(1, bool))))
    values = np.asarray(total(jnp.asarray(records(2, n=200))), np.int64)
    pairs = values[:, None] - values[None] if relation is REPLACE else values[:, None]
    for norm, order in ORDS.items():
        moved = np.linalg.norm(pairs, order, axis=-1).max()
        reach = query.sensitivity(norm, relation=relation).value
        assert 0.999 * reach <= moved <= reach


@pytest.mark.parametrize("degrees", [(2, 2), (2, 1), (2, 2, 2, 1)])
def test_moments_are_combinations_of_the_sums(degrees):
    """Within the stated rounding, also of vectors in a ball, and of any number of slots."""
    x = np.random.default_rng(0).uniform(-0.5, 0.5, (500, len(degrees))).astype(np.float32)
    present = jnp.arange(600) < 500
    for in_cube, capacity in ((True, 600), (True, 10**6), (False, 600)):
        query = bernstein_query(lambda x: [x], degrees=degrees, capacity=capacity, in_cube=in_cube)
        sums = query.of_present(jnp.pad(jnp.asarray(x), ((0, 100), (0, 0))), present)
        exact = polynomials(x.astype(float), degrees).sum(axis=0) / query.unit
        assert np.abs(np.asarray(sums) - exact).max() <= query.rounding
        floats = sums.astype(jnp.float32) * query.unit
        moments = moments_of(floats, None, jnp.float32(1), {"degrees": degrees})
        z = x.astype(float)
        second = z.T @ z / 500
        known = np.outer(degrees, degrees) - np.diag(np.equal(degrees, 1)) > 0
        atol = len(exact) * query.rounding * query.unit / 500 + 1e-6
        np.testing.assert_allclose(moments.mean, z.mean(axis=0), atol=atol)
        np.testing.assert_allclose(np.asarray(moments.second)[known], second[known], atol=atol)
        # A count adds up all cells, and so has the largest noise.
        assert float(moments.noise) == pytest.approx(math.sqrt(len(exact)) / 500, rel=1e-3)


@pytest.mark.parametrize("capacity", [1, 2**14, 10**6, 2**31 - 1])
def test_totals_of_any_number_of_records_fit(capacity):
    query = bernstein_query(lambda x: [x], degrees=(2, 1), capacity=capacity, in_cube=True)
    assert capacity <= 2**30 * query.unit
    assert query.sensitivity("l1", relation=ADD).value >= 1 / query.unit


def deviations(facts, released, x, n_is_public):
    """Those of the error of n times each covariance of x, for released numbers of variance 1."""
    d = x.shape[1]
    i, j = np.triu_indices(1 + d)
    rows = np.zeros((1 + d, 1 + d, released))
    rows[i, j] = rows[j, i] = combinations_of(facts, released)
    first, counted = rows[0, 1:], rows[0, 0] * (not n_is_public)
    mean, covariance = x.mean(axis=0), np.cov(x.T, bias=True).reshape(d, d)
    error = rows[1:, 1:] - mean[:, None, None] * first - mean[:, None] * first[:, None]
    last = np.outer(mean, mean) - covariance + facts.get("center", 0) * np.eye(d)
    return np.linalg.norm(error + last[..., None] * counted, axis=-1)


@pytest.mark.parametrize("in_cube", [True, False], ids=["cube", "ball"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_polynomials_are_released_where_their_noise_is_smaller_by_a_fifth(dims, in_cube):
    """For every covariance of tables in the middle and near a corner, wide and narrow."""
    generator, most = np.random.default_rng(0), 1 if in_cube else dims**-0.5
    tables = [
        most * np.clip(generator.normal(at, spread, (500, dims)), -1, 1)
        for at, spread in itertools.product((0, -0.5, 0.9), (0.01, 0.3, 5))
    ]
    for relation, by in itertools.product((ADD, REPLACE), (None, {"g": [0, 1]})):
        errors = []
        for facts in ({"center": CENTER * in_cube}, {"degrees": [2] * dims}):
            query = moments_query(lambda x: x, facts, dims=dims, capacity=1, in_cube=in_cube)
            reach = integers_by(query, by).in_units_of_records("l1", relation)
            public = relation is REPLACE and by is None
            (released,) = query.shape
            errors.append([reach * deviations(facts, released, x, public) for x in tables])
        separate, together = np.array(errors)
        chosen = sums_of_moments(dims, relation, by, in_cube=in_cube)
        assert (np.min(separate / together) > 1.2) == ("degrees" in chosen), (relation, by)
    assert "center" in sums_of_moments(dims, ADD, None, in_cube=in_cube, delta=1e-6)


def test_a_replaced_record_changes_sizes_of_several_groups():
    """Then a count is noisy, and averages and variances are computed from sums of polynomials."""
    assert sizes_differ(ADD, None)
    assert sizes_differ(REPLACE, {"g": [0], "h": [1, 2]})
    assert not sizes_differ(REPLACE, None)
    assert not sizes_differ(REPLACE, {"g": [0]})


def test_quantiles_of_many_weights_are_those_of_few():
    """To 1%, and at least the exact ones, which are below those for weights 1% apart."""
    few = np.stack([np.geomspace(0.3, 1, 4), np.array([0.25, 0.5, 0.75, 1])])
    many = np.append(few, np.zeros((2, 23)), axis=-1)
    for tail in (0.9, 0.5, 0.05, 1e-3, 1e-5):
        exact, found = _laplace_sum(few, tail), _laplace_sum_of_many(many, tail)
        assert np.all((found >= 0.9999 * exact) & (found <= 1.011 * exact)), tail
    # The sum of 27 is nearly normal, with variance 2 * 27.
    assert abs(_laplace_sum_of_many(np.ones(27), 0.05) / (1.96 * 54**0.5) - 1) < 0.02
