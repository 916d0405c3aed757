"""Plots of releases with their errors, and of the noise of mechanisms."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._accuracy import estimate
from dpjax._core._labels import Labels, names_of
from dpjax._core._release import PLOT_OF_RELEASE
from dpjax._core._values import Release
from dpjax.mechanisms._bernstein import BernsteinPolynomial, approximate_bernstein
from dpjax.mechanisms._noisy_arrays import CoordinatewiseMechanism
from dpjax.plotting._axes import (
    BLACK,
    BLUE,
    VERMILION,
    axes_or_new,
    ink,
    legend_above,
    style,
    with_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_OFFSETS = 1_001
_SHOWN = 0.995  # The horizontal axis includes this probability of the widest noise.


def noise(
    mechanisms: Mapping[str, Any],
    *,
    shape: tuple[int, ...] = (),
    probability: float = 0.95,
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the densities of the noise that mechanisms add to a coordinate.

    With the given probability, the noise is between the two markers on its curve.

    Args:
        mechanisms: maps names in the legend to mechanisms with additive noise. For `bernstein`, the
            plot shows the noise of one lattice value. If neighboring relations differ, the legend
            names them.
        shape: the shape of the value. It matters because rounding a large vector to the grid needs
            slightly more noise.
        probability: the probability of noise between the markers.
        unit: the unit of the value.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if a mechanism does not add noise to numbers.
        ValueError: if no mechanism is given, one has no noise, or the probability is out of range.

    Formal guarantees:
        The plotted scales are `effective_scale`. The actual noise takes values on a lattice that is
        finer than any plot can show.

    Source:
        None.

    Example:
        >>> import dpjax
        >>> mechanisms = {
        ...     "Laplace": dpjax.laplace(1.0, epsilon=1.0),
        ...     "Gaussian": dpjax.gaussian(1.0, epsilon=1.0, delta=1e-5),
        ... }
        >>> axes = dpjax.plotting.noise(mechanisms, unit="mm")
        >>> axes.get_xlabel()
        'noise [mm]'
    """
    _checks.fraction("probability", probability)
    if not mechanisms:
        raise ValueError("mechanisms must contain at least one mechanism, got none")
    for name, mechanism in mechanisms.items():
        if not isinstance(mechanism, CoordinatewiseMechanism):
            raise TypeError(
                f"mechanisms must add noise to numbers, got {type(mechanism).__name__} as {name!r}"
            )
    scales = {name: float(each.effective_scale(shape)) for name, each in mechanisms.items()}
    if min(scales.values()) <= 0:
        raise ValueError(f"mechanisms must add noise, got scales {_checks.shown(scales)}")
    widest = max(scales[name] * x.noise.tail_quantile(1 - _SHOWN) for name, x in mechanisms.items())
    offsets = np.linspace(-widest, widest, _OFFSETS)
    relations = {name: each.guarantee.neighbors for name, each in mechanisms.items()}
    ax = axes_or_new(ax)
    for index, (name, mechanism) in enumerate(mechanisms.items()):
        inside = scales[name] * mechanism.noise.tail_quantile(1 - probability)
        # The curve is also evaluated at the markers, so that these are on the curve.
        at = np.union1d(offsets, [-inside, inside])
        log_density = mechanism.noise.log_density(jnp.asarray(at / scales[name], float))
        density = np.exp(np.asarray(log_density, np.float64)) / scales[name]
        marked = np.searchsorted(at, [-inside, inside]).tolist()
        label = f"{name}: {100 * probability:g}% within ±{inside:.3g}"
        if len(set(relations.values())) > 1:
            label += f", {relations[name]}"
        ax.plot(at, density, label=label, markevery=marked, **style(index))
    ax.set(ylim=(0, None), xlabel=with_unit("noise", unit))
    ax.set_ylabel(with_unit("probability density", f"1/{unit}" if unit else ""))
    ax.legend(frameon=False)
    return ax


