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
    assert ax.get_legend().get_title().get_text() == ("norm: median and 25% to 75% of 3 repeats")


def test_dimensions_have_any_name(sweep, ax):
    utility(sweep, x="repeat", repeat="epsilon", curve="norm", ax=ax)
    line, _ = ax.get_lines()
    np.testing.assert_allclose(line.get_ydata(), np.median(sweep.values[:, :, 0], axis=0))
    assert ax.get_xlabel() == "repeat"
    assert ax.get_xscale() == "linear"  # It begins at 0.


def test_results_of_xarray_are_drawn(sweep, ax):
    xarray = pytest.importorskip("xarray")
    names = xarray.DataArray(np.ones((2, 3)), {"epsilon": ["a", "b"]}, ("epsilon", "repeat"))
    with pytest.raises(ValueError, match="the coordinates of 'epsilon' must be numbers"):
        utility(names, ax=ax)
    with pytest.raises(ValueError, match="must not be empty"):
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
        ({"data": sweep, "quantiles": (0.9, 0.1)}, "quantiles must be a lower and an upper end"),
    ):
        with pytest.raises(ValueError, match=message):
            utility(**arguments, ax=ax)


def grid(sweep, **coordinates):
    """The sweep for two sizes, as a data array of xarray."""
    xarray = pytest.importorskip("xarray")
    values = np.stack([sweep.values, 10 * sweep.values])
    coordinates = {**sweep.coords, "n": [30, 300], **coordinates}
    return xarray.DataArray(values, coordinates, ("n", *sweep.dims), "error", {"units": "%"})


def test_a_grid_has_a_panel_for_each_entry_and_one_legend(sweep):
    panels = utility(grid(sweep), col="norm", row="n")
    assert panels.shape == (2, 2)
    for i, row in enumerate(panels):
        for j, panel in enumerate(row):
            (line,) = panel.get_lines()
            expected = np.median([1, 10][i] * sweep.values[:, :, j], axis=1)[[1, 2, 3, 0]]
            np.testing.assert_allclose(line.get_ydata(), expected)
            assert panel.get_legend() is None
    figure = panels[0, 0].figure
    assert [panel.get_title() for panel in panels[0]] == ["norm = sampled", "norm = global"]
    assert [panel.texts[0].get_text() for panel in panels[:, 1]] == ["n = 30", "n = 300"]
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("epsilon", "error [%]")
    assert len(figure.legends) == 1
    assert utility(grid(sweep), col="n").shape == (1, 2)
    assert utility(grid(sweep), row="n", legend=False)[0, 0].figure.legends == []
    with pytest.raises(ValueError, match="ax must be None for a grid"):
        utility(grid(sweep), col="n", ax=panels[0, 0])


def boxes(figure, artists):
    figure.canvas.draw()
    return [artist.get_window_extent() for artist in artists]


@pytest.mark.parametrize("title", ["", "n = 30"])
@pytest.mark.parametrize("width", [2.0, 8.0])
def test_a_legend_is_no_wider_than_its_axes_and_covers_nothing(sweep, width, title):
    figure = pytest.importorskip("matplotlib.figure").Figure((3 * width, 3))
    for ax in figure.subplots(1, 3):
        ax.set_title(title)
        long = sweep.coords | {"norm": ["a mechanism with a long name", "one with a longer name"]}
        sweep.coords = long
        utility(sweep, ax=ax)
        box, legend, heading = boxes(figure, (ax, ax.get_legend(), ax.title))
        assert legend.width < 1.05 * box.width
        assert legend.y0 >= box.y1
        assert not title or legend.y0 >= heading.y1


def test_a_panel_can_do_without_a_legend(sweep, ax):
    utility(sweep, legend=False, ax=ax)
    assert ax.get_legend() is None


def test_curves_under_several_relations_are_told_apart(sweep):
    one, other = "replace-one", "add-or-remove-one"
    panels = utility(grid(sweep, relation=("norm", [one, other])), col="n")
    labels = [line.get_label() for line in panels[0, 0].get_lines()]
    assert labels == [f"sampled ({one})", f"global ({other})"]
    panels = utility(grid(sweep, relation=("n", [one, other])), row="norm", col="n")
    assert [x.get_title() for x in panels[0]] == [f"n = 30 ({one})", f"n = 300 ({other})"]
    panels = utility(grid(sweep, relation=("n", [one, one])), col="n")
    assert panels[0, 0].get_title() == "n = 30"
    mixed = grid(sweep, relation=(("n", "norm"), [[one, other], [other, one]]))
    with pytest.raises(ValueError, match="one neighboring relation in each row"):
        utility(mixed, col="n")
    with pytest.raises(ValueError, match="one neighboring relation in each row"):
        utility(grid(sweep, relation=("epsilon", [one, one, one, other])), col="n")
    assert utility(mixed.sel(n=30)).get_lines()[1].get_label() == f"global ({other})"
