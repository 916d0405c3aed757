"""Bounds on the regret of following experts, private and not, and realized regrets."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpjax._core import _checks
from dpjax.learning._weighted_majority import private_weighted_majority, regret_bound
from dpjax.plotting._axes import axes_or_new, legend_above, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        epsilon: of all choices together.
        delta: of all choices together.
        realized: regrets of actual runs at these T, plotted as marks, by the name of their curve:
            "not private", "private, bounded range" or "private, advanced composition". A bound
            limits the expected regret. Single runs vary about their expectation.
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
        for count in map(int, times):
            rate = None
            if method is not None:
                mechanism = private_weighted_majority(epsilon, delta, steps=count, method=method)
                rate = mechanism.learning_rate
            bounds.append(regret_bound(steps=count, experts=experts, learning_rate=rate))
        look = style(index)
        marker = look.pop("marker")
        ax.plot(times, bounds, label=f"bound, {name}", **look)
        if name in found:
            marks = {"color": look["color"], "marker": marker, "linestyle": "none"}
            ax.plot(times, np.asarray(found[name], float), label=f"realized, {name}", **marks)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("steps T")
    ax.set_ylabel("regret per step")
    legend_above(ax)
    return ax
