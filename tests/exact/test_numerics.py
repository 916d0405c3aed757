"""Rounding outward and log-space arithmetic, against exact rationals and mpmath."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax._exact._numerics import (
    compute_dtype,
    count_below,
    legendre_rule,
    log_difference,
    round_up,
    sum_up,
)


@given(st.fractions(min_value=-(10**9), max_value=10**9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_round_up_is_the_least_float_not_below(exact):
    rounded = round_up(exact)
    assert Fraction(rounded) >= exact > Fraction(math.nextafter(rounded, -math.inf))


@given(st.lists(st.floats(-1e6, 1e6), max_size=8))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_sum_up_is_the_exact_sum_rounded_up(terms):
    assert sum_up(terms) == round_up(sum(map(Fraction, terms), Fraction(0)))


def test_sum_up_passes_on_what_is_not_finite():
    assert sum_up([1.0, math.inf]) == math.inf
    assert math.isnan(sum_up([1.0, math.nan]))


@pytest.mark.parametrize("larger", [0.0, -0.1, -50.0, 3.0])
@pytest.mark.parametrize("gap", [1e-6, 0.01, 1.0, 30.0, 200.0])
def test_log_difference(larger, gap, x64):
    smaller = larger - gap
    with mpmath.workdps(50):
        exact = mpmath.log(mpmath.exp(mpmath.mpf(larger)) - mpmath.exp(mpmath.mpf(smaller)))
    found = log_difference(jnp.asarray(larger), jnp.asarray(smaller))
    assert float(found) == pytest.approx(float(exact), rel=1e-9, abs=1e-9)


def test_log_difference_at_the_ends():
    assert float(log_difference(jnp.float32(-2.0), jnp.float32(-np.inf))) == -2.0
    assert float(log_difference(jnp.float32(-2.0), jnp.float32(-2.0))) == -np.inf
    assert float(log_difference(jnp.float32(-np.inf), jnp.float32(-np.inf))) == -np.inf


def test_compute_dtype_is_at_least_float32():
    narrow = ("bfloat16", "float16", "float32", "int8", "int32", "uint32", "bool")
    assert {compute_dtype(jnp.dtype(name)) for name in narrow} == {np.dtype("float32")}


def test_compute_dtype_in_float64(x64):
    assert compute_dtype(jnp.dtype("bfloat16")) == np.dtype("float32")
    for name in ("float64", "int32", "int64", "bool"):
        assert compute_dtype(jnp.dtype(name)) == np.dtype("float64")


def test_legendre_rule_integrates_polynomials():
    nodes, log_weights = legendre_rule(5)
    assert np.sum(np.exp(log_weights) * nodes**8) == pytest.approx(2 / 9, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint32"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 250, 1023, 1024])
def test_counts_below_are_those_of_numpy(count, dtype):
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(count)
        ascending = np.sort(rng.integers(0, 50, count)).astype(dtype)  # Many are equal.
        numbers = np.concatenate([rng.integers(0, 52, 99), ascending]).astype(dtype)
        for or_equal, side in ((False, "left"), (True, "right")):
            found = functools.partial(count_below, jnp.asarray(ascending), or_equal=or_equal)
            expected = np.searchsorted(ascending, numbers, side)
            np.testing.assert_array_equal(found(numbers), expected)
            np.testing.assert_array_equal(jax.vmap(found)(numbers), expected)


def test_infinite_numbers_and_nan_have_a_place():
    ascending = jnp.array([-jnp.inf, -1.0, 0.0, 2.0, jnp.inf])
    numbers = jnp.array([-jnp.inf, -0.0, 0.0, jnp.inf, jnp.nan])
    assert count_below(ascending, numbers).tolist() == [0, 2, 2, 4, 0]
    assert count_below(ascending, numbers, or_equal=True).tolist() == [1, 3, 3, 5, 0]


def test_counts_below_are_found_on_every_shard():
    """Whichever of the two varies over shards."""
    mesh, spread = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)), jax.P("x")
    ascending, numbers = jnp.arange(4.0), jnp.array([1.5, 9.0])
    for specs in ((spread, jax.P()), (jax.P(), spread), (spread, spread)):
        found = jax.shard_map(count_below, mesh=mesh, in_specs=specs, out_specs=spread)
        assert found(ascending, numbers).tolist() == [2, 4]
