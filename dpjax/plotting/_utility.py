"""Plots of utility: for sweeps, rehearsed releases, and weighted majority."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax._core import _checks
from dpjax.learning._weighted_majority import private_weighted_majority, regret_bound
from dpjax.plotting._axes import axes_or_new, ink, legend_above, legend_within, style, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataArray, Dataset


_PANEL = (2.1, 1.7)  # Width and height of a panel in inches.


def utility(
    data: "Dataset | DataArray",
    *,
    variable: str | None = None,
    x: str = "epsilon",
    repeat: str = "repeat",
    curve: str | None = None,
    col: str | None = None,
    row: str | None = None,
    quantiles: tuple[float, float] = (0.05, 0.95),
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes | np.ndarray":
    """Plots the median of a result over repeats, and a band between two quantiles.

    Args:
        data: an `xarray.Dataset` or `xarray.DataArray` with dimensions x, repeat, col, row, and at
            most one more. Labels use `attrs["units"]` and `attrs["long_name"]`. If a coordinate
            `relation` varies, labels name the neighboring relation of each curve or panel.
        variable: a variable of the dataset; optional if it has only one.
        x: the dimension of the horizontal axis.
        repeat: the dimension over which quantiles are taken.
        curve: the dimension with a curve for each entry; by default the only one left.
        col: the dimension with a column of panels for each entry.
        row: the dimension with a row of panels for each entry.
        quantiles: lower and upper end of the band, in (0, 1).
        legend: whether to draw a legend, above the axes or above all panels. If you add a title to
            your own axes afterwards, draw the legend yourself.
        ax: the axes to draw on; None makes a figure. It must be None for a grid of panels.

    Returns:
        The axes; with `col` or `row` an array of them, of shape (rows, columns).

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the data are not an object of xarray.
        ValueError: if the data have other dimensions, an empty dimension, no numbers along x, or
            several variables and none is chosen; if the quantiles are not an interval; if `ax` is
            given for a grid; or if labels cannot show the neighboring relation of each curve.

    Formal guarantees:
        None: the results of a sweep are not private.

    Source:
        Rubinstein and Aldà (2017), Figures 6 and 7.

    Example:
        >>> import dpjax
        >>> dpjax.plotting.utility([1.0, 2.0])
        Traceback (most recent call last):
        ...
        TypeError: data must be an xarray.Dataset or xarray.DataArray, got list
    """
    array = _variable(data, variable)
    low, high = (_checks.fraction("quantiles", end) for end in quantiles)
    if low >= high:
        raise ValueError(f"quantiles must be a lower and an upper end, got {quantiles}")
    if ax is not None and (col or row):
        raise ValueError("ax must be None for a grid of panels, which makes a figure of its own")
    rest: list[Any] = [name for name in array.dims if name not in (x, repeat, col, row)]
    if curve is None and len(rest) == 1:
        (curve,) = rest
    wanted = [name for name in (row, col, curve, repeat, x) if name is not None]
    if sorted(map(str, array.dims)) != sorted(wanted):
        raise ValueError(
            f"data must have dimensions {tuple(wanted)}, got {tuple(array.dims)}: first remove the"
            " others by .sel or by averaging"
        )
    values = np.asarray(array.transpose(*wanted).values, np.float64)
    positions = np.asarray(array[x].values)
    if positions.dtype.kind not in "biuf" or not values.size:
        raise ValueError(f"data must not be empty, and the coordinates of {x!r} must be numbers")
    # Every array gets one axis for rows, one for columns and one for curves. An axis may have
    # length 1.
    values = values.reshape(
        *(array.sizes[name] if name else 1 for name in (row, col, curve)), *values.shape[-2:]
    )
    rows, columns, names = _labels(array, (row, col, curve))
    order = np.argsort(positions)  # Positions are sorted, so that lines connect neighbors along x.
    panels: Any = _new_panels(*values.shape[:2]) if col or row else np.array([[axes_or_new(ax)]])
    for place in np.ndindex(panels.shape):
        drawn: Axes = panels[place]
        # Quantiles are taken over repeats, which are the second-to-last axis.
        bands = np.quantile(values[place], [low, 0.5, high], axis=1)[..., order]
        for index, (label, bottom, median, top) in enumerate(zip(names, *bands, strict=True)):
            look, band = style(index), {"alpha": 0.2, "linewidth": 0}
            drawn.fill_between(positions[order], bottom, top, color=look["color"], **band)
            drawn.plot(positions[order], median, label=label, **look)
        if np.all(positions > 0):
            drawn.set_xscale("log")
    said = f"median and {100 * low:.3g}% to {100 * high:.3g}% of {values.shape[-2]} repeats"
    title = f"{_label(array[curve], curve)}: {said}" if curve else said
    x_label, y_label = _label(array[x], x), _label(array, str(array.name or "value"))
    panel: Any = panels[0, 0]
    if col or row:
        _label_grid(panels, rows, columns, x_label, y_label)
        if legend:
            handles, labels = panel.get_legend_handles_labels()
            width = 72 * panel.figure.get_figwidth()
            look = legend_within(width, labels, len(labels), title)
            panel.figure.legend(handles=handles, loc="outside upper center", **look)
        return panels
    panel.set(xlabel=x_label, ylabel=y_label)
    if legend:
        legend_above(panel, title=title)
    return panel


def _new_panels(rows: int, columns: int) -> Any:
    """Makes panels that fit a page. Text keeps its size, and panels share their axes."""
    pyplot = _checks.extra("matplotlib.pyplot", "plot")
    size = (0.8 + _PANEL[0] * columns, 1.1 + _PANEL[1] * rows)
    figure = pyplot.figure(figsize=size, layout="constrained")
    return figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)


def _label_grid(
    panels: Any, rows: list[str], columns: list[str], x_label: str, y_label: str
) -> None:
    """Labels a grid of panels: columns above, rows on the right, and the shared axes once."""
    figure = panels[0, 0].figure
    figure.supxlabel(x_label, fontsize="medium")
    figure.supylabel(y_label, fontsize="medium")
    for panel, name in zip(panels[0], columns, strict=True):
        panel.set_title(name, fontsize="medium")
    look = {"rotation": 270, "va": "center", "ha": "left", "xycoords": "axes fraction"}
    for panel, name in zip(panels[:, -1], rows, strict=True):
        panel.annotate(name, (1.03, 0.5), **look)


def _variable(data: Any, variable: str | None) -> "DataArray":
    """Returns the array to plot.

    Recognizes objects of xarray by attributes, without importing it.
    """
    if hasattr(data, "data_vars"):
        names = list(data.data_vars)
        if variable is None and len(names) == 1:
            (variable,) = names
        if variable not in names:
            raise ValueError(f"variable must be one of {names}, got {variable!r}")
        return data[variable]
    if hasattr(data, "dims") and hasattr(data, "transpose") and hasattr(data, "attrs"):
        return data
    raise TypeError(
        f"data must be an xarray.Dataset or xarray.DataArray, got {type(data).__name__}"
    )


def _labels(array: "DataArray", dims: Sequence[str | None]) -> list[list[str]]:
    """Returns labels of rows, columns and curves.

    If the data have several neighboring relations, labels name the relation.
    """
    row, col, curve = dims
    found = [_names(array, row, f"{row} = "), _names(array, col, f"{col} = "), _names(array, curve)]
    if "relation" not in array.coords or "relation" in array.dims:
        return found
    relations = array.coords["relation"]
    if len(np.unique(relations.values.astype(str))) == 1:
        return found
    inside = [name for name in dims if name in relations.dims]
    by_place = relations.transpose(*inside, ...).values.astype(str)
    for axis, name in enumerate(inside):
        of_each = [np.unique(by_place.take(i, axis)) for i in range(by_place.shape[axis])]
        if all(len(names) == 1 for names in of_each):
            labels = found[dims.index(name)]
            labels[:] = [f"{x} ({names[0]})" for x, names in zip(labels, of_each, strict=True)]
            return found
    raise ValueError(
        "data must have one neighboring relation in each row, in each column or in each curve:"
        f" choose one with .sel, or plot the dimensions {relations.dims} as curve, col or row"
    )


def _names(array: "DataArray", name: str | None, start: str = "") -> list[str]:
    if name is None:
        return [str(array.name or "value") if not start else ""]
    labels = np.asarray(array[name].values).tolist()
    return [start + (f"{x:g}" if isinstance(x, float) else str(x)) for x in labels]


def _label(array: "DataArray", name: str) -> str:
    return with_unit(str(array.attrs.get("long_name", name)), str(array.attrs.get("units", "")))


# A row shows at most this many marks, because more marks would merge into one band.
_MOST_NUMBERS = 200


def rehearsal(data: "Dataset", *, ax: "Axes | None" = None) -> "Axes":
    """Plots the noise of mechanisms as multiples of the sampling spread.

    Left of the line at 1, noise is smaller than the sampling error. A large mark represents all
    numbers of a release together. Small marks represent single numbers, or 200 evenly spaced
    quantiles of their ratios if there are more numbers.

    Args:
        data: the result of `dpjax.rehearse`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if no ratio is finite and above 0.

    Formal guarantees:
        None are needed: a rehearsal contains no private data.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> dpjax.plotting.rehearsal({"noise_over_spread": [float("nan")]})
        Traceback (most recent call last):
        ...
        ValueError: noise_over_spread must hold a number that is finite and above 0, got [nan]
    """
    together = np.asarray(data["noise_over_spread"], np.float64)
    if not np.any(np.isfinite(together) & (together > 0)):
        raise ValueError(
            "noise_over_spread must hold a number that is finite and above 0, got"
            f" {together.tolist()}"
        )
    each = np.asarray(data["noise_over_spread_each"], np.float64)
    relations = data["relation"].values
    mixed = len(set(map(str, relations))) > 1
    names = [
        f"{name}" + f"\n({x})" * mixed + "\n(not finite)" * (not np.isfinite(ratio))
        for name, x, ratio in zip(data["mechanism"].values, relations, together, strict=True)
    ]
    ax = axes_or_new(ax)
    for row, (ratio, ratios) in enumerate(zip(together, each, strict=True)):
        look: dict[str, Any] = {**style(row), "linestyle": "none"}
        found = np.sort(ratios[np.isfinite(ratios) & (ratios > 0)])
        if len(ratios) > 1 and len(found):
            ranks = np.linspace(0, len(found) - 1, min(len(found), _MOST_NUMBERS)).round()
            shown = found[ranks.astype(int)]
            ax.plot(shown, np.full(len(shown), row), alpha=0.5, markersize=4, **look)
        ax.plot(ratio, row, markersize=11, **look)
    ax.axvline(1, color=ink(), linestyle="--", label="noise as large as the sampling spread")
    plain: dict[str, Any] = {"color": ink(), "linestyle": "none"}
    ax.plot([], marker="o", markersize=11, label="all numbers together", **plain)
    if each.shape[1] > 1:
        ax.plot([], marker=".", alpha=0.5, label="a single number", **plain)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set(xlim=(min(low, 0.1), max(high, 10)), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="noise, as a multiple of the sampling spread", ylabel="mechanism")
    return legend_above(ax)


_CURVES = {
    "not private": None,
    "private, bounded range": "zcdp",
    "private, advanced composition": "drv",
}


def regret_bounds(
    steps: Sequence[int],
    *,
    experts: int,
    epsilon: float,
    delta: float,
    realized: Mapping[str, Sequence[float]] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots bounds on the regret against T: without privacy, and for two private learning rates.

    Args:
        steps: numbers of steps T.
        experts: the number k of experts.
        epsilon: the epsilon of all choices together.
        delta: the delta of all choices together.
        realized: regrets of actual runs at these T, plotted as marks. It maps names of curves to
            regrets: "not private", "private, bounded range" or "private, advanced composition". A
            bound is about the expected regret, and single runs vary around their expectation.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, or a curve has an unknown name.

    Formal guarantees:
        None. Bounds are public. The regret of a run on private losses is private.

    Source:
        Freund and Schapire (1997); Dwork, Rothblum and Vadhan (2010); Dong, Durfee and Rogers
        (2020).

    Example:
        >>> import dpjax
        >>> axes = dpjax.plotting.regret_bounds([100, 10_000], experts=10, epsilon=1.0, delta=1e-6)
        >>> axes.get_ylabel()
        'regret per step'
    """
    times = np.asarray([_checks.integer("steps", x, least=1) for x in steps])
    found = {} if realized is None else dict(realized)
    for name in found:
        _checks.choice("realized", name, tuple(_CURVES))
    ax = axes_or_new(ax)
    for index, (name, method) in enumerate(_CURVES.items()):
        bounds: list[float] = []
        for count in times.tolist():
            rate = None
            if method is not None:
                mechanism = private_weighted_majority(epsilon, delta, steps=count, method=method)
                rate = mechanism.learning_rate
            bounds.append(regret_bound(steps=count, experts=experts, learning_rate=rate))
        look = style(index)
        ax.plot(times, bounds, label=f"bound, {name}", **{**look, "marker": ""})
        if name in found:
            look["linestyle"] = "none"
            ax.plot(times, np.asarray(found[name], float), label=f"realized, {name}", **look)
    ax.set(xscale="log", yscale="log", xlabel="steps T", ylabel="regret per step")
    return legend_above(ax)
