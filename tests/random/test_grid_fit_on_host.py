"""The grid of known numbers, which NumPy finds, is the one that a program finds, bit for bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.random import GAUSSIAN, LAPLACE
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import EXPONENTIAL

NUMBERS = itertools.product((2.0**-30, 0.3, 7e9), (1e-9, 1.7, 3e8), (1e-7, 0.1, 40.0), (0, 3.7))
LATTICES = (LAPLACE.lattice, GAUSSIAN.lattice, EXPONENTIAL)


def test_the_host_finds_the_grid_of_the_device():
    """Beyond the ordinary numbers the device decides: it flushes what underflows to 0."""
    extremes = [(1e-43, 1e-43, 1.0, 1.0), (3e38, 1e-38, 1.0, 1.0)]
    for number, (scale, sensitivity, epsilon, rounding) in enumerate([*NUMBERS, *extremes]):
        known = Calibration(scale, sensitivity, epsilon, rounding, 3)
        lattice = LATTICES[number % 3]
        with jax.debug_nans(False):
            for dtype in (np.float32, np.int32):
                found = known.fit(lattice, dtype)
                device = known._fit(lattice, dtype, None, jnp)
                for one, other in zip(found, device, strict=True):
                    np.testing.assert_array_equal(one, other)
                    assert one.dtype == other.dtype
