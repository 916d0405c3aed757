"""Public bounds of columns."""

from collections.abc import Mapping
from typing import TypeAlias

from dpjax._core import _checks
from dpjax.targets._clamping import check_interval

Ends: TypeAlias = tuple[float, float]
Bounds: TypeAlias = Ends | Mapping[str, Ends]
"""The ends of a column, or those of several columns by name."""


def bounds_of(column: str, bounds: Bounds) -> Ends:
    """The ends of one column."""
    if isinstance(bounds, Mapping):
        if column not in bounds:
            raise ValueError(
                f"bounds must hold the ends of column {column!r}, got those of"
                f" {_checks.shown(list(bounds))}"
            )
        bounds = bounds[column]
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(
            f"bounds of column {column!r} must be its lower and its upper end, as (0, 100), got"
            f" {_checks.shown(bounds)}"
        )
    low, high = bounds
    check_interval(low, high)
    return float(low), float(high)
