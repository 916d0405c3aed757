"""Utility: medians and quantiles over repeats, by the names of dimensions."""

import numpy as np
import pytest

from dpjax.plotting import utility


class Dataset(dict):
    @property
    def data_vars(self):
        return self


def edges(ribbon):
    """The places and the lower and upper ends of a ribbon."""
    x, y = ribbon.get_paths()[0].vertices.T
    return {place: (y[x == place].min(), y[x == place].max()) for place in set(x.tolist())}


def test_medians_and_ribbons(sweep, ax):
    utility(Dataset(error=sweep), quantiles=(0.25, 0.75), ax=ax)
    assert [line.get_label() for line in ax.get_lines()] == ["sampled", "global"]
    for place, (line, ribbon) in enumerate(zip(ax.get_lines(), ax.collections, strict=True)):
        results = sweep.values[:, :, place]
        order = [1, 2, 3, 0]
        assert line.get_xdata().tolist() == [1.0, 2.0, 4.0, 8.0]
        np.testing.assert_allclose(line.get_ydata(), np.median(results, axis=1)[order])
        found = edges(ribbon)
        for epsilon, row in zip(sweep.coords["epsilon"], results, strict=True):
            np.testing.assert_allclose(found[epsilon], np.quantile(row, [0.25, 0.75]))
    assert ax.get_xscale() == "log"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epsilon", "error [%]")
    assert ax.get_legend().get_title().get_text() == (
        "norm: median and quantiles 0.25 to 0.75 of 3 repeats"
    )


def test_dimensions_have_any_name(sweep, ax):
    utility(sweep, x="repeat", repeat="epsilon", curve="norm", ax=ax)
    line, _ = ax.get_lines()
    np.testing.assert_allclose(line.get_ydata(), np.median(sweep.values[:, :, 0], axis=0))
    assert ax.get_xlabel() == "repeat"
    assert ax.get_xscale() == "linear"  # It begins at 0.


def test_results_of_xarray_are_drawn(sweep, ax):
    xarray = pytest.importorskip("xarray")
    names = xarray.DataArray(np.ones((2, 3)), {"epsilon": ["a", "b"]}, ("epsilon", "repeat"))
    with pytest.raises(ValueError, match="numbers along 'epsilon'"):
        utility(names, ax=ax)
    with pytest.raises(ValueError, match="at least one of all dimensions"):
        utility(names.assign_coords(epsilon=[1, 2])[:, :0], ax=ax)
    array = xarray.DataArray(sweep.values, sweep.coords, sweep.dims, "error", {"units": "%"})
    utility(array.to_dataset().sel(norm="global"), ax=ax)
    (line,) = ax.get_lines()
    np.testing.assert_allclose(
        line.get_ydata(), np.median(sweep.values[:, :, 1], axis=1)[[1, 2, 3, 0]]
    )
    assert ax.get_ylabel() == "error [%]"


def test_what_is_not_clear_is_refused(sweep, ax):
    both = Dataset(error=sweep, time=sweep)
    for arguments, message in (
        ({"data": both}, r"variable must be one of \['error', 'time'\]"),
        ({"data": both, "variable": "loss"}, "got 'loss'"),
        ({"data": sweep, "x": "m"}, "data must have dimensions .*'m'"),
        ({"data": sweep, "curve": "epsilon"}, "data must have dimensions"),
        ({"data": sweep, "quantiles": (0.9, 0.1)}, "quantiles must be lower and upper end"),
    ):
        with pytest.raises(ValueError, match=message):
            utility(**arguments, ax=ax)
