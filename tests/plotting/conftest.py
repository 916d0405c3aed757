"""Axes of figures that no window system knows of, and a sweep without its library."""

import numpy as np
import pytest


class Array:
    """What `utility` uses of an array of xarray's."""

    def __init__(self, dims, values, coords, name, attrs=None):
        self.dims, self.values, self.name = tuple(dims), np.asarray(values), name
        self.coords, self.attrs = coords, attrs or {}

    def __getitem__(self, dim):
        return Array((dim,), self.coords[dim], {}, dim)

    @property
    def sizes(self):
        return dict(zip(self.dims, self.values.shape, strict=True))

    def transpose(self, *dims):
        axes = [self.dims.index(dim) for dim in dims]
        return Array(dims, self.values.transpose(axes), self.coords, self.name, self.attrs)


@pytest.fixture(autouse=True)
def no_figures():
    """Examples of docstrings, run earlier in this process, leave theirs open."""
    pytest.importorskip("matplotlib.pyplot").close("all")


@pytest.fixture
def ax():
    return pytest.importorskip("matplotlib.figure").Figure().subplots()


@pytest.fixture
def sweep():
    """Three dimensions; epsilons in no order, one repeat far off."""
    values = np.arange(24.0).reshape(4, 3, 2)
    coords = {"epsilon": [8.0, 1.0, 2.0, 4.0], "repeat": [0, 1, 2], "norm": ["sampled", "global"]}
    return Array(("epsilon", "repeat", "norm"), values, coords, "error", {"units": "%"})
