"""Utility against epsilon, with ribbons of quantiles over repeats."""

from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax._core import _checks
from dpjax.plotting._axes import axes_or_new, style, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataArray, Dataset


def utility(
    data: "Dataset | DataArray",
    *,
    variable: str | None = None,
    x: str = "epsilon",
    repeat: str = "repeat",
    curve: str | None = None,
    quantiles: tuple[float, float] = (0.05, 0.95),
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the median of a result over repeats, and a ribbon between two quantiles.

    Args:
        data: an `xarray.Dataset` or `xarray.DataArray` with dimensions x, repeat, and at most one
            more. Labels use `attrs["units"]` and `attrs["long_name"]`.
        variable: of the data set; optional if it has only one.
        x: the dimension of the horizontal axis.
        repeat: the dimension of the quantiles.
        curve: the dimension with a curve for each entry; by default the remaining one.
        quantiles: lower and upper end of the ribbon, in (0, 1).
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the data are not an object of xarray.
        ValueError: if the data have other dimensions, an empty dimension, no numbers along x, or
            several variables without a choice, or if the quantiles are not an interval.

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
        raise ValueError(f"quantiles must be lower and upper end, got {quantiles}")
    rest: list[Any] = [name for name in array.dims if name not in (x, repeat)]
    if curve is None and len(rest) == 1:
        (curve,) = rest
    wanted = [name for name in (curve, repeat, x) if name is not None]
    if set(array.dims) != set(wanted):
        raise ValueError(
            f"data must have dimensions {tuple(wanted)}, got {tuple(array.dims)}: choose with .sel"
            " or average over the others first"
        )
    values = np.asarray(array.transpose(*wanted).values, np.float64)
    positions = np.asarray(array[x].values)
    if positions.dtype.kind not in "biuf" or not values.size:
        raise ValueError(f"data must have numbers along {x!r}, and at least one of all dimensions")
    order = np.argsort(positions)
    ax = axes_or_new(ax)
    for index, (label, results) in enumerate(_curves(array, values, curve)):
        bottom, median, top = np.quantile(results, [low, 0.5, high], axis=0)[:, order]
        look = style(index)
        ax.fill_between(positions[order], bottom, top, color=look["color"], alpha=0.2, linewidth=0)
        ax.plot(positions[order], median, label=label, **look)
    if np.all(positions > 0):
        ax.set_xscale("log")
    ax.set_xlabel(_label(array[x], x))
    ax.set_ylabel(_label(array, str(array.name or "value")))
    ribbon = f"median and quantiles {low:.3g} to {high:.3g} of {values.shape[-2]} repeats"
    ax.legend(title=ribbon if curve is None else f"{_label(array[curve], curve)}: {ribbon}")
    return ax


def _variable(data: Any, variable: str | None) -> "DataArray":
    """The array to plot. Objects of xarray are known by their attributes, without an import."""
    if hasattr(data, "data_vars"):
        names = list(data.data_vars)
        if variable is None and len(names) != 1:
            raise ValueError(f"variable must be one of {names}")
        if variable is not None and variable not in names:
            raise ValueError(f"variable must be one of {names}, got {variable!r}")
        return data[names[0] if variable is None else variable]
    if hasattr(data, "dims") and hasattr(data, "transpose") and hasattr(data, "attrs"):
        return data
    raise TypeError(
        f"data must be an xarray.Dataset or xarray.DataArray, got {type(data).__name__}"
    )


def _curves(
    array: "DataArray", values: np.ndarray, curve: str | None
) -> list[tuple[str, np.ndarray]]:
    if curve is None:
        return [(str(array.name or "value"), values)]
    labels = np.asarray(array[curve].values).tolist()
    return [
        (f"{label:g}" if isinstance(label, float) else str(label), results)
        for label, results in zip(labels, values, strict=True)
    ]


def _label(array: "DataArray", name: str) -> str:
    return with_unit(str(array.attrs.get("long_name", name)), str(array.attrs.get("units", "")))
