"""Rehearsed releases: the noise of each mechanism, beside the spread of the answer."""

from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.plotting._axes import axes_or_new, ink, legend_above, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

_MOST_NUMBERS = 200  # Of a row; more would be one band of ink.


def rehearsal(data: "Dataset", *, ax: "Axes | None" = None) -> "Axes":
    """Plots the noise of mechanisms as multiples of the sampling spread.

    Left of the line at 1, noise is smaller than the error of asking few people. A large mark stands
    for all numbers of a release together, small ones for single numbers: evenly spaced quantiles,
    if there are more than 200.

    Args:
        data: of `dpjax.rehearse`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if no ratio is finite and above 0.

    Formal guarantees:
        None are needed: a rehearsal holds no private data.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> dpjax.plotting.rehearsal({"noise_over_spread": [float("nan")]})
        Traceback (most recent call last):
        ...
        ValueError: data must hold a ratio that is finite and above 0, got [nan]
    """
    together = np.asarray(data["noise_over_spread"], np.float64)
    if not np.any(np.isfinite(together) & (together > 0)):
        raise ValueError(
            f"data must hold a ratio that is finite and above 0, got {together.tolist()}"
        )
    each = np.asarray(data["noise_over_spread_each"], np.float64)
    names = [str(name) for name in data["mechanism"].values]
    relations = [str(relation) for relation in data["relation"].values]
    if len(set(relations)) > 1:
        names = [f"{name}\n({x})" for name, x in zip(names, relations, strict=True)]
    names = [
        name if np.isfinite(ratio) else f"{name}\n(not finite)"
        for name, ratio in zip(names, together, strict=True)
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
    ax.set_xlim(min(low, 0.1), max(high, 10))
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_yticks(range(len(names)), names)
    ax.set_xlabel("noise, as a multiple of the sampling spread")
    ax.set_ylabel("mechanism")
    legend_above(ax)
    return ax
