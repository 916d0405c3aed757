"""Quantiles against sorting, exactly, and their bound."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets

LEVELS = ["0.001", "0.1", "0.3", "0.5", "0.7", "0.9", "0.999"]


def by_sorting(x, level, lower, upper):
    x = np.sort(np.clip(np.where(np.isnan(x), lower, x), lower, upper))
    return x[math.ceil(Fraction(level) * len(x)) - 1]


@pytest.mark.parametrize("n", [1, 2, 10, 101])
def test_it_is_the_order_statistic(n):
    generator = np.random.default_rng(n)
    # Of both signs, with ties, and beyond the bounds.
    x = generator.integers(-8, 9, size=(20, n)).astype("float32") / 2
    x[generator.uniform(size=x.shape) < 0.05] = np.nan

    @jax.jit
    def select(databases):
        return [
            jax.vmap(targets.quantile(probability=float(level), lower=-3, upper=2))(databases)
            for level in LEVELS
        ]

    for level, got in zip(LEVELS, select(jnp.asarray(x)), strict=True):
        np.testing.assert_array_equal(got, [by_sorting(row, level, -3, 2) for row in x])


def test_the_level_is_the_decimal_that_it_prints_as():
    # The float 0.1 is above 1/10, so that ceil(0.1 * 10) of the float would be 2.
    x = jnp.arange(10.0)
    smallest = targets.quantile(probability=0.1, lower=-5, upper=20)
    assert Fraction(0.1) > Fraction("0.1")
    assert smallest(x) == 0
    assert targets.quantile(probability=0.7, lower=-5, upper=20)(x) == 6


def test_float64_is_selected_to_the_last_bit(x64):
    x = np.random.default_rng(0).normal(size=99)
    got = targets.quantile(probability=0.5, lower=-1, upper=1)(jnp.asarray(x))
    assert got.dtype == "float64"
    assert got == by_sorting(x, "0.5", -1, 1)


def test_records_that_are_not_finite():
    median = targets.quantile(probability=0.5, lower=-1, upper=4)
    assert median(jnp.array([jnp.nan, jnp.nan, jnp.inf])) == -1
    assert median(jnp.array([jnp.inf, 0.0, jnp.inf])) == 4
    assert median(jnp.array([-jnp.inf, 3.0, jnp.nan])) == -1
    assert median(jnp.array([5, 2, 3])) == 3


@pytest.mark.parametrize("probability", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("n", [1, 9])
def test_bound_is_attained(probability, n):
    k = math.ceil(Fraction(str(probability)) * n)
    target = targets.quantile(probability=probability, lower=-1, upper=3)
    database = jnp.where(jnp.arange(n) < k, -1.0, 3.0)
    moved = target(database.at[0].set(3.0)) - target(database)
    assert moved == target.sensitivity("l1").value == target.sensitivity("linf").value == 4


def test_bound_covers_ends_that_float32_cannot_hold():
    target = targets.quantile(probability=0.5, lower=0.1, upper=0.3)
    low, high = (float(target(jnp.array([x]))) for x in (-9.0, 9.0))
    bound = target.sensitivity("l1").value
    assert Fraction(high) - Fraction(low) <= Fraction(0.3) - Fraction(0.1) <= Fraction(bound)
    assert float(np.float32(0.3)) - float(np.float32(0.1)) > bound  # Were they rounded to nearest


@pytest.mark.slow
def test_sampled_sensitivity_is_far_below_the_bound(key):
    def oracle(key, n):
        return jax.random.uniform(key, (n,))

    median = targets.quantile(probability=0.5, lower=0, upper=1)
    sensitivity = dpjax.sample_sensitivity(key, median, oracle, n=101, norm="l1", gamma=0.05)
    # A spacing of 102 on the unit interval, exponential in the limit, or nothing.
    assert 0.01 < sensitivity.value < 0.05
    private = dpjax.privatize(median, dpjax.laplace(sensitivity, 1.0))
    assert np.isfinite(private(key, np.full(101, np.nan, "float32")).value)


def test_bad_parameters_are_refused():
    for probability in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(ValueError, match="probability"):
            targets.quantile(probability=probability, lower=0, upper=1)
    with pytest.raises(TypeError, match="probability"):
        jax.vmap(lambda p: targets.quantile(probability=p, lower=0, upper=1)(jnp.ones(3)))(
            jnp.array([0.5])
        )
    with pytest.raises(ValueError, match="lower must be below upper"):
        targets.quantile(probability=0.5, lower=1, upper=0)
    with pytest.raises(ValueError, match="shape"):
        targets.quantile(probability=0.5, lower=0, upper=1)(jnp.ones((2, 3)))
