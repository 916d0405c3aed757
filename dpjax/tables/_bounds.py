"""Converts the public bounds of columns to numbers."""

import datetime
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from dpjax._core import _checks
from dpjax.tables._frame import Frame
from dpjax.targets._clamping import check_interval

Ends: TypeAlias = tuple[float, float]
End: TypeAlias = float | datetime.date | datetime.timedelta | np.datetime64 | np.timedelta64
"""A number; or a date, time or duration, for a column of that kind."""

Bounds: TypeAlias = tuple[End, End] | Mapping[str, tuple[End, End]]
"""The bounds of one column, or a dict of the bounds of several columns."""


def bounds_of(column: str, bounds: Bounds, frame: Frame) -> Ends:
    """Returns the bounds of one column, which may be dates, times or durations, as numbers."""
    if isinstance(bounds, Mapping):
        if column not in bounds:
            raise ValueError(
                f"bounds must contain bounds of column {column!r}, got bounds of "
                f"{_checks.shown(list(bounds))}"
            )
        bounds = bounds[column]
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(
            f"bounds of column {column!r} must be its lower and its upper end, as (0, 100), got"
            f" {_checks.shown(bounds)}"
        )
    low, high = (frame.number(column, end) for end in bounds)
    check_interval(low, high)
    return float(low), float(high)
