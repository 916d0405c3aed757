"""The fraction of a database that an attack recovers, against the noise of the answers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._values import Guarantee
from dpjax.attacks._guessing_bound import guessing_bound
from dpjax.attacks._phase_change import expected_recovered_fraction
from dpjax.plotting._axes import axes_or_new, ink, legend_above, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def recovered_fraction(
    c: ArrayLike,
    recovered: Mapping[str, ArrayLike],
    *,
    guarantee: Guarantee | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the fraction of bits that attacks recover from answers with noise up to c sqrt(n).

    A curve shows the expectation for least squares on many Walsh-Hadamard queries. For small c it
    is nearly 1. For large c it is near 1/2, which is guessing.

    Args:
        c: numbers above 0.
        recovered: by the name of an attack, its fraction at each c.
        guarantee: a line shows the most that any attack recovers under it, if given.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the fractions are not in a mapping, or not numbers.
        ValueError: if fractions and c differ in number, or a c is not above 0.

    Formal guarantees:
        The line is the `dpjax.attacks.guessing_bound` of the guarantee. The curves have none:
        other attacks may be better.

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
        raise ValueError(f"recovered must hold {sizes.size} fractions for each name, as c does")
    order = np.argsort(sizes)
    ax = axes_or_new(ax)
    smooth = np.geomspace(np.min(sizes), np.max(sizes), 200)
    ax.plot(
        smooth,
        expected_recovered_fraction(smooth),
        color=ink(),
        label="expected for Walsh-Hadamard queries",
    )
    for index, (name, fractions) in enumerate(curves.items()):
        ax.plot(sizes[order], fractions[order], label=name, **style(index))
    if guarantee is not None:
        ax.axhline(
            guessing_bound(guarantee),
            color=ink(),
            linestyle=(0, (1, 3)),
            label=f"most under ({float(guarantee.epsilon):g}, {float(guarantee.delta):g})-DP",
        )
    ax.set_xscale("log")
    lowest = min((np.min(fractions) for fractions in curves.values()), default=0.5)
    ax.set_ylim(min(0.5, float(lowest)) - 0.03, 1.03)
    ax.set_xlabel("c, for noise of at most c sqrt(n)")
    ax.set_ylabel("recovered fraction")
    legend_above(ax)
    return ax
