"""Plots of sampled distances, the chosen sensitivity, and the cost of operating points."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._values import OperatingPoint, Sensitivity, describe_confidence
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.plotting._axes import BLUE, GREEN, SKY, VERMILION, axes_or_new, ink, style, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The largest number of steps in a plot, because a page cannot show more.
_MOST_STEPS = 2_000

Band = Literal["dkw", "beta"]


def sensitivity_ecdf(
    distances: ArrayLike,
    point: OperatingPoint | Sensitivity | None = None,
    *,
    cdf: Callable[[np.ndarray], np.ndarray] | None = None,
    bands: Sequence[Band] = ("beta",),
    confidence: float = 0.99,
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the empirical distribution function of sampled distances, and the chosen distance.

    Bands show where the true distribution function may be: "dkw" is valid for all distances
    simultaneously, and "beta" (Clopper-Pearson) for each single distance. Use "beta" for one order
    statistic; it is narrow in the tails.

    Args:
        distances: the distances of m pairs, shape (m,), from `dpjax.sample_distances`. NaN and
            negative numbers count as infinite. The plot has at most 2,000 steps.
        point: an `OperatingPoint`, or a `Sensitivity` sampled from m pairs. It chooses the k-th
            smallest distance. The plot marks this distance, and states gamma and the confidence.
        cdf: the true distribution function, from arrays to arrays, if known.
        bands: any of "dkw" and "beta".
        confidence: the two-sided confidence of each band.
        unit: the unit of the distances.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if `distances` is not a vector with a finite entry, the point has another number
            of pairs, a band is unknown, or confidence is out of range.

    Formal guarantees:
        The bands are valid for independent pairs and any distribution, at their confidence. Choose
        the point in advance: if you choose it by this plot, its guarantee is weaker than it says.

    Source:
        Rubinstein and Aldà (2017), Figure 1; Massart (1990); Clopper and Pearson (1934).

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> point = dpjax.operating_point(m=200, gamma=0.1)
        >>> distances = np.random.default_rng(0).exponential(size=200)
        >>> axes = dpjax.plotting.sensitivity_ecdf(distances, point, bands=["dkw", "beta"])
        >>> axes.get_ylabel()
        'share of pairs'
    """
    array = np.asarray(distances, np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"distances must have shape (m,), m >= 1, got {array.shape}")
    ordered = np.sort(np.where(array >= 0, array, np.inf))
    m, finite = len(ordered), int(np.isfinite(ordered).sum())
    if finite == 0:
        raise ValueError("distances must hold a finite number")
    k = None if point is None else point.k
    if point is not None and (point.m != m or k is None):
        raise ValueError(
            f"point must have m={m}, the number of distances, and a rank k, got m={point.m}, k={k}"
        )
    alpha = 1 - _checks.fraction("confidence", confidence)
    for band in bands:
        _checks.choice("bands", band, ("dkw", "beta"))
    # The plot shows all ranks if they are few, and it always shows the chosen rank.
    ranks = np.rint(np.linspace(1, finite, min(finite, _MOST_STEPS))).astype(int)
    ranks = np.union1d(ranks, [k] if k is not None and k <= finite else ranks)
    x, share = ordered[ranks - 1], ranks / m
    ax = axes_or_new(ax)
    look = {"step": "post", "alpha": 0.3, "linewidth": 0}
    if "dkw" in bands:
        width = math.sqrt(math.log(2 / alpha) / (2 * m))
        label = f"DKW band, confidence {confidence:g} everywhere"
        low, high = np.clip(share - width, 0, 1), np.clip(share + width, 0, 1)
        ax.fill_between(x, low, high, label=label, color=SKY, **look)
    if "beta" in bands:
        limits = clopper_pearson_lower, clopper_pearson_upper
        low, high = (limit(ranks, m, alpha / 2) for limit in limits)
        label = f"exact Beta band, confidence {confidence:g} at each distance"
        ax.fill_between(x, low, high, label=label, color=GREEN, **look)
    x_steps, shares = np.append(x[:1], x), np.append(0.0, share)
    ax.step(x_steps, shares, where="post", color=BLUE, label=f"{m} sampled pairs")
    if cdf is not None:
        grid = np.linspace(0, x[-1], 501)
        ax.plot(grid, np.asarray(cdf(grid)), color=ink(), linestyle="--", label="true distribution")
    if point is not None and k is not None:
        _mark(ax, point, k, m, ordered[k - 1])
    ax.set(xlim=(0, None), ylim=(0, 1.03), ylabel="share of pairs")
    ax.set_xlabel(with_unit("distance between the values on neighboring databases", unit))
    ax.legend(loc="lower right", framealpha=1)
    return ax


def _mark(ax: "Axes", point: OperatingPoint | Sensitivity, k: int, m: int, distance: float) -> None:
    """Marks the chosen order statistic. An infinite distance is shown only in the legend."""
    promise = f"gamma = {point.gamma:.4g}, {describe_confidence(point.confidence)}"
    label = f"order statistic k = {k} of {m}: {distance:.3g}\n({promise})"
    level = 1 - float(point.gamma)
    ax.axhline(level, color=VERMILION, linestyle=":", label=f"1 - gamma = {level:.4g}")
    if math.isfinite(distance):
        ax.vlines(distance, 0, k / m, color=VERMILION, linestyle="-.")
    ax.plot([distance], [k / m], color=VERMILION, marker="D", linestyle="none", label=label)


# A mean of an order statistic is computed as an average over this many of its quantiles.
_LEVELS = 4_000
Kind = TypeVar("Kind")


def least_pairs(points: Iterable[OperatingPoint], *, ax: "Axes | None" = None) -> "Axes":
    """Plots how many pairs operating points need, against gamma, with a curve for each method.

    Args:
        points: results of `dpjax.operating_point`. For a given gamma, it returns the least m.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if no point is given.

    Formal guarantees:
        Each point has its own guarantee. Points of different confidence cannot be compared.

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
    ax.set(xscale="log", yscale="log", ylabel="m, number of pairs")
    ax.set_xlabel("gamma, probability that a pair is left uncovered")
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
    it by the true quantile of the distances at 1 - gamma. This ratio says how much more noise is
    needed because the distribution is unknown. Each gamma, method and confidence has a curve.

    Args:
        points: the result of `dpjax.operating_point`.
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
        the plotted averages are too low.

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
    ax.set(xscale="log", xlabel="m, number of pairs", ylabel="average estimate / true quantile")
    ax.legend(frameon=False)
    return ax


def _grouped(
    points: Iterable[OperatingPoint], key: Callable[[OperatingPoint], Kind]
) -> dict[Kind, list[OperatingPoint]]:
    groups: dict[Kind, list[OperatingPoint]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    if not groups:
        raise ValueError("points must hold at least one operating point, got none")
    return groups


def _mean(point: OperatingPoint, quantile: Callable[[np.ndarray], np.ndarray]) -> float:
    """Returns the mean of the order statistic: averages its quantiles at evenly spaced levels."""
    levels = (np.arange(_LEVELS) + 0.5) / _LEVELS
    uniform = scipy.special.betaincinv(point.k, point.m - point.k + 1, levels)
    return float(np.mean(np.asarray(quantile(uniform), np.float64)))
