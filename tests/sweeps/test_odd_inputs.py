"""Axes of sweeps under the inputs of tests/odd_inputs.py."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax.random import seeded_key

WHOLE = np.asarray([1.0, 2.0, 0.0])


def swept(axis):
    found = dpjax.sweep(seeded_key(1), lambda key, x: jnp.float32(2) * x, traced={"x": axis})
    (numbers,) = found.values()
    return np.asarray(numbers).ravel()


def gridded(distances):
    return dpjax.sensitivity_grid(distances, gammas=[0.5], confidences=[0.5], choices=1)[
        "sensitivity"
    ]


def test_axes_that_hide_something_are_refused():
    odds = [odd for odd in odd_inputs.hiding(WHOLE) if odd.name != "empty"]
    odd_inputs.assert_refused(swept, odds, "x")


def test_distances_that_hide_something_are_refused():
    odd_inputs.assert_refused(gridded, odd_inputs.hiding(WHOLE), "distances|PRNGKey")


@pytest.mark.slow
def test_axes_of_any_dtype_are_the_same_numbers():
    odds = odd_inputs.written_otherwise(WHOLE)
    odd_inputs.assert_right(swept, odds, "x", lambda x: 2 * x)
