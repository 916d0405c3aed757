"""Targets, released by `privatize`, under the inputs of tests/odd_inputs.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax import targets
from dpjax.random import seeded_key

KEY = seeded_key(12)
WHOLE = np.asarray([1.0, 0.0, 3.0, 1.0, 7.0, 2.0, 1.0, 1.0])
UNIT = np.asarray([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
# Noise is below 10^-3 but for once in e^100 keys.
SHARP = 1e5


def released(target, wrap=lambda x: x):
    mechanism = dpjax.laplace(dpjax.assume_sensitivity(1.0, norm="l1"), SHARP)
    return lambda array: dpjax.privatize(target, mechanism)(KEY, wrap(array)).value


def clipped(x):
    return np.clip(np.where(np.isnan(x), 0.0, x), 0.0, 8.0)


def labeled(array):
    return {"x": array, "y": np.asarray(UNIT, "float32")}


BOUNDS = {"lower": 0.0, "upper": 8.0}
TABLE = {
    "mean": (released(targets.summable(lambda x: x, average=True)), WHOLE, np.mean),
    "bounded_mean": (
        released(targets.bounded_mean(**BOUNDS)),
        WHOLE,
        lambda x: np.mean(clipped(x)),
    ),
    "moments": (released(targets.moments(order=2, **BOUNDS)), WHOLE, None),
    "quantile": (
        released(targets.quantile(probability=0.5, **BOUNDS)),
        WHOLE,
        lambda x: np.sort(clipped(x))[len(x) // 2 - 1],
    ),
    "one's own": (released(lambda x: jnp.sum(jnp.minimum(x.astype("float32"), 8.0))), WHOLE, None),
}
every = pytest.mark.parametrize("name", TABLE)
NAMES = "database|records"


@every
def test_what_hides_something_is_refused(name):
    entry, plain, _ = TABLE[name]
    odd_inputs.assert_refused(entry, odd_inputs.hiding_in_columns(plain), NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@every
def test_the_same_numbers_give_the_same_answer(name, x64):
    entry, plain, reference = TABLE[name]
    with jax.enable_x64(x64):
        odds = odd_inputs.written_otherwise(plain)
        odd_inputs.assert_right(entry, odds, NAMES, reference, tolerance=1e-2)


@pytest.mark.slow
@every
def test_no_number_of_a_private_record_is_refused(name):
    entry, plain, reference = TABLE[name]
    if name == "mean":  # Has no bounds: what is not finite is the mechanism's to replace.
        reference = None
    odds = odd_inputs.strange_numbers(plain)
    odd_inputs.assert_released(entry, odds, reference, tolerance=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bounded_mean", "quantile"])
def test_wide_integers_never_wrap(name):
    entry, plain, reference = TABLE[name]
    odds = odd_inputs.wide_numbers(plain)
    odd_inputs.assert_released(entry, odds, reference, tolerance=1e-2)
