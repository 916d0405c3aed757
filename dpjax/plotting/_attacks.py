"""Plots of attacks, and of the bounds that a guarantee implies for attacks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._values import Guarantee
from dpjax.attacks._linear_queries import expected_recovered_fraction
from dpjax.attacks._roc_curve import RocCurve, guessing_bound, highest_true_positive_rate
from dpjax.plotting._axes import axes_or_new, ink, legend_above, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_RATES = 400


def roc_curve(
    curves: Mapping[str, RocCurve], guarantee: Guarantee | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Plots true against false positive rates on logarithmic axes, and the limit of a guarantee.

    The left end shows how many members are found without false alarms. A curve contradicts the
    guarantee if its band is above the line of the guarantee at any point.

    Args:
        curves: a curve for each label, from `dpjax.attacks.roc_curve`. If a curve has confidence
            limits, a band is drawn between them.
        guarantee: the guarantee of the attacked releases, under replace-one.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: as `dpjax.attacks.highest_true_positive_rate`.
        ValueError: if no curve is given, or as `dpjax.attacks.highest_true_positive_rate`.

    Formal guarantees:
        All limits of one curve are correct together, with its confidence. This confidence does not
        cover several curves together.

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
        raise ValueError("curves must contain at least one curve, got none")
    least = min(1 / len(curve.non_members) for curve in curves.values())
    rates = np.geomspace(least, 1.0, _RATES)
    bound = None if guarantee is None else highest_true_positive_rate(guarantee, rates)
    ax = axes_or_new(ax)
    for index, (label, curve) in enumerate(curves.items()):
        look = style(index)
        false_positives, true_positives = curve.points()
        # Among thresholds with the same false positive rate, the last one has the largest true
        # positive rate.
        highest = true_positives[np.searchsorted(false_positives, rates, "right") - 1]
        ax.plot(rates, highest, label=label, markevery=_RATES // 8, markersize=4, **look)
        if curve.confidence is not None:
            lower, upper = curve.limits(rates)
            ax.fill_between(rates, lower, upper, color=look["color"], alpha=0.2, linewidth=0)
    if bound is not None:
        ax.plot(rates, bound, color=ink(), linestyle=(0, (8, 3)), label=f"allowed by {guarantee}")
    ax.plot(rates, rates, color=ink(), linestyle=":", label="guessing")
    ax.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    ax.set(xlabel="false positive rate", ylabel="true positive rate")
    return legend_above(ax, columns=1)


def recovered_fraction(
    c: ArrayLike,
    recovered: Mapping[str, ArrayLike],
    *,
    guarantee: Guarantee | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the fraction of bits that attacks recover from answers with noise up to c sqrt(n).

    The curve shows the fraction to expect from an attack by least squares on many Walsh-Hadamard
    queries. For small c it is nearly 1. For large c it is nearly 1/2, as for guessing.

    Args:
        c: numbers above 0.
        recovered: maps the name of an attack to its fraction at each c.
        guarantee: if given, a line shows the largest fraction that it allows any attack.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the fractions are not in a mapping, or not numbers.
        ValueError: if a name does not have one fraction for each c, or a c is not above 0.

    Formal guarantees:
        The line is the `dpjax.attacks.guessing_bound` of the guarantee. The curves have no
        guarantee: other attacks may be better.

    Source:
        Dinur and Nissim (2003); Dwork and Yekhanin (2008).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> c = jnp.geomspace(0.1, 10, 20)
        >>> found = dpjax.attacks.recovered_fraction(jax.random.key(0), c, n=1024)
        >>> axes = dpjax.plotting.recovered_fraction(c, {"n = 1024": found})
        >>> axes.get_ylabel()
        'recovered fraction'
    """
    if not isinstance(recovered, Mapping):
        raise TypeError(
            f"recovered must be a mapping from names to fractions, got {_checks.shown(recovered)}"
        )
    sizes = np.asarray(c, float)
    curves = {name: np.asarray(fractions, float) for name, fractions in recovered.items()}
    if sizes.ndim != 1 or not sizes.size or not np.all(sizes > 0):
        raise ValueError(f"c must be numbers above 0, got {_checks.shown(c)}")
    if any(fractions.shape != sizes.shape for fractions in curves.values()):
        raise ValueError(
            f"recovered must contain {sizes.size} fractions for each name, one for each entry of c"
        )
    order = np.argsort(sizes)
    ax = axes_or_new(ax)
    smooth = np.geomspace(np.min(sizes), np.max(sizes), 200)
    expected = expected_recovered_fraction(smooth)
    ax.plot(smooth, expected, color=ink(), label="expected for Walsh-Hadamard queries")
    for index, (name, fractions) in enumerate(curves.items()):
        ax.plot(sizes[order], fractions[order], label=name, **style(index))
    if guarantee is not None:
        label = f"most under ({float(guarantee.epsilon):g}, {float(guarantee.delta):g})-DP"
        ax.axhline(guessing_bound(guarantee), color=ink(), linestyle=(0, (1, 3)), label=label)
    lowest = min((np.min(fractions) for fractions in curves.values()), default=0.5)
    ax.set(xscale="log", ylim=(min(0.5, float(lowest)) - 0.03, 1.03))
    ax.set(xlabel="c, for noise of at most c sqrt(n)", ylabel="recovered fraction")
    return legend_above(ax)
