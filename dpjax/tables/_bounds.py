"""Converts the public bounds of columns to numbers, and scales columns to vectors by them."""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax.tables._frame import Frame, numpy_of
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


@dataclasses.dataclass(frozen=True)
class Box:
    """The box that the bounds of some columns span.

    Attributes:
        columns: the names of the columns.
        lower: the lower ends.
        upper: the upper ends.
        in_ball: whether the box is scaled such that its corners are on the unit sphere. Otherwise
            it is scaled to the cube [-1, 1]^d.
    """

    columns: tuple[str, ...]
    lower: np.ndarray
    upper: np.ndarray
    in_ball: bool = False

    @property
    def middle(self) -> np.ndarray:
        """Returns the middle of the box."""
        return self.lower / 2 + self.upper / 2

    @property
    def size(self) -> np.ndarray:
        """Returns half the length of each edge.

        If `in_ball`, it returns the half-axes of the ellipsoid through the corners of the box. The
        ellipsoid is later scaled to the unit ball.
        """
        stretch = math.sqrt(len(self.columns)) if self.in_ball else 1.0
        return (self.upper / 2 - self.lower / 2) * stretch

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the middle and the size of the box in a form that JSON can store."""
        return {"middle": self.middle.tolist(), "size": self.size.tolist()}

    def vectors(self, frame: Frame) -> np.ndarray:
        """Returns the rows as vectors: clipped to the bounds, centered, and divided by `size`.

        The result for an entry depends on this entry alone. A missing number becomes the lower end
        of its bounds.
        """
        columns = [frame[name].numbers_or_nan() for name in self.columns]
        xp = numpy_of(*columns)
        numbers = xp.stack(columns, axis=1)
        lower, upper, middle, size = (
            xp.asarray(ends, numbers.dtype)[None]
            for ends in (self.lower, self.upper, self.middle, self.size)
        )
        clipped = xp.clip(xp.where(xp.isnan(numbers), lower, numbers), lower, upper)
        return ((clipped - middle) / size).astype(jnp.result_type(float))


def box_of(columns: Sequence[str], bounds: Bounds, frame: Frame, *, in_ball: bool = False) -> Box:
    """Returns the box of some columns, each with its own bounds."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, such as [{columns!r}], got {columns!r}")
    lower, upper = np.array([bounds_of(name, bounds, frame) for name in columns]).T
    return Box(tuple(columns), lower, upper, in_ball)
