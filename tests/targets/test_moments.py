"""Means and moments against NumPy, and their bounds."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets

NORMS = {"l1": 1, "l2": 2, "linf": np.inf}
norms = pytest.mark.parametrize("norm", NORMS)


def numbers(seed, shape=(50,)):
    return np.random.default_rng(seed).normal(scale=3, size=shape).astype("float32")


def test_mean_of_a_pytree():
    records = {"age": numbers(0), "scan": numbers(1, (50, 2, 3)), "ill": numbers(2) > 0}
    target = targets.bounded_mean(lower=-20, upper=20, dims=8)
    average = target(jax.tree.map(jnp.asarray, records))
    for name, x in records.items():
        np.testing.assert_allclose(average[name], x.mean(axis=0), atol=1e-5)
        assert average[name].dtype == "float32"


def test_bounded_mean_clamps_every_coordinate():
    x = numbers(3, (50, 4))
    got = targets.bounded_mean(lower=-1, upper=2.5, dims=4)(jnp.asarray(x))
    np.testing.assert_allclose(got, np.clip(x, -1, 2.5).mean(axis=0), atol=1e-6)


def test_bounded_mean_of_records_that_are_not_finite():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 2.0])
    assert targets.bounded_mean(lower=1, upper=5)(x) == (1 + 5 + 1 + 2) / 4


@norms
@pytest.mark.parametrize(("n", "d"), [(1, 1), (7, 3)])
def test_bounded_mean_bound_is_attained(norm, n, d, x64):
    lower, upper = -0.1, 0.7
    target = targets.bounded_mean(lower=lower, upper=upper, dims=d)
    database = jnp.full((n, d), lower)
    moved = np.asarray(target(database.at[0].set(upper)) - target(database))
    bound = target.sensitivity(norm, n=n, dtype="float64").value
    assert np.linalg.norm(moved, NORMS[norm]) == pytest.approx(bound, rel=1e-12)


@pytest.mark.usefixtures("x64")
def test_bounded_mean_bound_is_rounded_up():
    target = targets.bounded_mean(lower=0.1, upper=0.3, dims=7)
    bound = target.sensitivity("l1", n=3, dtype="float64").value
    exact = 7 * (Fraction(0.3) - Fraction(0.1)) / 3
    assert exact <= Fraction(bound) < exact * (1 + Fraction(1, 10**14))


def test_moments_are_the_formula():
    x = numbers(4)
    got = targets.moments(order=4, lower=-2, upper=3)(jnp.asarray(x))
    clamped = np.clip(x.astype(float), -2, 3)
    np.testing.assert_allclose(got, [np.mean(clamped**j) for j in range(1, 5)], rtol=1e-5)


def test_the_first_moment_is_the_bounded_mean():
    # Two programs: in sums of quarters, divided by 64, neither has a rounding.
    x = jnp.arange(-32, 32) / 4
    first = targets.moments(order=1, lower=-2, upper=3)(x)
    np.testing.assert_array_equal(first, targets.bounded_mean(lower=-2, upper=3)(x)[None])


@norms
@pytest.mark.parametrize(
    ("lower", "upper", "tight"),
    [(0, 2, True), (1, 3, True), (-3, -1, True), (-2, 0, True), (-1, 2, False), (-3, 0.5, False)],
)
@pytest.mark.usefixtures("x64")
def test_moments_bound_is_the_worst_of_all_pairs(norm, lower, upper, tight):
    order, n = 5, 4
    grid = [float(x) for x in np.linspace(lower, upper, 29)]
    powers = [np.array([x**j for j in range(1, order + 1)]) / n for x in (*grid, 0.0)]
    powers = powers if lower < 0 < upper else powers[:-1]
    worst = max(np.linalg.norm(x - y, NORMS[norm]) for x, y in itertools.combinations(powers, 2))
    target = targets.moments(order=order, lower=lower, upper=upper)
    bound = target.sensitivity(norm, n=n, dtype="float64").value
    assert worst <= bound * (1 + 1e-12)
    if tight or norm == "linf":
        assert worst == pytest.approx(bound, rel=1e-12)


def test_target_moves_by_no_more_than_the_moments_bound(key):
    def oracle(key, n):
        return 4 * jax.random.normal(key, (n,))

    target = targets.moments(order=3, lower=-2, upper=3)
    distances = dpjax.sample_distances(key, target, oracle, n=10, norm="l1", m=1000)
    bound = target.sensitivity("l1", n=10).value
    assert 0.8 * bound < np.max(distances) <= bound * (1 + 1e-5)


def test_sampled_bounded_mean_is_within_its_bound(key):
    def oracle(key, n):
        return jax.random.uniform(key, (n, 2))

    target = targets.bounded_mean(lower=0, upper=1, dims=2)
    sampled = dpjax.sample_sensitivity(key, target, oracle, n=20, norm="l2", gamma=0.05)
    bound = target.sensitivity("l2", n=20).value
    assert 0.3 * bound < sampled.value < bound
    private = dpjax.privatize(target, dpjax.gaussian(sampled, 1.0, 1e-5))
    assert private(key, np.full((20, 2), np.nan, "float32")).value.shape == (2,)


def test_powers_that_overflow_are_refused():
    bounds = {"order": 8, "lower": 0, "upper": 1e5}
    for refused in (
        lambda: targets.moments(**bounds)(jnp.ones(3)),
        lambda: targets.moments(**bounds).sensitivity("l1", n=10**5),
    ):
        with pytest.raises(
            ValueError, match=r"order must be lower.*100000\^8 is too large for float32.* float64"
        ):
            refused()
    exact = Fraction(10) ** 40 / 10**5
    with jax.enable_x64(True):
        wide = targets.moments(**bounds).sensitivity("linf", n=10**5, dtype="float64")
        assert wide.value >= exact


def test_large_numbers_do_not_overflow():
    n, top = 1000, 1e38
    target = targets.bounded_mean(lower=0, upper=top)
    database = jnp.full(n, 3e38)
    moved = float(target(database)) - float(target(database.at[0].set(0)))
    bound = target.sensitivity("l1", n=n).value
    assert 0.99 * top / n < moved <= bound < 1.001 * top / n
    assert float(targets.bounded_mean(lower=0, upper=1e300)(database)) == pytest.approx(3e38)


def test_the_order_of_many_records_never_counts():
    """A float32 sum of these would move by more than a record adds to it."""
    n = 3 * 10**5
    x = np.random.default_rng(0).uniform(size=n).astype("float32")
    target = jax.jit(targets.bounded_mean(lower=0, upper=1))
    value = target(jnp.asarray(x))
    assert value == target(jnp.asarray(np.sort(x)))
    assert float(value) == pytest.approx(x.mean(dtype=float), abs=2.5 * 2**-23)


def test_bad_parameters_are_refused():
    for make in (
        lambda **ends: targets.bounded_mean(**ends),
        lambda **ends: targets.moments(order=1, **ends),
    ):
        with pytest.raises(ValueError, match="lower must be below upper"):
            make(lower=1, upper=0)
    with pytest.raises(ValueError, match="n must be"):
        targets.bounded_mean(lower=0, upper=1).sensitivity("l1", n=0)
    with pytest.raises(ValueError, match="dims must be"):
        targets.bounded_mean(lower=0, upper=1, dims=0)
    with pytest.raises(ValueError, match="norm must be"):
        targets.bounded_mean(lower=0, upper=1).sensitivity("l3", n=1)
    with pytest.raises(ValueError, match="order must be"):
        targets.moments(order=0, lower=0, upper=1)
    with pytest.raises(ValueError, match="numbers"):
        targets.moments(order=1, lower=0, upper=1)(jnp.ones((3, 2)))
