"""Sampling under the inputs of tests/odd_inputs.py: what oracles draw, targets return, keys are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax.random import seeded_key

KEY = seeded_key(14)
SMALL = {"n": 8, "norm": "l1", "gamma": 0.5}
WHOLE = np.arange(4.0)


def sampled(target, oracle, key=KEY, **arguments):
    return dpjax.sample_sensitivity(key, target, oracle, **(SMALL | arguments)).value


def integers(key, n):
    return jax.random.randint(key, (n,), 0, 8)


@pytest.mark.parametrize("dtype", ["complex64", "key<fry>"])
def test_targets_that_return_no_real_numbers_are_refused(dtype):
    def target(database):
        if dtype == "complex64":
            return jax.lax.complex(jnp.float32(1), jnp.sum(database).astype("float32"))
        return jax.random.key(jnp.sum(database))

    with pytest.raises(TypeError, match=r"target|value"):
        sampled(target, integers)


def test_oracles_that_draw_no_real_numbers_are_refused():
    with pytest.raises(TypeError, match=r"oracle|records"):
        sampled(
            lambda x: jnp.sum(jnp.abs(x)), lambda key, n: jax.random.normal(key, (n,), "complex64")
        )


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "float16", "bfloat16"])
def test_the_sensitivity_of_a_sum_is_that_of_its_records(dtype, wide):
    """Differences of unsigned integers do not wrap: records of 0 to 7 move a sum by 7 at most."""
    with jax.enable_x64(wide):
        found = sampled(jnp.sum, lambda key, n: integers(key, n).astype(dtype), m=60, gamma=None)
        assert 0 < float(found) <= 7 * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int32"])
def test_distances_of_integers_do_not_wrap(dtype):
    """The target is the largest and the least integer of its dtype, by one record."""
    ends = jnp.iinfo(dtype)
    found = sampled(
        lambda x: jnp.where(jnp.all(x), jnp.asarray(ends.min, dtype), jnp.asarray(ends.max, dtype)),
        lambda key, n: jax.random.bernoulli(key, 0.9, (n,)),
        norm="linf",
        m=200,
        gamma=None,
    )
    assert float(found) >= float(ends.max) - float(ends.min)


@pytest.mark.parametrize(
    ("strange", "positions", "message"),
    [(jnp.nan, "last", r"order|finite"), (jnp.inf, "each", "finite")],
    ids=["nan", "inf"],
)
def test_targets_that_are_not_finite_have_no_sensitivity(strange, positions, message):
    """It depends on one record, so half of all pairs show it: no key misses it in 2^40."""

    def target(database):
        return jnp.where(database[-1] < 4, strange, 0.0)

    with pytest.raises(ValueError, match=message):
        sampled(target, integers, positions=positions)


def test_keys_of_others_are_refused():
    for name, key in odd_inputs.every_key():
        if name not in ("threefry2x32", "chacha20"):
            with pytest.raises((TypeError, ValueError), match=r"^key "):
                sampled(jnp.sum, integers, key)


def test_numbers_that_are_none_are_refused():
    for value in [*odd_inputs.NO_NUMBERS, *odd_inputs.NO_PARAMETERS]:
        with pytest.raises((TypeError, ValueError), match="value must"):
            dpjax.assume_sensitivity(value, norm="l1")


def test_distances_that_hide_something_have_no_order_statistic():
    odds = [odd for odd in odd_inputs.hiding(WHOLE) if odd.name != "keys"]
    odd_inputs.assert_refused(lambda x: dpjax.order_statistic(x, 2), odds, "distances")
