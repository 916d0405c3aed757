"""The cost of operating points: pairs to sample, and noise above the true quantile."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import scipy

from dpjax._core._values import OperatingPoint, describe_confidence
from dpjax.plotting._axes import axes_or_new, ink, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Points of the distribution of an order statistic; its mean is accurate to about the inverse.
_LEVELS = 4_000
Kind = TypeVar("Kind")


def least_pairs(points: Iterable[OperatingPoint], *, ax: "Axes | None" = None) -> "Axes":
    """Plots how many pairs operating points need, against gamma, with a curve for each method.

    Args:
        points: of `dpjax.operating_point`, which takes the least m for a gamma.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if no point is given.

    Formal guarantees:
        Those of every single point. Statements of different confidence cannot be compared.

    Source:
        Rubinstein and Aldà (2017), Figure 2.

    Example:
        >>> import dpjax
        >>> points = [dpjax.operating_point(gamma=gamma) for gamma in (0.01, 0.1)]
        >>> axes = dpjax.plotting.least_pairs(points)
        >>> axes.get_ylabel()
        'm, number of pairs'
    """
    curves = _grouped(points, lambda point: (point.method, point.confidence))
    ax = axes_or_new(ax)
    for index, ((method, confidence), group) in enumerate(curves.items()):
        gammas, pairs = zip(*sorted((point.gamma, point.m) for point in group), strict=True)
        label = f"{method}, {describe_confidence(confidence)}"
        ax.plot(gammas, pairs, label=label, **style(index))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("gamma, probability that a pair is left uncovered")
    ax.set_ylabel("m, number of pairs")
    ax.legend(frameon=False)
    return ax


def overestimate(
    points: Iterable[OperatingPoint],
    quantile: Callable[[np.ndarray], np.ndarray],
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots how much sampling overestimates the sensitivity, on average, against m.

    The average estimate is the mean of the order statistic G_(k) of m distances. The plot divides
    it by their true quantile at 1 - gamma. The quotient is the price, in noise, of not knowing the
    distribution. Each gamma, method and confidence has a curve.

    Args:
        points: of `dpjax.operating_point`.
        quantile: the quantile function of the distances, from arrays to arrays, such as
            `lambda u: -np.log1p(-u)`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if no point is given.

    Formal guarantees:
        None. For light tails, averages are accurate to about 1 in 1,000. If the mean is infinite,
        they are too low.

    Source:
        The k-th smallest of m uniform numbers is Beta(k, m - k + 1); Rubinstein and Aldà (2017),
        Section 7.1.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> points = [dpjax.operating_point(m=m, gamma=0.05) for m in (90, 900, 9000)]
        >>> axes = dpjax.plotting.overestimate(points, lambda u: -np.log1p(-u))
        >>> [round(float(factor), 1) for factor in axes.get_lines()[0].get_ydata()]
        [1.7, 1.1, 1.0]
    """
    curves = _grouped(points, lambda point: (point.gamma, point.method, point.confidence))
    ax = axes_or_new(ax)
    for index, ((gamma, method, confidence), group) in enumerate(curves.items()):
        found = sorted((point.m, _mean(point, quantile)) for point in group)
        pairs, means = (np.asarray(part) for part in zip(*found, strict=True))
        label = f"gamma = {gamma:.4g}, {method}, {describe_confidence(confidence)}"
        true = float(np.asarray(quantile(np.asarray([1 - gamma])))[0])
        ax.plot(pairs, means / true, label=label, **style(index))
    ax.axhline(1, color=ink(), linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlabel("m, number of pairs")
    ax.set_ylabel("average estimate / true quantile")
    ax.legend(frameon=False)
    return ax


def _grouped(
    points: Iterable[OperatingPoint], key: Callable[[OperatingPoint], Kind]
) -> dict[Kind, list[OperatingPoint]]:
    groups: dict[Kind, list[OperatingPoint]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    if not groups:
        raise ValueError("points must hold at least one, got none")
    return groups


def _mean(point: OperatingPoint, quantile: Callable[[np.ndarray], np.ndarray]) -> float:
    """The mean of the order statistic, by the midpoints of equal parts of its distribution."""
    levels = (np.arange(_LEVELS) + 0.5) / _LEVELS
    uniform = scipy.special.betaincinv(point.k, point.m - point.k + 1, levels)
    return float(np.mean(np.asarray(quantile(uniform), np.float64)))
