"""The noise of mechanisms, side by side."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax.mechanisms._coordinatewise import CoordinatewiseMechanism
from dpjax.plotting._axes import axes_or_new, style, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 1_001
_SHOWN = 0.995  # The plotted part of the widest noise.


def noise(
    mechanisms: Mapping[str, Any],
    *,
    shape: tuple[int, ...] = (),
    probability: float = 0.95,
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the densities of the noise that mechanisms add to a coordinate.

    The noise stays between the two markers on its curve with a given probability.

    Args:
        mechanisms: by their names in the legend. They must have additive noise, or be `bernstein`,
            whose noise is that of a lattice value. The legend says if neighboring relations differ.
        shape: of the value: rounding a large vector to the grid costs a little scale.
        probability: of noise between the markers.
        unit: of the value.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if a mechanism does not add noise to numbers.
        ValueError: if no mechanism is given, one has no noise, or the probability is out of range.

    Formal guarantees:
        The scales are those of `effective_scale`. The real noise lies on lattice points, which are
        closer than any plot shows.

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
        raise ValueError("mechanisms must hold at least one, got none")
    for name, mechanism in mechanisms.items():
        if not isinstance(mechanism, CoordinatewiseMechanism):
            raise TypeError(
                f"mechanisms must add noise to numbers, got {type(mechanism).__name__} as {name!r}"
            )
    scales = {name: float(each.effective_scale(shape)) for name, each in mechanisms.items()}
    if min(scales.values()) <= 0:
        raise ValueError(f"mechanisms must add noise, got scales {_checks.shown(scales)}")
    tails = [
        scales[name] * each.noise.tail_quantile(1 - _SHOWN) for name, each in mechanisms.items()
    ]
    offsets = np.linspace(-max(tails), max(tails), _POINTS)
    relations = {name: each.guarantee.relation for name, each in mechanisms.items()}
    ax = axes_or_new(ax)
    for index, (name, mechanism) in enumerate(mechanisms.items()):
        inside = scales[name] * mechanism.noise.tail_quantile(1 - probability)
        # Markers must stand at points of the curve.
        at = np.union1d(offsets, [-inside, inside])
        log_density = mechanism.noise.log_density(jnp.asarray(at / scales[name], float))
        density = np.exp(np.asarray(log_density, np.float64)) / scales[name]
        marked = np.searchsorted(at, [-inside, inside]).tolist()
        label = f"{name}: {100 * probability:g}% within ±{inside:.3g}"
        if len(set(relations.values())) > 1:
            label += f", {relations[name]}"
        ax.plot(at, density, label=label, markevery=marked, **style(index))
    ax.set_ylim(bottom=0)
    ax.set_xlabel(with_unit("noise", unit))
    ax.set_ylabel(with_unit("probability density", f"1/{unit}" if unit else ""))
    ax.legend(frameon=False)
    return ax
