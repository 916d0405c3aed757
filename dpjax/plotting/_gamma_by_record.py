"""Gamma of single records, over a feature of theirs."""

from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax.auditing._gamma_by_record import RecordGammas
from dpjax.plotting._axes import BLUE, SKY, axes_or_new, legend_above, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def gamma_by_record(
    found: RecordGammas, feature: ArrayLike, *, unit: str = "", ax: "Axes | None" = None
) -> "Axes":
    """Plots the gamma of each record, with its limits, over a feature of the records.

    Args:
        found: of `dpjax.gamma_by_record`.
        feature: a number for each record, such as a column of `found.records`.
        unit: of the feature.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the feature does not hold real numbers.
        ValueError: if it does not hold one for each record.

    Formal guarantees:
        Those of the limits, for all records at once.

    Source:
        None.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> found = dpjax.gamma_by_record(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.targets.summable(lambda x: x, average=True),
        ...     dpjax.oracles.independent(jax.random.exponential),
        ...     sensitivity=dpjax.assume_sensitivity(0.03, norm="l1"),
        ...     n=100,
        ...     records=20,
        ...     pairs=100,
        ... )
        >>> dpjax.plotting.gamma_by_record(found, found.records, unit="h").get_xlabel()
        'record [h]'
    """
    x = _checks.host_numbers("feature", feature).astype(np.float64)
    if x.shape != found.uncovered.shape:
        raise ValueError(f"feature must have shape {found.uncovered.shape}, got {x.shape}")
    ax = axes_or_new(ax)
    ax.vlines(x, found.lower, found.upper, color=SKY, label=f"limits, {found.confidence:g} for all")
    ax.plot(x, found.estimates, color=BLUE, marker="o", linestyle="none", label="uncovered pairs")
    ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel(with_unit("record", unit))
    ax.set_ylabel("gamma of the record")
    legend_above(ax)
    return ax
