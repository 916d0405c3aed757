"""Plots of inference about a population: posteriors, and p-values of a confidence set."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from dpjax._core import _checks
from dpjax.plotting._axes import BLUE, VERMILION, axes_or_new, legend_above, with_unit
from dpjax.population._confidence_set import ConfidenceSet
from dpjax.population._posterior import Draws, Posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 60


def posterior(
    posterior: Posterior,
    *,
    number: str | None = None,
    confidence: float = 0.95,
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the posterior density of one number of theta, with its mean and interval.

    Args:
        posterior: from `dpjax.posterior`.
        number: the name of the number, as in `posterior.to_frame()`; optional if theta is one
            number.
        confidence: the confidence of the interval.
        unit: the unit of the axis.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if theta has several numbers and none is named, or the confidence is out of
            range.

    Formal guarantees:
        Post-processing of a release.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> dpjax.plotting.posterior(3.0)
        Traceback (most recent call last):
            ...
        TypeError: posterior must be made by dpjax.posterior, got float
    """
    _check_made("posterior", posterior, Posterior)
    name, place = _number(posterior._draws, number)
    left = (1 - _checks.fraction("confidence", confidence)) / 2
    column = Draws(posterior._draws.columns[place])
    low, high = column.quantiles(posterior.weights, (left, 1 - left))
    mean = float(column.mean(posterior.weights))
    # Most draws have a negligible weight. The axis shows the range of the other draws.
    first, last = column.quantiles(posterior.weights, (1e-3, 1 - 1e-3))
    ends = (float(first), float(last)) if first < last else None
    drawn = axes_or_new(ax)
    heights, edges = np.histogram(
        column.tree, _BINS, range=ends, weights=posterior.weights, density=True
    )
    drawn.stairs(heights, edges, fill=True, color=BLUE, alpha=0.35)
    drawn.axvline(mean, color=BLUE, linestyle="-", label="posterior mean")
    drawn.axvspan(
        float(low), float(high), color=VERMILION, alpha=0.12, label=f"{confidence:.0%} interval"
    )
    drawn.set(xlabel=with_unit(name, unit), ylabel="posterior density")
    return legend_above(drawn)


def confidence_set(
    confidence_set: ConfidenceSet,
    *,
    number: str | None = None,
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the p-values behind a confidence set against one number of theta.

    The set contains the points whose p-values are above the line. If theta has several numbers, the
    others are nuisance parameters: the plot shows the highest p-value among points with the same
    value of this number.

    Args:
        confidence_set: from `dpjax.confidence_set`. If it has not been searched yet, this call
            searches it.
        number: the name of the number; optional if theta is one number.
        unit: the unit of the axis.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if theta has several numbers and none is named.

    Formal guarantees:
        Post-processing of a release.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> dpjax.plotting.confidence_set(3.0)
        Traceback (most recent call last):
            ...
        TypeError: confidence_set must be made by dpjax.confidence_set, got float
    """
    _check_made("confidence_set", confidence_set, ConfidenceSet)
    thetas, p_values = confidence_set.searched()
    draws = Draws(jax.tree.map(np.asarray, thetas))
    name, place = _number(draws, number)
    values, groups = np.unique(draws.columns[place], return_inverse=True)
    highest = np.zeros(values.shape)
    np.maximum.at(highest, groups, p_values)
    drawn = axes_or_new(ax)
    look: dict[str, Any] = {"color": BLUE, "marker": "o", "markersize": 2.5}
    look["linestyle"] = "-" if len(draws.columns) == 1 else "none"
    drawn.plot(values, highest, label="p-value", **look)
    drawn.axhline(
        1 - confidence_set.confidence,
        color=VERMILION,
        linestyle="--",
        label=f"{confidence_set.confidence:.0%} set: above",
    )
    drawn.set(xlabel=with_unit(name, unit), ylabel="p-value")
    return legend_above(drawn)


def _check_made(name: str, value: object, wanted: type) -> None:
    """Refuses an object that the function `name` of dpjax did not make."""
    if not isinstance(value, wanted):
        raise TypeError(f"{name} must be made by dpjax.{name}, got {type(value).__name__}")


def _number(draws: Draws, number: str | None) -> tuple[str, int]:
    """Returns the name of one of the numbers in theta, and the index of this number.

    `number` is the name. It may be None if theta is a single number.
    """
    names = draws.names
    if number is None and len(names) == 1:
        return names[0], 0
    if number not in names:
        raise ValueError(f"number must be one of {', '.join(names)}, got {_checks.shown(number)}")
    return number, names.index(number)
