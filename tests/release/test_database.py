"""How columns of 64 bits reach the target of a release, without x64.

What else reaches this: queries (tests/queries/test_columns.py), targets of dpjax, functions with a
bare number, with a sampled and with a proved sensitivity; under wrappers, in tables and in slots.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pytest

import dpjax
from dpjax import queries, targets

SMALL, LARGE = np.array([1, 2, 3, 4]), np.array([5_000_000_001, 2, -(2**62), 4])
SHARP = dpjax.laplace(1e-6, 1.0)


def told(private, key, database):
    with pytest.raises(TypeError) as refusal:
        private(key, database)
    return str(refusal.value)


def test_a_function_with_a_bare_number_gets_no_clamped_integers(key):
    """Refused by the dtype alone: whether a private number is large shows nowhere."""
    private = dpjax.privatize(lambda d: jnp.mean(d["cents"]), SHARP)
    refusals = {
        told(private, key, {"cents": numbers, "x": np.ones(4)})
        for numbers in (SMALL, LARGE, pd.Series(SMALL))
    }
    assert len(refusals) == 1
    (refusal,) = refusals
    assert "column 'cents' of database must have a dtype that JAX has without x64" in refusal
    assert "got int64" in refusal
    assert '.astype("float64")' in refusal
    assert "uint64" in told(private, key, {"cents": SMALL.astype("uint64")})
    slots = queries.padded_records({"cents": SMALL}, capacity=4)
    of_slots = dpjax.privatize(lambda d: jnp.mean(d.records["cents"]), SHARP)
    assert "column 'cents'" in told(of_slots, key, slots)
    for remedy in (SMALL.astype("float64"), SMALL.astype("int32"), pl.Series(SMALL)):
        assert private(key, {"cents": remedy}).value == pytest.approx(2.5, abs=1e-3)
    large = private(key, {"cents": np.array([5e9, 0, 0, 0])}).value
    assert large == pytest.approx(1.25e9, rel=1e-6)


def test_with_x64_a_function_gets_all_integers(key, x64):
    private = dpjax.privatize(lambda d: jnp.max(d), SHARP)
    assert private(key, LARGE).value == 5_000_000_001


def test_targets_of_dpjax_get_integers_as_floats(key):
    """The nearest floats, where int32 would end at 2147483647."""
    numbers = np.array([5_000_000_000, 0, -(2**40), 0])
    target = targets.bounded_mean(lower=0, upper=5e9)
    mechanism = dpjax.laplace(target.sensitivity("l1", n=4), 1e9)
    for asked in (target, jax.jit(target)):
        private = dpjax.privatize(asked, mechanism)
        assert private(key, numbers).value == pytest.approx(1.25e9, rel=1e-6)
    codes = targets.encode_text(["Ada", "Bo"], width=3).astype("int64")
    letters = targets.letter_counts(width=3)
    release = dpjax.privatize(letters, dpjax.laplace(letters.sensitivity("l1"), 1e6))(key, codes)
    assert release.value[:5].tolist() == [2, 1, 0, 1, 0]


def test_queries_under_wrappers_get_all_numbers(key):
    query = queries.histogram_query([0, 2.0**31, 4.9e9, 6e9])
    mechanism = dpjax.laplace(query.sensitivity(), 1e6)
    for asked in (query, jax.jit(query), query.__call__):
        release = dpjax.privatize(asked, mechanism)(key, LARGE)
        assert np.asarray(release.value).tolist() == [2, 0, 1]


def sampled(oracle, target, key):
    sensitivity = dpjax.sample_sensitivity(key, target, oracle, n=4, norm="l1", gamma=0.2)
    return dpjax.privatize(target, dpjax.laplace(sensitivity, 1e12))


def test_integers_are_clamped_to_what_the_oracle_can_draw(key):
    """The public model holds no larger ones."""

    def oracle(key, n):
        return jax.random.randint(key, (n,), 0, 1000)

    private = sampled(oracle, lambda d: jnp.sum(d.astype(float)), key)
    limits = np.clip(LARGE, -(2**31), 2**31 - 1)
    assert private(key, LARGE).value == private(key, limits.astype("int32")).value


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "uint64"])
def test_an_oracle_of_floats_takes_whole_numbers(dtype, key):
    """They are cast at once: through int32 the largest would become 2147483647."""
    private = sampled(jax.random.normal, jnp.sum, key)
    numbers = np.array([1, 0, 1, 1]).astype(dtype)
    if dtype.endswith("64"):
        numbers[0] = 5_000_000_000
    expected = private(key, numbers.astype("float32"))
    assert private(key, numbers).value == expected.value
    assert expected.value == pytest.approx(float(numbers.sum()), abs=1e-2)


def test_an_oracle_of_integers_takes_no_floats(key):
    def oracle(key, n):
        return jax.random.randint(key, (n,), 0, 1000)

    private = sampled(oracle, lambda d: jnp.sum(d.astype(float)), key)
    for numbers in (SMALL.astype(float), SMALL.astype("float32"), pl.Series(SMALL)):
        with pytest.raises(TypeError, match=r"database must contain an array of .* dtype int32"):
            private(key, numbers)
