"""A release with its error bar, against the truth."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._values import Mechanism, Release
from dpjax.mechanisms._coordinatewise import CoordinatewiseMechanism
from dpjax.plotting._axes import BLUE, VERMILION, axes_or_new, legend_above, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def release_with_error(
    release: Release,
    mechanism: Mechanism,
    truth: ArrayLike | None = None,
    *,
    probability: float = 0.95,
    simultaneous: bool = False,
    names: Sequence[str] | None = None,
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the coordinates of a release with error bars.

    Args:
        release: of a number or an array of numbers, by a mechanism that adds noise.
        mechanism: the mechanism of the release.
        truth: the target's value, for comparison. A plot of it is not private.
        probability: that the bar of a coordinate covers the noise.
        simultaneous: whether bars hold for all coordinates at once, instead of for each one.
        names: of the coordinates; numbers by default.
        unit: of the coordinates.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the release is not an array with additive noise.
        ValueError: if the truth has another shape, or names do not match the coordinates.

    Formal guarantees:
        Bars are `mechanism.error`, rounding included. They depend on nothing private. Without
        `truth` the plot shows nothing private.

    Source:
        None.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism, truth = dpjax.laplace(0.1, epsilon=1.0), jnp.array([1.0, 2.0])
        >>> release = mechanism(dpjax.random.seeded_key(0), truth)
        >>> axes = dpjax.plotting.release_with_error(release, mechanism, truth, unit="mm")
        >>> axes.get_ylabel()
        'value [mm]'
    """
    if not isinstance(mechanism, CoordinatewiseMechanism) or not hasattr(release.value, "dtype"):
        raise TypeError(
            "release must be an array with additive noise, got"
            f" {_checks.described(release.value)} by {type(mechanism).__name__}; polynomials are"
            " for dpjax.plotting.released_function"
        )
    shape = release.value.shape
    values = np.asarray(release.value, np.float64).ravel()
    error = mechanism.error(confidence=probability, like=release.value, simultaneous=simultaneous)
    error = float(error)
    if truth is not None and np.shape(truth) != shape:
        raise ValueError(
            f"truth must have the shape of the release, {shape}, got {np.shape(truth)}"
        )
    if names is not None and len(names) != len(values):
        raise ValueError(f"names must be {len(values)}, one for each coordinate, got {len(names)}")
    ax, places = axes_or_new(ax), np.arange(len(values))
    at_once = " at once" if simultaneous and len(values) > 1 else ""
    label = f"release, noise within {error:.3g} with probability {probability:g}{at_once}"
    look = {"color": BLUE, "marker": "o", "linestyle": "none", "capsize": 3}
    ax.errorbar(places, values, yerr=error, label=label, **look)
    if truth is not None:
        exact = np.asarray(truth, np.float64).ravel()
        look = {"color": VERMILION, "marker": "x", "linestyle": "none", "zorder": 3}
        ax.plot(places, exact, label="truth, not private", markersize=9, **look)
    ax.set_xlim(-0.5, len(values) - 0.5)
    if names is not None:
        ax.set_xticks(places, names)
    elif len(values) == 1:
        ax.set_xticks([])
    ax.set_xlabel("coordinate" if len(values) > 1 else "")
    ax.set_ylabel(with_unit("value", unit))
    legend_above(ax, columns=1)
    return ax