def release_with_error(
    release: Release,
    truth: ArrayLike | None = None,
    *,
    probability: float = 0.95,
    simultaneous: bool = False,
    names: Sequence[str] | None = None,
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the numbers of a release with their intervals as error bars.

    Args:
        release: the release of a number, an array, or a tree of them.
        truth: the exact numbers, for comparison. A plot that shows exact numbers is not private.
        probability: the probability that a bar contains the exact number.
        simultaneous: whether this probability is for all numbers at once, instead of for each one.
        names: a label for each number; by default the labels of the release, or the index.
        unit: the unit of the numbers, for the label of the axis.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes. For a release of a table, they are labeled with the statistic and the columns.
        Numbers that represent dates or times are drawn as dates or times.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the release contains anything other than numbers.
        ValueError: if the truth has another shape, or names do not match the numbers.

    Formal guarantees:
        Bars are `release.interval`. If no interval is known there are no bars, and the legend says
        so. Without `truth` the plot shows nothing private.

    Source:
        None.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism, truth = dpjax.laplace(0.1, epsilon=1.0), jnp.array([1.0, 2.0])
        >>> release = mechanism(dpjax.random.seeded_key(0), truth)
        >>> axes = dpjax.plotting.release_with_error(release, truth, unit="mm")
        >>> axes.get_ylabel()
        'value [mm]'
    """
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(release.value)):
        raise TypeError(
            f"release must contain numbers, got {_checks.described(release.value)}: "
            f"{_instead(release)}"
        )
    _checks.fraction("probability", probability)
    values = _flat(estimate(release.value, release.accuracy))
    if truth is not None and _flat(truth).shape != values.shape:
        raise ValueError(
            f"truth must contain {len(values)} numbers, like the release, got "
            f"{_checks.described(truth)}"
        )
    if names is None:
        names = names_of(release.value, release.accuracy, release.labels)
    if len(names) != len(values):
        raise ValueError(
            f"names must have {len(values)} entries, one for each number, got {len(names)}"
        )
    ax, places = axes_or_new(ax), np.arange(len(values))
    labels = release.labels or Labels("value")
    # matplotlib counts dates and times in days since 1970.
    per = 86400.0 if labels.moments == "times" else 1.0
    if labels.moments in ("dates", "times"):
        ax.yaxis_date()
    at_once = " at once" if simultaneous and len(values) > 1 else ""
    try:
        low, high = map(_flat, release.interval(probability, simultaneous=simultaneous))
        reach = (values - low) / per, (high - values) / per
        label = f"{probability:.4g} interval{at_once}"
    except ValueError:  # The error message of `interval` explains why there is no interval.
        reach, label = None, "no interval is known"
    look = {"color": BLUE, "marker": "o", "linestyle": "none", "capsize": 3}
    ax.errorbar(places, values / per, yerr=reach, label=f"release, {label}", **look)
    if truth is not None:
        look = {"color": VERMILION, "marker": "x", "linestyle": "none", "zorder": 3}
        ax.plot(places, _flat(truth) / per, label="truth, not private", markersize=9, **look)
    ax.set_xlim(-0.5, len(values) - 0.5)
    slanted = {"rotation": 45, "ha": "right"} if sum(map(len, names)) > _MOST_IN_LINE else {}
    ax.set_xticks(places if any(names) else [], names if any(names) else [], **slanted)
    unit = "s" if labels.moments == "durations" and not unit else unit
    ax.set(xlabel=_axis_of(release, len(values)), ylabel=with_unit(labels.statistic, unit))
    return legend_above(ax, columns=1)


PLOT_OF_RELEASE.append(release_with_error)


def _axis_of(release: Release, numbers: int) -> str:
    """Returns the label of the axis of numbers: names of columns, if a release knows them."""
    if numbers == 1:
        return ""
    if release.labels is None or not jax.tree_util.all_leaves([release.value]):
        return "coordinate"
    axes = release.labels.axes_of("", np.ndim(release.value))
    return "coordinate" if None in axes else ", ".join(axis[0] for axis in axes if axis)


# If the names at an axis have more characters than this in total, they are slanted to fit.
_MOST_IN_LINE = 50


def _flat(tree: Any) -> np.ndarray:
    """Returns all numbers of a pytree as one float64 vector."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


# The number of points along each coordinate, by the number of coordinates.
_POINTS = {1: 201, 2: 65}
Interval = tuple[float, float]


def _instead(release: Release) -> str:
    """Returns what to plot in place of a release without numbers."""
    if isinstance(release.value, BernsteinPolynomial):
        return "plot polynomials by dpjax.plotting.released_function"
    if hasattr(release.value, "columns"):
        return "plot the columns of release.value"
    return "use release.value, or plot a release of counts, as table.count(by={column: keys})"


def released_function(
    released: BernsteinPolynomial,
    raw: Callable[[jax.Array], jax.Array] | None = None,
    *,
    error: float | None = None,
    domain: Sequence[Interval] | None = None,
    codomain: Interval = (0.0, 1.0),
    labels: Sequence[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots a released polynomial in one or two variables, and the raw function.

    In one variable, it plots four curves: the release, its error band, the raw function, and the
    Bernstein polynomial of the raw function, which has no noise. In two variables, it plots the
    release in colors, and contours of the raw function at the same levels.

    Args:
        released: the value of a release by `dpjax.bernstein`.
        raw: the function of the private database, from points of shape (dims,) in [0, 1]^dims to
            numbers. A plot of it is not private.
        error: half the width of the band around a release in one variable, in the units of the
            function. `mechanism.error(simultaneous=True)` returns a bound for all points at once.
            If several functions are released at once, also pass their released values to
            `mechanism.error`, in its argument `like`.
        domain: for each coordinate, the numbers that 0 and 1 represent; by default 0 and 1.
        codomain: the numbers that values 0 and 1 of the function represent.
        labels: labels with units, for the coordinates and then for the value.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes; in two variables their figure gets a color bar.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if the polynomial has more than two variables, the domain or the labels have
            another number of entries, or an error is given for two variables.

    Formal guarantees:
        Without `raw` the plot shows only the release.

    Source:
        Aldà and Rubinstein (2017); Rubinstein and Aldà (2017), Section 7.3.

    Example:
        >>> import dpjax
        >>> square = lambda x: x[0] ** 2
        >>> polynomial = dpjax.approximate_bernstein(square, degree=4, dims=1)
        >>> axes = dpjax.plotting.released_function(polynomial, square, error=0.1)
        >>> [line.get_label() for line in axes.get_lines()][0]
        'raw function, not private'
    """
    dims = released.dims
    if dims not in _POINTS:
        raise ValueError(f"released must have one or two variables, got {dims}")
    if dims == 2 and error is not None:
        raise ValueError(
            "error must be None for two variables: only the plot of one variable has an error band"
        )
    domain = [(0.0, 1.0)] * dims if domain is None else list(domain)
    if len(domain) != dims:
        raise ValueError(f"domain must be {dims} intervals, got {len(domain)}")
    if labels is None:
        names = ["x"] if dims == 1 else [f"x{i}" for i in range(dims)]
        labels = [*names, "value of the function"]
    if len(labels) != dims + 1:
        raise ValueError(
            f"labels must contain {dims + 1} texts, one for each coordinate and one for the value,"
            f" got {len(labels)}"
        )
    unit = np.linspace(0, 1, _POINTS[dims])
    grid = jnp.asarray(np.stack(np.meshgrid(*[unit] * dims, indexing="ij"), axis=-1), float)
    axes = [_scaled(unit, interval) for interval in domain]

    def values(function: Callable[[jax.Array], jax.Array]) -> np.ndarray:
        return _scaled(np.asarray(function(grid), np.float64), codomain)

    ax = axes_or_new(ax)
    ax.set(xlabel=labels[0], ylabel=labels[1])
    each = None if raw is None else functools.reduce(lambda f, _: jax.vmap(f), range(dims), raw)
    if dims == 2:
        _draw_map(ax, axes, values(released), None if each is None else values(each), labels[2])
        return ax
    (x,), y = axes, values(released)
    if raw is not None and each is not None:
        label = "raw function, not private"
        ax.plot(x, values(each), color=ink(), linestyle=":", linewidth=2, label=label)
        shape = {"degree": released.degree, "dims": 1, "order": released.order}
        smooth = values(approximate_bernstein(raw, **shape))
        label = "its Bernstein polynomial, not private"
        ax.plot(x, smooth, color=VERMILION, linestyle="--", label=label)
    if error is not None:
        width = abs(float(error) * (float(codomain[1]) - float(codomain[0])))
        look = {"color": BLUE, "alpha": 0.15, "linewidth": 0}
        ax.fill_between(x, y - width, y + width, label="error band of the noise", **look)
    ax.plot(x, y, color=BLUE, linewidth=2.5, label="private release")
    ax.margins(x=0)
    ax.legend(frameon=False)
    return ax


def _scaled(unit: np.ndarray, interval: Interval) -> np.ndarray:
    low, high = (float(end) for end in interval)
    return low + unit * (high - low)


def _draw_map(
    ax: "Axes", axes: list[np.ndarray], released: np.ndarray, raw: np.ndarray | None, label: str
) -> None:
    """Draws a map with coordinate 0 on the horizontal axis.

    Larger values have lighter colors. The order of lightness is the same in a gray print.
    """
    both = released if raw is None else np.stack([released, raw])
    low, high = float(both.min()), float(both.max())
    look = {"cmap": "cividis", "vmin": low, "vmax": high, "shading": "gouraud"}
    mesh = ax.pcolormesh(*axes, released.T, **look)
    bar = ax.figure.colorbar(mesh, ax=ax, label=f"private release: {label}")
    if raw is not None:
        # Contours are drawn at the ticks of the color bar. They are dark on light colors, and white
        # on dark colors.
        levels = [level for level in bar.get_ticks() if raw.min() < level < raw.max()]
        colors = ["white" if level < (low + high) / 2 else BLACK for level in levels]
        if levels:
            lines = ax.contour(*axes, raw.T, levels=levels, colors=colors, linestyles="--")
            ax.clabel(lines, fontsize="small")
        ax.set_title("contours: raw function, not private", fontsize="medium")
