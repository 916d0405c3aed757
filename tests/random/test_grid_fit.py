"""The grid of known numbers, which one program finds, is the one that every program finds."""

import functools
import itertools

import jax
import numpy as np

from dpjax.random import GAUSSIAN, LAPLACE
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import EXPONENTIAL

NUMBERS = itertools.product((2.0**-30, 0.3, 7e9), (1e-9, 1.7, 3e8), (1e-7, 0.1, 40.0), (0, 3.7))
LATTICES = (LAPLACE.lattice, GAUSSIAN.lattice, EXPONENTIAL)


def test_the_grid_of_known_numbers_is_that_of_a_program():
    extremes = [(1e-43, 1e-43, 1.0, 1.0), (3e38, 1e-38, 1.0, 1.0)]
    for number, (scale, sensitivity, epsilon, rounding) in enumerate([*NUMBERS, *extremes]):
        known = Calibration(scale, sensitivity, epsilon, rounding, 3)
        lattice = LATTICES[number % 3]
        with jax.debug_nans(False):
            for dtype in (np.float32, np.int32):
                found = known.fit(lattice, dtype)
                inside = _grids(known, dtype)[number % 3]
                for one, other in zip(found, inside, strict=True):
                    np.testing.assert_array_equal(one, other)
                    assert one.dtype == other.dtype


@functools.partial(jax.jit, static_argnames="dtype")
def _grids(known, dtype):
    return [known.fit(lattice, dtype) for lattice in LATTICES]
