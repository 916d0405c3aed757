"""The bound of a pair from two records: against true fits, and where it is false."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import dpjax
from dpjax._tracing._programs import Program
from dpjax.sensitivity._record_bound import _lengths

STRENGTH, N = 0.1, 40
FIT = dpjax.targets.logistic_regression(regularization=STRENGTH, dims=3)


def person(key):
    """Features in the unit ball, and a label."""
    key_x, key_y = jax.random.split(key)
    x = jax.random.normal(key_x, (3,))
    return {"x": x / (1 + jnp.linalg.norm(x)), "y": jax.random.bernoulli(key_y).astype(float)}


def row(record):
    return jnp.where(record["y"] > 0, 1.0, -1.0) * record["x"]


PEOPLE = dpjax.oracles.independent(person)


def bound(key, **changed):
    arguments = {"row": row, "regularization": STRENGTH, "residual": 1e-5, "n": N, "gamma": 0.05}
    return dpjax.record_bound(key, FIT, PEOPLE, **(arguments | changed))


@pytest.fixture
def longest():
    """max(||u||, ||v||, ||u - v||) of the pairs of a key, by the definition."""

    def compute(key, count, n, row=row):
        def rows(index):
            return jax.vmap(row)(PEOPLE.at(jax.random.fold_in(key, index), jnp.array([n - 1, n])))

        u, v = np.moveaxis(np.asarray(jax.vmap(rows)(jnp.arange(count)), float), 1, 0)
        return np.max([np.linalg.norm(x, axis=1) for x in (u, v, u - v)], axis=0)

    return compute


@pytest.mark.parametrize("row", [row, lambda record: jnp.abs(row(record))], ids=["any", "alike"])
def test_it_is_the_order_statistic_of_the_definition(row, longest):
    """Also where rows are alike: then one of them is longer than their difference."""
    key = jax.random.key(3)
    found = bound(key, row=row)
    exact = np.sort(longest(key, found.m, N, row))[found.k - 1] / (N * STRENGTH) + 2e-5 / STRENGTH
    assert exact <= found.value <= exact * (1 + 1e-5)
    assert (found.norm, found.n, found.gamma) == ("l2", N, 0.05)
    assert found.identity != bound(jax.random.key(4)).identity


def test_no_fit_moves_further(longest):
    """True distances of the same pairs, which the sampler draws under the same key."""
    key = jax.random.key(3)
    true = dpjax.sample_distances(key, FIT, PEOPLE, n=N, norm="l2", m=200)
    allowed = longest(key, 200, N) / (N * STRENGTH) + 2e-4
    ratio = np.asarray(true) / allowed
    assert ratio.max() <= 1
    assert ratio.max() > 0.4


def test_it_releases_its_target():
    private = dpjax.privatize(FIT, dpjax.gaussian(bound(jax.random.key(3)), 1.0, 1e-5))
    database = PEOPLE(jax.random.key(0), N)
    release = private(dpjax.random.seeded_key(0), database)
    assert (release.guarantee.gamma, release.value.shape) == (0.05, (3,))


def test_a_free_intercept_makes_it_false():
    """A record with features 0 has row 0 under both labels. Its label moves the weight."""
    x, y = np.array([1.0, -1.0, 2.0, 0.0]), np.array([1.0, -1.0, -1.0, 1.0])

    def weight(y):
        def objective(p):
            return np.mean(np.logaddexp(0, -y * (p[0] * x + p[1]))) + STRENGTH / 2 * p[0] ** 2

        return optimize.minimize(objective, np.zeros(2), tol=1e-12).x[0]

    moved = abs(weight(y) - weight(y * [1, 1, 1, -1]))
    assert moved > 0.05
    with pytest.raises(ValueError, match="intercept without a penalty"):
        dpjax.record_bound(
            jax.random.key(0),
            lambda database: jnp.zeros(4) * database["x"].sum(),
            PEOPLE,
            row=row,
            regularization=STRENGTH,
            residual=0.0,
            n=N,
            gamma=0.05,
        )


def test_hinge_loss_keeps_it():
    """One feature, solved on a grid: the largest move of all labels is within the bound."""
    grid = np.linspace(-4, 4, 80_001)
    generator = np.random.default_rng(0)
    for _ in range(20):
        u = generator.uniform(-1, 1, 6)
        v = generator.uniform(-1, 1)
        rows = u, np.append(u[:5], v)
        fits = [
            grid[np.argmin(np.maximum(0, 1 - r[:, None] * grid).mean(0) + 0.2 * grid**2)]
            for r in rows
        ]
        allowed = max(abs(u[5]), abs(v), abs(u[5] - v)) / (6 * 0.4)
        assert abs(fits[0] - fits[1]) <= allowed + 2e-4


def test_odd_arguments_are_refused(key):
    with pytest.raises(TypeError, match="independent records"):
        dpjax.record_bound(
            key,
            FIT,
            lambda key, n: PEOPLE(key, n),
            row=row,
            regularization=0.1,
            residual=0.0,
            n=N,
            gamma=0.05,
        )
    for change in ({"regularization": 0.0}, {"residual": -1.0}, {"residual": math.nan}, {"n": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            bound(key, **change)
    with pytest.raises(ValueError, match="shape"):
        bound(key, row=lambda record: record["y"])
    with pytest.raises(ValueError, match="infinite"):
        bound(key, row=lambda record: record["x"] / 0)


def drawn_by_rbg(record):
    """Under `vmap`, all records get bits of the first one's key."""
    seed = jax.lax.bitcast_convert_type(record["x"][0], jnp.int32)
    return record["x"] * jax.random.uniform(jax.random.key(seed, impl="rbg"))


def test_rows_that_touch_each_other_are_refused(key):
    with pytest.raises(ValueError, match="row must not"):
        bound(key, row=drawn_by_rbg)


@pytest.mark.parametrize(("strength", "n"), [(1e308, 10**6), (1e-320, 1)])
def test_a_bound_that_floats_do_not_hold_is_refused(key, strength, n):
    """Where n times lambda overflows, the bound would be 0."""
    with pytest.raises(ValueError, match="regularization"):
        bound(key, regularization=strength, n=n, residual=0.0)


def test_arguments_that_are_no_functions_are_named(key):
    with pytest.raises(TypeError, match="row must be a function"):
        bound(key, row="x")


@pytest.mark.slow
def test_one_in_a_million_from_the_least_pairs():
    found = bound(jax.random.key(5), gamma=1e-6, m=4_605_168, n=10_000)
    assert (found.m, found.gamma) == (4_605_168, 1e-6)
    assert 1.5 / 1000 < found.value < 2 / 1000 + 3e-4


@pytest.mark.parametrize("dims", [2, 12, 40])
def test_rows_that_are_nan_at_one_place_are_infinitely_long(dims):
    """XLA on a CPU leaves NaN out of a maximum, from some size on."""

    def row(record):
        return record.at[0].set(jnp.log(record[0]))  # NaN for half of all records.

    oracle = dpjax.oracles.independent(lambda key: jax.random.normal(key, (dims,)))
    program = Program.trace("row", row, jax.ShapeDtypeStruct((dims,), jnp.float32))
    lengths = _lengths(jax.random.key(0), oracle, program, 10, 2000)
    assert np.mean(np.isinf(lengths)) == pytest.approx(0.75, abs=0.05)
