"""Curves of membership attacks, and the limit of a guarantee."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dpjax._core._values import Guarantee
from dpjax.attacks._claim_comparison import highest_true_positive_rate
from dpjax.attacks._roc_curve import RocCurve
from dpjax.plotting._axes import axes_or_new, ink, legend_above, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 400


def roc_curve(
    curves: Mapping[str, RocCurve], guarantee: Guarantee | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Plots true against false positive rates on logarithmic axes, and the limit of a guarantee.

    The left end shows how many members are found without false alarms. A band that lies above
    the line of the guarantee anywhere contradicts the guarantee.

    Args:
        curves: a curve for each label, from `dpjax.attacks.roc_curve`. Curves with limits get a
            band.
        guarantee: of the attacked releases, under replace-one.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: as `dpjax.attacks.highest_true_positive_rate`.
        ValueError: if no curve is given, or as `dpjax.attacks.highest_true_positive_rate`.

    Formal guarantees:
        All limits of one curve hold together, with its confidence. Limits of several curves do not.

    Source:
        Carlini, Chien, Nasr, Song, Terzis and Tramèr (2022), for logarithmic axes.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> random = np.random.default_rng(0)
        >>> members = random.random(10_000) < 0.5
        >>> curve = dpjax.attacks.roc_curve(random.laplace(size=10_000) + members, members)
        >>> axes = dpjax.plotting.roc_curve({"Laplace noise": curve}, dpjax.Guarantee(1.0))
        >>> axes.get_xscale()
        'log'
    """
    if not curves:
        raise ValueError("curves must hold at least one")
    least = min(1 / len(curve.non_members) for curve in curves.values())
    rates = np.geomspace(least, 1.0, _POINTS)
    bound = None if guarantee is None else highest_true_positive_rate(guarantee, rates)
    ax = axes_or_new(ax)
    for index, (label, curve) in enumerate(curves.items()):
        look = style(index)
        false_positives, true_positives = curve.points()
        # Of several thresholds with one false positive rate, the last finds the most members.
        highest = true_positives[np.searchsorted(false_positives, rates, "right") - 1]
        ax.plot(rates, highest, label=label, markevery=_POINTS // 8, markersize=4, **look)
        if curve.confidence is not None:
            lower, upper = curve.limits(rates)
            ax.fill_between(rates, lower, upper, color=look["color"], alpha=0.2, linewidth=0)
    if bound is not None:
        ax.plot(rates, bound, color=ink(), linestyle=(0, (8, 3)), label=f"allowed by {guarantee}")
    ax.plot(rates, rates, color=ink(), linestyle=":", label="guessing")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(least, 1)
    ax.set_ylim(least, 1.1)
    ax.set_xlabel("false positive rate")
    ax.set_ylabel("true positive rate")
    legend_above(ax, columns=1)
    return ax
