"""Neighbors that are as far apart as any within bounds, found by a search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.auditing import adversarial_pair
from dpjax.auditing._adversarial_pair import _BallSearch
from dpjax.proving import Ball

N = 50
NUMBERS = jax.ShapeDtypeStruct((N,), jnp.float32)
# Exact global sensitivities for n = 50 numbers in [0, 1], under replace-one.
KNOWN = {
    "mean": (jnp.mean, 1 / N),
    "variance": (jnp.var, (N - 1) / N**2),
    "standard deviation": (jnp.std, (N - 1) ** 0.5 / N),
    "median": (jnp.median, 0.5),
    "share above": (lambda x: jnp.mean(x > 0.3), 1 / N),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_global_sensitivity_is_found_and_not_exceeded(key, name):
    target, exact = KNOWN[name]
    found = adversarial_pair(key, target, NUMBERS, bounds=(0, 1), norm="l1")
    assert 0.999 * exact <= found.distance <= exact
    assert found.database.min() >= 0
    assert found.database.max() <= 1
    assert np.sum(found.database != found.neighbor) == 1
    apart = abs(target(found.database) - target(found.neighbor))
    assert 0.999 * apart <= found.distance <= apart


def test_integers_are_searched(key):
    """A histogram has no gradient: one count falls and another grows."""
    records = jax.ShapeDtypeStruct((N,), jnp.int32)

    def counts(codes):
        return jnp.zeros(5).at[codes].add(1.0)

    found = adversarial_pair(key, counts, records, bounds=(0, 4), norm="l1", steps=5)
    assert 1.999 < found.distance <= 2
    assert set(np.unique(found.database)) <= set(range(5))


def test_integers_beside_floats_are_searched(key):
    """Floats follow the gradient, and integers change at random."""
    records = {"code": jax.ShapeDtypeStruct((N,), jnp.int32), "x": NUMBERS}
    bounds = {"code": (0, 3), "x": (0, 1)}

    def chosen(database):
        return jnp.sum(jnp.where(database["code"] > 1, database["x"], 0))

    found = adversarial_pair(key, chosen, records, bounds=bounds, norm="l1", steps=5, restarts=8)
    assert 0.99 < found.distance <= 1


def test_records_of_several_arrays_have_bounds_of_their_own(key):
    """A fit by a loop, which has no gradient either, under a proved bound."""
    fit = dpjax.targets.ridge_regression(regularization=0.5, dims=2)
    records = {"x": jnp.ones((6, 2)), "y": jnp.ones(6)}
    bounds = {"x": Ball(1.0), "y": (-1, 1)}
    found = adversarial_pair(key, fit, records, bounds=bounds, norm="l2", steps=50, restarts=16)
    assert np.linalg.norm(found.database["x"], axis=1).max() <= 1
    assert np.abs(found.neighbor["y"]).max() <= 1
    proved = fit.sensitivity("l2", n=6).value
    assert 0.3 * proved < found.distance <= proved


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "share"), [(1.0, 0.5), (0.1, 0.57), (0.01, 0.65)])
def test_logistic_regression_comes_close_to_its_bound(key, strength, share):
    fit = dpjax.targets.logistic_regression(regularization=strength, dims=3)
    records = {"x": jnp.ones((N, 3)), "y": jnp.ones(N)}
    bounds = {"x": Ball(1.0), "y": (0, 1)}
    found = adversarial_pair(key, fit, records, bounds=bounds, norm="l2", steps=1000)
    assert share * 2 / (N * strength) < found.distance <= fit.sensitivity("l2", n=N).value


def test_a_target_that_moves_by_rounding_alone_shows_nothing(key):
    def large(x):
        return 1e4 * (1 + 1e-7 * x[0])

    assert (
        adversarial_pair(
            key, large, NUMBERS, bounds=(0, 1), norm="l1", steps=3, restarts=4
        ).distance
        == 0
    )


@pytest.mark.parametrize(
    ("dtype", "bound", "largest"),
    [("bfloat16", (0.0, 0.3), 0.3), ("float16", Ball(1.0), 1.0), ("uint8", (3, 5), 5)],
)
def test_records_of_narrow_dtypes_stay_within_bounds(key, dtype, bound, largest):
    records = jax.ShapeDtypeStruct((5, 1), dtype)

    def total(x):
        return jnp.sum(x.astype(jnp.float32))

    found = adversarial_pair(key, total, records, bounds=bound, norm="l1", steps=5, restarts=8)
    both = np.concatenate([found.database, found.neighbor]).astype(float)
    assert np.abs(both).max() <= largest
    assert 0 < found.distance <= 2 * largest


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("radius", [0.1, 1.0, 3e4])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_search_reaches_the_ends_of_a_ball_and_stays_within(key, dtype, radius, size):
    """It stayed 3% inside, whatever the dtype, and missed 2% of every sensitivity."""
    ball, eps = _BallSearch(radius), float(jnp.finfo(dtype).eps)
    least = radius * (1 - 3 * eps - (size + 20) * 2.0**-22)
    uniform = jax.random.uniform(key, (50, size))
    outside = (2 * radius * uniform).astype(dtype).at[0].set(radius)
    for records in (ball.extreme(uniform, dtype), ball.projected(outside)):
        assert records.dtype == dtype
        lengths = np.linalg.norm(np.asarray(records, np.float64), axis=1)
        assert lengths.max() <= radius
        assert lengths.max() >= least


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("int8", (0, 200)), ("uint8", (-5, 5)), ("float16", (0, 1e5)), ("float16", Ball(1e-7))],
)
def test_bounds_beyond_a_dtype_are_refused(key, dtype, bound):
    records = jax.ShapeDtypeStruct((5,), dtype)
    with pytest.raises(ValueError, match=f"bounds .*{dtype}"):
        adversarial_pair(key, jnp.max, records, bounds=bound, norm="l1", steps=1)


def test_a_target_without_a_gradient_is_searched_too(key):
    """As many steps of a loop as the records say: the ends of the bounds are tried."""

    def total(x):
        steps = len(x) + jnp.sum(x > 2, dtype=int)
        return jax.lax.fori_loop(0, steps, lambda i, found: found + x[i], 0.0)

    found = adversarial_pair(key, total, NUMBERS, bounds=(0, 1), norm="l1", steps=2, restarts=4)
    assert 0.9 < found.distance <= 1.001


def test_a_value_that_is_no_number_shows_nothing(key):
    def nan(x):
        return jnp.sum(x) * jnp.nan

    assert (
        adversarial_pair(key, nan, NUMBERS, bounds=(0, 1), norm="l1", steps=3, restarts=4).distance
        == 0
    )


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((1, 0), "low < high"),
        ((0, np.nan), "bounds must be"),
        ((0, 1, 2), "pairs"),
        ({"x": (0, 1)}, "like the records"),
    ],
)
def test_bounds_fit_to_the_records(key, bounds, message):
    with pytest.raises(ValueError, match=message):
        adversarial_pair(key, jnp.mean, NUMBERS, bounds=bounds, norm="l1")


def test_records_have_one_leading_axis(key):
    scalars = jax.ShapeDtypeStruct((), jnp.float32)
    with pytest.raises(ValueError, match="common leading axis"):
        adversarial_pair(key, jnp.mean, scalars, bounds=(0, 1), norm="l1")
    codes = jax.ShapeDtypeStruct((N,), jnp.int32)
    with pytest.raises(ValueError, match="a Ball only for float records"):
        adversarial_pair(key, jnp.mean, codes, bounds=Ball(1.0), norm="l1")
