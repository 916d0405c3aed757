"""A released function against the raw one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.mechanisms._bernstein_polynomial import BernsteinPolynomial, approximate_bernstein
from dpjax.plotting._axes import BLACK, BLUE, VERMILION, axes_or_new

_POINTS = {1: 201, 2: 65}  # Along each coordinate.
Interval = tuple[float, float]


def released_function(
    released: BernsteinPolynomial,
    raw: Callable[[jax.Array], Any] | None = None,
    *,
    error: float | None = None,
    domain: Sequence[Interval] | None = None,
    codomain: Interval = (0.0, 1.0),
    labels: Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    """Plots a released polynomial in one or two variables, and what it is a release of.

    In one variable, curves: the release, its error band, the raw function, and the Bernstein
    polynomial of that, which is what would have been released without noise. In two, the release
    in colors, and contours of the raw function at the same levels.

    Args:
        released: the value of a release by `dpjax.bernstein`.
        raw: the function of the private database, which takes points of shape (dims,) in
            [0, 1]^dims to numbers; drawn, it is not private.
        error: half the width of the band around the release in one variable, in the units of the
            function: `mechanism.error(simultaneous=True)` holds everywhere;
            with `like=` where it was released as one of several.
        domain: what 0 and 1 are in each coordinate, in units; by default 0 and 1.
        codomain: what values 0 and 1 of the function are, in units.
        labels: with units, of the coordinates and then of the value.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes; in two variables their figure gets a color bar.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if the polynomial has more than two variables, there are not as many intervals
            as variables and labels as that and one, or an error is given for two.

    Formal guarantees:
        Without `raw` nothing is drawn but what was released.

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
        raise ValueError(f"released must have one or two variables to be drawn, got {dims}")
    if dims == 2 and error is not None:
        raise ValueError("error must be left out in two variables, where no band is drawn")
    domain = [(0.0, 1.0)] * dims if domain is None else list(domain)
    if len(domain) != dims:
        raise ValueError(f"domain must be {dims} intervals, got {len(domain)}")
    labels = _default_labels(dims) if labels is None else list(labels)
    if len(labels) != dims + 1:
        raise ValueError(f"labels must be {dims + 1}, of coordinates and value, got {len(labels)}")
    unit = np.linspace(0, 1, _POINTS[dims])
    grid = jnp.asarray(np.stack(np.meshgrid(*[unit] * dims, indexing="ij"), axis=-1), float)
    axes = [_scaled(unit, interval) for interval in domain]

    def values(function: Callable[[jax.Array], Any]) -> np.ndarray:
        return _scaled(np.asarray(function(grid), np.float64), codomain)

    ax = axes_or_new(ax)
    ax.set_xlabel(labels[0])
    ax.set_ylabel(labels[1])
    raw_values = None if raw is None else values(_everywhere(raw, dims))
    if dims == 2:
        _draw_map(ax, axes, values(released), raw_values, labels[2])
        return ax
    if raw is not None and raw_values is not None:
        shape = {"degree": released.degree, "dims": 1, "order": released.order}
        smooth = values(approximate_bernstein(raw, **shape))
        label = "raw function, not private"
        ax.plot(axes[0], raw_values, color=BLACK, linestyle=":", linewidth=2, label=label)
        label = "its Bernstein polynomial, not private"
        ax.plot(axes[0], smooth, color=VERMILION, linestyle="--", label=label)
    _draw_release(ax, axes[0], values(released), error, codomain)
    return ax


def _default_labels(dims: int) -> list[str]:
    names = ["x"] if dims == 1 else [f"x{i}" for i in range(dims)]
    return [*names, "value of the function"]


def _scaled(unit: np.ndarray, interval: Interval) -> np.ndarray:
    low, high = (float(end) for end in interval)
    return low + unit * (high - low)


def _everywhere(function: Callable[[jax.Array], Any], dims: int) -> Callable[[jax.Array], Any]:
    """A function of a point as one of a grid of points."""

    def on_grid(grid: jax.Array) -> Any:
        return jax.vmap(function)(grid.reshape(-1, dims)).reshape(grid.shape[:-1])

    return on_grid


def _draw_release(
    ax: Any, x: np.ndarray, y: np.ndarray, error: float | None, codomain: Interval
) -> None:
    if error is not None:
        width = abs(float(error) * (float(codomain[1]) - float(codomain[0])))
        look = {"color": BLUE, "alpha": 0.15, "linewidth": 0}
        ax.fill_between(x, y - width, y + width, label="error band of the noise", **look)
    ax.plot(x, y, color=BLUE, linewidth=2.5, label="private release")
    ax.margins(x=0)
    ax.legend(frameon=False)


def _draw_map(
    ax: Any, axes: list[np.ndarray], released: np.ndarray, raw: np.ndarray | None, label: str
) -> None:
    """Coordinate 0 runs to the right; lightness grows with the value in print too."""
    both = released if raw is None else np.stack([released, raw])
    low, high = float(both.min()), float(both.max())
    look = {"cmap": "cividis", "vmin": low, "vmax": high, "shading": "gouraud"}
    mesh = ax.pcolormesh(*axes, released.T, **look)
    bar = ax.figure.colorbar(mesh, ax=ax, label=f"private release: {label}")
    if raw is not None:
        # Where the bar has its ticks; dark on the light half of the colors.
        levels = [level for level in bar.get_ticks() if raw.min() < level < raw.max()]
        colors = ["white" if level < (low + high) / 2 else BLACK for level in levels]
        if levels:
            lines = ax.contour(*axes, raw.T, levels=levels, colors=colors, linestyles="--")
            ax.clabel(lines, fontsize="small")
        ax.set_title("contours: raw function, not private", fontsize="medium")
