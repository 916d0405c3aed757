"""A released function against the raw one."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.mechanisms._bernstein_polynomial import BernsteinPolynomial, approximate_bernstein
from dpjax.plotting._axes import BLACK, BLUE, VERMILION, axes_or_new, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = {1: 201, 2: 65}  # Along each coordinate.
Interval = tuple[float, float]


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

    In one variable, it plots curves: the release, its error band, the raw function, and the
    Bernstein polynomial of the raw function, which has no noise. In two, it plots the release in
    colors, and contours of the raw function at the same levels.

    Args:
        released: the value of a release by `dpjax.bernstein`.
        raw: the function of the private database, from points of shape (dims,) in [0, 1]^dims to
            numbers. A plot of it is not private.
        error: half the width of the band around the release in one variable, in the units of the
            function: `mechanism.error(simultaneous=True)` holds everywhere. Add `like=` for one of
            several functions in a release.
        domain: for each coordinate, the numbers that 0 and 1 stand for; by default 0 and 1.
        codomain: the numbers that values 0 and 1 of the function stand for.
        labels: with units, of the coordinates and then of the value.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes; in two variables their figure gets a color bar.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if the polynomial has more than two variables, the domain does not have one
            interval for each variable, labels are not one more than the variables, or an error is
            given for two variables.

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
        raise ValueError("error must be None for two variables, whose plot has no band")
    domain = [(0.0, 1.0)] * dims if domain is None else list(domain)
    if len(domain) != dims:
        raise ValueError(f"domain must be {dims} intervals, got {len(domain)}")
    if labels is None:
        names = ["x"] if dims == 1 else [f"x{i}" for i in range(dims)]
        labels = [*names, "value of the function"]
    if len(labels) != dims + 1:
        raise ValueError(f"labels must be {dims + 1}, of coordinates and value, got {len(labels)}")
    unit = np.linspace(0, 1, _POINTS[dims])
    grid = jnp.asarray(np.stack(np.meshgrid(*[unit] * dims, indexing="ij"), axis=-1), float)
    axes = [_scaled(unit, interval) for interval in domain]

    def values(function: Callable[[jax.Array], jax.Array]) -> np.ndarray:
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
        ax.plot(axes[0], raw_values, color=ink(), linestyle=":", linewidth=2, label=label)
        label = "its Bernstein polynomial, not private"
        ax.plot(axes[0], smooth, color=VERMILION, linestyle="--", label=label)
    _draw_release(ax, axes[0], values(released), error, codomain)
    return ax


def _scaled(unit: np.ndarray, interval: Interval) -> np.ndarray:
    low, high = (float(end) for end in interval)
    return low + unit * (high - low)


def _everywhere(
    function: Callable[[jax.Array], jax.Array], dims: int
) -> Callable[[jax.Array], jax.Array]:
    """A function of a point, applied to a grid of points."""

    def on_grid(grid: jax.Array) -> jax.Array:
        return jax.vmap(function)(grid.reshape(-1, dims)).reshape(grid.shape[:-1])

    return on_grid


def _draw_release(
    ax: "Axes", x: np.ndarray, y: np.ndarray, error: float | None, codomain: Interval
) -> None:
    if error is not None:
        width = abs(float(error) * (float(codomain[1]) - float(codomain[0])))
        look = {"color": BLUE, "alpha": 0.15, "linewidth": 0}
        ax.fill_between(x, y - width, y + width, label="error band of the noise", **look)
    ax.plot(x, y, color=BLUE, linewidth=2.5, label="private release")
    ax.margins(x=0)
    ax.legend(frameon=False)


def _draw_map(
    ax: "Axes", axes: list[np.ndarray], released: np.ndarray, raw: np.ndarray | None, label: str
) -> None:
    """Coordinate 0 runs to the right. Lightness grows with the value, also in print."""
    both = released if raw is None else np.stack([released, raw])
    low, high = float(both.min()), float(both.max())
    look = {"cmap": "cividis", "vmin": low, "vmax": high, "shading": "gouraud"}
    mesh = ax.pcolormesh(*axes, released.T, **look)
    bar = ax.figure.colorbar(mesh, ax=ax, label=f"private release: {label}")
    if raw is not None:
        # Contours lie at the ticks of the bar. They are dark on the light half of the colors.
        levels = [level for level in bar.get_ticks() if raw.min() < level < raw.max()]
        colors = ["white" if level < (low + high) / 2 else BLACK for level in levels]
        if levels:
            lines = ax.contour(*axes, raw.T, levels=levels, colors=colors, linestyles="--")
            ax.clabel(lines, fontsize="small")
        ax.set_title("contours: raw function, not private", fontsize="medium")
